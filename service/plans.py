"""Execution plans: for each size of batch the fastest way of each layer, measured on this device and remembered."""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dubito.models.geometry import Conv, Geometry, How, apply
from dubito.models.layers import BayesianLayer, FoldError, current
from dubito.models.network import Draws
from dubito.models.normals import Normals
from dubito.models.plan import Plan
from dubito.models.posterior import Dense, Factored, Operand
from dubito.models.prediction import Job, evaluating
from dubito.service.fusion import Unit

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
            run = current(layer, inputs[0])
            operand = run.operands[layer]()
            if (way := self._fastest(unit, inputs, operand, run.K, run.channels_last)) is not None:
                found[structure.names[layer]] = way

        form = job.network.net if job.factors.form is None else job.factors.form
        units: list[nn.Module] = [m for m in form.modules() if isinstance(m, Unit)]
        within = {unit.layer for unit in units}
        units += [layer for layer in structure.layers.values() if layer not in within]
        hooks = [unit.register_forward_pre_hook(choose) for unit in units]
        try:
            with evaluating(job.network), torch.inference_mode(), suppress(FoldError):  # then samples go one by one
                draws = Draws(K, Normals(0, job.device).rows(K, job.factors.normals), 0)
                job.network.go(job.x, job.network.arrange(job.factors, draws, self.usual))
        finally:
            for hook in hooks:
                hook.remove()
        self.known[job.B, K] = MappingProxyType(found)
        self._at.cache_clear()

    def _fastest(
        self, unit: nn.Module, inputs: tuple[Any, ...], operand: Operand, K: int, channels_last: bool
    ) -> How | None:
        """None where there is nothing to choose, or no time is left to measure."""
        x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
        if isinstance(unit, Unit):
            geometry, follows = unit.geometry, (unit.norm is not None, residual is not None, unit.relu)
            ways = ways_of(geometry, operand, K) + kernel_ways(geometry, operand, x)
            compute: Callable[[How], Tensor] = partial(_of_unit, unit, x, residual, operand, K, channels_last)
        else:
            assert isinstance(unit, BayesianLayer)
            geometry, follows = unit.geometry, None
            ways = ways_of(geometry, operand, K)
            compute = partial(_of_layer, geometry, x, operand, K, channels_last)
        if len(ways) < 2:
            return None
        case = _case(geometry, x, operand, K, channels_last, follows)
        if (remembered := self.memory.ways.get(case)) in ways:
            return remembered
        if self.left <= 0:
            return None
        if x.is_cuda:  # kernels are compiled first: that is not what takes the time
            for way in ways:
                with suppress(Exception):  # seen again when it is timed
                    compute(way)
        began, times = time.perf_counter(), dict[How, float]()
        for way in ways:
            limit = HOPELESS * min(times.values(), default=math.inf)
            try:
                times[way] = _seconds(partial(compute, way), x.device, limit)
            except torch.OutOfMemoryError:  # another way may need less
                times[way] = math.inf
        self.left -= time.perf_counter() - began
        best = min(times, key=times.__getitem__)
        self.memory.ways[case] = best
        return best


def ways_of(geometry: Geometry, operand: Operand, K: int) -> tuple[How, ...]:
    """In which the operand can be applied, all to the same result."""
    dense: tuple[How, ...] = ("loop",)
    if K > 1:
        dense = ("loop", "batch", "unfold") if isinstance(geometry, Conv) else ("loop", "batch")
    match operand:
        case Factored():
            return ("factored", *dense)
        case Dense(W) if len(W) > 1:
            return dense
    return ()


def kernel_ways(geometry: Geometry, operand: Operand, x: Tensor) -> tuple[How, ...]:
    """Those of a GPU's kernels, in half precision: in float32 they would not use its matrix units."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return ()
    from dubito.service.kernels import suits

    if not suits(geometry):
        return ()
    match operand:
        case Factored(_, _, e) if geometry.taps_first:
            return ("fused", "parted", "grouped") if e is None else ("fused", "parted")
        case Dense(W) if len(W) > 1:
            return ("grouped",)
    return ()


def _of_unit(
    unit: Unit, x: Tensor, residual: Tensor | None, operand: Operand, K: int, channels_last: bool, how: How
) -> Tensor:
    return unit.compute(x, residual, operand, K, how, channels_last)


def _of_layer(geometry: Geometry, x: Tensor, operand: Operand, K: int, channels_last: bool, how: How) -> Tensor:
    return apply(geometry, x, operand, K, how, channels_last)


def _seconds(run: Callable[[], object], device: torch.device, limit: float) -> float:
    """The shortest of a few runs after one; of that one alone where it takes longer than the limit."""
    if device.type == "cuda":
        return _as_graph(run, device)
    first = _once(run)
    second = _once(run)
    if min(first, second) > limit:
        return min(first, second)
    return min(second, *(_once(run) for _ in range(RUNS - 1)))


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


def _case(
    geometry: Geometry, x: Tensor, operand: Operand, K: int, channels_last: bool, follows: tuple[bool, ...] | None
) -> str:
    """What decides which way is fastest, in few letters."""
    r = (operand.B.shape[1], operand.e is not None) if isinstance(operand, Factored) else None
    told = (str(geometry), tuple(x.shape), str(x.dtype), r, K, channels_last, follows)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


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
