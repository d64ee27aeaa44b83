"""Posterior draws made ahead of the requests: a few seeds, each with the weights of its first K draws.

A request without a seed is answered with one of these seeds. A request that names that seed gets the same answer.
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
from dubito.models.posteriors.functions import Functions
from dubito.models.posteriors.protocol import Operand
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import SEED_BITS

log = logging.getLogger("dubito")


@dataclass
class SeedDraws:
    """The weights of the first draws of one seed."""

    seed: int
    stock: Stock
    used: float | None = None  # time of its first use


class Bank:
    """`sets` seeds with `samples` draws each; none is used for longer than `seconds`."""

    def __init__(self, model: Model, sets: int, samples: int, seconds: float) -> None:
        self.model, self.samples, self.seconds = model, samples, seconds
        self.sets = [self._draw() for _ in range(sets)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="bank", daemon=True)
        self._thread.start()

    def take(self, most: int) -> SeedDraws | None:
        """One of the seeds at random; None where it has fewer than `most` draws."""
        if most > self.samples:
            return None
        index = random.randrange(len(self.sets))
        chosen, now = self.sets[index], time.monotonic()
        if chosen.used is None:
            chosen.used = now
        elif now - chosen.used > self.seconds:  # the background thread is late: this request waits for new draws
            chosen = self.sets[index] = self._draw()
            chosen.used = now
        return chosen

    @property
    def bytes(self) -> int:
        """Bytes of the draws; tensors that all draws share count as factors."""
        return sum(bytes_of_draws(one.stock) for one in self.sets)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread; it is `alive` until its current draw is done."""
        self._stop.set()

    def _refresh(self) -> None:
        """Background thread: replaces each used set after at most half of `seconds`."""
        pause = self.seconds / (2 * len(self.sets))
        index = 0
        while not self._stop.wait(pause):
            if self.sets[index].used is not None:
                try:
                    self.sets[index] = self._draw()
                except Exception:  # out of memory, for example; the next request draws, or fails with its own error
                    log.exception("the bank could not be refreshed")
            index = (index + 1) % len(self.sets)

    def _draw(self) -> SeedDraws:
        seed = randbits(SEED_BITS)
        return SeedDraws(seed, drawn(self.model, self.samples, seed))


@torch.inference_mode()
def drawn(model: Model, K: int, seed: int) -> Stock:
    """The weights of the seed's first K draws, by layer."""
    noise = Normals(seed, model.device).rows(K, model.factors.normals)
    return model.factors.stock(model.network, Draws(K, noise, seed))


def bytes_of_draws(stock: Stock) -> int:
    """Bytes of the tensors that each draw has of its own."""
    return sum(part.nbytes for operand in stock.values() for part in _own(operand))


def bytes_of_sample(model: Model) -> int:
    """Bytes of the normals and weights of one draw of the whole network."""
    factors = model.factors
    return bytes_of_draws(drawn(model, 1, 0)) + 4 * factors.normals if factors.random else 0


def _own(operand: Operand) -> list[Tensor]:
    if isinstance(operand, Functions):
        return operand.own
    parts = [getattr(operand, name, None) for name in ("W", "G", "e", "g", "bias")]
    return [part for part in parts if part is not None]
