"""Lines and bars on stderr, while a command works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


def remark(text: str) -> None:
    """A line on stderr."""
    Console(stderr=True).print(text, highlight=False, markup=False)


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of long work, on stderr where that is a terminal; the function given advances it by n."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda n: shown.advance(task, n)
