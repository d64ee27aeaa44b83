"""Messages and progress bars on stderr; of a server, lines of its log."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

BETWEEN = 10.0  # seconds between two lines of progress
log = logging.getLogger("dubito")  # has handlers in a server, whose stderr is a log


def remark(text: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress and time left, on stderr: a bar, or if that is no terminal or a log, a line now and then.

    The yielded function advances it by n.
    """
    console = Console(stderr=True)
    live = console.is_terminal and not log.handlers
    say = log.info if log.handlers else remark
    began = said = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal said, done
        done += n
        shown.advance(task, n)
        now = time.monotonic()
        if not live and now - said >= BETWEEN and 0 < done < total:
            said, left = now, (now - began) / done * (total - done)
            say(f"{title}: {done / total:.0%}, {duration(left)} left")

    with Progress(console=console, transient=True, disable=not live) as shown:
        task = shown.add_task(title, total=total)
        yield advance


def duration(seconds: float) -> str:
    """A time in words, to two digits."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= 1.5 * length or length == 1:
            n = seconds / length
            shown = f"{n:.1f}".removesuffix(".0") if n < 10 and length >= 3600 else f"{n:.0f}"
            return f"{shown} {unit}{'' if shown == '1' else 's'}"
    raise AssertionError
