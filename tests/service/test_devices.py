"""One model on several devices: one queue, one engine each, the same answers. Here each of them is the CPU."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from dubito.models import load
from dubito.models.errors import InputError
from dubito.models.predictions.model import Model
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.budget import Budget
from dubito.service.engine.device import Device, devices_of
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.turn import Turn
from dubito.service.metrics import Metrics
from dubito.service.problems import Gone
from dubito.service.repository import Repository
from dubito.service.settings import Settings
from tests.service.conftest import Serve
from tests.service.test_batcher import network_of

DIGITS = np.random.default_rng(0).normal(size=(24, 1, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model(convolved_digits: Path) -> Model:
    return load(convolved_digits)


def asked(rows: int = 1, seed: int | None = 7, samples: int = 4) -> PredictRequest:
    return PredictRequest(DIGITS[:rows], samples, seed, 4, 0.5)


def with_batcher(body: Callable[[Batcher, list[Turn]], Awaitable[None]], model: Model, copies: int = 2) -> None:
    async def go() -> None:
        turns = [Turn() for _ in range(copies)]
        engines = [Engine(model, (1, 8)) for _ in turns]
        batcher = Batcher([*zip(engines, turns, strict=True)], max_work=64, max_queue=100_000)
        try:
            await body(batcher, turns)
        finally:
            for turn in turns:
                if turn.locked():
                    turn.release()
            await batcher.close()

    asyncio.run(go())


def probabilities(result: PredictResult) -> list[list[float]]:
    values: list[list[float]] = result.columns["probabilities"].tolist()
    return values


def test_a_device_that_is_busy_does_not_hold_up_the_queue(model: Model) -> None:
    async def body(batcher: Batcher, turns: list[Turn]) -> None:
        alone = probabilities(await batcher.result(batcher.put(asked(), 30)))
        for turn in turns:
            turn.acquire()
            answers = [await batcher.result(batcher.put(asked(), 30)) for _ in range(3)]
            assert all(probabilities(answer) == alone for answer in answers)
            turn.release()

    # a worker that has taken nothing yet waits for its device, and another one answers
    with_batcher(body, model)


def test_both_work_at_once_and_every_request_is_answered_once(model: Model) -> None:
    seen: dict[int, int] = {}

    async def body(batcher: Batcher, turns: list[Turn]) -> None:
        both = threading.Barrier(2)

        def pause(module: torch.nn.Module, given: object) -> None:
            seen[threading.get_ident()] = seen.get(threading.get_ident(), 0) + 1
            if seen[threading.get_ident()] == 1:
                both.wait(120)  # for the first pass of the other device

        alone = probabilities(await batcher.result(batcher.put(asked(rows=24, samples=1), 30)))
        hooks = [network_of(worker.engine).register_forward_pre_hook(pause) for worker in batcher.workers]
        try:
            many = [batcher.put(asked(rows=24, samples=4, seed=seed), 60) for seed in range(6)]
            answers = [await batcher.result(tickets) for tickets in many]
        finally:
            for hook in hooks:
                hook.remove()
        assert [len(probabilities(answer)) for answer in answers] == [24] * 6
        again = probabilities(await batcher.result(batcher.put(asked(rows=24, samples=1), 30)))
        assert np.allclose(again, alone, rtol=1e-4, atol=1e-6)
        assert (batcher.work, batcher.rows, batcher.depth, batcher.running) == (0, 0, 0, [])

    with_batcher(body, model)
    assert len(seen) == 2


def test_a_device_that_breaks_leaves_the_others_at_work(model: Model) -> None:
    async def body() -> None:
        broken, whole = Engine(model, (1,)), Engine(model, (1,))
        broken.launch = _broken  # type: ignore[method-assign]
        batcher = Batcher([(broken, Turn()), (whole, Turn())], max_work=64, max_queue=1000)
        while not all(worker.asleep for worker in batcher.workers):
            await asyncio.sleep(0.01)  # the first of those that sleep is woken
        failed = 0
        for _ in range(8):
            try:
                assert len(probabilities(await batcher.result(batcher.put(asked(), 30)))) == 1
            except Gone:
                failed += 1
        assert failed == 1  # what the broken device had taken
        assert not batcher.alive(60)  # /healthz says so
        assert not batcher.dead
        assert batcher.work == 0
        await batcher.close()

    asyncio.run(body())


def _broken(requests: object) -> None:
    raise KeyboardInterrupt  # no error of a request: the thread ends


def test_devices_are_of_one_kind_and_there() -> None:
    assert devices_of(["cpu", "cpu"], "devices") == ["cpu", "cpu"]
    with pytest.raises(InputError, match=re.escape("devices names 'cuda:77'; expected cpu, auto, all or GPUs")):
        devices_of(["cpu", "cuda:77"], "devices")


def test_a_server_with_two_devices_answers_as_one_with_one(serve: Serve, convolved_digits: Path) -> None:
    asking = {"inputs": DIGITS[:3].tolist(), "samples": 8, "seed": 3}
    answers = []
    for devices in ([], ["--devices", "cpu,cpu"]):
        server = serve(convolved_digits, *devices, "--set", "plan_seconds=0", "--set", "buckets=[1,4]")
        answers.append(httpx.post(f"{server.url}/v1/models/digits/predict", json=asking).json()["predictions"])
        text = httpx.get(f"{server.url}/metrics").text
        proven = [line for line in text.splitlines() if line.startswith("dubito_device_proven{")]
        assert len(proven) == 1
        assert server.stop() == 0
    assert answers[0] == answers[1]


def test_models_are_placed_on_some_of_the_devices(small_digits: Path) -> None:
    async def body(placement: dict[str, tuple[str, ...]]) -> list[int]:
        names = ("one", "other")
        settings = Settings(models=(small_digits,), placement=placement, buckets=(1,), plan_seconds=0)
        devices = [Device(name, torch.device("cpu"), torch.float32, Budget(None)) for name in names]
        repository = Repository(settings, devices, Metrics())
        await repository.load("digits")
        workers = repository.get("digits").batcher.workers
        shares = [len(device.budget.shares) for device in devices]
        assert len(workers) == sum(shares)
        await repository.unload("digits")
        assert [len(device.budget.shares) for device in devices] == [0, 0]
        return shares

    assert asyncio.run(body({})) == [1, 1]
    assert asyncio.run(body({"digits": ("other",)})) == [0, 1]
    assert asyncio.run(body({"another": ("other",)})) == [1, 1]
    with pytest.raises(InputError, match="placement of digits is cuda:0; expected some of the devices one, other"):
        asyncio.run(body({"digits": ("cuda:0",)}))
