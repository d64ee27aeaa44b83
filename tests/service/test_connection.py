"""Connections beside uvicorn's own protocol: whatever comes in whatever pieces, both answer the same bytes."""

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

from dubito.service.settings import Settings
from dubito.service.web.connection import protocol
from dubito.service.web.http import Receive, Scope, Send
from dubito.service.web.limits import ConnectionLimits
from tests.examples import at_most

LIMIT = 30.0  # seconds, on a busy machine
GET = b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n"


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
async def served(ours: bool, **limits: Any) -> Any:
    """A port of our protocol or of uvicorn's, the state of the server behind it, and the limits."""
    held = ConnectionLimits(Settings(**limits))
    kind: Any = protocol(held) if ours else HttpToolsProtocol
    config = uvicorn.Config(app, http=kind, log_config=None, access_log=False, lifespan="off")
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state, held
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.close()


async def exchange(ours: bool, pieces: list[bytes], **limits: Any) -> bytes:
    """All that comes back until the server hangs up, which the last piece asks for."""
    async with asyncio.timeout(LIMIT), served(ours, **limits) as (port, _, _), connected(port) as (reader, writer):
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


async def recorded(ours: bool, pieces: list[bytes], **limits: Any) -> list[bytes]:
    """The writes with which a protocol answers these pieces."""
    kind: Any = protocol(ConnectionLimits(Settings(**limits))) if ours else HttpToolsProtocol
    config = uvicorn.Config(app, http=kind, log_config=None, access_log=False, lifespan="off")
    config.load()
    state, transport = ServerState(), Recorder()
    state.default_headers = [(b"date", b"today")]
    connection = kind(config, state, {})
    connection.connection_made(transport)
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

    theirs, ours = asyncio.run(both())
    assert ours == theirs
    return ours


def answer(*pieces: bytes, **limits: Any) -> bytes:
    """Ours alone."""
    return asyncio.run(exchange(True, list(pieces), **limits))


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
    "another coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "a coding behind chunked": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
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
