"""What a step minimises, against the densities of torch.distributions and scipy, and the schedules by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import Categorical, Normal

from dubito.models.manifest import Regression
from dubito.models.network.network import BayesianNetwork
from dubito.training.config import Fit
from dubito.training.fit.objective import gain, kl_weight, negative_log_likelihood, rate


def test_the_nll_of_classes_is_the_mean_over_draws_and_examples() -> None:
    network = BayesianNetwork(nn.Linear(2, 4))
    rng = torch.Generator().manual_seed(0)
    logits, y = 3 * torch.randn(5, 7, 4, generator=rng), torch.randint(4, (7,), generator=rng)  # (K, B, C)
    found = negative_log_likelihood(network, logits, y)
    torch.testing.assert_close(found, -Categorical(logits=logits).log_prob(y.expand(5, 7)).mean())


def test_the_nll_of_numbers_is_a_gaussian_with_the_learned_noise() -> None:
    network = BayesianNetwork(nn.Linear(2, 3), task=Regression(outputs=3))
    assert network.noise is not None
    with torch.no_grad():
        network.noise.raw.copy_(torch.tensor([-2.0, 0.3, 1.7]))
    rng = torch.Generator().manual_seed(1)
    mean, y = torch.randn(4, 6, 3, generator=rng), 2 * torch.randn(6, 3, generator=rng)  # (K, B, D)
    std = network.noise().detach()
    found = negative_log_likelihood(network, mean, y)
    torch.testing.assert_close(found.detach(), -Normal(mean, std).log_prob(y).sum(-1).mean())
    by_scipy = -stats.norm(mean.numpy(), std.numpy()).logpdf(y.numpy()).sum(-1).mean()
    assert float(found.detach()) == pytest.approx(by_scipy, rel=1e-5)


def test_noise_by_input_in_the_nll() -> None:
    network = BayesianNetwork(nn.Linear(2, 4), task=Regression(outputs=2, noise="input"))
    assert network.noise is not None
    assert network.gain is not None
    rng = torch.Generator().manual_seed(1)
    outputs, y = 4 * torch.randn(4, 6, 4, generator=rng), 2 * torch.randn(6, 2, generator=rng)  # (K, B, 2D)
    for share in (0.0, 0.3, 1.0):
        network.gain.fill_(share)
        mean, raw = outputs.double().numpy()[..., :2], outputs.double().numpy()[..., 2:]
        std = network.noise().detach().double().numpy() * np.exp(share * 3 * np.tanh(raw / 3))
        found = float(negative_log_likelihood(network, outputs, y).detach())
        assert found == pytest.approx(-stats.norm(mean, std).logpdf(y.numpy()).sum(-1).mean(), rel=1e-5)


@pytest.mark.parametrize(("epoch", "expected"), [(0, 0.0), (4, 0.0), (5, 0.25), (6.5, 0.625), (8, 1.0), (30, 1.0)])
def test_the_noise_is_constant_first_and_then_follows_the_input(epoch: float, expected: float) -> None:
    assert gain(Fit(epochs=40, noise_epochs=4), epoch) == pytest.approx(expected)
    assert gain(Fit(epochs=40), epoch) == 1


def test_the_noise_that_minimises_the_nll_is_that_of_the_residuals() -> None:
    """At the best σ, σ² is the mean squared residual of each output, so the gradient vanishes there."""
    network = BayesianNetwork(nn.Linear(1, 2), task=Regression(outputs=2))
    assert network.noise is not None
    rng = torch.Generator().manual_seed(2)
    mean, y = torch.randn(3, 50, 2, generator=rng), torch.randn(50, 2, generator=rng)
    best = (mean - y).square().mean((0, 1)).sqrt()
    with torch.no_grad():
        network.noise.raw.copy_((best - network.noise.floor).expm1().log())  # the inverse of softplus
    torch.testing.assert_close(network.noise().detach(), best)
    negative_log_likelihood(network, mean, y).backward()
    assert network.noise.raw.grad is not None
    assert network.noise.raw.grad.abs().max() < 1e-6


def test_half_precision_outputs_are_judged_in_full() -> None:
    network = BayesianNetwork(nn.Linear(2, 4))
    logits, y = torch.randn(2, 3, 4).bfloat16(), torch.tensor([0, 1, 3])
    found = negative_log_likelihood(network, logits, y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, negative_log_likelihood(network, logits.float(), y))


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, 0.0), (1.99, 0.0), (2, 0.0), (2.5, 0.05), (4, 0.2), (6, 0.4), (6.5, 0.4), (9.99, 0.4)],
)
def test_the_kl_waits_rises_and_stays(epoch: float, expected: float) -> None:
    fit = Fit(epochs=10, likelihood_epochs=2, warmup_epochs=4, kl=0.4)
    assert kl_weight(fit, epoch) == pytest.approx(expected)


def test_without_a_warm_up_the_kl_is_there_at_once() -> None:
    assert [kl_weight(Fit(epochs=5, likelihood_epochs=2), e) for e in (0, 1.9, 2, 4)] == [0, 0, 1, 1]
    assert kl_weight(Fit(epochs=5), 0) == 1


def test_a_warm_up_without_a_likelihood_phase_starts_at_nothing() -> None:
    assert [kl_weight(Fit(epochs=5, warmup_epochs=4), e) for e in (0, 1, 4, 5)] == [0, 0.25, 1, 1]


@pytest.mark.parametrize("epoch", [0, 0.25, 3, 7.5, 9.9])
def test_the_cosine_is_torchs_own(epoch: float) -> None:
    """torch's scheduler, stepped in hundredths of an epoch."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 1000)
    for _ in range(round(100 * epoch)):
        optimiser.step()
        schedule.step()
    assert rate(Fit(epochs=10, lr=0.3), epoch) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)


def test_the_other_schedules() -> None:
    step = Fit(epochs=10, lr=0.2, schedule="step", milestones=(3, 6))
    found = [rate(step, e) for e in (0, 2.99, 3, 5.9, 6, 9)]
    assert found == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002, 0.002])
    constant = Fit(epochs=10, lr=0.2, schedule="constant")
    assert [rate(constant, e) for e in (0, 5, 9.9)] == [0.2, 0.2, 0.2]
    assert rate(Fit(epochs=10, lr=0.2), 10) == pytest.approx(0, abs=1e-12)
    assert math.isclose(rate(Fit(epochs=10, lr=0.2), 5), 0.1)
