"""Execution plans: the fastest execution of each layer by batch size, measured on this device and cached in a file."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dubito.models.disk import replace_by_draft
from dubito.models.errors import NumericsError
from dubito.models.network.geometry import Execution
from dubito.models.network.layers import FoldError, current, first_input
from dubito.models.network.network import Draws, Plan
from dubito.models.numerics.normals import Normals
from dubito.models.numerics.processor import processor
from dubito.models.numerics.proof import fault_in, name_of
from dubito.models.predictions.prediction import Job, evaluating
from dubito.service.engine.between import Between
from dubito.service.engine.executions import ROUNDINGS, SEEN, LayerCall, Pair, layer_of
from dubito.service.engine.fusion import Unit
from dubito.service.engine.pace import seconds_of

log = logging.getLogger("dubito")
RUNS = 3  # of each execution, unless the first run is too slow
HOPELESS = 2.0  # times the fastest: slower executions are not run again
JOINED = 0.98  # of the time of two layers by themselves: those that take more are not joined
NEAR = 4  # a plan is used for batches up to this many times larger or smaller
MOST = 1 << 16  # entries of the cache file


class Plans:
    """The plans of one model. A plan changes how a layer is computed, not its result."""

    def __init__(self, usual: Plan, cache: "PlanCache", seconds: float) -> None:
        """Measuring takes about `seconds` in all; layers that are not measured keep their execution of `usual`."""
        self.usual, self.cache, self.left = usual, cache, seconds
        self.bytes = 0  # device memory of the graphs
        self.wrong: set[tuple[str, Execution]] = set()  # executions with wrong results, by layer: never used
        self.known: dict[tuple[int, int], Plan] = {}
        self._at = lru_cache(maxsize=4096)(self._nearest)

    def at(self, B: int, K: int) -> Plan:
        """The plan for B inputs and K draws, or that of the nearest size measured."""
        return self.known.get((B, K)) or self._at(B, K)

    def _nearest(self, B: int, K: int) -> Plan:
        def distance(other: tuple[int, int]) -> float:
            return abs(math.log(other[0] / B)) + abs(math.log(other[1] / K))

        return self.known[min(self.known, key=distance)] if self.known else self.usual

    def measure(self, job: Job, K: int) -> None:
        """Measure each layer's executions on its inputs in a pass of K draws of the job's inputs.

        Skipped where a similar batch size was measured: the fastest execution changes slowly with it.
        """
        chosen, structure = dict(self.usual), job.factors.structure
        if not structure.layers or any(k == K and 1 / NEAR < B / job.B < NEAR for B, k in self.known):
            return

        def choose(unit: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            layer = layer_of(unit)
            x = first_input(inputs, named)
            run, name = current(layer, x), structure.names[layer]
            residual = inputs[1] if len(inputs) > 1 else None
            call = LayerCall(unit, x, residual, run.operands[layer](), run.K, run.channels_last)
            if (execution := self._fastest(name, call)) is not None:
                chosen[name] = alone[name] = execution
            if (waited := waiting.pop(unit, None)) is not None:
                before, read_alone = waited
                pair = Pair(before, call, job.factors.layers[name].projection, read_alone)
                call = self._together(pair, chosen, structure.names)
            if isinstance(unit, Unit) and unit.next is not None:
                waiting[unit.next.unit] = call, unit.next.alone

        alone = dict(chosen)  # the executions of layers that have nothing to do with their neighbours
        waiting: dict[nn.Module, tuple[LayerCall, bool]] = {}  # units whose outputs another one reads, by that one
        form = job.network.net if job.factors.form is None else job.factors.form
        units: list[nn.Module] = [m for m in form.modules() if isinstance(m, Unit)]
        within = {unit.layer for unit in units}
        units += [layer for layer in structure.layers.values() if layer not in within]
        with ExitStack() as hooks, evaluating(job.network), torch.inference_mode():
            draws = Draws(K, Normals(0, job.device).rows(K, job.factors.normals), 0)
            if job.factors.ahead:  # passes of requests are measured, not those that draw weights
                draws = replace(draws, stock=job.factors.stock(job.network, draws))
            for unit in units:
                hooks.enter_context(unit.register_forward_pre_hook(choose, with_kwargs=True))
            for between in (m for m in form.modules() if isinstance(m, Between)):
                hooks.enter_context(between.register_forward_pre_hook(self._choose_between))
            with suppress(FoldError):  # then draws run one by one
                job.factors.outputs(job.network, job.x, draws, lambda B, K: self.usual, job.B)
        self.known[job.B, K] = MappingProxyType(chosen)
        if self.wrong:  # wrong at one size: not used at any
            self.usual = self._without_wrong(self.usual, alone)
            self.known = {size: self._without_wrong(plan, alone) for size, plan in self.known.items()}
        self._at.cache_clear()

    def _together(self, pair: Pair, chosen: dict[str, Execution], names: Mapping[nn.Module, str]) -> LayerCall:
        """Whether the second unit's first product is faster within the first's kernel; the second as it is then."""
        first, then = (names[layer_of(call.unit)] for call in (pair.first, pair.then))
        remembered = self.cache.executions.get(pair.case)
        tried = [e for e in pair.executions if remembered in (None, e) and (first, e) not in self.wrong]
        if not tried or (then, "mixed") in self.wrong or (remembered is None and self.left <= 0):
            return pair.then
        try:
            right = [execution for execution in tried if self._joins(pair, execution, then)]
            if remembered is None and right:
                right = self._faster(pair, right, (chosen.get(first, "loop"), chosen.get(then, "loop")))
            if right:
                found = pair.handed_over(right[0], stored=True)
                chosen |= {first: right[0], then: "mixed"}
                return found
        except torch.OutOfMemoryError as error:
            log.info("layers are not joined", extra={"layer": then, "why": str(error)[:200]})
        return pair.then

    def _joins(self, pair: Pair, execution: Execution, then: str) -> bool:
        """Whether a pair's result is right; one that is wrong at any size is never used."""
        if (then, "mixed") in self.wrong:
            return False
        try:
            fault = pair.fault(execution)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a kernel too large for this GPU
            log.info("an execution is left out", extra={"why": str(error)[:200]})
            return False
        if fault is not None:
            log.warning("an execution is left out", extra={"layer": then, "why": fault})
            self.wrong.add((then, "mixed"))
        return fault is None

    def _faster(self, pair: Pair, executions: list[Execution], of_each: tuple[Execution, Execution]) -> list[Execution]:
        """The execution in which the pair is faster than each of it by itself, if there is one."""
        began, device = time.perf_counter(), pair.then.x.device
        times = {e: _seconds(partial(pair.together, e), device, math.inf) for e in executions}
        apart = _seconds(partial(pair.apart, *of_each), device, math.inf)
        best = min(times, key=times.__getitem__)
        self.left -= time.perf_counter() - began
        faster = times[best] < JOINED * apart
        if math.isfinite(times[best]) and math.isfinite(apart):
            self.cache.executions[pair.case] = best if faster else "loop"
        return [best] if faster else []

    def _choose_between(self, operator: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The fastest execution with right results of what runs between the layers; without time left, torch's."""
        assert isinstance(operator, Between)
        (x,) = inputs
        if not operator.suits(x):
            return
        case = operator.case(x)
        remembered = self.cache.executions.get(case)
        if remembered not in operator.executions:
            remembered = None if self.left > 0 else "loop"
        tried = operator.executions if remembered is None else (remembered,)
        right: list[Execution] = [e for e in tried if e == "loop" or _gives(operator, x, e)]
        chosen = right[0] if right else "loop"
        if remembered is None and len(right) > 1:
            began, times = time.perf_counter(), dict[Execution, float]()
            for execution in right:
                limit = HOPELESS * min(times.values(), default=math.inf)
                times[execution] = _seconds(partial(operator.compute, x, execution), x.device, limit)
            self.left -= time.perf_counter() - began
            best = min(times, key=times.__getitem__)
            if math.isfinite(times[best]):
                chosen = self.cache.executions[case] = best
        operator.chosen = MappingProxyType({**operator.chosen, len(x): chosen})

    def _without_wrong(self, plan: Plan, right: Plan) -> Plan:
        return MappingProxyType({name: right[name] if (name, e) in self.wrong else e for name, e in plan.items()})

    def _fastest(self, name: str, call: LayerCall) -> Execution | None:
        """The fastest execution with right results; None where there is only one. Without time left, the usual one."""
        if len(call.executions) < 2:
            return None
        expected = call.expected()
        remembered = self.cache.executions.get(call.case)
        if remembered in call.executions and self._right(name, call, remembered, expected):
            return remembered
        began, on_gpu = time.perf_counter(), call.x.is_cuda
        executions = call.executions if self.left > 0 else (self.usual.get(name, "loop"), *call.executions)
        right = (execution for execution in executions if self._right(name, call, execution, expected))
        chosen = list(right if self.left > 0 else islice(right, 1))
        if not chosen:
            dtype = name_of(call.x.dtype)
            raise NumericsError(f"layer {name!r} is computed wrongly in {dtype}, in each execution {call.executions}.")
        if self.left <= 0:
            return chosen[0]
        if on_gpu:  # the time to compile kernels does not count
            began = time.perf_counter()
        times = dict[Execution, float]()
        for execution in chosen:
            limit = HOPELESS * min(times.values(), default=math.inf)
            try:
                times[execution] = _seconds(partial(call.compute, execution), call.x.device, limit)
            except torch.OutOfMemoryError:  # another execution may need less
                times[execution] = math.inf
        self.left -= time.perf_counter() - began
        best = min(times, key=times.__getitem__)
        self.cache.executions[call.case] = best
        return best

    def _right(self, name: str, call: LayerCall, execution: Execution, expected: Tensor) -> bool:
        """Run an execution once and compare its result; one that is wrong at any size is never used."""
        if (name, execution) in self.wrong:
            return False
        try:
            fault = call.fault(execution, expected)
        except torch.OutOfMemoryError:  # raised again when it is timed
            return True
        except Exception as error:
            if not call.x.is_cuda or isinstance(error, torch.AcceleratorError):
                raise
            log.info("an execution is left out", extra={"why": str(error)[:200]})  # a kernel too large for this GPU
            return False
        if fault is not None:
            self.wrong.add((name, execution))
            log.warning("an execution is left out", extra={"layer": name, "why": fault})
        return fault is None


def _gives(operator: Between, x: Tensor, execution: Execution) -> bool:
    """Whether a kernel's result is torch's, in the first and last rows; one that is wrong at any size is never used."""
    if execution in operator.wrong:
        return False
    try:
        found, what = operator.compute(x, execution), f"{execution!r} of a {type(operator).__name__}"
        for some in (slice(SEEN), slice(-SEEN, None)):
            fault = fault_in(what, found[some], operator.compute(x[some], "loop"), ROUNDINGS)
            if fault is not None:
                break
    except torch.AcceleratorError:
        raise
    except torch.OutOfMemoryError:  # torch's may need less
        return False
    except Exception as error:  # a kernel too large for this GPU
        fault = str(error)[:200]
    if fault is not None:
        operator.wrong.add(execution)
        log.warning("an execution is left out", extra={"why": fault})
    return fault is None


def _seconds(run: Callable[[], object], device: torch.device, limit: float) -> float:
    """Seconds of the fastest of a few runs; of the first one alone if it exceeds the limit."""
    if device.type == "cuda":
        return _as_graph(run, device)
    first = seconds_of(run)
    return first if first > limit else min(first, *(seconds_of(run) for _ in range(RUNS - 1)))


def _as_graph(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a run inside a CUDA graph, as it is run when serving; infinite where it cannot be captured."""
    try:
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(RUNS):
                run()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
        graph.replay()
        for mark in marks[:-1]:
            mark.record()
            graph.replay()
        marks[-1].record()
        marks[-1].synchronize()
        fastest: float = min(a.elapsed_time(b) for a, b in pairwise(marks))
        return fastest / 1000 / RUNS
    except torch.AcceleratorError:
        raise
    except Exception as error:  # out of memory, or triton's error for a kernel that is too large for this GPU
        log.info("an execution is left out", extra={"why": str(error)[:200]})
        return math.inf


class PlanCache:
    """Measured executions by device and torch version, cached in a file; with path None, in memory only."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.path, self.device = path, _name(device)
        self.executions: dict[str, Execution] = self._read().get(self.device, {})

    def save(self) -> None:
        """Write the file atomically; entries of other devices are kept."""
        if self.path is None:
            return
        try:
            everything = self._read()
            everything[self.device] = dict([*everything.get(self.device, {}).items(), *self.executions.items()][-MOST:])
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_by_draft(self.path, json.dumps(everything).encode())
        except OSError as error:
            log.warning("plans cannot be remembered", extra={"error": str(error)})
            self.path = None

    def _read(self) -> dict[str, dict[str, Execution]]:
        """The file's contents; empty if it is missing or not valid."""
        try:
            entries = json.loads(self.path.read_text()) if self.path is not None else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, MemoryError) as error:  # the file is damaged: measured anew
            log.warning("remembered plans cannot be read", extra={"error": str(error)})
            return {}
        known = get_args(Execution)
        devices = entries.items() if isinstance(entries, dict) else ()
        return {
            name: {case: e for case, e in cases.items() if e in known}
            for name, cases in devices
            if isinstance(cases, dict)
        }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{kind}, torch {torch.__version__}"


def plan_file() -> Path:
    """The cache file, in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dubito" / "plans.json"
