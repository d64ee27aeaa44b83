"""Work of a GPU side by side: kernels too small, or of too uneven parts, to fill it one after the other."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def begin(runs: Sequence[Callable[[], T]], device: torch.device) -> list[Callable[[], T]]:
    """All are begun now, each on a stream of its own; whoever calls for one makes the current stream wait for it.

    Where this is captured, each must be called for before the capture ends. What they make is not overwritten while the
    current stream uses it: the next to begin waits for what was asked of that stream before.
    """
    here = torch.cuda.current_stream(device)
    return [_begun(run, here, stream(device, i)) for i, run in enumerate(runs)]


def _begun(run: Callable[[], T], here: torch.cuda.Stream, side: torch.cuda.Stream) -> Callable[[], T]:
    side.wait_stream(here)
    with torch.cuda.stream(side):
        made = run()
        done = side.record_event()

    @cache
    def wait() -> T:
        here.wait_event(done)
        return made

    return wait


@cache
def stream(device: torch.device, name: int | str) -> torch.cuda.Stream:
    """The same ones each time: libraries keep memory for each that they have worked on, and never give it back."""
    return torch.cuda.Stream(device)
