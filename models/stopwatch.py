"""Where the time of a pass goes."""

import time

import torch


class Stopwatch:
    """Time since the last lap belongs to the stage that the lap names; on a GPU the device's own time is taken."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks = [self._now()]
        self._stages: list[str] = []

    def lap(self, stage: str) -> None:
        self._marks.append(self._now())
        self._stages.append(stage)

    def _now(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """By stage. On a GPU this waits for the last lap."""
        found: dict[str, float] = {}
        for stage, before, after in zip(self._stages, self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                spent = after - before
            else:
                after.synchronize()  # type: ignore[union-attr]
                spent = before.elapsed_time(after) / 1000  # type: ignore[union-attr,arg-type]
            found[stage] = found.get(stage, 0.0) + spent
        return found
