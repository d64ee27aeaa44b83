"""Global pruning: the least of all Z entries (inducing methods) or of all weights (FFG-W) become exactly zero."""

import torch

from dubito.models.errors import ConversionError
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import alike


@torch.no_grad()
def prune(network: BayesianNetwork, keep: float) -> None:
    """Keep the given share, over the whole network, of the Z of inducing layers and of the weights of FFG-W layers.

    Z goes by magnitude, FFG-W by |mean|/std. Biases stay [Ritter21, appendix K]. What is pruned gets no gradient
    afterwards.
    """
    if not 0 < keep <= 1:
        raise ConversionError(f"keep is {keep}; expected a share above 0 and up to 1.")
    if network.subnetwork is not None:
        raise ConversionError(
            "this is a subnetwork-laplace model, which has nothing to prune: its posterior is as small as the size S "
            "that it was made with. Make it anew with a smaller one (dubito laplace --size)."
        )
    layers = [*network.layers.values(), *([] if network.hierarchy is None else [network.hierarchy])]
    pruned = [
        type(layers[at[0]].q).prune([(layers[i].q, layers[i].geometry.bias) for i in at], keep)
        for at in alike([type(layer.q) for layer in layers])
    ]
    if not any(pruned):
        reasons = {layer.q.unprunable for layer in layers if layer.q.unprunable}
        raise ConversionError(
            "; ".join(
                ["nothing to prune: only inducing layers (their Z) and ffg-w layers can be pruned", *sorted(reasons)]
            )
            + "."
        )
