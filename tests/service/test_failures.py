"""What goes wrong in a forward pass stays with the request that brought it; a dead loop shows."""

import concurrent.futures
import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

Fixture = Any  # the types of conftest.py


def _codes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fragile_codes", Path(__file__).with_name("fragile.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


codes = _codes()


@pytest.fixture(scope="module")
def server(serve: Fixture, fragile: tuple[Path, dict[str, str]]) -> Fixture:
    path, environment = fragile
    return serve(path, **environment)


def ask(url: str, code: float, rows: int = 1, **more: object) -> httpx.Response:
    inputs = [[code, 0.1 * i, 0.0, 1.0] for i in range(rows)]
    body = {"inputs": inputs, **more}
    return httpx.post(f"{url}/v1/models/fragile/predict", json=body, timeout=60)


@pytest.mark.parametrize("code", [codes.FAILS, codes.NO_MEMORY])
def test_only_the_request_that_fails_fails(server: Fixture, code: float) -> None:
    """Slow requests hold the device, so that the others meet in one batch; the bad ones among them fail alone."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        first = pool.submit(ask, server.url, codes.SLOW)
        time.sleep(0.05)
        good = [pool.submit(ask, server.url, 0.0) for _ in range(8)]
        bad = [pool.submit(ask, server.url, code) for _ in range(2)]
        assert first.result().status_code == 200
        assert [reply.result().status_code for reply in good] == [200] * 8
        for reply in bad:
            assert reply.result().status_code == 500
            assert reply.result().headers["content-type"] == "application/problem+json"
            assert "secret" not in reply.result().text
            assert "/some/path" not in reply.result().text
    assert ask(server.url, 0.0).status_code == 200
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    if code == codes.FAILS:
        assert server.logged("a secret in /some/path")  # where the operator looks


def test_out_of_memory_is_halved_and_tried_again(server: Fixture) -> None:
    """Passes of more than four rows do not fit; K = 20 draws of one row do, four at a time, to the same answer."""
    found = ask(server.url, codes.LITTLE_MEMORY, samples=20, seed=1)
    assert found.status_code == 200
    assert found.json()["samples"] == 20


def test_deadline_covers_queue_and_compute(server: Fixture) -> None:
    assert ask(server.url, codes.SLOW, timeout_ms=50).status_code == 504  # while computing
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow, behind = pool.submit(ask, server.url, codes.SLOW), set[int]()
        while not slow.done():  # whoever comes while it computes waits in the queue
            behind.add(ask(server.url, 0.0, timeout_ms=20).status_code)
        assert behind & {504, 429}  # refused at once, where others wait already
        assert slow.result().status_code == 200


def test_so_many_at_once_and_no_more(serve: Fixture, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, "--set", "max_requests=2", **environment)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = [reply.result() for reply in [pool.submit(ask, server.url, codes.SLOW) for _ in range(8)]]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert refused[0].headers["retry-after"] == "1"
    assert {reply.status_code for reply in replies} == {200, 429}
    assert ask(server.url, 0.0).status_code == 200


def test_a_dead_loop_turns_liveness_off(serve: Fixture, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, **environment)
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert ask(server.url, codes.DIES).status_code == 503
    until = time.monotonic() + 30
    while time.monotonic() < until and httpx.get(f"{server.url}/healthz").status_code == 200:
        time.sleep(0.02)
    assert httpx.get(f"{server.url}/healthz").status_code == 503
    assert httpx.get(f"{server.url}/readyz").status_code == 503
    assert httpx.get(f"{server.url}/v2/health/live").json() == {"live": False}
    assert ask(server.url, 0.0).status_code == 503  # and nobody waits for an answer that cannot come
    assert server.stop() == 0


def test_a_stuck_batch_turns_liveness_off(serve: Fixture, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, "--set", "stuck_seconds=0.05", **environment)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url) as client:
        slow, seen = pool.submit(ask, server.url, codes.SLOW), set[int]()
        while not slow.done():
            seen.add(client.get("/healthz").status_code)
        assert 503 in seen
        assert slow.result().status_code == 200
    assert httpx.get(f"{server.url}/healthz").status_code == 200
