"""Bodies of requests, unpacked and parsed within limits. Imports little: processes that decode start sooner."""

import zlib
from contextlib import suppress
from typing import Any

import orjson

from dubito.service.problems import Problem

GZIP = zlib.MAX_WBITS | 16  # zlib's name for the gzip format
MOST_MEMBERS = 4096  # streams of a gzip body
SLICE = 1 << 16  # bytes that are unpacked at once


def inflate(body: bytes, coding: str, limit: int) -> bytes:
    """Decompress a gzip or deflate body, and stop as soon as it exceeds the limit."""
    match coding:
        case "gzip":
            windows = [GZIP]
        case "deflate":
            windows = [zlib.MAX_WBITS, -zlib.MAX_WBITS]  # with zlib's wrapper, or without, as some clients send it
        case other:
            raise Problem(415, f"Content-Encoding is {other[:40]!r}; expected gzip, deflate or identity.")
    for window in windows:
        with suppress(zlib.error):
            return _members(body, window, limit, coding)
    raise Problem(400, f"the body is no whole {coding[:20]} stream.")


def _members(body: bytes, window: int, limit: int, coding: str) -> bytes:
    """A gzip body may consist of several streams, one after the other; raises zlib.error where one is broken."""
    view, parts, size, members = memoryview(body), list[bytes](), 0, 1
    unpacker = zlib.decompressobj(window)
    for begin in range(0, len(view), SLICE):  # in slices, since what follows a stream's end is copied
        rest: bytes | memoryview = view[begin : begin + SLICE]
        while rest:
            if unpacker.eof:
                if window != GZIP or members == MOST_MEMBERS:
                    raise Problem(400, f"the body has more than {members:,} {coding} streams, one after the other.")
                unpacker, members = zlib.decompressobj(window), members + 1
            parts.append(unpacker.decompress(rest, limit + 1 - size))
            size += len(parts[-1])
            if size > limit:
                raise Problem(
                    413, f"the body unpacks to more than {limit:,} bytes, which is what is taken.", reason="body"
                )
            rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    if not unpacker.eof:
        raise zlib.error("the last stream breaks off")
    return b"".join(parts)


def json_object(body: bytes, expected: str = "") -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise Problem(400, f"the body is no JSON object{expected}.")
    return value
