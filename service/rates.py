"""How many requests each caller may still send: a token bucket for each, of this process or of all workers."""

import fcntl
import hashlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Protocol

MOST_CALLERS = 10_000  # beyond it the longest idle is forgotten, and has its whole burst again
SLOTS, NEAR = 1 << 14, 8  # of the table that workers share: callers, and places in which one may be
ENTRY = struct.Struct("16sdd")  # hash of the caller, requests left, at what time


class Rates(Protocol):
    def left(self, caller: str, rate: float, burst: float) -> float:
        """Requests that the caller has left, this one not yet taken off; one is taken off where there is one."""


class OwnRates:
    """Of one process."""

    def __init__(self) -> None:
        self.buckets: dict[str, tuple[float, float]] = {}  # requests left, and at what time

    def left(self, caller: str, rate: float, burst: float) -> float:
        now = time.monotonic()
        before, then = self.buckets.pop(caller, (burst, now))
        left = filled(before, now - then, rate, burst)
        self.buckets[caller] = (left - 1 if left >= 1 else left, now)  # last: the first is the longest idle
        if len(self.buckets) > MOST_CALLERS:
            del self.buckets[next(iter(self.buckets))]
        return left


class SharedRates:
    """Of all workers of a server: a table in a file that each of them maps, and locks while it reads and writes.

    A caller stands in one of `NEAR` places that follow from its hash; where all are taken, the longest idle gives way.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, SLOTS * ENTRY.size)
        self.table = mmap.mmap(self.file, SLOTS * ENTRY.size)

    def left(self, caller: str, rate: float, burst: float) -> float:
        mine = hashlib.blake2b(caller.encode(), digest_size=16).digest()
        first = int.from_bytes(mine[:8], "little")
        places = [(first + i) % SLOTS * ENTRY.size for i in range(NEAR)]
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            now = time.monotonic()  # one clock for all processes
            found = [ENTRY.unpack_from(self.table, place) for place in places]
            known = next((i for i, (key, _, _) in enumerate(found) if key == mine), None)
            i = min(range(NEAR), key=lambda i: found[i][2]) if known is None else known
            before, then = (burst, now) if known is None else found[i][1:]
            left = filled(before, now - then, rate, burst)
            ENTRY.pack_into(self.table, places[i], mine, left - 1 if left >= 1 else left, now)
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        return left


def filled(before: float, seconds: float, rate: float, burst: float) -> float:
    return min(burst, before + rate * max(0.0, seconds))
