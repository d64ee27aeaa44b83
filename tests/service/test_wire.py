"""The wire beside uvicorn's own protocol: whatever comes in whatever pieces, both answer the same bytes."""

import asyncio
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dubito.service.web.http import Receive, Scope, Send
from dubito.service.web.wire import Wire
from tests.examples import at_most

LIMIT = 30.0  # seconds, on a busy machine
GET = b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what came, in the way that the path names."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    told = b"%s %s %s" % (scope["method"].encode(), scope["path"].encode(), body)
    length = (b"content-length", b"%d" % len(told))
    start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [length]}
    match scope["path"]:
        case "/parts":
            start["headers"] = []
            await send(start)
            await send({"type": "http.response.body", "body": told[:3], "more_body": True})
            await send({"type": "http.response.body", "body": told[3:]})
            return
        case "/nothing":
            start |= {"status": 204, "headers": []}
            told = b""
        case "/bare":
            del start["headers"]
        case "/close":
            start["headers"] = [length, (b"connection", b"close")]
        case "/lie":
            start["headers"] = [(b"content-length", b"%d" % (len(told) + 1))]
        case "/split":
            start["headers"] = [length, (b"x-more", b"a\r\nset-cookie: b")]
        case "/fails":
            raise RuntimeError("on purpose")
        case "/breaks":
            await send(start)
            raise RuntimeError("on purpose")
        case "/slow":
            await asyncio.sleep(1.5)
    await send(start)
    await send({"type": "http.response.body", "body": told})


@asynccontextmanager
async def connected(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def served(kind: type[HttpToolsProtocol], keep_alive: Any = 60) -> Any:
    """A port, and the state of the server behind it."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=keep_alive)
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.close()


async def exchange(kind: type[HttpToolsProtocol], pieces: list[bytes]) -> bytes:
    """All that comes back until the server hangs up, which the last piece asks for."""
    async with asyncio.timeout(LIMIT), served(kind) as (port, _), connected(port) as (reader, writer):
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        found = b""
        with suppress(ConnectionError):
            while more := await reader.read(1 << 16):
                found += more
        return found


def same(*pieces: bytes) -> bytes:
    async def both() -> tuple[bytes, bytes]:
        return await exchange(HttpToolsProtocol, list(pieces)), await exchange(Wire, list(pieces))

    theirs, ours = asyncio.run(both())
    assert ours == theirs
    return ours


def request(path: str, body: bytes = b"", method: str = "POST", *headers: str, chunks: int = 0) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if chunks:
        size = max(1, -(-len(body) // chunks))
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked")
    elif body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


LAST = request("/whole", b"", "GET", "Connection: close")
requests = st.builds(
    request,
    st.sampled_from(["/whole", "/parts", "/nothing", "/bare", "/a%20b?c=d"]),
    st.binary(max_size=40),
    st.sampled_from(["POST", "GET", "HEAD"]),
    chunks=st.integers(0, 3),
)


@settings(max_examples=at_most(20), derandomize=True, deadline=None, database=None)
@given(st.lists(requests, max_size=4), st.lists(st.integers(0, 400), max_size=6))
def test_requests_in_any_pieces_one_behind_the_other(many: list[bytes], cuts: list[int]) -> None:
    """Bodies of all kinds, pipelined."""
    whole = b"".join(many) + LAST
    ends = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    found = same(*[whole[a:b] for a, b in pairwise(ends)])
    assert found.count(b"HTTP/1.1 ") >= len(many) + 1
    assert found.count(b"date: today") == found.count(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    ("path", "begins"), [("/close", b"HTTP/1.1 200 "), ("/lie", b"HTTP/1.1 200 "), ("/fails", b"HTTP/1.1 500 ")]
)
def test_replies_that_are_not_plain(path: str, begins: bytes) -> None:
    assert same(request(path), LAST).startswith(begins)


def test_a_header_that_brings_a_line_of_its_own_is_not_sent() -> None:
    assert same(request("/split"), LAST) == b""


def test_an_application_that_breaks_off_ends_the_connection() -> None:
    """uvicorn would have sent the head already."""
    assert asyncio.run(exchange(Wire, [request("/breaks"), LAST])) == b""


def test_a_body_that_waits_to_be_asked_for() -> None:
    found = same(request("/whole", b"abc", "POST", "Expect: 100-continue"), LAST)
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("bad", [b"no http at all\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x00" * 50])
def test_what_is_no_http(bad: bytes) -> None:
    assert same(GET, bad).count(b"HTTP/1.1 400 ") == 1


def test_old_clients_get_one_reply() -> None:
    assert same(b"GET /whole HTTP/1.0\r\n\r\n").endswith(b"GET /whole ")


class Recorder(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_head_and_body_leave_in_one_write() -> None:
    async def go() -> list[bytes]:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        wire, transport = Wire(config, ServerState(), {}), Recorder()
        wire.connection_made(transport)
        for _ in range(3):
            wire.data_received(request("/whole", b"abc"))
            while wire.tasks:
                await asyncio.sleep(0)
        wire.connection_lost(None)
        return transport.written

    assert asyncio.run(go()) == [b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\nPOST /whole abc"] * 3


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def go() -> None:
        async with asyncio.timeout(LIMIT), served(Wire, 1) as (port, state), connected(port) as (reader, writer):
            for path in ("/whole", "/slow", "/whole"):  # the slow one takes longer than idleness may
                writer.write(request(path))
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
                await reader.readexactly(len(f"POST {path} "))
            assert await reader.read() == b""  # and then nothing comes, so it ends
            while state.connections:
                await asyncio.sleep(0.01)

    asyncio.run(go())


def test_no_timer_outlives_its_connection() -> None:
    async def go() -> None:
        async with asyncio.timeout(LIMIT), served(Wire) as (port, state):
            async with connected(port) as (reader, writer):
                writer.write(GET)
                await reader.readuntil(b"\r\n\r\n")
                (wire,) = state.connections
                assert wire.timeout_keep_alive_task is not None
            while state.connections:
                await asyncio.sleep(0.01)
            assert wire.timeout_keep_alive_task is None

    asyncio.run(go())
