"""A weight matrix of square blocks S_1 H diag(g) H S_2 [Rossi20], which can act on inputs without being formed."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models.numerics.hadamard import transform


@dataclass(frozen=True)
class Grid:
    """How W (d_out × d_in) is made of D × D blocks: `rows` times `columns` of them, what stands over is discarded.

    A single row or column of weights is folded: the rows of its blocks, one after the other, are its entries. With
    `fold`, each row of any W is, into blocks of its own.
    """

    d_out: int
    d_in: int
    D: int
    fold: bool = False

    @property
    def folded(self) -> bool:
        return self.fold or 1 in (self.d_out, self.d_in)

    @property
    def strips(self) -> tuple[int, int]:
        """How many rows or columns are folded, and how many weights each has."""
        return (self.d_out, self.d_in) if self.fold else (1, self.d_out * self.d_in)

    @property
    def rows(self) -> int:
        strips, n = self.strips
        return strips * -(-n // self.D**2) if self.folded else -(-self.d_out // self.D)

    @property
    def columns(self) -> int:
        return 1 if self.folded else -(-self.d_in // self.D)

    @property
    def scales(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of S_1 and S_2, without the entries that are discarded."""
        if self.folded:
            strips, n = self.strips
            return (1, self.rows * self.D if strips > 1 else -(-n // self.D)), (self.rows, self.D)
        return (self.columns, self.d_out), (self.rows, self.d_in)

    def spread_rows(self, S_1: Tensor) -> Tensor:
        """S_1 by block, zero where W has no row: (columns, d_out) -> (rows, columns, D)."""
        padded = F.pad(S_1, (0, self.rows * self.D - S_1.shape[1]))
        return padded.view(self.columns, self.rows, self.D).transpose(0, 1)

    def spread_columns(self, S_2: Tensor) -> Tensor:
        """S_2 by block, zero where W has no column: (rows, d_in) -> (rows, columns, D)."""
        return F.pad(S_2, (0, self.columns * self.D - S_2.shape[1])).view(self.rows, self.columns, self.D)

    def cut(self, W: Tensor) -> Tensor:
        """A matrix as the blocks that it would be made of: (d_out, d_in) -> (rows, columns, D, D), zeros beyond it."""
        D = self.D
        if self.folded:
            strips, n = self.strips
            return F.pad(W.reshape(strips, n), (0, self.rows // strips * D * D - n)).view(self.rows, 1, D, D)
        padded = F.pad(W, (0, self.columns * D - self.d_in, 0, self.rows * D - self.d_out))
        return padded.view(self.rows, D, self.columns, D).transpose(1, 2)


def side(d_out: int, d_in: int, fold: bool = False) -> int:
    """D where none is asked for: the power of two at or above the shorter side, which costs the fewest operations.

    A row or column of n weights that is folded becomes one square, so there it is the one at or above √n.
    """
    if fold:
        d_out = 1
    shorter = min(d_out, d_in)
    if shorter == 1:
        shorter = math.isqrt(d_out * d_in - 1) + 1
    return 1 << (shorter - 1).bit_length()


@dataclass(frozen=True)
class Blocks:
    """K weight matrices of one grid that differ in g alone; one g stands for all K where it has length 1."""

    grid: Grid
    S_1: Tensor  # (rows, columns, D)
    S_2: Tensor  # (rows, columns, D)
    g: Tensor  # (K or 1, rows, columns, D)
    bias: Tensor | None  # (K or 1, d_out)

    def apply(self, x: Tensor) -> Tensor:
        """W x for vectors of the last axis, W never formed: (K, n, d_in) -> (K, n, d_out)."""
        S_1, S_2, g = (t.to(x.dtype) for t in (self.S_1, self.S_2, self.g))
        grid = self.grid
        x = F.pad(x, (0, grid.columns * grid.D - grid.d_in)).unflatten(-1, (1, grid.columns, grid.D))
        x = transform(x * S_2) * g[:, None]
        y = (transform(x) * S_1).sum(-2) if grid.columns > 1 else (transform(x) * S_1).squeeze(-2)
        y = y.flatten(-2)[..., : grid.d_out]
        return y if self.bias is None else y + self.bias[:, None].to(x.dtype)

    def formed_is_faster(self, n: int, device: torch.device) -> bool:
        """Whether a draw that acts on n vectors takes less time with W formed first.

        Two transforms of each vector, for each row of blocks, move more memory than a product with W does. On a GPU
        that decides as soon as there are more vectors than a block has columns, and on a CPU for small blocks only.
        """
        return n > self.grid.D if device.type == "cuda" else n > 4 * self.grid.D and self.grid.D <= 128

    def part(self, offset: int, k: int) -> "Blocks":
        """The k draws that start at `offset`."""
        g, bias = (t if t is None or len(t) == 1 else t[offset : offset + k] for t in (self.g, self.bias))
        assert g is not None
        return replace(self, g=g, bias=bias)

    def dense(self) -> Tensor:
        """The matrices themselves, the bias as their last column: (K, d_out, d_in)."""
        W = weights(self.grid, self.S_1, self.S_2, self.g)
        return W if self.bias is None else torch.cat([W, self.bias[..., None].expand(len(W), -1, -1)], -1)


def weights(grid: Grid, S_1: Tensor, S_2: Tensor, g: Tensor) -> Tensor:
    """W = S_1 H diag(g) H S_2 block by block: (K, rows, columns, D) -> (K, d_out, d_in)."""
    D = grid.D
    right = transform(torch.diag_embed(S_2))  # H S_2, transposed: (rows, columns, D, D), column j's transform in row j
    W = transform(right * g[..., None, :]).mT * S_1[..., None]  # (K, rows, columns, D, D)
    if grid.folded:
        strips, n = grid.strips
        return W.reshape(len(W), strips, -1)[..., :n].reshape(-1, grid.d_out, grid.d_in)
    W = W.transpose(2, 3).reshape(-1, grid.rows * D, grid.columns * D)
    return W[:, : grid.d_out, : grid.d_in]
