"""Passes captured as CUDA graphs: one launch draws the weights of K samples and runs the network on B inputs."""

import logging
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dubito.models.geometry import Conv
from dubito.models.inducing import InducingFactors
from dubito.models.model import Model
from dubito.models.network import BayesianNetwork, Draws, NetworkFactors
from dubito.models.normals import counted
from dubito.models.plan import Plan
from dubito.models.prediction import Job, evaluating, foldable, sums_of
from dubito.models.together import gather
from dubito.service.fusion import Unit, fuse

log = logging.getLogger("dubito")
WARM = 2  # runs before a capture: kernels are compiled, workspaces taken


def for_gpu(model: Model) -> Model:
    """The same model with its layers as units, and the factors of layers that are drawn together side by side."""
    if not model.factors.structure.layers:
        return model
    with evaluating(model.network):
        form = fuse(model.network.net, model.device)
    return replace(model, made=gather(tap_by_tap(model.factors, form)))


def tap_by_tap(factors: NetworkFactors, form: nn.Module) -> NetworkFactors:
    """For a network in this form: B's of convolutions lie as pictures do, channels last, where no W is formed."""
    layers = dict(factors.layers)
    for unit in form.modules():
        if not isinstance(unit, Unit) or not isinstance(unit.geometry, Conv) or unit.geometry.bias:
            continue
        name, channels = factors.structure.names[unit.layer], unit.geometry.inputs // unit.geometry.groups
        f = factors.layers[name]
        if isinstance(f, InducingFactors) and not f.forms_W:
            unit.geometry = replace(unit.geometry, taps_first=True)
            layers[name] = f.reordered(channels)
    return replace(factors, layers=MappingProxyType(layers), form=form)


class Program:
    """Of B inputs and K samples. The same seed gives the same draws as without it."""

    def __init__(
        self,
        network: BayesianNetwork,
        factors: NetworkFactors,
        x: Tensor,
        K: int,
        plan: Plan,
        temperature: float,
        pool: Any,
    ):
        """`x` (B, ...) stands for inputs of its shape and type."""
        self.x, self.key = x.clone(), torch.zeros(2, dtype=torch.int64, device=x.device)

        def once() -> tuple[Tensor, Tensor]:
            out = network.go(self.x, network.arrange(factors, Draws(K, None, 0, key=self.key), plan))
            out = out / temperature if temperature != 1 else out
            return out, sums_of(network)(out)

        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            for _ in range(WARM):
                once()
        torch.cuda.current_stream(x.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._outputs, self._sums = once()

    def outputs(self, x: Tensor, seed: int, start: int) -> Tensor:
        self._go(x, seed, start)
        return self._outputs.clone()

    def sums(self, x: Tensor, seed: int, start: int) -> Tensor:
        self._go(x, seed, start)
        return self._sums.clone()

    def _go(self, x: Tensor, seed: int, start: int) -> None:
        self.x.copy_(x)
        self.key.copy_(torch.tensor([seed, start]), non_blocking=True)
        self.graph.replay()


def capturable(factors: NetworkFactors) -> bool:
    """Draws must come from normals alone: the order of an ensemble's members is the host's."""
    return counted(factors.device) and factors.normals > 0 and factors.members == 0 and factors.subnetwork is None


class Programs:
    """The captured passes of one model, by size; what cannot be captured is run as it comes."""

    def __init__(self, network: BayesianNetwork, factors: NetworkFactors) -> None:
        self.network, self.factors = network, factors
        self.known: dict[tuple[int, int], Program] = {}
        self._pool: Any = None

    def capture(self, job: Job, K: int) -> None:
        """A pass of K samples of the job's inputs, where it is one."""
        x = job.x
        if not capturable(self.factors) or (len(x), K) in self.known or len(x) * K > job.max_rows:
            return
        if K > 1 and not foldable(self.network):
            return
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with evaluating(self.network), torch.inference_mode():
                made = Program(self.network, self.factors, x, K, job.plan(len(x), K), job.temperature, self._pool)
        except Exception as error:  # a network that waits for the device, too little memory, a kernel beyond this GPU
            torch.cuda.synchronize(x.device)  # raises again where the device itself is broken
            log.warning("a pass is not captured", extra={"inputs": len(x), "samples": K, "why": str(error)[:200]})
            return
        self.known[len(x), K] = made

    def at(self, B: int, K: int) -> Program | None:
        return self.known.get((B, K))
