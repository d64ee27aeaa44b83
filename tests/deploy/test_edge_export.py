"""The exported graph against torch with the graph's own noise, for every method; what is in the file; its noise."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import ExportedModel, export, save
from dubito.deploy.edge.rotations import completed, logarithm
from dubito.deploy.edge.runtime import EdgeModel
from dubito.models import bayesianize, build, ensemble, load
from dubito.models import save as save_artifact
from dubito.models.conversion.architectures import FACTORIES, input_of
from dubito.models.conversion.directions import set_directions
from dubito.models.embedded import embedded
from dubito.models.manifest import Calibration, Card, Input, Regression
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.inducing import Inducing
from dubito.models.predictions.model import Model
from dubito.models.pruning import prune

CLOSE = 1e-4  # of every output, in float32
Arrays = dict[str, NDArray[Any]]


def stir(module: nn.Module, rng: torch.Generator, least: float = 0.05, most: float = 0.3) -> None:
    """Statistics of its own for a BatchNorm, variances between these."""
    if isinstance(module, nn.BatchNorm2d):
        assert module.running_mean is not None
        assert module.running_var is not None
        module.running_mean.normal_(0, 0.3, generator=rng)
        module.running_var.uniform_(least, most, generator=rng)
        module.weight.uniform_(0.5, 2.0, generator=rng)
        module.bias.normal_(0, 0.3, generator=rng)


def lively(network: BayesianNetwork) -> BayesianNetwork:
    """As if trained: λ far from 0, logits far apart and BatchNorm statistics of their own, so that every part shows."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, Inducing) and module.lam is not None:
                module.lam.raw.fill_(3.0)
            stir(module, rng)
    return network


def saved(network: BayesianNetwork, folder: Path, card: Card | None = None, given: nn.Module | None = None) -> Model:
    path = folder / "model.safetensors"
    save_artifact(network, path, card=card)
    return load(path, given)


def written(made: ExportedModel, folder: Path) -> Path:
    path = folder / "model.onnx"
    save(made, path)
    return path


@lru_cache(maxsize=4)
def session_of(content: bytes) -> Any:
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def run(path: Path, x: NDArray[Any], seed: int = 0) -> Arrays:
    session = session_of(path.read_bytes())
    entries = [entry.name for entry in session.get_inputs()]
    feed = {entries[0]: x} | ({"seed": np.array(seed, np.int64)} if "seed" in entries else {})
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))


def inputs_for(model: Model, B: int = 3) -> NDArray[Any]:
    assert model.card.input is not None
    return np.random.default_rng(0).standard_normal((B, *model.card.input.shape)).astype(np.float32)


CNN: dict[str, Any] = {"classes": 5, "channels": 2, "size": 8, "width": 4, "hidden": 12}
MLP: dict[str, Any] = {"inputs": 400, "hidden": [300], "outputs": 4}
CASES: dict[str, dict[str, Any]] = {
    "ffg-u": {"method": "ffg-u", "inducing": 8},
    "ffg-u, lambda 0": {"method": "ffg-u", "inducing": 8, "lam_max": 0.0},
    "fcg-u": {"method": "fcg-u", "inducing": (4, 6)},
    "ensemble-u": {"method": "ensemble-u", "inducing": 6, "members": 3},
    "hierarchical": {"method": "ffg-u", "inducing": 8, "hierarchy": 4},
    "ffg-w": {"method": "ffg-w"},
    "ensemble-w": {"method": "ensemble-w", "members": 3},
    "mc-dropout": {"method": "mc-dropout"},
    "deterministic": {"method": "deterministic"},
}


IN_TRAINED = ("fcg-u", "ensemble-w", "deterministic")  # networks in test_edge_trained show them, too


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in IN_TRAINED else case for case in CASES]
)
def test_with_the_same_noise_the_graph_answers_as_torch(case: str, tmp_path: Path) -> None:
    """Convolutions, BatchNorm and Linear layers with biases; the answer must depend on the noise."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("cnn", **CNN), **CASES[case])), tmp_path)
    path = written(export(model, samples=4), tmp_path)
    x = inputs_for(model)
    assert parity(path, model, x).largest < CLOSE
    if case != "deterministic":
        a, b = run(path, x, 1)["probabilities"], run(path, x, 2)["probabilities"]
        assert np.abs(a - b).max() > 10 * CLOSE or case in (
            "ensemble-w",
            "ffg-w",
        )  # members in another order; a tiny std
        assert (run(path, x, 1)["probabilities"] == a).all()


def test_parity_would_see_a_wrong_formula(tmp_path: Path) -> None:
    """λ off by a tenth, or the noise of another draw, is far beyond the tolerance."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("cnn", **CNN), "ffg-u", inducing=8)), tmp_path)
    path = written(export(model, samples=4), tmp_path)
    for layer in model.network.layers.values():
        assert isinstance(layer.posterior, Inducing)
        assert layer.posterior.lam is not None
        with torch.no_grad():
            layer.posterior.lam.raw.fill_(1.5)
    assert parity(path, model, inputs_for(model)).largest > 10 * CLOSE


@pytest.mark.parametrize("options", [{"lam_max": 0.0}, {}], ids=["lambda 0", "lambda"])
def test_pruned_factors_are_unpacked_in_the_graph(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = lively(bayesianize(build("mlp", **MLP), "ffg-u", inducing=12, **options))
    whole = len(export(saved(network, tmp_path)).model.SerializeToString())
    prune(network, 0.3)
    model = saved(network, tmp_path)
    made = export(model, samples=4)
    assert any(node.op_type == "CumSum" for node in made.model.graph.node)
    assert parity(written(made, tmp_path), model, inputs_for(model)).largest < CLOSE
    assert len(made.model.SerializeToString()) < 0.9 * whole


def test_pruned_weights_and_a_full_covariance_over_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = build("mlp", inputs=5, hidden=[8], outputs=3)
    network = bayesianize(net, "ffg-w", layers={"3": "fcg-w"})
    prune(network, 0.5)
    model = saved(network, tmp_path)
    assert parity(written(export(model, samples=4), tmp_path), model, inputs_for(model)).largest < CLOSE


class Odd(nn.Module):
    """Groups, strides, dilation, uneven and reflected padding, a residual from the input, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 6, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2)
        self.reflected = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", dilation=1, bias=False)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(torch.relu(self.wide(x)))
        y = self.reflected(y) + x[:, :, ::2, ::2]
        rows = y.mean(2).transpose(1, 2)
        rows = self.norm(self.twice(torch.tanh(self.twice(rows))))
        out: Tensor = self.head(torch.cat([rows.amax(1), rows.mean(1)], 1))
        return out


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-w", "mc-dropout"])
def test_geometries_and_mixed_paths(method: str, tmp_path: Path) -> None:
    """A network of one's own: samples meet what all of them share, and layers that members keep in copies."""
    torch.manual_seed(0)
    net = Odd()
    options: dict[str, Any] = {"inducing": 3} if method == "ffg-u" else {}
    network = lively(bayesianize(net, method, **options))
    model = saved(network, tmp_path, Card(input=Input(shape=(4, 6, 6))), net)
    path = written(export(model, samples=3), tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE


def test_a_convolution_of_few_places_needs_no_product_of_its_factors(tmp_path: Path) -> None:
    """Four places, 48 channels and M = 12: cheaper without G, and the same function."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 48, 3, stride=4, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3)
    )
    network = lively(bayesianize(net, "ffg-u", inducing=12, noise="factored"))
    model = saved(network, tmp_path, Card(input=Input(shape=(4, 8, 8))), net)
    made = export(model, samples=3)
    inferred = onnx.shape_inference.infer_shapes(made.model, strict_mode=True, data_prop=True)
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info]
    assert [3, 48, 12] in shapes  # E
    assert [3, 1, 48, 14] not in shapes  # G, what is outside and the shift
    assert parity(written(made, tmp_path), model, inputs_for(model)).largest < CLOSE


def test_networks_trained_apart_keep_their_own_batchnorm(tmp_path: Path) -> None:
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        nets.append(lively(bayesianize(build("cnn", **CNN), "deterministic")).net)
    model = saved(ensemble(nets), tmp_path)
    path = written(export(model, samples=5), tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE


@pytest.mark.parametrize("noise", ["constant", "input"])
def test_regression_answers_mean_variances_and_interval(noise: Literal["constant", "input"], tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Regression(outputs=2, noise=noise, shift=(1.0, -2.0), scale=(3.0, 0.5))
    net = build("mlp", inputs=4, hidden=[10], outputs=task.numbers)
    measure: Any = "epistemic_variance"
    calibration = Calibration(
        false_positive_rate=0.05, coverage=0.9, measure=measure, thresholds={measure: {1: 0.01}}, quantiles={1: 1.7}
    )
    declared = Input(shape=(4,), columns=("a", "b", "c", "d"))
    card = Card(input=declared, targets=("price", "rent"), calibration=calibration)
    model = saved(lively(bayesianize(net, "ffg-u", inducing=4, task=task)), tmp_path, card)
    path = written(export(model, samples=6), tmp_path)
    x = inputs_for(model)
    assert parity(path, model, x).largest < CLOSE
    found = run(path, x)
    std = np.sqrt(found["epistemic_variance"] + found["aleatoric_variance"])
    np.testing.assert_allclose(found["interval"][..., 1] - found["mean"], 1.7 * std, rtol=1e-5)
    assert (np.ptp(found["aleatoric_variance"], axis=0) > 0).all() == (noise == "input")
    device = EdgeModel(path)
    assert device.facts["columns"] == ["a", "b", "c", "d"]
    row = device.answers(device.predict(x, 0))[0]
    assert row["targets"] == ["price", "rent"]
    assert list(row)[1:] == ["mean", "epistemic_variance", "aleatoric_variance", "interval", "ood"]
    assert set(found) == {
        "mean", "epistemic_variance", "aleatoric_variance", "interval", "ood_score", "ood",
    }  # fmt: skip


def test_the_embedded_model_with_its_thresholds_and_labels(tmp_path: Path) -> None:
    """R directions, a temperature, a calibration: every output, and the facts a device reads."""
    model = load(embedded("digits"))
    path = written(export(model, samples=20), tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE
    found = run(path, inputs_for(model))
    assert set(found) == {
        "probabilities", "entropy", "expected_entropy", "mutual_information", "ood_score", "ood", "prediction_set",
    }  # fmt: skip
    facts = json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["dubito"])
    assert facts["labels"] == [str(i) for i in range(10)]
    assert facts["provenance"]["artifact_sha256"] == model.manifest.sha256
    assert facts["ood"]["measure"] == model.card.calibration.measure  # type: ignore[union-attr]
    assert (found["ood"] == (found["ood_score"] > facts["ood"]["threshold"])).all()


def test_pictures_of_another_size_are_prepared_in_the_graph(tmp_path: Path) -> None:
    model = load(embedded("digits"))
    path = written(export(model, samples=5, take="image"), tmp_path)
    for size in (8, 21, 5):
        pixels = np.random.default_rng(size).integers(0, 256, (2, size, size + 1, 1), dtype=np.uint8)
        assert parity(path, model, pixels).largest < CLOSE


@pytest.mark.parametrize(("precision", "most", "bytes_per_number"), [("fp16", 0.02, 2), ("int8", 0.15, 1)])
def test_precisions_keep_the_answer_and_shrink_the_file(
    precision: Any, most: float, bytes_per_number: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = lively(bayesianize(build("mlp", **MLP), "ffg-u", inducing=16))
    model = saved(network, tmp_path)
    made = export(model, samples=4, precision=precision)
    assert parity(written(made, tmp_path), model, inputs_for(model)).largest < most
    whole = _weights(export(model, samples=4).model)
    assert _weights(made.model) < whole * bytes_per_number / 4 * 1.3  # vectors stay in float32, rotations in float16


def _weights(model: onnx.ModelProto) -> int:
    return sum(len(t.raw_data) for t in model.graph.initializer)


def test_nothing_dense_in_the_file_nor_on_the_way(tmp_path: Path) -> None:
    """No value but activations has the entries of a weight matrix on two of its sides."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("lenet"), "ffg-u", inducing=8)), tmp_path)
    shapes = [layer.geometry.shape for layer in model.network.layers.values()]
    assert dense_in(export(model, samples=3).model, shapes, 3) == []
    assert dense_in(export(model, samples=3, law="artifact").model, shapes, 3) != []  # which forms what must be seen


def dense_in(model: onnx.ModelProto, shapes: list[tuple[int, int]], K: int) -> list[str]:
    """Names of constants and of values of known shape, which activations do not have, that are d_out × d_in."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    known |= {t.name: list(t.dims) for t in inferred.graph.initializer}
    pairs = {(o, i) for o, i in shapes} | {(i, o) for o, i in shapes}
    found = []
    for name, dims in known.items():
        for cut in range(1, len(dims)):
            left, right = math.prod(dims[:cut]), math.prod(dims[cut:])
            if (left, right) in pairs or (left % K == 0 and (left // K, right) in pairs):
                found.append(name)
    return found


@pytest.mark.slow
def test_resnet50_is_as_small_as_promised(tmp_path: Path) -> None:
    """FFG-U, M = 64, K = 20, λ > 0 in every layer, beside torch's own export of the plain network."""
    torch.manual_seed(0)
    net = build("resnet50-cifar").eval()
    rows = torch.export.Dim("rows")
    program = torch.onnx.export(
        net, (torch.zeros(2, 3, 32, 32),), dynamo=True, opset_version=18, dynamic_shapes=({0: rows},), verbose=False
    )
    assert program is not None
    plain = program.model_proto.ByteSize()
    network = bayesianize(net, "ffg-u", inducing=64, start="prior")
    model = saved(network, tmp_path)
    made = {name: export(model, precision=name).model for name in ("fp32", "fp16", "int8")}
    rounded = export(model, precision="int8", data=inputs_for(model, 4))
    assert rounded.products > 50
    made["int8, activations too"] = rounded.model
    prune(network, 0.5)
    made["pruned fp16"] = export(saved(network, tmp_path), precision="fp16").model
    shares = {name: one.ByteSize() / plain for name, one in made.items()}
    print({name: f"{share:.2%}" for name, share in shares.items()})
    limits = {"fp32": 0.255, "fp16": 0.13, "int8": 0.075, "int8, activations too": 0.075, "pruned fp16": 0.09}
    assert all(shares[name] <= limits[name] for name in limits)
    # where M reaches d_out, as in the first stage, a factor is as large as the weights themselves
    shapes = [layer.geometry.shape for layer in network.layers.values() if min(layer.geometry.shape) > 64]
    assert len(shapes) > 40
    for one in made.values():
        assert dense_in(one, shapes, 20) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18-cifar", "resnet50-cifar", "torchvision/mobilenet_v3_small", "torchvision/efficientnet_b0"]
)
def test_named_networks_answer_as_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classes = {"classes": 7}
    model = saved(bayesianize(build(name, **classes), "ffg-u", inducing=16), tmp_path)
    path = written(export(model, samples=2), tmp_path)
    assert parity(path, model, inputs_for(model, 2)).largest < CLOSE


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    model = saved(bayesianize(net, "ffg-u", inducing=2), tmp_path, Card(), net)
    with pytest.raises(ExportError, match="does not say what its inputs look like"):
        export(model)
    with pytest.raises(ExportError, match="not pictures"):
        export(saved(bayesianize(net, "ffg-u", inducing=2), tmp_path, Card(input=Input(shape=(3,))), net), take="image")

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x if float(x.sum()) > 0 else -x)
            return out

    monkeypatch.setitem(FACTORIES, "tests:Fixed", Fixed)
    odd = build("tests:Fixed")
    model = saved(bayesianize(odd, "ffg-u", inducing=2), tmp_path, Card(input=Input(shape=(3,))), odd)
    with pytest.raises(ExportError, match="torch cannot export this network"):
        export(model)

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.layer(torch.cat([x, x.flip(-1)])).chunk(2)
            return one + other  # type: ignore[no-any-return]

    model = saved(bayesianize(Stacked(), "ffg-w"), tmp_path, Card(input=Input(shape=(3,))), Stacked())
    with pytest.raises(ExportError, match="mixes rows of the batch"):
        export(model, samples=4)


def test_own_noise_has_the_mean_of_torch_s(tmp_path: Path) -> None:
    """Predictive means over 4,096 draws of each agree within 4 standard errors."""
    torch.manual_seed(0)
    model = saved(lively(bayesianize(build("mlp", inputs=5, hidden=[8], outputs=3), "ffg-u", inducing=4)), tmp_path)
    path = written(export(model, samples=512, law="artifact"), tmp_path)
    x = inputs_for(model)
    ours = np.stack([run(path, x, seed)["probabilities"] for seed in range(8)]).mean(0)
    outputs = model.predict(torch.from_numpy(x), 4096, 0, keep_outputs=True).outputs
    assert outputs is not None
    each = outputs.softmax(-1).double()
    error = (each.var(0) * 2 / 4096).sqrt().numpy()
    assert (np.abs(ours - each.mean(0).numpy()) < 4 * error).all()
    assert (error > 0).all()


def test_a_rotation_is_the_exponential_of_its_logarithm() -> None:
    """Also where an angle is π or all are equal: permutations, signs, −I."""
    from scipy.linalg import expm

    rng = np.random.default_rng(0)
    cases = [np.linalg.qr(rng.standard_normal((M, M)))[0] for M in (1, 2, 7, 64)]
    cases += [np.eye(6), -np.eye(7), np.eye(8)[rng.permutation(8)] * rng.choice([-1, 1], 8)]
    cases += [completed(np.linalg.qr(rng.standard_normal((9, 4)))[0])]
    for Q in cases:
        S, signs = logarithm(Q)
        assert (S == -S.T).all()
        np.testing.assert_allclose(expm(S) * signs, Q, atol=1e-9)


def test_members_come_in_an_order_of_the_seed(tmp_path: Path) -> None:
    """K = members: each once whatever the seed; K = 1: different seeds ask different members."""
    torch.manual_seed(0)
    net = build("mlp", inputs=5, hidden=[8], outputs=3)
    model = saved(bayesianize(net, "ensemble-w", members=4, start="prior"), tmp_path)
    x = inputs_for(model)
    whole = written(export(model, samples=4), tmp_path)
    np.testing.assert_allclose(run(whole, x, 0)["probabilities"], run(whole, x, 5)["probabilities"], atol=1e-6)
    one = written(export(model, samples=1), tmp_path)
    found = {run(one, x, seed)["probabilities"].tobytes() for seed in range(40)}
    assert len(found) == 4


def test_noise_of_directions_and_all_layers_of_a_deeper_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = lively(bayesianize(build("lenet"), "ffg-u", inducing=8))
    declared = input_of(load(embedded("digits")).manifest.architecture)
    assert declared is not None
    set_directions(network, torch.randn(16, 1, 28, 28), 3)
    model = saved(network, tmp_path)
    for law in ("factored", "artifact"):
        path = written(export(model, samples=3, law=law), tmp_path)
        assert parity(path, model, inputs_for(model)).largest < CLOSE


def test_opset_and_initialisers_are_what_small_runtimes_know(tmp_path: Path) -> None:
    model = export(load(embedded("digits")), precision="fp16").model
    assert all(o.version <= 21 for o in model.opset_import)
    assert not any(node.op_type.startswith("Random") for node in model.graph.node)
    halves = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16]
    assert sum(numpy_helper.to_array(t).size for t in halves) > 10_000
