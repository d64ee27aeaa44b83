"""Global inducing points the whole way: recipe, training, calibration, `inspect`, and an artifact that answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dubito.models import bayesianize, build, load, save
from dubito.models.errors import ConversionError
from dubito.models.manifest import Card, Input
from dubito.models.network.sequence import SequentialFactors
from dubito.models.posteriors.inducing_points import GlobalPoints
from dubito.models.posteriors.weight_priors import ScalePrior
from dubito.training.compact import distil
from tests.training.test_train import run

pytestmark = pytest.mark.usefixtures("few_requests")
CHANGES = {
    "network.architecture": "mlp",
    "network.arguments": "{hidden=[32]}",
    "posterior.method": "gi",
    "posterior.options": '{inducing=50, prior="scale"}',
    "fit.pretrain_epochs": "0",
    "fit.likelihood_epochs": "0",
    "fit.frozen_norm_epochs": "0",
    "fit.epochs": "6",
    "fit.lr": "0.03",
    "calibrate.bank": "0",
}


def train(out: Path, **changes: str) -> Path:
    done = run("train", "digits", "--out", out, *(f"--set={k}={v}" for k, v in (CHANGES | changes).items()))
    assert done.exit_code == 0, done.exception
    return out


@pytest.fixture(scope="module")
def trained(few_requests: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For as long as the journey needs."""
    return train(tmp_path_factory.mktemp("gi") / "digits.safetensors", **{"fit.epochs": "2", "fit.warmup_epochs": "0"})


@pytest.fixture(scope="module")
def learned(few_requests: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("gi") / "digits.safetensors")


@pytest.mark.slow
def test_a_recipe_learns_to_know_digits(learned: Path) -> None:
    assert load(learned).card.metrics["accuracy"] > 0.8


def test_a_recipe_becomes_an_artifact(trained: Path, tmp_path: Path) -> None:
    told: Any = json.loads(run("inspect", trained, "--json").stdout)
    assert {row["method"] for row in told["layers"]} == {"gi"}
    assert told["inducing_inputs"] == {"method": "gi", "points": 50, "shape": [1, 8, 8], "numbers": 3200}
    assert told["calibration"] is not None
    shown = run("inspect", trained).stdout
    assert "M = 50 inducing inputs of 1 × 8 × 8: 3,200 numbers" in shown
    assert "global inducing points" in shown
    refusal = run("prune", trained, "--keep", "0.5", "--out", tmp_path / "pruned.safetensors").exception
    assert isinstance(refusal, ConversionError)
    assert "nothing to prune" in str(refusal)


def test_training_moves_every_part_and_draws_differ(trained: Path) -> None:
    model = load(trained)
    assert isinstance(model.factors, SequentialFactors)
    outputs = model.predict(torch.rand(3, 1, 8, 8), 8, 0, keep_outputs=True).outputs
    assert outputs is not None
    assert outputs.std(0).min() > 0
    for layer in model.network.layers.values():
        q = layer.posterior
        assert isinstance(q, GlobalPoints)
        assert isinstance(q.prior, ScalePrior)
        assert q.log_lam.std() > 0.01
        assert q.prior.alpha != q.prior.beta


@pytest.mark.slow
def test_draws_are_distilled_to_an_ensemble_that_is_as_good(learned: Path, tmp_path: Path) -> None:
    """After 300 steps, eight members of M = 16 missed a quarter of the outputs' variance, and 2 % of the accuracy."""
    out = tmp_path / "small.safetensors"
    done = run("compact", learned, "--members", "8", "--steps", "150", "--out", out)
    assert done.exit_code == 0, done.exception
    small, large = load(out), load(learned)
    assert small.card.metrics["accuracy"] > large.card.metrics["accuracy"] - 0.2
    assert float(done.output.split("miss ")[1].split("%")[0]) < 60


def test_draws_are_distilled_to_an_ensemble(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    done = run("compact", trained, "--members", "8", "--steps", "10", "--out", out)
    assert done.exit_code == 0, done.exception
    assert "the members miss " in " ".join(done.output.split())
    small = load(out)
    assert {layer.entry.method for layer in small.network.layers.values()} == {"ensemble-u"}
    outputs = small.predict(torch.rand(3, 1, 8, 8), 8, 0, keep_outputs=True).outputs
    assert outputs is not None
    assert outputs.std(0).min() > 0
    refused = run("export", trained, tmp_path / "large.onnx").exception
    assert "gi layers cannot be exported. Distil it" in str(refused)


def test_members_that_have_room_are_the_draws_themselves(tmp_path: Path) -> None:
    """With M of the size of the layers, least squares alone gives the weights of each draw."""
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    network = bayesianize(build("mlp", inputs=4, hidden=[5], outputs=3), "gi", inducing=6, examples=(x, None))
    save(network, tmp_path / "model", card=Card(input=Input(shape=(4,))))
    model = load(tmp_path / "model")
    _, share = distil(model, x, members=3, inducing=6, steps=0, lr=0.1)
    assert share < 1e-3
