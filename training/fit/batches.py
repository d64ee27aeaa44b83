"""Batches of an epoch, in an order given by the seed; each rank gets its share of every batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.training.config import RecipeError
from dubito.training.data.data import Examples
from dubito.training.fit.ranks import Ranks
from dubito.training.seeds import sow, stream

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
        smallest = min(self.size, len(self.train))
        if smallest < self.ranks.count:
            raise RecipeError(
                f"a batch of {smallest} (fit.batch is {self.size}, and there are {len(self.train)} training examples) "
                f"cannot be shared by {self.ranks.count} processes; expected one example for each at least."
            )
        if self.train.x.nbytes <= ON_DEVICE:
            on_device = Examples(self.train.x.to(self.device), self.train.y.to(self.device))
            object.__setattr__(self, "train", on_device)

    @property
    def examples(self) -> int:
        return len(self.train)

    def __len__(self) -> int:
        """Number of batches per epoch, without a last one that is too small (BatchNorm needs two examples per rank)."""
        full, rest = divmod(len(self.train), self.size)
        return max(1, full + (rest >= 2 * self.ranks.count))

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This rank's inputs and targets, and their share of the whole batch, from batch `start` on."""
        rng = torch.Generator().manual_seed(stream(self.seed, "order", number))
        order = torch.randperm(len(self.train), generator=rng).to(self.train.x.device)
        for i, which in enumerate(order.split(self.size)[: len(self)]):
            if i < start:
                continue
            mine = which.tensor_split(self.ranks.count)[self.ranks.index]
            x, y = self.train.x[mine].to(self.device), self.train.y[mine].to(self.device)
            if self.augment is not None:
                sow(stream(self.seed, "augment", self.ranks.index, number, i), self.device)
                x = self.augment(x)
            yield x, y, len(mine) / len(which)
