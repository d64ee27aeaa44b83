"""Many at once: each caller gets its own rows, whoever goes away, whatever version is switched to, until the end."""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from dubito.models import load, save
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Input
from dubito.models.numerics.parameters import count
from dubito.models.predictions.answers import answers
from dubito.models.predictions.model import Model
from tests.small_models import bayesian_mlp

Fixture = Any  # the types of conftest.py
CLIENTS = 120


def close(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Numbers to 1e-5, everything else exactly."""
    for key, value in mine.items():
        if isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float)):
            if not np.allclose(value, theirs[key], rtol=0, atol=1e-5):
                return False
        elif key == "ood" and value is not None:
            if value["flag"] != theirs[key]["flag"] or abs(value["score"] - theirs[key]["score"]) > 1e-5:
                return False
        elif value != theirs[key]:
            return False
    return True


def check(model: Model, inputs: list[Any], samples: object, reply: dict[str, Any]) -> None:
    """The reply names its seed, which gives the same draws here."""
    found = model.predict(torch.tensor(inputs), samples, reply["seed"])  # type: ignore[arg-type]
    expected = answers(found, model.card)
    assert len(reply["predictions"]) == len(inputs)
    for mine, theirs in zip(expected, reply["predictions"], strict=True):
        assert close(mine, theirs)


async def vanish(url: str, name: str, body: bytes, after: float) -> None:
    """Sends a request, and is gone before its answer."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/models/{name}/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await asyncio.sleep(after)
    writer.transport.abort()


@pytest.fixture(scope="module")
def small(make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers in a millisecond, so that what is between the requests shows."""
    return make_artifact(tmp_path_factory.mktemp("small") / "m.safetensors", seed=1)


def test_120_clients_a_third_of_which_vanish(serve: Fixture, small: Path) -> None:
    server = serve(small)
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [{"samples": K} for K in (20, 3, 0, 33, "auto")] + [{"seed": 5}]
    bodies = []
    for i in range(CLIENTS):
        inputs = rng.normal(size=(1 + i % 4, 4)).astype(np.float32).tolist()
        bodies.append({"inputs": inputs, **kinds[i % len(kinds)]})

    async def all_at_once() -> list[httpx.Response | None]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def one(i: int) -> httpx.Response | None:
                if i % 3 == 0:
                    await vanish(server.url, "m", json.dumps(bodies[i]).encode(), 0.002 * (i % 20))
                    return None
                return await client.post("/v1/models/m/predict", json=bodies[i])

            return await asyncio.gather(*(one(i) for i in range(CLIENTS)))

    model = load(small)
    for body, reply in zip(bodies, asyncio.run(all_at_once()), strict=True):
        if reply is not None:
            assert reply.status_code == 200, reply.text
            check(model, body["inputs"], body.get("samples", 20), reply.json())


@pytest.fixture
def repository(tmp_path: Path, make_artifact: Callable[..., Path]) -> Path:
    make_artifact(tmp_path / "root" / "m" / "1" / "model.safetensors", seed=1)
    return tmp_path / "root"


def test_a_switch_of_versions_loses_none_and_mixes_none(
    repository: Path, serve: Fixture, make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    server = serve(repository)
    versions = {"1": load(repository / "m/1/model.safetensors")}
    inputs = [[0.3, -1.0, 2.0, 0.7], [1.3, 0.0, -2.0, 0.1], [9.0, 4.0, 2.0, 1.0]]

    async def under_load() -> list[httpx.Response]:
        replies: list[httpx.Response] = []
        done = False
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def caller(kind: dict[str, Any]) -> None:
                while not done:
                    replies.append(await client.post("/v1/models/m/predict", json={"inputs": inputs, **kind}))

            async def answered_by(version: str) -> None:
                async with asyncio.timeout(60):
                    while version not in {reply.json().get("version") for reply in replies[-8:]}:
                        await asyncio.sleep(0.01)

            callers = [asyncio.create_task(caller(kind)) for kind in ({}, {"samples": 7}, {"seed": 3}, {"samples": 64})]
            await answered_by("1")
            for version in ("2", "3", "4"):
                made = await asyncio.to_thread(make_artifact, tmp_path / "new.safetensors", seed=int(version))
                versions[version] = load(made)
                place = repository / "m" / version
                place.mkdir()
                shutil.copy(made, place / "half-written")
                (place / "half-written").rename(place / "model.safetensors")
                assert (await client.post("/v2/repository/models/m/load")).status_code == 200
                await answered_by(version)
            done = True
            await asyncio.gather(*callers)
        return replies

    replies = asyncio.run(under_load())
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["version"] for reply in replies} == {"1", "2", "3", "4"}
    for reply in replies[:: max(1, len(replies) // 100)]:  # versions differ in every row, so a mixture would show
        told = reply.json()
        samples = json.loads(reply.request.content).get("samples", 20)
        check(versions[told["version"]], inputs, samples, told)
    rows = httpx.post(f"{server.url}/v2/repository/index").json()
    assert [(row["version"], row["state"]) for row in rows] == [
        *((v, "UNAVAILABLE") for v in ("1", "2", "3")),
        ("4", "READY"),
    ]


def test_a_version_that_cannot_be_loaded_leaves_the_old_one(
    repository: Path, serve: Fixture, make_artifact: Callable[..., Path]
) -> None:
    server = serve(repository)
    bad = make_artifact(repository / "m" / "2" / "model.safetensors", seed=2)
    bad.write_bytes(bad.read_bytes()[:-7])
    found = httpx.post(f"{server.url}/v2/repository/models/m/load")
    assert found.status_code == 400
    assert str(repository) not in found.text
    reply = httpx.post(f"{server.url}/v1/models/m/predict", json={"inputs": [[1, 2, 3, 4]]})
    assert reply.json()["version"] == "1"
    (row,) = [r for r in httpx.post(f"{server.url}/v2/repository/index").json() if r["version"] == "2"]
    assert (row["state"], bool(row["reason"])) == ("UNAVAILABLE", True)
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_an_artifact_written_anew_is_loaded_anew(
    tmp_path: Path, serve: Fixture, make_artifact: Callable[..., Path]
) -> None:
    path = make_artifact(tmp_path / "m.safetensors", seed=1)
    server = serve(path)
    before = httpx.get(f"{server.url}/v1/models/m").json()["sha256"]
    make_artifact(path, seed=2)
    assert httpx.post(f"{server.url}/v2/repository/models/m/load").status_code == 200
    assert httpx.get(f"{server.url}/v1/models/m").json()["sha256"] != before


def test_sigterm_under_load_loses_no_accepted_request(serve: Fixture) -> None:
    """What the server's log has as received, its client has as answered; readiness goes first, and it exits with 0."""
    server = serve(embedded("digits"), "--set", "linger_seconds=0.5")
    body = {"inputs": np.zeros((2, 1, 8, 8)).tolist(), "samples": 20}

    async def until_the_end() -> tuple[set[str], set[int], bool]:
        answered: set[str] = set()
        statuses: set[int] = set()
        unready = False
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def caller(i: int) -> None:
                n = 0
                while True:
                    n += 1
                    try:
                        reply = await client.post(
                            "/v1/models/digits/predict", json=body, headers={"X-Request-ID": f"{i}-{n}"}
                        )
                    except httpx.TransportError:  # the port is closed
                        return
                    statuses.add(reply.status_code)
                    answered.add(reply.headers["x-request-id"])

            callers = [asyncio.create_task(caller(i)) for i in range(16)]
            async with asyncio.timeout(120):
                while len(answered) < 16:
                    await asyncio.sleep(0.01)
            server.send(signal.SIGTERM)
            while not all(task.done() for task in callers):
                try:
                    unready |= (await client.get("/readyz")).status_code == 503
                except httpx.TransportError:
                    break
                await asyncio.sleep(0.01)
            await asyncio.gather(*callers)
        return answered, statuses, unready

    answered, statuses, unready = asyncio.run(until_the_end())
    assert server.wait() == 0
    assert statuses == {200}
    assert unready
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    received = {line["request"] for line in lines if line["message"] == "request" and line["path"].startswith("/v1")}
    assert received
    assert received <= answered


def test_ctrl_c_and_no_orphans(serve: Fixture, small: Path) -> None:
    server = serve(small)
    children = psutil.Process(server.pid).children(recursive=True)
    assert server.stop(signal.SIGINT) == 0
    assert not any(child.is_running() for child in children)


def test_loading_and_unloading_leaves_memory_as_it_was(tmp_path: Path, serve: Fixture, small_digits: Path) -> None:
    """Twelve times, beside a model that stays. One that is large, so that what is kept of it shows.

    With every model kept, memory reaches a new height by a model's 10 MB each time. Without, it goes up and down by as
    much, and the height grows by 3 MB in all after the third time on a quiet machine, on a busy one once or twice by
    45 MB that the allocator then keeps.
    """
    for name in ("stays", "comes"):
        (tmp_path / name / "1").mkdir(parents=True)
    shutil.copy(small_digits, tmp_path / "stays" / "1" / "model.safetensors")
    network = bayesian_mlp((64, 1500, 1500, 10), "deterministic")
    save(network, tmp_path / "comes" / "1" / "model.safetensors", card=Card(input=Input(shape=(64,))))
    size = 4 * count(network)
    server = serve(tmp_path, "--set", "buckets=1,16")
    process = psutil.Process(server.pid)
    inputs = np.zeros((16, 64)).tolist()
    seen: list[int] = []
    threads: list[int] = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(12):
            assert client.post("/v2/repository/models/comes/unload").status_code == 200
            assert client.post("/v1/models/comes/predict", json={"inputs": inputs}).status_code == 404
            assert client.post("/v2/repository/models/comes/load").status_code == 200
            assert client.post("/v1/models/comes/predict", json={"inputs": inputs}).status_code == 200
            seen.append(process.memory_info().rss)
            threads.append(process.num_threads())
    grown = sum(b - a > size / 2 for a, b in pairwise(accumulate(seen[2:], max)))
    assert grown <= 3, " ".join(str(round(rss / 1e6)) for rss in seen)
    assert threads[-1] <= threads[2] + 2, threads  # each inference loop has ended with its model


def test_ready_only_with_every_expected_model(serve: Fixture, small: Path) -> None:
    server = serve(small)
    assert httpx.get(f"{server.url}/readyz").json() == {"ready": True, "missing": []}
    assert httpx.post(f"{server.url}/v2/repository/models/m/unload").status_code == 200
    assert httpx.get(f"{server.url}/readyz").status_code == 503  # a server without models is not ready
    assert httpx.get(f"{server.url}/v2/health/ready").json() == {"ready": False, "live": True}
    assert httpx.post(f"{server.url}/v2/repository/models/m/load", timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/v1/models/m/predict", json={"inputs": [[0.0] * 4]}).is_success


@pytest.mark.soak
def test_soak(serve: Fixture) -> None:
    """Ten minutes of everything at once, mistakes included: memory stays where it was after the first minute."""
    server = serve(embedded("digits"), "--set", "log_level=warning")
    process = psutil.Process(server.pid)
    seen: list[int] = []

    async def soak() -> None:
        began = time.monotonic()
        bodies: list[dict[str, Any]] = [
            {"inputs": np.zeros((rows, 1, 8, 8)).tolist(), "samples": samples}
            for rows in (1, 3, 17)
            for samples in (0, 5, 20, "auto")
        ]
        bodies += [{"inputs": "wrong"}, {"inputs": [[1.0]]}, {}]

        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def caller(i: int) -> None:
                n = i
                while time.monotonic() - began < 600:
                    n += 1
                    body = bodies[n % len(bodies)]
                    if n % 7 == 0:
                        await vanish(server.url, "digits", json.dumps(body).encode(), 0.003)
                        continue
                    name = "digits" if n % 11 else f"junk-{n}"
                    reply = await client.post(f"/v1/models/{name}/predict", json=body)
                    assert reply.status_code in (200, 400, 404, 429)

            async def watch() -> None:
                while time.monotonic() - began < 600:
                    await asyncio.sleep(5)
                    seen.append(process.memory_info().rss)

            await asyncio.gather(watch(), *(caller(i) for i in range(8)))

    asyncio.run(soak())
    early, late = sorted(seen[12:24])[6], sorted(seen[-12:])[6]
    assert late <= 1.05 * early, [round(rss / 1e6) for rss in seen]
    assert server.stop() == 0
