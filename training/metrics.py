"""How good a prediction is, and how good its doubt."""

import math

import torch
from torch import Tensor

BINS = 15


def accuracy(p: Tensor, y: Tensor) -> float:
    return float((p.argmax(-1) == y).double().mean())


def nll(p: Tensor, y: Tensor) -> float:
    """Mean negative log-likelihood in nats; a probability that rounded to zero counts as the smallest float."""
    return float(-p.double().gather(1, y[:, None]).clamp(min=torch.finfo(torch.float32).tiny).log().mean())


def brier(p: Tensor, y: Tensor) -> float:
    """Sum over classes of the squared error, mean over examples."""
    truth = torch.nn.functional.one_hot(y, p.shape[1])
    return float((p.double() - truth).square().sum(-1).mean())


def ece(p: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Expected calibration error of the leading class, over equally wide bins."""
    return sum(abs(b.confidence - b.accuracy) * b.share for b in reliability(p, y, bins))


class Bin:
    """One bar of a reliability diagram."""

    def __init__(self, low: float, high: float, confidence: float, accuracy: float, share: float) -> None:
        self.low, self.high, self.confidence, self.accuracy, self.share = low, high, confidence, accuracy, share


def reliability(p: Tensor, y: Tensor, bins: int = BINS) -> list[Bin]:
    confidence, leading = p.double().max(-1)
    right = (leading == y).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1  # bins are (low, high]
    found = []
    for b in range(bins):
        here = place == b
        n = int(here.sum())
        mean = (float(confidence[here].mean()), float(right[here].mean())) if n else (0.0, 0.0)
        found.append(Bin(b / bins, (b + 1) / bins, *mean, n / len(y)))
    return found


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that an outside example scores above an inside one, ties counted half."""
    scores = torch.cat([inside, outside]).double()
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    top = counts.cumsum(0).double()
    ranks = (top - (counts - 1) / 2)[place]  # mean rank of each tied group
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision with the outside examples as positives."""
    scores = torch.cat([inside, outside]).double()
    positive = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).double()
    values, place = scores.unique(return_inverse=True)
    hits = torch.zeros(len(values)).double().index_add(0, place, positive).flip(0).cumsum(0)
    taken = torch.zeros(len(values)).double().index_add(0, place, torch.ones_like(positive)).flip(0).cumsum(0)
    recall = hits / len(outside)
    step = torch.diff(recall, prepend=torch.zeros(1).double())
    return float((step * hits / taken).sum())


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    terms = (y - mean).double().square() / variance.double() + (2 * math.pi * variance.double()).log()
    return float(terms.sum(-1).mean() / 2)


def rmse(mean: Tensor, y: Tensor) -> float:
    return float((mean.double() - y.double()).square().mean().sqrt())
