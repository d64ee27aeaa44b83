"""`samples="auto"`: each input gets as many draws as its answer needs to settle, and no more."""

from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.network.network import BayesianNetwork, NetworkFactors
from dubito.models.predictions.prediction import (
    MAX_SAMPLES,
    Job,
    Passes,
    Prediction,
    Settled,
    evaluating,
    finite,
    predict,
    units_of,
)
from dubito.models.predictions.uncertainty import Classified, Reals, Regressed, ValueTally, classes_in, from_sums

TOLERANCE = 0.05
AT_MOST = 128  # draws
CHUNK = 8
SURE = 2.0  # standard errors

Counts = NDArray[np.int64]


def predict_settled(
    network: BayesianNetwork,
    factors: NetworkFactors,
    x: Tensor,
    seed: int | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_samples: int = AT_MOST,
    **passes: Unpack[Passes],
) -> Prediction:
    """Draws come in chunks, the same for every input; an input takes no more of them once its answer has settled.

    Settled: two standard errors of the leading class's probability are within the tolerance, and that class leads the
    next by two as well. Regression: two standard errors of the mean are within the tolerance times the predictive
    standard deviation. What is drawn for an input does not depend on the others.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance is {tolerance!r}; expected a number between 0 and 1.")
    if isinstance(max_samples, bool) or not isinstance(max_samples, int) or not 1 <= max_samples <= MAX_SAMPLES:
        raise InputError(f"max_samples is {max_samples!r}; expected a whole number from 1 to {MAX_SAMPLES:,}.")
    if factors.normals == 0:  # so many members, or one network: draws beyond them would repeat
        return predict(network, factors, x, max(1, factors.members), seed, **passes)
    job = Job.of(network, factors, x, seed, most=max_samples, **passes)
    B = job.B
    summary, drawn = answer_each(job, np.full(B, max_samples), np.full(B, tolerance))
    settled = Settled(torch.from_numpy(drawn), tolerance, max_samples)
    return Prediction(summary, int(drawn.max()), job.seed, None, settled)


def answer_each(job: Job, most: Counts, tolerance: Reals) -> tuple[Classified | Regressed, Counts]:
    """Each input with its own limit of draws (B,) and its own tolerance (B,), 0 where it takes all of them.

    Inputs share the draws of one seed: draw k is the same function for all that get as far. Returns the answers and
    the draws that each input took. The device adds up the draws of a pass; all the rest is the host's, and by numpy,
    since it is about few numbers.
    """
    units = units_of(job.network)
    tally = _Classes(job.B) if units is None else _Values(units, job.B)
    drawn, left, start = np.zeros_like(most), np.arange(job.B), 0
    with evaluating(job.network), torch.inference_mode():
        while len(left):
            k = int(most[left].min()) - start
            if (tolerance[left] > 0).any():
                k = min(k, CHUNK - start % CHUNK)  # answers are checked after each chunk, whatever else is in the batch
            k = job.next_draws(len(left), k)
            draws = job.draws(start, k, len(left))
            k = draws.K
            job.watch.lap("sample")
            sums = job.sums(draws, None if len(left) == job.B else torch.from_numpy(left))
            job.watch.lap("forward")
            tally.add(left, start, k, sums)
            start += k
            drawn[left] = start
            ended = most[left] <= start
            if start % CHUNK == 0:
                ended |= (tolerance[left] > 0) & tally.settled(left, start, tolerance[left])
            left = left[~ended]
            job.watch.lap("summarise")
            if len(left):
                job.rest()
        return finite(tally.summary(drawn)), drawn


class _Classes:
    """Sums over draws, each input's its own, as `class_sums` gives them."""

    def __init__(self, B: int) -> None:
        self.B = B
        self.sums: Reals = np.zeros((B, 0))

    def add(self, rows: Counts, before: int, k: int, sums: Reals) -> None:
        """Of k draws of these rows, which all had `before` of them."""
        if before == 0:
            self.sums = np.zeros((self.B, sums.shape[1]))
        self.sums[rows] += sums

    def settled(self, rows: Counts, K: int, tolerance: Reals) -> NDArray[np.bool_]:
        C = classes_in(self.sums)
        mean, squares = self.sums[rows, :C] / K, self.sums[rows, C : 2 * C] / K
        error = _standard_error(squares - mean**2, K)
        order = np.argsort(-mean, 1, kind="stable")[:, :2]
        leading, errors = np.take_along_axis(mean, order, 1), np.take_along_axis(error, order, 1)
        settled: NDArray[np.bool_] = SURE * errors[:, 0] <= tolerance
        return settled if C == 1 else settled & (leading[:, 0] - leading[:, 1] >= SURE * errors.sum(1))

    def summary(self, drawn: Counts) -> Classified:
        return from_sums(self.sums / drawn[:, None])


class _Values:
    """Mean and sum of squares about it, each input's its own, chunk added to chunk without cancellation."""

    def __init__(self, units: ValueTally, B: int) -> None:
        self.units, D = units, len(units.noise)
        self.mean, self.M2, self.ratio = np.zeros((B, D)), np.zeros((B, D)), np.ones((B, D))

    def add(self, rows: Counts, before: int, k: int, sums: Reals) -> None:
        """Of k draws of these rows: as `value_sums` gives them."""
        D, K = len(self.units.noise), before + k
        mean, M2, ratio = sums[:, :D], sums[:, D : 2 * D], sums[:, 2 * D :]
        step = mean - self.mean[rows]
        self.mean[rows] += step * (k / K)
        self.M2[rows] += M2 + step**2 * (before * k / K)
        if self.units.gain is not None:
            self.ratio[rows] += (ratio - self.ratio[rows]) * (k / K)

    def settled(self, rows: Counts, K: int, tolerance: Reals) -> NDArray[np.bool_]:
        variance = self.M2[rows] / K
        spread = np.sqrt(variance + self.units.noise.double().numpy() ** 2 * self.ratio[rows])
        return np.asarray((SURE * _standard_error(variance, K) <= tolerance[:, None] * spread).all(-1))

    def summary(self, drawn: Counts) -> Regressed:
        mean, variance, ratio = map(torch.from_numpy, (self.mean, self.M2 / drawn[:, None], self.ratio))
        return self.units.regressed(mean, variance, ratio)


def _standard_error(variance: Reals, K: int) -> Reals:
    """Of a mean over K draws whose variance about their own mean this is; one draw tells nothing of it."""
    return np.sqrt(np.maximum(variance, 0) / (K - 1)) if K > 1 else np.full_like(variance, np.inf)
