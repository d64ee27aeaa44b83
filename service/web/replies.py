"""Long lists of replies as JSON, written in parts: between two of them the event loop serves others."""

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from numpy.typing import NDArray

AT_ONCE = 1 << 12  # numbers of a part; a row counts as `ROW` more
ROW = 32


def rows_at_once(each: int) -> int:
    """Rows of a part, where each has so many numbers."""
    return max(1, AT_ONCE // (each + ROW))


async def listed(parts: Iterable[bytes]) -> orjson.Fragment:
    """One list of what these lists hold; none of them is empty."""
    written: list[bytes] = []
    for part in parts:
        written.append(part[1:-1])
        await asyncio.sleep(0)
    return orjson.Fragment(b"[%b]" % b",".join(written))


async def numbers(array: NDArray[Any]) -> NDArray[Any] | orjson.Fragment:
    """A flat array, as `orjson` takes it."""
    if array.size <= AT_ONCE:
        return array
    parts = range(0, array.size, AT_ONCE)
    return await listed(orjson.dumps(array[i : i + AT_ONCE], option=orjson.OPT_SERIALIZE_NUMPY) for i in parts)
