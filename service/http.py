"""The raw side of HTTP: bodies with a limit, replies, and clients that go away."""

import asyncio
import gzip
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

import orjson

from dubito.service.problems import Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

WORTH_PACKING = 1024  # bytes
REFUSED = re.compile(r";q=0(\.0*)?$")  # a coding that is named to say that it is not wanted
MOST_OPTIONS = 100  # of a query


class ClientGone(Exception):
    """Nobody is left to answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Decoded once for each request."""
    found: dict[str, str] | None = scope.get("dubito.headers")
    if found is None:
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope["dubito.headers"] = found
    return found


def query_of(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    text = scope["query_string"].decode("latin-1")
    if text.count("&") >= MOST_OPTIONS:
        raise Problem(400, f"the query has more than {MOST_OPTIONS} options.")
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key in found:
            raise Problem(400, f"the query has {key[:40]!r} twice.")
        found[key] = value
    return found


async def read_body(headers: dict[str, str], receive: Receive, limit: int, seconds: float) -> bytes:
    """At most `limit` bytes, before and after decompression, and all of them in time."""
    stated = headers.get("content-length", "")
    if stated.isdigit() and int(stated) > limit:
        raise Problem(413, f"the body has {stated} bytes; at most {limit:,} are taken.", reason="body")
    message = await receive()
    whole = message["type"] == "http.request" and not message.get("more_body", False)
    if whole and len(message.get("body", b"")) <= limit:
        body = message.get("body", b"")
    else:
        try:
            async with asyncio.timeout(seconds):
                body = await _rest(message, receive, limit)
        except TimeoutError:
            raise Problem(408, f"the body did not come within {seconds:g} s.", reason="body") from None
    coding = headers.get("content-encoding", "").strip().lower()
    return body if coding in ("", "identity") else await asyncio.to_thread(inflate, body, coding, limit)


async def _rest(message: MutableMapping[str, Any], receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Problem(413, f"the body has more than {limit:,} bytes, which is what is taken.", reason="body")
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def inflate(body: bytes, coding: str, limit: int) -> bytes:
    """gzip and deflate bodies; a bomb is noticed before it is unpacked."""
    match coding:
        case "gzip":
            windows = [zlib.MAX_WBITS | 16]
        case "deflate":
            windows = [zlib.MAX_WBITS, -zlib.MAX_WBITS]  # with zlib's wrapping, or, as some send it, without
        case other:
            raise Problem(415, f"Content-Encoding is {other[:40]!r}; expected gzip, deflate or identity.")
    for window in windows:
        with suppress(zlib.error):
            unpacker = zlib.decompressobj(window)
            found = unpacker.decompress(body, limit + 1)
            if len(found) > limit:
                raise Problem(
                    413, f"the body unpacks to more than {limit:,} bytes, which is what is taken.", reason="body"
                )
            if unpacker.eof and not unpacker.unused_data:
                return found
    raise Problem(400, f"the body is no whole {coding[:20]} stream.")


def json_object(body: bytes, expected: str = "") -> dict[str, Any]:
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is no JSON: {error}.") from None
    if not isinstance(told, dict):
        raise Problem(400, f"the body is no JSON object{expected}.")
    return told


async def reply(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def body_of(problem: Problem, *, v2: bool) -> tuple[bytes, str]:
    """`application/problem+json`, or what clients of the Open Inference Protocol read."""
    if v2:
        return orjson.dumps({"error": problem.detail}), "application/json"
    told = {"type": "about:blank", "title": problem.title, "status": problem.status, "detail": problem.detail}
    return orjson.dumps(told), "application/problem+json"


class Leaving:
    """From `start` on, notices a client that goes away while its answer is awaited, and does `leave` then."""

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


def pack(body: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """Compressed where the client asks for it and it may pay."""
    if len(body) < WORTH_PACKING:
        return body, {}
    words = [word for word in accepted.lower().replace(" ", "").split(",") if not REFUSED.search(word)]
    codings = [word.partition(";")[0] for word in words]
    if "gzip" in codings:
        return gzip.compress(body, 1), {"content-encoding": "gzip", "vary": "accept-encoding"}
    if "deflate" in codings:
        return zlib.compress(body, 1), {"content-encoding": "deflate", "vary": "accept-encoding"}
    return body, {}
