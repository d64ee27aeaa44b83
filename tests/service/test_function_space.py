"""A posterior that was trained in function space, by a recipe, is served like any other."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dubito.models import load
from dubito.models.predictions.uncertainty import Classified
from dubito.training.config import read_recipe
from dubito.training.recipe import train
from tests import forked
from tests.few import few

Fixture = Any  # the types of conftest.py
TINY = [
    "network={architecture='mlp', arguments={hidden=[8]}}",
    "posterior={method='ffg-u', options={inducing=4, sigma_max=10.0, spread=0.05}}",
    "fit={epochs=2, batch=256, objective='function-space'}",
    "pretrain={}",
    "context={points=4, inputs='spoiled'}",
    "calibrate={bank=0}",
]


def test_trained_by_a_recipe_inspected_and_served(
    serve: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    file = tmp_path / "doubtful.safetensors"
    train(read_recipe("digits", TINY), file)
    assert "Its doubt stays below the prior's" not in capfd.readouterr().err
    assert "trained by function-space VI" in forked.run("inspect", file).stdout
    model = load(file)
    assert model.card.provenance.recipe is not None
    assert model.card.provenance.recipe["fit"]["objective"] == "function-space"  # type: ignore[index, call-overload]
    live, x = serve(file), torch.rand(3, *model.card.input.shape)  # type: ignore[union-attr]
    body = {"inputs": x.tolist(), "samples": 8, "seed": 3}
    said = httpx.post(f"{live.url}/v1/models/doubtful/predict", json=body, timeout=60).json()
    expected = model.predict(x, 8, 3).summary
    assert isinstance(expected, Classified)
    rows = [row["probabilities"] for row in said["predictions"]]
    assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]
    assert min(row["mutual_information"] for row in said["predictions"]) > 0
