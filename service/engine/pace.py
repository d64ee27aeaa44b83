"""How long batches take, and queued ones will: seconds of a batch = a + b · work, by least squares of recent ones."""

import copy
import math
import time
from collections.abc import Callable, Iterable

MEMORY = 0.95  # weight of a batch relative to the next one
MOST_RUNS = 4  # of what is timed, where no two agree
NEAR = 1.5  # times as long: two runs that agree
LONG = 0.5  # seconds after which what was timed twice is not run again


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    run()
    return clock() - began


def least_seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest run, once the two fastest agree: a machine may be busy, or stand still for a while."""
    times: list[float] = []
    while len(times) < 2 or (times[1] > NEAR * times[0] and len(times) < MOST_RUNS and sum(times) < LONG):
        times = sorted([*times, seconds_of(run, clock)])
    return times[0]


class Pace:
    """A batch has a fixed cost, so seconds per work of small batches would overestimate those of full ones."""

    def __init__(self, timed: Iterable[tuple[float, float]] = ()) -> None:
        """`timed`: work and seconds of batches."""
        self.n = self.work = self.seconds = self.work2 = self.both = 0.0  # exponentially weighted sums
        self.a = self.b = 0.0
        for work, seconds in timed:
            self.add(work, seconds)

    def add(self, work: float, seconds: float) -> None:
        self.n = MEMORY * self.n + 1
        self.work = MEMORY * self.work + work
        self.seconds = MEMORY * self.seconds + seconds
        self.work2 = MEMORY * self.work2 + work * work
        self.both = MEMORY * self.both + work * seconds
        w, t = self.work / self.n, self.seconds / self.n
        spread = self.work2 / self.n - w * w
        self.b = max(0.0, (self.both / self.n - w * t) / spread) if spread > 1e-6 * w * w else 0.0
        self.a = max(0.0, t - self.b * w)

    def of(self, work: float, batch: float) -> float:
        """Expected seconds for `work` in batches of at most `batch`; 0 before any batch was seen."""
        return self.a * math.ceil(work / batch) + self.b * work

    def work_in(self, seconds: float) -> float:
        """Work of a batch of about so many seconds, or of twice its fixed cost where that is more; infinite before any
        batch was seen. Where batches took the same time whatever their work, as much more as fits the seconds."""
        if self.b > 0:
            return max(seconds - self.a, self.a) / self.b
        return max(1.0, seconds * self.n / self.seconds) * self.work / self.n if self.seconds > 0 else math.inf

    def rows_of_a_draw(self, seconds: float, rows: int) -> float:
        """Rows that take as long as a draw does beside its rows; `seconds` is that of a draw with `rows` of them."""
        return max(0.0, seconds / self.b - rows) if self.b > 0 else 0.0

    def with_slope(self, b: float) -> "Pace":
        """The pace where a unit of work takes so long beside the fixed cost, which has it still."""
        other = copy.copy(self)
        other.b = b
        return other

    def without(self, work: float) -> "Pace":
        """The pace where each batch has so much work that was counted as fixed cost."""
        other = copy.copy(self)
        other.a = max(0.0, self.a - self.b * work)
        return other
