"""A queue that serves clients in turn, each in the order in which it came."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Many threads may add, one may take. A client that has queued much waits for itself, not others for it."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # by client, the next one first; none is empty
        self._lock = threading.Lock()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter([item for line in self._lines.values() for item in line])

    @property
    def clients(self) -> int:
        """Clients with something queued."""
        return len(self._lines)

    def append(self, client: str, item: T) -> None:
        with self._lock:
            self._lines.setdefault(client, deque()).append(item)
            self._length += 1

    def first(self) -> T | None:
        """The item that `pop` takes."""
        with self._lock:
            return next(iter(self._lines.values()))[0] if self._lines else None

    def pop(self) -> T | None:
        """Take the first item of the client whose turn it is; the next turn is another client's."""
        with self._lock:
            if not self._lines:
                return None
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            self._length -= 1
            item = line.popleft()
            if line:
                self._lines[client] = line
            return item

    def put_back(self, client: str, item: T) -> None:
        """Make an item that was taken its client's first again."""
        with self._lock:
            self._lines.setdefault(client, deque()).appendleft(item)
            self._length += 1

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()
            self._length = 0
