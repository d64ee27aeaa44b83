"""Raw HTTP: reading bodies within limits, sending replies, noticing clients that disconnect."""

import asyncio
import gzip
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from dubito.service.problems import Problem
from dubito.service.web.bodies import inflate

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]  # of a request: lower-case names; the last value of a repeated one
Pairs = list[tuple[bytes, bytes]]  # of a reply

CODINGS = ("gzip", "deflate")  # of bodies
WORTH_PACKING = 1024  # bytes
REFUSED = re.compile(r";q=0(\.0*)?$")  # a content coding that the client refuses
MOST_OPTIONS = 100  # of a query


class ClientGone(Exception):
    """The client has disconnected."""


def query_of(scope: Scope) -> dict[str, str]:
    options: dict[str, str] = {}
    text = scope["query_string"].decode("latin-1")
    if text.count("&") >= MOST_OPTIONS:
        raise Problem(400, f"the query has more than {MOST_OPTIONS} options.")
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key in options:
            raise Problem(400, f"the query has {key[:40]!r} twice.")
        options[key] = value
    return options


async def read_body(headers: Headers, receive: Receive, limit: int, seconds: float) -> bytes:
    """A short body: at most `limit` bytes before and after decompression, received within `seconds`."""
    body, coding = await read_packed(headers, receive, limit, seconds)
    return inflate(body, coding, limit) if coding else body


async def read_packed(
    headers: Headers, receive: Receive, limit: int, seconds: float, hold: Callable[[int], None] = lambda more: None
) -> tuple[bytes, str]:
    """The body as it came, at most `limit` bytes within `seconds`, and its coding: empty where it is not compressed.

    `hold` is told of bytes that are kept, and may refuse them.
    """
    stated = headers.get(b"content-length", b"")
    if stated.isdigit() and int(stated) > limit:
        raise Problem(413, f"the body has {stated.decode()} bytes; at most {limit:,} are taken.", reason="body")
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] != "http.request" or message.get("more_body", False) or len(body) > limit:
        try:
            async with asyncio.timeout(seconds):
                body = await _rest(message, receive, limit, hold)
        except TimeoutError:
            raise Problem(408, f"the body did not come within {seconds:g} s.", reason="body") from None
    else:
        hold(len(body))
    coding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    return body, "" if coding == "identity" else coding


async def _rest(message: Message, receive: Receive, limit: int, hold: Callable[[int], None]) -> bytes:
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        hold(len(parts[-1]))
        if size > limit:
            raise Problem(413, f"the body has more than {limit:,} bytes, which is what is taken.", reason="body")
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


class Reply:
    """Sends one reply; `status` is 0 until it has begun."""

    __slots__ = ("also", "send", "status")

    def __init__(self, send: Send, also: Callable[[], Pairs]) -> None:
        """`also` gives further headers; it is called when the reply begins."""
        self.send, self.also, self.status = send, also, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.also()]
        await self.send(message)

    async def reply(self, status: int, body: bytes, headers: Pairs) -> None:
        """Send the whole reply."""
        self.status = status
        headers = [*headers, (b"content-length", b"%d" % len(body)), *self.also()]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def body_of(problem: Problem, *, v2: bool) -> tuple[bytes, str]:
    """Body and content type of an error: `application/problem+json`, or the Open Inference Protocol's form."""
    if v2:
        return orjson.dumps({"error": problem.detail}), "application/json"
    fields = {"type": "about:blank", "title": problem.title, "status": problem.status, "detail": problem.detail}
    return orjson.dumps(fields), "application/problem+json"


class DisconnectWatch:
    """From `start` on, waits for the client to disconnect, and then sets `gone` and calls `leave`."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.leave: Callable[[], None] = lambda: None
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.leave()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def pack(body: bytes, accepted: str) -> tuple[bytes, Pairs]:
    """The body, compressed if the client accepts it, and the headers that say so."""
    words = [word for word in accepted.lower().replace(" ", "").split(",") if not REFUSED.search(word)]
    codings = [word.partition(";")[0] for word in words]
    if "gzip" in codings:
        return gzip.compress(body, 1), [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    if "deflate" in codings:
        return zlib.compress(body, 1), [(b"content-encoding", b"deflate"), (b"vary", b"accept-encoding")]
    return body, []
