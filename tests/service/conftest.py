"""Real servers: each `dubito serve` of its own, on a free port."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from dubito.models import bayesianize, build, save
from dubito.models.embedded import embedded
from dubito.models.manifest import Calibration, Card, Image, Input, Regression
from dubito.models.names import Measure
from dubito.models.predictions.uncertainty import Classified, Regressed, known_in
from dubito.service.engine.budget import Budget
from dubito.service.engine.device import Device
from dubito.service.metrics import Metrics
from dubito.service.repository import Repository
from dubito.service.settings import Settings
from tests import forked
from tests.forking import Forked
from tests.small_models import mlp

LIMIT = 90.0  # seconds to start or to stop on a busy machine
for kind in ("connect", "read", "write", "pool"):  # of every request that names no timeout: httpx gives it 5 seconds
    setattr(DEFAULT_TIMEOUT_CONFIG, kind, LIMIT)
# a server starts sooner by seconds
SOON = {"DUBITO_PLAN_SECONDS": "0", "DUBITO_BUCKETS": "1,4", "DUBITO_DECODE_PROCESSES": "1"}
TWO_DECODERS = {"DUBITO_DECODE_PROCESSES": "2"}  # the server's default: long bodies do not keep short ones waiting
# a server that was timed on a busy machine would answer in many small parts, which takes ten times as long
WHOLE = ("--set", "slice_ms=60000")


@dataclass
class Live:
    """A server in a process of its own."""

    process: Forked
    url: str
    log: Path
    stdout: IO[str]  # open as long as the server may write to it
    grpc: str = ""  # host and port, with `--grpc-port`

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def pid(self) -> int:
        return self.process.pid

    def logged(self, word: str) -> list[dict[str, Any]]:
        """The lines of its log, once one has this word: they are written soon after the reply."""
        end = time.monotonic() + LIMIT
        while word not in (text := self.log.read_text()) or not text.endswith("\n"):
            assert time.monotonic() < end, f"no line has {word!r}: {text}"
            time.sleep(0.01)
        return [json.loads(line) for line in text.splitlines()]

    def send(self, number: int) -> None:
        self.process.send(number)

    def wait(self) -> int:
        """Its exit code."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, f"the server still runs: {self.log.read_text()}"
        return self.process.exitcode

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.send(number)
        return self.wait()


Serve = Callable[..., Live]


def fields_of(summary: Classified | Regressed) -> dict[str, torch.Tensor]:
    """What replies hold of a summary; energy and distances are there as an OOD score only."""
    return {name: values for name, values in known_in(summary).items() if name not in ("energy", "distance")}


@dataclass
class Starter:
    folder: Path
    code: str = forked.DUBITO
    usual: dict[str, str] = field(default_factory=lambda: {"DUBITO_REPOSITORY_API": "true"} | SOON)  # environment
    running: list[Live] = field(default_factory=list)

    def __call__(self, *arguments: str | Path, **environment: str) -> Live:
        """`dubito serve ARGUMENTS --port 0`, once it is ready."""
        log = self.folder / f"serve-{len(self.running)}.log"
        reader, writer = os.pipe()
        stdout = os.fdopen(reader)
        with log.open("w") as file, os.fdopen(writer, "w") as out:
            process = forked.start(
                self.code,
                ["serve", *arguments, "--port", "0"],
                stdout=out,
                stderr=file,
                folder=self.folder,
                environment={**self.usual, **environment},
            )
        url, rpc = _greeting(process, stdout, log)
        self.running.append(Live(process, url, log, stdout, rpc))
        return self.running[-1]

    def close(self) -> None:
        for live in self.running:
            live.process.kill()  # of no effect on one that has ended
            live.process.join()
            live.process.close()
            live.stdout.close()


def _greeting(process: Forked, stdout: IO[str], log: Path) -> tuple[str, str]:
    watchdog = threading.Timer(LIMIT, process.kill)
    watchdog.start()
    said = ""
    try:
        for line in stdout:
            said += line
            if found := re.search(r"console (http://\S+)/.*?metrics \S+(?:   gRPC (\S+))?", line):
                return found[1], found[2] or ""
    finally:
        watchdog.cancel()
    process.join()
    process.close()
    stdout.close()
    raise AssertionError(f"the server did not start: {said}{log.read_text()}")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    starter = Starter(tmp_path_factory.mktemp("servers"))
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server of the embedded digits for all tests that leave it as it is."""
    starter = Starter(tmp_path_factory.mktemp("live"))
    yield starter(embedded("digits"), *WHOLE)
    starter.close()


@pytest.fixture(scope="session")
def make_artifact() -> Callable[..., Path]:
    return write_artifact


COLUMNS, TARGETS = ("rooms", "area", "age", "floor"), ("price", "rent")  # of `regression`


def write_artifact(path: Path, *, seed: int = 0, kind: str = "tabular", method: str = "ffg-u") -> Path:
    """A small model, made in milliseconds: `tabular`, `image` (3 × 8 × 8) or `regression`."""
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = kind == "image"
    shape = (3, 8, 8) if image else (4,)
    outputs = 4 if kind == "regression" else 3  # two means and two raw log-deviations
    net = mlp(192 if image else 4, 16, outputs)
    task = None
    if kind == "regression":
        task = Regression(outputs=2, noise="input", shift=(1.0, -2.0), scale=(2.0, 0.5))
    network = bayesianize(net, method, task=task, inducing=4)
    measures: tuple[Measure, ...] = (
        ("epistemic_variance",) if kind == "regression" else ("entropy", "mutual_information", "max_probability")
    )
    grid = (0, 1, 8, 20)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure=measures[0],
        thresholds={m: {K: 0.5 + 0.01 * K for K in grid} for m in measures},
        quantiles={K: (1.5 if kind == "regression" else 0.7) + 0.001 * K for K in grid},
    )
    card = Card(
        input=Input(
            shape=shape,
            image=Image(mean=(0.5,) * 3, std=(0.25,) * 3) if image else None,
            columns=COLUMNS if kind == "regression" else None,
        ),
        labels=None if kind == "regression" else ("ant", "bee", "cat"),
        targets=TARGETS if kind == "regression" else None,
        calibration=calibration,
    )
    save(network, path, card=card)
    return path


@pytest.fixture(scope="session")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An artifact of the network in `fragile.py`, and the environment in which a server finds it."""
    site = tmp_path_factory.mktemp("site")
    (site / "fragile.py").write_text(Path(__file__).with_name("fragile.py").read_text())
    info = site / "fragile-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dubito.architectures]\nfragile = fragile:Fragile\n")
    sys.path.insert(0, str(site))
    try:
        network = bayesianize(build("fragile"), "ffg-u", inducing=2)
        path = site / "fragile.safetensors"
        save(network, path, card=Card(input=Input(shape=(4,)), labels=("ant", "bee", "cat")))
    finally:
        sys.path.remove(str(site))
    return path, {"PYTHONPATH": str(site)}


def repository_on(device: torch.device, dtype: torch.dtype, settings: Settings) -> Repository:
    """The models of the settings, to be loaded on one device."""
    return Repository(settings, [Device(str(device), device, dtype, Budget.of(0, device))], Metrics())
