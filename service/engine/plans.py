"""Execution plans: for each size of batch the fastest way of each layer, measured on this device and remembered."""

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dubito.models.errors import NumericsError
from dubito.models.network.geometry import How
from dubito.models.network.layers import BayesianLayer, FoldError, current
from dubito.models.network.network import Draws, Plan
from dubito.models.numerics.normals import Normals
from dubito.models.numerics.proof import name_of
from dubito.models.predictions.prediction import Job, evaluating
from dubito.service.engine.fusion import Unit
from dubito.service.engine.ways import Reached

log = logging.getLogger("dubito")
RUNS = 3  # of each way that is not out of the question after one
HOPELESS = 2.0  # times the fastest
NEAR = 4  # times as many inputs
MOST = 1 << 16  # ways that a file holds


class Plans:
    """Of one model. Plans change how a layer is computed, never what."""

    def __init__(self, usual: Plan, memory: "Memory", seconds: float) -> None:
        """Measuring takes about so many seconds in all; what is not measured is done the usual way."""
        self.usual, self.memory, self.left = usual, memory, seconds
        self.bytes = 0  # that plans keep on the device, beside the factors
        self.wrong: set[tuple[str, How]] = set()  # ways that gave wrong answers, by layer: never taken
        self.known: dict[tuple[int, int], Plan] = {}
        self._at = lru_cache(maxsize=4096)(self._nearest)

    def at(self, B: int, K: int) -> Plan:
        """For B inputs and K samples: as measured, or as the nearest size that was."""
        return self.known.get((B, K)) or self._at(B, K)

    def _nearest(self, B: int, K: int) -> Plan:
        def distance(other: tuple[int, int]) -> float:
            return abs(math.log(other[0] / B)) + abs(math.log(other[1] / K))

        return self.known[min(self.known, key=distance)] if self.known else self.usual

    def measure(self, job: Job, K: int) -> None:
        """Each layer's ways, on what reaches it in a pass of K samples of the job's inputs.

        Not where a size near it is known: what is fastest changes slowly with the batch.
        """
        found, structure = dict(self.usual), job.factors.structure
        if not structure.layers or any(k == K and 1 / NEAR < B / job.B < NEAR for B, k in self.known):
            return

        def choose(unit: nn.Module, inputs: tuple[Any, ...]) -> None:
            layer = unit.layer if isinstance(unit, Unit) else unit
            assert isinstance(layer, BayesianLayer)
            run, name = current(layer, inputs[0]), structure.names[layer]
            residual = inputs[1] if len(inputs) > 1 else None
            reached = Reached(unit, inputs[0], residual, run.operands[layer](), run.K, run.channels_last)
            if (way := self._fastest(name, reached)) is not None:
                found[name] = way

        form = job.network.net if job.factors.form is None else job.factors.form
        units: list[nn.Module] = [m for m in form.modules() if isinstance(m, Unit)]
        within = {unit.layer for unit in units}
        units += [layer for layer in structure.layers.values() if layer not in within]
        hooks = [unit.register_forward_pre_hook(choose) for unit in units]
        try:
            with evaluating(job.network), torch.inference_mode(), suppress(FoldError):  # then samples go one by one
                draws = Draws(K, Normals(0, job.device).rows(K, job.factors.normals), 0)
                job.factors.outputs(job.network, job.x, draws, lambda B, K: self.usual, job.B)
        finally:
            for hook in hooks:
                hook.remove()
        self.known[job.B, K] = MappingProxyType(found)
        if self.wrong:  # at one size, so nowhere else either
            self.usual = self._without_wrong(self.usual, found)
            self.known = {size: self._without_wrong(plan, found) for size, plan in self.known.items()}
        self._at.cache_clear()

    def _without_wrong(self, plan: Plan, right: Plan) -> Plan:
        return MappingProxyType({name: right[name] if (name, way) in self.wrong else way for name, way in plan.items()})

    def _fastest(self, name: str, reached: Reached) -> How | None:
        """Of the ways that are right; None where there is nothing to choose. Without time to measure, the usual one."""
        if len(reached.ways) < 2:
            return None
        expected = reached.expected()
        remembered = self.memory.ways.get(reached.case)
        if remembered in reached.ways and self._right(name, reached, remembered, expected):
            return remembered
        began, on_gpu = time.perf_counter(), reached.x.is_cuda
        ways = reached.ways if self.left > 0 else (self.usual.get(name, "loop"), *reached.ways)
        right = (way for way in ways if self._right(name, reached, way, expected))
        chosen = list(right if self.left > 0 else islice(right, 1))
        if not chosen:
            told = name_of(reached.x.dtype)
            raise NumericsError(f"layer {name!r} is computed wrongly in {told}, in each of the ways {reached.ways}.")
        if self.left <= 0:
            return chosen[0]
        if on_gpu:  # kernels have been compiled: that is not what takes the time
            began = time.perf_counter()
        times = dict[How, float]()
        for way in chosen:
            limit = HOPELESS * min(times.values(), default=math.inf)
            try:
                times[way] = _seconds(partial(reached.compute, way), reached.x.device, limit)
            except torch.OutOfMemoryError:  # another way may need less
                times[way] = math.inf
        self.left -= time.perf_counter() - began
        best = min(times, key=times.__getitem__)
        self.memory.ways[reached.case] = best
        return best

    def _right(self, name: str, reached: Reached, way: How, expected: Tensor) -> bool:
        """Runs it once; what is wrong at one size is never taken at another."""
        if (name, way) in self.wrong:
            return False
        try:
            fault = reached.fault(way, expected)
        except torch.OutOfMemoryError:  # seen again when it is timed
            return True
        except Exception as error:
            if not reached.x.is_cuda or isinstance(error, torch.AcceleratorError):
                raise
            log.info("a way is left out", extra={"why": str(error)[:200]})  # a kernel that does not fit this GPU
            return False
        if fault is not None:
            self.wrong.add((name, way))
            log.warning("a way is left out", extra={"layer": name, "why": fault})
        return fault is None


def _seconds(run: Callable[[], object], device: torch.device, limit: float) -> float:
    """The shortest of a few runs, of what has run before; of the first alone where it takes longer than the limit."""
    if device.type == "cuda":
        return _as_graph(run, device)
    first = _once(run)
    return first if first > limit else min(first, *(_once(run) for _ in range(RUNS - 1)))


def _as_graph(run: Callable[[], object], device: torch.device) -> float:
    """Of a few runs in a captured graph, as they will be run; infinite where that cannot be."""
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
    except Exception as error:  # out of memory, or a kernel that does not fit this GPU, which triton's own error says
        log.info("a way is left out", extra={"why": str(error)[:200]})
        return math.inf


def _once(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Memory:
    """A small file of what was measured, for each device and version of torch; without one, all is measured anew."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.path, self.device = path, _name(device)
        self.ways: dict[str, How] = self._read().get(self.device, {})

    def save(self) -> None:
        """Whole or not at all; what other devices have there stays."""
        if self.path is None:
            return
        try:
            everything = self._read()
            everything[self.device] = dict([*everything.get(self.device, {}).items(), *self.ways.items()][-MOST:])
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(everything))
            draft.replace(self.path)
        except OSError as error:
            log.warning("plans cannot be remembered", extra={"error": str(error)})
            self.path = None

    def _read(self) -> dict[str, dict[str, How]]:
        """A file that says something else is as good as none."""
        try:
            told = json.loads(self.path.read_text()) if self.path is not None else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("remembered plans cannot be read", extra={"error": str(error)})
            return {}
        known = get_args(How)
        if not isinstance(told, dict) or not all(isinstance(ways, dict) for ways in told.values()):
            return {}
        return {name: {case: way for case, way in ways.items() if way in known} for name, ways in told.items()}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"{kind}, torch {torch.__version__}"


def plan_file() -> Path:
    """Where caches of the user live."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dubito" / "plans.json"
