"""Runs work on parallel CUDA streams, for kernels that do not fill the GPU one after the other."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def begin(runs: Sequence[Callable[[], T]], device: torch.device) -> list[Callable[[], T]]:
    """Start all runs, each on a stream of its own; the returned functions make the current stream wait for a result.

    In a capture, each must be called before the capture ends. Results are not overwritten while the current stream uses
    them: the next `begin` waits for all work queued on that stream before.
    """
    here = torch.cuda.current_stream(device)
    return [_begun(run, here, stream(device, i)) for i, run in enumerate(runs)]


def _begun(run: Callable[[], T], here: torch.cuda.Stream, side: torch.cuda.Stream) -> Callable[[], T]:
    side.wait_stream(here)
    with torch.cuda.stream(side):
        result = run()
        done = side.record_event()

    @cache
    def wait() -> T:
        here.wait_event(done)
        return result

    return wait


@cache
def stream(device: torch.device, name: int | str) -> torch.cuda.Stream:
    """A cached stream: libraries keep workspace for every stream that they have used, and never free it."""
    return torch.cuda.Stream(device)
