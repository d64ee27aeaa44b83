"""The repository itself: what it gives back when a model is unloaded or switched."""

import asyncio
import gc
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.models.embedded import embedded
from dubito.models.errors import InputError
from dubito.service.engine import Ask
from dubito.service.metrics import Metrics
from dubito.service.problems import Late
from dubito.service.repository import Repository, Served
from dubito.service.settings import Settings


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
def test_what_is_unloaded_or_switched_is_gone_at_once(tmp_path: Path, mode: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    shutil.copy(embedded(), tmp_path / "m" / "1" / "model.safetensors")

    async def asked(served: Served) -> None:
        """Two of whom get no answer: what they raise knows where it was raised."""
        x = np.zeros((3, 1, 8, 8), np.float32)
        await served.batcher.answered(served.batcher.put(Ask(x, 20, None, 20, 0.05), 30))
        with pytest.raises(InputError):
            await served.batcher.answered(served.batcher.put(Ask(np.nan + x, 20, None, 20, 0.05), 30))
        with pytest.raises(Late):
            await served.batcher.answered(served.batcher.put(Ask(x, 20, None, 20, 0.05), 0))

    def parts(served: Served) -> list[weakref.ref[object]]:
        return [weakref.ref(part) for part in (served.engine, served.model.network, served.batcher)]

    async def body() -> None:
        given = {"sample_mode": mode, "bank_samples": 20, "buckets": (1, 4), "plan_seconds": 0.1}
        settings = Settings.model_validate({"models": [tmp_path], **given})
        repository = Repository(settings, torch.device("cpu"), torch.float32, Metrics())
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


def test_a_stuck_device_does_not_keep_who_unloads(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        settings = Settings.model_validate(
            {"models": [embedded()], "buckets": (1,), "plan_seconds": 0, "stuck_seconds": 0.1}
        )
        repository = Repository(settings, torch.device("cpu"), torch.float32, Metrics())
        (name,) = {name for name, _ in repository.sources}
        await repository.load(name)
        repository.turn.acquire()  # somebody who never comes back
        async with asyncio.timeout(30):
            await repository.unload(name)
        assert not repository.served

    asyncio.run(body())
    assert "the device is stuck" in caplog.text
