"""A posterior that training left without noise, or did not move, is remarked on."""

import pytest
import torch

from dubito.models import bayesianize
from dubito.training.fit.fit import Epoch
from dubito.training.fit.remarks import remarks
from tests.small_models import bayesian_mlp, mlp


def log(*kl: float, weight: float = 1.0) -> list[Epoch]:
    return [Epoch(i, 1.0, 1.0, value, weight, 0.5, 1.0, 0.5, None, 1e-3, 1.0) for i, value in enumerate(kl)]


def posterior(spread: float) -> list[str]:
    torch.manual_seed(0)
    net = mlp(20, 16, 4)
    return remarks(bayesianize(net, "ffg-u", inducing=8, spread=spread, sigma_max=1.0, lam_max=0), log(9.0, 5.0))


def test_hardly_any_noise_is_remarked_on_with_its_size() -> None:
    assert posterior(0.1) == []
    (said,) = posterior(0.003)
    assert "The noise in the weights is 0." in said
    assert "sigma_max" in said


@pytest.mark.parametrize(
    ("epochs", "moved"),
    [(log(100.0, 99.0), False), (log(100.0, 80.0), True), (log(0.0, 0.0), True), (log(100.0, 99.9, weight=0.0), True)],
    ids=["still", "moved", "no KL", "likelihood only"],
)
def test_a_kl_that_has_not_moved_is_remarked_on(epochs: list[Epoch], moved: bool) -> None:
    network = bayesian_mlp((20, 16, 4), "ffg-u", inducing=8, spread=0.05)
    assert [("KL is 99 nats and was 100" in said) for said in remarks(network, epochs)] == ([] if moved else [True])
