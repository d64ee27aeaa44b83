"""Warnings about a trained posterior that looks wrong."""

from collections.abc import Sequence
from statistics import median

from dubito.models.network.network import BayesianNetwork
from dubito.models.report import noise_share
from dubito.training.fit.fit import Epoch

HARDLY_ANY = 0.01  # standard deviation of the weights, as a share of their size
HARDLY_MOVED = 0.02  # change of the KL, as a share of its first value


def remarks(network: BayesianNetwork, log: Sequence[Epoch]) -> list[str]:
    """Sentences about what looks wrong: almost no noise in the weights, or a KL that training has not changed."""
    warnings = []
    measured = [noise_share(layer) for layer in network.layers.values()]
    shares = [share for share in measured if share is not None]
    if shares and (share := median(shares)) < HARDLY_ANY:
        warnings.append(
            f"The noise in the weights is {share:.2%} of their size (median over layers): this posterior doubts hardly "
            "more than a plain network. Raise its caps (posterior.options: sigma_max, spread) or train it for longer."
        )
    weighted = [e for e in log if e.kl_weight > 0]
    first, last = (log[0].kl, log[-1].kl) if log else (0.0, 0.0)
    if weighted and first > 0 and abs(first - last) < HARDLY_MOVED * first:
        warnings.append(
            f"The KL is {last:.4g} nats and was {first:.4g} after the first epoch: training has hardly moved the "
            "posterior. Raise fit.lr, or train it for longer."
        )
    return warnings
