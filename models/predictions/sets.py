"""Prediction sets: the conformal score of each class, which is within a quantile for the classes that fit.

Scores are sums in float64 over the classes in order of probability; of equally probable classes the first comes first.
Exported graphs add in the same order, so they decide the same to the bit.
"""

import numpy as np
from numpy.typing import NDArray

from dubito.models.manifest import Sets

Probabilities = NDArray[np.float32]
Scores = NDArray[np.float64]


def fitting(p: Probabilities, sets: Sets | None, limits: Scores) -> NDArray[np.bool_]:
    """(B, C): the classes whose scores are within the limits, (B, 1) or (B, C)."""
    if sets is None or sets.score == "probability":
        return class_scores(p, sets) <= limits
    rows, first = np.arange(len(p)), p.argmax(-1)
    fits = np.zeros(p.shape, np.bool_)
    most = limits.max(-1)
    fits[rows, first] = most >= 0  # not where the limit is NaN: that input has none
    more = p[rows, first] <= most  # the least score of any other class; the rest need no sorting
    if more.any():
        fits[more] = class_scores(p[more], sets) <= limits[more]
    return fits


def class_scores(p: Probabilities, sets: Sets | None) -> Scores:
    """(B, C) probabilities -> (B, C); 0 for the most probable class, unless `sets` is None.

    APS [Romano20] subtracts u · p from the sum up to and including a class, with a random u in [0, 1]; here u is 1.
    RAPS [Angelopoulos21] adds lam · max(0, rank − k_reg).
    """
    if sets is None:
        return 1 - p.astype(np.float64)
    rows = np.arange(len(p))
    if sets.score == "probability":
        scores = 1 - p.astype(np.float64)
        scores[rows, p.argmax(-1)] = 0
        return scores
    order = np.argsort(-p, axis=-1, kind="stable")
    before = p[rows[:, None], order].astype(np.float64).cumsum(-1)[:, :-1]
    if sets.lam:
        before += penalties(sets, p.shape[1])[1:]
    scores = np.zeros(p.shape)
    scores[rows[:, None], order[:, 1:]] = before
    return scores


def penalties(sets: Sets, C: int) -> Scores:
    """Of the classes by rank, the most probable one first: (C,)."""
    return sets.lam * np.maximum(0.0, np.arange(1, C + 1) - sets.k_reg)
