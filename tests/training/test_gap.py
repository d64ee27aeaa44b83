"""The toy with a gap [Ober21, section 3.1] beside Hamiltonian Monte Carlo, whose code shares nothing with ours."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _gap_hmc as hmc
from benchmarks.deep_linear import VARIANCE, evidence, examples
from benchmarks.gap import answer, tasks


@pytest.mark.slow
def test_global_inducing_points_doubt_in_the_gap_as_hmc_does_and_factorised_ones_do_not() -> None:
    task = tasks()[0]
    ours, factorised = (answer(method, task, 2000, 0) for method in ("gi", "ffg-w"))
    assert 0.7 < ours.over(task.gap) / task.hmc.over(task.gap) < 1.3
    assert ours.over(task.gap) > 2 * factorised.over(task.gap)
    assert ours.over(task.gap) / ours.over(task.near) > 2 * factorised.over(task.gap) / factorised.over(task.near)


def test_the_stored_reference_has_mixed_and_its_gradients_are_right() -> None:
    known = json.loads(Path(hmc.__file__).with_name("gap_hmc.json").read_text())
    for seed, one in known.items():
        x, y, noise = hmc.data(int(seed))
        np.testing.assert_allclose(one["x"], x)
        np.testing.assert_allclose(one["y"], y)
        assert max(one["r_hat"]) < 1.05
        assert max(np.divide(one["std_error"], one["std"])) < 0.2
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((2, *size)) for size in hmc.SIZES]
    move = [rng.standard_normal(W.shape) for W in weights]
    _, slopes = hmc.energy(weights, x, y, noise)
    ahead, back = (
        hmc.energy([W + h * d for W, d in zip(weights, move, strict=True)], x, y, noise)[0] for h in (1e-6, -1e-6)
    )
    expected = sum((s * d).sum((1, 2)) for s, d in zip(slopes, move, strict=True))
    np.testing.assert_allclose((ahead - back) / 2e-6, expected, rtol=1e-5)


def test_the_evidence_of_a_deep_linear_network_is_the_mean_likelihood_of_its_draws() -> None:
    """Five matrices, 2 units wide, on six examples, by drawing every weight."""
    some, rng = examples(0)[:6], np.random.default_rng(1)
    x, y = some.x.numpy(), some.y.numpy()
    likelihoods = []
    for _ in range(40):
        w = rng.standard_normal((20_000, 2, 1)) / 2**0.5
        for d_in in (2, 2, 2, 5):
            w = rng.standard_normal((20_000, d_in, 2)) / d_in**0.5 @ w
        squares = ((x @ w - y) ** 2).sum((1, 2))
        likelihoods.append(np.exp(-squares / (2 * VARIANCE)).mean() / (2 * np.pi * VARIANCE) ** 3)
    error = np.std(likelihoods, ddof=1) / len(likelihoods) ** 0.5
    assert np.exp(6 * evidence(some, 2, 5)) == pytest.approx(np.mean(likelihoods), abs=4 * error)
    assert np.exp(6 * evidence(some, 2, 1)) > np.mean(likelihoods) + 4 * error
