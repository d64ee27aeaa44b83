"""Deep Gaussian processes the whole way: recipe, training, calibration, `inspect`, and an artifact that answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dubito.models import load
from dubito.models.errors import ConversionError
from dubito.models.network.sequence import SequentialFactors
from dubito.models.posteriors.deep_gp import GlobalProcess
from tests.training.test_train import run

pytestmark = pytest.mark.usefixtures("few_requests")
CHANGES = {
    "task": "regression",
    "network.architecture": "deep-gp",
    "network.arguments": "{layers=2, standardise=true}",
    "posterior.method": "dgp",
    "posterior.options": "{inducing=30}",
    "posterior.layers": "{}",
    "fit.pretrain_epochs": "0",
    "fit.epochs": "30",
    "fit.noise_epochs": "0",
    "fit.batch": "64",
    "fit.lr": "0.03",
    "fit.samples": "1",
    "noise": "constant",
}


def write_table(folder: Path) -> Path:
    """y = sin(2a) + noise, in units of their own; b says nothing."""
    rng = torch.Generator().manual_seed(0)
    a, b, e = torch.randn(3, 300, generator=rng)
    y = 50 + 10 * ((2 * a).sin() + 0.1 * e)
    rows = [f"{100 * u:.4f},{v:.4f},{w:.4f}" for u, v, w in zip(a.tolist(), b.tolist(), y.tolist(), strict=True)]
    file = folder / "waves.csv"
    file.write_text("\n".join(["a,b,y", *rows]) + "\n")
    return file


def train(folder: Path, **changes: str) -> Path:
    words = [f"--set={k}={v}" for k, v in (CHANGES | changes).items()]
    done = run("train", f"csv:{write_table(folder)}", "--target", "y", "--out", folder / "waves.safetensors", *words)
    assert done.exit_code == 0, done.output
    return folder / "waves.safetensors"


@pytest.fixture(scope="module")
def trained(few_requests: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For as long as the journey needs."""
    return train(tmp_path_factory.mktemp("dgp"), **{"fit.epochs": "3"})


@pytest.mark.slow
def test_a_recipe_learns_to_know_the_function(tmp_path: Path) -> None:
    """The targets' noise is 1, their standard deviation 7."""
    told: Any = json.loads(run("inspect", train(tmp_path), "--json").stdout)
    assert told["metrics"]["rmse"] < 3


def test_a_recipe_becomes_an_artifact(trained: Path) -> None:
    told: Any = json.loads(run("inspect", trained, "--json").stdout)
    assert {row["method"] for row in told["layers"]} == {"dgp"}
    assert told["inducing_inputs"]["points"] == 30
    assert told["calibration"] is not None
    shown = run("inspect", trained).stdout
    assert "M = 30 inducing inputs of 2: 60 numbers" in shown
    assert "deep Gaussian process with global inducing points" in shown


def test_training_moves_every_part_and_doubt_grows_away_from_the_data(trained: Path) -> None:
    model = load(trained)
    assert isinstance(model.factors, SequentialFactors)
    qs = [layer.q for layer in model.network.layers.values()]
    for q in qs:
        assert isinstance(q, GlobalProcess)
        assert q.V.std() > 0
        assert q.log_lam.std() > 0.01
        assert q.below.std() > 0
    outputs = model.predict(torch.tensor([[0.0, 0.0], [5000.0, 0.0]]), 32, 0, keep_outputs=True).outputs
    assert outputs is not None
    near, far = outputs.std(0).flatten().tolist()
    assert far > 2 * near > 0


def test_what_cannot_be_done_says_what_can(trained: Path, tmp_path: Path) -> None:
    exported = run("export", trained, tmp_path / "no.onnx").exception
    assert "dgp layers cannot be exported. Serve it with dubito serve" in str(exported)
    distilled = run("compact", trained, "--members", "4", "--out", tmp_path / "no.safetensors").exception
    assert isinstance(distilled, ConversionError)
    assert "no weights to distil. Serve the model as it is, or train gi" in str(distilled)
    pruned = run("prune", trained, "--keep", "0.5", "--out", tmp_path / "no.safetensors").exception
    assert isinstance(pruned, ConversionError)
    assert "nothing to prune" in str(pruned)
