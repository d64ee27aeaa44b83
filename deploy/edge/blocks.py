"""Blocks S_1 H diag(g) H S_2 in a graph, as in `models/posteriors/blocks.py`, without forming W or a large H.

H of D = a·b columns is the Kronecker product of H_a and H_b, each of about √D columns. Two products with these are
faster in a runtime than log₂ D rounds of sums and differences.
"""

import math
from dataclasses import dataclass

import torch

from dubito.deploy.edge.graph import Graph
from dubito.models.numerics.hadamard import matrix
from dubito.models.posteriors.blocks import Grid

WHOLE = 16  # columns of H up to which it is one constant


@dataclass(frozen=True)
class BlockDraws:
    """K weight matrices of one grid that differ only in g."""

    grid: Grid
    S_1: str  # (rows, columns, D)
    S_2: str  # (rows, columns, D)
    g: str  # (K, rows, columns, D)
    bias: str | None  # (K, d_out)


def on_rows(graph: Graph, blocks: BlockDraws, x: str, K: int, shared: bool) -> str:
    """W x for vectors along the last axis: (1 if all draws share x, else K; n, d_in) -> (K, n, d_out)."""
    grid, (a, b) = blocks.grid, _sides(blocks.grid.D)
    each = (grid.rows, grid.columns, a, b)
    turned = (grid.rows, grid.columns, b, a)  # between the two H, which saves a transposition

    def through(x: str, first: int, then: int) -> str:
        """H along the last two axes (…, then, first), which are swapped in the result."""
        x = graph.matmul(graph.reshape(x, (-1, first)), _matrix(graph, first))
        if then == 1:
            return x
        x = graph.op("Transpose", graph.reshape(x, (-1, then, first)), perm=[0, 2, 1])
        return graph.matmul(graph.reshape(x, (-1, then)), _matrix(graph, then))

    x = _padded(graph, x, 2, 3, grid.columns * grid.D - grid.d_in)
    x = graph.reshape(x, (1 if shared else K, -1, 1, grid.columns, a, b))
    x = through(graph.mul(x, graph.reshape(blocks.S_2, each)), b, a)
    g = graph.op("Transpose", graph.reshape(blocks.g, (K, 1, *each)), perm=[0, 1, 2, 3, 5, 4])
    x = graph.mul(graph.reshape(x, (1 if shared else K, -1, *turned)), g)
    y = graph.reshape(through(x, a, b), (K, -1, grid.rows, grid.columns, grid.D))
    y = _summed(graph, graph.mul(y, blocks.S_1), grid)
    y = _cut(graph, graph.reshape(y, (K, -1, grid.rows * grid.D)), 2, grid)
    return y if blocks.bias is None else graph.add(y, graph.reshape(blocks.bias, (K, 1, grid.d_out)))


def on_channels(graph: Graph, blocks: BlockDraws, x: str, K: int, shared: bool, places: int) -> str:
    """W x for vectors along the last axis but one: (B or K·B, d_in, positions) -> (K, B, d_out, positions)."""
    grid = blocks.grid
    each, (a, b) = (grid.rows, grid.columns, grid.D), _sides(grid.D)

    def through(x: str) -> str:
        x = graph.matmul(_matrix(graph, b), graph.reshape(x, (-1, b, places)))
        return x if a == 1 else graph.matmul(_matrix(graph, a), graph.reshape(x, (-1, a, b * places)))

    x = _padded(graph, x, 1, 3, grid.columns * grid.D - grid.d_in)
    x = graph.reshape(x, (1 if shared else K, -1, 1, grid.columns, grid.D, places))
    x = through(graph.mul(x, graph.reshape(blocks.S_2, (*each, 1))))
    x = graph.reshape(x, (1 if shared else K, -1, *each, places))
    x = through(graph.mul(x, graph.reshape(blocks.g, (K, 1, *each, 1))))
    y = graph.mul(graph.reshape(x, (K, -1, *each, places)), graph.reshape(blocks.S_1, (*each, 1)))
    y = graph.reshape(_summed(graph, y, grid), (K, -1, grid.rows * grid.D, places))
    y = _cut(graph, y, 2, grid)
    return y if blocks.bias is None else graph.add(y, graph.reshape(blocks.bias, (K, 1, grid.d_out, 1)))


def formed(graph: Graph, blocks: BlockDraws, K: int) -> str:
    """The matrices W, with the bias as their last column: (K, d_out, d_in)."""
    grid, D = blocks.grid, blocks.grid.D
    H, (a, b) = _matrix(graph, _sides(D)[1]), _sides(D)
    if a > 1:
        left, right = graph.reshape(_matrix(graph, a), (a, 1, a, 1)), graph.reshape(H, (1, b, 1, b))
        H = graph.reshape(graph.mul(left, right), (D, D))
    right = graph.mul(H, graph.reshape(blocks.S_2, (grid.rows, grid.columns, 1, D)))
    W = graph.matmul(H, graph.mul(graph.reshape(blocks.g, (K, grid.rows, grid.columns, D, 1)), right))
    W = graph.mul(W, graph.reshape(blocks.S_1, (grid.rows, grid.columns, D, 1)))
    if grid.folded:
        strips, n = grid.strips
        W = graph.part(graph.reshape(W, (K * strips, grid.rows // strips * D * D)), 1, 0, n)
        W = graph.reshape(W, (K, grid.d_out, grid.d_in))
    else:
        W = graph.op("Transpose", W, perm=[0, 1, 3, 2, 4])
        W = _cut(graph, graph.reshape(W, (K, grid.rows * D, grid.columns * D)), 1, grid)
        W = graph.part(W, 2, 0, grid.d_in)
    if blocks.bias is None:
        return W
    return graph.op("Concat", W, graph.reshape(blocks.bias, (K, grid.d_out, 1)), axis=2)


def _sides(D: int) -> tuple[int, int]:
    """a ≤ b with a·b = D; a = 1 if H is stored as one constant."""
    if D <= WHOLE:
        return 1, D
    a = 1 << (int(math.log2(D)) // 2)
    return a, D // a


def _matrix(graph: Graph, D: int) -> str:
    return graph.constant(matrix(D, torch.float32, torch.device("cpu")).numpy())


def _padded(graph: Graph, x: str, axis: int, rank: int, more: int) -> str:
    """x with zeros appended along an axis."""
    if more == 0:
        return x
    return graph.op("Pad", x, graph.constant([0] * rank + [more if i == axis else 0 for i in range(rank)]))


def _summed(graph: Graph, y: str, grid: Grid) -> str:
    """Sum over the columns of blocks, axis 3."""
    return y if grid.columns == 1 else graph.op("ReduceSum", y, graph.constant([3]), keepdims=0)


def _cut(graph: Graph, y: str, axis: int, grid: Grid) -> str:
    return y if grid.rows * grid.D == grid.d_out else graph.part(y, axis, 0, grid.d_out)
