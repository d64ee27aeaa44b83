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

from dubito.models.network.network import Draws, Stock
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.protocol import Operand
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import SEED_BITS

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
        return sum(bytes_of_draws(one.stock) for one in self.sets)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """It is alive until what is being drawn is there."""
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
        seed = randbits(SEED_BITS)
        return Set(seed, drawn(self.model, self.samples, seed))


@torch.inference_mode()
def drawn(model: Model, K: int, seed: int) -> Stock:
    """The weights of the seed's first K samples."""
    noise = Normals(seed, model.device).rows(K, model.factors.normals)
    return model.factors.stock(model.network, Draws(K, noise, seed))


def bytes_of_draws(stock: Stock) -> int:
    """What samples have to themselves."""
    return sum(part.nbytes for operand in stock.values() for part in _own(operand))


def bytes_of_sample(model: Model) -> int:
    """Normals and weights of one sample of the whole network."""
    factors = model.factors
    return bytes_of_draws(drawn(model, 1, 0)) + 4 * factors.normals if factors.random else 0


def _own(operand: Operand) -> list[Tensor]:
    parts = [getattr(operand, name, None) for name in ("W", "G", "e", "g", "bias")]
    return [part for part in parts if part is not None]
