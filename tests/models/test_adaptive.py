"""`samples="auto"` against its rule worked out by hand, input by input, from the draws themselves."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models import bayesianize
from dubito.models.errors import InputError
from dubito.models.manifest import Regression
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.mean_field import MeanField
from dubito.models.predictions.adaptive import AT_MOST, CHUNK, answer_each, predict_settled
from dubito.models.predictions.prediction import Job, predict
from dubito.models.predictions.uncertainty import Classified
from tests.small_models import mlp

SEED = 3


def wavering(method: str = "ffg-u", outputs: int = 4, **options: object) -> BayesianNetwork:
    """A network whose draws differ much for some inputs and little for others."""
    torch.manual_seed(0)
    net = mlp(6, 16, outputs)
    made = bayesianize(net, method, inducing=8, start="prior", lam_max=0.9, sigma_max=0.9, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for layer in made.layers.values():
            law = getattr(layer.posterior, "law", None)
            if isinstance(law, MeanField):
                law.spread.raw.fill_(0.0)  # half of the cap
    return made


def inputs(n: int = 60) -> Tensor:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return x * torch.linspace(0.1, 4, n)[:, None]


def settles_at(p: NDArray[np.float64], tolerance: float, most: int) -> int:
    """(K, C) probabilities of one input's draws -> the draws after which the rule says it has settled."""
    for K in range(CHUNK, most + 1, CHUNK):
        mean, error = p[:K].mean(0), p[:K].std(0, ddof=1) / np.sqrt(K)
        first, second = np.argsort(mean)[::-1][:2]
        sure = mean[first] - mean[second] >= 2 * (error[first] + error[second])
        if 2 * error[first] <= tolerance and sure:
            return K
    return most


def test_each_input_stops_where_the_rule_says() -> None:
    network, x, tolerance, most = wavering(), inputs(), 0.05, 64
    factors = network.factors()
    found = predict_settled(network, factors, x, SEED, tolerance=tolerance, max_samples=most)
    outputs = predict(network, factors, x, most, SEED, keep_outputs=True).outputs
    assert outputs is not None
    assert found.settled is not None
    p = outputs.double().softmax(-1).numpy()
    expected = [settles_at(p[:, i], tolerance, most) for i in range(len(x))]
    assert found.settled.samples.tolist() == expected
    assert min(expected) < max(expected) == most  # the test sees both kinds
    mean = np.stack([p[:K, i].mean(0) for i, K in enumerate(expected)])
    np.testing.assert_allclose(found.summary.probabilities.numpy(), mean, atol=1e-6)  # type: ignore[union-attr]
    assert found.samples == most


def test_what_is_drawn_for_an_input_does_not_depend_on_the_others() -> None:
    network, x = wavering(), inputs()
    factors = network.factors()
    together = predict_settled(network, factors, x, SEED)
    alone = [predict_settled(network, factors, x[i : i + 1], SEED, max_rows=16) for i in (0, 17, 59)]
    assert together.settled is not None
    for i, one in zip((0, 17, 59), alone, strict=True):
        assert one.settled is not None
        assert one.settled.samples[0] == together.settled.samples[i]
        torch.testing.assert_close(one.summary.probabilities[0], together.summary.probabilities[i])  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def many_draws() -> tuple[BayesianNetwork, Tensor, Tensor]:
    """A network, inputs, and their probabilities by 4,096 draws."""
    network, x = wavering(), inputs(200)
    summary = predict(network, network.factors(), x, 4096, SEED + 1).summary
    assert isinstance(summary, Classified)
    return network, x, summary.probabilities


@pytest.mark.parametrize("tolerance", [0.05, 0.02])
def test_settled_answers_are_within_the_tolerance_of_many_draws(
    tolerance: float, many_draws: tuple[BayesianNetwork, Tensor, Tensor]
) -> None:
    network, x, truth = many_draws
    factors = network.factors()
    found = predict_settled(network, factors, x, SEED, tolerance=tolerance, max_samples=512).summary.probabilities  # type: ignore[union-attr]
    leading = found.argmax(-1, keepdim=True)
    near = (found.gather(1, leading) - truth.gather(1, leading)).abs() <= tolerance
    assert near.double().mean() >= 0.95


@pytest.mark.parametrize("noise", ["constant", "input"])
def test_regression_settles_by_its_mean(noise: Literal["constant", "input"]) -> None:
    task = Regression(outputs=2, noise=noise, shift=(1.0,), scale=(3.0,))
    network, x, tolerance, most = wavering(outputs=task.numbers, task=task), inputs(), 0.2, 64
    factors = network.factors()
    found = predict_settled(network, factors, x, SEED, tolerance=tolerance, max_samples=most)
    outputs = predict(network, factors, x, most, SEED, keep_outputs=True).outputs
    assert outputs is not None
    assert found.settled is not None
    assert network.noise is not None
    f, raw = outputs.double().numpy()[..., :2], outputs.double().numpy()[..., 2:]
    ratio = np.exp(3 * np.tanh(raw / 3)) if noise == "input" else np.ones_like(f)
    sigma = network.noise().detach().double().numpy() * ratio
    for i, drawn in enumerate(found.settled.samples.tolist()):
        for K in range(CHUNK, most + 1, CHUNK):
            spread = np.sqrt(f[:K, i].var(0) + (sigma[:K, i] ** 2).mean(0))
            if (2 * f[:K, i].std(0, ddof=1) / np.sqrt(K) <= tolerance * spread).all():
                break
        assert drawn == K
        np.testing.assert_allclose(found.summary.mean[i], 3 * f[:K, i].mean(0) + 1, rtol=1e-5)  # type: ignore[union-attr]
        np.testing.assert_allclose(
            found.summary.epistemic_variance[i],  # type: ignore[union-attr]
            9 * f[:K, i].var(0),
            rtol=1e-4,
        )
        aleatoric = found.summary.aleatoric_variance[i]  # type: ignore[union-attr]
        np.testing.assert_allclose(aleatoric, 9 * (sigma[:K, i] ** 2).mean(0), rtol=1e-4)


def test_a_network_without_noise_draws_each_member_once() -> None:
    network = wavering("ensemble-w", members=3)
    found = predict_settled(network, network.factors(), inputs(), SEED)
    assert (found.samples, found.settled) == (3, None)
    plain = wavering("deterministic")
    assert predict_settled(plain, plain.factors(), inputs(), SEED).samples == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 0.0}, "tolerance is 0.0; expected a number between 0 and 1"),
        ({"max_samples": 0}, "max_samples is 0; expected a whole number from 1"),
        ({"max_samples": True}, "max_samples is True"),
    ],
)
def test_bad_limits_are_refused(changes: dict[str, float], message: str) -> None:
    network = wavering()
    with pytest.raises(InputError, match=message):
        predict_settled(network, network.factors(), inputs(), SEED, **changes)  # type: ignore[arg-type]


def test_the_limit_is_kept() -> None:
    network = wavering()
    found = predict_settled(network, network.factors(), inputs(), SEED, tolerance=0.001, max_samples=20)
    assert found.settled is not None
    assert int(found.settled.samples.max()) == 20 < AT_MOST


def test_inputs_with_limits_of_their_own_share_their_draws() -> None:
    """Fixed numbers of draws and settling answers side by side: each as it is alone with the same seed."""
    network, x = wavering(), inputs(12)
    factors = network.factors()
    most = np.array([1, 3, 8, 20, 20, 64, 5, 64, 64, 64, 64, 13])
    tolerance = np.array([0.0] * 7 + [0.05, 0.05, 0.02, 0.3, 0.0])
    summary, drawn = answer_each(Job.of(network, factors, x, SEED, max_rows=32), most, tolerance)
    for i in range(12):
        if tolerance[i] > 0:
            alone = predict_settled(network, factors, x[i : i + 1], SEED, tolerance=float(tolerance[i]), max_samples=64)
        else:
            alone = predict(network, factors, x[i : i + 1], int(most[i]), SEED)
            assert drawn[i] == most[i]
        assert drawn[i] == alone.samples
        torch.testing.assert_close(summary.probabilities[i], alone.summary.probabilities[0])  # type: ignore[union-attr]
        torch.testing.assert_close(
            summary.mutual_information[i],  # type: ignore[union-attr]
            alone.summary.mutual_information[0],  # type: ignore[union-attr]
            atol=1e-6,
            rtol=1e-4,
        )
