"""The device's lock: threads that wait for it share it fairly in time (start-time fair queueing).

Each thread has a clock of the seconds for which it has held the lock. The one whose clock shows least goes next. A
thread that comes back after a pause has its clock set to that of the last holder, so that it saves up nothing.
"""

import threading
import time
from dataclasses import dataclass, field
from threading import get_ident

RECENT = 1.0  # seconds for which a device counts as contended


@dataclass(eq=False)
class Claim:
    """A thread that waits."""

    thread: int
    clock: float
    lock: threading.Lock = field(default_factory=threading.Lock)  # released to hand over


class Turn:
    """A lock like `threading.Lock`, which would let a busy model take it again before one that waits wakes up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all below
        self._waiting: list[Claim] = []  # in the order in which they came
        self._clocks: dict[int, float] = {}  # by thread; those that show no more than `_clock` are not kept
        self._clock = 0.0  # the holder's, when it got the lock
        self._holder: int | None = None
        self._since = 0.0  # time at which it did
        self._contended = -RECENT

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = get_ident()
        with self._lock:
            claim = Claim(me, max(self._clock, self._clocks.get(me, 0.0)))
            if self._holder is None:
                self._grant(claim)
                return True
            if not blocking:
                return False
            claim.lock.acquire()
            self._wait(claim)
        if claim.lock.acquire(timeout=timeout):
            return True
        with self._lock:
            if claim in self._waiting:
                self._waiting.remove(claim)
                return False
            return True  # handed over at the last moment

    def release(self) -> None:
        with self._lock:
            self._charge()
            self._hand_over()

    def keep(self) -> bool:
        """Whether the holder goes on, since nobody who waits has had less. Else the lock is released."""
        with self._lock:
            mine = self._charge()
            if all(claim.clock > mine for claim in self._waiting):
                self._clock, self._since = mine, time.monotonic()
                return True
            self._hand_over()
            return False

    def yield_(self) -> None:
        """Let those who wait and have had less go first, by their holder."""
        if self._waiting and not self.keep():
            self.acquire()

    def locked(self) -> bool:
        return self._holder is not None

    @property
    def waiting(self) -> int:
        """Threads that wait."""
        return len(self._waiting)

    @property
    def contended(self) -> bool:
        """Somebody had to wait lately."""
        return time.monotonic() - self._contended < RECENT

    def _wait(self, claim: Claim) -> None:
        self._contended = time.monotonic()
        self._waiting.append(claim)

    def _charge(self) -> float:
        """Set the holder's clock; returns it."""
        assert self._holder is not None
        clock = self._clocks[self._holder] = self._clock + time.monotonic() - self._since
        return clock

    def _hand_over(self) -> None:
        if not self._waiting:
            self._holder = None
            return
        claim = min(self._waiting, key=lambda claim: claim.clock)  # of equals, the one that came first
        self._waiting.remove(claim)
        self._grant(claim)
        claim.lock.release()

    def _grant(self, claim: Claim) -> None:
        self._holder, self._clock, self._since = claim.thread, claim.clock, time.monotonic()
        self._clocks = {thread: clock for thread, clock in self._clocks.items() if clock > claim.clock}

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
