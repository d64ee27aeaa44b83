"""Posteriors over W itself: FFG-W, FCG-W and Ensemble-W."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dubito.models.posteriors.protocol import Dense, Frozen, Law, Value


@dataclass(frozen=True)
class WeightFactors(Value):
    q_W: Frozen

    @property
    def normals(self) -> int:
        return self.q_W.normals

    @property
    def members(self) -> int:
        return self.q_W.members

    def narrow(self, dtype: torch.dtype) -> "WeightFactors":
        """Members are picked, not computed with: rounded ahead they give the same."""
        return replace(self, q_W=self.q_W.to(dtype=dtype)) if self.q_W.normals == 0 else self

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Dense:
        return Dense(self.q_W.mean(member))

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense:
        return Dense(self.q_W.draw(noise, member))


class WeightSpace(nn.Module):
    """q(W) given outright, against the prior N(0, σ²) per entry."""

    def __init__(self, law: Law, sigma: float) -> None:
        super().__init__()
        self.law = law
        self.sigma = sigma

    @torch.no_grad()
    def factors(self) -> WeightFactors:
        return self.trainable().settle()

    def trainable(self) -> WeightFactors:
        return WeightFactors(self.law.freeze())

    def kl(self, data_size: int | None = None) -> Tensor:
        return self.law.kl(self.sigma)
