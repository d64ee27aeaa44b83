"""The predictive summary against numpy in float64."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dubito.models.predictions.uncertainty import Classified, ClassTally, Regressed, ValueTally, value_sums

Array = npt.NDArray[np.float64]


def summarise(logits: Tensor) -> Classified:
    """Uncertainty of K draws: (K, B, C) logits -> per-row probabilities and entropies."""
    tally = ClassTally()
    tally.add(logits)
    return tally.summary()


def summarise_regression(outputs: Tensor, noise: Tensor) -> Regressed:
    """Uncertainty of K draws: (K, B, D) means and (D,) standard deviations of the targets."""
    tally = ValueTally(noise, torch.zeros_like(noise), torch.ones_like(noise))
    tally.add(outputs)
    return tally.summary()


def oracle(logits: Array) -> dict[str, Array]:
    z = logits - logits.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)

    def entropy(q: Array) -> Array:
        return np.asarray(-np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0).sum(-1))

    mean = p.mean(0)
    return {"p": mean, "total": entropy(mean), "expected": entropy(p).mean(0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_agrees_with_numpy(dtype: torch.dtype, scale: float) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(9, 20, 7, generator=rng)).to(dtype)
    found = summarise(logits)
    want = oracle(logits.double().numpy())
    np.testing.assert_allclose(found.probabilities, want["p"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.entropy, want["total"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.expected_entropy, want["expected"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.mutual_information, want["total"] - want["expected"], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.max_probability, want["p"].max(-1), rtol=1e-6)
    assert found.probabilities.dtype == torch.float32


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_stays_in_range_for_any_logits(rows: list[list[float]], dtype: torch.dtype) -> None:
    logits = torch.tensor(rows).to(dtype)[:, None]  # (K, 1, 3)
    s = summarise(logits)
    assert torch.isfinite(s.probabilities).all()
    torch.testing.assert_close(s.probabilities.sum(-1), torch.ones(1))
    top = float(np.log(3)) + 1e-6
    for value in (s.entropy, s.expected_entropy, s.mutual_information):
        assert 0 <= float(value) <= top
    torch.testing.assert_close(s.entropy, s.expected_entropy + s.mutual_information, rtol=1e-5, atol=1e-6)


def test_certainty_impossible_classes_and_disagreement() -> None:
    inf = float("inf")
    agreed = summarise(torch.tensor([[[0.0, -inf, -inf]]] * 4))
    assert agreed.probabilities.tolist() == [[1.0, 0.0, 0.0]]
    assert float(agreed.entropy) == float(agreed.mutual_information) == 0
    assert not np.signbit(agreed.entropy.numpy()).any()
    torn = summarise(torch.tensor([[[0.0, -1e4]], [[-1e4, 0.0]]]))  # two draws, each certain of another class
    assert torn.probabilities.tolist() == [[0.5, 0.5]]
    assert float(torn.expected_entropy) == 0
    assert float(torn.mutual_information) == pytest.approx(np.log(2))


def test_a_small_mutual_information_is_not_lost_in_rounding() -> None:
    """Two draws whose logits differ by δ at p = ½ have I = δ²/32 to leading order: 3e-10 beside an entropy of 0.69."""
    delta = 1e-4
    logits = torch.tensor([[[delta / 2, 0.0]], [[-delta / 2, 0.0]]])
    assert float(summarise(logits).mutual_information) == pytest.approx(delta**2 / 32, rel=1e-3)


def test_draws_may_come_in_pieces() -> None:
    logits = torch.randn(10, 4, 3, generator=torch.Generator().manual_seed(0))
    tally = ClassTally()
    for piece in logits.split([1, 4, 5]):
        tally.add(piece)
    whole, pieces = summarise(logits), tally.summary()
    torch.testing.assert_close(pieces.probabilities, whole.probabilities)
    torch.testing.assert_close(pieces.mutual_information, whole.mutual_information)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regression_splits_the_variance(dtype: torch.dtype) -> None:
    """By the law of total variance, against numpy; a large mean must not swallow a small variance."""
    rng = torch.Generator().manual_seed(0)
    offset = 1e4 if dtype == torch.float32 else 3.0
    means = (offset + torch.randn(50, 6, 2, generator=rng)).to(dtype)
    noise = torch.tensor([0.5, 2.0])
    found = summarise_regression(means, noise)
    values = means.double().numpy()
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.epistemic_variance, values.var(0), rtol=1e-5)
    np.testing.assert_allclose(found.aleatoric_variance, np.broadcast_to([0.25, 4.0], (6, 2)), rtol=1e-6)
    one = summarise_regression(means[:1], noise)
    assert one.epistemic_variance.abs().max() == 0


def test_noise_that_depends_on_the_input_is_the_mean_over_draws_of_its_variance() -> None:
    """σ(x) = σ exp(gain · 3 tanh(raw/3)), against numpy; draw by draw, and as a device adds up a pass."""
    rng = torch.Generator().manual_seed(0)
    outputs = torch.randn(7, 5, 4, generator=rng) * torch.tensor([1.0, 3.0, 2.0, 8.0])  # two means, two raw numbers
    noise, gain, scale = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.4]), torch.tensor([3.0, 0.1])
    tally = ValueTally(noise, torch.tensor([1.0, 2.0]), scale, gain)
    for piece in outputs.split([1, 4, 2]):
        tally.add(piece)
    found = tally.summary()
    means, raw = np.split(outputs.double().numpy(), 2, axis=-1)
    ratio = np.exp(2 * gain.numpy() * 3 * np.tanh(raw / 3)).mean(0)
    np.testing.assert_allclose(found.mean, means.mean(0) * scale.numpy() + [1, 2], rtol=1e-5)
    np.testing.assert_allclose(found.epistemic_variance, means.var(0) * scale.numpy() ** 2, rtol=1e-5)
    np.testing.assert_allclose(found.aleatoric_variance, (noise * scale).numpy() ** 2 * ratio, rtol=1e-5)
    sums = value_sums(outputs, 2, gain)
    np.testing.assert_allclose(sums, np.concatenate([means.mean(0), 7 * means.var(0), ratio], 1), rtol=1e-6)
    assert value_sums(outputs[..., :2], 2).shape == (5, 4)


def test_the_energy_is_the_mean_over_draws_of_the_log_sum() -> None:
    """Against numpy in long doubles; logits far from zero must not overflow float32."""
    logits = 40 * torch.randn(7, 5, 4, dtype=torch.double)
    expected = -np.log(np.exp(logits.numpy().astype(np.longdouble)).sum(-1)).mean(0)
    found = summarise(logits).energy
    assert found is not None
    assert np.abs(found.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    # a constant added to the logits of one draw moves all inputs alike: what nobody knows of a draw changes no order
    moved = logits.clone()
    moved[2] += 1000.0
    shifted = summarise(moved).energy
    assert shifted is not None
    assert torch.allclose(shifted - found, torch.tensor(-1000.0 / 7), rtol=1e-4)
