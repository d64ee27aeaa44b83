"""A Gaussian with full covariance over one tensor: q of FCG-U (over V) and FCG-W (over W)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.numerics.parameters import Free, Positive
from dubito.models.posteriors.entry import Option, is_count
from dubito.models.posteriors.mean_field import FLOOR
from dubito.models.posteriors.protocol import Value

# entries of the tensor: the covariance is its square (1024: 2 MB of triangle a layer, M = 32)
COVARIANCE_LIMIT = Option(1024, "a whole number from 1", is_count)


@dataclass(frozen=True)
class FrozenFullCovariance(Value):
    """Of one tensor, or of several that are independent of each other, stacked."""

    centre: Tensor  # (..., *shape)
    root: Tensor  # (..., n, n)  lower triangular, root rootᵀ = covariance of the flattened tensor
    members: int = 0

    @property
    def normals(self) -> int:
        return self.root.shape[:-1].numel()

    def mean(self, member: Tensor | None) -> Tensor:
        return self.centre[None]

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        rows = noise.view(-1, *self.root.shape[:-1]).movedim(0, -2)  # (..., K, n)
        return self.centre + (rows @ self.root.mT).movedim(-2, 0).reshape(-1, *self.centre.shape)


class FullCovariance(nn.Module):
    """The root is diag(spread) times a unit lower triangle with its rows scaled to length one.

    So `spread` is the standard deviation of each entry, which the cap bounds, and the triangle holds the correlations.
    """

    def __init__(self, centre: Tensor, std: float, sigma_max: float | None) -> None:
        super().__init__()
        n = centre.numel()
        self.centre = Free(centre)
        self.spread = Positive(torch.full((n,), std, dtype=centre.dtype, device=centre.device), FLOOR, sigma_max)
        self.below = nn.Parameter(torch.zeros(n * (n - 1) // 2, dtype=centre.dtype, device=centre.device))

    def freeze(self) -> FrozenFullCovariance:
        return FrozenFullCovariance(self.centre(), self.spread()[..., None] * self._correlation())

    @classmethod
    def freeze_together(cls, laws: Sequence[Self]) -> FrozenFullCovariance:
        frozen = [law.freeze() for law in laws]
        return FrozenFullCovariance(torch.stack([q.centre for q in frozen]), torch.stack([q.root for q in frozen]))

    def kl(self, prior: float) -> Tensor:
        m: Tensor = self.centre() / prior
        s: Tensor = self.spread() / prior
        log_det = s.log().sum() + self._correlation().diagonal(dim1=-2, dim2=-1).log().sum()
        return (m.square().sum() + s.square().sum() - s.numel()) / 2 - log_det

    @classmethod
    def kl_together(cls, laws: Sequence[Self], prior: float) -> Tensor:
        return torch.stack([law.kl(prior) for law in laws]).sum()

    def _correlation(self) -> Tensor:
        return correlation(self.below, self.spread.raw.shape[-1])


class BlockCovariance(FullCovariance):
    """The same for each of several vectors (blocks, n) that are independent of each other."""

    def __init__(self, centre: Tensor, std: float) -> None:
        nn.Module.__init__(self)
        blocks, n = centre.shape
        self.centre = Free(centre)
        self.spread = Positive(centre.new_full(centre.shape, std), FLOOR)
        self.below = nn.Parameter(centre.new_zeros(blocks, n * (n - 1) // 2))


def correlation(below: Tensor, n: int) -> Tensor:
    """A root of a correlation matrix from the entries below its diagonal: (..., n(n − 1)/2) -> (..., n, n)."""
    rows, columns = torch.tril_indices(n, n, offset=-1, device=below.device)
    unit = torch.eye(n, dtype=below.dtype, device=below.device).expand(*below.shape[:-1], n, n).flatten(-2)
    unit = unit.index_copy(-1, rows * n + columns, below).unflatten(-1, (n, n))
    length: Tensor = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    root: Tensor = unit / length
    return root


def check_limit(entries: int, limit: int, advice: str) -> None:
    """Refuse a covariance beyond the limit; `advice` names what would fit."""
    if entries > limit:
        raise ConversionError(
            f"a full covariance over {entries:,} entries is {entries:,} × {entries:,}; "
            f"the limit is {limit:,} entries (option covariance_limit). {advice}"
        )
