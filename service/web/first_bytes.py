"""What the first bytes of a request say before a parser has seen them."""

import re

PER_BYTE = 1e-6  # seconds by which a client comes later for each byte that it sent at once: they may be many requests
SEVERAL = 1.0  # seconds by which it comes later if they are more than one request
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
OTHER = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade):", re.IGNORECASE)


def is_whole(data: bytes) -> bool:
    """Whether a request is there whole, or is one of which only a parser can say so."""
    size = _size(data)
    return size is not None and len(data) >= size


def is_surely_whole(data: bytes) -> bool:
    """Whether a request is there whole, so that its client waits for us."""
    size = _size(data)
    return size is not None and 0 < size <= len(data)


def lateness(data: bytes) -> float:
    """Seconds by which a client that sent this at once comes later than others of its address."""
    size = _size(data)
    return PER_BYTE * len(data) + (SEVERAL if size and len(data) > size else 0.0)


def _size(data: bytes) -> int | None:
    """Bytes of the first request; 0 where only a parser can say it, and None where its head has not come whole."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = data[: end + 2]
    if OTHER.search(head) is not None:
        return 0
    length = LENGTH.search(head)
    return end + 4 + (0 if length is None else int(length[1]))
