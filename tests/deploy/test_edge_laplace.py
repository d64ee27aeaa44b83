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

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import Exported, export, save
from dubito.deploy.edge.graph import Graph
from dubito.deploy.edge.tangents import Moved
from dubito.models import bayesianize, build, load
from dubito.models import save as save_artifact
from dubito.models.laplace import Subnetwork
from dubito.models.manifest import Calibration, Card, Input, Regression, SubnetworkEntry
from dubito.models.model import Model
from dubito.models.network import BayesianNetwork

CLOSE = 1e-4  # of every output, in float32
K = 4
CNN: dict[str, Any] = {"classes": 5, "channels": 2, "size": 8, "width": 4, "hidden": 12}
_skeletons: dict[str, onnx.ModelProto] = {}


def linearised(net: nn.Module, index: Tensor, task: Regression | None = None, std: float = 0.3) -> BayesianNetwork:
    """As if trained: BatchNorm statistics of their own, and a dense precision over the chosen weights."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3, generator=rng)
                module.running_var.uniform_(0.05, 0.3, generator=rng)
                module.weight.uniform_(0.5, 2.0, generator=rng)
                module.bias.normal_(0, 0.3, generator=rng)
    network = bayesianize(net, "deterministic", task=task)
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


def saved(network: BayesianNetwork, folder: Path, card: Card | None = None, given: nn.Module | None = None) -> Model:
    path = folder / "model.safetensors"
    save_artifact(network, path, card=card)
    return load(path, given)


def exported(model: Model, folder: Path, **options: Any) -> tuple[Exported, Path]:
    """The same network is traced once, whichever of its weights are chosen."""
    key = f"{model.manifest.architecture} {model.card.input}"
    made = export(model, samples=options.pop("samples", K), skeleton=_skeletons.get(key), **options)
    if model.manifest.architecture.name != "custom":
        _skeletons[key] = made.skeleton
    save(made, folder / "model.onnx")
    return made, folder / "model.onnx"


def inputs_for(model: Model, B: int = 3) -> NDArray[Any]:
    assert model.card.input is not None
    return np.random.default_rng(0).standard_normal((B, *model.card.input.shape)).astype(np.float32)


def run(path: Path, x: NDArray[Any], seed: int = 0) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x, "seed": np.array(seed, np.int64)})
    return dict(zip([o.name for o in session.get_outputs()], found, strict=True))


def brute(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """f (B, C) and J (B, C, S) in float64 by reverse mode over all weights."""
    net = model.network.net.double().eval()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    J = jacrev(lambda w: functional_call(net, w, (x.double(),)))(parameters)
    assert model.network.subnetwork is not None
    whole = torch.cat([J[name].flatten(2) for name in parameters], 2)[..., model.network.subnetwork.index.long()]
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
        norms += list(range(at, at + p.numel())) if name.startswith("1.") or name.startswith("8.") else []
        at += p.numel()
    index = {"few": some(net, 60), "all of the last layer": whole[-65:], "BatchNorm": torch.tensor(norms)}[chosen]
    model = saved(linearised(net, index), tmp_path)
    _, path = exported(model, tmp_path)
    x = inputs_for(model)
    assert parity(path, model, x).largest < CLOSE
    assert np.abs(run(path, x, 1)["probabilities"] - run(path, x, 2)["probabilities"]).max() > 10 * CLOSE
    with torch.no_grad():
        model.network.subnetwork.triangle.mul_(1.1)  # type: ignore[union-attr]
    assert parity(path, model, x).largest > 10 * CLOSE  # a wrong factor would show
