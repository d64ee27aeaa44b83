"""Measured plans: chosen among ways that agree, remembered in a file, and never in the way."""

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize, load
from dubito.models.errors import NumericsError
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.network.geometry import Conv, Execution, Linear, apply
from dubito.models.network.plan import cheapest
from dubito.models.posteriors.protocol import Dense, Factored
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import reside
from dubito.service.engine import plans
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.executions import executions_of
from dubito.service.engine.graphs import for_gpu
from dubito.service.engine.plans import PlanCache, Plans, plan_file
from tests.faulty import Faulty, grouped, need

CPU = torch.device("cpu")
BUCKETS = (1, 4)


@pytest.fixture(scope="module")
def model(convolved_digits: Path) -> Model:
    return load(convolved_digits)


def warmed(model: Model, memory: PlanCache, seconds: float = 60.0) -> Engine:
    engine = Engine(model, BUCKETS, memory, seconds)
    engine.warm(4, threading.Lock())
    return engine


def answered(engine: Engine, B: int, K: int = 4) -> PredictResult:
    x = np.random.default_rng(0).normal(size=(B, 1, 8, 8)).astype(np.float32)
    (found,) = engine.answer([PredictRequest(x, K, 7, K, 0.5)])
    assert isinstance(found, PredictResult)
    return found


def test_every_bucket_has_its_plan_and_the_answers_are_the_same(model: Model) -> None:
    engine, plain = warmed(model, PlanCache(None, CPU)), Engine(model, BUCKETS)
    assert set(engine.plans.known) == {(1, 4), (4, 4)}
    assert all(set(plan) == set(model.factors.layers) for plan in engine.plans.known.values())
    for B in (1, 3, 4, 9):
        a, b = answered(engine, B), answered(plain, B)
        for name, column in a.columns.items():
            np.testing.assert_allclose(column, b.columns[name], atol=1e-5)


def test_the_fastest_way_is_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: the clock is the test's, and a layer's plan is the way that it says is quick."""
    for quick in get_args(Execution):
        monkeypatch.setattr(plans, "seconds_of", lambda run, quick=quick: 1.0 if run.args[-1] == quick else 2.0)
        engine = warmed(model, PlanCache(None, CPU))
        for name, layer in model.network.layers.items():
            operand = model.factors.layers[name].draw(torch.zeros(4, model.factors.layers[name].normals), None)
            ways = executions_of(layer.geometry, operand, 4)
            assert engine.plans.at(4, 4)[name] == (quick if quick in ways else ways[0])


def test_a_way_that_is_wrong_is_never_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is the quickest, though it is remembered, and though it is the usual one."""
    monkeypatch.setattr(plans, "seconds_of", lambda run: 1.0 if run.args[-1] == "batch" else 2.0)
    first = warmed(model, PlanCache(None, CPU))
    quick = {name for name, way in first.plans.at(4, 4).items() if way == "batch"}
    convolutions = {name for name, layer in model.network.layers.items() if isinstance(layer.geometry, Conv)}
    assert quick & convolutions  # or this test is idle
    remembers = PlanCache(None, CPU)
    remembers.executions = dict(first.plans.cache.executions)
    as_usual = Engine(model, BUCKETS)
    as_usual.plans.usual = dict.fromkeys(model.factors.layers, "batch")
    expected = answered(first, 4).columns
    with Faulty(grouped, torch.float32):
        as_usual.plans.measure(as_usual._job(torch.randn(4, 1, 8, 8), 0, None), 4)
        for found in (warmed(model, PlanCache(None, CPU)), warmed(model, remembers), as_usual):
            assert found.plans.wrong == {(name, "batch") for name in convolutions}
            plan = found.plans.at(4, 4)
            assert {name for name, way in plan.items() if way == "batch"} == quick - convolutions
            for name, column in answered(found, 4).columns.items():
                np.testing.assert_allclose(column, expected[name], atol=1e-5)


def test_a_way_that_is_wrong_at_one_size_is_taken_at_none(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "seconds_of", lambda run: 1.0 if run.args[-1] == "batch" else 2.0)
    engine = Engine(model, BUCKETS, PlanCache(None, CPU), 60.0)
    with Faulty(lambda told: grouped(told) and len(told["input"]) > 1, torch.float32):
        engine.plans.measure(engine._job(torch.randn(1, 1, 8, 8), 0, None), 4)
        small = engine.plans.at(1, 4)
        engine.plans.measure(engine._job(torch.randn(4, 1, 8, 8), 0, None), 4)
    convolutions = {name for name, layer in model.network.layers.items() if isinstance(layer.geometry, Conv)}
    assert {small[name] for name in convolutions} == {"batch"}
    assert "batch" not in {engine.plans.at(B, 4)[name] for B in (1, 2, 4) for name in convolutions}


class Residual(nn.Module):
    """Layers with what a GPU would make units of, and one that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.plain, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 2, 2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = (self.second(x) + x).relu()
        return self.fc(self.plain(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["ffg-u", "ffg-w", "fcg-u", "mc-dropout", "ensemble-w", "whvi"])
def test_rounding_is_no_fault(method: str, dtype: torch.dtype) -> None:
    """Every way of every method is right, alone and as a unit, in each type that this CPU computes right in."""
    need(dtype)
    torch.manual_seed(0)
    options: dict[str, Any] = {"inducing": 6} if method in ("ffg-u", "fcg-u") else {}
    options |= {"noise": "factored", "lam_max": 0.5} if method == "ffg-u" else {}
    network = bayesianize(Residual(), method, layers={"plain": "deterministic"}, **options).eval()
    model = Model(network, Manifest.model_construct(card=Card(input=Input(shape=(3, 6, 6))), subnetwork=None))
    kept = reside(model, CPU, dtype)
    for one in (kept, for_gpu(kept)):
        assert warmed(one, PlanCache(None, CPU)).plans.wrong == set()


def test_a_layer_without_a_right_way_is_refused(model: Model) -> None:
    engine = Engine(model, BUCKETS, PlanCache(None, CPU), 1.0)
    x = torch.randn(4, 1, 8, 8)
    with Faulty(lambda told: True, torch.float32):
        with pytest.raises(NumericsError, match="this cpu computes the network wrongly: conv2d of"):
            engine.warm(4, threading.Lock())
        engine.plans.wrong = {(name, way) for name in model.network.layers for way in get_args(Execution)}
        with pytest.raises(NumericsError, match=r"layer '.*' is computed wrongly in float32, in each execution \("):
            engine.plans.measure(engine._job(x, 0, None), 4)


@pytest.fixture
def memory_file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "plans.json"


def test_what_was_measured_is_not_measured_again(
    model: Model, memory_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = warmed(model, PlanCache(memory_file, CPU))
    (ways,) = json.loads(memory_file.read_text()).values()
    assert ways
    assert [file.name for file in memory_file.parent.iterdir()] == ["plans.json"]
    monkeypatch.setattr(plans, "seconds_of", lambda run: pytest.fail("measured again"))
    again = warmed(model, PlanCache(memory_file, CPU), seconds=0.0)
    assert again.plans.known == first.plans.known


def test_another_device_keeps_its_own(model: Model, memory_file: Path) -> None:
    memory_file.parent.mkdir()
    memory_file.write_text(json.dumps({"another device": {"case": "loop"}}))
    warmed(model, PlanCache(memory_file, CPU))
    told = json.loads(memory_file.read_text())
    assert told.pop("another device") == {"case": "loop"}
    assert len(told) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"x": 3}', "null", "\x00", "[" * 100_000, '{"here": {"case": "no such way"}}']
)
def test_a_file_of_another_kind_is_as_good_as_none(model: Model, memory_file: Path, text: str) -> None:
    memory_file.parent.mkdir()
    memory_file.write_text(text.replace("here", PlanCache(None, CPU).device))
    memory = PlanCache(memory_file, CPU)
    assert memory.executions == {}
    memory.executions["case"] = "loop"
    memory.save()
    assert PlanCache(memory_file, CPU).executions == {"case": "loop"}


def test_a_place_that_cannot_be_written_stops_nobody(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = PlanCache(tmp_path / "file" / "plans.json", CPU)
    memory.save()
    assert memory.path is None


def test_without_time_the_usual_way_is_taken(model: Model) -> None:
    engine = warmed(model, PlanCache(None, CPU), seconds=0.0)
    assert all(plan == cheapest(model.factors) for plan in engine.plans.known.values())


def test_a_size_that_was_not_measured_takes_the_nearest_plan() -> None:
    found = Plans({"a": "loop"}, PlanCache(None, CPU), 0.0)
    assert found.at(3, 3) == {"a": "loop"}
    small, large = {"a": "batch"}, {"a": "factored"}
    found.known = {(1, 20): small, (32, 20): large}  # type: ignore[dict-item]
    found._at.cache_clear()
    assert found.at(1, 20) is small
    assert found.at(2, 7) is small
    assert found.at(24, 64) is large


def test_a_network_that_cannot_be_folded_is_served_all_the_same() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]

    network = bayesianize(TimeFirst(), "ffg-u", inducing=2).eval()
    card = Card(input=Input(shape=(4, 3)))
    model = Model(network, Manifest.model_construct(card=card))
    engine = Engine(model, (1, 2), PlanCache(None, CPU), 5.0)
    engine.warm(3, nullcontext())


@pytest.mark.parametrize("K", [1, 3])
def test_only_ways_that_differ_are_offered(K: int) -> None:
    geometry = Conv(2, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, bias=False)
    W, B, G = torch.randn(K, 4, 18), torch.linalg.qr(torch.randn(18, 2))[0], torch.randn(K, 4, 2)
    x = torch.randn(K * 2, 2, 5, 5)
    for operand in (Dense(W), Factored(B, G, torch.randn(K, 4)), Factored(B, G, None)):
        ways = executions_of(geometry, operand, K)
        outs = [apply(geometry, x, operand, K, way) for way in ways]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-4)
    assert executions_of(geometry, Dense(W[:1]), K) == ()
    assert executions_of(Linear(3, 2, bias=True), Dense(W), K) == (("loop", "batch") if K > 1 else ())


def test_the_file_lies_where_caches_of_the_user_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_file() == tmp_path / "dubito" / "plans.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_file() == tmp_path / ".cache" / "dubito" / "plans.json"
