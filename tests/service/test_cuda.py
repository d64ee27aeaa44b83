"""The engine on a GPU; skipped, aloud, where there is none."""

import asyncio
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.architectures import FACTORIES
from dubito.models.embedded import embedded
from dubito.models.errors import InputError, PredictionError
from dubito.models.manifest import Card, Input
from dubito.models.network.geometry import Execution
from dubito.models.network.network import Draws
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.inducing_factors import LambdaLaw
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import evaluating
from dubito.models.predictions.resident import reside
from dubito.service.engine import plans
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.engine import Answer, Engine, PredictRequest, PredictResult
from dubito.service.engine.executions import kernel_executions
from dubito.service.engine.fusion import Unit
from dubito.service.engine.graphs import for_gpu
from dubito.service.engine.turn import Turn
from dubito.service.settings import Settings
from dubito.service.web.state import State
from tests.models import test_agreement as agreement
from tests.service import interpreted
from tests.service.conftest import repository_on
from tests.service.test_repository import nothing_collected
from tests.small_models import bottlenecks, spoiled, stored

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU's engine is not tested")

SHAPE = (3, 32, 32)
CUDA, HALF = torch.device("cuda"), torch.bfloat16
x = agreement.x


def kept(path: Path, method: str, lam_max: float) -> Model:
    torch.manual_seed(0)
    network = bayesianize(build("resnet18-cifar"), method, inducing=16, lam_max=lam_max, members=3)
    return stored(network.eval(), path, input=Input(shape=SHAPE))


LARGE = (8, 16, 14, 64, 96, 3, 1, 1, False, 68, True, True, "relu")  # enough programs to get in each other's way


@pytest.mark.parametrize("case", [*interpreted.CASES, LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels(case: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted.check_convolution(*case, dtype)  # type: ignore[arg-type, call-arg]


LARGE_AHEAD = (64, 256, 200, 3, True, True, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layers_kernel_begins_the_next_layer(dtype: torch.dtype) -> None:
    for case in [*interpreted.AHEAD, LARGE_AHEAD]:
        interpreted.check_ahead(*case, dtype)
        with interpreted.one_program():
            interpreted.check_ahead(*case, dtype)
    interpreted.check_pairs(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_between_layers(dtype: torch.dtype) -> None:
    for shape, affine in [*interpreted.NORMED, ((5000, 96), True)]:
        interpreted.check_layer_norm(shape, affine, dtype)
    for summed in [*interpreted.SUMMED, (20, 64, 1000, True), (100, 3, 10, False)]:
        interpreted.check_class_sums(*summed, dtype)
    for depthwise in [*interpreted.DEPTHWISE, (4, 200, 33, 35, 7, 1, 3, "gelu")]:
        interpreted.check_depthwise(*depthwise, dtype)
    for pooled in [*interpreted.POOLED, (9, 64, 57, 60, 3, 2, 1)]:
        interpreted.check_max_pool(*pooled, dtype)
    for then in (None, "relu", "gelu", "silu"):
        interpreted.check_finish(then, dtype)
    interpreted.check_between(dtype)


@pytest.mark.parametrize(("lam", "noise"), interpreted.LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_layers_drawn_by_one_kernel(lam: float, noise: LambdaLaw, dtype: torch.dtype) -> None:
    interpreted.check_together(lam, noise, dtype)


def test_normals_are_functions_of_their_place() -> None:
    interpreted.check_normals((1 << 52) + 12345, 7, 3, 5000)
    whole = Normals(5, torch.device("cuda")).rows(6, 1000)
    parts = Normals(5, torch.device("cuda"))
    assert torch.equal(whole, torch.cat([parts.rows(2, 1000), parts.rows(4, 1000)]))


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "ffg-w", "whvi"])
@pytest.mark.parametrize("lam_max", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_answers_as_the_network_does(
    method: str, lam_max: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Planned and captured, a seed's samples are those of the plain network in float32, near enough for the type."""
    model, device = kept(tmp_path / "m.safetensors", method, lam_max), torch.device("cuda")
    engine = Engine(reside(model, device, dtype), (1, 4), None, 30.0)
    engine.warm(8, nullcontext())
    assert engine.graphs is not None
    assert bool(engine.graphs.known) == (method != "ensemble-u")  # the order of its members is the host's
    torch.cuda.empty_cache()  # what a graph uses must not be among what is given back
    x = torch.randn(3, *SHAPE)
    (found,) = engine.answer([PredictRequest(x.numpy(), 8, 3, 8, 0.05)])
    assert isinstance(found, PredictResult), found
    wide = load(tmp_path / "m.safetensors").to(device)
    noise = Normals(3, device).rows(8, wide.factors.normals)
    with torch.inference_mode():
        plan = cheapest(wide.factors)
        expected = wide.network.run(x.to(device), wide.factors, Draws(8, noise, 3), plan).softmax(-1).mean(0)
    np.testing.assert_allclose(
        found.columns["probabilities"], expected.cpu().numpy(), atol=1e-3 if dtype == torch.float32 else 3e-2
    )
    again, other = engine.answer(
        [PredictRequest(x.numpy(), 8, 3, 8, 0.05), PredictRequest(x.numpy(), 8, None, 8, 0.05)]
    )
    assert isinstance(again, PredictResult)
    assert isinstance(other, PredictResult)
    assert np.array_equal(found.columns["probabilities"], again.columns["probabilities"])
    if method != "ensemble-u":  # of whose members two seeds may well choose the same
        assert not np.array_equal(found.columns["probabilities"], other.columns["probabilities"])


@pytest.mark.parametrize("lam_max", [0.0, 0.3])
def test_a_plan_joins_units_where_that_is_faster(
    lam_max: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it always is, by a clock that says so; the answers are those of the plain network in float32."""
    monkeypatch.setattr(plans, "_seconds", interpreted.by_name)
    torch.manual_seed(0)
    net = spoiled(bottlenecks())
    network = bayesianize(net, "ffg-u", inducing=4, lam_max=lam_max).eval()
    engine = Engine(
        reside(stored(network, tmp_path / "m.safetensors", input=Input(shape=SHAPE)), CUDA, HALF), (1, 4), None, 30.0
    )
    engine.warm(8, nullcontext())
    assert engine.plans is not None
    for B in (1, 4):
        assert list(engine.plans.at(B, 8).values()).count("mixed") == 4
    x = torch.randn(3, *SHAPE)
    (found,) = engine.answer([PredictRequest(x.numpy(), 8, 3, 8, 0.05)])
    wide = load(tmp_path / "m.safetensors").to(CUDA)
    with torch.inference_mode():
        noise = Normals(3, CUDA).rows(8, wide.factors.normals)
        expected = wide.network.run(x.to(CUDA), wide.factors, Draws(8, noise, 3), cheapest(wide.factors))
    np.testing.assert_allclose(probabilities(found), expected.softmax(-1).mean(0).cpu().numpy(), atol=3e-2)


@pytest.mark.parametrize(("lam", "executions"), [(0.0, ("fused", "parted", "grouped")), (agreement.LAM, ("grouped",))])
def test_predictions_by_kernels_are_those_of_the_papers_rule(
    x: torch.Tensor, lam: float, executions: tuple[Execution, ...]
) -> None:
    """Of a trained network, without λ-noise and with the exact law, in float16: its rounding is far below the error."""
    network = agreement.trained("exact", lam)
    with evaluating(network), torch.inference_mode():
        theirs = list(agreement.statistics(agreement.by_rule(network, x)))
        model = for_gpu(reside(replace(load(embedded("digits")), network=network, made=None), CUDA, torch.float16))
        factors, inputs = model.factors, x.to(CUDA, torch.float16)
        for execution in executions:
            noise = Normals(3, CUDA).rows(agreement.K, factors.normals)
            run = model.network.arrange(factors, Draws(agreement.K, noise, 0), {}, keep=True)
            plan: dict[torch.nn.Module, Execution] = {}
            for unit in factors.form.modules():  # type: ignore[union-attr]
                if isinstance(unit, Unit) and execution in kernel_executions(
                    unit.geometry, run.operands[unit.layer](), inputs
                ):
                    plan[unit.layer] = execution
            assert plan
            found = model.network.go(inputs, replace(run, plan=plan)).float().cpu()
            for a, b in zip(agreement.statistics(found), theirs, strict=True):
                agreement.agree(a, b)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = kept(tmp_path_factory.mktemp("cuda") / "m.safetensors", "ffg-u", 0.0)
    made = Engine(reside(model, CUDA, torch.bfloat16), (1, 4), None, 0.0)
    made.warm(8, nullcontext())
    return made


def asked(rows: int, seed: int | None, K: int = 8, size: float = 1.0) -> PredictRequest:
    rng = np.random.default_rng(rows)
    return PredictRequest(size * rng.standard_normal((rows, *SHAPE), dtype=np.float32), K, seed, K, 0.05)


def probabilities(answer: Answer) -> NDArray[Any]:
    assert isinstance(answer, PredictResult), answer
    return answer.columns["probabilities"]


def test_a_launched_pass_answers_the_same_while_the_next_one_runs(engine: Engine) -> None:
    asks = [asked(rows, seed) for seed, rows in enumerate((1, 3, 4, 2))]
    launched, found = [], list[NDArray[Any]]()
    for ask in asks:
        launched.append(engine.launch([ask]))
        if len(launched) > 1:
            found += map(probabilities, launched[-2].answers())  # type: ignore[union-attr]
        launched[-1].wait()  # type: ignore[union-attr]
    found += map(probabilities, launched[-1].answers())  # type: ignore[union-attr]
    for ask, mine in zip(asks, found, strict=True):
        assert np.array_equal(mine, probabilities(engine.answer([ask])[0]))


def test_what_is_not_launched(engine: Engine) -> None:
    assert engine.launch([asked(1, 3), asked(1, None)]) is None  # the one with a seed is to be alone
    assert engine.launch([asked(1, None), asked(1, None, 7)]) is None
    assert engine.launch([asked(5, None)]) is None


def test_one_that_is_unfit_hurts_no_other(engine: Engine) -> None:
    launched = engine.launch([asked(1, None), asked(2, None, size=np.nan)])
    assert launched is not None
    launched.wait()
    good, bad = launched.answers()
    assert isinstance(bad, InputError)
    assert np.isfinite(probabilities(good)).all()


def test_one_that_overflows_hurts_no_other(engine: Engine) -> None:
    large = replace(asked(2, None), x=np.full((2, *SHAPE), 3e38, np.float32))
    asks = [asked(1, None), large, asked(1, None)]
    launched = engine.launch(asks)
    assert launched is not None
    launched.wait()
    good, bad, other = launched.answers()
    assert isinstance(bad, PredictionError)
    assert probabilities(good).shape == probabilities(other).shape == (1, 10)


def test_many_through_the_batcher(engine: Engine) -> None:
    asks = [asked(1 + i % 4, i if i % 3 else None, 8 if i % 5 else 3) for i in range(60)]

    async def go() -> list[PredictResult]:
        batcher = Batcher([(engine, Turn())], max_work=1000, max_queue=100_000)
        try:
            return await asyncio.gather(*(batcher.result(batcher.put(ask, 60)) for ask in asks))
        finally:
            await batcher.close()

    for ask, found in zip(asks, asyncio.run(go()), strict=True):
        assert len(probabilities(found)) == ask.rows
        (alone,) = engine.answer([replace(ask, seed=found.seed)])
        tolerance = 0 if ask.seed is not None else 0.02  # without one, it may have been padded or planned otherwise
        np.testing.assert_allclose(probabilities(found), probabilities(alone), atol=tolerance)


class Waits(torch.nn.Module):
    """It asks the device for a number, which no capture allows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x.flatten(1))
        return self.b((x * float(x.abs().amax().item() > 0)).relu())  # type: ignore[no-any-return]


def test_what_cannot_be_captured_is_served_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTORIES, "tests:Waits", Waits)  # it cannot be traced, so its class makes it
    torch.manual_seed(0)
    network = bayesianize(build("tests:Waits"), "ffg-u", inducing=4, start="prior").eval()
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(8,))))
    model = load(tmp_path / "m.safetensors")
    engine = Engine(reside(model, CUDA, torch.float32), (1, 2), None, 5.0)
    engine.warm(4, nullcontext())
    assert engine.graphs is not None
    assert not any(K > 1 for _, K in engine.graphs.known)
    (found,) = engine.answer([PredictRequest(torch.randn(2, 8).numpy(), 4, 3, 4, 0.05)])
    assert isinstance(found, PredictResult), found


def test_two_copies_on_one_gpu_answer_from_one_queue(tmp_path: Path) -> None:
    kept(tmp_path / "m.safetensors", "ffg-u", 0.0)
    given = {"models": [tmp_path / "m.safetensors"], "buckets": (1, 4), "samples": 8, "plan_seconds": 0}
    settings = Settings.model_validate({**given, "devices": ["cuda:0", "cuda:0"]})

    async def body() -> list[PredictResult]:
        state = State(settings)
        await state.start()
        try:
            assert state.repository is not None
            batcher = state.repository.get("m").batcher
            assert len(batcher.workers) == 2
            return await asyncio.gather(*(batcher.result(batcher.put(asked(1 + i % 3, 5), 60)) for i in range(40)))
        finally:
            await state.stop(60)

    found = asyncio.run(body())
    alone = probabilities(found[0])[0]
    for result in found:
        np.testing.assert_allclose(probabilities(result)[0], alone, atol=0.02)


def test_unloading_gives_the_device_back(tmp_path: Path) -> None:
    """At once, and all of it each time."""
    kept(tmp_path / "m.safetensors", "ffg-u", 0.0)
    given = {"models": [tmp_path / "m.safetensors"], "buckets": (1, 4), "samples": 8, "plan_seconds": 0}
    settings = Settings.model_validate(given)

    async def body() -> list[weakref.ref[object]]:
        repository = repository_on(CUDA, torch.bfloat16, settings)
        await repository.load("m")
        batcher, engine = repository.get("m").batcher, repository.get("m").engines[0]
        assert probabilities(await batcher.result(batcher.put(asked(3, None), 60))).shape == (3, 10)
        assert engine.graphs is not None
        held = (engine, engine.graphs, engine.model.network, batcher)
        parts: list[weakref.ref[object]] = [weakref.ref(part) for part in held]
        del engine, batcher, held
        await repository.unload("m")
        return parts

    seen = []
    for _ in range(3):
        with nothing_collected():
            assert [part() for part in asyncio.run(body())] == [None] * 4
        seen.append(torch.cuda.memory_allocated())
    assert seen[1] == seen[2], seen


def test_a_file_is_scored_alike_by_one_process_and_by_two_on_a_gpu(tmp_path: Path) -> None:
    scoring = pytest.importorskip("dubito.service.scoring.score", reason="SCORING IS NOT TESTED: it needs pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    kept(tmp_path / "m.safetensors", "ffg-u", 0.0)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(1500, *SHAPE)).astype(np.float32))
    tables = {}
    for name, devices in {"one": ["cuda:0"], "two": ["cuda:0", "cuda:0"]}.items():
        asked = scoring.Scoring(tmp_path / "m.safetensors", str(tmp_path / "x.npy"), tmp_path / f"{name}.parquet", 8)
        done = scoring.score(asked, devices, False, lambda left: nullcontext(lambda rows: None))
        assert done.rows == 1500
        tables[name] = pq.read_table(tmp_path / f"{name}.parquet")
    assert tables["one"]["row"].to_pylist() == list(range(1500))
    assert tables["one"].equals(tables["two"])
