"""`samples="auto"`: each input gets as many draws as its answer needs to settle, and no more."""

import torch
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.network import BayesianNetwork, NetworkFactors
from dubito.models.plan import Plan
from dubito.models.prediction import MAX_SAMPLES, Job, Prediction, Settled, evaluating, finite, predict, tally_for
from dubito.models.uncertainty import Classified, Regressed, ValueTally, classified, entropy, wide

TOLERANCE = 0.05
AT_MOST = 128  # draws
CHUNK = 8
SURE = 2.0  # standard errors
NEAR = 1 << 16  # numbers that a CPU sums up sooner than a GPU is told how to


def predict_settled(
    network: BayesianNetwork,
    factors: NetworkFactors,
    x: Tensor,
    seed: int | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_samples: int = AT_MOST,
    plan: Plan | None = None,
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
    job = Job.of(network, factors, x, seed, plan, max_rows, temperature, most=max_samples)
    most, tolerances = torch.full((len(job.x),), max_samples), torch.full((len(job.x),), tolerance)
    summary, drawn = answer_each(job, most, tolerances)
    return Prediction(summary, int(drawn.max()), job.seed, None, Settled(drawn, tolerance, max_samples))


def answer_each(job: Job, most: Tensor, tolerance: Tensor) -> tuple[Classified | Regressed, Tensor]:
    """Each input with its own limit of draws (B,) and its own tolerance (B,), 0 where it takes all of them.

    Inputs share the draws of one seed: sample k is the same function for all that get as far. Returns the answers and
    the draws that each input took.
    """
    answers = tally_for(job.network)
    tally = _Values(answers, len(job.x)) if isinstance(answers, ValueTally) else _Classes(len(job.x))
    drawn, left, start = torch.zeros_like(most), torch.arange(len(job.x)), 0
    device = job.x.device
    with evaluating(job.network), torch.inference_mode():
        while len(left):
            k = min(job.samples_at_once(len(left)), int(most[left].min()) - start)
            if (tolerance[left] > 0).any():
                k = min(k, CHUNK - start % CHUNK)  # answers are looked at after each chunk, whoever else is here
            draws = job.draws(start, k, len(left))
            k = draws.K
            job.watch.lap("sample")
            outputs = job.outputs(draws, None if len(left) == len(job.x) else left.to(job.x.device))
            job.watch.lap("forward")
            if start == 0 and outputs.numel() <= NEAR:
                device = left.device
            rows = left.to(device)
            tally.add(rows, start, outputs.to(device))
            start += k
            drawn[left] = start
            ended = most[left] <= start
            if start % CHUNK == 0:
                ended |= (tolerance[left] > 0) & tally.settled(rows, start, tolerance[left].to(device)).cpu()
            left = left[~ended]
            job.watch.lap("summarise")
        return finite(tally.summary(drawn.to(device))), drawn


class _Classes:
    """Sums over draws, each input's its own: of probabilities, of their squares and of entropies."""

    def __init__(self, B: int) -> None:
        self.B = B
        self.p = self.p2 = self.H = torch.zeros(())

    def add(self, rows: Tensor, before: int, logits: Tensor) -> None:
        """(k, b, C) logits of these rows, which all had `before` draws."""
        log_p = wide(logits).log_softmax(-1)
        p = log_p.exp()
        if before == 0:
            self.p, self.p2 = p.new_zeros(self.B, p.shape[2]), p.new_zeros(self.B, p.shape[2])
            self.H = p.new_zeros(self.B)
        self.p[rows] += p.sum(0)
        self.p2[rows] += p.square().sum(0)
        self.H[rows] += entropy(log_p).sum(0)

    def settled(self, rows: Tensor, K: int, tolerance: Tensor) -> Tensor:
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

    def __init__(self, units: ValueTally, B: int) -> None:
        self.units, self.B = units, B
        self.mean = self.M2 = torch.zeros(())

    def add(self, rows: Tensor, before: int, outputs: Tensor) -> None:
        value, k = wide(outputs), len(outputs)
        if before == 0:
            self.mean, self.M2 = value.new_zeros(self.B, value.shape[2]), value.new_zeros(self.B, value.shape[2])
            self.units = self.units.to(value.device)
        mean, M2, K = value.mean(0), (value - value.mean(0)).square().sum(0), before + k
        step = mean - self.mean[rows]
        self.mean[rows] += step * (k / K)
        self.M2[rows] += M2 + step.square() * (before * k / K)

    def settled(self, rows: Tensor, K: int, tolerance: Tensor) -> Tensor:
        variance = self.M2[rows] / K
        spread = (variance + self.units.noise.square()).sqrt()
        return (SURE * _standard_error(variance, K) <= tolerance[:, None] * spread).all(-1)

    def summary(self, drawn: Tensor) -> Regressed:
        return self.units.regressed(self.mean, self.M2 / drawn[:, None])


def _standard_error(variance: Tensor, K: int) -> Tensor:
    """Of a mean over K draws whose variance about their own mean this is; one draw tells nothing of it."""
    return (variance.clamp(min=0) / (K - 1)).sqrt() if K > 1 else torch.full_like(variance, torch.inf)
