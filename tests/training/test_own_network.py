"""`dubito train` and `dubito laplace` with a network of one's own: `--network module:factory`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dubito.models import load
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.tracing.rebuild import TracedNetwork
from tests import forked

NETS = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, classes: int, inputs: int, hidden: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))

class Odd(Mine):
    def forward(self, x):
        y = super().forward(x)
        return y if y.isfinite().all() else torch.zeros_like(y)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Own code and own data in the current folder."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    (tmp_path / "nets_of_mine.py").write_text(NETS)
    return tmp_path


def run(folder: Path, *words: str) -> forked.Ended:
    return forked.begin(forked.FEW, words, folder, folder).end()


@pytest.mark.parametrize("name", ["Mine", pytest.param("Odd", marks=pytest.mark.slow)])
def test_train_takes_a_factory(folder: Path, name: str) -> None:
    """One that can be traced needs its code no more; the other is refused without it."""
    of = ["--network", f"nets_of_mine:{name}"]
    changes = ("epochs=8", "pretrain_epochs=0", "likelihood_epochs=0", "warmup_epochs=0")
    shorter = [word for change in changes for word in ("--set", f"fit.{change}")]
    shorter += ["--set", "network.arguments.hidden=5"]
    told = run(folder, "train", "npz:data.npz", *of, *shorter, "--out", "m.safetensors", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["accuracy"] > 0.5
    (folder / "nets_of_mine.py").rename(folder / "elsewhere.txt")
    told = run(folder, "evaluate", "m.safetensors", "--data", "npz:data.npz", "--json")
    if name == "Mine":
        assert told.returncode == 0, told.stderr
        model = load(folder / "m.safetensors")
        assert isinstance(model.network.net, TracedNetwork)
        assert model.manifest.architecture.arguments == {"classes": 2, "inputs": 6, "hidden": 5}
    else:
        assert told.returncode == 2
        assert "give --network nets_of_mine:Odd" in told.stderr


def test_laplace_takes_a_state_dict_of_ones_own_class(folder: Path) -> None:
    torch.manual_seed(0)
    state = {"first.weight": torch.randn(4, 6), "first.bias": torch.randn(4)}
    state |= {"last.weight": torch.randn(2, 4), "last.bias": torch.randn(2)}
    save_file(state, folder / "weights.safetensors")
    words = ["laplace", "weights.safetensors", "--network", "nets_of_mine:Mine", "--data", "npz:data.npz"]
    told = run(folder, *words, "--select", "last-layer", "--prior-precision", "1", "--force", "--out", "m.safetensors")
    assert told.returncode == 0, told.stderr
    model = load(folder / "m.safetensors")
    assert torch.equal(model.network.net.get_parameter("first.weight"), state["first.weight"])
    assert isinstance(model.manifest.subnetwork, SubnetworkEntry)
    assert model.manifest.subnetwork.size == 10


def test_a_recipe_does_not_run_code_by_itself(folder: Path) -> None:
    told = run(folder, "train", "npz:data.npz", "--set", "network.architecture='nets_of_mine:Mine'")
    assert told.returncode == 2
    assert "whose code runs only where you name it: give --network nets_of_mine:Mine" in told.stderr
