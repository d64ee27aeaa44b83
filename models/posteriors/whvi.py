"""Walsh–Hadamard variational inference [Rossi20]: W = S_1 H diag(g) H S_2 in square blocks, q over g alone.

The prior of g is N(0, I) here. The paper's is N(0, 1e-5 I) with larger scales, which gives the same law of W: only
S_1 S_2 std(g) counts. S_1 and S_2 start at ±(σ²D)^¼, so that each entry of W has the prior variance σ², and are free
numbers: nothing penalises them. A bias is a factorised Gaussian beside W, not a column of it: it would double D.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.models.numerics.hadamard import transform
from dubito.models.posteriors.blocks import Blocks, Grid
from dubito.models.posteriors.flows import Planar
from dubito.models.posteriors.full_covariance import BlockCovariance
from dubito.models.posteriors.mean_field import MeanField
from dubito.models.posteriors.protocol import Dense, Frozen, Value


@dataclass(frozen=True)
class WhviFactors(Value):
    """What a server keeps: O(D) numbers a block, and never W.

    `q_g` turns normals into g: for a Gaussian, `q_g.centre` is μ and `q_g.spread` (diagonal) or `q_g.root` is Σ^½.
    """

    grid: Grid
    S_1: Tensor  # (rows, columns, D)  zero beyond d_out
    S_2: Tensor  # (rows, columns, D)  zero beyond d_in
    q_g: Frozen  # over (rows · columns, D)
    q_b: Frozen | None  # over (d_out,): the bias
    members: int = 0

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int]:
        return self.q_g.normals, 0 if self.q_b is None else self.q_b.normals

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Dense | Blocks:
        return self._operand(self.q_g.mean(None), None if self.q_b is None else self.q_b.mean(None))

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense | Blocks:
        for_g, for_b = noise.split(self._parts(), dim=1)
        return self._operand(self.q_g.draw(for_g, None), None if self.q_b is None else self.q_b.draw(for_b, None))

    def _operand(self, g: Tensor, bias: Tensor | None) -> Dense | Blocks:
        """A folded matrix is one row or column, no longer than an input or output: that is formed."""
        blocks = Blocks(self.grid, self.S_1, self.S_2, g.view(-1, *self.S_1.shape), bias)
        return Dense(blocks.dense()) if self.grid.folded else blocks


class Whvi(nn.Module):
    def __init__(self, grid: Grid, law: nn.Module, bias: MeanField | None, sigma: float, like: Tensor) -> None:
        super().__init__()
        self.grid, self.sigma = grid, sigma
        start = math.sqrt(sigma * math.sqrt(grid.D))
        # with equal signs W would be symmetric, each of its rows the first one in another order
        self.S_1, self.S_2 = (nn.Parameter(start * signs(shape, like)) for shape in grid.scales)
        self.law = law  # over g, (rows · columns, D)
        self.bias = bias

    @property
    def q(self) -> MeanField | BlockCovariance | Planar:
        return self.law  # type: ignore[return-value]  # nn.Module by type, one of these by construction

    @torch.no_grad()
    def factors(self) -> WhviFactors:
        return self.trainable().settle()

    def trainable(self) -> WhviFactors:
        """The same law with gradients: W is not formed in training either."""
        S_1, S_2 = self.grid.spread_rows(self.S_1), self.grid.spread_columns(self.S_2)
        return WhviFactors(self.grid, S_1, S_2, self.q.freeze(), None if self.bias is None else self.bias.freeze())

    def kl(self, data_size: int | None = None) -> Tensor:
        return kl_together([self])


def kl_together(layers: Sequence[Whvi]) -> Tensor:
    """In closed form, but for flows; with few kernels."""
    priors: dict[float, list[MeanField]] = {}
    terms = []
    for layer in layers:
        if isinstance(layer.q, MeanField):
            priors.setdefault(1.0, []).append(layer.q)
        else:
            terms.append(layer.q.kl(1.0))
        if layer.bias is not None:
            priors.setdefault(layer.sigma, []).append(layer.bias)
    return torch.stack([*terms, *(MeanField.kl_together(laws, prior) for prior, laws in priors.items())]).sum()


def signs(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randint(2, shape, device=like.device).to(like.dtype) * 2 - 1


@torch.no_grad()
def nearest(q: Whvi, W: Tensor) -> Tensor:
    """The g whose W is nearest to this one (d_out × d_in, no bias) with S_1 and S_2 as they are: (rows · columns, D).

    Least squares: A of vec(W) = A g has AᵀA_lm = c(l xor m) with c = (H s_1²)(H s_2²)/D, which H diagonalises. Where
    a folded row ends within a row of its block, the rest of that counts as zeros.
    """
    grid, D = q.grid, q.grid.D
    S_1, S_2 = grid.spread_rows(q.S_1).double(), grid.spread_columns(q.S_2).double()
    cut = grid.cut(W.double()) * S_1[..., None] * S_2[..., None, :]
    target = transform(transform(cut).mT).diagonal(dim1=-2, dim2=-1)  # Aᵀ vec(W)
    values = transform(transform(S_1.square()) * transform(S_2.square())) / math.sqrt(D)  # eigenvalues of AᵀA
    known = values > 1e-9 * values.amax(-1, keepdim=True)
    g = transform(torch.where(known, transform(target) / torch.where(known, values, 1.0), 0.0))
    return g.flatten(0, 1).to(W.dtype)
