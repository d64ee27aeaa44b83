"""Networks of one's own over HTTP: traced ones where their class is not, others by the factory that is named."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Card, Image, Input
from dubito.models.predictions.uncertainty import Classified
from tests import forked
from tests.models.test_tracing import made
from tests.service.conftest import Serve

LABELS = ("left", "middle", "right")
CARD = Card(input=Input(shape=(1, 8, 8), image=Image(mean=(0.5,), std=(0.5,))), labels=LABELS)


class Residual(nn.Module):
    """A small residual network with a branch on sizes and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.token = nn.Parameter(torch.randn(1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        if x.shape[-1] > 4:
            x = F.max_pool2d(x, 2)
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.deep(x) + x)
        return self.head(x.mean((-2, -1)) + self.token.expand(x.shape[0], -1))


def written(path: Path, seed: int, method: str) -> Path:
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(bayesianize(Residual().eval(), method, inducing=3, members=2), path, card=CARD)
    return path


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-w", "deterministic"])
def test_a_traced_network_is_served(serve: Serve, tmp_path: Path, method: str) -> None:
    file = written(tmp_path / "own.safetensors", 0, method)
    x = torch.randn(4, 1, 8, 8)
    expected = load(file).predict(x, 6, 3).summary
    assert isinstance(expected, Classified)
    url = f"{serve(file).url}/v1/models/own"
    assert httpx.get(url, timeout=60).json()["architecture"] == "custom"
    reply = httpx.post(f"{url}/predict", json={"inputs": x.tolist(), "samples": 6, "seed": 3}, timeout=60)
    rows = [row["probabilities"] for row in reply.json()["predictions"]]
    assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]


def test_a_mask_of_infinities_is_served(serve: Serve, tmp_path: Path) -> None:
    network, shape, x = made("causal", "ffg-u", inducing=2)
    save(network, tmp_path / "causal.safetensors", card=Card(input=Input(shape=shape), labels=LABELS))
    expected = load(tmp_path / "causal.safetensors").predict(x, 6, 3).summary
    assert isinstance(expected, Classified)
    url = f"{serve(tmp_path / 'causal.safetensors').url}/v1/models/causal/predict"
    reply = httpx.post(url, json={"inputs": x.tolist(), "samples": 6, "seed": 3}, timeout=60)
    rows = [row["probabilities"] for row in reply.json()["predictions"]]
    assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]


def test_traced_networks_are_swapped_while_the_server_runs(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "models"
    written(root / "own" / "1" / "model.safetensors", 0, "ffg-u")
    server = serve(root)
    second = written(root / "own" / "2" / "model.safetensors", 1, "deterministic")
    assert httpx.post(f"{server.url}/v2/repository/models/own/load", timeout=60).status_code == 200
    x = torch.randn(2, 1, 8, 8)
    expected = load(second).predict(x, 0).summary
    assert isinstance(expected, Classified)
    reply = httpx.post(f"{server.url}/v1/models/own/predict", json={"inputs": x.tolist()}, timeout=60).json()
    assert reply["version"] == "2"
    rows = [row["probabilities"] for row in reply["predictions"]]
    assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]


FACTORY = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.a, self.b = nn.Linear(4, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        if x.abs().sum() > 0:
            return self.b(self.a(x).relu())
        return self.b(self.a(x))

def make(hidden: int = 3, classes: int = 2):
    return Branching(hidden)
"""
MAKE = """
import torch
from dubito.models import bayesianize, build, save
from dubito.models.manifest import Card, Input
torch.manual_seed(0)
net = build("their_nets:make", hidden=5)
save(bayesianize(net, "ffg-u", inducing=2), "own.safetensors", card=Card(input=Input(shape=(4,))))
"""


@pytest.fixture
def by_factory(tmp_path: Path) -> Path:
    (tmp_path / "their_nets.py").write_text(FACTORY)
    ended = forked.begin(MAKE, [], tmp_path, tmp_path, {"PYTHONPATH": str(tmp_path)}).end()
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "own.safetensors"


def test_a_network_that_cannot_be_traced_is_served_by_its_factory(serve: Serve, by_factory: Path) -> None:
    server = serve(by_factory, "--network", "their_nets:make", PYTHONPATH=str(by_factory.parent))
    reply = httpx.post(f"{server.url}/v1/models/own/predict", json={"inputs": [[1, 2, 3, 4]]}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert httpx.get(f"{server.url}/v1/models/own", timeout=60).json()["architecture"] == "their_nets:make"


def test_commands_run_a_factory_only_where_it_is_named(by_factory: Path) -> None:
    """From the folder of the module, as a user would."""
    folder = by_factory.parent

    def run(*words: str) -> forked.Ended:
        logs = folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        return forked.begin(forked.DUBITO, words, folder, logs).end()

    (folder / "x.npy").write_bytes(_npy())
    refused = run("predict", "own.safetensors", "x.npy")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: own.safetensors: its network is made by their_nets:make, whose code runs only where you name it: give "
        "--network their_nets:make, or call build('their_nets:make', ...) first.\n"
    )
    assert run("predict", "own.safetensors", "x.npy", "--network", "their_nets:make", "--seed", "0").returncode == 0
    assert "their_nets:make(hidden=5)" in run("inspect", "own.safetensors", "--network", "their_nets:make").stdout
    missing = run("predict", "own.safetensors", "x.npy", "--network", "their_nets:other")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "the network 'their_nets:other' cannot be imported" in missing.stderr


def _npy() -> bytes:
    import io

    import numpy as np

    file = io.BytesIO()
    np.save(file, np.ones((2, 4), dtype=np.float32))
    return file.getvalue()
