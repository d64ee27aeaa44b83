"""A factorised Gaussian over one tensor: q of FFG-U (over V) and FFG-W (over W)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.models.parameters import Free, Positive
from dubito.models.posterior import Value

FLOOR = 1e-6  # of every standard deviation


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
        return torch.addcmul(self.centre, self.spread, noise.view(-1, *self.centre.shape))


class MeanField(nn.Module):
    def __init__(self, centre: Tensor, std: float | Tensor, sigma_max: float | None) -> None:
        super().__init__()
        self.centre = Free(centre)
        self.spread = Positive(torch.zeros_like(centre) + std, FLOOR, sigma_max)

    def freeze(self) -> FrozenMeanField:
        return FrozenMeanField(self.centre(), self.spread())

    def kl(self, prior: float) -> Tensor:
        """A pruned entry is a point mass at zero under both q and the prior, and adds nothing."""
        m: Tensor = self.centre() / prior
        s: Tensor = self.spread() / prior
        terms = (m.square() + s.square() - 1) / 2 - s.clamp(min=torch.finfo(s.dtype).tiny).log()
        if self.spread.keep is not None:
            terms = terms * self.spread.keep
        return terms.sum()
