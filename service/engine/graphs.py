"""Passes captured as CUDA graphs: one launch makes K posterior draws and runs the network on B inputs."""

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.models.errors import first_line
from dubito.models.network.geometry import Conv
from dubito.models.network.layers import Reading, Run
from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors, Plan
from dubito.models.numerics.normals import Normals, counted
from dubito.models.numerics.streams import stream
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Job, evaluating, sums_of, tempered, with_distances
from dubito.models.predictions.uncertainty import Reals, class_sums, on_host
from dubito.service.engine.between import with_between
from dubito.service.engine.fusion import Unit, difference_of, with_units

log = logging.getLogger("dubito")
WARM = 2  # runs before a capture, which compile kernels and allocate workspaces
TIMED = 4  # runs after it, of which the fastest counts
BETWEEN = 0.001  # upper estimate of the seconds that the device waits for the host between two passes


def for_gpu(model: Model) -> Model:
    """The same model with units, kernels between them, and stacked factors for layers that are drawn together."""
    model = with_units(model)
    if model.factors.form is None:
        return model
    model = _with_between(model, model.factors.form)
    assert model.factors.form is not None
    return replace(model, made=tap_by_tap(model.factors, model.factors.form).gathered())


def _with_between(model: Model, form: nn.Module) -> Model:
    """The same model with kernels between its units; as it is where it cannot be traced, or would answer otherwise."""
    if form is model.network.net:
        return model
    try:
        changed = replace(model, made=replace(model.factors, form=with_between(form)))
        difference = difference_of(model, changed)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        difference = first_line(error)
    if difference is None:
        return changed
    log.warning("what runs between layers is torch's", extra={"why": difference})
    return model


def tap_by_tap(factors: NetworkFactors, form: nn.Module) -> NetworkFactors:
    """Factors for a network of units: B of convolutions ordered tap by tap, channels last, where no W is formed."""
    layers = dict(factors.layers)
    for unit in form.modules():
        if not isinstance(unit, Unit):
            continue
        name, channels = factors.structure.names[unit.layer], unit.geometry.inputs // unit.geometry.groups
        reordered = factors.layers[name].tap_by_tap(channels, unit.geometry.bias)
        if reordered is not None:
            if isinstance(unit.geometry, Conv):
                unit.geometry = replace(unit.geometry, taps_first=True)
            layers[name] = reordered
    return replace(factors, layers=MappingProxyType(layers), form=form)


def first_alone(run: Run) -> bool:
    """Whether a pass reads the inputs of the first draw alone: they are those of all, and go to one layer."""
    units = () if run.form is None else run.form.modules()
    return any(isinstance(u, Unit) and u.shared and run.plan.get(u.layer) == "parted" for u in units)


def _summed(out: Tensor, network: BayesianNetwork, read: Reading | None) -> Tensor:
    """`sums_of` all draws, by a kernel where there is one."""
    logits, distance = with_distances(out, read) if network.task.kind == "classification" else (None, None)
    if logits is not None and logits.dim() == 3 and _sums_by_kernel(out.device, logits.shape[2]):
        from dubito.service.engine.plain_kernels import class_sums

        return class_sums(logits, distance)
    return sums_of(network, read)(out)


@cache
def _sums_by_kernel(device: torch.device, classes: int) -> bool:
    """Whether the kernel that sums over draws is there, and right on this device."""
    if find_spec("triton") is None:
        return False
    from dubito.service.engine.plain_kernels import WIDEST
    from dubito.service.engine.plain_kernels import class_sums as by_kernel

    if classes > WIDEST:
        return False
    logits = 10 * torch.randn(5, 3, classes, generator=torch.Generator().manual_seed(0)).to(device)
    distance = logits[..., 0].abs()
    try:
        torch.testing.assert_close(by_kernel(logits, distance), class_sums(logits, distance), rtol=1e-9, atol=1e-9)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # AssertionError, or a kernel that this GPU does not take
        log.warning("sums over draws are torch's", extra={"why": first_line(error)})
        return False
    return True


class PinnedInputs:
    """Pinned host memory from which a graph copies its inputs, seed and first draw. The graphs of a model share it,
    since only one runs at a time."""

    def __init__(self, most: int, x: Tensor) -> None:
        """For at most `most` inputs of the shape and dtype of `x` (B, ...)."""
        self.device = x.device
        wide = torch.float32 if x.is_floating_point() else x.dtype  # cast to x.dtype on the device
        self.x = torch.zeros((most, *x.shape[1:]), dtype=wide, pin_memory=True)
        self.key = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._x, self._key = self.x.numpy(), self.key.numpy()
        self._bytes = self._x.data.cast("B")
        self._row = self._x.nbytes // most
        self._idle = True
        self._held: tuple[weakref.ref[Tensor], int] | None = None  # the tensor that was copied last, and its B

    def put(self, parts: Sequence[NDArray[Any]], B: int) -> NDArray[Any]:
        """Copy the inputs of the next pass, padded to B with the first one; returns them without padding.

        Copied as bytes: numpy would release the GIL for each part, and the device would wait for other threads.
        """
        self.wait()
        self._held = None
        to, end = self._bytes, 0
        for part in parts:
            assert part.shape[1:] == self._x.shape[1:]
            given = np.ascontiguousarray(part, self._x.dtype).data.cast("B")
            to[end : end + given.nbytes] = given
            end += given.nbytes
        for start in range(end, B * self._row, self._row):
            to[start : start + self._row] = to[: self._row]
        return self._x[: end // self._row]

    def hold(self, x: Tensor, B: int) -> None:
        """`put` for a tensor, unless it is already there, as it is for further draws of the same inputs."""
        if self._held is None or self._held[0]() is not x or self._held[1] != B:
            self.put([on_host(x.to(dtype=self.x.dtype))], B)
            self._held = weakref.ref(x), B

    def begin(self, graph: torch.cuda.CUDAGraph, seed: int, start: int) -> None:
        self.wait()
        self._key[:] = seed, start
        self._idle = False
        graph.replay()

    def wait(self) -> None:
        """Wait for the running graph, which uses the buffers that the host reads or writes next."""
        if not self._idle:
            torch.cuda.current_stream(self.device).synchronize()
            self._idle = True


class PassGraph:
    """The graph of one pass: B inputs and K draws. A seed gives the same draws as it does without a graph."""

    def __init__(
        self,
        network: BayesianNetwork,
        factors: NetworkFactors,
        x: Tensor,
        K: int,
        plan: Plan,
        temperature: float,
        port: PinnedInputs,
        pool: Any,
    ):
        """Captures a pass on inputs of the shape and dtype of `x` (B, ...)."""
        self.port, self.B = port, len(x)
        self._sums: Tensor | None = None

        def once() -> Tensor:
            key = port.key.to(x.device, non_blocking=True)
            run = network.arrange(factors, Draws(K, None, 0, key=key), plan)  # draws begin while the inputs come
            inputs = port.x[: len(x)].to(x.device, non_blocking=True).to(x.dtype)
            out = network.go(inputs, replace(run, first_alone=first_alone(run)))
            for wait in run.begun:
                wait()
            out = tempered(out, temperature, factors.read)
            sums = _summed(out, network, factors.read)
            if self._sums is None:
                self._sums = torch.zeros(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            return out

        side = stream(x.device, "trial")
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for _ in range(WARM):
                once()
        torch.cuda.current_stream(x.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._outputs = once()
        self.seconds = min(self._time() for _ in range(TIMED))

    def _time(self) -> float:
        began = time.perf_counter()
        self.go(0, 0)
        self.port.wait()
        return time.perf_counter() - began

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        normals.skip(draws.K)
        self.port.hold(x, self.B)
        self.go(draws.seed, draws.start)
        return self.fetch()[: len(x)]

    def put(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Copy the inputs of the next pass; any graph of the model that puts inputs overwrites them."""
        return self.port.put(parts, self.B)

    def go(self, seed: int, start: int) -> Tensor:
        """Launch the graph; returns its output tensor, which the next launch overwrites."""
        self.port.begin(self.graph, seed, start)
        return self._outputs

    def fetch(self) -> Reals:
        """Wait for the last `go`; returns the sums over its draws."""
        self.port.wait()
        assert self._sums is not None
        return self._sums.numpy().copy()


class PassGraphs:
    """The graphs of one model by B and K; passes that cannot be captured run without one."""

    def __init__(self, network: BayesianNetwork, factors: NetworkFactors, most: int) -> None:
        """For at most `most` inputs."""
        self.network, self.factors, self.most = network, factors, most
        self.known: dict[tuple[int, int], PassGraph] = {}
        self._answers: dict[tuple[int, int], bool] = {}
        self._rates: dict[int, list[float]] = {}
        self._port: PinnedInputs | None = None
        self._pool: Any = None

    def capture(self, job: Job, K: int) -> None:
        """Capture a pass of K draws of the job's inputs, where it fits one pass."""
        capturable = counted(self.factors.device) and self.factors.capturable
        if not capturable or (job.B, K) in self.known or job.max_rows < job.B * K:
            return
        if K > 1 and not self.network.learned.folds:
            return
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        plan = job.plan(job.B, K)
        try:
            with evaluating(self.network), torch.inference_mode():
                port = self._port = self._port or PinnedInputs(self.most, job.x)
                graph = PassGraph(self.network, self.factors, job.x, K, plan, job.temperature, port, self._pool)
        except Exception as error:  # a network that synchronises, too little memory, a kernel too large for this GPU
            torch.cuda.synchronize(job.device)  # raises again if the device itself is broken
            log.warning("a pass is not captured", extra={"inputs": job.B, "samples": K, "why": str(error)[:200]})
            return
        self.known[job.B, K] = graph
        self._answers.clear()
        self._rates.clear()

    def at(self, B: int, K: int) -> PassGraph | None:
        return self.known.get((B, K))

    def answers(self, B: int, K: int) -> bool:
        """Whether graphs compute K draws of B inputs, in one pass or several."""
        if (B, K) not in self._answers:  # cached: called for each request
            most = max((k for b, k in self.known if b == B), default=0)
            self._answers[B, K] = (B, min(K, most)) in self.known
        return self._answers[B, K]

    def rates(self, K: int) -> list[float]:
        """Inputs per second, with K draws each, of a graph that gets 0, 1, 2, ... inputs."""
        if K not in self._rates:
            takes = sorted((B, one.seconds + BETWEEN) for (B, k), one in self.known.items() if k == K)
            self._rates[K] = [0.0]
            for B, seconds in takes:
                self._rates[K] += [n / seconds for n in range(len(self._rates[K]), B + 1)]
        return self._rates[K]
