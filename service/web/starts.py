"""Requests begin few at a time, so that one that comes beside many is not behind all of them at each of its steps."""

import asyncio
import time
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

LEAST, MOST = 1, 16  # requests that begin in one turn of the event loop
LONG = 0.0005  # seconds of a turn, after which fewer begin in the next
OPENING = 0.0005  # seconds of a turn in which first bytes are read


T = TypeVar("T")


class InTurns(Generic[T]):
    """What waits, by the address of its client: addresses take turns, so that one with many connections does not keep
    another waiting for all of them."""

    def __init__(self) -> None:
        self.heaps: dict[str, list[tuple[float, int, T]]] = {}  # in the order of their turns
        self.numbers = count()

    def __bool__(self) -> bool:
        return bool(self.heaps)

    def put(self, address: str, rank: float, one: T) -> None:
        """Of one address, the least rank comes first."""
        heappush(self.heaps.setdefault(address, []), (rank, next(self.numbers), one))

    def pop(self) -> T:
        address = next(iter(self.heaps))
        heap = self.heaps.pop(address)
        *_, one = heappop(heap)
        if heap:
            self.heaps[address] = heap
        return one


class Begins(Protocol):
    """A connection, as far as beginning a request is concerned."""

    def begin(self, exchange: Any) -> None:
        """Answer a request, if somebody still waits for the answer."""


class Opens(Protocol):
    """A new connection."""

    def open(self) -> None:
        """Read what its client has sent before it had a protocol."""


class Openings:
    """New connections whose first bytes are read for a short time in each turn of the event loop: a few bytes may
    hold many requests, and a flood of connections comes at once. Of an address, those that sent little come first."""

    def __init__(self) -> None:
        self.waiting: InTurns[Opens] = InTurns()
        self.spent = 0.0  # seconds, in this turn
        self.turning = False  # the next turn is announced

    def put(self, loop: asyncio.AbstractEventLoop, address: str, connection: Opens, later: float) -> None:
        """`later`: seconds by which it comes later than others of its address."""
        alone = not self.waiting
        self.waiting.put(address, time.monotonic() + later, connection)
        if alone:
            self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        while self.waiting and self.spent < OPENING:
            began = time.monotonic()
            self.waiting.pop().open()
            self.spent += time.monotonic() - began
        if not self.turning:
            self.turning = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.spent, self.turning = 0.0, False
        if self.waiting:
            self._open(loop)


class Starts:
    """Requests that wait for their turn: of an address, first those whose connection has had no answer for longest.

    An answer takes some turns of the event loop. Where each of sixty connections began a request in every turn, each of
    these turns would be sixty requests long. Connections that always have the next request ready come after one that
    asks now and then.
    """

    def __init__(self) -> None:
        self.waiting: InTurns[tuple[Begins, object]] = InTurns()
        self.begun = 0  # in this turn
        self.few = MOST  # that may begin in a turn
        self.since = 0.0  # time at which the turn began

    def put(
        self, loop: asyncio.AbstractEventLoop, address: str, answered: float, connection: Begins, exchange: object
    ) -> None:
        """`answered`: when the connection had its last answer."""
        if not self.begun:
            self.since = loop.time()
            loop.call_soon(self._turn, loop)
        if self.begun < self.few and not self.waiting:
            self.begun += 1
            connection.begin(exchange)
        else:
            self.waiting.put(address, answered, (connection, exchange))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self.few = max(LEAST, self.few // 2) if now - self.since > LONG else min(MOST, self.few + 1)
        self.begun, self.since = 0, now
        while self.waiting and self.begun < self.few:
            connection, exchange = self.waiting.pop()
            connection.begin(exchange)
            self.begun += 1
        if self.begun:
            loop.call_soon(self._turn, loop)
