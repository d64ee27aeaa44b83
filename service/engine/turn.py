"""The device's lock: models that wait for it get it in the order in which they came."""

import threading
import time
from collections import deque

RECENT = 1.0  # seconds for which a device counts as contended


class Turn:
    """A lock like `threading.Lock`, which would let a busy model take it again before one that waits wakes up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the two below
        self._held = False
        self._waiting: deque[threading.Lock] = deque()  # each released to hand over to its owner
        self._contended = -RECENT

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        with self._lock:
            if not self._held:
                self._held = True
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
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def yield_(self) -> None:
        """Let those who wait go first, by their holder."""
        if self._waiting:
            self.release()
            self.acquire()

    def locked(self) -> bool:
        return self._held

    @property
    def contended(self) -> bool:
        """Somebody had to wait lately."""
        return time.monotonic() - self._contended < RECENT

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
