"""Ctrl-C and SIGTERM as a wish to stop soon, so that a step is finished and a checkpoint written first."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Whether somebody has asked to stop; a second Ctrl-C does not wait."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if current_thread() is not main_thread():  # signals reach the main thread alone
        yield lambda: False
        return
    before = [signal.signal(number, note) for number in SIGNALS]
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
