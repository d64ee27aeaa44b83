"""Keys, rates, limits; and nothing of the machine in any reply."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from dubito.models.errors import ArtifactError
from dubito.service.rates import OwnRates
from dubito.service.settings import Settings
from dubito.service.sources import find
from dubito.service.web.security import Guard, hash_key
from tests import forked

Fixture = Any  # the types of conftest.py
ZEROS = {"inputs": [[[0.0] * 8] * 8]}


@pytest.fixture(scope="module")
def guarded(serve: Fixture, small_digits: Path) -> Fixture:
    keys = json.dumps({"alice": hash_key("secret of alice"), "bob": hash_key("secret of bob")})
    return serve(small_digits, "--set", "rate_per_second=0.001", "--set", "burst=8", DUBITO_API_KEYS=keys)


def test_keys_are_asked_for(guarded: Fixture) -> None:
    path = f"{guarded.url}/v1/models/digits/predict"
    wrong: list[dict[str, str]] = [{}, {"X-API-Key": "wrong"}, {"Authorization": "Basic xyz"}]
    for headers in (*wrong, {"X-API-Key": hash_key("secret of bob")}):
        reply = httpx.post(path, json=ZEROS, headers=headers)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert reply.headers["content-type"] == "application/problem+json"
    for path in ("/v1/models", "/v2", "/v2/models/digits", "/metrics", "/nothing"):
        assert httpx.get(guarded.url + path).status_code == 401
    assert httpx.post(f"{guarded.url}/v2/repository/models/digits/unload").json().keys() == {"error"}
    for path in ("/healthz", "/readyz", "/v2/health/live", "/", "/docs", "/openapi.json"):
        assert httpx.get(guarded.url + path).status_code == 200
    assert httpx.get(f"{guarded.url}/openapi.json").json()["security"]


def test_each_key_has_its_own_rate(guarded: Fixture) -> None:
    """Bob's eight are used up; Alice's are not."""
    bob, alice = {"X-API-Key": "secret of bob"}, {"Authorization": "Bearer secret of alice"}
    statuses = [httpx.get(f"{guarded.url}/v1/models", headers=bob).status_code for _ in range(10)]
    assert statuses == [200] * 8 + [429] * 2
    refused = httpx.get(f"{guarded.url}/v1/models", headers=bob)
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.post(f"{guarded.url}/v1/models/digits/predict", json=ZEROS, headers=alice).status_code == 200


def test_rates_come_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rates = OwnRates()
    guard = Guard(Settings(rate_per_second=2.0, burst=2), rates)

    def admitted(address: str = "a") -> bool:
        try:
            guard.admit("/v1/models", {}, address)
        except Exception:
            return False
        return True

    assert [admitted() for _ in range(3)] == [True, True, False]
    now[0] += 0.49
    assert not admitted()
    now[0] += 0.02  # half a second: one more
    assert [admitted(), admitted()] == [True, False]
    assert admitted("b")
    network = [admitted(f"2001:db8:0:1::{i:x}") for i in range(3)]  # whose owner has all of its addresses
    assert network == [True, True, False]
    assert admitted("2001:db8:0:2::1")
    assert admitted("no:address")
    for i in range(20_000):  # addresses that come once do not pile up
        admitted(str(i))
    assert len(rates.buckets) <= 10_000


def test_a_key_is_made_and_only_its_hash_is_kept() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "dubito", "key", "carol"], capture_output=True, text=True, check=True
    )
    found = re.fullmatch(r'.*now\): (\S+)\nsetting: api_keys = \{ "carol" = "([0-9a-f]{64})" \}\n', answer.stdout)
    assert found is not None
    assert hashlib.sha256(found[1].encode()).hexdigest() == found[2]


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/v1/models", "/v1/models/nope", "/v2/models/nope", "/nothing/here", "/console/../settings.py"],
)
def test_every_reply_is_guarded_by_headers(live: Fixture, path: str) -> None:
    headers = httpx.get(live.url + path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "server" not in headers


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../..",
        "%2e%2e%2f%2e%2e",
        "..%2F..%2Fetc%2Fpasswd",
        "digits%00",
        "/etc/passwd",
        "a" * 5000,
        "%ff%fe",
        "\\",
    ],
)
def test_names_do_not_lead_out(live: Fixture, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/models/{name}"),
        ("POST", f"/v1/models/{name}/predict"),
        ("POST", f"/v2/repository/models/{name}/load"),
        ("GET", f"/console/{name}"),
    ):
        connection = HTTPConnection(live.address)  # which sends a path as it is
        connection.request(method, path, b"{}" if method == "POST" else None)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        assert reply.status == 404
        for known in ("/v1/models", "/v2/repository/index", "/docs"):
            text = text.replace(known, "")
        assert "/" not in text
        assert "passwd" not in text


def test_a_link_out_of_the_repository_is_refused(tmp_path: Path, make_artifact: Callable[..., Path]) -> None:
    outside = make_artifact(tmp_path / "outside.safetensors")
    place = tmp_path / "root" / "m" / "1"
    place.mkdir(parents=True)
    (place / "model.safetensors").symlink_to(outside)
    with pytest.raises(ArtifactError, match="leads out of the repository"):
        find([tmp_path / "root"]).checked()
    inside = make_artifact(tmp_path / "root" / "data" / "x.safetensors")  # links within, as mounted volumes have them
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to(inside)
    assert set(find([tmp_path / "root"]).checked().sources) == {("m", "1")}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root, make: root / "nothing", "there is no"),
        (lambda root, make: root, "holds no model: expected NAME/VERSION/model.safetensors"),
        (lambda root, make: make(root / "a b.safetensors"), "is no name for a model"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, make_artifact: Callable[..., Path], make: Callable[..., Path], said: str
) -> None:
    answer = forked.run("serve", make(tmp_path, make_artifact), "--port", "0")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_broken_artifact_ends_the_server_with_its_reason(tmp_path: Path, make_artifact: Callable[..., Path]) -> None:
    bad = make_artifact(tmp_path / "bad.safetensors")
    bad.write_bytes(bad.read_bytes()[:-3])
    answer = forked.run("serve", bad, "--port", "0")
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in answer.stderr


def test_a_taken_port_is_one_line(live: Fixture) -> None:
    port = live.url.rpartition(":")[2]
    answer = forked.run("serve", "--port", port)
    assert answer.returncode == 2
    assert f"port {port}" in answer.stderr


def test_other_pages_may_ask_only_where_settings_say_so(live: Fixture, serve: Fixture, small_digits: Path) -> None:
    asked = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        reply = httpx.request(method, f"{live.url}/v1/models", headers=asked)
        assert not any(name.startswith("access-control") for name in reply.headers)
    server = serve(small_digits, "--set", "cors_origins=https://good.example")
    assert (
        httpx.options(f"{server.url}/v1/models/digits/predict", headers=asked).headers["access-control-allow-origin"]
        == "https://good.example"
    )
    headers = httpx.get(f"{server.url}/v1/models", headers=asked).headers
    assert {"x-request-id", "inference-header-content-length", "retry-after"} <= {
        name.strip().lower() for name in headers["access-control-expose-headers"].split(",")
    }
    packed = asked | {"Access-Control-Request-Headers": "content-encoding"}
    assert httpx.options(f"{server.url}/v1/models/digits/predict", headers=packed).status_code == 200
    asked["Origin"] = "https://evil.example"
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=asked).headers


def test_what_can_be_got_has_a_head(live: Fixture) -> None:
    for path in ("/healthz", "/readyz", "/v2", "/v1/models", "/v2/models/digits", "/metrics", "/", "/openapi.json"):
        head, whole = (httpx.request(method, live.url + path) for method in ("HEAD", "GET"))
        assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path not in ("/metrics", "/v1/models"):
            assert head.headers["content-length"] == whole.headers["content-length"]
    assert httpx.head(f"{live.url}/v1/models/digits/predict").status_code == 405
    assert httpx.head(f"{live.url}/nothing").status_code == 404


def test_models_change_over_http_only_where_settings_say_so(serve: Fixture, small_digits: Path) -> None:
    server = serve(small_digits, "--set", "repository_api=false")
    for verb in ("load", "unload"):
        reply = httpx.post(f"{server.url}/v2/repository/models/digits/{verb}")
        assert reply.status_code == 503
        assert "repository_api" in reply.json()["error"]
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_what_libraries_say_is_logged_as_json_too(live: Fixture) -> None:
    bad = httpx.post(
        f"{live.url}/v1/models/digits/predict",
        content=b"--b\nno carriage return",
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    assert bad.status_code == 400
    lines = live.logged("boundary")
    assert any("boundary" in line["message"] for line in lines if line["level"] == "warning")


def test_request_ids_come_back(live: Fixture) -> None:
    def id_of(headers: dict[str, str], path: str = "/v1/models") -> str:
        return httpx.get(live.url + path, headers=headers).headers["x-request-id"]

    assert id_of({"X-Request-ID": "order-66"}) == "order-66"
    assert id_of({}) != id_of({})
    assert id_of({"X-Request-ID": "order-67"}, "/nothing") == "order-67"
    assert id_of({"X-Request-ID": "{inject: 'me'}"}) != "{inject: 'me'}"
    lines = live.logged("order-67")
    (line,) = (one for one in lines if one.get("request") == "order-67")
    assert (line["status"], line["path"], line["level"]) == (404, "/nothing", "info")
