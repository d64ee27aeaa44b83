"""Target noise of a trained regression network, fitted on held-out data.

A network that fits its training targets closely underestimates their noise. Two numbers per target are fitted on the
validation part: a factor of σ, and the gain with which the noise depends on the input.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.models.manifest import Input
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import Positive
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.uncertainty import log_ratio, wide
from dubito.training.data.data import Examples, enter
from dubito.training.seeds import stream

DRAWS = 20  # K
GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: the noise is constant
RANGE = math.log(30)  # of the log-factor, either way
STEPS = 40  # of golden section
BELIEF = 10.0  # weight of the trained noise, in examples: a few validation examples alone say little


@dataclass(frozen=True)
class FittedNoise:
    """Factor and gain per target, and mean NLLs on the validation part in the targets' own units."""

    factor: Tensor  # (D,)
    gain: Tensor | None  # (D,); None: the noise is constant
    before: float  # NLL with the trained noise
    nll: float
    constant: float  # NLL with one constant σ per target, fitted in the same way


def fit_noise(
    network: BayesianNetwork, validation: Examples, declared: Input, *, choose: bool, seed: int = 0
) -> FittedNoise:
    """Set σ, and with `choose` the gain too, to minimise the NLL on the validation part.

    The NLL is that of a Gaussian with the predictive mean and variance. The trained noise counts as `BELIEF` further
    examples.
    """
    assert network.noise is not None
    assert network.task.kind == "regression"
    device, D = network.noise.raw.device, network.task.outputs
    x = enter(validation.x.to(device), declared)
    drawn = predict(network, network.factors(), x, DRAWS, stream(seed, "noise", 0), keep_outputs=True).outputs
    assert drawn is not None
    outputs = wide(drawn).cpu()  # (K, V, numbers)
    shift, scale = (torch.tensor(v, dtype=torch.float64) for v in (network.task.shift, network.task.scale))
    error = (validation.y.double() - shift) / scale - outputs[..., :D].mean(0)  # (V, D)
    epistemic = outputs[..., :D].var(0, unbiased=False)
    sigma = network.noise().detach().cpu().double()
    units = float(scale.log().expand(D).sum())  # NLL difference between the network's units and the targets' own

    def ratio(gain: Tensor) -> Tensor:
        """Mean over draws of σ(x)²/σ²: (V, D)."""
        return (2 * gain * log_ratio(outputs[..., D:])).exp().mean(0)

    def nll(variance: Tensor) -> Tensor:
        """Mean NLL of each target: (D,)."""
        each: Tensor = ((error.square() / variance) + (2 * math.pi * variance).log()) / 2
        return each.mean(0)

    def best(aleatoric: Tensor) -> tuple[Tensor, Tensor]:
        """The best log-factor (D,) of σ for noise variances (V, D), and the NLL with it."""

        def cost(log_factor: Tensor) -> Tensor:
            """NLL of the examples, and of `BELIEF` examples whose squared errors equal the trained variance."""
            variance = epistemic + (2 * log_factor).exp() * aleatoric
            expected: Tensor = (trained / variance + (2 * math.pi * variance).log()) / 2
            return len(error) * nll(variance) + BELIEF * expected.mean(0)

        low, high = torch.full((D,), -RANGE).double(), torch.full((D,), RANGE).double()
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(STEPS):
            a, b = high - golden * (high - low), low + golden * (high - low)
            left = cost(a) < cost(b)
            low, high = torch.where(left, low, a), torch.where(left, b, high)
        middle = (low + high) / 2
        return middle, nll(epistemic + (2 * middle).exp() * aleatoric)

    level = sigma.square().expand_as(error)
    known = None if network.gain is None else network.gain.cpu().double()
    trained = epistemic + (level if known is None else level * ratio(known))
    before = nll(trained)
    log_factor, constant = best(level)
    gain, least = None, constant
    if network.gain is not None and known is not None:
        gain = torch.zeros(D).double() if choose else known
        for one in [torch.full((D,), g).double() for g in GAINS[1:]] if choose else [known]:
            factor_, nll_ = best(level * ratio(one))
            better = nll_ < least if choose else torch.ones(D, dtype=torch.bool)
            log_factor = torch.where(better, factor_, log_factor)
            gain, least = torch.where(better, one, gain), torch.where(better, nll_, least)
        network.gain.copy_(gain)
    factor = log_factor.exp()
    network.noise = Positive((sigma * factor).to(network.noise.raw), network.noise.floor)
    figures = (float(v.sum()) + units for v in (before, least, constant))
    return FittedNoise(factor, gain, *figures)


def describe_noise(fitted: FittedNoise) -> str:
    """The fitted factor and gain and their NLL, in one sentence."""
    factors = ", ".join(f"{v:.3g}" for v in fitted.factor.tolist())
    text = f"noise fitted on the validation part: σ times {factors}"
    if fitted.gain is not None:
        gains = fitted.gain.tolist()
        follows = "does not follow the input" if not any(gains) else f"follows the input by {gains[0]:g}"
        if len(set(gains)) > 1:
            follows = f"follows the input by {', '.join(f'{g:g}' for g in gains)}"
        text += f", which {follows} (0: constant)"
    text += f"; NLL {fitted.nll:.4g}, before {fitted.before:.4g}"
    return text if fitted.gain is None else f"{text}, with constant noise {fitted.constant:.4g}"
