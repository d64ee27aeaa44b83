"""The linearised predictive in the exported graph: f + J δ against torch and against Jacobians by brute force."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import ExportedModel, export, save
from dubito.deploy.edge.graph import Graph
from dubito.deploy.edge.tangents import Moved
from dubito.models import bayesianize, build
from dubito.models.manifest import Calibration, Card, Closed, Input, Regression
from dubito.models.network.linearised import LinearisedFactors, Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.model import Model
from tests.deploy.test_edge_export import inputs_for, saved, stir

CLOSE = 1e-4  # of every output, in float32
K = 4
CNN: dict[str, Any] = {"classes": 5, "channels": 2, "size": 8, "width": 4, "hidden": 12}
MLP: dict[str, Any] = {"inputs": 5, "hidden": [8], "outputs": 3, "activation": "tanh"}


def linearised(net: nn.Module, index: Tensor, task: Regression | None = None, std: float = 0.3) -> BayesianNetwork:
    """As if trained: BatchNorm statistics of their own, and a dense precision over the chosen weights."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in net.modules():
            stir(module, rng)
    network = bayesianize(net, "deterministic", task=task, unsupported="leave")
    S = len(index)
    A = torch.randn(S, S, generator=rng, dtype=torch.float64)
    L = torch.linalg.cholesky(A @ A.T / S + torch.eye(S, dtype=torch.float64)) / std
    entry = SubnetworkEntry(size=S, select="random", prior_precision=1.0, examples=10)
    network.subnetwork = Subnetwork.of(index, L, entry)
    return network.eval()


def some(net: nn.Module, S: int) -> Tensor:
    D = sum(p.numel() for p in net.parameters())
    return torch.randperm(D, generator=torch.Generator().manual_seed(2))[:S].sort().values


def every(net: nn.Module) -> Tensor:
    return torch.arange(sum(p.numel() for p in net.parameters()))


def exported(model: Model, folder: Path, **options: Any) -> tuple[ExportedModel, Path]:
    made = export(model, samples=options.pop("samples", K), **options)
    save(made, folder / "model.onnx")
    return made, folder / "model.onnx"


def run(path: Path, x: NDArray[Any], *seeds: int) -> list[dict[str, NDArray[Any]]]:
    """Outputs by each seed."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    feeds = [{session.get_inputs()[0].name: x, "seed": np.array(seed, np.int64)} for seed in seeds]
    return [dict(zip(names, session.run(names, feed), strict=True)) for feed in feeds]


def brute(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """f (B, C) and J (B, C, S) in float64 by reverse mode over all weights."""
    net = model.network.net.double().eval()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused one cannot be batched
        J = jacrev(lambda w: functional_call(net, w, (x.double(),)))(parameters)
    assert isinstance(model.network.joint, Subnetwork)
    whole = torch.cat([J[name].flatten(2) for name in parameters], 2)[..., model.network.joint.index.long()]
    with torch.no_grad():
        found = net(x.double()), whole
    net.float()
    return found


@pytest.mark.parametrize("chosen", ["few", "all of the last layer", "BatchNorm"])
def test_with_the_same_noise_the_graph_answers_as_torch(chosen: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = build("cnn", **CNN)
    whole = every(net)
    norms, at = [], 0
    for name, p in net.named_parameters():
        norms += list(range(at, at + p.numel())) if name.startswith(("1.", "8.")) else []
        at += p.numel()
    index = {"few": some(net, 60), "all of the last layer": whole[-65:], "BatchNorm": torch.tensor(norms)}[chosen]
    model = saved(linearised(net, index), tmp_path)
    x = inputs_for(model)
    _, path = exported(model, tmp_path, samples=1 if chosen == "few" else K)
    assert parity(path, model, x).largest < CLOSE
    a, b = run(path, x, 1, 2)
    assert np.abs(a["probabilities"] - b["probabilities"]).max() > 10 * CLOSE
    with torch.no_grad():
        model.network.joint.triangle.mul_(1.1)  # type: ignore[union-attr, operator]
    assert parity(path, model, x).largest > 10 * CLOSE  # a wrong factor would show


def against_brute_force(model: Model, folder: Path) -> float:
    """Of the logits of every draw, which the graph is made to tell."""
    made, _ = exported(model, folder)
    graph = onnx.ModelProto()
    graph.CopyFrom(made.model)
    logits = [node.input[0] for node in graph.graph.node if node.op_type == "LogSoftmax"][-1]
    for name in (logits, "subnetwork:eps"):
        graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    x = inputs_for(model)
    f_k, eps = session.run([logits, "subnetwork:eps"], {"input": x, "seed": np.array(3, np.int64)})
    f, J = brute(model, torch.from_numpy(x))
    assert isinstance(model.factors, LinearisedFactors)
    L = model.factors.subnetwork.L.double()
    moves = torch.linalg.solve(L.T, torch.from_numpy(eps).double().T)  # (S, K)
    expected = f + torch.einsum("bcs,sk->kbc", J, moves)
    assert float((expected - f).abs().max()) > 0.1
    return float((torch.from_numpy(f_k).double() - expected).abs().max() / expected.abs().max())


class Zoo(nn.Module):
    """Operators of all kinds, weights of its own outside of layers, and a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=3, padding=1)
        self.mixed = nn.Conv2d(6, 4, 1, bias=False)
        self.gate = nn.Parameter(torch.randn(4, 1, 1))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.hardswish(self.conv(x))
        y = nn.functional.silu(self.depthwise(y)) + nn.functional.elu(y)
        y = self.mixed(nn.functional.max_pool2d(y, 3, 2, 1)) * torch.sigmoid(self.gate)
        y = nn.functional.leaky_relu(nn.functional.avg_pool2d(nn.functional.pad(y, (1, 0, 0, 1)), 2, 1))
        rows = y.flatten(2).transpose(1, 2) / (1 + self.gate.flatten().square())
        rows = torch.cat([self.token.expand(x.shape[0], -1, -1), rows], 1)
        rows = rows + self.attention(*[self.norm(rows)] * 3, need_weights=False)[0]
        rows = nn.functional.gelu(self.twice(torch.tanh(self.twice(rows))))
        first, last = rows[:, 0], rows[:, 1:].amax(1)
        most = torch.maximum(first, last) - nn.functional.softplus(first).clamp(0.2, 0.9)
        out: Tensor = self.head(torch.cat([first, torch.log_softmax(last, -1), most.exp().sqrt()], 1))
        return out


def test_every_operator_has_the_derivative_of_brute_force(tmp_path: Path) -> None:
    """All weights move."""
    torch.manual_seed(0)
    net = Zoo()
    network = linearised(net, every(net), std=0.3)
    model = saved(network, tmp_path, Card(input=Input(shape=(3, 8, 8))), net)
    assert against_brute_force(model, tmp_path) < 1e-5


def test_few_weights_of_each_layer_against_brute_force(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = build("cnn", **CNN)
    model = saved(linearised(net, some(net, 40), std=0.1), tmp_path)
    assert against_brute_force(model, tmp_path) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
def test_moved_entries_stand_where_they_belong(transposed: bool) -> None:
    """Formed whole, and as rows and columns that hold some, against a matrix filled entry by entry."""
    shape, places = (5, 7, 2), np.array([3, 17, 18, 44, 69])
    moved, dense = Moved("moves", places, shape), np.zeros(70)
    values = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    dense[places] = values[:, 1]
    whole = dense.reshape(shape)
    if transposed:
        moved, whole = moved.transposed((1, 0, 2)), whole.transpose(1, 0, 2)
    small, outs, ins = moved.submatrix()
    for part, expected in ((moved, whole), (small, whole[np.ix_(outs, ins)])):
        g = Graph()
        g.op("Identity", part.formed(g, 3), out="out")
        entry = onnx.helper.make_tensor_value_info("moves", onnx.TensorProto.FLOAT, [5, 3])
        end = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
        graph = onnx.helper.make_graph(g.nodes, "moved", [entry], [end], g.initializers)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"moves": values})
        np.testing.assert_allclose(found[1], expected, rtol=1e-6)


def test_own_noise_has_the_mean_and_spread_of_the_gaussian(tmp_path: Path) -> None:
    """Means of probabilities over 4,096 draws of each, within 4 standard errors."""
    torch.manual_seed(0)
    net = build("mlp", **MLP)
    model = saved(linearised(net, some(net, 20), std=1.0), tmp_path)
    _, path = exported(model, tmp_path, samples=1024)
    x = inputs_for(model)
    ours = np.stack([found["probabilities"] for found in run(path, x, *range(4))]).mean(0)
    outputs = model.predict(torch.from_numpy(x), 4096, 0, method="sampling", keep_outputs=True).outputs
    assert outputs is not None
    each = outputs.softmax(-1).double()
    error = (each.var(0) * 2 / 4096).sqrt().numpy()
    assert (error > 1e-3).all()
    assert (np.abs(ours - each.mean(0).numpy()) < 4 * error).all()


@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.005), ("int8", 0.06)])
def test_precisions_keep_the_answer_and_shrink_the_file(precision: Any, most: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = build("cnn", **CNN)
    model = saved(linearised(net, some(net, 200), std=0.1), tmp_path)
    whole = _stored(exported(model, tmp_path)[0].model)
    made, path = exported(model, tmp_path, precision=precision)
    assert parity(path, model, inputs_for(model)).largest < most
    assert _stored(made.model) < 0.6 * whole  # the triangle is never in int8


def _stored(model: onnx.ModelProto) -> int:
    return sum(len(t.raw_data) for t in model.graph.initializer)


def test_regression_and_a_model_that_answers_in_closed_form(tmp_path: Path) -> None:
    """The graph samples, by the thresholds of draws, whatever the artifact does when nobody says how."""
    torch.manual_seed(0)
    task = Regression(outputs=3, shift=(1.0, -2.0, 0.0), scale=(3.0, 0.5, 1.0))
    net = build("mlp", **MLP)
    measure: Any = "epistemic_variance"
    closed = Closed(measure=measure, thresholds={measure: 9.0}, quantile=9.0)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure=measure,
        thresholds={measure: {1: 0.01}},
        quantiles={1: 1.7},
        method="probit",
        closed=closed,
    )
    card = Card(input=Input(shape=(5,)), calibration=calibration)
    model = saved(linearised(net, some(net, 20), task), tmp_path, card)
    made, path = exported(model, tmp_path, samples=6)
    x = inputs_for(model)
    assert parity(path, model, x).largest < CLOSE
    (found,) = run(path, x, 0)
    std = np.sqrt(found["epistemic_variance"] + found["aleatoric_variance"])
    np.testing.assert_allclose(found["interval"][..., 1] - found["mean"], 1.7 * std, rtol=1e-4)
    (facts,) = [p.value for p in made.model.metadata_props]
    assert '"predictive": "sampling"' in facts
    assert '"methods": ["subnetwork-laplace"]' in facts
    assert '"threshold": 0.01' in facts


def test_an_operator_without_a_rule_is_named(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).topk(3).values)
            return out

    net = Sorted()
    card = Card(input=Input(shape=(4,)))
    model = saved(linearised(net, every(net)[-8:]), tmp_path, card, net)  # behind it nothing is in the way
    _, path = exported(model, tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE
    model = saved(linearised(net, every(net)), tmp_path, card, net)
    with pytest.raises(ExportError, match="operator TopK, for which no derivative is known"):
        export(model)


def test_a_network_that_fixes_the_number_of_rows_is_refused(tmp_path: Path) -> None:
    """`len(x)` is a number to torch's exporter: the file would take two inputs at a time and no others."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.reshape(len(x), 2, 2).flatten(1))
            return out

    net = Counted()
    model = saved(linearised(net, every(net)), tmp_path, Card(input=Input(shape=(4,))), net)
    with pytest.raises(ExportError, match="fixes the number of rows"):
        export(model)
