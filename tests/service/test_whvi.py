"""One network of two methods over HTTP: Walsh–Hadamard VI where it is wide, FFG-U elsewhere."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Calibration, Card, Input
from dubito.models.predictions.uncertainty import Classified
from tests.small_models import mlp

Fixture = Any  # the types of conftest.py
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def write(path: Path) -> Path:
    torch.manual_seed(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    net = mlp(4, 32, 32, 3)
    network = bayesianize(net, "ffg-u", inducing=4, layers={"3": "whvi"}, spread=0.09)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="mutual_information",
        thresholds={"mutual_information": {0: 0.5, 8: 0.4}, "entropy": {0: 0.6}},
        quantiles={0: 0.7},
    )
    save(network, path, card=Card(input=Input(shape=(4,)), labels=("ant", "bee", "cat"), calibration=calibration))
    return path


def test_methods_mixed_by_layer_are_served(serve: Fixture, tmp_path: Path) -> None:
    file = write(tmp_path / "mixed.safetensors")
    live, model = serve(file), load(file)
    assert {name: layer.entry.method for name, layer in model.network.layers.items()} == {
        "1": "ffg-u",
        "3": "whvi",
        "5": "ffg-u",
    }
    about = httpx.get(f"{live.url}/v1/models/mixed", timeout=60).json()
    assert about["methods"] == ["ffg-u", "whvi"]
    for options in ({"samples": 8, "seed": 3}, {"samples": 0}):
        told = httpx.post(
            f"{live.url}/v1/models/mixed/predict", json={"inputs": X.tolist(), **options}, timeout=60
        ).json()
        assert (told["method"], told["samples"]) == ("sampling", options["samples"])
        expected = model.predict(X, options["samples"], options.get("seed")).summary
        assert isinstance(expected, Classified)
        rows = [row["probabilities"] for row in told["predictions"]]
        assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]
        if options["samples"]:
            doubt = [row["mutual_information"] for row in told["predictions"]]
            assert doubt == pytest.approx(expected.mutual_information.tolist(), abs=1e-5)
            assert all(row["ood"]["threshold"] == 0.4 for row in told["predictions"])
            assert min(doubt) > 0
