"""Leading directions of a layer's inputs outside the span of B_c, which bring the factored law close to the exact one.

Outside that span the factored law gives all inputs one shared noise. Each direction added here has noise of its own;
those that carry most of the inputs' energy matter most.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from dubito.models.errors import InputError
from dubito.models.network.layers import BayesianLayer, first_input
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.prediction import predict

PATCHES = 4096  # kept of each layer's input patches: enough for a few leading directions


def set_directions(network: BayesianNetwork, x: Tensor, R: int, seed: int = 0) -> None:
    """Give each layer with factored noise its R directions, found on inputs x (held-out data); R = 0 removes them."""
    if R < 0:
        raise InputError(f"directions is {R}; expected 0 or more.")
    rng = torch.Generator().manual_seed(seed)
    chosen = {name: layer for name, layer in network.layers.items() if layer.q.takes_directions}
    patches: dict[str, Tensor] = {}
    factors = network.factors()
    with ExitStack() as hooks:
        for name, layer in chosen.items():
            hooks.enter_context(layer.register_forward_pre_hook(_gather(name, patches, rng), with_kwargs=True))
        predict(network, factors, x, samples=0, max_rows=len(x))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the low-rank SVD starts at random
        for name, layer in chosen.items():
            layer.q.set_directions(patches[name], factors.layers[name], R)


def _gather(name: str, patches: dict[str, Tensor], rng: torch.Generator) -> Callable[..., None]:
    def hook(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        assert isinstance(layer, BayesianLayer)
        x = first_input(given, named)
        inputs = max(1, min(64, 8 * PATCHES // max(1, x[0, 0].numel())))  # few of large pictures: each has many patches
        rows = layer.geometry.patches(x[torch.randperm(len(x), generator=rng)[:inputs]])
        patches[name] = rows[torch.randperm(len(rows), generator=rng)[:PATCHES]]

    return hook
