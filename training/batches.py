"""The batches of an epoch, in an order that follows from the seed; each rank gets its share of every batch."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.training.data import Examples
from dubito.training.ranks import Ranks

ON_DEVICE = 4 << 30  # bytes of examples kept on a GPU


@dataclass(frozen=True)
class Batches:
    train: Examples
    size: int  # examples of a batch, over all ranks
    seed: int
    device: torch.device
    augment: Callable[[Tensor], Tensor] | None
    ranks: Ranks

    def __post_init__(self) -> None:
        if self.augment is None and self.train.x.nbytes <= ON_DEVICE:
            here = Examples(self.train.x.to(self.device), self.train.y.to(self.device))
            object.__setattr__(self, "train", here)

    @property
    def examples(self) -> int:
        return len(self.train)

    def __len__(self) -> int:
        """Batches of an epoch; a last one too small to share (or for BatchNorm, which needs two) is left out."""
        full, rest = divmod(len(self.train), self.size)
        return max(1, full + (rest >= 2 * self.ranks.count))

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Inputs and targets of this rank, and their share of the whole batch, from batch `start` on."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed((self.seed << 32) + number))
        whole = order.split(self.size)[start : len(self)]
        mine = [which.tensor_split(self.ranks.count)[self.ranks.index] for which in whole]
        shares = [len(own) / len(which) for own, which in zip(mine, whole, strict=True)]
        if self.augment is None:
            mine = [own.to(self.train.x.device, non_blocking=True) for own in mine]
            pairs: Iterator[tuple[Tensor, Tensor]] = ((self.train.x[own], self.train.y[own]) for own in mine)
        else:
            workers = min(8, (os.cpu_count() or 1) - 1) if self.device.type == "cuda" else 0
            changed = _Augmented(self.train, self.augment, (self.seed << 32) + number * len(self.train))
            pairs = iter(DataLoader(changed, batch_sampler=[own.tolist() for own in mine], num_workers=workers))
        for (x, y), share in zip(pairs, shares, strict=True):
            yield x.to(self.device), y.to(self.device), share


class _Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Each picture is changed by draws of its own, which follow from the seed and its number, not from who draws."""

    def __init__(self, examples: Examples, augment: Callable[[Tensor], Tensor], seed: int) -> None:
        self.examples, self.augment, self.seed = examples, augment, seed

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + i)
            return self.augment(self.examples.x[i]), self.examples.y[i]
