"""Where the time of a pass goes."""

import time

import torch


class Stopwatch:
    """Time since the last lap belongs to the stage that the lap names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}  # by stage

    def go_on(self) -> None:
        """The time since the last lap was spent on something else."""
        self._last = time.perf_counter()

    def lap(self, stage: str, wait: bool = False) -> None:
        """Add the time since the last call to a stage; a GPU's work counts for the first stage that waits for it."""
        if wait and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
