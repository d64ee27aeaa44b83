"""Messages and progress bars on stderr."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

BETWEEN = 20.0  # seconds between lines of progress, where there is no terminal


def remark(text: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True).print(text, highlight=False, markup=False)


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr, with the time left: a bar on a terminal, else a line now and then. The yielded function
    advances it by n."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title, total)
        return
    with Progress(console=console, transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda n: shown.advance(task, n)


def _lines(title: str, total: int) -> Callable[[int], None]:
    began = said = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, said
        done, now = done + n, time.monotonic()
        if now - said > BETWEEN and 0 < done < total:
            said = now
            remark(f"{title}: {done / total:.0%}, about {(now - began) * (total / done - 1):.0f} s left")

    return advance
