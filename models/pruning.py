"""Global pruning: the least of all Z entries (inducing methods) or of all weights (FFG-W) become exactly zero."""

import torch

from dubito.models.errors import ConversionError
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import alike, count
from dubito.models.posteriors.protocol import Posterior


@torch.no_grad()
def prune(network: BayesianNetwork, keep: float) -> None:
    """Keep the given share, over the whole network, of the Z of inducing layers and of the weights of FFG-W layers.

    Z goes by magnitude, FFG-W by |mean|/std. Biases stay [Ritter21, appendix K]. What is pruned gets no gradient
    afterwards.
    """
    for layers in _by_kind(network, keep):
        type(layers[0][0]).prune(layers, keep)


def count_pruned(network: BayesianNetwork, keep: float) -> int:
    """Number of parameters that a network has once it is pruned; no value is looked at, so it may be on "meta"."""
    numbers = [sum(q.prunable(bias) for q, bias in layers) for layers in _by_kind(network, keep)]
    return count(network) - sum(n - round(keep * n) for n in numbers)


def _by_kind(network: BayesianNetwork, keep: float) -> list[list[tuple[Posterior, bool]]]:
    """Posteriors of one class each, with whether the last column of W is a bias; refuses what cannot be pruned."""
    if not 0 < keep <= 1:
        raise ConversionError(f"keep is {keep}; expected a share above 0 and up to 1.")
    if network.joint is not None:
        raise ConversionError(network.joint.not_pruned)
    layers = [*network.layers.values(), *([] if network.hierarchy is None else [network.hierarchy])]
    if not any(layer.q.prunable(layer.geometry.bias) for layer in layers):
        reasons = {layer.q.unprunable for layer in layers if layer.q.unprunable}
        raise ConversionError(
            "; ".join(
                ["nothing to prune: only inducing layers (their Z) and ffg-w layers can be pruned", *sorted(reasons)]
            )
            + "."
        )
    kinds = alike([type(layer.q) for layer in layers])
    return [[(layers[i].q, layers[i].geometry.bias) for i in places] for places in kinds]
