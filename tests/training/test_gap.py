"""The toy with a gap [Ober21, section 3.1] beside Hamiltonian Monte Carlo, whose code shares nothing with ours."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _gap_hmc as hmc
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
