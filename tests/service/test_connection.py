"""Connections beside uvicorn's own protocol: whatever comes in whatever pieces, both answer the same bytes."""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import psutil
import pytest
import uvicorn
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dubito.service.settings import Settings
from dubito.service.web.acceptor import Acceptor
from dubito.service.web.connection import protocol
from dubito.service.web.http import Receive, Scope, Send
from dubito.service.web.limits import ConnectionLimits
from tests.examples import at_most

LIMIT = 30.0  # seconds, on a busy machine
Result = TypeVar("Result")
HUGE = bytes(50_000_000)
GET = b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n"
RELEASED: dict[str, asyncio.Event] = {}  # until then a path gives no answer; a new event for each server


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what came, in the way that the path names."""
    body, more = b"", scope["path"] != "/early"
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
        case "/same":
            start |= {"status": 304, "headers": []}
            told = b""
        case "/odd":
            start["status"] = 299
        case "/large":
            told = bytes(range(256)) * 2000
            start["headers"] = [(b"content-length", b"%d" % len(told))]
        case "/huge" | "/own":
            told = HUGE if scope["path"] == "/huge" else bytes(20_000_000)
            start["headers"] = [(b"content-length", b"%d" % len(told))]
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
            await asyncio.sleep(0.6)
        case "/held":
            await RELEASED["/held"].wait()
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
async def several(port: int, number: int) -> Any:
    """Connections whose streams are small."""
    streams = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(number)]
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.close()
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """On the event loop that the server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


settings_of = cache(Settings)  # which looks through the environment: here a thousand times for few different ones


def maker(kind: Any) -> tuple[Callable[..., Any], ServerState]:
    """What makes connections of this class, and the state of their server."""
    config = uvicorn.Config(app, http=kind, ws="none", log_config=None, access_log=False, lifespan="off")
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    return partial(kind, config, state, {}), state


@asynccontextmanager
async def served(ours: bool, **limits: Any) -> Any:
    """A port of our protocol or of uvicorn's, the state of the server behind it, and the limits."""
    RELEASED["/held"] = asyncio.Event()
    held = ConnectionLimits(settings_of(**limits))
    make, state = maker(protocol(held) if ours else HttpToolsProtocol)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state, held
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.close()


@asynccontextmanager
async def accepting(**limits: Any) -> Any:
    """Our protocol behind the acceptor that servers have: it, the limits, and the state of the server."""
    held = ConnectionLimits(settings_of(**limits))
    make, state = maker(protocol(held))
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, 512, held, lambda first, ticket: make(first=first, ticket=ticket))
    try:
        yield acceptor, held, state
    finally:
        await acceptor.close()


class Recorder(asyncio.Transport):
    """Keeps what is written until it is closed, and never loses it, as a socket that is reset does."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    write_eof = abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def made(ours: bool, transport: Recorder, **limits: Any) -> tuple[Any, ServerState]:
    """A connection of our protocol or of uvicorn's, and the state of its server."""
    make, state = maker(protocol(ConnectionLimits(settings_of(**limits))) if ours else HttpToolsProtocol)
    connection = make()
    connection.connection_made(transport)
    return connection, state


async def recorded(ours: bool, pieces: list[bytes], **limits: Any) -> list[bytes]:
    """The writes with which a protocol answers these pieces."""
    transport = Recorder()
    connection, state = made(ours, transport, **limits)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
        for _ in range(20):
            await asyncio.sleep(0)
    transport.closed = True
    connection.connection_lost(None)
    async with asyncio.timeout(LIMIT):
        while state.tasks:
            await asyncio.sleep(0.001)
    return transport.written


def same(*pieces: bytes) -> bytes:
    """What uvicorn's protocol and ours answer, if that is the same."""

    async def both() -> tuple[bytes, bytes]:
        theirs, ours = [b"".join(await recorded(kind, list(pieces))) for kind in (False, True)]
        return theirs, ours

    theirs, ours = run(both())
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
    assert same(request("/breaks"), LAST).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_that_waits_to_be_asked_for() -> None:
    found = same(request("/whole", b"abc", "POST", "Expect: 100-continue"), LAST)
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("bad", [b"no http at all\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x00" * 50])
def test_what_is_no_http(bad: bytes) -> None:
    assert same(GET, bad).count(b"HTTP/1.1 400 ") == 1


def test_old_clients_get_one_reply() -> None:
    assert same(b"GET /whole HTTP/1.0\r\n\r\n").endswith(b"GET /whole ")


HEAD = b"POST /whole HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ALIKE = {  # byte for byte as uvicorn answers
    "content-length and chunked": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nabc",
    "chunked and content-length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n",
    "two content-lengths that differ": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "two content-lengths alike": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of content-lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "a negative content-length": HEAD + b"Content-Length: -3\r\n\r\nabc",
    "a signed content-length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a content-length in hexadecimal": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "a content-length without end": HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nabc",
    "a space before the colon": HEAD + b"Content-Length : 3\r\n\r\nabc",
    "a folded header": HEAD + b"X-More: a\r\n b\r\n\r\n",
    "a folded transfer-encoding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "line feeds alone": b"GET /whole HTTP/1.1\nHost: x\n\n",
    "a line feed alone within": HEAD + b"X-A: b\nContent-Length: 0\r\n\r\n",
    "a carriage return alone": HEAD + b"X-A: b\rContent-Length: 0\r\n\r\n",
    "a chunk size that is none": CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
    "an empty chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk that ends in a line feed": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "a space behind a chunk size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "chunk extensions": CHUNKED + b'3;a=b;c="d e"\r\nabc\r\n2;\r\nde\r\n0;last\r\n\r\n',
    "a chunk extension with a line feed": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "chunk sizes with zeros and capitals": CHUNKED + b"00003\r\nabc\r\n0A\r\n0123456789\r\n000\r\n\r\n",
    "trailers": CHUNKED + b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\nContent-Length: 9\r\n\r\n",
    "a coding behind chunked": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked with a tab": HEAD + b"Transfer-Encoding:\tchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunked in capitals": HEAD + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "HTTP/1.0, chunked": b"POST /whole HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "HTTP/1.0 that would keep alive": b"GET /whole HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "HTTP/0.9": b"GET /whole\r\n\r\n",
    "HTTP/2.0": b"GET /whole HTTP/2.0\r\nHost: x\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": b"GET /whole HTTP/1.2\r\nHost: x\r\n\r\n",
    "lower-case http": b"GET /whole http/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /whole HTTP/1.1\r\n\r\n",
    "a method that is none": b"FETCH /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": b"get /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target": b"GET http://y/whole?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target without a path": b"GET http://y HTTP/1.1\r\nHost: x\r\n\r\n",
    "a fragment": b"GET /whole#a?b HTTP/1.1\r\nHost: x\r\n\r\n",
    "two slashes": b"GET //whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "no slash": b"GET whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "two question marks": b"GET /whole?a?b HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path with bytes above 127": b"GET /wh\xc3\xb6le HTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in the path": b"GET /wh ole HTTP/1.1\r\nHost: x\r\n\r\n",
    "headers in lower case": b"POST /whole HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
    "headers in capitals": b"POST /whole HTTP/1.1\r\nHOST: x\r\nCONTENT-LENGTH: 3\r\n\r\nabc",
    "a header without a name": HEAD + b": a\r\n\r\n",
    "a header without a value": HEAD + b"X-A:\r\n\r\n",
    "a header with NUL": HEAD + b"X-A: a\x00b\r\n\r\n",
    "a header above 127": HEAD + b"X-A: \xff\r\n\r\n",
    "empty lines before": b"\r\n\r\nGET /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "an empty body": HEAD + b"Content-Length: 0\r\n\r\n",
    "an empty chunked body": CHUNKED + b"0\r\n\r\n",
    "a GET with a body": b"GET /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "HEAD": b"HEAD /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "HEAD of a chunked reply": b"HEAD /parts HTTP/1.1\r\nHost: x\r\n\r\n",
    "204": b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    "304": b"GET /same HTTP/1.1\r\nHost: x\r\n\r\n",
    "a chunked reply": b"GET /parts HTTP/1.1\r\nHost: x\r\n\r\n",
    "an unknown status": b"GET /odd HTTP/1.1\r\nHost: x\r\n\r\n",
    "an expectation": HEAD + b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\nabc",
    "another expectation": HEAD + b"Expect: 200-ok\r\nContent-Length: 3\r\n\r\nabc",
    "an expectation that is not needed": b"GET /early HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    "an answer before the body": b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "connection: close among others": b"GET /whole HTTP/1.1\r\nHost: x\r\nConnection: x, CLOSE\r\n\r\n",
    "a large reply": b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
    "upgrade without connection": HEAD + b"Upgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    "an upgrade that nobody knows, without a body": b"GET /whole HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    b"Upgrade: TLS/1.0\r\n\r\n",
}


@pytest.mark.parametrize("bytes_", ALIKE.values(), ids=ALIKE)
def test_what_uvicorn_answers_and_no_other_byte(bytes_: bytes) -> None:
    """In one piece, and cut in two anywhere; requests behind it are answered alike, or refused alike."""
    whole = same(bytes_, LAST)
    assert whole.startswith(b"HTTP/1.1 ")
    for cut in range(1, len(bytes_), max(1, len(bytes_) // 7)):
        assert same(bytes_[:cut], bytes_[cut:], LAST) == whole


# better than uvicorn's: upgrades are ignored, replies come in order

H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"
LENGTH, CHUNKS = f"{H2C}\r\nContent-Length: 3", f"{H2C}\r\nTransfer-Encoding: chunked"


@pytest.mark.parametrize(
    "bytes_",
    [
        f"POST /whole HTTP/1.1\r\nHost: x\r\n{LENGTH}\r\n\r\nabc",
        f"POST /whole HTTP/1.1\r\nHost: x\r\n{CHUNKS}\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        f"POST /whole HTTP/1.1\r\nHost: x\r\n{LENGTH.replace('h2c', 'websocket')}\r\n\r\nabc",
        "POST /whole HTTP/1.1\r\nUpgrade: a\r\nUpgrade: b\r\nConnection: upgrade\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
def test_a_request_to_upgrade_keeps_its_body(bytes_: str) -> None:
    """Whole, cut anywhere, and before others of its kind."""
    good = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 15\r\n\r\nPOST /whole abc"
    data = bytes_.encode()
    for cut in range(len(data)):
        assert answer_to(data[:cut], data[cut:]) == good
    assert answer_to(data * 5) == 5 * good
    assert answer_to(data + request("/whole", b"abc") + data) == 3 * good


def test_a_request_to_upgrade_that_smuggles_is_refused() -> None:
    head = f"POST /whole HTTP/1.1\r\nHost: x\r\n{CHUNKS}\r\nContent-Length: 3\r\n\r\n0\r\n\r\nabc"
    assert answer_to(head.encode()).startswith(b"HTTP/1.1 400 ")


def test_what_is_malformed_is_refused_behind_the_replies_before_it() -> None:
    found = answer_to(GET + GET + b"no http at all\r\n\r\n")
    assert [line for line in found.split(b"\r\n") if b"HTTP/1.1" in line] == [
        b"HTTP/1.1 200 OK",
        b"GET /whole HTTP/1.1 200 OK",
        b"GET /whole HTTP/1.1 400 Bad Request",
    ]
    broken = b"POST /whole HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert answer_to(GET + broken).count(b"HTTP/1.1 400 ") == 1
    assert answer_to(GET + broken).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked", b"identity", b"gzip", b"xchunked"]
)
def test_a_body_in_a_transfer_coding_that_is_not_read_is_refused(coding: bytes) -> None:
    asked = HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert answer_to(GET + asked).count(b"HTTP/1.1 501 ") == 1
    assert answer_to(asked.replace(coding, b" Chunked ")).startswith(b"HTTP/1.1 200 ")


def test_an_old_client_is_not_told_to_continue() -> None:
    """It would take that for the reply."""
    asked = HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
    assert answer_to(asked).startswith(b"HTTP/1.1 100 ")
    assert answer_to(asked.replace(b"HTTP/1.1", b"HTTP/1.0")).startswith(b"HTTP/1.1 200 ")


def test_head_and_body_leave_in_one_write() -> None:
    writes = run(recorded(True, [request("/whole", b"abc")] * 3))
    assert writes == [b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 15\r\n\r\nPOST /whole abc"] * 3


# limits

SMALL = {"header_bytes": 2000, "header_lines": 20, "pipelined": 4}
TOO_LONG = {
    "one long value": b"GET /whole HTTP/1.1\r\nX-A: " + b"a" * 3000 + b"\r\n\r\n",
    "one long name": b"GET /whole HTTP/1.1\r\n" + b"a" * 3000 + b": b\r\n\r\n",
    "a long path": b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a head without end": b"GET /whole HTTP/1.1\r\nX-A: " + b"a" * 3000,
    "many lines": b"GET /whole HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n",
    "many lines without end": b"GET /whole HTTP/1.1\r\n" + b"a: b\r\n" * 1000,
    "empty lines without end": b"\r\n" * 1500,
    "a trailer without end": CHUNKED + b"0\r\nX-A: " + b"a" * 3000 + b"\r\n\r\n",
    "a head that asks to upgrade": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: a\r\n" + b"a: b\r\n" * 1000,
}


@pytest.mark.parametrize("bytes_", TOO_LONG.values(), ids=TOO_LONG)
def test_heads_are_limited(bytes_: bytes) -> None:
    """Whole and byte by byte, as the first request and behind others; one that fits is answered."""
    for pieces in ([bytes_], [bytes_[i : i + 1] for i in range(len(bytes_))], [GET, GET, bytes_]):
        found = answer_to(*pieces, **SMALL)
        assert found.count(b"HTTP/1.1 431 ") == 1, found
        assert found.startswith(b"HTTP/1.1 200 ") == (pieces[0] == GET)
    fits = b"POST /whole HTTP/1.1\r\nX-A: " + b"a" * 1500 + b"\r\nContent-Length: 9000\r\n\r\n" + b"b" * 9000
    assert answer_to(fits + fits[:900], fits[900:], **SMALL).count(b"HTTP/1.1 200 ") == 2


def test_what_is_no_data_of_a_chunked_body_is_limited() -> None:
    """A trailer is kept by the parser until its end has come, so its bytes are counted before."""
    data = CHUNKED + b"20000\r\n" + b"b" * 0x20000 + b"\r\n"
    for rest in (b"0\r\nX-A: ", b"0\r\n", b"5;x="):
        found = answer_to(data, rest, *[b"a" * 500] * 10, **SMALL)
        assert found.count(b"HTTP/1.1 431 ") + found.count(b"HTTP/1.1 400 ") == 1, found[:300]
    small = CHUNKED + b"5\r\nabcde\r\n" * 3 + b"0\r\nX-A: b\r\n\r\n"
    assert answer_to(*[small[i : i + 1] for i in range(len(small))], **SMALL).startswith(b"HTTP/1.1 200 ")


def test_requests_sent_ahead_are_limited() -> None:
    long = b"GET /whole HTTP/1.1\r\nX-A: " + b"a" * 900 + b"\r\n\r\n"
    for ahead, answered in ((GET, 5), (long, 3)):  # the one that is answered, and four; or heads of 2,000 bytes
        found = answer_to(ahead * 1000, **SMALL)
        assert found.count(b"HTTP/1.1 200 ") == answered
        assert found.count(b"HTTP/1.1 429 ") == 1


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"1;" + b"x" * 300 + b"\r\na\r\n", b"2\r\nab\r\n"])
def test_chunks_must_have_some_size(chunk: bytes) -> None:
    found = answer_to(*[CHUNKED + chunk * 1000, *[chunk * 1000] * 20])
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"hunk" in found
    body = b"a" * 100
    assert answer_to(CHUNKED + b"64\r\n%b\r\n" % body * 5000 + b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def answer_to(*pieces: bytes, **limits: Any) -> bytes:
    return b"".join(run(recorded(True, list(pieces), **limits)))


async def until(happened: Any) -> None:
    async with asyncio.timeout(LIMIT):
        while not happened():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "limit", "reply"),
    [
        (b"", "header_seconds", b""),
        (b"\r\n", "header_seconds", b""),
        (b"GET /whole HTTP/1.1\r\nHost:", "header_seconds", b"HTTP/1.1 408 "),
        (GET, "idle_seconds", b"HTTP/1.1 200 "),
        (GET + b"GET /", "header_seconds", b"HTTP/1.1 200 "),
        (b"POST /slow HTTP/1.1\r\nContent-Length: 3\r\n\r\na", "body_seconds", b"HTTP/1.1 408 "),
        (b"POST /early HTTP/1.1\r\nContent-Length: 3\r\n\r\na", "body_seconds", b"HTTP/1.1 408 "),
        (b"POST /early HTTP/1.1\r\nContent-Length: 99999\r\n\r\n" + 70_000 * b"a", "body_seconds", b"HTTP/1.1 200 "),
    ],
)
def test_a_client_that_waits_is_not_waited_for(sent: bytes, limit: str, reply: bytes) -> None:
    """Nor one that sends something more now and then."""

    async def go(more: bytes) -> None:
        seconds = {"header_seconds": 0.3, "idle_seconds": 0.3, "body_seconds": 0.3}
        async with served(True, **seconds) as (port, state, limits), connected(port) as (reader, writer):
            writer.write(sent)
            found = asyncio.create_task(reader.read())
            async with asyncio.timeout(LIMIT):
                while not found.done():
                    with suppress(ConnectionError):
                        writer.write(more)
                        await writer.drain()
                    await asyncio.sleep(0.1)
            with suppress(ConnectionError):
                assert (await found).startswith(reply)
            assert limits.closed[limit] == 1
            writer.close()
            await until(lambda: not limits.open and not state.connections)

    run(go(b""))
    if b"Content-Length" not in sent and sent != GET:
        run(go(b"\r\n" if sent in (b"", b"\r\n") else b"a"))


def test_a_busy_connection_is_not_idle() -> None:
    async def go() -> None:
        async with served(True, idle_seconds=0.2, header_seconds=0.2) as (port, _, limits), connected(port) as streams:
            reader, writer = streams
            for path in ("/slow", "/whole"):  # the slow one takes longer than idleness may
                writer.write(request(path))
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
                await reader.readexactly(len(f"POST {path} "))
            assert await reader.read() == b""  # and then nothing comes, so it ends
            assert limits.closed["idle_seconds"] == 1

    run(go())


def test_slow_readers_share_a_body_and_are_closed() -> None:
    """Thirty who read nothing of 50 MB: they cost no copies, and are closed after a while; who reads gets it all."""

    async def go() -> None:
        memory = psutil.Process().memory_info
        async with served(True, write_seconds=1.0) as (port, state, limits), several(port, 30) as slow:
            before = memory().rss
            for _, writer in slow:
                writer.write(request("/huge", b"", "GET"))
            await until(lambda: sum(one.unsent > 0 for one in limits.open.values()) == 30)
            assert limits.unsent == len(HUGE)
            async with connected(port) as (reader, writer):
                writer.write(request("/huge", b"", "GET"))
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"content-length: %d\r\n" % len(HUGE) in head
                assert await reader.readexactly(len(HUGE)) == HUGE
            assert memory().rss - before < 4 * len(HUGE)  # that of the reader, and buffers
            await until(lambda: limits.closed["write_seconds"] == 30)
            await until(lambda: not state.connections and limits.unsent == 0)
            assert not limits.bodies

    run(go())


def test_replies_that_nobody_takes_are_limited_in_all() -> None:
    async def go() -> None:
        async with served(True, unsent_bytes=65_000_000) as (port, state, limits):
            async with several(port, 8) as slow:
                for _, writer in slow:
                    writer.write(request("/own", b"", "GET"))  # 20 MB each
                await until(lambda: limits.closed["unsent_bytes"] == 5)
                await until(lambda: limits.unsent <= 65_000_000)
            await until(lambda: not state.connections and limits.unsent == 0)

    run(go())


@pytest.mark.parametrize("limit", ["max_connections", "connections_per_address"])
@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\na"])
def test_connections_are_limited_and_the_longest_waiting_makes_room(limit: str, sent: bytes) -> None:
    """Whoever holds forty of ten keeps nobody out, and what is being answered is not closed."""

    async def go() -> None:
        async with served(True, **{limit: 10}) as (port, state, limits), connected(port) as (busy, asks):
            asks.write(request("/held"))
            await until(lambda: state.tasks)
            async with several(port, 40) as held:
                for _, writer in held:
                    with suppress(ConnectionError):
                        writer.write(sent)
                        await writer.drain()
                for _ in range(3):
                    async with connected(port) as (reader, writer):
                        writer.write(LAST)
                        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                assert len(limits.open) <= 10
                assert limits.closed[limit] >= 31
                RELEASED["/held"].set()
                assert (await busy.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    run(go())


def test_where_all_are_being_answered_one_more_is_refused() -> None:
    async def go() -> None:
        async with served(True, max_connections=3) as (port, state, limits), several(port, 3) as busy:
            for _, writer in busy:
                writer.write(request("/held"))
            await until(lambda: len(state.tasks) == 3)
            async with connected(port) as (reader, _):
                assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            RELEASED["/held"].set()
            for reader, _ in busy:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert limits.closed["max_connections"] == 1

    run(go())


@pytest.mark.parametrize("turns", range(8))
def test_a_newcomer_is_not_closed_for_those_that_get_their_protocols(turns: int) -> None:
    """Fifty connections, all there may be, speak at once; another one comes some turns of the event loop later and
    waits. Until the fifty have protocols it is the only one that waits for its client, and none too many."""

    async def go() -> None:
        async with accepting(connections_per_address=50) as (acceptor, limits, state):
            address = acceptor.listener.getsockname()
            with ExitStack() as stack:
                clients = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
                await until(lambda: limits.closed["connections_per_address"] == 150)
                for client in clients[150:]:
                    client.sendall(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{")
                for _ in range(turns):
                    await asyncio.sleep(0)
                async with connected(address[1]) as (reader, writer):
                    await until(lambda: len(state.connections) >= 49)
                    writer.write(LAST)
                    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                assert limits.closed["connections_per_address"] == 151
            await until(lambda: not limits.open)

    run(go())


@pytest.mark.parametrize("turns", range(0, 120, 15))
@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"Content-Length: 9\r\n\r\n{"])
def test_a_whole_request_is_not_closed_for_those_that_may_be_whole(head: bytes, turns: int) -> None:
    """Two hundred speak at once, of which only a parser can say how far they are; some turns of the loop later one
    sends a whole request."""

    async def go() -> None:
        async with accepting(connections_per_address=50) as (acceptor, limits, _state):
            address = acceptor.listener.getsockname()
            with ExitStack() as stack:
                for _ in range(200):
                    client = stack.enter_context(socket.create_connection(address))
                    client.sendall(b"POST / HTTP/1.1\r\n" + head)
                for _ in range(turns):
                    await asyncio.sleep(0)
                good = stack.enter_context(socket.create_connection(address))
                good.sendall(LAST)
                good.setblocking(False)
                said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(good, 100), 30)
                assert said.startswith(b"HTTP/1.1 200 ")
                assert len(limits.open) <= 50
            await until(lambda: not limits.open)

    run(go())


def test_clients_that_reset_before_they_have_a_protocol_are_counted_off() -> None:
    """Of a connection that was reset nobody knows the address any more."""

    async def go() -> None:
        async with accepting(connections_per_address=50) as (acceptor, limits, state):
            address = acceptor.listener.getsockname()
            for _ in range(3):
                with ExitStack() as stack:
                    clients = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
                    await until(lambda: len(limits.open) == 40)
                    for client in clients:
                        client.sendall(LAST)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    while not acceptor.ready:
                        await asyncio.sleep(0)
                await until(lambda: not limits.open and not acceptor.tasks and not state.connections)
                assert not limits.by_address

    run(go())


def test_addresses_are_counted_by_network_and_proxies_are_not() -> None:
    limits = ConnectionLimits(Settings(trusted_proxies=("10.0.0.0/8", "::1")))
    assert limits.address_of("192.0.2.1") == "192.0.2.1"
    assert limits.address_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert limits.address_of("2001:db8::1") == limits.address_of("2001:db8::ffff:1") != limits.address_of("2001:db9::1")
    assert limits.address_of("fe80::1%eth0") == "fe80::/64"
    assert limits.address_of("10.1.2.3") == limits.address_of("::1") == ""


def test_a_server_that_stops_answers_what_has_come() -> None:
    """Requests on new connections and on kept ones, sent before and just after; all are told that it closes."""

    async def go() -> None:
        async with served(True) as (port, state, limits), several(port, 5) as new, several(port, 5) as kept:
            for reader, writer in kept:
                writer.write(GET)
                await reader.readuntil(b"GET /whole ")
            await until(lambda: len(state.connections) == 10)
            for _, writer in (*new[:3], *kept[:3]):
                writer.write(GET)
            for connection in list(state.connections):
                connection.shutdown()
            for _, writer in (*new[3:], *kept[3:]):
                writer.write(GET)
            for reader, _ in (*new, *kept):
                found = await reader.read()
                assert found.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"connection: close\r\n" in found
            await until(lambda: not state.connections and not limits.open)

    run(go())


def test_the_rest_of_a_body_that_was_refused_is_read_slowly_and_the_next_request_is_answered() -> None:
    pauses: list[str] = []

    class Paused(Recorder):
        def pause_reading(self) -> None:
            pauses.append("pause")

        def resume_reading(self) -> None:
            pauses.append("resume")

    async def go() -> None:
        transport = Paused()
        connection, _ = made(True, transport)
        whole = request("/early", bytes(400_000))
        connection.data_received(whole[:100_000])
        await until(lambda: len(transport.written) == 1)
        pauses.clear()
        for at in (100_000, 200_000):
            connection.data_received(whole[at : at + 100_000])
            assert pauses == ["pause"]
            await until(lambda: pauses == ["pause", "resume"])
            pauses.clear()
        connection.data_received(whole[300_000:] + request("/whole", b"more"))
        await until(lambda: len(transport.written) == 2)
        assert transport.written[1].endswith(b"POST /whole more")
        assert not pauses
        connection.connection_lost(None)

    run(go())
