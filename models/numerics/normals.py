"""Standard normals from a seed: one row per draw, the same rows however many are generated at a time."""

from functools import cache, cached_property
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from dubito.models.numerics.normals_native import NativeGenerator, generator


class Normals:
    """The normals of one seed on one device. They do not depend on how K is divided into calls: a row is one call of
    the generator or, on a GPU with triton, a function of its index.

    On a CPU the generator is numpy's SFC64, more than twice as fast as torch's own: with the exact law of the λ-noise,
    a prediction spends most of its time on drawing normals. A server computes the same numbers by compiled code.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._given = 0  # number of rows generated so far

    @cached_property
    def _numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(self.seed))

    @cached_property
    def _native(self) -> NativeGenerator | None:
        return generator(self.seed)

    @cached_property
    def _torch(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def skip(self, K: int) -> None:
        """Count K rows that were generated elsewhere, by their indices."""
        self._given += K

    def rows(self, K: int, n: int) -> Tensor:
        noise = torch.empty(K, n, device=self.device)
        if counted(self.device):
            from dubito.models.numerics.normals_kernel import fill

            key = torch.tensor([self.seed, self._given], device=self.device)
            self.skip(K)
            return fill(noise, key)
        if self.device.type == "cpu":
            array = noise.numpy()
            if self._native is not None:
                self._native.fill(array)
            else:
                self._numpy.standard_normal(out=array, dtype=np.float32)
            return noise
        for row in noise:
            row.normal_(generator=self._torch)
        return noise


@cache
def counted(device: torch.device) -> bool:
    """Whether a row is a function of its index: on a GPU with triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def normals(like: Tensor, *shape: int, divisor: float = 1.0) -> Tensor:
    """Normals over `divisor` for initial values, by torch's global generator; empty on the meta device."""
    empty = like.new_empty(shape)
    return empty if empty.is_meta else empty.normal_().div_(divisor)
