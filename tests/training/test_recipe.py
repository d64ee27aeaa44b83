"""What a recipe cannot end in is refused before it is trained, and what an artifact promises outlasts its pruning."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models import load, save
from dubito.models.embedded import embedded
from dubito.models.errors import DubitoError
from dubito.training.config import read_recipe
from dubito.training.prune import recipe_of
from dubito.training.recipe import Phases, TrainingStopped, build_network, make_bayesian, read_parts, train

pytestmark = pytest.mark.usefixtures("few_requests")


def refused(*command: str | Path) -> str:
    answer = CliRunner().invoke(app, [str(part) for part in command])
    assert isinstance(answer.exception, DubitoError), answer.output
    return str(answer.exception)


def table(path: Path, n: int, scale: float = 1.0) -> Path:
    x = np.random.default_rng(0).normal(size=(n, 3))
    lines = [",".join(map(repr, [*map(float, row), float(row.sum() * scale)])) for row in x]
    path.write_text("\n".join(["a,b,c,target", *lines]))
    return path


@pytest.mark.parametrize(
    ("n", "scale", "changes", "said"),
    [
        (50, 1.0, [], "4 examples are too few to calibrate on"),
        (150, 1.0, ["data.calibration=0.1"], "12 examples are too few to calibrate on"),
        (400, 1.0, ["calibrate.coverage=0.99"], "need at least 99"),
        (400, 1.0, ["calibrate.temperature=true"], "a temperature belongs to classification"),
        (400, 1e-23, [], "expected one between 1e-15 and 1e15"),
        (400, 0.0, [], "are all 0; expected numbers that differ"),
        (400, 1e20, [], "expected one between 1e-15 and 1e15"),
    ],
)
def test_what_would_fail_after_training_fails_before(
    n: int, scale: float, changes: list[str], said: str, tmp_path: Path
) -> None:
    file = table(tmp_path / "t.csv", n, scale)
    options = [f"--set={c}" for c in ["task=regression", *changes]]
    assert said in refused("train", f"csv:{file}", *options, "--out", tmp_path / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_network_for_other_inputs_is_refused_whatever_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, *_, **__: tensor)  # 86 million numbers nobody asks for
    changes = ["--set=network.architecture=torchvision/vit_b_16", "--set=network.arguments={}"]
    said = refused("train", "digits", *changes, "--out", tmp_path / "m.safetensors")
    assert said.startswith("network.architecture: torchvision/vit_b_16 cannot take inputs of shape (1, 8, 8)")


def test_a_fresh_run_that_was_stopped_goes_on_without_fresh(tmp_path: Path) -> None:
    """The same command would start anew."""
    recipe = read_recipe("digits", ["fit.pretrain_epochs=0"])
    parts = read_parts(recipe, None)
    declared = load(embedded("digits")).card.input
    assert declared is not None
    fitting = Phases(recipe, parts, declared, tmp_path / "m.safetensors", torch.device("cpu"), fresh=True)
    network = make_bayesian(build_network(recipe, parts, declared), recipe, parts, declared, "prior")
    asked: list[int] = []

    def ask_once(*_: object) -> None:
        if not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    next(iter(network.layers.values())).register_forward_hook(ask_once)
    with pytest.raises(TrainingStopped) as stopped:
        fitting.fit(network, recipe.fit, "posterior")
    assert "The same command without --fresh goes on from there." in str(stopped.value)


@pytest.mark.parametrize("method", ["ffg-u", pytest.param("ensemble-w", marks=pytest.mark.slow)])
def test_an_estimate_changes_nothing(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It times steps of copies, and puts the random numbers back; what follows is the same to the bit."""
    short = ["fit.pretrain_epochs=2", "fit.epochs=3", "fit.likelihood_epochs=0", "fit.warmup_epochs=1"]
    short += ["task=regression", "network.arguments={hidden=[6]}", f"posterior.method={method}", "fit.patience=none"]
    short += ["posterior.options={members=2}" if method == "ensemble-w" else "posterior.options={inducing=3}"]
    recipe = read_recipe(f"csv:{table(tmp_path / 't.csv', 300)}", short)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, estimate in zip(files, (False, True), strict=True):
        assert train(recipe, file, estimate=estimate) is not None
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("about ")]
        assert len(said) == estimate
    assert re.fullmatch(r"about .*: plain network .*, posterior .*, calibration and measurement .*", said[0])
    assert load(files[0]).manifest.sha256 == load(files[1]).manifest.sha256


@pytest.mark.usefixtures("few_here")
def test_pruning_keeps_what_was_promised_since_training(tmp_path: Path) -> None:
    """A model may have been calibrated and stored anew; its recipe says what it was trained for."""
    file = tmp_path / "m.safetensors"
    command = ["calibrate", str(embedded("digits")), "--data", "digits", "--coverage", "0.5", "--directions", "2"]
    answer = CliRunner().invoke(app, [*command, "--temperature", "--sets", "probability", "--out", str(file), "--json"])
    assert answer.exit_code == 0, answer.exception
    told = json.loads(answer.stdout)  # measured anew, on the test part: no set is without its first class
    assert told["coverage"] == told["accuracy"] > 0.9
    save(load(file), file, precision="float16")
    recipe = recipe_of(load(file))
    assert recipe.precision == "float16"
    assert (recipe.calibrate.coverage, recipe.calibrate.false_positive_rate) == (0.5, 0.05)
    assert (recipe.calibrate.directions, recipe.calibrate.temperature) == (2, True)
    assert (recipe.calibrate.sets, recipe.calibrate.per) == ("probability", None)
    assert recipe.fit == read_recipe("digits").fit


def test_inputs_that_repeat_are_not_remembered(tmp_path: Path) -> None:
    """Of a table of few values, fresh rows look like old ones; only what occurs once can be known again."""
    rng = np.random.default_rng(0)

    def rows(n: int) -> str:
        few = rng.integers(0, 3, (n, 3))
        return "\n".join(f"{a},{b},{c},{'even' if (a + b + c) % 2 == 0 else 'odd'}" for a, b, c in few)

    for name, n in (("train", 600), ("fresh", 300)):
        (tmp_path / f"{name}.csv").write_text(f"a,b,c,sum\n{rows(n)}\n")
    out = tmp_path / "m.safetensors"
    quick = ["--set", "fit.epochs=1", "--set", "fit.pretrain_epochs=0", "--set", "fit.likelihood_epochs=0"]
    quick += ["--set", "fit.warmup_epochs=0", "--device", "cpu"]
    done = CliRunner().invoke(app, ["train", f"csv:{tmp_path}/train.csv", "--out", str(out), *quick])
    assert done.exit_code == 0, done.output
    assert load(out).card.provenance.train_sample == ()
    again = ["calibrate", str(out), "--data", f"csv:{tmp_path}/fresh.csv", "--out", str(tmp_path / "c.safetensors")]
    assert CliRunner().invoke(app, again).exit_code == 0
