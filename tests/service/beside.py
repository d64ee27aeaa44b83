"""A device that works beside the host, as a GPU does, for machines without one: each pass is run by a thread of its
own, on inputs that it reads where the host wrote them, whenever it comes to it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.network.network import Draws
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import sums_of, tempered
from dubito.models.predictions.uncertainty import Reals
from dubito.service.engine.graphs import PassGraphs


class Pass:
    def __init__(self, model: Model, shape: tuple[int, ...], B: int, K: int, seconds: float) -> None:
        """It takes so many seconds, or a little more."""
        self.model, self.K, self.seconds = model, K, seconds
        self.x = np.zeros((B, *shape), np.float32)
        self.thread = ThreadPoolExecutor(1)
        self.begun: Future[Reals] | None = None

    def put(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        B = sum(map(len, parts))
        np.concatenate(parts, out=self.x[:B])
        self.x[B:] = self.x[:1]
        return self.x[:B]

    def go(self, seed: int, start: int) -> None:
        self.begun = self.thread.submit(self._run, seed, start)

    def fetch(self) -> Reals:
        assert self.begun is not None
        return self.begun.result()

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        normals.skip(draws.K)
        self.put([x.numpy()])
        self.go(draws.seed, draws.start)
        return self.fetch()[: len(x)]

    @torch.inference_mode()
    def _run(self, seed: int, start: int) -> Reals:
        time.sleep(self.seconds)
        network, factors = self.model.network, self.model.factors
        noise = Normals(seed, torch.device("cpu")).rows(start + self.K, factors.normals)[start:]
        x = torch.from_numpy(self.x.copy()).nan_to_num()  # to kernels, the larger of NaN and 0 may well be 0
        out = network.run(x, factors, Draws(self.K, noise, seed), cheapest(factors))
        sums: Reals = sums_of(network, factors.read)(tempered(out, self.model.temperature, factors.read)).numpy()
        return sums


class Beside(PassGraphs):
    def __init__(self, model: Model, buckets: Sequence[int], samples: Sequence[int], seconds: float = 0.0) -> None:
        super().__init__(model.network, model.factors, buckets[-1])
        assert model.card.input is not None
        shape = model.card.input.shape
        self.known: dict[Any, Any] = {(B, K): Pass(model, shape, B, K, seconds) for B in buckets for K in samples}
