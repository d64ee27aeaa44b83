"""Messages and progress bars on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


def remark(text: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True).print(text, highlight=False, markup=False)


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; the yielded function advances it by n."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda n: shown.advance(task, n)
