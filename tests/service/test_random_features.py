"""A Gaussian process by random features, trained by the shipped recipe on a table and served over HTTP."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models.predictions.uncertainty import Regressed
from dubito.training.config import read_recipe
from dubito.training.recipe import train
from tests.few import few

Fixture = Any  # the types of conftest.py


@pytest.mark.slow
def test_a_model_of_the_recipe_learns_and_answers_over_http(
    serve: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """y = sin(2a) + noise of 0.1; b says nothing."""
    few(monkeypatch)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2)).astype(np.float32)
    y = np.sin(2 * x[:, :1]) + 0.1 * rng.normal(size=(400, 1))
    np.savez(tmp_path / "waves.npz", x=x, y=y.astype(np.float32))
    changes = [
        f"data.name=npz:{tmp_path / 'waves.npz'}",
        "network.arguments={features=32, standardise=true}",
        "fit.epochs=40",
    ]
    out = tmp_path / "waves.safetensors"
    trained = train(read_recipe("uci-whvi-gp", changes), out)
    assert trained is not None
    model = trained.model
    assert {layer.entry.method for layer in model.network.layers.values()} == {"whvi", "whvi-column"}
    assert model.card.metrics["rmse"] < 0.3
    assert model.card.calibration is not None
    live = serve(out)
    asked = torch.from_numpy(x[:5])
    body = {"inputs": asked.tolist(), "samples": 16, "seed": 3}
    reply = httpx.post(f"{live.url}/v1/models/waves/predict", json=body, timeout=60).json()
    expected = model.predict(asked, 16, 3).summary
    assert isinstance(expected, Regressed)
    for key, values in (("mean", expected.mean), ("epistemic_variance", expected.epistemic_variance)):
        got = [row[key] for row in reply["predictions"]]
        np.testing.assert_allclose(np.ravel(got), values.flatten().tolist(), atol=1e-5)
        assert np.ravel(got).std() > 0
