"""A server flags by energy and by distances of features as the same model does without one."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models import bayesianize, build, load, save
from dubito.models.manifest import Calibration, Card, Input
from dubito.models.names import Measure
from dubito.models.network.feature_bank import FeatureBank, Nearest
from dubito.models.predictions.answers import answers
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.resident import reside
from dubito.service.engine.engine import Engine, PredictRequest
from dubito.service.engine.graphs import for_gpu
from tests.service.beside import Beside
from tests.service.conftest import Serve
from tests.small_models import mlp

GRID = (0, 1, 8, 20)
D = 16
OPTIONS: dict[str, dict[str, Any]] = {"ffg-u": {"sigma_max": 0.6, "spread": 0.4}, "ensemble-u": {"members": 3}}


def written(path: Path, measure: Measure, method: str = "ffg-u") -> Path:
    torch.manual_seed(0)
    net = mlp(4, D, 3)
    network = bayesianize(net, method, inducing=4, **OPTIONS[method])
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure=measure,
        thresholds={measure: {K: (-0.9 if measure == "energy" else 0.5) + 0.001 * K for K in GRID}},
        quantiles=dict.fromkeys(GRID, 0.7),
        temperature=1.4,
    )
    if measure == "knn":
        members = max(1, network.factors().members)
        points = torch.nn.functional.normalize(torch.rand(members, 12, D), dim=-1)
        network.set_feature_bank(FeatureBank.of(points, "3"))
    save(network, path, card=Card(input=Input(shape=(4,)), labels=("ant", "bee", "cat"), calibration=calibration))
    return path


@pytest.mark.parametrize("measure", ["energy", "knn"])
def test_replies_carry_the_measure_and_its_score(measure: Measure, serve: Serve, tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", measure)
    model, live = load(path), serve(path)
    x = torch.randn(6, 4)
    with httpx.Client(base_url=live.url, timeout=60) as client:
        for asked in ({"samples": 20, "seed": 5}, {"samples": 0, "seed": 5}, {"samples": "auto", "seed": 5}):
            reply = client.post("/v1/models/model/predict", json={"inputs": x.tolist(), **asked})
            assert reply.status_code == 200, reply.text
            expected = answers(model.predict(x, asked["samples"], 5), model.card)  # type: ignore[arg-type]
            for row, mine in zip(reply.json()["predictions"], expected, strict=True):
                assert row["ood"]["measure"] == measure
                assert abs(row["ood"]["score"] - mine["ood"]["score"]) < 1e-5
                assert (row["ood"]["flag"], row["ood"]["threshold"]) == (mine["ood"]["flag"], mine["ood"]["threshold"])
        flags = [row["ood"]["flag"] for row in reply.json()["predictions"]]
        v2 = {
            "inputs": [{"name": "input", "shape": [6, 4], "datatype": "FP32", "data": x.flatten().tolist()}],
            "parameters": {"samples": 20, "seed": 5},
        }
        outputs = {o["name"]: o["data"] for o in client.post("/v2/models/model/infer", json=v2).json()["outputs"]}
        again = answers(model.predict(x, 20, 5), model.card)
        assert np.allclose(outputs["ood_score"], [row["ood"]["score"] for row in again], atol=1e-5)
        metrics = client.get("/metrics").text
        assert ('dubito_ood_total{model="model"}' in metrics) or not any(flags)


def test_captured_passes_carry_distances(tmp_path: Path) -> None:
    """As a GPU's captured passes do, by a device that stands beside the host."""
    model = load(written(tmp_path / "m.safetensors", "knn"))
    engine = Engine(model, (4, 8))
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    plain = _asked(engine, x)
    engine.graphs = Beside(model, (4, 8), (8, 20))
    captured = _asked(engine, x)
    assert plain.keys() == captured.keys()
    for name in ("ood_score", "probabilities"):
        assert np.allclose(plain[name], captured[name], atol=1e-5)
    launched = engine.launch([PredictRequest(x, 20, 3, 20, 0.5)])
    assert launched is not None
    launched.wait()
    (found,) = launched.answers()
    assert not isinstance(found, Exception)
    assert np.allclose(found.columns["ood_score"], captured["ood_score"], atol=1e-5)
    assert np.allclose(captured["ood_score"], _scores(model, x), atol=1e-5)


def test_fused_layers_leave_the_features_to_be_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = build("cnn", classes=3, width=4, hidden=D, size=8)
    network = bayesianize(net, "ffg-u", inducing=4, **OPTIONS["ffg-u"]).eval()
    points = torch.nn.functional.normalize(torch.rand(1, 12, D), dim=-1)
    network.set_feature_bank(FeatureBank.of(points, "17"))
    path = tmp_path / "m.safetensors"
    save(network, path, card=Card(input=Input(shape=(1, 8, 8))))
    model, x = load(path), torch.randn(5, 1, 8, 8)
    kept = reside(model, torch.device("cpu"), torch.float32)
    assert kept.network.feature_bank is None  # the factors have its points
    fused = for_gpu(kept)
    assert fused.factors.form is not None
    for other in (kept, fused):
        found = predict(other.network, other.factors, x, 6, 3).summary
        assert torch.allclose(vars(found)["distance"], vars(model.predict(x, 6, 3).summary)["distance"], atol=1e-5)
    elsewhere = reside(model, torch.device("meta"), torch.bfloat16).factors.read
    assert isinstance(elsewhere, Nearest)
    assert (elsewhere.points.device.type, elsewhere.points.dtype) == ("meta", torch.float32)


def test_members_are_matched_with_their_points(tmp_path: Path) -> None:
    """Requests that share passes: each draw's member is compared with that member's points."""
    model = load(written(tmp_path / "m.safetensors", "knn", "ensemble-u"))
    engine = Engine(model, (4, 8))
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    assert np.allclose(_asked(engine, x)["ood_score"], _scores(model, x), atol=1e-5)


def _asked(engine: Engine, x: np.ndarray) -> dict[str, np.ndarray]:
    (found,) = engine.answer([PredictRequest(x, 20, 3, 20, 0.5)])
    assert not isinstance(found, Exception), found
    return dict(found.columns)


def _scores(model: Model, x: np.ndarray) -> list[float]:
    return [row["ood"]["score"] for row in answers(model.predict(torch.from_numpy(x), 20, 3), model.card)]
