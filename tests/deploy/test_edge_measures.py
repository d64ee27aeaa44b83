"""Energy and distances of features in the exported graph: the artifact's own answer under the graph's draws."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from dubito.deploy.edge import check
from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import export, save
from dubito.deploy.edge.features import features_in
from dubito.models import bayesianize, build, load
from dubito.models import save as save_artifact
from dubito.models.conversion.conversion import ensemble
from dubito.models.manifest import Calibration, Card, Input
from dubito.models.names import Measure
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.model import Model

D, K = 8, 4
CLOSE = 1e-4


def mlp() -> nn.Module:
    return build("mlp", inputs=5, hidden=[6, D], outputs=3, activation="tanh")


def network_of(kind: str) -> BayesianNetwork:
    torch.manual_seed(0)
    wide: dict[str, Any] = {"inducing": 4, "sigma_max": 0.6, "spread": 0.4}
    match kind:
        case "ensemble-w":
            return ensemble([mlp() for _ in range(3)])
        case "plain last layer":
            return bayesianize(mlp(), "ffg-u", layers={"5": "deterministic"}, **wide)
        case "only the last layer":
            return bayesianize(mlp(), "ffg-u", layers={"1": "deterministic", "3": "deterministic"}, **wide)
        case "subnetwork-laplace":
            network = bayesianize(mlp(), "deterministic")
            entry = SubnetworkEntry(size=7, select="random", prior_precision=1.0, examples=10)
            network.subnetwork = Subnetwork.of(torch.arange(7) * 13, 2 * torch.eye(7), entry)
            return network
    return bayesianize(mlp(), kind, **(wide if kind == "ffg-u" else {}))


def model_of(kind: str, measure: Measure, path: Path) -> Model:
    network = network_of(kind)
    if measure == "knn":
        E = max(1, network.factors().members)
        points = nn.functional.normalize(torch.randn(E, 10, D, generator=torch.Generator().manual_seed(3)), dim=-1)
        network.set_feature_bank(FeatureBank.of(points, "5"))
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure=measure,
        thresholds={measure: {0: 0.9}},
        quantiles={0: 0.5},
        temperature=1.3,
    )
    save_artifact(network, path, card=Card(input=Input(shape=(5,)), calibration=calibration))
    return load(path)


KINDS = (
    "ffg-u",
    "ensemble-w",
    "plain last layer",
    "only the last layer",
    "subnetwork-laplace",
    "deterministic",
    "whvi",
)


@pytest.mark.parametrize(
    ("kind", "measure"), [*((kind, "knn") for kind in KINDS), ("ffg-u", "energy"), ("subnetwork-laplace", "energy")]
)
def test_a_graph_scores_as_the_artifact_does(kind: str, measure: Measure, tmp_path: Path) -> None:
    model = model_of(kind, measure, tmp_path / "m.safetensors")
    made = export(model, samples=K)
    path = tmp_path / "m.onnx"
    save(made, path)
    x = torch.randn(6, 5).numpy()
    found = parity(path, model, x)
    assert "ood_score" in found.by_output
    assert found.largest < CLOSE
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {"input": x} | ({"seed": np.array(1)} if model.factors.random else {})
    score, flag = session.run(["ood_score", "ood"], feed)
    assert score.shape == flag.shape == (6,)
    assert (flag == (score.astype(np.float64) > 0.9)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_graph_of_one_draw_scores_by_the_bank_of_the_member_it_draws(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("ensemble-w", "knn", tmp_path / "m.safetensors")
    save(export(model, samples=1), tmp_path / "m.onnx")
    monkeypatch.setattr(check, "SEED", seed)
    assert parity(tmp_path / "m.onnx", model, torch.randn(6, 5).numpy()).largest < CLOSE


def test_the_bank_stays_exact_where_activations_are_in_int8(tmp_path: Path) -> None:
    model = model_of("deterministic", "knn", tmp_path / "m.safetensors")
    x = torch.randn(64, 5).numpy()
    made = export(model, samples=1, precision="int8", data=x)
    bank = [node for node in made.model.graph.node if node.name.startswith("exact")]
    assert [node.op_type for node in bank] == ["MatMul"]


def test_features_that_do_not_show_are_an_error(tmp_path: Path) -> None:
    model = model_of("plain last layer", "knn", tmp_path / "m.safetensors")
    skeleton = export(model, samples=K).skeleton
    del skeleton.graph.node[-1]  # the last product
    with pytest.raises(ExportError, match=r"does not show the features before layer .5.\. Calibrate it by another"):
        features_in(skeleton.graph, model.network)
