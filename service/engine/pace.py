"""How long work will take, from the batches seen lately: seconds of a batch = a + b · work, by least squares."""

import math

MEMORY = 0.95  # what a batch still counts when the next one has come


class Pace:
    """A batch costs something however small it is, so small ones alone say nothing about what a full one takes."""

    def __init__(self) -> None:
        self.n = self.work = self.seconds = self.work2 = self.both = 0.0  # sums, the newest batch counting most
        self.a = self.b = 0.0

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
        """Seconds for so much work in batches of at most `batch`; 0 where nothing is known."""
        return self.a * math.ceil(work / batch) + self.b * work
