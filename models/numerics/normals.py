"""Standard normals from a seed: one row per draw, the same rows however many are generated at a time."""

from functools import cache, cached_property
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
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
        if self.device.type == "cpu":
            return self.parts(K, np.array([n])).view(K, n)
        noise = torch.empty(K, n, device=self.device)
        if counted(self.device):
            from dubito.models.numerics.normals_kernel import fill

            key = torch.tensor([self.seed, self._given], device=self.device)
            self.skip(K)
            return fill(noise, key)
        for row in noise:
            row.normal_(generator=self._torch)
        return noise

    def parts(self, K: int, sizes: NDArray[np.int64]) -> Tensor:
        """The same numbers on a CPU, a row in parts of these sizes: (K, size) of the first part, then of the second."""
        noise = torch.empty(K * int(sizes.sum()))
        array = noise.numpy()
        if self._native is not None:
            self._native.fill(array, K, sizes)
        elif len(sizes) == 1:
            self._numpy.standard_normal(out=array, dtype=np.float32)
        else:
            ends = np.cumsum(sizes)
            views = [array[K * (end - n) : K * end].reshape(K, n) for n, end in zip(sizes, ends, strict=True)]
            row = np.empty(int(ends[-1]), np.float32)
            for k in range(K):
                self._numpy.standard_normal(out=row, dtype=np.float32)
                for view, n, end in zip(views, sizes, ends, strict=True):
                    view[k] = row[end - n : end]
        return noise


@cache
def counted(device: torch.device) -> bool:
    """Whether a row is a function of its index: on a GPU with triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def normals(like: Tensor, *shape: int, divisor: float = 1.0) -> Tensor:
    """Normals over `divisor` for initial values, by torch's global generator; empty on the meta device."""
    empty = like.new_empty(shape)
    return empty if empty.is_meta else empty.normal_().div_(divisor)
