"""Spoiled copies of inputs, which replace OOD data where there is none."""

from collections.abc import Iterator

import torch
from torch import Tensor

SPOILED = 1000  # inputs that are spoiled, at most


def to_spoil(x: Tensor, rng: torch.Generator) -> Tensor:
    """At most `SPOILED` inputs, at random."""
    return x[torch.randperm(len(x), generator=rng)[:SPOILED]]


def spoil(x: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
    """Spoiled copies of inputs (N, …), which keep the values and lose the structure of the data, one per kind.

    The numbers of each input in another order (the same for all inputs); half of them, or two quarters of a picture,
    from another input; uniform noise over the range of the values; the mean of two inputs, which is near to the data.
    """
    n, other = x[0].numel(), x[torch.randperm(len(x), generator=rng)]
    yield x.flatten(1)[:, torch.randperm(n, generator=rng)].view_as(x)
    yield torch.where(torch.rand(x.shape, generator=rng) < 0.5, x, other)
    if x.dim() == 4:
        h, w = x.shape[2] // 2, x.shape[3] // 2
        mixed = x.clone()
        mixed[:, :, :h, w:], mixed[:, :, h:, :w] = other[:, :, :h, w:], other[:, :, h:, :w]
        yield mixed.roll((h, w), (2, 3))
    low, high = x.flatten(1).double().aminmax(dim=0)
    noise = low + (high - low) * torch.rand(len(x), n, generator=rng, dtype=torch.float64)
    yield (noise if x.is_floating_point() else noise.round()).to(x.dtype).view_as(x)
    yield ((x.double() + other.double()) / 2).to(x.dtype)
