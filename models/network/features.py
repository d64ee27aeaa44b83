"""Features: the inputs of a network's last linear layer, and what is read off them beside the outputs.

A pass with a reading appends its columns to the outputs, so that every way of running a network (folded, planned,
as a graph) carries them along.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dubito.models.network.geometry import Linear
from dubito.models.network.layers import BayesianLayer, first_input, keep_features
from dubito.models.posteriors.protocol import Value

MOST_FEATURES = 1 << 13  # d beyond which no bank is kept: its points would outweigh the network


@dataclass(frozen=True)
class AllFeatures(Value):
    """The features themselves."""

    columns: int  # d

    def __call__(self, features: Tensor, K: int, member: Callable[[int], Tensor]) -> Tensor:
        return features.float()


def watch(layer: nn.Module) -> None:
    """Add the hook that records a layer's inputs in passes with a reading; copies of the layer have it too."""
    if not watched(layer):
        layer.register_forward_pre_hook(keep_features, with_kwargs=True)


def watched(layer: nn.Module) -> bool:
    return keep_features in layer._forward_pre_hooks.values()


def is_linear(module: nn.Module) -> bool:
    return isinstance(module.geometry, Linear) if isinstance(module, BayesianLayer) else type(module) is nn.Linear


def last_linear(net: nn.Module, run: Callable[[], Tensor]) -> str | None:
    """The name of the linear layer whose outputs are the network's, by a pass `run` of it; None: there is none.

    Its inputs must be one vector for each row, of at most `MOST_FEATURES` numbers, and it must be called once.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
        calls.append((name, first_input(given, named), out))

    with ExitStack() as hooks:
        for name, module in net.named_modules():
            if is_linear(module):
                hooks.enter_context(module.register_forward_hook(partial(note, name), with_kwargs=True))
        out = run()
    if not calls:
        return None
    name, features, layer_out = calls[-1]
    once = sum(called == name for called, _, _ in calls) == 1
    fits = features.dim() == 2 and features.shape[1] <= MOST_FEATURES
    makes = layer_out.numel() == out.numel() and torch.equal(layer_out.flatten(), out.flatten())
    return name if once and fits and makes else None
