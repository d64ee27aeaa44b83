"""Walsh–Hadamard layers in the exported graph: torch's answers from the graph's noise, and no weight matrix."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.export import export
from dubito.models import bayesianize, build
from dubito.models.manifest import Card, Input
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.flows import Planar
from dubito.models.posteriors.whvi import Whvi
from tests.deploy.test_edge_export import inputs_for, saved, stir, written

CLOSE = 1e-4  # of every output, in float32
CNN: dict[str, Any] = {"classes": 5, "channels": 2, "size": 8, "width": 4, "hidden": 12}
MLP: dict[str, Any] = {"inputs": 900, "hidden": [1000, 500], "outputs": 100}


def lively(network: BayesianNetwork) -> BayesianNetwork:
    """As if trained: every factor far from its start, so that each shows in the answer."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, Whvi):
                for S in (module.S_1, module.S_2):
                    S.mul_(0.8 * torch.rand(S.shape, generator=rng) + 0.6)
                for name, p in module.law.named_parameters():
                    if "centre" in name or "below" in name:
                        p.add_(torch.randn(p.shape, generator=rng), alpha=0.3)
                    elif "spread" in name:
                        p.uniform_(-1.5, -0.5, generator=rng)
            if isinstance(module, Planar):
                module.w.mul_(2)
                module.u.add_(torch.randn(module.u.shape, generator=rng), alpha=0.3)
                module.b.normal_(0, 0.5, generator=rng)
            stir(module, rng, 0.5, 2.0)
    return network


def run(path: Path, x: NDArray[Any], *seeds: int) -> list[NDArray[Any]]:
    """Probabilities by each seed."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = [{session.get_inputs()[0].name: x, "seed": np.array(seed, np.int64)} for seed in seeds]
    return [session.run(["probabilities"], feed)[0] for feed in feeds]


CASES: dict[str, dict[str, Any]] = {
    "diagonal": {},
    "flows on a full covariance": {"covariance": "full", "flows": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_with_the_same_noise_the_graph_answers_as_torch(case: str, tmp_path: Path) -> None:
    """Convolutions through patches, a BatchNorm behind them, Linear layers with biases; padded and stacked blocks."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("cnn", **CNN), "whvi", **CASES[case])), tmp_path)
    path = written(export(model, samples=4), tmp_path)
    x = inputs_for(model)
    assert parity(path, model, x).largest < CLOSE
    a, b, again = run(path, x, 1, 2, 1)
    assert np.abs(a - b).max() > 10 * CLOSE
    assert (again == a).all()


@pytest.mark.parametrize("part", ["S_1", "spread"])
def test_parity_would_see_a_wrong_factor(part: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("cnn", **CNN), "whvi")), tmp_path)
    path = written(export(model, samples=4), tmp_path)
    last = list(model.network.layers.values())[-1].posterior
    (found,) = [p for name, p in last.named_parameters() if part in name and "bias" not in name]
    with torch.no_grad():
        found.copy_(found.roll(1, -1))
    assert parity(path, model, inputs_for(model)).largest > 10 * CLOSE


class Odd(nn.Module):
    """Strides, dilation, uneven and reflected padding, groups, more rows than columns, one row, one column, 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 40, 3, padding="same", dilation=2)
        self.even = nn.Conv2d(40, 6, (2, 3), stride=(2, 1), padding=1)
        self.reflected = nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect", bias=False)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.along = nn.Conv1d(4, 5, 3, stride=2)
        self.rows = nn.Linear(5, 70)
        self.one = nn.Linear(70, 1)
        self.many = nn.Linear(1, 9, bias=False)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(self.reflected(self.even(torch.relu(self.wide(x)))))
        y = self.along(y.flatten(2)).transpose(1, 2)
        y = torch.tanh(self.one(torch.tanh(self.rows(y))).mean(1))
        out: Tensor = self.head(self.many(y))
        return out


@pytest.mark.parametrize("block", [None, 4])
def test_geometries(block: int | None, tmp_path: Path) -> None:
    """With the usual blocks, and with small ones in several rows and columns."""
    torch.manual_seed(0)
    net = Odd()
    options: dict[str, Any] = {} if block is None else {"D": block}
    network = lively(bayesianize(net, "whvi", **options))
    model = saved(network, tmp_path, Card(input=Input(shape=(3, 6, 6))), net)
    for K in (1, 3):
        made = export(model, samples=K)
        assert parity(written(made, tmp_path), model, inputs_for(model)).largest < CLOSE
    assert made.formed == ("grouped", "one", "many")  # groups, and a single row or column


# its logits are far apart, so a probability may move by much where two are close: eight seeds gave up to 0.03 and 0.33
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.05), ("int8", 0.45)])
def test_precisions_keep_the_answer_and_shrink_the_file(precision: Any, most: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("mlp", **MLP), "whvi", spread=0.02)), tmp_path)
    made, whole = export(model, samples=4, precision=precision), export(model, samples=4)
    assert parity(written(made, tmp_path), model, inputs_for(model)).largest < most
    small, large = (sum(len(t.raw_data) for t in m.model.graph.initializer) for m in (made, whole))
    assert small < (0.7 if precision == "fp16" else 0.55) * large  # H, counters and biases stay as they are


def test_no_weight_matrix_in_the_file_nor_on_the_way(tmp_path: Path) -> None:
    """Every constant is far smaller than a weight matrix; every value is, or it grows with the inputs."""
    torch.manual_seed(0)
    model = saved(bayesianize(build("mlp", **MLP), "whvi"), tmp_path)
    made = export(model, samples=2).model
    smallest = min(math.prod(layer.geometry.shape) for layer in model.network.layers.values())
    assert max(math.prod(t.dims) for t in made.graph.initializer) < 4 * 1024 < smallest
    sizes = []
    for B in (1, 3):
        fixed = onnx.ModelProto()
        fixed.CopyFrom(made)
        fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = B
        inferred = onnx.shape_inference.infer_shapes(fixed, strict_mode=True, data_prop=True)
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
        # the tables of the noise are the same for every network
        sizes.append({name: math.prod(shape) for name, shape in shapes.items() if shape[:1] != [4096]})
    assert len(sizes[0]) > 50
    assert max(sizes[0].values()) <= 2 * model.factors.normals < smallest  # one input, two samples
    assert max(sizes[1].values()) <= 2 * max(model.factors.normals, 3 * 1024)
    assert made.ByteSize() < 0.02 * 4 * sum(math.prod(layer.geometry.shape) for layer in model.network.layers.values())


def test_own_noise_has_the_mean_of_torch_s(tmp_path: Path) -> None:
    """Predictive means over 4,096 draws of each agree within 4 standard errors."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("cnn", **CNN), "whvi", flows=1)), tmp_path)
    path = written(export(model, samples=512), tmp_path)
    x = inputs_for(model, 1)
    ours = np.stack(run(path, x, *range(8))).mean(0)
    outputs = model.predict(torch.from_numpy(x), 4096, 0, keep_outputs=True).outputs
    assert outputs is not None
    each = outputs.softmax(-1).double()
    error = (each.var(0) * 2 / 4096).sqrt().numpy()
    assert (error > 0).all()
    assert (np.abs(ours - each.mean(0).numpy()) < 4 * error).all()
