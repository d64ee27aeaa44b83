"""Data-parallel training: two processes over gloo do what one does with the joint batch."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dubito.cli import app
from dubito.training.fit.ranks import Ranks
from tests import forked
from tests.files import files_in

# Each process follows the cases in turn; the first writes down what it found, and all say what they did.
DRIVER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch
from safetensors.torch import save_file
from dubito.models import bayesianize, build
from dubito.training.config import Fit
from dubito.training.data.data import divide, input_of
from dubito.training.data.sources import read_data
from dubito.training.fit.fit import FitError, FitRun
from dubito.training.fit.ranks import Ranks

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
parts = divide(read_data("digits"), 0.05, 0.1, 0.2, seed=0)
for name, case in cases.items():
    torch.manual_seed(Ranks.here().index)  # all ranks must start where the first does
    net = build(case["architecture"], **case["sizes"])
    run = FitRun(
        bayesianize(net, case["method"], **case["options"]), parts.train[:case["n"]],
        parts.validation[Ranks.here().index::2],  # what the first rank finds on its own part counts for all
        input_of(parts.train), Fit(**case["fit"]), 3, torch.device("cpu"),
    )
    stop = "stop" in case
    while not run.done:
        # one rank alone is asked to stop after its third step
        ended = run.epoch(stop=lambda: stop and run.ranks.index == run.ranks.count - 1 and run.step == 3)
        if not ended:
            break
    state = {f"{k}": v for k, v in run.network.state_dict().items()}
    mine = {"step": run.step, "log": [asdict(e) | {"seconds": 0} for e in run.log], "count": run.ranks.count}
    (folder / f"{name}.{run.ranks.index}.json").write_text(json.dumps(mine))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / f"{name}.{run.ranks.index}.safetensors")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
MLP: dict[str, Any] = {"architecture": "mlp", "sizes": {"inputs": 64, "outputs": 10, "hidden": [8]}}
CNN: dict[str, Any] = {"architecture": "cnn", "sizes": {"size": 8, "width": 4, "hidden": 8}}
INDUCING: dict[str, Any] = {"method": "ffg-u", "options": {"inducing": 4}}
ENSEMBLE: dict[str, Any] = {"method": "ensemble-w", "options": {"members": 2}}
CASES: dict[str, dict[str, Any]] = {
    "even": MLP | INDUCING | {"n": 128, "fit": {"epochs": 3, "batch": 32, "likelihood_epochs": 1, "warmup_epochs": 1}},
    "uneven": MLP | INDUCING | {"n": 119, "fit": {"epochs": 2, "batch": 33, "samples": 2, "clip": 0.5}},
    "batchnorm": CNN | INDUCING | {"n": 119, "fit": {"epochs": 2, "batch": 33, "optimiser": "sgd", "lr": 0.01}},
    "ensemble": MLP | ENSEMBLE | {"n": 100, "fit": {"epochs": 2, "batch": 25}},
    "patience": MLP | INDUCING | {"n": 64, "fit": {"epochs": 20, "batch": 32, "lr": 1e-30, "patience": 2}},
    "stop": MLP | INDUCING | {"n": 128, "fit": {"epochs": 2, "batch": 32}, "stop": True},
}


def torchrun(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, *command], cwd=cwd, env=ONE_THREAD, capture_output=True, text=True, timeout=180)


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process and what two left behind, a folder each."""
    home = tmp_path_factory.mktemp("ranks")
    (home / "driver.py").write_text(DRIVER)
    alone, together = home / "alone", home / "together"
    for folder in (alone, together):
        folder.mkdir()
    given = json.dumps(CASES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["driver.py", str(alone), given])
        runpy.run_path(str(home / "driver.py"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # as torchrun does
    two = []
    for rank in ("0", "1"):
        (home / rank).mkdir()
        two.append(forked.begin(DRIVER, [together, given], home, home / rank, {**told, "RANK": rank}))
    for process in two:
        ended = process.end()
        assert ended.returncode == 0, ended.stderr
    return alone, together


def told(folder: Path, case: str, rank: int) -> dict[str, Any]:
    known: dict[str, Any] = json.loads((folder / f"{case}.{rank}.json").read_text())
    return known


@pytest.mark.parametrize("case", ["even", "uneven", "batchnorm", "ensemble"])
def test_two_processes_do_what_one_does(found: tuple[Path, Path], case: str) -> None:
    alone, together = found
    one, two = told(alone, case, 0), told(together, case, 0)
    assert (one["count"], two["count"]) == (1, 2)
    assert one["step"] == two["step"] > 5
    for a, b in zip(one["log"], two["log"], strict=True):
        assert a.keys() == b.keys()
        assert all((a[key] is None) == (b[key] is None) for key in a)
        numbers = {key: value for key, value in a.items() if value is not None}
        assert {key: b[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    ours, theirs = (load_file(folder / f"{case}.0.safetensors") for folder in found)
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_stay_together_to_the_bit(found: tuple[Path, Path], case: str) -> None:
    """Also where patience or a wish to stop decides, which is one rank's alone."""
    _, together = found
    assert told(together, case, 0) == told(together, case, 1)
    first, second = (load_file(together / f"{case}.{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_stop_when_one_is_asked_to(found: tuple[Path, Path]) -> None:
    assert told(found[1], "stop", 0)["step"] == 3


def test_patience_was_lost(found: tuple[Path, Path]) -> None:
    """At that rate no weight moves, so that the first epoch stays the best."""
    assert len(told(found[1], "patience", 0)["log"]) == 3


@pytest.mark.slow
def test_the_command_under_torchrun_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same artifact's quality as one process finds, up to rounding, and no rank in the other's way."""
    changes = ["network.architecture=cnn", "network.arguments={width=4, hidden=8}", "posterior.options={inducing=4}"]
    changes += ["fit.pretrain_epochs=2", "fit.epochs=2", "fit.warmup_epochs=1", "fit.batch=101"]
    changes += ["data.test=0.1", "data.calibration=0.05"]
    command = ["train", "digits", "--json", "--device=cpu", *(f"--set={c}" for c in changes)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    one = CliRunner().invoke(app, command)
    assert one.exit_code == 0, one.exception
    two = torchrun("-m", "dubito", *command, cwd=tmp_path / "two")
    assert two.returncode == 0, two.stderr
    files = [files_in(tmp_path / name) for name in ("one", "two")]
    assert files[0] == files[1] == {"digits.safetensors", "digits.log.csv", "digits.plain.log.csv"}
    assert two.stdout.count("\n") == 1
    a, b = json.loads(one.stdout), json.loads(two.stdout)
    assert a["nll"] == pytest.approx(b["nll"], rel=1e-3)
    assert a["parameters"] == b["parameters"]
    assert two.stderr.count("posterior: epoch 2/2") == 1


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchrun for each node, here on one machine with a folder each; the first node writes, the other nothing."""
    few = ["network.architecture=cnn", "network.arguments={width=4, hidden=8}", "posterior.options={inducing=4}"]
    few += ["fit.pretrain_epochs=1", "fit.epochs=2", "fit.warmup_epochs=1", "fit.batch=101", "data.calibration=0.05"]
    command = ["train", "digits", "--json", "--device=cpu", *(f"--set={c}" for c in few)]
    for name in ("one", "0", "1"):
        (tmp_path / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for rank in ("0", "1"):
        where = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", str(port)]
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *where,
            "--nproc-per-node",
            "1",
            "-m",
            "dubito",
            *command,
        ]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(line, cwd=tmp_path / rank, env=ONE_THREAD, **pipes))
    said = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert files_in(tmp_path / "0") == {"digits.safetensors", "digits.log.csv", "digits.plain.log.csv"}
    assert files_in(tmp_path / "1") == set()
    monkeypatch.chdir(tmp_path / "one")
    one = CliRunner().invoke(app, command)
    assert one.exit_code == 0, one.exception
    a, b = json.loads(one.stdout), json.loads(said[0][0])
    assert a["nll"] == pytest.approx(b["nll"], rel=1e-3)


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # as some schedulers set, with nobody to meet
    assert Ranks.here() == Ranks(1, 0)
