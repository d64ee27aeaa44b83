"""Ctrl-C and SIGTERM stop training after the current step, with a checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """A function that says whether a signal has come; a second signal interrupts at once."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    if current_thread() is not main_thread():  # only the main thread gets signals
        yield lambda: False
        return
    before = [signal.signal(number, note) for number in SIGNALS]
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
