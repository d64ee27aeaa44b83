"""Fits the temperature of a classifier's logits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPREAD_OF_T = 0.5  # standard deviation of log T a priori

Answered = tuple[Tensor, Tensor]  # logits of the draws (K, n, classes), true classes (n)


def fit_temperature(answers: Sequence[Answered]) -> float:
    """The T that minimises the NLL of the mean over draws of softmax(logits/T), by golden section on log T.

    log T has a prior N(0, `SPREAD_OF_T`²): on a few examples that are all right, the NLL alone would take T to zero.
    One label of all is expected to be drawn at random, so that a single input far outside, which may cost a thousand
    nats, costs log(n · classes) at most: otherwise it alone would decide T for all others.
    """
    odds = 1 / (1 + sum(len(y) for _, y in answers))

    def loss(log_T: float) -> float:
        return _nll(answers, math.exp(log_T), odds) + (log_T / SPREAD_OF_T) ** 2 / 2

    low, high, golden = math.log(0.1), math.log(10), (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(25):  # one of the two points inside is inside the next interval too
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = loss(b)
    return math.exp((low + high) / 2)


def nll_with_temperature(answers: Sequence[Answered]) -> float:
    """Mean NLL with the temperature that is fitted on the same answers."""
    return _nll(answers, fit_temperature(answers)) / sum(len(y) for _, y in answers)


def _nll(answers: Sequence[Answered], T: float, odds: float = 0.0) -> float:
    """Sum over the examples; with these odds, a label is one of the classes at random."""
    total = 0.0
    for logits, y in answers:
        log_p = (logits / T).log_softmax(-1).gather(2, y.expand(len(logits), -1)[..., None])
        mean = log_p[..., 0].logsumexp(0).double() - math.log(len(logits))
        if odds:
            by_chance = mean.new_tensor(math.log(odds / logits.shape[-1]))
            mean = torch.logaddexp(mean + math.log1p(-odds), by_chance)
        total -= float(mean.sum())
    return total
