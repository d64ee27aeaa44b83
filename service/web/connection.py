"""HTTP/1.1 connections: a protocol on httptools for uvicorn's option `http`, with limits on what clients may hold.

Replies are the bytes that uvicorn's own protocol would send, with these differences: a request that asks to upgrade
keeps its body and is answered in HTTP/1.1, a malformed request is refused after the replies before it, and what exceeds
a limit is refused.
"""

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn

from dubito.service.web.first_bytes import PER_BYTE, is_surely_whole, lateness
from dubito.service.web.http import Message, Pairs, Scope
from dubito.service.web.limits import ConnectionLimits
from dubito.service.web.starts import Openings, Starts

PIECE = 1 << 16  # bytes: of a body that are kept until the application takes them, and of a reply in one write
LATER = 2.0  # seconds beyond `body_seconds`, so that the application's own answer to a slow body comes first
LINGER = 2.0  # seconds in which a client can read the last reply before the connection is closed for good
PAUSE = 0.05  # seconds between two reads of what is thrown away
FRESH, KEPT = 1.0, 0.25  # seconds that a connection has to send a request once the server stops: a new one, and others
FREE_CHUNKS, MEAN_CHUNK = 1024, 16  # chunks of a body that may have any size; mean bytes of those that follow
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
CONTROLS = bytes([*range(9), *range(10, 32), 127])
BAD_REQUEST = (400, "Invalid HTTP request received.", "malformed")
log = logging.getLogger("dubito")

Refusal = tuple[int, str, str]  # status, text, reason in the metrics
_prefixes: dict[bytes, bytes] = {}  # b"name: " of header names of replies, checked


def protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The class of connections under these limits, for uvicorn's option `http`."""

    starts, openings = Starts(), Openings()

    class LimitedConnection(HttpConnection):
        def __init__(
            self,
            config: uvicorn.Config,
            server_state: Any,
            app_state: dict[str, Any],
            first: bytes = b"",
            ticket: int = 0,
            **_: object,
        ) -> None:
            super().__init__(limits, starts, openings, config.loaded_app, server_state, app_state, first, ticket)

    return LimitedConnection


class HttpConnection(asyncio.Protocol):
    """One connection: reads requests, has the application answer them one after the other, and keeps deadlines."""

    def __init__(
        self,
        limits: ConnectionLimits,
        starts: Starts,
        openings: Openings,
        app: Any,
        state: Any,
        app_state: dict[str, Any],
        first: bytes = b"",
        ticket: int = 0,
    ) -> None:
        """`first`: bytes of the client that were read before; `ticket`: of its place among the connections, if it has
        one."""
        self.limits, self.starts, self.openings = limits, starts, openings
        self.app, self.state, self.app_state, self.first = app, state, app_state, first
        self.ticket = ticket
        self.settings = limits.settings
        self.loop = asyncio.get_running_loop()
        self.answered = self.loop.time()  # when its last reply was complete, or it was made
        self.parser: Any = self._new_parser()
        self.address = ""
        self.deadline, self.kind = math.inf, "header_seconds"  # and the limit that it comes from
        self.unsent = 0
        self.later = 0.0  # seconds by which its next request comes later than others of its address

        # of the request that is being read
        self.in_head = True  # or between two requests
        self.begun = False  # its first byte has come
        self.url, self.headers = b"", list[tuple[bytes, bytes]]()
        self.expects = self.upgrades = False
        self.replayed: list[tuple[bytes, bytes]] | None = None  # headers of a request that asked to upgrade
        self.parsed = self.head_bytes = self.raw_bytes = self.body_bytes = self.chunks = 0
        self.trailing = 0  # bytes of a chunked body since the last that were data
        self.crossed = False  # what is being parsed has the end of a head
        self.fault: Refusal | None = None  # why a callback stopped the parser
        self.reading: Exchange | None = None  # request whose body is being read

        self.current: Exchange | None = None  # request that is being answered
        self.queue: deque[Exchange] = deque()  # requests that wait behind it
        self.queued = 0  # bytes of their heads, since the queue was empty
        self.refusal: Refusal | None = None  # sent when these have been answered
        self.paused = self.write_paused = False
        self.writable: asyncio.Future[None] | None = None
        self.leaving = self.closing = self.served = False

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # requests behind one with `Connection: close`
        return parser

    # transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's own classes do not inherit it
        self.client = _host_and_port(transport.get_extra_info("peername"))
        self.server = _host_and_port(transport.get_extra_info("sockname"))
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.address = self.limits.address_of(self.client[0]) if self.client else ""
        self.deadline = self.loop.time() + self.settings.header_seconds
        if is_surely_whole(self.first):  # its client waits for us until that has been read
            self.deadline = math.inf
        self.state.connections.add(self)
        if limit := self.limits.enter(self):
            self._refuse((503, f"Too many connections: the limit is {limit}.", limit))
        if self.first:
            self.openings.put(self.loop, self.address, self, lateness(self.first))

    def open(self) -> None:
        """Read what the client sent before the connection was made, and since."""
        first, self.first = self.first, b""
        if not self.closing:
            self.data_received(first)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        self.limits.leave(self)
        self.parser = None
        self.closing = True
        for exchange in (self.current, self.reading, *self.queue):
            if exchange is not None:
                exchange.disconnect()
        self.queue.clear()
        self.resume_writing()

    def eof_received(self) -> None:
        """The client has closed its side: as for uvicorn, it is gone."""

    def data_received(self, data: bytes) -> None:
        if self.first:  # which is read before
            self.first += data
            return
        if self.parser is None:  # what still comes is thrown away
            self._pause_throwing_away()
            return
        in_head, before, rest = self.in_head, self.body_bytes, data
        self.later = lateness(data) if in_head else PER_BYTE * len(data)
        self.crossed = False
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
                    self._replay_without_upgrade()
        except httptools.HttpParserError:
            self._refuse(self.fault or BAD_REQUEST)
            return
        if self.reading is not None and self.reading.complete:  # the rest of a body that was refused
            self._pause_throwing_away()
        if not self.crossed:  # all of it belongs to one head or one body
            if in_head:
                self.head_bytes += len(data)
                if self.head_bytes > self.settings.header_bytes:
                    self._refuse(self._long_head())
                    return
            elif self.chunks:
                self.raw_bytes += len(data)
                if self.raw_bytes > PIECE + 2 * self.body_bytes:
                    self._refuse((400, "Too little of the chunked body is data.", "chunks"))
                    return
                self.trailing = 0 if self.body_bytes > before else self.trailing + len(data)
                if self.trailing > (most := self.settings.header_bytes):  # the parser keeps trailers
                    self._refuse((431, f"More than {most} bytes without data in the chunked body.", "chunks"))
                    return
        self._set_deadline()

    def _pause_throwing_away(self) -> None:
        """What nobody wants is read no faster than need be."""
        self.transport.pause_reading()
        self.loop.call_later(PAUSE, self._throw_away_more)

    def _throw_away_more(self) -> None:
        if not self.paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _set_deadline(self) -> None:
        """The deadline of what the client has to do next; unchanged, if that is what it had to do before."""
        settings = self.settings
        if self.closing:
            return
        if self.write_paused:
            kind, seconds = "write_seconds", settings.write_seconds
        elif self.paused or (self.in_head and self.current is not None):
            self.kind, self.deadline = "", math.inf
            return
        elif not self.in_head:
            started = self.reading is not None and self.reading.task is not None
            kind, seconds = "body_seconds", settings.body_seconds + (LATER if started else 0)
        elif self.begun or not self.served:
            kind, seconds = "header_seconds", settings.header_seconds
        else:
            kind, seconds = "idle_seconds", KEPT if self.leaving else settings.idle_seconds
        if kind != self.kind:
            self.kind, self.deadline = kind, self.loop.time() + seconds

    def _forget_deadline(self) -> None:
        """The client has done what it had to do; taking a reply is another matter."""
        if not self.write_paused:
            self.kind = ""

    def pause_reading(self) -> None:
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()
            self._set_deadline()

    def resume_reading(self) -> None:
        if self.paused and not self.closing:
            self.paused = False
            self.transport.resume_reading()
            self._set_deadline()

    def pause_writing(self) -> None:
        self.write_paused, self.kind = True, ""
        self._set_deadline()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        self._set_deadline()

    async def drain(self) -> None:
        """Wait until the client has taken what was written, or is gone."""
        while self.write_paused and not self.closing:
            if self.writable is None or self.writable.done():
                self.writable = self.loop.create_future()
            await asyncio.shield(self.writable)

    # parser

    def on_message_begin(self) -> None:
        self.begun = True
        self._forget_deadline()
        self.url, self.headers, self.expects, self.upgrades = b"", [], False, False
        self.parsed = self.raw_bytes = self.body_bytes = self.chunks = self.trailing = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        self.parsed += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.parsed += len(name) + len(value) + 4
        if self.parsed > self.settings.header_bytes:
            self._stop_parser(self._long_head())
        if len(self.headers) >= self.settings.header_lines:
            self._stop_parser((431, f"More than {self.settings.header_lines} header fields.", "header_lines"))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expects = True
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked" and self.in_head:
            self._stop_parser((501, "A body may be chunked; it has another transfer coding.", "malformed"))
        if self.in_head:
            self.headers.append((name, value))
        # else a trailer, behind a chunked body: not passed on

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade():
            self.upgrades = True
            return
        if self.parsed > self.settings.header_bytes:
            self._stop_parser(self._long_head())
        url = self.url
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parts = httptools.parse_url(url)
            raw_path, query = parts.path, parts.query or b""
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers if self.replayed is None else self.replayed,
            "state": self.app_state.copy(),
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
        }
        self.replayed = None
        new = version != "1.0"  # an older client takes `100 Continue` for the reply
        exchange = Exchange(self, scope, new and parser.should_keep_alive(), new and self.expects)
        self.reading, self.in_head, self.crossed = exchange, False, True
        self._forget_deadline()
        if self.current is None:
            self._start(exchange)
        elif len(self.queue) < self.settings.pipelined and self.queued + self.parsed <= self.settings.header_bytes:
            self.queue.append(exchange)
            self.queued += self.parsed
            self.pause_reading()
        else:
            self._stop_parser((429, "Too many requests were sent ahead of their replies.", "pipelined"))

    def on_chunk_header(self) -> None:
        self.chunks += 1
        if self.chunks > FREE_CHUNKS + self.body_bytes // MEAN_CHUNK:
            self._stop_parser((400, "The chunks of the body are too small.", "chunks"))

    def on_body(self, body: bytes) -> None:
        exchange = self.reading
        if exchange is None:
            return
        self.body_bytes += len(body)
        if exchange.complete:  # answered already
            return
        if not exchange.body:
            exchange.body = body  # most bodies come in one piece, which is kept without a copy
        else:
            if type(exchange.body) is bytes:
                exchange.body = bytearray(exchange.body)
            exchange.body += body
        if len(exchange.body) > PIECE:
            self.pause_reading()
            if exchange is self.current and exchange.task is None:
                self._start(exchange)
                self._forget_deadline()
        exchange.wake()

    def on_message_complete(self) -> None:
        if self.upgrades:
            return
        exchange, self.reading = self.reading, None
        self.in_head, self.begun, self.head_bytes = True, False, 0
        if exchange is not None:
            exchange.more = False
            exchange.wake()
            if exchange is self.current:
                self._start(exchange)

    def _stop_parser(self, refusal: Refusal) -> None:
        """The parser passes on the exception, after which the request is refused."""
        self.fault = refusal
        raise ValueError(refusal[1])

    def _long_head(self) -> Refusal:
        most = self.settings.header_bytes
        return 431, f"The head of the request has more than {most} bytes.", "header_bytes"

    def _replay_without_upgrade(self) -> None:
        """Read the head again without its `Upgrade`, which a server may ignore: the parser leaves out the body of a
        request that has one."""
        parser, headers = self.parser, self.headers
        if parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is for proxies")
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        for name, value in headers:
            if name == b"connection":
                value = b", ".join(word for word in value.split(b",") if word.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self.parser, self.replayed = self._new_parser(), headers
        self.upgrades = False
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    # requests and replies

    def _start(self, exchange: "Exchange") -> None:
        """Have the application answer, once a short body has come whole: half a request costs next to nothing."""
        self.current = exchange
        if self.leaving:
            self.begin(exchange)
        elif not exchange.asked and (not exchange.more or exchange.expects or len(exchange.body) > PIECE):
            exchange.asked = True
            self.starts.put(self.loop, self.address, self.answered + self.later, self, exchange)

    def begin(self, exchange: "Exchange") -> None:
        """Now it is its turn."""
        if exchange.task is None and exchange is self.current and not exchange.gone:
            exchange.task = self.loop.create_task(exchange.run(self.app))
            self.state.tasks.add(exchange.task)

    def finish(self, exchange: "Exchange") -> None:
        """The reply is complete: go on with the next request."""
        self.state.total_requests += 1
        self.current, self.served, self.answered = None, True, self.loop.time()
        if self.closing:
            return
        if not exchange.keep_alive:
            self._close()
        elif self.queue:
            self._start(self.queue.popleft())
            if not self.queue and (self.reading is None or len(self.reading.body) <= PIECE):  # else when it is taken
                self.resume_reading()
            self._set_deadline()
        elif self.refusal is not None:
            self._refuse(self.refusal)
        else:
            self.queued = 0
            self.limits.answered(self)
            self.resume_reading()
            self._set_deadline()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, after the replies that come before it, and close."""
        broken, self.reading, self.parser = self.reading, None, None
        self.in_head, self.begun = True, False
        if broken is self.current:
            self.current = None
        elif broken is not None and broken in self.queue:
            self.queue.remove(broken)
        if self.current is not None:
            self.refusal = refusal
            self._set_deadline()
            return
        status, text, reason = refusal
        self.limits.closed[reason] += 1
        if broken is None or not broken.written:
            self.write_plain(status, text)
        if broken is not None:
            broken.disconnect()
        self._close()

    def write_plain(self, status: int, text: str) -> None:
        """A short reply after which the connection is closed."""
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % pair for pair in (*self.state.default_headers, *headers)]
        self.transport.write(b"".join([STATUS_LINES[status], *lines, b"\r\n", text.encode("ascii")]))

    def _close(self) -> None:
        """Close once everything is sent. While the client may still send, its bytes are read and thrown away: closed at
        once, the connection would be reset, and the client might not see the last reply."""
        self.closing = True
        unread = self.paused or self.parser is None or not self.in_head or self.begun
        self.parser = None
        self.kind, self.deadline = "", self.loop.time() + LINGER
        if unread and self.transport.can_write_eof() and not self.transport.is_closing():
            if self.paused:
                self.paused = False
                self.transport.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: answer what has come, and what comes in the next moment, then close."""
        self.leaving = True
        if self.current is not None:
            self._start(self.current)
        if self.current is None and not self.closing and not self.begun:
            self.kind = "leaving"
            self.deadline = min(self.deadline, self.loop.time() + (KEPT if self.served else FRESH))

    def expire(self) -> None:
        if self.closing:
            self.transport.abort()
            return
        kind = self.kind
        if kind == "leaving" or (self.leaving and kind == "idle_seconds"):
            self._close()
        elif kind == "header_seconds" and self.begun:
            self._refuse((408, f"The head did not come within {self.settings.header_seconds:g} s.", kind))
        elif kind == "body_seconds" and self.reading is not None and not self.reading.complete:
            self._refuse((408, f"The body did not come within {self.settings.body_seconds:g} s.", kind))
        else:
            self.limits.closed[kind] += 1
            if kind in ("write_seconds", "body_seconds"):
                self.transport.abort()
            else:
                self._close()

    def evict(self, reason: str) -> None:
        self.limits.closed[reason] += 1
        self.closing, self.deadline, self.unsent = True, math.inf, 0
        self.transport.abort()


class Exchange:
    """A request and its reply. The head of the reply is sent together with the first piece of its body."""

    __slots__ = (
        "asked",
        "body",
        "chunked",
        "complete",
        "connection",
        "event",
        "expects",
        "gone",
        "keep_alive",
        "left",
        "more",
        "new",
        "scope",
        "start",
        "started",
        "task",
        "written",
    )

    def __init__(self, connection: HttpConnection, scope: Scope, keep_alive: bool, expects: bool) -> None:
        self.connection, self.scope, self.keep_alive, self.expects = connection, scope, keep_alive, expects
        self.body: bytes | bytearray = b""  # what has come and was not taken yet
        self.more, self.new = True, False  # whether more of the body follows; whether there is something to take
        self.event: asyncio.Event | None = None
        self.gone = False  # the client
        self.started = self.written = self.complete = False  # the reply; written: its head
        self.start: Message | None = None
        self.chunked, self.left = False, 0  # bytes of the reply that are still due
        self.asked = False  # to be begun
        self.task: asyncio.Task[None] | None = None

    async def run(self, app: Any) -> None:
        try:
            result = await app(self.scope, self.receive, self.send)
            if result is not None:
                raise RuntimeError(f"the application returned {result!r} instead of None")
            if not self.complete and not self.gone:
                raise RuntimeError("the application returned without a whole reply")
        except asyncio.CancelledError:  # by uvicorn, when the time to shut down has passed
            if not self.gone and not self.complete:
                self.connection.limits.cancelled += not self.more
                self._fail(503, "The server stopped before it could answer.")
        except Exception as error:
            log.error("the application failed", exc_info=error)
            if not self.complete:
                self._fail(500, "Internal Server Error")
        finally:
            self.connection.state.tasks.discard(self.task)

    def _fail(self, status: int, text: str) -> None:
        """No reply, or only the beginning of one: send an error where nothing was sent, and close."""
        connection = self.connection
        if self.gone or connection.closing:
            return
        self.complete = True
        if not self.started:
            connection.write_plain(status, text)
        elif not self.written and self.start is not None:
            with suppress(RuntimeError):  # a header that is none, which was the error
                connection.transport.write(self._head(self.start))
        self.keep_alive = False
        connection.finish(self)

    def disconnect(self) -> None:
        if not self.complete:
            self.gone = True
        if self.event is not None:
            self.event.set()

    def wake(self) -> None:
        self.new = True
        if self.event is not None:
            self.event.set()

    def _go_on(self) -> None:
        """Read on: the rest of the body, or whether the client goes, which a long body has kept from being seen."""
        connection = self.connection
        if connection.paused and (connection.reading is self or (connection.reading is None and not connection.queue)):
            connection.resume_reading()

    async def receive(self) -> Message:
        connection = self.connection
        if self.expects:
            self.expects = False
            if not connection.closing:
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.new or self.gone or self.complete):
            self._go_on()
            if self.event is None:
                self.event = asyncio.Event()
            self.event.clear()
            await self.event.wait()
        if self.gone or self.complete:
            return {"type": "http.disconnect"}
        body, self.body, self.new = self.body, b"", False
        self._go_on()
        return {"type": "http.request", "body": bytes(body), "more_body": self.more}

    async def send(self, message: Message) -> None:
        connection = self.connection
        if connection.write_paused:
            await connection.drain()
        if self.gone or connection.closing:
            return
        if self.complete:
            raise RuntimeError(f"{message['type']} came after the whole reply")
        if not self.started:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"{message['type']} came before http.response.start")
            self.start, self.started, self.expects = message, True, False
            return
        if message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} came instead of http.response.body")
        body, more = message.get("body", b""), message.get("more_body", False)
        head = b""
        if self.start is not None:
            start, self.start = self.start, None
            head = self._head(start)
            self.written = True
        if self.scope["method"] == "HEAD":
            body, self.left = b"", 0
            if head:
                connection.transport.write(head)
        elif self.chunked:
            tail = b"" if more else b"0\r\n\r\n"
            connection.transport.write(b"%b%x\r\n%b\r\n%b" % (head, len(body), body, tail) if body else head + tail)
        else:
            if len(body) > self.left:
                if head:
                    connection.transport.write(head)
                raise RuntimeError("the reply is longer than its content-length")
            self.left -= len(body)
            if len(body) <= PIECE:
                connection.transport.write(head + body)
            else:
                await self._send_large(head, body)
        if more or self.gone or connection.closing:
            return
        if self.left:
            raise RuntimeError("the reply is shorter than its content-length")
        self.complete = True
        if self.event is not None:
            self.event.set()
        connection.finish(self)

    async def _send_large(self, head: bytes, body: bytes) -> None:
        """In pieces, each of which the client has to take in its time; the body itself is not copied. One piece goes in
        one turn of the event loop, whoever sends it, so that others have theirs."""
        connection = self.connection
        connection.limits.hold(body)
        connection.unsent = len(body)
        try:
            connection.transport.write(head)
            view = memoryview(body)
            for begin in range(0, len(view), PIECE):
                async with connection.limits.sending:
                    if self.gone or connection.closing:
                        return
                    connection.transport.write(view[begin : begin + PIECE])
                    await asyncio.sleep(0)
                if connection.write_paused:
                    await connection.drain()
        finally:
            connection.limits.release(body)
            connection.unsent = 0

    def _head(self, start: MutableMapping[str, Any]) -> bytes:
        """The head of the reply as bytes; decides on its framing and on whether the connection is kept."""
        status, connection = start["status"], self.connection
        headers: Pairs = [*connection.state.default_headers, *start.get("headers", ())]
        parts, framed, closes = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status], False, False
        for name, value in headers:
            prefix = _prefixes.get(name) or _checked(name)
            parts += (prefix, value, b"\r\n")
            if prefix == b"content-length: ":
                if not framed:
                    framed, self.left = True, int(value)
            elif prefix == b"transfer-encoding: ":
                if value.lower() == b"chunked":
                    framed, self.chunked, self.left = True, True, 0
            elif prefix == b"connection: " and b"close" in [word.strip().lower() for word in value.split(b",")]:
                self.keep_alive, closes = False, True
        if connection.leaving:
            self.keep_alive = False
        added = 0
        if not self.keep_alive and not closes:
            parts.append(b"connection: close\r\n")
            added += 1
        if not framed and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
            added += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        if len(head) - len(head.translate(None, CONTROLS)) != 2 * (len(headers) + added + 2):
            raise RuntimeError("a header of the reply has a control character in its value")
        return head


def _checked(name: bytes) -> bytes:
    if BAD_NAME.search(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    prefix = name.lower() + b": "
    if len(_prefixes) < 1000:
        _prefixes[name] = prefix
    return prefix


def _host_and_port(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
