"""The repository itself: what it gives back when a model is unloaded or switched."""

import asyncio
import gc
import logging
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from dubito.models.embedded import embedded
from dubito.models.errors import InputError, NumericsError
from dubito.models.numerics.proof import name_of
from dubito.service.engine.engine import PredictRequest
from dubito.service.problems import Late
from dubito.service.repository import Repository, ServedModel
from dubito.service.settings import Settings
from dubito.service.web.state import State
from tests.faulty import Faulty, Told, need
from tests.service.conftest import repository_on
from tests.service.test_batcher import network_of


@contextmanager
def nothing_collected() -> Iterator[None]:
    """As for what is there when the server has started: it is frozen, and circles among it are never looked for."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["fresh", "bank"])
def test_what_is_unloaded_or_switched_is_gone_at_once(tmp_path: Path, mode: str, convolved_digits: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    shutil.copy(convolved_digits, tmp_path / "m" / "1" / "model.safetensors")

    async def asked(served: ServedModel) -> None:
        """Two of whom get no answer: what they raise knows where it was raised."""
        x = np.zeros((3, 1, 8, 8), np.float32)
        await served.batcher.result(served.batcher.put(PredictRequest(x, 20, None, 20, 0.05), 30))
        with pytest.raises(InputError):
            await served.batcher.result(served.batcher.put(PredictRequest(np.nan + x, 20, None, 20, 0.05), 30))
        with pytest.raises(Late):
            await served.batcher.result(served.batcher.put(PredictRequest(x, 20, None, 20, 0.05), 0))

    def parts(served: ServedModel) -> list[weakref.ref[object]]:
        return [weakref.ref(part) for part in (served.engines[0], served.model.network, served.batcher)]

    async def body() -> None:
        given = {"sample_mode": mode, "bank_samples": 20, "buckets": (1, 4), "plan_seconds": 0.1}
        settings = Settings.model_validate({"models": [tmp_path], **given})
        repository = repository_on(torch.device("cpu"), torch.float32, settings)
        with nothing_collected():
            await repository.load("m")
            await asked(repository.get("m"))
            first = parts(repository.get("m"))
            shutil.copytree(tmp_path / "m" / "1", tmp_path / "m" / "2")
            await repository.load("m")
            assert [part() for part in first] == [None] * 3
            await asked(repository.get("m"))
            second = parts(repository.get("m"))
            assert None not in [part() for part in second]
            await repository.unload("m")
            assert [part() for part in second] == [None] * 3

    asyncio.run(body())


def test_a_change_goes_on_where_who_asked_for_it_goes_away(small_digits: Path) -> None:
    """As a gRPC client that cancels: half of a change would hold memory for good, and leave workers unlike."""
    settings = Settings.model_validate({"models": [small_digits], "buckets": (1,), "plan_seconds": 0, "device": "cpu"})

    async def cancelled(state: State, do: Literal["load", "unload"]) -> None:
        asked = asyncio.create_task(state.change(do, "digits"))
        while not state.changes:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait([*state.changes])

    async def body() -> None:
        state = State(settings)
        await state.start()
        repository = state.repository
        assert repository is not None
        (budget,) = {device.budget for device in repository.devices_of("digits")}
        held = budget.held("resident")
        await cancelled(state, "unload")
        assert (repository.served, budget.shares) == ({}, [])
        await cancelled(state, "load")
        assert [*repository.served] == ["digits"]
        assert budget.held("resident") == held
        await state.stop(1.0)

    asyncio.run(body())


def test_a_model_that_is_stuck_while_it_is_unloaded_shows(small_digits: Path) -> None:
    """Who asks whether the server is alive is to start it anew: nothing else on its device is answered."""
    stuck, free = 0.2, threading.Event()

    def wait(*_: object) -> None:
        assert free.wait(60)

    async def body() -> None:
        given = {"models": [small_digits], "buckets": (1,), "plan_seconds": 0, "stuck_seconds": stuck}
        repository = repository_on(torch.device("cpu"), torch.float32, Settings.model_validate(given))
        await repository.load("digits")
        served = repository.get("digits")
        network_of(served.engines[0]).register_forward_pre_hook(wait)
        tickets = served.batcher.put(PredictRequest(np.zeros((1, 1, 8, 8), np.float32), 4, None, 4, 0.05), 60)
        while not served.batcher.running:
            await asyncio.sleep(0.01)
        unloading = asyncio.create_task(repository.unload("digits"))
        await asyncio.sleep(2 * stuck)
        assert not repository.served
        assert not repository.alive
        free.set()
        assert (await served.batcher.result(tickets)).samples == 4
        await unloading
        assert repository.alive

    asyncio.run(body())


def test_a_stuck_device_does_not_keep_who_unloads(caplog: pytest.LogCaptureFixture, small_digits: Path) -> None:
    async def body() -> None:
        settings = Settings.model_validate(
            {"models": [small_digits], "buckets": (1,), "plan_seconds": 0, "stuck_seconds": 0.1}
        )
        repository = repository_on(torch.device("cpu"), torch.float32, settings)
        (name,) = {name for name, _ in repository.sources}
        await repository.load(name)
        repository.devices[0].turn.acquire()  # somebody who never comes back
        async with asyncio.timeout(30):
            await repository.unload(name)
        assert not repository.served

    asyncio.run(body())
    assert "the device is stuck" in caplog.text


def loads_on(faulty: Faulty, dtype: torch.dtype) -> Repository:
    """The embedded model, loaded by a thread whose device is faulty."""
    settings = Settings.model_validate({"models": [embedded("digits")], "buckets": (1, 2), "plan_seconds": 0})
    repository = repository_on(torch.device("cpu"), dtype, settings)

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, initializer=faulty.__enter__))
        try:
            await repository.load("digits")
        finally:
            await repository.close()

    asyncio.run(body())
    return repository


def of_the_model(told: Told) -> bool:
    """A fault that the probe does not know: the embedded model has such a convolution."""
    return bool(told["weight"].shape[1] == 1 and told["weight"].shape[-1] == 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_a_device_gets_wrong_is_served_in_float32(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    need(dtype)
    faulty = Faulty(of_the_model, dtype)
    with caplog.at_level(logging.INFO, "dubito"):
        repository = loads_on(faulty, dtype)
    assert faulty.met
    assert repository.get("digits").model.factors.dtype == torch.float32
    assert len(repository.devices[0].budget.shares) == 1
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == "model runs in float32"
    told = vars(line)
    assert (told["model"], told["asked"]) == ("digits", name_of(dtype))
    assert told["why"].startswith("this cpu computes the network wrongly: conv2d of ")


def test_a_model_that_is_wrong_in_float32_is_not_served() -> None:
    with pytest.raises(NumericsError, match=r"this cpu computes the network wrongly: conv2d of .* in float32"):
        loads_on(Faulty(of_the_model, torch.float32), torch.float32)
