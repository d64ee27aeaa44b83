"""Planar flows on a Gaussian [Rossi20, appendix C]: each adds û tanh(wᵀz + b) to z, and so bends the distribution."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models.numerics.normals import normals
from dubito.models.posteriors.protocol import Frozen, Value

KL_DRAWS = 8  # of the part of the KL that has no closed form, in each training step
MEAN_DRAWS = 1024  # of the mean, in pairs ±ε: what is linear in ε cancels


class Gaussian(Protocol):
    """What can be bent: a law with a closed-form KL."""

    def freeze(self) -> Frozen: ...

    def kl(self, prior: float) -> Tensor: ...


@dataclass(frozen=True)
class FrozenPlanar(Value):
    q_0: Frozen  # over (blocks, D)
    u: Tensor  # (flows, blocks, D)  û, which keeps every flow invertible
    w: Tensor  # (flows, blocks, D)
    b: Tensor  # (flows, blocks)
    members: int = 0

    @property
    def normals(self) -> int:
        return self.q_0.normals

    def mean(self, member: Tensor | None) -> Tensor:
        """Of draws from fixed normals, for it has no closed form; the flow of the base's mean would be another."""
        rng = torch.Generator().manual_seed(0)
        half = torch.randn(MEAN_DRAWS // 2, self.normals, generator=rng).to(self.u)
        return self.draw(torch.cat([half, -half]), None).mean(0, keepdim=True)

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        return self.bend(self.q_0.draw(noise, None))[0]

    def bend(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(K, blocks, D) through all flows, and the sum of their log-determinants (K,)."""
        log_det = z.new_zeros(len(z))
        for u, w, b in zip(self.u, self.w, self.b, strict=True):
            h = torch.tanh((z * w).sum(-1) + b)  # (K, blocks)
            log_det = log_det + torch.log1p((u * w).sum(-1) * (1 - h.square())).sum(-1)
            z = z + u * h[..., None]
        return z, log_det


class Planar(nn.Module):
    """Flows of its own for each block's vector; at the start they change nothing."""

    def __init__(self, law: nn.Module, flows: int, like: Tensor) -> None:
        super().__init__()
        self.law = law
        w = normals(like, flows, *like.shape, divisor=math.sqrt(like.shape[-1]))
        self.w = nn.Parameter(w)
        self.u = nn.Parameter(math.log(math.e - 1) * w / w.square().sum(-1, keepdim=True))  # where û is 0
        self.b = nn.Parameter(like.new_zeros(flows, *like.shape[:-1]))

    @property
    def q_0(self) -> Gaussian:
        return self.law  # type: ignore[return-value]  # nn.Module by type, a Gaussian by construction

    def freeze(self) -> FrozenPlanar:
        """û = u + (m(wᵀu) − wᵀu) w/‖w‖² with m(a) = −1 + softplus(a), so that wᵀû > −1."""
        along = (self.w * self.u).sum(-1, keepdim=True)
        size = self.w.square().sum(-1, keepdim=True).clamp(min=1e-12)
        u = self.u + (F.softplus(along) - 1 - along) * self.w / size
        return FrozenPlanar(self.q_0.freeze(), u, self.w, self.b)

    def kl(self, prior: float) -> Tensor:
        """KL of the base in closed form, and what the flows change of it (eq. 12), as a mean over a few draws."""
        q = self.freeze()
        z = q.q_0.draw(torch.randn(KL_DRAWS, q.normals, dtype=q.dtype, device=self.u.device), None)
        bent, log_det = q.bend(z)
        further = (bent.square() - z.square()).sum((-2, -1)) / (2 * prior**2) - log_det
        return self.q_0.kl(prior) + further.mean()
