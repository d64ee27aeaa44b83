"""A factorised Gaussian over one tensor: q of FFG-U (over V) and FFG-W (over W)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dubito.models.numerics.parameters import Free, Positive, in_a_row, together
from dubito.models.posteriors.protocol import Value

FLOOR = 1e-6  # of every standard deviation
V_STD = math.sqrt(1e-3)  # of q(V), or whatever small tensor decides W, at the start, where no spread is asked for
W_STD = 1e-4  # of q(W) at the start


@dataclass(frozen=True)
class FrozenMeanField(Value):
    centre: Tensor  # (*shape)
    spread: Tensor  # (*shape)  standard deviations
    members: int = 0

    @property
    def normals(self) -> int:
        return self.centre.numel()

    def mean(self, member: Tensor | None) -> Tensor:
        return self.centre[None]

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        return torch.addcmul(self.centre[None], self.spread[None], noise.view(-1, *self.centre.shape))


class MeanField(nn.Module):
    def __init__(self, centre: Tensor, std: float | Tensor, sigma_max: float | None) -> None:
        super().__init__()
        self.centre = Free(centre)
        spread = std if isinstance(std, Tensor) else centre.new_full(centre.shape, std)
        self.spread = Positive(spread, FLOOR, sigma_max)

    def freeze(self) -> FrozenMeanField:
        return FrozenMeanField(self.centre(), self.spread())

    @classmethod
    def freeze_together(cls, laws: Sequence[Self]) -> FrozenMeanField:
        centres, spreads = [law.centre() for law in laws], together([law.spread for law in laws])
        return FrozenMeanField(torch.stack(centres), torch.stack(spreads))

    def kl(self, prior: float) -> Tensor:
        return self.kl_together([self], prior)

    @classmethod
    def kl_together(cls, laws: Sequence[Self], prior: float) -> Tensor:
        """A pruned entry is a point mass at zero under both q and the prior, and adds nothing."""
        m = in_a_row([law.centre() for law in laws]) / prior
        s = in_a_row(together([law.spread for law in laws])) / prior
        terms = (m.square() + s.square() - 1) / 2 - s.clamp(min=torch.finfo(s.dtype).tiny).log()
        if any(law.spread.keep is not None for law in laws):
            terms = terms * (s > 0)
        return terms.sum()
