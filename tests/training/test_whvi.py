"""Walsh–Hadamard VI the whole way: recipe, training, calibration, evaluation, and an artifact that answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dubito.models import load
from dubito.models.errors import ConversionError
from dubito.models.posteriors.whvi import Whvi, WhviFactors
from tests.training.test_train import run

pytestmark = pytest.mark.usefixtures("few_requests")


def answered(*command: str | Path) -> Any:
    answer = run(*command, "--json")
    assert answer.exit_code == 0, answer.exception
    return json.loads(answer.stdout)


CHANGES = {
    "network.architecture": "mlp",
    "network.arguments": "{hidden=[64, 64]}",
    "posterior.method": "whvi",
    "posterior.options": "{}",
    "fit.pretrain_epochs": "0",
    "fit.epochs": "8",
    "fit.lr": "0.02",
    "seed": "0",
}


SHORT = {"fit.epochs": "1", "fit.likelihood_epochs": "0", "fit.warmup_epochs": "0", "fit.frozen_norm_epochs": "0"}


def train(out: Path, **changes: str) -> Path:
    answered("train", "digits", "--out", out, *(f"--set={k}={v}" for k, v in (CHANGES | changes).items()))
    return out


@pytest.fixture(scope="module")
def trained(few_requests: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For as long as the journey needs."""
    return train(tmp_path_factory.mktemp("whvi") / "digits.safetensors", **SHORT)


@pytest.mark.slow
def test_a_recipe_learns_to_know_digits(tmp_path: Path) -> None:
    told = answered("inspect", train(tmp_path / "digits.safetensors"))
    assert told["metrics"]["accuracy"] > 0.6  # of ten classes; eleven seeds gave 0.82 to 0.94


def test_a_recipe_becomes_an_artifact(trained: Path, tmp_path: Path) -> None:
    told = answered("inspect", trained)
    assert {row["method"] for row in told["layers"]} == {"whvi"}
    assert told["parameters"] < 0.2 * told["deterministic"]
    again = tmp_path / "calibrated.safetensors"
    run("calibrate", trained, "--data", "digits", "--coverage", "0.8", "--out", again)
    calibration = load(again).card.calibration
    assert calibration is not None
    assert calibration.coverage == 0.8
    found = answered("evaluate", again, "--data", "digits", "--seed", CHANGES["seed"])
    assert found["accuracy"] == pytest.approx(told["metrics"]["accuracy"], abs=0.002)  # the same draws, temperature 1
    refusal = run("prune", trained, "--keep", "0.5", "--out", tmp_path / "pruned.safetensors").exception
    assert isinstance(refusal, ConversionError)
    assert "whvi layers have no Z" in str(refusal)


def test_its_draws_differ_and_its_mean_is_one_answer(trained: Path) -> None:
    model = load(trained)
    x = torch.rand(3, *model.card.input.shape)  # type: ignore[union-attr]
    outputs = model.predict(x, 8, 0, keep_outputs=True).outputs
    assert outputs is not None
    assert outputs.std(0).min() > 0
    assert model.predict(x, 0).samples == 0
    assert all(isinstance(f, WhviFactors) for f in model.factors.layers.values())


def test_training_moves_every_part(trained: Path) -> None:
    for layer in load(trained).network.layers.values():
        q = layer.posterior
        assert isinstance(q, Whvi)
        assert q.S_1.abs().std() > 1e-3 * q.S_1.abs().mean()  # all were of one size
        assert q.S_2.abs().std() > 1e-3 * q.S_2.abs().mean()
        assert q.law.spread().std() > 0  # type: ignore[operator]
