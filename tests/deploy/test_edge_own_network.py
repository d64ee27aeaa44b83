"""A traced network in ONNX: branches on sizes, class tokens, masks and attention of one's own, still Bayesian."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito.deploy.edge.check import check, parity
from dubito.deploy.edge.data import LabelledData
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import export
from dubito.deploy.edge.export import save as write
from dubito.deploy.edge.runtime import EdgeError, EdgeModel
from dubito.models import bayesianize, load, save
from dubito.models.errors import InputError
from dubito.models.manifest import Card, Input
from tests.deploy.test_edge_export import inputs_for, written
from tests.models.test_tracing import OWN
from tests.models.test_window_attention import SHAPE, SWINS

CLOSE = 1e-4  # of every output, in float32


NETWORKS = OWN | {f"swin {kind}": (make, SHAPE) for kind, make in SWINS.items()}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "swin v1", "swin v2")]


@pytest.mark.parametrize("name", ["own", "causal", *SLOW])
def test_a_traced_network_is_exported_as_its_class_would_be(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = bayesianize(make().eval(), "ffg-u", inducing=2, unsupported="leave")
    save(network, tmp_path / "m", card=Card(input=Input(shape=shape)))
    model = load(tmp_path / "m")
    path = written(export(model, samples=3), tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE


class Heads(nn.Module):
    """Products with a stack of matrices."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64), nn.Linear(2 * wide, 3)
        self.stack = nn.Parameter(torch.randn(2, 32, wide) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.enter(x)).reshape(-1, 2, 1, 32)
        out: Tensor = self.leave(torch.matmul(rows, self.stack).flatten(1))
        return out


@pytest.mark.parametrize("wide", [32, 48])
def test_products_with_stacks_of_matrices_have_activations_in_int8_too(wide: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(Heads(wide).eval(), "ffg-u", inducing=4, unsupported="leave")
    save(network, tmp_path / "m", card=Card(input=Input(shape=(16,))))
    model, x = load(tmp_path / "m"), torch.randn(100, 16).numpy()
    made = export(model, samples=8, precision="int8", data=x)
    assert made.products == 2
    write(made, tmp_path / "m.onnx")
    assert parity(tmp_path / "m.onnx", model, x).by_output["probabilities"] < 0.01  # 0.05 by steps of another side


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.head = nn.Embedding(20, 8), nn.Conv1d(8, 12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(self.table(x).transpose(1, 2)).relu().mean(2))
        return out


def test_token_ids_are_checked_and_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(bayesianize(Words().eval(), "ffg-w", unsupported="leave"), tmp_path / "m", card=Card(input=Input(shape=(9,))))
    model = load(tmp_path / "m")
    write(export(model, samples=3), tmp_path / "m.onnx")
    ids = np.random.default_rng(0).integers(0, 20, (30, 9))
    for data in (None, LabelledData(ids, np.arange(30) % 3)):
        assert check(tmp_path / "m.onnx", model, 1, data)["max_difference"] < CLOSE
    edge = EdgeModel(tmp_path / "m.onnx")
    assert len(edge.predict(ids)["probabilities"]) == 30
    for wrong, said in (
        (ids - 15, "integers from 0 on"),
        (ids + 0.5, "integers from 0 on"),
        (ids + 10, "may be larger"),
    ):
        with pytest.raises(EdgeError, match=said):
            edge.predict(wrong)
    with pytest.raises(InputError, match="looks token ids up in a table"):
        model.predict(torch.from_numpy(ids).float())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.recurrent(x)
        out: Tensor = self.head(last[-1])
        return out


def test_copies_that_answer_with_several_tensors_are_refused_by_name(tmp_path: Path) -> None:
    network = bayesianize(Recurrent().eval(), "ensemble-w", members=2, unsupported="leave")
    save(network, tmp_path / "m", card=Card(input=Input(shape=(4, 5))))
    with pytest.raises(ExportError, match="copies of GRU answer with several tensors"):
        export(load(tmp_path / "m"))
