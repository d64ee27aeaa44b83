"""Figures that would be too good, or of something else, are told or refused, not printed."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from dubito.models.conversion.architectures import FACTORIES
from dubito.models.disk import alone
from tests import forked
from tests.training.test_laplace_cli import QUICK
from tests.training.test_train import refused, run

pytestmark = pytest.mark.usefixtures("few_requests")


def table(path: Path, rows: int = 200, copies: int = 1, order: str = "abk", seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, rows))
    columns = {"a": a, "b": b, "k": np.where(a + b + rng.standard_normal(rows) > 0, "yes", "no")}
    lines = [",".join(str(columns[name][i]) for name in order) for i in range(rows)] * copies
    path.write_text("\n".join([",".join(order), *lines]) + "\n")
    return f"csv:{path}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    told = run("train", table(folder / "t.csv"), "--out", folder / "m.safetensors", *QUICK)
    assert told.exit_code == 0, told.exception
    return folder


def test_inputs_that_were_trained_on_are_told(trained: Path) -> None:
    own = run("evaluate", trained / "m.safetensors", "--data", f"csv:{trained / 't.csv'}")
    assert "training inputs" not in own.stderr
    text = (trained / "t.csv").read_text()
    (trained / "longer.csv").write_text(text + "0.5,0.5,yes\n")
    longer = run("evaluate", trained / "m.safetensors", "--data", f"csv:{trained / 'longer.csv'}")
    assert "of 201 inputs are among the" in longer.stderr
    said = " ".join(longer.stderr.split())
    assert "training inputs that the artifact remembers: figures on such are too good" in said


@pytest.mark.parametrize("command", ["train", "recipe", "calibrate", "export"])
def test_a_file_that_is_read_is_not_written(command: str, trained: Path, tmp_path: Path) -> None:
    data, model = tmp_path / "t.csv", tmp_path / "m.safetensors"
    data.write_bytes((trained / "t.csv").read_bytes())
    model.write_bytes((trained / "m.safetensors").read_bytes())
    before = [file.read_bytes() for file in (data, model)]
    recipe = tmp_path / "r.toml"
    digits = files("dubito.training.recipes").joinpath("digits.toml").read_text()
    recipe.write_text(digits.replace('name = "digits"', f'name = "csv:{data}"'))
    words: dict[str, list[str | Path]] = {
        "train": ["train", f"csv:{data}", "--out", data, *QUICK],
        "recipe": ["train", recipe, "--out", data],
        "calibrate": ["calibrate", model, "--data", f"csv:{data}", "--out", data],
        "export": ["export", model, model],
    }
    assert "which is read; expected another file" in refused(*words[command])
    assert [file.read_bytes() for file in (data, model)] == before


def test_two_trainings_to_one_file_are_kept_apart(tmp_path: Path) -> None:
    with alone(tmp_path / ".m.lock"):
        (tmp_path / "m.choice.json").write_text("{}")  # of the other one
        process = forked.run("train", table(tmp_path / "t.csv"), "--out", str(tmp_path / "m.safetensors"), *QUICK)
    assert process.returncode == 2
    assert "another process trains" in process.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"t.csv", "m.choice.json"}
    assert (tmp_path / "m.choice.json").read_text() == "{}"
    assert run("train", f"csv:{tmp_path / 't.csv'}", "--out", tmp_path / "m.safetensors", *QUICK).exit_code == 0
    assert not list(tmp_path.glob(".*"))


def test_rows_that_repeat_are_told(tmp_path: Path) -> None:
    told = run("train", table(tmp_path / "t.csv", copies=3), "--out", tmp_path / "m.safetensors", *QUICK)
    said = " ".join(told.stderr.split())
    assert "examples are in the training part, too (" in said
    assert "of the test part, " in said


def test_models_that_take_columns_in_another_order_are_not_compared(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    assert run("train", table(tmp_path / "t.csv", order="bak"), "--out", other, *QUICK).exit_code == 0
    asked = ("evaluate", trained / "m.safetensors", "--data", f"csv:{trained / 't.csv'}", "--against")
    assert "has the columns b, a, the first model a, b" in refused(*asked, other)
    assert run(*asked, trained / "m.safetensors").exit_code == 0


def test_a_network_of_priors_alone_has_nothing_to_train(tmp_path: Path) -> None:
    prior = ["--set=posterior.method=prior", "--set=posterior.options={}", "--set=fit.epochs=2"]
    told = run("train", table(tmp_path / "t.csv"), "--out", tmp_path / "m.safetensors", *QUICK, *prior)
    assert told.exit_code == 0, told.exception


def test_a_softmax_at_the_end_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTORIES, "tests:soft", lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))
    soft = [*QUICK, "--set=network.architecture=tests:soft", "--set=network.arguments={}", "--dry-run"]
    said = refused("train", table(tmp_path / "t.csv"), "--out", tmp_path / "m.safetensors", *soft)
    assert "tests:soft's outputs are probabilities" in said


def test_whole_numbers_that_are_many_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = "\n".join(f"{a},{int(100 * a)}" for a in rng.standard_normal(200))
    (tmp_path / "t.csv").write_text(f"a,price\n{rows}\n")
    told = run("train", f"csv:{tmp_path / 't.csv'}", "--out", tmp_path / "m.safetensors", *QUICK, "--set=fit.epochs=1")
    said = " ".join(told.stderr.split())
    assert "whole numbers are taken for classes; to predict numbers: --set task=regression" in said


def test_laplace_of_a_regression_fits_no_temperature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = "\n".join(f"{a},{b},{a - b + 0.1 * c}" for a, b, c in rng.standard_normal((300, 3)))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}\n")
    plain = [
        "--set=posterior.method=deterministic",
        "--set=posterior.options={}",
        "--set=task=regression",
        "--set=noise=constant",
    ]
    data = f"csv:{tmp_path / 't.csv'}"
    told = run("train", data, "--out", tmp_path / "m.safetensors", *QUICK, *plain)
    assert told.exit_code == 0, told.exception
    told = run("laplace", tmp_path / "m.safetensors", "--data", data, "--out", tmp_path / "l.safetensors", "--size=20")
    assert told.exit_code == 0, told.exception
