"""The device's lock: threads that wait for it get it in the order in which they came, for times of about one length."""

import threading
import time
from collections import deque

RECENT = 1.0  # seconds for which a device counts as contended


class Turn:
    """A lock like `threading.Lock`, which would let a busy model take it again before one that waits wakes up.

    Who takes short turns may have several in a row, as long as they are no longer than the last turn of another. So
    nobody waits for more than one turn of each other model, or for as long as its own turn was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of all below
        self._held = False
        self._waiting: deque[threading.Lock] = deque()  # each released to hand over to its owner
        self._contended = -RECENT
        self._began = self._last = 0.0  # times at which the holder's turn began, and at which its part of it did
        self._longest = 0.0  # part of its turn
        self._before = 0.0  # seconds of the turn before it
        self._holder, self._since = 0, -RECENT  # the last thread that took it at once, and when

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        with self._lock:
            if not self._held:
                self._held, self._before = True, 0.0
                self._begin()
                self._pass_to(threading.get_ident())
                return True
            if not blocking:
                return False
            self._contended = time.monotonic()
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=timeout):
            return True
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return False
            return True  # handed over at the last moment

    def release(self) -> None:
        with self._lock:
            self._hand_over()

    def keep(self) -> bool:
        """Whether the holder goes on: nobody waits, or one more part leaves its turn no longer than the one before it.
        Else the lock is released."""
        with self._lock:
            if not self._waiting:
                self._before = 0.0
                self._begin()
                return True
            now = time.monotonic()
            self._longest, self._last = max(self._longest, now - self._last), now
            if now - self._began + self._longest <= self._before:
                return True
            self._hand_over()
            return False

    def yield_(self) -> None:
        """Let those who wait go first, by their holder."""
        if self._waiting and not self.keep():
            self.acquire()

    def locked(self) -> bool:
        return self._held

    @property
    def waiting(self) -> int:
        """Threads that wait."""
        return len(self._waiting)

    @property
    def contended(self) -> bool:
        """Somebody had to wait lately, or two took it in turns: then somebody may have to wait soon."""
        return time.monotonic() - self._contended < RECENT

    def _begin(self) -> None:
        self._began = self._last = time.monotonic()
        self._longest = 0.0

    def _pass_to(self, thread: int) -> None:
        now = time.monotonic()
        if thread != self._holder and now - self._since < RECENT:
            self._contended = now
        self._holder, self._since = thread, now

    def _hand_over(self) -> None:
        if self._waiting:
            self._before = time.monotonic() - self._began
            self._begin()
            self._waiting.popleft().release()
        else:
            self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
