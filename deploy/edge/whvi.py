"""Draws of WHVI layers in a graph."""

from torch import Tensor

from dubito.deploy.edge.blocks import BlockDraws, formed
from dubito.deploy.edge.draws import DenseDraws, Drawn, Sampler, array, law_draws, scaled
from dubito.deploy.edge.graph import Array, Graph
from dubito.models.posteriors.blocks import Grid
from dubito.models.posteriors.whvi import Whvi, WhviFactors


def write_whvi(s: Sampler, name: str, q: Whvi, f: WhviFactors, scale: Array) -> Drawn:
    g, grid = s.graph, f.grid
    drawn = law_draws(s, f.q_g, q.law, s.normals(f.q_g.normals, f"{name}:g"))
    g_of_all = g.reshape(drawn, (s.K, grid.rows, grid.columns, grid.D))
    bias = None if f.q_b is None else law_draws(s, f.q_b, q.bias, s.normals(f.q_b.normals, f"{name}:b"))
    if grid.folded:  # few rows or columns
        S_1, S_2 = (g.weights(array(t), least="fp16") for t in (f.S_1, f.S_2))
        return DenseDraws(scaled(g, formed(g, BlockDraws(grid, S_1, S_2, g_of_all, bias), s.K), scale))
    if bias is not None and (scale != 1).any():
        bias = g.mul(bias, g.constant(scale))
    return BlockDraws(grid, _spread_rows(g, grid, f.S_1, scale), _spread_columns(g, grid, f.S_2), g_of_all, bias)


def _spread_rows(g: Graph, grid: Grid, S_1: Tensor, scale: Array) -> str:
    """S_1 by block; the file stores only the entries for which W has rows."""
    kept = array(S_1).swapaxes(0, 1).reshape(grid.columns, -1)[:, : grid.d_out] * scale
    more = grid.rows * grid.D - grid.d_out
    padded = g.op("Pad", g.weights(kept, least="fp16"), g.constant([0, 0, 0, more]))
    return g.op("Transpose", g.reshape(padded, (grid.columns, grid.rows, grid.D)), perm=[1, 0, 2])


def _spread_columns(g: Graph, grid: Grid, S_2: Tensor) -> str:
    kept = array(S_2).reshape(grid.rows, -1)[:, : grid.d_in]
    padded = g.op("Pad", g.weights(kept, least="fp16"), g.constant([0, 0, 0, grid.columns * grid.D - grid.d_in]))
    return g.reshape(padded, (grid.rows, grid.columns, grid.D))
