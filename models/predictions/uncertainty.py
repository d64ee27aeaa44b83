"""What K draws say about an input: probabilities, entropies and their difference; for regression, two variances."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Reals = NDArray[np.float64]
LOG_RANGE = 3.0  # an input's noise is within a factor of e^±3 of the constant one
ROUNDING = 1e-12  # nats: what float64 leaves of the difference of two entropies that are equal


@dataclass(frozen=True)
class Classified:
    """Natural logarithms throughout: entropies are in nats. NaN: not known, as of a closed form."""

    probabilities: Tensor  # (B, C)  mean over draws
    entropy: Tensor  # (B,)  of the mean: all uncertainty
    expected_entropy: Tensor  # (B,)  mean over draws: what would remain if the weights were known
    mutual_information: Tensor  # (B,)  of label and weights, ≥ 0: what is not known about the weights
    energy: Tensor | None = None  # (B,)  −log Σ exp(logits), mean over draws
    distance: Tensor | None = None  # (B,)  of the features to the bank's nearest, mean over draws; None: no bank

    @property
    def max_probability(self) -> Tensor:
        return self.probabilities.amax(-1)


@dataclass(frozen=True)
class Regressed:
    mean: Tensor  # (B, D)
    epistemic_variance: Tensor  # (B, D)  of the draws' means
    aleatoric_variance: Tensor  # (B, D)  of the targets' noise, mean over draws


def known_in(summary: Classified | Regressed) -> dict[str, Tensor]:
    """What a summary holds, by name."""
    return {name: tensor for name, tensor in vars(summary).items() if tensor is not None}


def on_host(tensor: Tensor) -> NDArray[Any]:
    """As a NumPy array. On the CPU `cpu()` is not called: a call of torch lets other threads run first."""
    array: NDArray[Any] = (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
    return array


def entropy(log_p: Tensor) -> Tensor:
    """From log-probabilities along the last axis; a probability of zero adds nothing."""
    each: Tensor = torch.special.entr(log_p.exp())
    return each.sum(-1)


def classified(p: Reals, expected: Reals, energy: Reals, distance: Reals | None = None) -> Classified:
    """From means over draws: probabilities (B, C), the rest (B,). By numpy, which is faster for few numbers."""
    total = 0.0 - (p * np.log(np.where(p > 0, p, 1.0))).sum(-1)  # not −0
    knowledge = total - expected  # ≥ 0 by Jensen, but for rounding
    knowledge[knowledge < ROUNDING] = 0.0
    means = (p, total, expected, knowledge, energy, *(() if distance is None else (distance,)))
    return Classified(*(torch.from_numpy(a.astype(np.float32)) for a in means))


def probit(f: Tensor, variance: Tensor, distance: Tensor | None = None) -> Classified:
    """softmax(f/√(1 + π/8 · variance)) for Gaussian logits (B, C); the parts of its entropy are not known: NaN.

    The energy is that of the mean logits f.
    """
    log_p = (wide(f) / (1 + math.pi / 8 * wide(variance)).sqrt()).log_softmax(-1)
    total = entropy(log_p)
    unknown = torch.full_like(total, torch.nan)
    known = (log_p.exp(), total, unknown, unknown, energies(wide(f)), *(() if distance is None else (distance,)))
    return Classified(*(t.float() for t in known))


def energies(logits: Tensor) -> Tensor:
    """−log Σ exp(logits): (…, C) -> (…)."""
    return -logits.logsumexp(-1)


def wide(x: Tensor) -> Tensor:
    """Sums over draws are kept in float64: mutual information is a small difference of large numbers."""
    return x.double() if x.device.type != "mps" else x.float()  # MPS has no float64


def over_draws(values: Tensor, counted: Tensor | None) -> Tensor:
    """The sum over draws (k, …); with `counted` (k,), over those that have a 1 there, not a 0."""
    if counted is None:
        return values.sum(0)
    return torch.where(counted.view(-1, *[1] * (values.dim() - 1)) > 0, values, 0.0).sum(0)


def class_sums(logits: Tensor, distance: Tensor | None = None, counted: Tensor | None = None) -> Tensor:
    """Over k draws (k, B, C): of probabilities, of their squares, of entropies and of energies: (B, 2C + 2).

    With distances (k, B) of the features, these follow: (B, 2C + 3). `counted`: see `over_draws`.
    """
    value = wide(logits)
    log_p = value.log_softmax(-1)
    p = log_p.exp()
    last = [entropy(log_p), energies(value), *(() if distance is None else (wide(distance),))]
    return over_draws(torch.cat([p, p.square(), torch.stack(last, -1)], -1), counted)


def classes_in(sums: Reals) -> int:
    """C, of what `class_sums` gives."""
    return (int(sums.shape[-1]) - 2) // 2


def from_sums(mean: Reals) -> Classified:
    """From what `class_sums` gives, over the number of draws."""
    C = classes_in(mean)
    return classified(mean[:, :C], *mean[:, 2 * C :].T)


def log_ratio(raw: Tensor) -> Tensor:
    """The network's raw log-deviations -> log σ(x)/σ, held smoothly within ±LOG_RANGE."""
    return LOG_RANGE * (raw / LOG_RANGE).tanh()


def value_sums(outputs: Tensor, D: int, gain: Tensor | None = None, counted: Tensor | None = None) -> Tensor:
    """Over k draws of D means: mean, and sum of squares about it: (B, 2D).

    With a gain (D,) the draws are (k, B, 2D), and the mean of σ(x)²/σ² follows: (B, 3D). `counted`: see `over_draws`.
    """
    value = wide(outputs)
    k = len(value) if counted is None else counted.sum()
    mean = over_draws(value[..., :D], counted) / k
    parts = [mean, over_draws((value[..., :D] - mean).square(), counted)]
    if gain is not None:
        parts.append(over_draws((2 * wide(gain) * log_ratio(value[..., D:])).exp(), counted) / k)
    return torch.cat(parts, 1)


def value_sums_of_both(first: Reals, k: int, second: Reals, m: int, D: int) -> Reals:
    """What `value_sums` gives of k draws and of m more, as of all of them."""
    share = m / (k + m)
    step = second[:, :D] - first[:, :D]
    joined: Reals = first + share * (second - first)
    joined[:, D : 2 * D] = first[:, D : 2 * D] + second[:, D : 2 * D] + step**2 * (k * share)
    return joined


class ClassTally:
    """Adds up draws as they come, so that memory does not grow with K."""

    def __init__(self) -> None:
        self.K = 0
        self.sums: Tensor | float = 0.0

    def add(self, logits: Tensor, distance: Tensor | None = None) -> None:
        """(k, B, C) logits in any floating type, and (k, B) distances where there is a bank."""
        self.sums = self.sums + class_sums(logits, distance)
        self.K += len(logits)

    def summary(self) -> Classified:
        assert isinstance(self.sums, Tensor)
        return from_sums((self.sums / self.K).cpu().double().numpy())


class ValueTally:
    """The same for regression: Welford's update, which does not cancel when the variance is small."""

    def __init__(self, noise: Tensor, shift: Tensor, scale: Tensor, gain: Tensor | None = None) -> None:
        """σ (D,) of the targets in the network's units, and the targets' own location and scale.

        With a gain (D,) the noise depends on the input: σ(x) = σ exp(gain · log_ratio(raw)).
        """
        self.noise, self.shift, self.scale = (wide(t) for t in (noise, shift, scale))
        self.gain = None if gain is None else wide(gain)
        self.K = 0
        self.mean: Tensor | float = 0.0
        self.M2: Tensor | float = 0.0
        self.ratio: Tensor | None = None  # mean of σ(x)²/σ²

    def add(self, outputs: Tensor) -> None:
        """(k, B, D) means in the network's units, followed by D raw log-deviations where there is a gain."""
        D = len(self.noise)
        for value in wide(outputs):
            self.K += 1
            delta = value[..., :D] - self.mean
            self.mean = self.mean + delta / self.K
            self.M2 = self.M2 + delta * (value[..., :D] - self.mean)
            if self.gain is not None:
                ratio = (2 * self.gain * log_ratio(value[..., D:])).exp()
                self.ratio = ratio if self.ratio is None else self.ratio + (ratio - self.ratio) / self.K

    def summary(self) -> Regressed:
        assert isinstance(self.mean, Tensor)
        assert isinstance(self.M2, Tensor)
        return self.regressed(self.mean, self.M2 / self.K, self.ratio)

    def regressed(self, mean: Tensor, variance: Tensor, ratio: Tensor | None = None) -> Regressed:
        """From mean and variance over draws, in the network's units, and the mean of σ(x)²/σ²."""
        epistemic = variance * self.scale.square()
        aleatoric = (self.noise * self.scale).square().expand_as(epistemic)
        if ratio is not None:
            aleatoric = aleatoric * ratio
        return Regressed((mean * self.scale + self.shift).float(), epistemic.float(), aleatoric.float())
