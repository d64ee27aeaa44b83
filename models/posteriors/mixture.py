"""Equal mixtures of point masses: q of Ensemble-U (over V), Ensemble-W and plain networks (over W)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dubito.models.numerics.parameters import Free
from dubito.models.posteriors.protocol import Value


@dataclass(frozen=True)
class FrozenMixture(Value):
    points: Tensor  # (members, *shape)
    normals: int = 0

    @property
    def members(self) -> int:
        return len(self.points)

    def mean(self, member: Tensor | None) -> Tensor:
        assert member is not None
        if member.device == self.points.device:
            return self.points[member]
        return torch.stack([self.points[m] for m in member.tolist()])  # indexing would wait for the device

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        return self.mean(member)


class Mixture(nn.Module):
    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.points = Free(points)

    def freeze(self) -> FrozenMixture:
        return FrozenMixture(self.points())

    @classmethod
    def freeze_together(cls, laws: Sequence[Self]) -> FrozenMixture:
        return FrozenMixture(torch.stack([law.points() for law in laws], 1))

    def kl(self, prior: float) -> Tensor:
        return self.kl_together([self], prior)

    @classmethod
    def kl_together(cls, laws: Sequence[Self], prior: float) -> Tensor:
        """None: a point mass has no finite KL to a density, and the paper drops the term."""
        return laws[0].points.value.new_zeros(())
