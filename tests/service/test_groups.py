"""Prediction sets by class and by group over HTTP: each request by its own quantile, also where they share a pass."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models import load, save
from dubito.models.manifest import Calibration, Card, Input, Part, Sets
from dubito.models.predictions.answers import answers
from dubito.service.client import Client, ServiceError
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from tests.small_models import bayesian_mlp

Fixture = Any  # the types of conftest.py
GRID = (0, 1, 20)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def write(path: Path, **parts: Any) -> Path:
    torch.manual_seed(0)
    network = bayesian_mlp((4, 16, 3), "ffg-u", inducing=4)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="entropy",
        thresholds={"entropy": dict.fromkeys(GRID, 1.0)},
        quantiles=dict.fromkeys(GRID, 0.5),
        sets=Sets(),
        **parts,
    )
    card = Card(input=Input(shape=(4,)), labels=("ant", "bee", "cat"), calibration=calibration)
    save(network, path, card=card)
    return path


def write_by_group(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, groups={"north": part(0.0), "south": part(2.0, 0.8)})


def part(quantile: float, coverage: float = 0.9) -> Part:
    return Part(examples=99, coverage=coverage, quantiles=dict.fromkeys(GRID, quantile))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    write_by_group(folder / "groups.safetensors")
    write(folder / "classes.safetensors", classes=(part(0.0), part(2.0), part(0.5)))
    return folder


@pytest.fixture(scope="module")
def url(serve: Fixture, folder: Path) -> str:
    found: str = serve(folder / "groups.safetensors", folder / "classes.safetensors").url
    return found


def test_a_request_names_its_group(url: str, folder: Path) -> None:
    model = load(folder / "groups.safetensors")
    for group, sizes in ((None, None), ("north", {1}), ("south", {3})):
        asked = {"inputs": X.tolist(), "seed": 3, **({} if group is None else {"group": group})}
        rows = httpx.post(f"{url}/v1/models/groups/predict", json=asked, timeout=60).json()["predictions"]
        expected = answers(model.predict(X, 20, 3), model.card, group)
        assert [row["prediction_set"] for row in rows] == [row["prediction_set"] for row in expected]
        assert sizes is None or {len(row["prediction_set"]) for row in rows} == sizes
        assert all(row["label"] in row["prediction_set"] for row in rows)
        with Client(url) as client:
            found = client.predict("groups", X.numpy(), seed=3, group=group)
        assert found["prediction_set"].sum(1).tolist() == [len(row["prediction_set"]) for row in rows]


def test_a_class_may_have_a_quantile_of_its_own(url: str, folder: Path) -> None:
    model = load(folder / "classes.safetensors")
    rows = httpx.post(f"{url}/v1/models/classes/predict", json={"inputs": X.tolist(), "seed": 3}, timeout=60).json()
    expected = answers(model.predict(X, 20, 3), model.card)
    sets = [row["prediction_set"] for row in rows["predictions"]]
    assert sets == [row["prediction_set"] for row in expected]
    assert all("bee" in one for one in sets)
    assert any("ant" not in one for one in sets)


def test_what_is_calibrated_is_told(url: str) -> None:
    told = httpx.get(f"{url}/v1/models/groups").json()["calibration"]
    assert told["groups"] == {"north": 0.9, "south": 0.8}
    assert told["sets"] == {"score": "aps", "lam": 0.0, "k_reg": 1}
    assert httpx.get(f"{url}/v1/models/classes").json()["calibration"]["classes"] == [0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("groups", "west", "group is 'west'; this model was calibrated for: north, south."),
        ("classes", "north", "group is 'north', but this model was not calibrated by group; leave it out."),
        ("groups", 3, "group is 3; expected the name of one, as text."),
    ],
)
def test_an_unknown_group_is_refused(url: str, name: str, group: Any, message: str) -> None:
    reply = httpx.post(f"{url}/v1/models/{name}/predict", json={"inputs": X.tolist(), "group": group}, timeout=60)
    assert (reply.status_code, reply.json()["detail"]) == (400, message)
    with Client(url) as client, pytest.raises(ServiceError, match="group is"):
        client.predict(name, X.numpy(), group=group)


@pytest.mark.parametrize("K", [0, 20, "auto"])
def test_requests_of_several_groups_go_together(folder: Path, K: Any) -> None:
    """As the batcher hands them on: the posterior mean, draws, and draws until an answer has settled."""
    engine = Engine(load(folder / "groups.safetensors"), (8, 32))
    found = engine.answer(
        [PredictRequest(X.numpy(), K, None, 20, 0.05, group=group) for group in ("north", None, "south", "north")]
    )
    sets = [answer.columns["prediction_set"] for answer in found if isinstance(answer, PredictResult)]
    assert [one.sum() for one in (sets[0], sets[2], sets[3])] == [6, 18, 6]
    assert 6 <= sets[1].sum() <= 18
    assert np.array_equal(sets[0], sets[3])
