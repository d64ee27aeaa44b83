"""Global pruning: the least of all Z entries (inducing methods) or of all weights (FFG-W) become exactly zero."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.models.errors import ConversionError
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import Free, Positive
from dubito.models.posteriors.full_covariance import FullCovariance
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.mean_field import MeanField
from dubito.models.posteriors.mixture import Mixture
from dubito.models.posteriors.weight_space import WeightSpace


@torch.no_grad()
def prune(network: BayesianNetwork, keep: float) -> None:
    """Keep the given share, over the whole network, of the Z of inducing layers and of the weights of FFG-W layers.

    Z goes by magnitude, FFG-W by |mean|/std, its mean and its std each one parameter: of an odd number kept, the last
    weight keeps its mean alone. Biases stay [Ritter21, appendix K]. What is pruned gets no gradient afterwards. The
    mean of q(V) follows what is left of Z, so that the mean weights change as little as they can.
    """
    if not 0 < keep <= 1:
        raise ConversionError(f"keep is {keep}; expected a share above 0 and up to 1.")
    if network.joint is not None:
        raise ConversionError(network.joint.not_pruned)
    inducing: list[Inducing] = []
    gaussians: list[tuple[MeanField, int]] = []
    for layer in network.layers.values():
        q = layer.posterior
        if isinstance(q, Inducing):
            inducing.append(q)
        elif isinstance(q, WeightSpace) and isinstance(q.law, MeanField):
            gaussians.append((q.law, layer.geometry.shape[1] - layer.geometry.bias))
    if network.hierarchy is not None and isinstance(network.hierarchy.posterior, Inducing):
        inducing.append(network.hierarchy.posterior)
    Z = [part for q in inducing for part in (q.Z_r, q.Z_c)]
    if not Z and not gaussians:
        raise ConversionError(
            "nothing to prune: only inducing layers (their Z) and ffg-w layers can be pruned; whvi layers have no Z, "
            "and every entry of S_1, S_2 and g takes part in a whole block."
        )
    before = [q.projections() for q in inducing]
    _keep_largest(Z, [part().abs() for part in Z], round(keep * sum(part.value.numel() for part in Z)))
    for q, whole in zip(inducing, before, strict=True):
        _follow(q, whole)
    scores = []
    for law, weights in gaussians:
        signal: Tensor = (law.centre().abs() / law.spread()).nan_to_num(nan=0.0)  # 0/0: pruned before
        signal[:, weights:] = torch.inf  # the bias column
        scores.append(signal)
    biases = sum(int(s.isinf().sum()) for s in scores)
    n = round(2 * keep * (sum(s.numel() for s in scores) - biases))
    _keep_largest([law.centre for law, _ in gaussians], [s.clone() for s in scores], n - n // 2 + biases)
    _keep_largest([law.spread for law, _ in gaussians], scores, n // 2 + biases)


def _follow(q: Inducing, whole: Sequence[Tensor]) -> None:
    """The mean of q(V) for pruned projections: that whose mean weight A_r V A_cᵀ is nearest to what it was."""
    if q.law is None:  # a hierarchy draws V
        return
    left, right = (torch.linalg.pinv(now) @ was for now, was in zip(q.projections(), whole, strict=True))
    assert isinstance(q.law, Mixture | MeanField | FullCovariance)
    V = (q.law.points if isinstance(q.law, Mixture) else q.law.centre).value
    V.copy_(left @ V.double().cpu() @ right.mT)


def _keep_largest(parts: list[Free] | list[Positive], scores: list[Tensor], n: int) -> None:
    """Exactly n of all entries are kept, ties broken by order; what was pruned before stays pruned."""
    if not parts:
        return
    for part, score in zip(parts, scores, strict=True):
        if isinstance(part.keep, Tensor):
            score[~part.keep] = -1
    n = min(n, sum(int((s >= 0).sum()) for s in scores))
    flat = torch.cat([s.flatten() for s in scores]).cpu()
    kept = torch.zeros(len(flat), dtype=torch.bool)
    if n:
        least = flat.kthvalue(len(flat) - n + 1).values  # the n-th largest
        kept = flat > least
        ties = (flat == least).nonzero()[:, 0]
        kept[ties[: n - int(kept.sum())]] = True
    for part, mask in zip(parts, kept.split([s.numel() for s in scores]), strict=True):
        value = next(part.parameters()).data
        part.keep = mask.view(value.shape).to(value.device)
        value.masked_fill_(~mask.view(value.shape).to(value.device), 0)  # nothing is left of what was pruned
