"""Metrics of predictions and of their uncertainty: functions of tensors on the CPU.

`p` holds probabilities (N, C) and `y` the true classes (N,); for regression, (N, D) throughout.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15


def accuracy(p: Tensor, y: Tensor) -> float:
    return float((p.argmax(-1) == y).double().mean())


def nll(p: Tensor, y: Tensor) -> float:
    """Mean negative log-likelihood in nats; a probability that rounded to zero counts as the smallest float."""
    return float(-p.double().gather(1, y[:, None]).clamp(min=torch.finfo(torch.float32).tiny).log().mean())


def brier(p: Tensor, y: Tensor) -> float:
    """Sum over classes of the squared error, mean over examples: from 0 to 2."""
    return float((p.double() - F.one_hot(y, p.shape[1])).square().sum(-1).mean())


def ece(p: Tensor, y: Tensor) -> float:
    """Expected calibration error of the most probable class."""
    return sum(abs(b.confidence - b.accuracy) * b.share for b in reliability(p, y))


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram: the examples whose largest probability lies in (low, high]."""

    low: float
    high: float
    confidence: float  # mean of their largest probability; 0 where there are none
    accuracy: float
    share: float  # of all examples


def reliability(p: Tensor, y: Tensor) -> list[Bin]:
    confidence, leading = p.max(-1)
    edges = (torch.arange(1, BINS).double() / BINS).to(p.dtype)  # rounded like p: an edge belongs to the bin below it
    one_hot = F.one_hot(torch.bucketize(confidence, edges), BINS).double()  # (N, BINS)
    n = one_hot.sum(0)
    means = [one_hot.T @ values.double() / n.clamp(min=1) for values in (confidence, leading == y)]
    rows = zip(*(v.tolist() for v in (*means, n / len(y))), strict=True)
    return [Bin(b / BINS, (b + 1) / BINS, *row) for b, row in enumerate(rows)]


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates as the threshold on the score falls, from (0, 0) to (1, 1)."""
    values, place = torch.cat([inside, outside]).double().unique(return_inverse=True)
    rates = []
    for group in (place[: len(inside)], place[len(inside) :]):
        above = group.bincount(minlength=len(values)).flip(0).cumsum(0).double()
        rates.append(torch.cat([torch.zeros(1).double(), above / len(group)]))
    return rates[0], rates[1]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that an outside example scores above an inside one; ties count half."""
    false, true = roc(inside, outside)
    return float(torch.trapezoid(true, false))


def placements(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """For each inside example the share of outside ones that score above it, for each outside example the share of
    inside ones below it; ties count half. The mean of either is the AUROC [DeLong88]."""
    shares = []
    for own, others in ((inside, outside), (outside, inside)):
        order = others.double().sort().values
        low, high = (torch.searchsorted(order, own.double(), right=right) for right in (False, True))
        shares.append((low + high).double() / (2 * len(others)))  # below, ties half
    return 1 - shares[0], shares[1]


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision with the outside examples as positives."""
    false, true = roc(inside, outside)
    hits = true[1:] * len(outside)
    return float((true.diff() * hits / (hits + false[1:] * len(inside))).sum())


def rejection(right: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Share rejected and accuracy of the rest, as the most doubtful examples are rejected first: both (N,).

    Tied examples are rejected in no particular order, so each counts as the mean of its group.
    """
    _, place, counts = score.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(counts)).double().index_add(0, place, right.double()) / counts
    kept = mean.repeat_interleave(counts).cumsum(0) / torch.arange(1, len(right) + 1)  # the n least doubtful
    return torch.arange(len(right)).double() / len(right), kept.flip(0)


def rmse(mean: Tensor, y: Tensor) -> float:
    return float((mean.double() - y.double()).square().mean().sqrt())


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """NLL of a Gaussian, summed over the D targets, mean over examples, in nats."""
    v = variance.double()
    return float(((y.double() - mean.double()).square() / v + (2 * math.pi * v).log()).sum(-1).mean() / 2)


def standard_error(values: Tensor, blocks: int) -> float:
    """Standard error of the mean of `values`, where row i belongs to block i mod `blocks`.

    The rows of a block share draws, so their errors are correlated: it comes from the means of the blocks. NaN for a
    single block.
    """
    blocks = min(blocks, len(values))
    means = torch.stack([values[i::blocks].double().mean() for i in range(blocks)])
    return float(means.std() / math.sqrt(blocks)) if blocks > 1 else math.nan
