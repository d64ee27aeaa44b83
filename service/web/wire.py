"""uvicorn's HTTP/1.1, where most requests come whole and are answered whole."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dubito.service.web.http import Message, Pairs


class Exchange(RequestResponseCycle):
    """A request and its reply, whose head waits for the body: one write, by which the client is woken once."""

    start: Any = None  # the message, while it waits

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
    """None where there is more to it: then it is left to uvicorn."""
    told = dict(headers)
    if told.get(b"content-length") != b"%d" % length or b"connection" in told or b"transfer-encoding" in told:
        return None
    head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in headers], b"\r\n"])
    clean = head.count(b"\r") == head.count(b"\n") == len(headers) + 2  # no value brings a line of its own
    return head if clean else None


class Wire(HttpToolsProtocol):
    """A connection. One timer looks whether it is idle, however many requests come meanwhile."""

    idle_since: float | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.__class__ = Exchange  # uvicorn makes them, and does not ask of what class
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.body and not cycle.response_complete:
            cycle.body, body = body, b""  # most come in one piece: it is kept as it came
        elif cycle is not None and type(cycle.body) is bytes:
            cycle.body = bytearray(cycle.body)  # which grows without being copied
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
            self._look_in(self.timeout_keep_alive)

    def _look_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self.idle_since is None:  # the end of its request will see to it
            return
        left = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_in(left)
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
