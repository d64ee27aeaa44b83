"""uvicorn's HTTP/1.1 protocol, faster for requests and replies that fit one read and one write."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dubito.service.web.http import Message, Pairs


class Exchange(RequestResponseCycle):
    """A request and its reply. Head and body are sent in one write, so that the client wakes up once."""

    start: Any = None  # message with the head, until the body comes

    async def send(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            self.start, self.response_started = message, True
            return
        start, self.start = self.start, None
        if start is not None:
            body = message.get("body", b"")
            headers = self.default_headers + list(start.get("headers", ()))
            if self._plain(message) and (head := head_of(start["status"], headers, len(body))):
                self.transport.write(head + body)
                self.response_complete, self.waiting_for_100_continue = True, False
                self.message_event.set()
                self.on_response()
                return
            self.response_started = False
            await super().send(start)
        await super().send(message)

    def _plain(self, message: Message) -> bool:
        whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        free = not self.flow.write_paused and not self.disconnected
        return whole and free and self.keep_alive and self.scope["method"] != "HEAD"


def head_of(status: int, headers: Pairs, length: int) -> bytes | None:
    """The head as bytes; None where uvicorn must write it (chunked bodies, connection headers)."""
    fields = dict(headers)
    if fields.get(b"content-length") != b"%d" % length or b"connection" in fields or b"transfer-encoding" in fields:
        return None
    head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in headers], b"\r\n"])
    clean = head.count(b"\r") == head.count(b"\n") == len(headers) + 2  # no value contains a line break
    return head if clean else None


class Wire(HttpToolsProtocol):
    """A connection. One timer checks whether it is idle, instead of one timer per request."""

    idle_since: float | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.__class__ = Exchange  # uvicorn creates them, and its class cannot be chosen
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.body and not cycle.response_complete:
            cycle.body, body = body, b""  # most bodies come in one piece, which is kept without a copy
        elif cycle is not None and type(cycle.body) is bytes:
            cycle.body = bytearray(cycle.body)  # can be extended without copying
        super().on_body(body)

    def _unset_keepalive_if_required(self) -> None:
        self.idle_since = None

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self.idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._check_in(self.timeout_keep_alive)

    def _check_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self.idle_since is None:  # a request is being answered: its end starts the timer again
            return
        left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._check_in(left)
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
