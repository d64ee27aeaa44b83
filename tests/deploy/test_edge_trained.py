"""Every method's export, of networks trained on the embedded digits: with torch's noise, its own, and in int8."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from typer.testing import CliRunner

from dubito.cli import app
from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import ExportedModel, export, save
from dubito.models import bayesianize, build, ensemble, load
from dubito.models import save as save_artifact
from dubito.models.embedded import embedded
from dubito.models.errors import InputError
from dubito.models.manifest import Card
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.model import Model
from dubito.models.pruning import prune
from dubito.training.config import Fit, Laplace
from dubito.training.data.data import Examples, Parts, divide, enter, input_of
from dubito.training.data.sources import read_data
from dubito.training.fit.fit import FitRun
from dubito.training.laplace import linearise

CLOSE = 1e-4  # of every output, in float32
K = 64
DRAWS = 2048
NETWORKS: dict[str, dict[str, Any]] = {
    "cnn": {"size": 8, "width": 8, "hidden": 24},
    "mlp": {"inputs": 64, "outputs": 10, "hidden": [40]},
}
METHODS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": 12, "noise": "factored"},
    "fcg-u": {"inducing": 6, "noise": "factored"},
    "ensemble-u": {"inducing": 12, "members": 3, "noise": "factored"},
    "pruned": {"inducing": 12, "noise": "factored"},
    "whvi": {},
    "subnetwork-laplace": {},
    "deterministic": {},
    "ensemble-w": {"members": 3},
}


@cache
def digits() -> Parts:
    return divide(read_data("digits"), 0.05, 0.1, 0.2, seed=0)


def trained(network: BayesianNetwork, epochs: int, lr: float = 1e-2) -> BayesianNetwork:
    """Ten steps an epoch."""
    parts = digits()
    fit = Fit(epochs=epochs, batch=32, lr=lr, warmup_epochs=epochs)
    run = FitRun(network, parts.train[:320], parts.validation, input_of(parts.train), fit, 0, torch.device("cpu"))
    while not run.done:
        run.epoch()
    return run.finish()


@cache
def plain(architecture: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return trained(bayesianize(build(architecture, **NETWORKS[architecture]), "deterministic"), 4).net


@cache
def posterior(architecture: str, method: str) -> BayesianNetwork:
    """A network fitted by its own method, from the plain one's weights."""
    parts, net, options = digits(), plain(architecture), METHODS[method]
    torch.manual_seed(1)
    match method:
        case "deterministic":
            return bayesianize(net, "deterministic")
        case "ensemble-w":
            return ensemble([plain(architecture, seed) for seed in range(3)])
        case "subnetwork-laplace":
            settings = Laplace(size=150, select="random", prior_precision=20.0)
            of, declared = bayesianize(net, "deterministic"), input_of(parts.train)
            return linearise(of, parts.train[:200], parts.validation, declared, settings).network
        case "pruned":
            network = trained(bayesianize(net, "ffg-u", start="network", **options), 1)
            prune(network, 0.4)
            return trained(network, 2)
        case "whvi":
            return trained(bayesianize(net, method, start="network"), 10, lr=0.03)
    return trained(bayesianize(net, method, start="network", **options), 3)


def written(architecture: str, method: str, folder: Path, **options: Any) -> tuple[Model, ExportedModel, Path]:
    artifact = folder / "model.safetensors"
    save_artifact(posterior(architecture, method), artifact, card=Card(input=input_of(digits().train)))
    model = load(artifact)
    made = export(model, **{"samples": K, **options})
    path = folder / "model.onnx"
    save(made, path)
    return model, made, path


def some(part: Examples, n: int) -> NDArray[Any]:
    found: NDArray[Any] = enter(part.x[:n], input_of(digits().train)).numpy()
    return found


def test_they_were_trained() -> None:
    for architecture in NETWORKS:
        net = bayesianize(plain(architecture), "deterministic")
        test = digits().test
        with torch.no_grad():
            right = net.net(torch.from_numpy(some(test, 300))).argmax(1) == test.y[:300]
        assert right.float().mean() > 0.4  # of ten classes; eleven seeds gave 0.63 to 0.92


# each method once; a cnn, which has linear layers as well as convolutions, takes long to train and to export
QUICK = {("cnn" if m == "ffg-u" else "mlp", m) for m in METHODS}
PAIRS = [(a, m) if (a, m) in QUICK else pytest.param(a, m, marks=pytest.mark.slow) for a in NETWORKS for m in METHODS]


@pytest.mark.parametrize(("architecture", "method"), PAIRS)
def test_torch_and_the_graph_agree(architecture: str, method: str, tmp_path: Path) -> None:
    """With the graph's noise number by number; each with noise of its own, in the mean of 2,048 draws."""
    model, made, path = written(architecture, method, tmp_path)
    x = some(digits().test, 3)
    assert parity(path, model, x).largest < CLOSE
    assert model.network.factors().random == (method != "deterministic")
    if method in ("deterministic", "ensemble-w"):  # nothing but the members' order hangs on the noise
        return
    assert not made.formed
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = [{"input": x[:1], "seed": np.array(seed, np.int64)} for seed in range(DRAWS // K)]
    ours = np.stack([session.run(["probabilities"], feed)[0] for feed in feeds]).mean(0)
    way: Any = {"method": "sampling"} if method == "subnetwork-laplace" else {}
    outputs = model.predict(torch.from_numpy(x[:1]), DRAWS, 0, keep_outputs=True, **way).outputs
    assert outputs is not None
    each = outputs.softmax(-1).double()
    error = (each.var(0) * 2 / DRAWS).sqrt().numpy()
    assert (error > 0).all()
    told = each.mean(0).numpy() > 1e-3  # less is a few draws' doing, and its standard error says nothing
    assert told.sum() > 1
    assert (np.abs(ours - each.mean(0).numpy()) < 4 * error + 1e-6)[told].all()


def dubito(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def some_data(part: Examples, path: Path, n: int) -> str:
    """A data set of a user's own: pictures and labels in a file."""
    np.savez(path, x=part.x[:n, 0].numpy(), y=part.y[:n].numpy())
    return f"npz:{path}"


@pytest.mark.parametrize("method", ["whvi", "subnetwork-laplace"])
def test_the_check_reports_quality_on_data(method: str, tmp_path: Path) -> None:
    _, _, path = written("mlp", method, tmp_path, samples=32)
    data = some_data(digits().test, tmp_path / "test.npz", 100)
    report = json.loads(
        dubito("check-onnx", path, "--against", tmp_path / "model.safetensors", "--data", data, "--json")
    )
    assert report["max_difference"] < CLOSE
    ours, theirs = report["data"]["onnx"], report["data"]["artifact"]
    assert report["data"]["inputs"] == 100
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.08)  # 32 draws each, of noise of their own
    assert ours["accuracy"] > 0.6
    assert ours["ece"] == pytest.approx(theirs["ece"], abs=0.08)
    assert report["data"]["class_agreement"] > 0.85


@pytest.mark.parametrize(
    ("architecture", "method", "products"),
    [
        ("cnn", "ffg-u", 4),
        pytest.param("cnn", "deterministic", 4, marks=pytest.mark.slow),
        ("mlp", "whvi", 0),
        pytest.param("cnn", "whvi", 0, marks=pytest.mark.slow),
    ],
)
def test_data_give_activations_in_int8(architecture: str, method: str, products: int, tmp_path: Path) -> None:
    """Each product with many stored weights, in whole numbers where it is a convolution; answers hardly change."""
    parts = digits()
    model, whole, _ = written(architecture, method, tmp_path, samples=8)
    x = some(parts.test, 200)
    y = parts.test.y[:200].numpy()
    made = export(model, samples=8, precision="int8", data=some(parts.train, 100))
    weights = export(model, samples=8, precision="int8")
    assert made.products == products
    facts = json.loads({p.key: p.value for p in made.model.metadata_props}["dubito"])
    assert facts["activations"] == ("int8" if products else "float32")
    found = {}
    for name, one in (("whole", whole), ("weights", weights), ("both", made)):
        assert all(o.version <= 21 for o in one.model.opset_import)
        save(one, tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        feed = {"input": x} | ({"seed": np.array(0, np.int64)} if method != "deterministic" else {})
        found[name] = session.run(["probabilities"], feed)[0]
    right = {name: float((p.argmax(1) == y).mean()) for name, p in found.items()}
    assert right["whole"] > 0.4  # the plain network of eleven seeds: 0.63 to 0.90, the others more
    assert abs(right["both"] - right["whole"]) <= 0.02  # two points of a hundred
    assert np.abs(found["both"] - found["whole"]).mean() < 0.02
    assert (np.abs(found["both"] - found["weights"]).max() > 1e-4) == (products > 0)
    assert parity(tmp_path / "model.onnx", model, x[:4]).largest < 0.3
    assert len(made.model.SerializeToString()) < 1.1 * len(weights.model.SerializeToString()) + 4000  # nothing twice
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    kernels = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert kernels.count("QLinearConv") == (3 if products else 0)


def test_the_command_takes_data_for_int8_alone(tmp_path: Path) -> None:
    artifact, data = embedded("digits"), some_data(digits().train, tmp_path / "some.npz", 60)
    told = dubito("export", artifact, tmp_path / "out.onnx", "--precision", "int8", "--data", data, "--samples", "4")
    assert "activations in int8, by the range of the data: 5 products" in told
    report = json.loads(dubito("check-onnx", tmp_path / "out.onnx", "--against", artifact, "--data", data, "--json"))
    assert report["activations"] == "int8"
    assert report["max_difference"] < 0.6  # of all outputs; 0.04 to 0.29 on eight other sets of 60 digits
    assert report["data"]["class_agreement"] > 0.95  # 1 on each of them
    with pytest.raises(ExportError, match="ranges of activations in int8; the precision is fp16"):
        dubito("export", artifact, tmp_path / "out.onnx", "--precision", "fp16", "--data", data)
    with pytest.raises(InputError, match="cannot read"):
        dubito("export", artifact, tmp_path / "out.onnx", "--precision", "int8", "--data", "npz:none.npz")
