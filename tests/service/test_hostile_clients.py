"""Clients that hold connections, read nothing or send half of everything: others are answered meanwhile."""

import asyncio
import gzip
import http.client
import json
import os
import re
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import httpx
import numpy as np
import psutil
import pytest
from fastapi.responses import Response

from dubito.service.web.routes import Assets
from dubito.service.web.security import hash_key
from tests import forked
from tests.service.conftest import LIMIT, SOON, TWO_DECODERS, WHOLE, Live, Serve, Starter

SLOW = 17.0  # of fragile.py: an input that takes long
PREDICT = "/v1/models/digits/predict"
POST = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\n".encode()
ZEROS = {"inputs": [[[0.0] * 8] * 8]}
SMALL = {
    "header_bytes": 4000,
    "header_lines": 40,
    "header_seconds": 1,
    "body_seconds": 2,
    "write_seconds": 1,
    "max_connections": 60,
    "connections_per_address": 50,
    "max_requests": 4,
    "unsent_bytes": 200_000_000,
    "buckets": 1,
}


def post(body: object, *headers: str) -> bytes:
    """A prediction, as bytes."""
    content = json.dumps(body).encode()
    lines = [*headers, f"Content-Length: {len(content)}", "", ""]
    return POST + "\r\n".join(lines).encode() + content


def flags(**settings: object) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def server(
    serve: Serve, make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, small_digits: Path
) -> Live:
    plants = make_artifact(tmp_path_factory.mktemp("m") / "plants.safetensors")
    return serve(small_digits, plants, *flags(**SMALL), *WHOLE, **TWO_DECODERS)


@contextmanager
def connected(server: Live) -> Iterator[socket.socket]:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as plain:
        yield plain


def said(plain: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    with suppress(ConnectionError):
        while part := plain.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def closed_for(server: Live, reason: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    (number,) = re.findall(rf'dubito_connections_closed_total{{reason="{reason}"}} (\S+)', text)
    return float(number)


def check_good(server: Live) -> None:
    reply = httpx.post(server.url + PREDICT, json=ZEROS, timeout=LIMIT)
    assert reply.status_code == 200, reply.text


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


# connections

BEHIND = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + POST + b"Content-Length: 99\r\n\r\n{"  # half a body
HOLDERS = {
    "idle": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A:",
    "half a body": POST + b"Content-Length: 99\r\n\r\n{",
    "half a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half an index": b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
    "an expectation": POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
}


@pytest.mark.parametrize("first", HOLDERS.values(), ids=HOLDERS)
def test_whoever_holds_connections_keeps_nobody_out(server: Live, first: bytes) -> None:
    """Two hundred from one address, of which fifty may be, and four predictions at once: slots are for whole bodies."""
    before = closed_for(server, "connections_per_address")
    with ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(200)]
        for plain in held:
            with suppress(ConnectionError):
                plain.sendall(first)
        check_good(server)
        (number,) = re.findall(r"^dubito_connections (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)
        assert float(number) <= SMALL["connections_per_address"]
        assert closed_for(server, "connections_per_address") >= before + 150
        check_good(server)
        for plain in held:  # none is held for longer than its time
            said(plain)
    check_good(server)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nX-A: " + b"a" * 1_000_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 100_000, b"431"),
        (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000, b"431"),
        (b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 100_000, b"400"),
    ],
)
def test_heads_without_end_are_refused_in_words(server: Live, head: bytes, status: bytes) -> None:
    with connected(server) as plain:
        with suppress(ConnectionError):
            plain.sendall(head)
        found = said(plain)
        assert b"HTTP/1.1 %b " % status in found, found[:200]
    check_good(server)


def test_connections_that_come_and_go_leave_nothing_behind(server: Live) -> None:
    check_good(server)
    process = psutil.Process(server.pid)
    files = process.num_fds()
    for i in range(600):
        with connected(server) as plain:
            if i % 3 == 1:  # a reset
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif i % 3 == 2:
                plain.sendall(b"GET")
    check_good(server)
    until(lambda: process.num_fds() <= files + 2)
    until(lambda: "dubito_connections 1.0" in httpx.get(f"{server.url}/metrics").text)


@contextmanager
def crowd(server: Live) -> Iterator[None]:
    """More than half of the connections that an address may have."""
    with ExitStack() as stack:
        for _ in range(SMALL["connections_per_address"] * 2 // 3):
            stack.enter_context(connected(server)).sendall(HOLDERS["an expectation"])
        yield


BODY = json.dumps(ZEROS).encode()
CHUNKS = [(len(part), part) for part in (BODY[:50], BODY[50:], b"")]
ENTIRE = {
    "at once": (post(ZEROS),),
    "in two": (post(ZEROS)[:200], post(ZEROS)[200:]),
    "byte by byte, its head": (*(bytes([byte]) for byte in post(ZEROS)[:120]), post(ZEROS)[120:]),
    "in chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", *(b"%x\r\n%b\r\n" % (n, b) for n, b in CHUNKS)),
    "without a body": (b"GET /readyz HTTP/1.1\r\nHo", b"st: localhost\r\n\r\n"),
    "of much text": (post({**ZEROS, "tolerance": 0.5}, *[f"X-{i}: {'a' * 80}" for i in range(30)]),),
    "larger than is read ahead": (post({"inputs": np.zeros((100, 1, 8, 8)).tolist()}),),
}


@pytest.mark.parametrize("pieces", ENTIRE.values(), ids=ENTIRE)
def test_whole_requests_of_a_crowded_address_are_answered(server: Live, pieces: tuple[bytes, ...]) -> None:
    with crowd(server), connected(server) as plain:
        replies = plain.makefile("rb")
        for piece in pieces:
            plain.sendall(piece)
            time.sleep(0.002)
        assert status_in(replies) == 200
        plain.sendall(post(ZEROS))  # the connection is as good as any other
        assert status_in(replies) == 200


def status_in(replies: BinaryIO) -> int:
    """The status of the next reply, which is read whole."""
    status = int(replies.readline().split()[1])
    headers = dict(line.lower().split(b": ", 1) for line in iter(lambda: replies.readline().strip(), b""))
    replies.read(int(headers[b"content-length"]))
    return status


def test_half_a_request_of_a_crowded_address_is_told_that_it_is_late(server: Live) -> None:
    with crowd(server), connected(server) as plain:
        plain.sendall(HOLDERS["half a body"])
        assert said(plain).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@pytest.mark.parametrize("rows", [1, 100, 400, 1000])  # 0.3, 32, 128 and 320 kB
def test_a_body_that_comes_in_parts_behind_another_request_is_read(server: Live, rows: int) -> None:
    long = post({"inputs": np.zeros((rows, 1, 8, 8)).tolist(), "samples": 0})
    for cut in (1, 50, 200):
        with connected(server) as plain:
            plain.sendall(post(ZEROS) + long[:-cut])
            first = plain.recv(1 << 16)
            assert first.startswith(b"HTTP/1.1 200 ")
            plain.sendall(long[-cut:] + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (first + said(plain)).count(b"HTTP/1.1 200 ") == 3


def test_half_a_body_behind_another_request_holds_nobody_up(server: Live) -> None:
    """It makes room for others, and has no more time than one that comes alone."""
    with ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(SMALL["connections_per_address"])]
        for plain in held:
            plain.sendall(BEHIND)
            assert plain.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        check_good(server)
        assert said(held[-1]).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        for plain in held:
            said(plain)


def test_a_slow_loris_is_told_that_it_is_late(server: Live) -> None:
    before = closed_for(server, "header_seconds")
    with connected(server) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n")
        found = b""
        while not found:
            with suppress(ConnectionError):
                plain.sendall(b"X-A: b\r\n")
            if select.select([plain], [], [], 0.2)[0]:
                found = said(plain)
                assert found.startswith(b"HTTP/1.1 408 ")
    assert closed_for(server, "header_seconds") == before + 1


@contextmanager
def reading_nothing(server: Live) -> Iterator[socket.socket]:
    """A client that takes nothing of a reply of 7 MB, of a network that computes it in no time."""
    request = post({"inputs": [[0.0] * 4] * 1200, "samples": 100, "return": ["samples"]}).replace(b"digits", b"plants")
    host, port = server.address.split(":")
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect((host, int(port)))
        plain.sendall(request)
        yield plain


def test_who_does_not_read_is_closed(server: Live) -> None:
    before = closed_for(server, "write_seconds")
    with reading_nothing(server):
        until(lambda: closed_for(server, "write_seconds") == before + 1)
    check_good(server)
    assert "dubito_unsent_bytes 0.0" in httpx.get(f"{server.url}/metrics").text


def test_the_system_takes_little_for_who_does_not_read(server: Live) -> None:
    """Of a reply of 7 MB; by default it would take almost three."""
    with reading_nothing(server) as plain:
        until(lambda: queued(plain) > 0)
        time.sleep(0.3)
        assert queued(plain) < 1 << 20
    check_good(server)


def queued(plain: socket.socket) -> int:
    """Bytes that the system has taken from the server for this client."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("only Linux says what it has taken")
    here, there = (f"{port:04X}" for port in (plain.getpeername()[1], plain.getsockname()[1]))
    found = re.search(rf":{here} \w+:{there} \w+ (\w+):", table.read_text())
    return 0 if found is None else int(found[1], 16)


def test_static_files_are_read_once_for_all() -> None:
    async def ask() -> list[Response]:
        assets = Assets()
        return await asyncio.gather(*(assets.reply("index.html") for _ in range(5)))

    first, *others = asyncio.run(ask())
    assert all(one.body is first.body for one in others)


# the protocol


def test_a_request_to_upgrade_to_http_2_keeps_its_body(server: Live) -> None:
    """As curl --http2 and Java's client send it."""
    with connected(server) as plain:
        upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
        plain.sendall(post(ZEROS, *upgrade))
        reply = http.client.HTTPResponse(plain)
        reply.begin()
        assert (reply.status, reply.version) == (200, 11)
        assert json.load(reply)["model"] == "digits"


@pytest.mark.parametrize("path", ["/", PREDICT, "/v2/models/digits/ready"])
def test_a_web_socket_is_refused_in_words(server: Live, path: str) -> None:
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
    reply = httpx.get(server.url + path, headers={"Connection": "Upgrade", "Upgrade": "websocket", **key})
    assert reply.status_code == 400
    assert "WebSocket" in reply.text


def test_gzip_in_several_streams(server: Live) -> None:
    body = json.dumps(ZEROS).encode()
    headers = {"content-encoding": "gzip", "content-type": "application/json"}

    def post(content: bytes) -> int:
        return httpx.post(server.url + PREDICT, content=content, headers=headers).status_code

    assert post(gzip.compress(body[:20]) + gzip.compress(b"") + gzip.compress(body[20:])) == 200
    assert post(b"".join(gzip.compress(body[i : i + 1]) for i in range(len(body)))) == 200
    assert post(gzip.compress(body) + b"more") == 400
    assert post(gzip.compress(body) + gzip.compress(b" ")[:-1]) == 400
    assert post(gzip.compress(body) + gzip.compress(b"") * 5000) == 400
    assert post(gzip.compress(body) + gzip.compress(bytes(20 << 20)) * 2) == 413


@pytest.mark.parametrize(
    "path",
    ["/v2%2Frepository%2Findex", "/v2%2frepository/index", "/v2/%72epository/index", "/v2/repository%5cindex"],
)
def test_paths_that_slip_past_the_rules_of_a_proxy_lead_nowhere(server: Live, path: str) -> None:
    assert httpx.post(f"{server.url}/v2/repository/index").status_code == 200
    connection = http.client.HTTPConnection(server.address)  # which sends a path as it is
    connection.request("POST", path)
    assert connection.getresponse().status == 404
    connection.close()


# browsers, keys, proxies

UNLOAD = "/v2/repository/models/digits/unload"
FOREIGN: dict[str, dict[str, str]] = {
    "another origin": {"Origin": "https://evil.example"},
    "no origin that has a name": {"Origin": "null"},
    "another port": {"Origin": "http://localhost:1"},
    "another site, without an origin": {"Sec-Fetch-Site": "cross-site"},
    "the same site": {"Sec-Fetch-Site": "same-site"},
    "DNS rebinding": {"Host": "evil.example", "Origin": "http://evil.example"},
    "DNS rebinding, without an origin": {"Host": "evil.example:8000"},
    "a name that looks like an address": {"Host": "127.0.0.1.evil.example"},
    "a name that looks like localhost": {"Host": "localhost.evil.example"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_a_page_in_a_browser_cannot_change_what_is_served(server: Live, headers: dict[str, str]) -> None:
    for path in (UNLOAD, UNLOAD.replace("unload", "load")):
        reply = httpx.post(server.url + path, headers=headers, content=b"{}")
        assert reply.status_code == 403, reply.text
    check_good(server)


def test_who_may_change_what_is_served(server: Live) -> None:
    load = f"{server.url}/v2/repository/models/digits/load"
    port = server.url.rpartition(":")[2]
    own: list[dict[str, str]] = [{}, {"Host": "localhost"}, {"Host": f"[::1]:{port}"}, {"Host": "app.localhost:8000"}]
    own += [{"Origin": server.url}, {"Origin": server.url.upper(), "Sec-Fetch-Site": "same-origin"}]
    for headers in own:
        assert httpx.post(load, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Servers with the settings that are usual, where others let models be changed."""
    starter = Starter(tmp_path_factory.mktemp("usual"), usual=SOON | TWO_DECODERS)
    yield starter
    starter.close()


def test_models_are_changed_only_where_that_is_asked_for_or_keyed(usual: Starter, small_digits: Path) -> None:
    bare = usual(small_digits, "--set", "buckets=1")
    reply = httpx.post(bare.url + UNLOAD)
    assert reply.status_code == 503
    assert "repository_api" in reply.json()["error"]
    assert httpx.post(f"{bare.url}/v2/repository/index").status_code == 200
    keys = json.dumps({"alice": hash_key("secret")})
    keyed = usual(small_digits, *flags(buckets=1, allowed_hosts="models.example"), DUBITO_API_KEYS=keys)
    assert httpx.post(keyed.url + UNLOAD).status_code == 401
    for scheme in ("bearer", "Bearer", "BEARER"):
        key = {"Authorization": f"{scheme} secret"}
        assert httpx.get(f"{keyed.url}/v1/models", headers=key).status_code == 200
    foreign = {"Authorization": "bearer secret", "Origin": "https://evil.example"}
    assert httpx.post(keyed.url + UNLOAD, headers=foreign).status_code == 403
    named = {"Authorization": "bearer secret", "Host": "any.example"}
    assert httpx.post(keyed.url + UNLOAD, headers=named).status_code == 200


def test_allowed_hosts_and_origins_are_named(serve: Serve, small_digits: Path) -> None:
    settings = {"buckets": 1, "allowed_hosts": "Models.example", "cors_origins": "https://good.example"}
    server = serve(small_digits, *flags(**settings))
    load = f"{server.url}/v2/repository/models/digits/load"
    assert httpx.post(load, headers={"Host": "models.example:80"}).status_code == 200
    assert httpx.post(load, headers={"Host": "other.example"}).status_code == 403
    assert httpx.post(load, headers={"Origin": "https://good.example"}).status_code == 200
    assert httpx.post(load, headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("proxies", ["", "127.0.0.0/8", "192.0.2.1"])
def test_only_a_trusted_proxy_says_who_the_client_is(serve: Serve, proxies: str, small_digits: Path) -> None:
    server = serve(small_digits, *flags(buckets=1, rate_per_second=0.001, burst=2, trusted_proxies=proxies))

    def status(forwarded: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"X-Forwarded-For": forwarded}).status_code

    seen = [status(f"198.51.100.{i}") for i in range(5)]
    assert seen == ([200] * 5 if proxies == "127.0.0.0/8" else [200, 200, 429, 429, 429])
    if proxies == "127.0.0.0/8":  # what the client itself has put before the proxy's entry is not believed
        assert [status(f"203.0.113.{i}, 198.51.100.9") for i in range(3)] == [200, 200, 429]


def test_a_trusted_proxy_must_be_an_address() -> None:
    ended = forked.run("serve", "--set", "trusted_proxies=proxy.example", "--port", "0")
    assert ended.returncode == 2
    assert "trusted_proxies" in ended.stderr


# logs


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path, small_digits: Path) -> None:
    """Lines that find no room are dropped and counted; later lines say so. SIGTERM ends the server as ever."""
    reader, writer = os.pipe()
    out_reader, out_writer = os.pipe()
    with os.fdopen(writer, "w") as stderr, os.fdopen(out_writer, "w") as stdout, os.fdopen(out_reader) as greeting:
        words: list[str | Path] = ["serve", small_digits, "--port", "0", *flags(buckets=1, log_bytes=20_000)]
        process = forked.start(forked.DUBITO, words, stdout=stdout, stderr=stderr, folder=tmp_path)
        stdout.close()
        stderr.close()
        url = ""
        while not url:
            line = greeting.readline()
            assert line
            url = line.split()[1].rstrip("/") if line.startswith("console ") else ""
        with httpx.Client(base_url=url, timeout=LIMIT) as client:
            for _ in range(100):
                for path in ("/nothing/" + "a" * 300, "/healthz"):
                    assert client.get(path).status_code in (200, 404)
            dropped = 0.0
            while not dropped:
                for _ in range(100):
                    assert client.get("/healthz").status_code == 200
                (number,) = re.findall(r"^dubito_log_lines_dropped_total (\S+)$", client.get("/metrics").text, re.M)
                dropped = float(number)
        process.send(signal.SIGTERM)
        process.join(LIMIT)
        assert process.exitcode == 0
        process.close()
    with os.fdopen(reader) as log:
        lines = log.read().splitlines()
    assert all(json.loads(line) for line in lines[:-1])  # the last may be half of one


# the end, and the beginning


def asks(port: int, path: str, seen: set[int], ready: threading.Event) -> None:
    while not ready.is_set():
        with suppress(httpx.TransportError):
            seen.add(httpx.post(f"http://127.0.0.1:{port}{path}", json={}, timeout=LIMIT).status_code)


def test_a_model_that_is_being_loaded_is_not_missing(tmp_path: Path, make_artifact: Callable[..., Path]) -> None:
    """503 until it answers, also where the server is ready without it."""
    make_artifact(tmp_path / "a" / "1" / "model.safetensors")
    make_artifact(tmp_path / "b" / "1" / "model.safetensors", kind="image")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words: list[str | Path] = ["serve", tmp_path, *flags(expected="a", port=port, buckets="1,4", decode_processes=1)]
    with (tmp_path / "out").open("w") as out, (tmp_path / "log").open("w") as log:
        process = forked.start(forked.DUBITO, words, stdout=out, stderr=log, folder=tmp_path)
    seen, ready = set[int](), threading.Event()
    thread = threading.Thread(target=asks, args=(port, "/v1/models/b/predict", seen, ready))
    thread.start()
    try:
        until(lambda: 400 in seen or not process.is_alive())  # it answers: the body is none
    finally:
        ready.set()
        thread.join()
        process.send(signal.SIGTERM)
        process.join()
    assert process.exitcode == 0
    process.close()
    assert seen == {503, 400}


@pytest.mark.parametrize("sent", ["before", "after"])
def test_connections_that_were_accepted_are_answered_when_the_server_stops(
    serve: Serve, sent: str, small_digits: Path
) -> None:
    """Whether the request was sent before the signal or just after: none is reset. Fifty in the backlog, too."""
    server = serve(small_digits, *flags(buckets=1, linger_seconds=0))
    request = post(ZEROS)
    with ExitStack() as stack:
        os.kill(server.pid, signal.SIGSTOP)  # so that nothing is read, nor accepted, before the signal
        try:
            plain = [stack.enter_context(connected(server)) for _ in range(50)]
            if sent == "before":
                for one in plain:
                    one.sendall(request)
            server.send(signal.SIGTERM)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        if sent == "after":
            for one in plain:
                one.sendall(request)
        for one in plain:
            found = b""
            while part := one.recv(1 << 16):
                found += part
            assert found.startswith(b"HTTP/1.1 200 "), found
            assert b"connection: close" in found
    assert server.wait() == 0


def test_the_exit_code_says_that_a_request_was_cancelled(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, *flags(linger_seconds=0, drain_seconds=0.2, batch_work=1), **environment)
    request = post({"inputs": [[SLOW, 0.0, 0.0, 1.0]] * 20, "samples": 1}).replace(b"digits", b"fragile")
    with connected(server) as plain:
        plain.sendall(request)
        until(lambda: 'dubito_batch_size_count{model="fragile"} 0.0' not in httpx.get(f"{server.url}/metrics").text)
        server.send(signal.SIGTERM)
        assert said(plain).startswith(b"HTTP/1.1 503 ")
    assert server.wait() == 1


@pytest.mark.parametrize("sent", [HOLDERS["half a body"], BEHIND], ids=["alone", "behind another request"])
def test_half_a_request_is_not_one_that_was_accepted(serve: Serve, sent: bytes, small_digits: Path) -> None:
    server = serve(small_digits, *flags(buckets=1, linger_seconds=0, drain_seconds=0.2))
    with connected(server) as plain:
        plain.sendall(sent)
        if sent == BEHIND:
            assert plain.recv(65536).startswith(b"HTTP/1.1 200 ")
        until(lambda: "dubito_connections 2.0" in httpx.get(f"{server.url}/metrics").text)
        server.send(signal.SIGTERM)
        assert said(plain).startswith(b"HTTP/1.1 503 ")
    assert server.wait() == 0
