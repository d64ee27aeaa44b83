"""K draws of a layer inside a graph: the constants that each posterior stores, and the operators that draw from it.

The same formulas as in `dubito.models`, with the same (K, normals) standard normals: with equal normals, graph and
torch give equal outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.deploy.edge.blocks import BlockDraws, formed
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array, Graph
from dubito.deploy.edge.noise import Noise
from dubito.deploy.edge.rotations import Rotations
from dubito.models.network.layers import BayesianLayer
from dubito.models.numerics.parameters import Free, Positive
from dubito.models.posteriors.blocks import Grid
from dubito.models.posteriors.dropout import DropoutFactors
from dubito.models.posteriors.flows import FrozenPlanar, Planar
from dubito.models.posteriors.full_covariance import FrozenFullCovariance
from dubito.models.posteriors.inducing import Inducing, InducingFactors
from dubito.models.posteriors.matheron import cholesky, regularise
from dubito.models.posteriors.mean_field import FrozenMeanField, MeanField
from dubito.models.posteriors.mixture import FrozenMixture
from dubito.models.posteriors.protocol import Factors, Frozen, Law
from dubito.models.posteriors.weight_space import WeightFactors, WeightSpace
from dubito.models.posteriors.whvi import Whvi, WhviFactors

HIERARCHY = "hierarchy"  # name of the hierarchy among the layers
SMALLEST_ROOT = 1e-3  # of √q or √p: a smaller one cannot be recovered from Z


@dataclass(frozen=True)
class DenseDraws:
    W: str  # (K, d_out, d_in)


@dataclass
class FactoredDraws:
    """W x = G Bᵀx + e ‖x − B Bᵀx‖, as in `dubito.models.posteriors.protocol`; without e, B need not be orthonormal.

    G = left (turn_r V turn_c + more) + s ∘ E: formed if it is applied at many positions, else applied by factors.
    """

    B_T: str  # (width, d_in)
    width: int
    left: str  # (d_out, r_out)
    V: str  # (K, M_out, M_in)
    turn_r: str | None = None  # (r_out, M_out)
    turn_c: str | None = None  # (M_in, width)
    more: str | None = None  # (K, r_out, width)
    E: str | None = None  # (K, d_out, width)
    s: str | None = None  # (d_out, 1)
    e: str | None = None  # (K, d_out, 1)
    _G: str | None = None

    def G(self, g: Graph) -> str:
        """G, (K, d_out, width), written to the graph once."""
        if self._G is None:
            inner = self.V if self.turn_r is None else g.matmul(self.turn_r, self.V)
            inner = inner if self.turn_c is None else g.matmul(inner, self.turn_c)
            G = g.matmul(self.left, inner if self.more is None else g.add(inner, self.more))
            self._G = G if self.E is None else g.add(G, self._scaled(g, self.E))
        return self._G

    def on(self, g: Graph, c: str) -> str:
        """G c for c (K or 1, B, width, positions), without forming G: (K, B, d_out, positions)."""

        def times(samples: str, vectors: str) -> str:
            return g.matmul(g.op("Unsqueeze", samples, g.constant([1])), vectors)

        y = times(self.V, c if self.turn_c is None else g.matmul(self.turn_c, c))
        y = y if self.turn_r is None else g.matmul(self.turn_r, y)
        out = g.matmul(self.left, y if self.more is None else g.add(y, times(self.more, c)))
        return out if self.E is None else g.add(out, self._scaled(g, times(self.E, c)))

    def _scaled(self, g: Graph, value: str) -> str:
        assert self.s is not None
        return g.mul(value, self.s)


@dataclass(frozen=True)
class MaskedDraws:
    W: str  # (d_out, d_in)
    mask: str  # (K, inputs)


Operand = DenseDraws | FactoredDraws | MaskedDraws | BlockDraws


class Sampler:
    """Shared by all layers of a graph: normals, order of the members, rotations."""

    def __init__(self, graph: Graph, K: int, seed: str | None) -> None:
        self.graph, self.K = graph, K
        self.noise = None if seed is None else Noise(graph, K, seed)
        self.rotations = Rotations()
        self.rotated: list[str] = []
        self.keys: str | None = None
        self._members: dict[int, str] = {}

    def normals(self, n: int, name: str) -> str:
        if n == 0:
            return ""
        assert self.noise is not None
        return self.noise.normals(n, name)

    def start_members(self, most: int) -> None:
        if most > 1:
            assert self.noise is not None
            self.keys = self.noise.keys(most, "member:keys")

    def member(self, E: int) -> str:
        """Member of each draw, (K,): the E members in an order given by the seed, repeated."""
        if E not in self._members:
            g, places = self.graph, np.arange(self.K) % E
            if E == 1 or self.keys is None:
                self._members[E] = g.constant(places)
            else:
                keys = g.part(self.keys, 0, 0, E)
                names = [g.name(), g.name()]
                order = g.ops("TopK", keys, g.constant([E]), outputs=names, largest=0, sorted=1)[1]
                self._members[E] = g.op("Gather", order, g.constant(places))
        return self._members[E]

    def rotation(self, Q: Tensor) -> tuple[str, Array]:
        name, signs = self.rotations.add(array(Q))
        self.rotated.append(name)
        return name, signs


def array(t: Tensor) -> Array:
    return t.detach().double().cpu().numpy()


def draw(s: Sampler, name: str, layer: BayesianLayer, factors: Factors, V: str | None, scale: Array) -> Operand:
    """K draws of a layer, its outputs scaled by `scale` (d_out,); V, if a hierarchy has drawn it."""
    for kind, write in WRITERS.items():
        if isinstance(factors, kind):
            return write(s, name, layer.posterior, factors, V, scale)
    raise ExportError(f"layer {name!r}: no export of {type(factors).__name__} is known.")


def _inducing(s: Sampler, name: str, q: Inducing, f: InducingFactors, V: str | None, scale: Array) -> Operand:
    g, K = s.graph, s.K
    if V is None:
        assert f.q_V is not None
        V = _draw_tensor(s, f.q_V, q.law, s.normals(f.normals_of_V, f"{name}:V"))
    rows = _Side(s, q.Z_r, q.D_r, f.matheron.Q_r, f.matheron.p)
    columns = _Side(s, q.Z_c, q.D_c, f.matheron.Q_c, f.matheron.q)
    if f.lam == 0:
        A_r = g.mul(g.op("Transpose", rows.A_T()), _times(g, f.sigma, scale))
        return FactoredDraws(columns.A_T(), len(q.Z_c.value), A_r, V)
    B_r_T, B_c_T = rows.B_T(f.matheron.B_r), columns.B_T(f.matheron.B_c)
    if f.noise == "exact":
        return DenseDraws(_exact_law(s, name, f, V, rows, columns, B_r_T, B_c_T, scale))
    p, t = array(f.matheron.p), array(f.matheron.q)
    d_out, r_out, r = len(f.matheron.B_r), len(p), len(t)
    R = f.B.shape[1] - r
    width, s_r = r + R, _times(g, f.lam * f.sigma, scale)
    draws = FactoredDraws(
        B_T=g.op("Concat", B_c_T, g.weights(array(f.B)[:, r:].T), axis=0) if R else B_c_T,
        width=width,
        left=g.mul(g.op("Transpose", B_r_T), _times(g, f.sigma, scale)),
        V=V,
        turn_r=g.op("Transpose", rows.turned()),
        turn_c=columns.turned(R),
        s=s_r,
    )
    lam = g.constant(f.lam)
    unknown = _unknown(g, p, np.concatenate([t, np.zeros(R)]))  # V decides nothing about columns beyond r
    if r_out == d_out:  # B_r is a rotation, which does not change the law of ε: B_rᵀε is drawn directly
        eta = g.reshape(s.normals(r_out * width, f"{name}:eta"), (K, r_out, width))
        draws.more = g.mul(g.mul(unknown, lam), eta)
    else:
        draws.E = g.reshape(s.normals(d_out * width, f"{name}:E"), (K, d_out, width))
        less = g.mul(g.op("Sub", unknown, g.constant(1.0)), lam)
        draws.more = g.mul(less, g.matmul(B_r_T, draws.E))
    if not f.spans:
        draws.e = g.mul(g.reshape(s.normals(d_out, f"{name}:e"), (K, d_out, 1)), s_r)
    return draws


def _times(g: Graph, number: float, scale: Array) -> str:
    """number · scale as a column; the vector is stored once."""
    return g.constant(number) if (scale == 1).all() else g.mul(g.constant(scale[:, None]), g.constant(number))


def _unknown(g: Graph, p: Array, q: Array) -> str:
    """√(1 − p qᵀ), from the two vectors."""
    known = g.mul(g.constant(p[:, None]), g.constant(q[None, :]))
    return g.op("Sqrt", g.op("Relu", g.op("Sub", g.constant(1.0), known)))


def _exact_law(
    s: Sampler,
    name: str,
    f: InducingFactors,
    V: str,
    rows: "_Side",
    columns: "_Side",
    B_r_T: str,
    B_c_T: str,
    scale: Array,
) -> str:
    """Draws by the exact law: W itself, (K, d_out, d_in)."""
    g, (d_out, d_in), (r_out, r_in) = s.graph, f.shape, f.matheron.known.shape
    E = g.reshape(s.normals(d_out * d_in, f"{name}:E"), (s.K, d_out, d_in))
    eps = g.reshape(s.normals(r_out * r_in, f"{name}:eps"), (s.K, r_out, r_in))
    decided = g.matmul(g.matmul(g.op("Transpose", rows.turned()), V), columns.turned())
    of_E = g.matmul(g.matmul(B_r_T, E), g.op("Transpose", B_c_T))
    unknown = _unknown(g, array(f.matheron.p), array(f.matheron.q))
    inner = g.add(decided, g.mul(g.op("Sub", g.mul(unknown, eps), of_E), g.constant(f.lam)))
    B_r = g.mul(g.op("Transpose", B_r_T), _times(g, f.sigma, scale))
    return g.add(g.matmul(g.matmul(B_r, inner), B_c_T), g.mul(E, _times(g, f.lam * f.sigma, scale)))


class _Side:
    """A and B of the rows or columns: stored directly, or as a pruned Z and the inverse of L."""

    def __init__(self, s: Sampler, Z: Free, D: Positive, Q: Tensor, q: Tensor) -> None:
        self.s, self.Q, self.root = s, Q, np.sqrt(array(q))
        self.Z = Z().detach().double().cpu()
        self.D = regularise(self.Z, D().detach().double().cpu())
        self.keep = None if Z.keep is None else Z.keep.cpu().numpy()
        self._turn: tuple[str, Array] | None = None

    def A_T(self) -> str:
        """Aᵀ, (M, d)."""
        inverse = self._inverse()
        if self._sparse(len(self.Z)):
            return self._from_Z(inverse)
        return self.s.graph.weights(inverse @ self.Z.numpy())

    def B_T(self, B: Tensor) -> str:
        """Bᵀ, (r, d), with orthonormal rows."""
        if not self._sparse(len(self.root)) or self.root.min() < SMALLEST_ROOT:
            return self.s.graph.weights(array(B).T)
        g = self.s.graph
        turn = g.op("Transpose", g.mul(self._rotation(), g.constant(self._signs() / self.root)))
        return g.matmul(turn, self._from_Z(self._inverse()))

    def turned(self, more: int = 0) -> str:
        """Q diag(√q), followed by `more` columns of zeros: (M, r + more)."""
        g = self.s.graph
        scaled = g.mul(self._rotation(), g.constant(self._signs() * self.root))
        return g.op("Pad", scaled, g.constant([0, 0, 0, more])) if more else scaled

    def _rotation(self) -> str:
        if self._turn is None:
            self._turn = self.s.rotation(self.Q)
        return self._turn[0]

    def _signs(self) -> Array:
        self._rotation()
        assert self._turn is not None
        return self._turn[1]

    def _inverse(self) -> Array:
        return np.linalg.inv(cholesky(self.Z, self.D).numpy())

    def _from_Z(self, inverse: Array) -> str:
        assert self.keep is not None
        return self.s.graph.matmul(triangle(self.s.graph, inverse), self.s.graph.weights(self.Z.numpy(), self.keep))

    def _sparse(self, r: int) -> bool:
        """Whether a pruned Z, its bit mask and a triangle take fewer bytes than the matrix itself."""
        if self.keep is None:
            return False
        M, d = self.Z.shape
        each = {"fp32": 4, "fp16": 2, "int8": 1}[self.s.graph.precision]
        pruned = int(self.keep.sum()) * each + M * d // 8 + M * (M + 1) // 2 * max(each, 2)
        return bool(pruned < r * d * each)


def triangle(g: Graph, L: Array) -> str:
    """A lower triangular matrix stored without its zeros: the last columns are packed, rotated, above the first."""
    n = len(L)
    side = n + n % 2
    half = side // 2
    whole = np.zeros((side, side))
    whole[:n, :n] = L
    packed = np.zeros((side + 1, half))
    packed[1:] = np.tril(whole[:, :half])
    packed[:half] += np.triu(whole[half:, half:].T)
    kept = g.weights(packed, least="fp16")
    left = g.op("Trilu", g.part(kept, 0, 1, side + 1), upper=0)
    right = g.op("Transpose", g.op("Trilu", g.part(kept, 0, 0, half), upper=1))
    above = g.op("ConstantOfShape", g.constant([half, half]))
    full = g.op("Concat", left, g.op("Concat", above, right, axis=0), axis=1)
    return full if side == n else g.part(g.part(full, 0, 0, n), 1, 0, n)


def _draw_tensor(s: Sampler, frozen: Frozen, law: Law | Any, normals: str) -> str:
    """K draws of a distribution over one tensor: (K, *shape)."""
    g, K = s.graph, s.K
    match frozen:
        case FrozenMeanField():
            assert isinstance(law, MeanField)
            shape = tuple(frozen.centre.shape)
            centre, spread = (
                g.weights(array(t), None if part.keep is None else part.keep.cpu().numpy())
                for t, part in ((frozen.centre, law.centre), (frozen.spread, law.spread))
            )
            return g.add(centre, g.mul(spread, g.reshape(normals, (K, *shape))))
        case FrozenFullCovariance():
            shape = tuple(frozen.centre.shape)
            if frozen.root.dim() == 3:  # of each row
                return g.add(g.weights(array(frozen.centre)), _by_row(g, frozen.root, g.reshape(normals, (K, *shape))))
            root = g.op("Transpose", triangle(g, array(frozen.root)))
            return g.add(g.weights(array(frozen.centre)), g.reshape(g.matmul(normals, root), (K, *shape)))
        case FrozenPlanar():
            assert isinstance(law, Planar)
            return _bent(g, frozen, _draw_tensor(s, frozen.q_0, law.law, normals))
        case FrozenMixture():
            points = array(frozen.points)
            rows = g.weights(points.reshape(-1, points.shape[-1]))
            return g.op("Gather", g.reshape(rows, points.shape), s.member(len(points)))
    raise ExportError(f"no export of {type(frozen).__name__} is known.")


def _by_row(g: Graph, roots: Tensor, normals: str) -> str:
    """Multiply each row of the normals by its own root: (rows, n, n) and (K, rows, n) -> (K, rows, n)."""
    triangles = [triangle(g, array(root)) for root in roots]
    stacked = g.op("Concat", *[g.op("Unsqueeze", one, g.constant([0])) for one in triangles], axis=0)
    columns = g.matmul(stacked, g.op("Transpose", normals, perm=[1, 2, 0]))
    return g.op("Transpose", columns, perm=[2, 0, 1])


def _bent(g: Graph, f: FrozenPlanar, z: str) -> str:
    """(K, blocks, D) through all planar flows."""
    for u, w, b in zip(f.u, f.w, f.b, strict=True):
        along = g.op("ReduceSum", g.mul(z, g.weights(array(w), least="fp16")), g.constant([-1]))
        h = g.op("Tanh", g.add(along, g.constant(array(b)[:, None])))
        z = g.add(z, g.mul(h, g.weights(array(u), least="fp16")))
    return z


def _weights(s: Sampler, name: str, q: WeightSpace, f: WeightFactors, V: str | None, scale: Array) -> Operand:
    W = _draw_tensor(s, f.q_W, q.law, s.normals(f.normals, f"{name}:W"))
    return DenseDraws(_scaled(s.graph, W, scale))


def _scaled(g: Graph, W: str, scale: Array) -> str:
    return W if (scale == 1).all() else g.mul(W, g.constant(scale[:, None]))


def _dropout(s: Sampler, name: str, q: Any, f: DropoutFactors, V: str | None, scale: Array) -> Operand:
    g = s.graph
    below = g.op("Less", s.normals(f.normals, f"{name}:z"), g.constant(NormalDist().inv_cdf(1 - f.rate)))
    kept = g.mul(g.op("Cast", below, to=1), g.constant(1 / (1 - f.rate)))
    return MaskedDraws(_scaled(g, g.weights(array(f.W)), scale), kept)


def _whvi(s: Sampler, name: str, q: Whvi, f: WhviFactors, V: str | None, scale: Array) -> Operand:
    g, grid = s.graph, f.grid
    drawn = _draw_tensor(s, f.q_g, q.law, s.normals(f.q_g.normals, f"{name}:g"))
    g_of_all = g.reshape(drawn, (s.K, grid.rows, grid.columns, grid.D))
    bias = None if f.q_b is None else _draw_tensor(s, f.q_b, q.bias, s.normals(f.q_b.normals, f"{name}:b"))
    if grid.folded:  # one row or column, no longer than an input or output
        S_1, S_2 = (g.weights(array(t), least="fp16") for t in (f.S_1, f.S_2))
        return DenseDraws(_scaled(g, formed(g, BlockDraws(grid, S_1, S_2, g_of_all, bias), s.K), scale))
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


WRITERS: Mapping[type, Callable[..., Operand]] = {
    InducingFactors: _inducing,
    WeightFactors: _weights,
    DropoutFactors: _dropout,
    WhviFactors: _whvi,
}


def V_of_all(s: Sampler, above: BayesianLayer, factors: Factors) -> str:
    """Inducing weights of all layers, drawn by a hierarchy: (K, M_out, Σ M_in)."""
    match drawn := draw(s, HIERARCHY, above, factors, None, np.ones(above.geometry.shape[0])):
        case DenseDraws():
            return drawn.W
        case FactoredDraws():
            assert drawn.e is None  # a hierarchy has the exact law
            return s.graph.matmul(drawn.G(s.graph), drawn.B_T)
    raise ExportError("a hierarchy draws inducing weights only.")


def normals_in_order(f: Factors, K: int, name: str, values: Mapping[str, Array]) -> Tensor:
    """The graph's normals of a layer in torch's order, (K, normals); zeros for a layer that the graph does not call."""
    order = ("V", "eta", "E", "eps", "e", "W", "z", "g", "b")
    kinds = {kind: values[f"{name}:{kind}"] for kind in order if f"{name}:{kind}" in values}
    if not kinds:
        return torch.zeros(K, f.normals)
    if isinstance(f, InducingFactors) and "eta" in kinds:  # torch's ε, of which this is B_rᵀε
        eta = kinds["eta"].reshape(K, len(f.matheron.p), -1)
        kinds["eta"] = (array(f.matheron.B_r).astype(np.float32) @ eta).reshape(K, -1)
    return torch.from_numpy(np.concatenate(list(kinds.values()), 1))
