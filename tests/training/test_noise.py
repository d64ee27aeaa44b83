"""The targets' noise: what training finds where it depends on the input, and what is fitted on held-out data."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn

from dubito.models import bayesianize
from dubito.models.manifest import Input, Regression
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.answers import Rule, columns_of
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.uncertainty import Regressed
from dubito.training.calibrate import outer_quantile, strangeness
from dubito.training.config import Fit
from dubito.training.data.data import Examples
from dubito.training.fit.fit import FitRun
from dubito.training.fit.target_noise import BELIEF, DRAWS, describe_noise, fit_noise
from dubito.training.laplace import LaplaceError, linearise
from dubito.training.seeds import stream
from tests.small_models import bayesian_mlp, mlp

CPU = torch.device("cpu")
ONE = Input(shape=(1,))


def std_at(x: Tensor) -> Tensor:
    """From 0.135 at −1 to 1 at 1."""
    return (x - 1).exp()


def fan(n: int, seed: int) -> Examples:
    """Targets around 100 + 30 · 2x, whose noise grows with x."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=rng) * 2 - 1
    return Examples(x, 100 + 30 * (2 * x + std_at(x) * torch.randn(n, 1, generator=rng)))


def test_training_finds_noise_that_grows_with_the_input() -> None:
    train, validation = fan(1500, 0), fan(300, 1)
    task = Regression(noise="input", shift=(float(train.y.mean()),), scale=(float(train.y.std()),))
    torch.manual_seed(0)
    net = mlp(1, 16, 2, activation="tanh")
    network = bayesianize(net, "deterministic", task=task)
    fit = Fit(epochs=30, batch=100, lr=2e-2, noise_epochs=5)
    run = FitRun(network, train, validation, ONE, fit, 0, CPU)
    while not run.done:
        run.epoch()
    fitted = fit_noise(run.finish(), validation, ONE, choose=True)
    assert fitted.gain is not None
    x = torch.tensor([[-0.7], [0.0], [0.7]])
    found = predict(network, network.factors(), x, 20, 0).summary
    assert isinstance(found, Regressed)
    ratio = found.aleatoric_variance.sqrt() / (30 * std_at(x))
    assert (ratio.log().abs() < 0.2).all()  # three standard errors of a σ from some 300 examples, and as much of fit
    entropy = float((30 * std_at(validation.x)).log().mean()) + math.log(2 * math.pi * math.e) / 2
    assert fitted.nll == pytest.approx(entropy, abs=5 / math.sqrt(2 * 300))
    assert fitted.nll < fitted.constant - 0.1


class Given(nn.Module):
    """Answers with its input: means, and after them raw log-deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.unused


def given(noise: Literal["constant", "input"]) -> BayesianNetwork:
    return BayesianNetwork(Given(), task=Regression(outputs=2, noise=noise, shift=(5.0, -1.0), scale=(2.0, 0.3)))


def told(n: int, noise: Literal["constant", "input"], follows: float) -> tuple[Examples, Input]:
    """Targets whose noise follows the raw numbers so far, and is 0.3 and 0.05 of the network's units elsewhere."""
    rng = torch.Generator().manual_seed(3)
    outputs = torch.randn(n, 4, generator=rng)
    level = torch.tensor([0.3, 0.05]) * (follows * outputs[:, 2:]).exp()
    y = (outputs[:, :2] + level * torch.randn(n, 2, generator=rng)) * torch.tensor([2.0, 0.3]) + torch.tensor([5.0, -1])
    x = outputs if noise == "input" else outputs[:, :2]
    return Examples(x.contiguous(), y), Input(shape=(x.shape[1],))


@pytest.mark.parametrize("noise", ["constant", "input"])
def test_sigma_is_the_one_of_least_nll(noise: Literal["constant", "input"]) -> None:
    """Against scipy's minimiser and density, in the targets' own units, each target by itself."""
    network = given(noise)
    examples, declared = told(200, noise, 0.5 if noise == "input" else 0.0)
    before = network.noise().detach().double().numpy()  # type: ignore[misc]
    fitted = fit_noise(network, examples, declared, choose=False)
    x, y, scale = examples.x.double().numpy(), examples.y.double().numpy(), np.array([2.0, 0.3])
    mean = x[:, :2] * scale + [5.0, -1.0]
    follows = np.exp(3 * np.tanh(x[:, 2:] / 3)) if noise == "input" else np.ones((200, 2))
    total = 0.0
    for d in range(2):

        def nll(log_factor: float, d: int = d) -> float:
            std = np.exp(log_factor) * before[d] * follows[:, d] * scale[d]
            return -float(stats.norm(mean[:, d], std).logpdf(y[:, d]).mean())

        def cost(log_factor: float, d: int = d) -> float:
            """With the expected NLL of BELIEF examples whose σ is the one that was there before."""
            return 200 * nll(log_factor) + BELIEF * (log_factor + math.exp(-2 * log_factor) / 2)

        best = optimize.minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
        assert float(fitted.factor[d]) == pytest.approx(math.exp(best.x), rel=1e-4)
        total += nll(best.x)
    assert fitted.nll == pytest.approx(total, abs=1e-5)
    assert network.noise is not None
    np.testing.assert_allclose(network.noise().detach(), before * fitted.factor.numpy(), rtol=1e-4)


@pytest.mark.parametrize(("follows", "gain"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_the_gain_is_chosen_by_the_nll_and_never_worse_than_constant_noise(follows: float, gain: float) -> None:
    network = given("input")
    examples, declared = told(4000, "input", follows)
    fitted = fit_noise(network, examples, declared, choose=True)
    assert network.gain is not None
    assert (network.gain - gain).abs().max() <= 0.25  # a step of the grid: the bound on log σ bends large ones
    assert fitted.nll <= min(fitted.constant, fitted.before)
    assert (fitted.nll < fitted.constant - 0.05) == (follows > 0)
    assert ("does not follow the input" in describe_noise(fitted)) == (not network.gain.any())


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_intervals_are_as_wide_as_the_noise_of_their_input(gain: float) -> None:
    """Where the noise follows the input, intervals hold as many targets where it is large as where it is small."""
    network = given("input")
    assert network.gain is not None
    network.gain.fill_(gain)
    examples, declared = told(3000, "input", 1.0)
    held, seen = examples[:1000], examples[1000:]
    fit_noise(network, held, declared, choose=False)
    calibrating, found = (predict(network, network.factors(), e.x, 1, 0).summary for e in (held, seen))
    rule = Rule(None, outer_quantile(strangeness(calibrating, held.y, None), 0.9))
    low, high = np.moveaxis(columns_of(found, [rule] * len(seen))["interval"], -1, 0)
    y, large = seen.y.double().numpy(), (seen.x[:, 2:] > 0).numpy()  # (N, 2): which targets have much noise
    inside, width = (low <= y) & (y <= high), high - low
    error = 3 * math.sqrt(0.9 * 0.1 * 2 / 2000)  # three standard errors
    assert inside.all(1).mean() == pytest.approx(0.9, abs=error)  # both targets at once, as calibrated
    difference = inside[~large].mean() - inside[large].mean()
    assert (abs(difference) < error) == (gain == 1)
    assert (np.ptp(np.log(width), axis=0) > 1).all() == (gain == 1)


def test_doubt_about_the_weights_is_not_counted_twice() -> None:
    """Draws that differ explain part of the errors: what is left to the noise is the less."""
    torch.manual_seed(0)
    network = bayesianize(nn.Sequential(nn.Linear(1, 1)), "ffg-w", task=Regression(), sigma_max=2.0)
    with torch.no_grad():
        for layer in network.layers.values():
            for p in layer.parameters():
                p.fill_(0.5)
    x = torch.linspace(-2, 2, 400)[:, None]
    examples = Examples(x, 3 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0)))
    fit_noise(network, examples, ONE, choose=False)
    found = predict(network, network.factors(), x, DRAWS, stream(0, "noise", 0)).summary
    assert isinstance(found, Regressed)
    mean, epistemic, y = (t.double().numpy()[:, 0] for t in (found.mean, found.epistemic_variance, examples.y))
    assert epistemic.mean() > 0.3

    def cost(log_std: float) -> float:
        variance, was = epistemic + np.exp(2 * log_std), epistemic + 0.1**2
        expected = float((was / variance + np.log(variance)).mean()) / 2
        return -float(stats.norm(mean, np.sqrt(variance)).logpdf(y).sum()) + BELIEF * expected

    best = optimize.minimize_scalar(cost, bounds=(-4, 4), method="bounded", options={"xatol": 1e-8})
    assert float(found.aleatoric_variance[0, 0]) == pytest.approx(math.exp(2 * best.x), rel=1e-3)


def test_a_laplace_approximation_refuses_noise_by_input() -> None:
    network = bayesian_mlp((1, 4, 2), "deterministic", task=Regression(noise="input"))
    few = fan(20, 0)
    with pytest.raises(LaplaceError, match=r'depends on the input; .* Train the network with noise = "constant"'):
        linearise(network, few, few, ONE)
