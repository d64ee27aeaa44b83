"""A server of remote artifacts and repositories: versions are looked up on demand, and a store that fails changes
nothing of what is served."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import forked, stores
from tests.hub import hub

Fixture = Any  # the types of conftest.py
Make = Callable[..., Path]
pytestmark = stores.OPEN
QUICK = ("--set", "buckets=4", "--set", "plan_seconds=0")
ASK = {"inputs": [[1, 2, 3, 4]], "seed": 0, "samples": 4}


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[int, Any]]:
    """The port of an S3 with `bucket`, and a file system on it."""
    with stores.s3() as port:
        yield port, stores.file_system("s3", port)


def rows(url: str) -> dict[tuple[str, str], tuple[str, str]]:
    found = httpx.post(f"{url}/v2/repository/index").json()
    return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in found}


def rows_in_time(url: str, name: str, version: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The index once it has looked again, which it does every two seconds at most."""
    end = time.monotonic() + 60
    while (name, version) not in (index := rows(url)) and time.monotonic() < end:
        time.sleep(0.1)
    return index


def load(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v2/repository/models/{name}/load", timeout=60)


def ask(url: str, name: str) -> Any:
    return httpx.post(f"{url}/v1/models/{name}/predict", json=ASK, timeout=60).json()


def test_a_repository_in_a_bucket_is_looked_up_on_demand(
    serve: Fixture, make_artifact: Make, bucket: tuple[int, Any], tmp_path: Path
) -> None:
    """A new version answers once it is asked for; a broken one does not; a store that fails leaves all as it is."""
    port, fs = bucket
    one, two = (make_artifact(tmp_path / f"{seed}.safetensors", seed=seed) for seed in (1, 2))
    fs.put_file(str(one), "bucket/models/tab/1/model.safetensors")
    fs.pipe_file("bucket/models/tab/notes.txt", b"no model")
    fs.put_file(str(one), "bucket/models/my model/1/model.safetensors")
    moto = f"http://{stores.HOST}:{port}/moto-api/reset-auth"  # number of requests before keys are checked
    known = stores.s3_environment(port) | {"DUBITO_CACHE": str(tmp_path / "cache")}
    try:
        server = serve("s3://bucket/models/", *QUICK, **known)
        index = rows(server.url)
        assert index["tab", "1"] == ("READY", "")
        assert "is no name for a model" in index["my model", "1"][1]
        local = serve(one, *QUICK)
        first = ask(server.url, "tab")
        assert first["version"] == "1"
        assert first["predictions"] == ask(local.url, "1")["predictions"]

        fs.put_file(str(two), "bucket/models/tab/2/model.safetensors")
        assert ("tab", "2") in rows_in_time(server.url, "tab", "2")
        assert rows(server.url)["tab", "2"] == ("UNAVAILABLE", "")
        assert ask(server.url, "tab")["version"] == "1"
        assert load(server.url, "tab").status_code == 200
        second = ask(server.url, "tab")
        assert second["version"] == "2"
        assert second["predictions"] != first["predictions"]

        fs.pipe_file("bucket/models/tab/3/model.safetensors", two.read_bytes()[:-1])
        reply = load(server.url, "tab")
        assert reply.status_code == 400
        assert "tab/3/model.safetensors" in reply.json()["error"]
        assert "bucket" not in reply.json()["error"]  # where models lie is not for clients
        assert ask(server.url, "tab")["version"] == "2"

        httpx.post(moto, content=b"0")  # the store denies everything
        reply = load(server.url, "tab")
        assert (reply.status_code, "does not answer" in reply.json()["error"]) == (503, True)
        assert ask(server.url, "tab")["version"] == "2"
        assert rows(server.url)["tab", "2"] == ("READY", "")
    finally:
        httpx.post(moto, content=b"inf")
    logged = server.logged("cannot serve a path")
    assert any("s3://bucket/models/" in str(line.get("error")) for line in logged)
    assert "never-shown" not in server.log.read_text()


def test_servers_share_a_cache(serve: Fixture, make_artifact: Make, bucket: tuple[int, Any], tmp_path: Path) -> None:
    port, fs = bucket
    fs.put_file(str(make_artifact(tmp_path / "a.safetensors")), "bucket/a.safetensors")
    with stores.relay(port, 1 << 40) as relay:
        known = stores.s3_environment(relay.port) | {"DUBITO_CACHE": str(tmp_path / "cache")}
        first = serve("s3://bucket/a.safetensors", *QUICK, **known)
        passed = relay.total
        second = serve("s3://bucket/a.safetensors", *QUICK, **known)
        assert relay.total - passed < (tmp_path / "a.safetensors").stat().st_size
        assert ask(first.url, "a")["predictions"] == ask(second.url, "a")["predictions"]
    assert len(list((tmp_path / "cache" / "files").iterdir())) == 1


def test_a_model_of_the_hub_is_named_after_its_repository(serve: Fixture, tmp_path: Path, small_digits: Path) -> None:
    with hub() as state:
        state.repositories["owner/handwriting"] = {"model.safetensors": small_digits.read_bytes()}
        known = state.environment() | {"DUBITO_CACHE": str(tmp_path / "cache")}
        server = serve("hf://owner/handwriting", *QUICK, **known)
        body = {"inputs": np.zeros((1, 1, 8, 8)).tolist(), "seed": 0}
        reply = httpx.post(f"{server.url}/v1/models/handwriting/predict", json=body, timeout=60)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://nowhere/models", "there is no bucket nowhere; expected one"),
        ("s3://bucket/empty/", "holds no model: expected NAME/VERSION/model.safetensors"),
        ("s3://bucket/none.safetensors", "there is no such file; expected none.safetensors in bucket"),
        ("http://bucket/a.safetensors", "http:// came; expected a path, or an address"),
    ],
)
def test_a_server_does_not_start_without_its_models(
    bucket: tuple[int, Any], tmp_path: Path, address: str, said: str
) -> None:
    known = stores.s3_environment(bucket[0]) | {"DUBITO_CACHE": str(tmp_path)}
    ended = forked.run("serve", address, "--port", "0", environment=known)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert "Traceback" not in ended.stderr
