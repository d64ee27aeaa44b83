"""What draws of global inducing points are distilled to can be exported, in the process of the other exports."""

from pathlib import Path

import pytest
import torch

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Card, Input
from dubito.training.compact import distil
from tests.small_models import mlp
from tests.training.test_train import run


@pytest.mark.usefixtures("quick_exports")
def test_an_ensemble_of_distilled_draws_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    network = bayesianize(mlp(4, 5, 3), "gi", inducing=6, examples=(x, None))
    card = Card(input=Input(shape=(4,)))
    save(network, tmp_path / "large.safetensors", card=card)
    small, _ = distil(load(tmp_path / "large.safetensors"), x, members=3, inducing=4, steps=5, lr=0.1)
    save(small, tmp_path / "small.safetensors", card=card)
    assert {layer.entry.method for layer in small.layers.values()} == {"ensemble-u"}
    assert run("export", tmp_path / "small.safetensors", tmp_path / "small.onnx").exit_code == 0
    assert (tmp_path / "small.onnx").exists()
