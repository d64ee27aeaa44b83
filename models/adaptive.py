"""`samples="auto"`: each input gets as many draws as its answer needs to settle, and no more."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.geometry import How
from dubito.models.network import BayesianNetwork, Draws, NetworkFactors
from dubito.models.prediction import MAX_SAMPLES, Job, Prediction, Settled, evaluating, finite, predict, tally_for
from dubito.models.uncertainty import Classified, Regressed, ValueTally, classified, entropy, wide

TOLERANCE = 0.05
AT_MOST = 128  # draws
CHUNK = 8
SURE = 2.0  # standard errors


def predict_settled(
    network: BayesianNetwork,
    factors: NetworkFactors,
    x: Tensor,
    seed: int | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_samples: int = AT_MOST,
    plan: Mapping[str, How] | None = None,
    max_rows: int | None = None,
    temperature: float = 1.0,
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
        K = max(1, factors.members)
        return predict(network, factors, x, K, seed, plan=plan, max_rows=max_rows, temperature=temperature)
    job = Job.of(network, factors, x, seed, plan, max_rows, temperature)
    answers = tally_for(network)
    tally = _Values(answers) if isinstance(answers, ValueTally) else _Classes()
    drawn = torch.zeros(len(job.x), dtype=torch.long)
    left = torch.arange(len(job.x), device=job.x.device)
    with evaluating(network), torch.inference_mode():
        for start in range(0, max_samples, CHUNK):
            k = min(CHUNK, max_samples - start)
            outputs = job.outputs(job.x[left], Draws(k, job.normals.rows(k, factors.normals), job.seed, start))
            settled = tally.add(left, start, outputs, tolerance)
            drawn[left.cpu()] = start + k
            left = left[~settled]
            if len(left) == 0:
                break
        summary = finite(tally.summary(drawn.to(job.x.device)))
    return Prediction(summary, int(drawn.max()), job.seed, None, Settled(drawn, tolerance, max_samples))


class _Classes:
    """Sums over draws, each input's its own: of probabilities, of their squares and of entropies."""

    def __init__(self) -> None:
        self.p = self.p2 = self.H = torch.zeros(())

    def add(self, rows: Tensor, before: int, logits: Tensor, tolerance: float) -> Tensor:
        """(k, b, C) logits of these rows, which all had `before` draws; which of them have settled now?"""
        log_p = wide(logits).log_softmax(-1)
        p = log_p.exp()
        if before == 0:
            self.p, self.p2, self.H = p.new_zeros(p.shape[1:]), p.new_zeros(p.shape[1:]), p.new_zeros(p.shape[1])
        self.p[rows] += p.sum(0)
        self.p2[rows] += p.square().sum(0)
        self.H[rows] += entropy(log_p).sum(0)
        K = before + len(logits)
        mean = self.p[rows] / K
        error = _standard_error(self.p2[rows] / K - mean.square(), K)
        leading, which = mean.topk(min(2, mean.shape[1]), dim=1)
        errors = error.gather(1, which)
        settled = SURE * errors[:, 0] <= tolerance
        return settled if mean.shape[1] == 1 else settled & (leading[:, 0] - leading[:, 1] >= SURE * errors.sum(1))

    def summary(self, drawn: Tensor) -> Classified:
        return classified(self.p / drawn[:, None], self.H / drawn)


class _Values:
    """Mean and sum of squares about it, each input's its own, chunk added to chunk without cancellation."""

    def __init__(self, units: ValueTally) -> None:
        self.units = units
        self.mean = self.M2 = torch.zeros(())

    def add(self, rows: Tensor, before: int, outputs: Tensor, tolerance: float) -> Tensor:
        value, k = wide(outputs), len(outputs)
        if before == 0:
            self.mean, self.M2 = value.new_zeros(value.shape[1:]), value.new_zeros(value.shape[1:])
        mean, M2, K = value.mean(0), (value - value.mean(0)).square().sum(0), before + k
        step = mean - self.mean[rows]
        self.mean[rows] += step * (k / K)
        self.M2[rows] += M2 + step.square() * (before * k / K)
        variance = self.M2[rows] / K
        spread = (variance + self.units.noise.square()).sqrt()
        return (SURE * _standard_error(variance, K) <= tolerance * spread).all(-1)

    def summary(self, drawn: Tensor) -> Regressed:
        return self.units.regressed(self.mean, self.M2 / drawn[:, None])


def _standard_error(variance: Tensor, K: int) -> Tensor:
    """Of a mean over K draws whose variance about their own mean this is; one draw tells nothing of it."""
    return (variance.clamp(min=0) / (K - 1)).sqrt() if K > 1 else torch.full_like(variance, torch.inf)
