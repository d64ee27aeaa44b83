"""A run that was broken off, at any moment and in any way, ends where an unbroken one does."""

import csv
import json
import os
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torchvision.transforms import v2

from dubito.models import bayesianize, build
from dubito.models.network.network import BayesianNetwork
from dubito.training.config import Context, Fit, Recipe, read_recipe
from dubito.training.data.data import Parts, divide, input_of
from dubito.training.data.sources import read_data
from dubito.training.fit.checkpoint import KEY, resume, save_checkpoint, write_whole
from dubito.training.fit.fit import FitError, FitRun
from dubito.training.fit.function_space import FunctionSpace
from dubito.training.fit.stop import stoppable
from dubito.training.recipe import TrainingStopped, train
from tests import forked
from tests.files import files_in
from tests.small_models import bayesian_mlp

pytestmark = pytest.mark.usefixtures("few_requests")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts() -> Parts:
    return divide(read_data("digits"), 0.05, 0.1, 0.2, seed=0)


RECIPE = read_recipe("digits")


def network(architecture: str = "mlp", method: str = "ffg-u") -> BayesianNetwork:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"inputs": 64, "outputs": 10, "hidden": [8]}
    if architecture == "cnn":
        sizes = {"size": 8, "width": 4, "hidden": 8}
    options: dict[str, Any] = {"members": 3} if method.startswith("ensemble") else {}
    return bayesianize(build(architecture, **sizes), method, inducing=4, **options)


def start(parts: Parts, made: BayesianNetwork | None = None, **fit: Any) -> FitRun:
    augment = v2.RandomAffine(20) if fit.pop("augment", False) else None
    settings = Fit(**{"epochs": 3, "batch": 32, "likelihood_epochs": 1, **fit})
    made, declared = network() if made is None else made, input_of(parts.train)
    functions = None
    if settings.objective == "function-space":
        functions = FunctionSpace.of(Context(points=4, inputs="spoiled"), made, parts.train, declared)
    return FitRun(made, parts.train[:100], parts.validation, declared, settings, 3, CPU, augment, functions)


def finish(run: FitRun) -> FitRun:
    while not run.done:
        run.epoch()
    run.finish()
    return run


def go(run: FitRun, steps: int) -> None:
    while run.step < steps:
        run.epoch(stop=lambda: run.step >= steps)


def same(a: FitRun, b: FitRun) -> None:
    """To the bit, in the parameters, the buffers, the optimiser and the log but for its seconds."""
    for left, right in ((a.network.state_dict(), b.network.state_dict()), (a.state().tensors, b.state().tensors)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left), [
            k for k in left if not torch.equal(left[k], right[k])
        ]
    assert [asdict(e) | {"seconds": 0} for e in a.log] == [asdict(e) | {"seconds": 0} for e in b.log]


KINDS: dict[str, dict[str, Any]] = {
    "function-space": {"objective": "function-space"},
    "adam": {"augment": True},
    "sgd": {"optimiser": "sgd", "lr": 0.01, "clip": 1.0},
    "samples": {"samples": 2, "warmup_epochs": 1},
    "patience": {"patience": 1, "epochs": 6, "lr": 0.3, "schedule": "constant"},
}


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, parts: Parts) -> tuple[str, FitRun]:
    """A kind of run, and one of it that was not broken off."""
    return request.param, finish(start(parts, **KINDS[request.param]))


def test_a_checkpoint_goes_on_to_the_same_bits(parts: Parts, tmp_path: Path, whole: tuple[str, FitRun]) -> None:
    """Broken off in the middle of an epoch of 4 steps, at its end, and in the middle of the next one."""
    path, (kind, unbroken) = tmp_path / "c", whole
    run = start(parts, **KINDS[kind])
    for steps in (3, 4, 6):
        go(run, steps)
        save_checkpoint(run, RECIPE, path)
        torch.manual_seed(99)
        run = start(parts, bayesian_mlp((64, 8, 10), "ffg-u", inducing=4), **KINDS[kind])
        resume(run, RECIPE, path)
        assert run.step == steps
    same(finish(run), unbroken)


@pytest.mark.parametrize(
    ("architecture", "method"), [("cnn", "ffg-u"), ("mlp", "ensemble-u"), ("cnn", "ensemble-w"), ("mlp", "fcg-u")]
)
def test_whatever_the_network(parts: Parts, tmp_path: Path, architecture: str, method: str) -> None:
    """BatchNorm's statistics and an ensemble's turns are part of a run."""
    broken, other, unbroken = (start(parts, network(architecture, method), epochs=2) for _ in range(3))
    go(broken, 6)
    save_checkpoint(broken, RECIPE, tmp_path / "c")
    resume(other, RECIPE, tmp_path / "c")
    same(finish(other), finish(unbroken))


def test_a_checkpoint_of_a_finished_run_is_finished(parts: Parts, tmp_path: Path) -> None:
    """A rate that moves no weight: no epoch is better than the first that counts, so patience ends the run."""
    still: dict[str, Any] = {"patience": 1, "epochs": 6, "lr": 1e-30, "schedule": "constant"}
    done = start(parts, **still)
    while not done.done:
        done.epoch()
    assert len(done.log) == 3  # one of the likelihood alone, the best, and one that is no better
    with torch.no_grad():
        for p in done.network.parameters():
            p.add_(1)  # what the run ends with is not its best, which `finish` must bring back
    save_checkpoint(done, RECIPE, tmp_path / "c")
    other = start(parts, **still)
    best = {k: v.clone() for k, v in other.network.state_dict().items()}
    resume(other, RECIPE, tmp_path / "c")
    assert other.done
    same(finish(other), finish(done))
    torch.testing.assert_close(other.network.state_dict(), best, rtol=0, atol=1e-25)


def test_a_checkpoint_is_safetensors_and_json_and_nothing_is_left_beside_it(parts: Parts, tmp_path: Path) -> None:
    run = start(parts)
    go(run, 5)
    path = tmp_path / "run.safetensors"
    save_checkpoint(run, RECIPE, path)
    save_checkpoint(run, RECIPE, path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]
    tensors = load_file(path)
    assert torch.equal(
        tensors["network.net.1.posterior.Z_r.value"], run.network.state_dict()["net.1.posterior.Z_r.value"]
    )


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    write_whole(tmp_path / "a", b"new")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    with pytest.raises(FitError, match=r"cannot write .*folder"):
        write_whole(tmp_path / "folder", b"x")
    with pytest.raises(FitError, match=r"cannot write .*: No such file"):
        write_whole(tmp_path / "nowhere" / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "folder"]


# checkpoints that cannot be gone on from


def said_of(run: FitRun, recipe: Recipe, path: Path, **options: str) -> str:
    before = run.state().tensors
    with pytest.raises(FitError) as caught:
        resume(run, recipe, path, **options)
    assert "--fresh" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in run.state().tensors.items())
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(start(parts), RECIPE, path, origin="data")
    other = RECIPE.model_copy(update={"seed": 5})
    assert "its recipe differs" in said_of(start(parts), other, path, origin="data")
    assert "its data or start differs" in said_of(start(parts), RECIPE, path, origin="other data")
    assert "its batches per epoch differs" in said_of(start(parts, batch=16), RECIPE, path, origin="data")


def test_a_file_that_is_no_checkpoint_is_refused(parts: Parts, tmp_path: Path) -> None:
    path, run = tmp_path / "c", start(parts)
    save_checkpoint(run, RECIPE, path)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[:20], whole[:-1], whole[: len(whole) // 2], bytes(1000)):
        path.write_bytes(content)
        assert "is no checkpoint that can be read" in said_of(run, RECIPE, path)
    zeros = {"a": torch.zeros(2)}
    for metadata in (None, {"other": "{}"}, {KEY: "no JSON"}, {KEY: "3"}, {KEY: "{}"}, {KEY: "[]"}):
        save_file(zeros, path, metadata)
        assert "is no checkpoint that can be read" in said_of(run, RECIPE, path)


def test_a_checkpoint_of_another_network_is_refused(parts: Parts, tmp_path: Path) -> None:
    save_checkpoint(start(parts, network("cnn")), RECIPE, tmp_path / "c")
    with pytest.raises(FitError, match=r"does not fit this network \(Error.*--fresh"):
        resume(start(parts), RECIPE, tmp_path / "c")


# Ctrl-C


def test_the_first_signal_asks_and_the_second_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stoppable() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# the whole of `train`, broken off

SMALL = [
    "network.architecture=mlp",
    "network.arguments={hidden=[8]}",
    "posterior.options={inducing=4}",
    "fit.likelihood_epochs=1",
    "fit.warmup_epochs=2",
    "fit.batch=100",  # four batches an epoch: 337 pictures
    "data.test=0.75",
]


class SignalAt(v2.Transform):  # type: ignore[misc]  # torchvision ships no types
    """An augmentation that sends its own process a signal when the nth picture comes."""

    left = 0

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        before = SignalAt.left
        SignalAt.left -= len(inpt)
        if before > 0 >= SignalAt.left:
            os.kill(os.getpid(), signal.SIGTERM)
        return inpt


def recipe_with_signals(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(v2, "SignalAt", SignalAt, raising=False)
    changes = ["fit.pretrain_epochs=2", "fit.epochs=4", "data.augment=[{SignalAt={}}]"]
    return read_recipe("digits", [*SMALL, *changes])


def lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [row | {"seconds": ""} for row in csv.DictReader(file)]


TRIAL, BATCH, EPOCH = 2, 100, 337  # pictures; each phase tries its augmentation on two before it starts


def test_signals_in_either_phase(
    unbroken: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run that is stopped again and again, each time so many pictures after it went on."""
    recipe, out = recipe_with_signals(monkeypatch), tmp_path / "m.safetensors"
    for picture, steps in (
        (TRIAL + BATCH + 1, "2 of 8 (plain)"),
        (TRIAL + (EPOCH - 2 * BATCH) + 3 * BATCH + 1, "8 of 8 (plain)"),  # in the last step of all
        (2 * TRIAL + 1, "1 of 16 (posterior)"),
        (2 * TRIAL + 2 * BATCH + 1, "4 of 16 (posterior)"),  # in the last step of an epoch
        (2 * TRIAL + 2 * EPOCH + 3 * BATCH + 1, "16 of 16 (posterior)"),
    ):
        monkeypatch.setattr(SignalAt, "left", picture)
        with pytest.raises(TrainingStopped) as caught:
            train(recipe, out)
        phase = "plain" if "plain" in steps else "posterior"
        assert f"stopped after step {steps}; " in str(caught.value)
        assert f"m.{phase}.checkpoint.safetensors holds it" in str(caught.value)
        assert f"m.{phase}.checkpoint.safetensors" in files_in(tmp_path)
        assert "m.safetensors" not in files_in(tmp_path)
    trained = train(recipe, out)
    assert trained is not None
    metrics, folder = unbroken
    assert trained.model.card.metrics == metrics
    assert files_in(tmp_path) == {"m.safetensors", "m.log.csv", "m.plain.log.csv"}
    for log in ("m.log.csv", "m.plain.log.csv"):
        assert lines(tmp_path / log) == lines(folder / log)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        trained = train(recipe_with_signals(patch), folder / "m.safetensors")
    assert trained is not None
    return trained.model.card.metrics, folder


def test_fresh_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = recipe_with_signals(monkeypatch), tmp_path / "m.safetensors"
    monkeypatch.setattr(SignalAt, "left", 2 * TRIAL + 3 * EPOCH)
    with pytest.raises(TrainingStopped):
        train(recipe, out)
    other = read_recipe("digits", [*SMALL, "fit.pretrain_epochs=1", "fit.epochs=3"])
    with pytest.raises(FitError, match="its recipe differs"):
        train(other, out)
    trained = train(other, out, fresh=True)
    assert trained is not None
    assert [e.epoch for e in trained.log] == [0, 1, 2]
    assert len(lines(tmp_path / "m.plain.log.csv")) == 1
    assert files_in(tmp_path) == {"m.safetensors", "m.log.csv", "m.plain.log.csv"}


def test_data_that_changed_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2, "SignalAt", SignalAt, raising=False)
    monkeypatch.setattr(SignalAt, "left", 30)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (400, 8, 8), dtype=np.uint8), rng.integers(0, 3, 400)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    changes = [*SMALL, "data.test=0.5", "fit.pretrain_epochs=0", "fit.epochs=12", "data.augment=[{SignalAt={}}]"]
    recipe = read_recipe(f"npz:{tmp_path / 'd.npz'}", changes)
    with pytest.raises(TrainingStopped):
        train(recipe, tmp_path / "m.safetensors")
    np.savez(tmp_path / "d.npz", x=255 - x, y=y)
    with pytest.raises(FitError, match="its data or start differs"):
        train(recipe, tmp_path / "m.safetensors")


# the command, killed

DRIVER = """
from dubito.training import recipe
from dubito.cli import main
recipe.BETWEEN = 0.02  # seconds between checkpoints
main()
"""
COMMAND = ["train", "digits", "--json", *(f"--set={c}" for c in SMALL), "--out", "m.safetensors"]
COMMAND += ["--set=fit.pretrain_epochs=10", "--set=fit.epochs=20"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def launch(folder: Path, logs: Path) -> forked.Begun:
    return forked.begin(DRIVER, COMMAND, folder, logs)


def answer(process: forked.Begun) -> dict[str, Any]:
    ended = process.end()
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return answer(launch(folder, logs)), folder


def wait_for(path: Path, process: forked.Begun, newer_than: int = 0) -> None:
    """Until the file is there, or is another than it was."""
    while process.runs and (not path.exists() or path.stat().st_mtime_ns <= newer_than):
        time.sleep(0.002)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path, logs: Path
) -> None:
    moments = random.Random(0)
    checkpoints = [tmp_path / f"m.{phase}.checkpoint.safetensors" for phase in ("plain", "posterior")]
    killed = 0
    for phase in (0, 1, 1):  # the last hits a run that had been resumed
        path = checkpoints[phase]
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = launch(tmp_path, logs)
        wait_for(path, process, before)
        time.sleep(moments.uniform(0, 0.15))
        process.send(signal.SIGKILL)
        killed += process.end().returncode == -signal.SIGKILL
        assert not (tmp_path / "m.safetensors").exists() or phase == 1
    assert killed >= 2  # the last may have come too late
    metrics, folder = uninterrupted
    assert answer(launch(tmp_path, logs)) == metrics
    assert (tmp_path / "m.safetensors").read_bytes() == (folder / "m.safetensors").read_bytes()
    for log in ("m.log.csv", "m.plain.log.csv"):
        assert lines(tmp_path / log) == lines(folder / log)
    assert files_in(tmp_path) == {"m.safetensors", "m.log.csv", "m.plain.log.csv"}


@pytest.mark.parametrize(("number", "phase"), [(signal.SIGINT, "posterior"), (signal.SIGTERM, "plain")])
def test_ctrl_c_leaves_a_checkpoint_and_says_so(number: signal.Signals, phase: str, tmp_path: Path, logs: Path) -> None:
    process = launch(tmp_path, logs)
    wait_for(tmp_path / f"m.{phase}.checkpoint.safetensors", process)
    process.send(number)
    ended = process.end()
    assert (ended.returncode, ended.stdout) == (130, "")
    said = f"({phase}); m.{phase}.checkpoint.safetensors holds it. The same command goes on from there."
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not any(name.endswith(".part") for name in files_in(tmp_path))
