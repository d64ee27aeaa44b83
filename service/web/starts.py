"""Requests begin few at a time, so that one that comes beside many is not behind all of them at each of its steps."""

import asyncio
import time
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

LEAST, MOST = 1, 16  # requests that begin in one turn of the event loop
LONG = 0.0005  # seconds of a turn, after which fewer begin in the next
OPENING = 0.002  # seconds of a turn in which first bytes are read
PER_BYTE = 1e-6  # seconds by which a client comes later for each byte that it sent at once: they may be many requests


class Begins(Protocol):
    """A connection, as far as beginning a request is concerned."""

    def begin(self, exchange: Any) -> None:
        """Answer a request, if somebody still waits for the answer."""


class Opens(Protocol):
    """A new connection."""

    def open(self) -> None:
        """Read what its client has sent before it had a protocol."""


class Openings:
    """New connections whose first bytes are read for some milliseconds in each turn of the event loop: a few bytes may
    hold many requests, and a flood of connections comes at once. Those that sent little come first."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, Opens]] = []  # a heap
        self.spent = 0.0  # seconds, in this turn
        self.turning = False  # the next turn is announced
        self.numbers = count()

    def put(self, loop: asyncio.AbstractEventLoop, connection: Opens, size: int) -> None:
        heappush(self.waiting, (time.monotonic() + PER_BYTE * size, next(self.numbers), connection))
        if len(self.waiting) == 1:
            self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        while self.waiting and self.spent < OPENING:
            began = time.monotonic()
            heappop(self.waiting)[2].open()
            self.spent += time.monotonic() - began
        if not self.turning:
            self.turning = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.spent, self.turning = 0.0, False
        if self.waiting:
            self._open(loop)


class Starts:
    """Requests that wait for their turn: first those whose connection has had no answer for longest.

    An answer takes some turns of the event loop. Where each of sixty connections began a request in every turn, each of
    these turns would be sixty requests long. Connections that always have the next request ready come after one that
    asks now and then.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, Begins, object]] = []  # a heap
        self.begun = 0  # in this turn
        self.few = MOST  # that may begin in a turn
        self.since = 0.0  # time at which the turn began
        self.numbers = count()

    def put(self, loop: asyncio.AbstractEventLoop, answered: float, connection: Begins, exchange: object) -> None:
        """`answered`: when the connection had its last answer."""
        if not self.begun:
            self.since = loop.time()
            loop.call_soon(self._turn, loop)
        if self.begun < self.few and not self.waiting:
            self.begun += 1
            connection.begin(exchange)
        else:
            heappush(self.waiting, (answered, next(self.numbers), connection, exchange))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self.few = max(LEAST, self.few // 2) if now - self.since > LONG else min(MOST, self.few + 1)
        self.begun, self.since = 0, now
        while self.waiting and self.begun < self.few:
            *_, connection, exchange = heappop(self.waiting)
            connection.begin(exchange)
            self.begun += 1
        if self.begun:
            loop.call_soon(self._turn, loop)
