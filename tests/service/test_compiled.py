"""Compiled passes on a CPU: the sums of torch's own pass, kept in a folder, and never in the way."""

import asyncio
import hashlib
import math
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Input, Regression
from dubito.models.network.geometry import Execution
from dubito.models.network.network import BayesianNetwork, Draws, Plan
from dubito.models.network.plan import cheapest
from dubito.models.numerics import normals_native
from dubito.models.numerics.normals import Normals
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Job, evaluating
from dubito.models.predictions.resident import reside
from dubito.models.predictions.uncertainty import Classified, class_sums
from dubito.service.engine import compiled, pass_cache
from dubito.service.engine import engine as engines
from dubito.service.engine.bank import Bank
from dubito.service.engine.budget import Budget
from dubito.service.engine.compiled import write_pass
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.pace import Pace
from dubito.service.engine.pass_cache import PassCache
from dubito.service.engine.recording import NotRecorded, record
from dubito.service.engine.sessions import CompiledPass, DrawsAhead, PassPart, Sessions, Written
from dubito.service.settings import Settings
from tests import forked
from tests.models.test_window_attention import SWINS
from tests.service.conftest import repository_on
from tests.small_models import mlp

pytest.importorskip("onnxruntime")
CPU = torch.device("cpu")
CLOSE = 2e-5  # of the means over draws: float32 rounds by 6e-8, through some hundred sums
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ffg-u": ("ffg-u", {"inducing": 6}),
    "ffg-u, exact": ("ffg-u", {"inducing": 6, "noise": "exact", "lam_max": 0.3}),
    "ffg-u, factored": ("ffg-u", {"inducing": 6, "noise": "factored", "lam_max": 0.3}),
    "ffg-u, λ = 0": ("ffg-u", {"inducing": 6, "lam_max": 0.0}),
    "hierarchy": ("ffg-u", {"inducing": 4, "hierarchy": (3, 6)}),
    "fcg-u": ("fcg-u", {"inducing": 4}),
    "ffg-w": ("ffg-w", {}),
    "fcg-w": ("fcg-w", {"covariance_limit": 10**6}),
    "mc-dropout": ("mc-dropout", {}),
    "whvi": ("whvi", {}),
    "whvi, full covariance": ("whvi", {"covariance": "full"}),
    "whvi, flows": ("whvi", {"flows": 2}),
}
# of one draw, which has no axis of samples: a method of each way to make weights; the others are slow
ALONE = {"ffg-u", "ensemble-w", "whvi"}
ALL = [(3, 5, m) for m in METHODS] + [
    pytest.param(2, 1, m, marks=() if m in ALONE else pytest.mark.slow) for m in METHODS
]


class Attends(nn.Module):
    """Patches, attention and pooling, with the operators of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 12, 4, 4)
        self.norm, self.inner = nn.LayerNorm(12), nn.Linear(12, 36)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.inner(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.head((tokens + self.mlp(tokens)).mean(1))
        return out


def deep() -> nn.Module:
    return build("cnn", classes=4, channels=2, size=8, width=4, hidden=8)


def classifier(channels: int = 2) -> nn.Module:
    return build("convnet", classes=4, channels=channels, size=8, stages=[4], hidden=8)


def resident(network: BayesianNetwork, shape: tuple[int, ...], folder: Path) -> Model:
    save(network, folder / "model.safetensors", card=Card(input=Input(shape=shape)))
    return reside(load(folder / "model.safetensors"), CPU, torch.float32)


def job_of(model: Model, B: int, plan: Plan) -> Job:
    declared = model.card.input
    assert declared is not None
    x = torch.randn(B, *declared.shape, generator=torch.Generator().manual_seed(2))
    return Job.of(model.network, model.factors, x, 5, temperature=model.temperature, plan=plan)


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def sums_agree(model: Model, B: int, K: int, pool: Executor, *executions: Execution) -> None:
    """A compiled pass against torch's: whole for the cheapest plan and these executions, in halves for the former."""
    known = set[bytes]()  # the cheapest plan is often one of the executions
    for execution in (None, *executions):
        plan = cheapest(model.factors) if execution is None else dict.fromkeys(model.factors.layers, execution)
        job = job_of(model, B, plan)
        with evaluating(model.network), torch.inference_mode():
            whole = [write_pass(job, K, plan)]
            if whole[0].network in known:
                continue
            known.add(whole[0].network)
            ways = [whole]
            if execution is None and K > 1:
                ways.append([write_pass(job, K - K // 2, plan), write_pass(job, K // 2, plan)])
            for seed, written in enumerate(ways):
                expected = job.sums(Draws(K, Normals(seed, CPU).rows(K, model.factors.normals), seed))
                one, draws = CompiledPass(written, 1, model.network, B, pool), Draws(K, None, seed, by_graph=True)
                sums = one.sums(job.given, draws, Normals(seed, CPU))
                assert np.abs(sums - expected).max() <= CLOSE * max(K, np.abs(expected).max())
                fewer = one.sums(job.given[:1], draws, Normals(seed, CPU))  # padded to B
                np.testing.assert_allclose(fewer, sums[:1], rtol=1e-5, atol=1e-6)
                for k in {1, K // 2, K - 1} - {0}:  # of fewer draws than it was compiled for
                    some = one.sums(job.given, Draws(k, None, seed, by_graph=True), Normals(seed, CPU))
                    expected = job.sums(Draws(k, Normals(seed, CPU).rows(k, model.factors.normals), seed))
                    assert np.abs(some - expected).max() <= CLOSE * max(k, np.abs(expected).max())


@pytest.mark.parametrize(("B", "K", "method"), ALL)
def test_every_method_gives_the_sums_of_torch(B: int, K: int, method: str, tmp_path: Path, pool: Executor) -> None:
    torch.manual_seed(3)
    name, options = METHODS[method]
    net = classifier() if K > 1 else deep()  # of one draw all executions are the same
    model = resident(bayesianize(net, name, start="network", **options), (2, 8, 8), tmp_path)
    executions: tuple[Execution, ...] = ("batch", "loop", "unfold", "factored")
    sums_agree(model, B, K, pool, *(executions if K > 1 else ()))


@pytest.mark.parametrize("noise", ["constant", "input"])
def test_regression(noise: Any, tmp_path: Path, pool: Executor) -> None:
    torch.manual_seed(3)
    task = Regression(outputs=2, shift=(1.0, -2.0), scale=(0.5, 3.0), noise=noise)
    network = bayesianize(mlp(5, 16, task.numbers), "ffg-u", inducing=4, task=task)
    sums_agree(resident(network, (5,), tmp_path), 3, 9, pool)


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "K"),
    [
        ("mlp", {"inputs": 6, "hidden": [16, 16], "outputs": 3}, (6,), 4),
        ("lenet", {"classes": 5}, (1, 28, 28), 4),
        ("resnet8", {"classes": 4, "width": 4}, (3, 16, 16), 2),
        pytest.param("resnet18-cifar", {"classes": 4}, (3, 16, 16), 2, marks=pytest.mark.slow),
    ],
)
def test_architectures(
    name: str, arguments: dict[str, Any], shape: tuple[int, ...], K: int, tmp_path: Path, pool: Executor
) -> None:
    torch.manual_seed(3)
    model = resident(bayesianize(build(name, **arguments), "ffg-u", inducing=4), shape, tmp_path)
    sums_agree(model, 2, K, pool)


def test_attention(tmp_path: Path, pool: Executor) -> None:
    torch.manual_seed(3)
    network = bayesianize(Attends(), "ffg-u", inducing=4).eval()
    factors = network.factors()
    job = Job.of(network, factors, torch.randn(2, 2, 8, 8), 5)
    with evaluating(network), torch.inference_mode():
        written = write_pass(job, 6, cheapest(factors))
        expected = job.sums(Draws(6, Normals(5, CPU).rows(6, factors.normals), 5))
        one = CompiledPass([written], 1, network, 2, pool)
        sums = one.sums(job.given, Draws(6, None, 5, by_graph=True), Normals(5, CPU))
    assert np.abs(sums - expected).max() <= CLOSE * 6


@pytest.mark.parametrize("kind", [pytest.param("v1", marks=pytest.mark.slow), "v2"])
def test_attention_within_windows(kind: str, tmp_path: Path, pool: Executor) -> None:
    torch.manual_seed(3)
    sums_agree(resident(bayesianize(SWINS[kind](), "ffg-u", inducing=4), (3, 18, 22), tmp_path), 2, 3, pool)


# what cannot be recorded


def recorded(function: Any) -> None:
    with torch.inference_mode():
        record(function, (torch.ones(3, 2),), frozenset())


def test_what_depends_on_more_than_the_inputs_is_not_recorded() -> None:
    with pytest.raises(NotRecorded, match="draws random numbers"):
        recorded(lambda x: x + torch.rand(3, 2))
    with pytest.raises(NotRecorded, match="reads numbers"):
        recorded(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(NotRecorded, match="does not depend"):
        recorded(lambda x: torch.ones(2))

    def under_two_names(x: Tensor) -> Tensor:
        y = x + 1
        view = y.view(6)
        y.mul_(2)
        return view

    with pytest.raises(NotRecorded, match="in place"):
        recorded(under_two_names)


def test_a_change_in_place_is_recorded_where_nothing_else_sees_it() -> None:
    recording = record(lambda x: (x + 1).relu_(), (torch.ones(3, 2),), frozenset())
    assert [call.name for call in recording.calls] == ["add", "relu"]


# the engine


def asked(K: int | Any, seed: int | None, B: int = 1) -> PredictRequest:
    x = np.random.default_rng(B).standard_normal((B, 1, 8, 8)).astype(np.float32)
    return PredictRequest(x, K, seed, 64, 0.05)


def digits() -> Model:
    return reside(load(embedded("digits")), CPU, torch.float32)


@cache
def small() -> Model:
    """Takes what the digits take; in a process of its own it has the same weights."""
    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resident(bayesianize(classifier(1), "ffg-u", inducing=4), (1, 8, 8), Path(folder))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes are used whatever this machine's load: by their times alone, torch's may win."""
    monkeypatch.setattr(compiled, "FASTER", float("inf"))


def engine(
    folder: Path | None, seconds: float = 60.0, buckets: tuple[int, ...] = (1, 4), model: Model | None = None
) -> Engine:
    made = Engine(model or small(), buckets, plan_seconds=seconds, pass_cache=PassCache(folder))
    made.warm(20, nullcontext())
    return made


def result(engine: Engine, request: PredictRequest) -> PredictResult:
    (answer,) = engine.answer([request])
    assert isinstance(answer, PredictResult), answer
    return answer


def same(a: PredictResult, b: PredictResult, tolerance: float) -> None:
    assert a.columns.keys() == b.columns.keys()
    for name, column in a.columns.items():
        if np.asarray(column).dtype.kind == "f":
            np.testing.assert_allclose(b.columns[name], column, atol=tolerance, rtol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(b.columns[name], column, name)


@pytest.mark.usefixtures("quick")
def test_a_seed_gives_the_answers_of_torch(tmp_path: Path) -> None:
    plain = Engine(digits(), (1, 4))
    plain.warm(20, nullcontext())
    fast = engine(tmp_path, model=digits())
    assert fast.compiled is not None
    assert set(fast.compiled.known) == {(1, 20), (1, 8), (4, 20), (4, 8)}
    for K in (20, 8, "auto", 64):  # 64 draws were not compiled
        for seed, B in ((0, 1), (3, 1), (0, 3), (3, 4)):
            a, b = (result(one, asked(K, seed, B)) for one in (plain, fast))
            assert (a.seed, a.samples) == (b.seed, b.samples) == (seed, a.samples)
            same(a, b, 2e-5)
    first, again = (result(fast, asked(20, 11)) for _ in range(2))
    same(first, again, 0.0)
    free = [result(fast, asked(K, None, B)) for K, B in ((20, 1), (20, 1), (20, 3), (8, 1), (64, 1), (20, 1))]
    assert len({one.seed for one in free}) == len(free)
    for one, (K, B) in zip(free, ((20, 1), (20, 1), (20, 3), (8, 1), (64, 1), (20, 1)), strict=True):
        same(one, result(plain, asked(K, one.seed, B)), 2e-5)  # the seed that was reported gives the same answer


@pytest.mark.usefixtures("quick")
def test_other_numbers_of_draws_take_the_compiled_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws than a pass has leave some out; more go in several passes. The answers stay those of the seed."""
    plain, fast = Engine(small(), (1, 4)), engine(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fast, "uncompiled", Pace([(1, 10.0)]))  # torch takes ten seconds for any pass
        assert fast._divided(1, 64) == 20
        patch.setattr(Job, "outputs", None)  # torch's pass, which nothing asks for
        requests = [asked(K, None, B) for K in (1, 3, 9, 19, 21, 64) for B in (1, 3)]
        answers = [result(fast, request) for request in requests]
        mixed = [asked(K, None, B) for K, B in ((5, 1), (20, 1), (33, 2))]
        together = fast.answer(mixed)
    for request, one in zip([*requests, *mixed], [*answers, *together], strict=True):
        assert isinstance(one, PredictResult)
        same(one, result(plain, replace(request, seed=one.seed)), 2e-5)
    fast.uncompiled = Pace([(1, 1e-9)])  # torch is faster than anything
    assert fast._divided(1, 64) == 64
    assert fast._compiled_for(1, 3) is None
    assert fast._compiled_for(1, 20) is not None


@pytest.mark.usefixtures("quick")
def test_a_seeds_bits_do_not_depend_on_what_was_timed_at_the_start(tmp_path: Path) -> None:
    """Servers that share plans and passes answer a seed alike, however busy the machine was when each of them began."""
    one = engine(tmp_path)
    answers = []
    for seconds in (1e-9, 10.0):  # of a pass by torch
        one.uncompiled = Pace([(1, seconds)])
        answers.append([result(one, asked(K, 7, B)) for K in (1, 3, 8, 19, 20, 64) for B in (1, 3)])
    assert one._divided(1, 64) == 20  # without a seed it would not be the same
    for first, second in zip(*answers, strict=True):
        same(first, second, 0.0)


@pytest.mark.usefixtures("quick")
def test_draws_of_a_bank_are_not_divided_for_compiled_passes(tmp_path: Path) -> None:
    banked = engine(tmp_path)
    banked.uncompiled = Pace([(1, 10.0)])
    banked.bank = Bank(banked.model, 2, 64, 1e9)
    passes = []
    outputs = Job.outputs

    def counting(job: Job, *given: Any) -> Tensor:
        passes.append(given)
        return outputs(job, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "outputs", counting)
        result(banked, asked(64, None))
    assert len(passes) == 1


def test_a_draw_that_is_left_out_adds_nothing() -> None:
    """Though it be infinite: 0 · ∞ is not 0."""
    logits = torch.tensor([[[1.0, 2.0]], [[torch.inf, 0.0]], [[-1.0, 0.5]]])
    counted = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(class_sums(logits, None, counted), class_sums(logits[[0, 2]]))


@pytest.mark.usefixtures("quick")
def test_a_plan_that_cannot_be_recorded_does_not_keep_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tried = compiled.write_pass, list[Plan]()

    def spoilt(job: Job, K: int, plan: Plan, largest: int) -> Written:
        tried.append(plan)
        if plan == tried[0]:
            raise NotRecorded("too large")
        return write(job, K, plan, largest)

    monkeypatch.setattr(compiled, "write_pass", spoilt)
    monkeypatch.setattr(compiled, "_plans", lambda measured, fewest: [{**fewest, "no layer": "loop"}, measured])
    one = engine(tmp_path, buckets=(1,))
    assert one.compiled is not None
    assert (1, 20) in one.compiled.known
    monkeypatch.setattr(compiled, "_plans", lambda measured, fewest: [tried[0]])
    other = engine(tmp_path / "other", buckets=(1,))
    assert other.compiled is not None
    assert not other.compiled.known


@pytest.mark.usefixtures("quick")
def test_draws_cost_torch_what_they_take_where_one_size_alone_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a network whose batches take long."""
    monkeypatch.setattr(engines, "QUICK", 0.0)
    one = Engine(small(), (1, 4), pass_cache=PassCache(tmp_path))
    one.warm(100, nullcontext(), (0.005, 0.02, 0.1))
    assert one._by_torch(1, 1) < one._by_torch(1, 50) < one._by_torch(1, 100)


@pytest.mark.usefixtures("quick")
def test_passes_are_read_from_the_folder(tmp_path: Path) -> None:
    first = engine(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.pass")}
    assert len(files) == 4
    second = engine(tmp_path, seconds=0.0)  # no time to compile anything
    assert first.compiled is not None
    assert second.compiled is not None
    assert second.compiled.known.keys() == first.compiled.known.keys()
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.pass")} == files
    same(result(first, asked(20, 3)), result(second, asked(20, 3)), 1e-5)


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the compiled passes of one input."""
    folder = tmp_path_factory.mktemp("passes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FASTER", float("inf"))
        engine(folder, buckets=(1,))
    return folder


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("spoil", ["cut", "byte", "no graph", "another pass", "empty"])
def test_damaged_files_are_compiled_anew(spoil: str, passes: Path, tmp_path: Path) -> None:
    shutil.copytree(passes, tmp_path, dirs_exist_ok=True)
    one, other = sorted(tmp_path.glob("*.pass"))
    content = one.read_bytes()
    rest = b'{"threads": 1, "passes": [{"K": 20, "sizes": [1], "draws": 0, "network": 0, "operands": [], "size": 0}], '
    rest += b'"lengths": [4]}\nspam'
    one.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "byte": content[:500] + bytes([content[500] ^ 1]) + content[501:],
            "no graph": hashlib.sha256(rest).digest() + rest,
            "another pass": other.read_bytes(),
            "empty": b"",
        }[spoil]
    )
    fast = engine(tmp_path, buckets=(1,))
    assert fast.compiled is not None
    assert set(fast.compiled.known) == {(1, 20), (1, 8)}
    same(result(fast, asked(20, 3)), result(Engine(small(), (1,)), asked(20, 3)), 2e-5)
    again = one.read_bytes()
    assert again[:32] == hashlib.sha256(again[32:]).digest()
    assert again != other.read_bytes()


@pytest.mark.usefixtures("quick")
def test_the_weights_are_part_of_the_key(tmp_path: Path) -> None:
    """A new version of a model never gets the passes of the old one, which has the same shapes."""
    torch.manual_seed(0)
    for i in range(2):
        model = resident(bayesianize(classifier(), "ffg-u", inducing=4), (2, 8, 8), tmp_path)
        made = Engine(model, (1,), plan_seconds=60.0, pass_cache=PassCache(tmp_path / "passes"))
        made.warm(8, nullcontext())
        assert len(list((tmp_path / "passes").glob("*.pass"))) == i + 1
        x = np.ones((1, 2, 8, 8), np.float32)
        a, b = (result(one, PredictRequest(x, 8, 3, 8, 0.05)) for one in (made, Engine(model, (1,))))
        same(a, b, 2e-5)


@pytest.mark.usefixtures("quick")
def test_another_processor_times_its_own_passes(passes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that several machines share: what is fastest on one may be slow on another."""
    shutil.copytree(passes, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(compiled, "processor", lambda: "another one")
    assert engine(tmp_path, seconds=0.0, buckets=(1,)).compiled.known == {}  # type: ignore[union-attr]
    monkeypatch.undo()
    assert engine(tmp_path, seconds=0.0, buckets=(1,)).compiled.known  # type: ignore[union-attr]


@pytest.mark.usefixtures("quick")
def test_a_switch_of_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version answers as its own artifact does; the old one is gone with its sessions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)

    def write(version: str) -> Path:
        path = tmp_path / "models" / "m" / version / "model.safetensors"
        path.parent.mkdir(parents=True)
        save(bayesianize(classifier(), "ffg-u", inducing=4), path, card=Card(input=Input(shape=(2, 8, 8))))
        return path

    async def body() -> None:
        path = write("1")
        given = {"models": [tmp_path / "models"], "buckets": (1,), "plan_seconds": 60.0, "samples": 8}
        repository = repository_on(CPU, torch.float32, Settings.model_validate(given))
        old: list[weakref.ref[object]] = []
        for _ in range(2):
            await repository.load("m")
            assert [one() for one in old] == [None] * len(old)
            served = repository.get("m")
            passes = served.engines[0].compiled
            assert passes is not None
            assert set(passes.known) == {(1, 8)}
            gone: list[object] = [passes, *passes.known.values()]
            old = [weakref.ref(one) for one in gone]
            answer = await served.batcher.result(served.batcher.put(PredictRequest(x, 8, 3, 8, 0.05), 30))
            expected = load(path).predict(torch.from_numpy(x), 8, 3).summary
            assert isinstance(expected, Classified)
            np.testing.assert_allclose(answer.columns["probabilities"], expected.probabilities, atol=2e-5)
            del served, passes, gone, answer
            path = write(str(len(list((tmp_path / "models" / "m").iterdir())) + 1))
        await repository.unload("m")

    asyncio.run(body())
    assert len(list((tmp_path / "cache" / "dubito" / "passes").glob("*.pass"))) == 2


def test_slow_passes_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FASTER", 0.0)
    slow = engine(tmp_path, buckets=(1,))
    assert slow.compiled is not None
    assert not slow.compiled.known
    assert len(list(tmp_path.glob("*.pass"))) == 2  # which say so
    monkeypatch.setattr(compiled, "FASTER", float("inf"))
    still = engine(tmp_path, buckets=(1,))
    assert still.compiled is not None
    assert not still.compiled.known


def test_networks_that_cannot_be_compiled_answer_by_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    networks = (
        bayesianize(classifier(), "ensemble-u", inducing=4, members=3),
        bayesianize(classifier(), "deterministic"),
    )
    for network in networks:
        model = resident(network, (2, 8, 8), tmp_path)
        made = Engine(model, (1,), plan_seconds=60.0, pass_cache=PassCache(tmp_path / "passes"))
        made.warm(8, nullcontext())
        assert made.compiled is not None
        assert not made.compiled.known
        assert isinstance(
            made.answer([PredictRequest(np.ones((1, 2, 8, 8), np.float32), 8, 3, 8, 0.05)])[0], PredictResult
        )


def test_sums_that_are_not_finite_are_compared_too(pool: Executor) -> None:
    model = small()
    with evaluating(model.network), torch.inference_mode():
        job = job_of(model, 2, dict.fromkeys(model.factors.layers, "batch"))
        check = compiled._Check(job, 3, pool)
        found = CompiledPass([write_pass(job, 3, job.plan(2, 3))], 1, model.network, 2, pool)
        check.compare(found)
        check.expected[1][-1].flat[0] = np.inf
        with pytest.raises(NotRecorded, match="finite where torch's are not"):
            check.compare(found)


@pytest.mark.usefixtures("quick")
def test_a_pass_that_disagrees_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a runtime computes wrongly: its sums are off by a hundredth."""
    right = CompiledPass.sums
    monkeypatch.setattr(CompiledPass, "sums", lambda *given: 1.01 * right(*given))
    wrong = engine(tmp_path, buckets=(1,))
    assert wrong.compiled is not None
    assert not wrong.compiled.known
    assert not list(tmp_path.glob("*.pass"))


@pytest.mark.usefixtures("quick")
def test_memory_is_counted(tmp_path: Path) -> None:
    share = Budget(1 << 30).share()
    made = Engine(small(), (1,), plan_seconds=60.0, share=share, pass_cache=PassCache(tmp_path))
    made.warm(20, nullcontext())
    passes = made.compiled
    assert passes is not None
    files = sum(file.stat().st_size for file in tmp_path.glob("*.pass"))
    assert made.plans.bytes == passes.bytes > files + share.need(1, 20) > files
    passes.compile(job_of(made.model, 3, cheapest(made.model.factors)), 5, Budget(1).share())
    assert set(passes.known) == {(1, 20), (1, 8)}  # another one does not fit


def test_old_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_cache, "LARGEST", 1000)
    cache = PassCache(tmp_path)
    for i in range(4):
        cache.write(f"{i}", bytes(300))
        os.utime(tmp_path / f"{i}.pass", (i, i))
    cache.write("4", bytes(300))
    assert sorted(file.name for file in tmp_path.glob("*")) == ["2.pass", "3.pass", "4.pass"]
    assert cache.read("4") == bytes(300)
    assert cache.read("0") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PassCache(tmp_path / "file" / "passes")
    cache.write("1", b"one")
    assert cache.read("1") is None


WITHOUT = """
import sys, importlib.machinery as m
find = m.PathFinder.find_spec

def without(cls, name, *more):
    return None if name.split(".")[0] in ("onnxruntime", "onnx") else find(name, *more)

m.PathFinder.find_spec = classmethod(without)
try:
    import onnxruntime
except ModuleNotFoundError:
    pass
else:
    sys.exit("onnxruntime is there")
"""


def test_without_onnxruntime_torch_answers(tmp_path: Path) -> None:
    code = f"""{WITHOUT}
from pathlib import Path
import pytest; pytest.importorskip = lambda name: None
from tests.service.test_compiled import asked, engine, result
one = engine(Path({str(tmp_path)!r}), buckets=(1,))
assert not one.compiled.known
print(result(one, asked(20, 3)).columns["probabilities"].tolist())
"""
    run = forked.run(code=code)
    assert run.returncode == 0, run.stderr
    expected = result(Engine(small(), (1,)), asked(20, 3)).columns["probabilities"]
    np.testing.assert_allclose(np.array(eval(run.stdout)), expected, atol=2e-5)
    assert not list(tmp_path.glob("*.pass"))


# normals


def test_normals_by_compiled_code_are_those_of_numpy(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    fill = normals_native._checked(normals_native._library(tmp_path))
    sizes = np.array([1, 16, 700, 3])
    for seed in (0, 1, 2**53 - 1):
        ours, theirs = normals_native.NativeGenerator(seed, fill), np.random.Generator(np.random.SFC64(seed))
        for rows in (1, 3, 200):
            out = np.empty(rows * 720, np.float32)
            ours.fill(out, rows, sizes)
            expected = theirs.standard_normal((rows, 720), np.float32)
            parts = np.split(expected, np.cumsum(sizes)[:-1], axis=1)
            np.testing.assert_array_equal(out, np.concatenate([part.ravel() for part in parts]))
    out = np.empty(3_000_000, np.float32)
    normals_native.NativeGenerator(9, fill).fill(out, 1, np.array([len(out)]))
    np.testing.assert_array_equal(out, np.random.Generator(np.random.SFC64(9)).standard_normal(len(out), np.float32))
    assert np.abs(out).max() > 4.5  # beyond the layers of the ziggurat, which end at 3.65


def test_parts_hold_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normals_native, "_fill", None)  # by numpy
    sizes = np.array([2, 5, 1])
    rows, parts = Normals(4, CPU).rows(3, 8), Normals(4, CPU).parts(3, sizes)
    expected = torch.cat([part.reshape(-1) for part in rows.split(sizes.tolist(), 1)])
    torch.testing.assert_close(parts, expected, rtol=0, atol=0)


def parts_of(Ks: Sequence[int], plan: Execution, sessions: Sessions) -> list[PassPart]:
    """Passes of the small network for so many draws, each layer by this execution."""
    model = small()
    with evaluating(model.network), torch.inference_mode():
        job = job_of(model, 2, dict.fromkeys(model.factors.layers, plan))
        return [PassPart(write_pass(job, K, job.plan(2, K)), sessions, 1) for K in Ks]


def test_draws_made_ahead_are_those_of_the_seed(pool: Executor) -> None:
    """Whether the passes that come are those that were expected or others."""
    sessions = Sessions()
    two, three = parts_of((2, 3), "batch", sessions)
    (other,) = parts_of((2,), "loop", sessions)
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    orders = ((two, three), (two, two, three), (three,), (other, three), (two, other, two), (two, three, two))
    whole = [[(part, part.K) for part in parts] for parts in orders]
    for calls in (*whole, [(two, 1), (two, 2)], [(two, 2), (three, 1), (three, 3)], [(three, 2), (two, 2)]):
        ahead = DrawsAhead([two, three], pool)
        plain = Normals(ahead.seed, CPU)
        for part, k in calls:
            np.testing.assert_array_equal(part(x, part.given(ahead, k), k), part(x, part.given(plain, k), k))
    (again,) = parts_of((2,), "batch", sessions)
    ahead = DrawsAhead([two], pool)
    assert again.drawing is two.drawing  # equal draws, one session
    assert not isinstance(again.given(ahead, 2), np.ndarray)
    assert isinstance(again.given(ahead, 2), np.ndarray)  # they are handed out once


def test_draws_that_fail_ahead_are_made_again(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = parts_of((2,), "batch", Sessions())
    x = np.zeros((2, 1, 8, 8), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(PassPart, "draw", lambda *given: 1 / 0)
        ahead = DrawsAhead([part], pool)
        pool.submit(int).result()
    expected = part(x, part.given(Normals(ahead.seed, CPU), 2), 2)
    np.testing.assert_array_equal(part(x, part.given(ahead, 2), 2), expected)


def test_draws_that_nobody_needs_any_more_do_not_keep_the_pool(pool: Executor) -> None:
    two, three = parts_of((2, 3), "batch", Sessions())
    free = threading.Event()
    busy, left = pool.submit(free.wait), []
    for take in (lambda ahead: three.given(ahead, 3), lambda ahead: ahead.parts(2, two.sizes)):
        ahead = DrawsAhead([two], pool)
        left.append(ahead._made)
        take(ahead)
    free.set()
    assert busy.result()
    assert all(made is not None and made.cancelled() for made in left)


def test_the_memory_of_draws_ahead_is_counted_where_nothing_is_divided_off(pool: Executor) -> None:
    """What is kept then is their normals."""
    (part,) = parts_of((2,), "batch", Sessions())
    model = small()
    with evaluating(model.network), torch.inference_mode():
        job = job_of(model, 2, dict.fromkeys(model.factors.layers, "batch"))
        written = write_pass(job, 2, job.plan(2, 2))
    whole = replace(written, draws=b"", operands=(), size=0)
    without, with_normals = (
        CompiledPass([replace(whole, K=K)], 1, model.network, 2, pool).bytes for K in (0, written.K)
    )
    assert with_normals - without == 4 * 2 * sum(part.sizes)


class Joins(nn.Module):
    """Puts two outputs below each other, and takes the result apart again another way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        below = torch.cat([self.a(x).reshape(-1, 2, 2), self.b(x).reshape(-1, 2, 2)], 1)
        left, right = below.reshape(-1, 2, 4).split([2, 2], -1)
        out: Tensor = (left - 2 * right).flatten(1)
        return out


def test_what_was_joined_along_another_axis_is_taken_apart(tmp_path: Path, pool: Executor) -> None:
    torch.manual_seed(4)
    model = resident(bayesianize(Joins(), "ffg-u", inducing=2, start="network"), (2, 3, 1), tmp_path)
    sums_agree(model, 2, 3, pool, "batch")


def test_what_does_not_depend_on_the_inputs_is_divided_off() -> None:
    """The draws of a layer, whatever the inputs: none of their operators is left beside them. Large ones stay."""
    import onnx

    from dubito.service.engine.division import divide

    model = small()
    with evaluating(model.network), torch.inference_mode():
        few, many = (job_of(model, B, dict.fromkeys(model.factors.layers, "batch")) for B in (1, 6))
        written, other = (write_pass(job, 3, job.plan(job.B, 3)) for job in (few, many))
    assert written.draws == other.draws
    assert written.network != other.network
    draws, network = (onnx.load_from_string(part) for part in (written.draws, written.network))
    assert [one.name for one in network.graph.input] == ["x", "counted", *written.operands]
    assert {one.name for one in draws.graph.input} >= {"columns_0"}
    reached = {"x", "counted"}
    for node in network.graph.node:
        assert reached.intersection(node.input), f"{node.op_type} does not depend on the inputs"
        reached.update(node.output)
    shapes = [[size.dim_value for size in one.type.tensor_type.shape.dim] for one in draws.graph.output]
    assert written.size == 4 * sum(map(math.prod, shapes))
    whole = divide(network, ("x", "counted"), most=written.size - 1)  # a graph that is handed its draws
    assert (whole.draws, whole.operands) == (b"", ())


def test_a_damaged_library_is_compiled_anew(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    path = normals_native._library(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:1000])
    assert normals_native._library(tmp_path) == path
    assert len(path.read_bytes()) == len(content)


def test_without_a_compiler_numpy_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normals_native, "_fill", None)
    monkeypatch.setenv("CC", "false")
    assert not normals_native.prepare(tmp_path)
    assert normals_native.generator(0) is None
    assert not list(tmp_path.glob("*.so"))
