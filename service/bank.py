"""Draws made ahead of the requests: a few seeds, each with the weights of its first samples.

A request that names no seed is answered with one of these seeds; asked for by name, the seed gives the same answer.
"""

import logging
import random
import threading
import time
from dataclasses import dataclass
from secrets import randbits

import torch
from torch import Tensor

from dubito.models.model import Model
from dubito.models.network import Draws, Stock
from dubito.models.normals import Normals
from dubito.models.posterior import Operand
from dubito.models.prediction import SEED_BITS

log = logging.getLogger("dubito")


@dataclass
class Set:
    """The first samples of one seed."""

    seed: int
    stock: Stock
    used: float | None = None  # since when


class Bank:
    """`sets` seeds of `samples` each; none is used for longer than `seconds`."""

    def __init__(self, model: Model, sets: int, samples: int, seconds: float) -> None:
        self.model, self.samples, self.seconds = model, samples, seconds
        self.sets = [self._draw() for _ in range(sets)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="bank", daemon=True)
        self._thread.start()

    def take(self, most: int) -> Set | None:
        """Any of them; None where so many draws were not made ahead."""
        if most > self.samples:
            return None
        at = random.randrange(len(self.sets))
        chosen, now = self.sets[at], time.monotonic()
        if chosen.used is None:
            chosen.used = now
        elif now - chosen.used > self.seconds:  # the thread is behind: whoever asks waits for new ones
            chosen = self.sets[at] = self._draw()
            chosen.used = now
        return chosen

    @property
    def bytes(self) -> int:
        """Of the weights; what all samples share counts with the factors."""
        return sum(t.nbytes for one in self.sets for operand in one.stock.values() for t in _own(operand))

    def close(self) -> None:
        self._stop.set()

    def _refresh(self) -> None:
        """In the background: each set that is in use is replaced well before its time."""
        pause = self.seconds / (2 * len(self.sets))
        at = 0
        while not self._stop.wait(pause):
            if self.sets[at].used is not None:
                try:
                    self.sets[at] = self._draw()
                except Exception:  # out of memory, say; whoever asks next will draw, or fail aloud
                    log.exception("the bank could not be refreshed")
            at = (at + 1) % len(self.sets)

    def _draw(self) -> Set:
        model, seed = self.model, randbits(SEED_BITS)
        with torch.inference_mode():
            noise = Normals(seed, model.device).rows(self.samples, model.factors.normals)
            run = model.network.arrange(model.factors, Draws(self.samples, noise, seed), {})
            return Set(seed, {layer: make() for layer, make in run.operands.items()})


def _own(operand: Operand) -> list[Tensor]:
    """What a sample has to itself."""
    parts = [getattr(operand, name, None) for name in ("W", "G", "e", "g", "bias")]
    return [part for part in parts if part is not None]
