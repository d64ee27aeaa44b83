"""K draws of a layer inside a graph: what each posterior stores and how its samples come of it.

The same formulas as in `dubito.models`, operator by operator, from the same (K, normals) standard normals: with equal
normals, graph and torch give equal outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from torch import Tensor

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array, Graph
from dubito.deploy.edge.noise import Noise
from dubito.deploy.edge.rotations import Rotations
from dubito.models.dropout import DropoutFactors
from dubito.models.full_covariance import FrozenFullCovariance
from dubito.models.inducing import Inducing, InducingFactors
from dubito.models.layers import BayesianLayer
from dubito.models.matheron import cholesky, regularise
from dubito.models.mean_field import FrozenMeanField, MeanField
from dubito.models.mixture import FrozenMixture
from dubito.models.parameters import Free, Positive
from dubito.models.posterior import Factors, Frozen, Law
from dubito.models.weight_space import WeightFactors, WeightSpace

SMALLEST_ROOT = 1e-3  # of q or p: below it Z alone does not give its direction back


@dataclass(frozen=True)
class Dense:
    W: str  # (K, d_out, d_in)


@dataclass(frozen=True)
class Factored:
    """W x = G Bᵀx + e ‖x − B Bᵀx‖, as in `dubito.models.posterior`; without e, B need not be orthonormal."""

    B_T: str  # (r, d_in)
    r: int
    G: str  # (K, d_out, r), or (K, d_out, r + 1) with e as its last column
    outside: bool


@dataclass(frozen=True)
class Masked:
    W: str  # (d_out, d_in)
    mask: str  # (K, inputs)


Operand = Dense | Factored | Masked


class Sampler:
    """What all layers of a graph share: the normals, the members' order, the rotations."""

    def __init__(self, graph: Graph, K: int, seed: str | None) -> None:
        self.graph, self.K = graph, K
        self.noise = None if seed is None else Noise(graph, K, seed)
        self.rotations = Rotations()
        self.rotated: list[str] = []
        self.noises: list[str] = []  # one value per part of the network that draws
        self.keys: str | None = None
        self._members: dict[int, str] = {}

    def normals(self, n: int, name: str) -> str:
        if n == 0:
            return ""
        assert self.noise is not None
        self.noises.append(f"{name}:normals")
        return self.noise.normals(n, self.noises[-1])

    def start_members(self, most: int) -> None:
        if most > 1:
            assert self.noise is not None
            self.keys = self.noise.keys(most, "member:keys")

    def member(self, E: int) -> str:
        """(K,) each sample's member of E: an order that the seed decides, cycled."""
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


def draw(s: Sampler, name: str, layer: BayesianLayer, factors: Factors, V: str | None) -> Operand:
    """K samples of a layer; V where a hierarchy has drawn it already."""
    for kind, write in WRITERS.items():
        if isinstance(factors, kind):
            return write(s, name, layer.posterior, factors, V)
    raise ExportError(f"layer {name!r}: no export of {type(factors).__name__} is known.")


def _inducing(s: Sampler, name: str, q: Inducing, f: InducingFactors, V: str | None) -> Operand:
    g, K = s.graph, s.K
    d_out, d_in = f.shape
    of_V, first, second = f._parts()
    noise = s.normals(f.normals, name)
    for_V, for_first, for_second = g.split(noise, 1, [of_V, first, second]) if noise else ("", "", "")
    if V is None:
        assert f.q_V is not None
        V = _law(s, f.q_V, q.law, for_V)
    rows, columns = _Side(s, q.Z_r, q.D_r, f.matheron.Q_r, f.matheron.p), _Side(s, q.Z_c, q.D_c, f.matheron.Q_c, f.matheron.q)
    if f.lam == 0:
        sigma = g.constant(f.sigma)
        return Factored(columns.A_T(), len(q.Z_c.value), g.matmul(g.mul(g.op("Transpose", rows.A_T()), sigma), V), False)
    B_r_T, B_c_T = rows.B_T(f.matheron.B_r), columns.B_T(f.matheron.B_c)
    B_r = g.op("Transpose", B_r_T)
    decided = g.matmul(g.matmul(g.op("Transpose", rows.turned()), V), columns.turned())  # √(p qᵀ) ∘ Q_rᵀ V Q_c
    p, t = np.asarray(array(f.matheron.p)), np.asarray(array(f.matheron.q))
    unknown = g.op("Sub", g.constant(1.0), g.mul(g.constant(p[:, None]), g.constant(t[None, :])))
    unknown = g.op("Sqrt", g.op("Relu", unknown))
    if f.noise == "exact":
        E, eps = g.reshape(for_first, (K, d_out, d_in)), g.reshape(for_second, (K, len(p), len(t)))
        of_E = g.matmul(g.matmul(B_r_T, E), g.op("Transpose", B_c_T))
        inner = g.add(decided, g.mul(g.op("Sub", g.mul(unknown, eps), of_E), g.constant(f.lam)))
        mean = g.matmul(g.mul(g.matmul(B_r, inner), g.constant(f.sigma)), B_c_T)
        return Dense(g.add(mean, g.mul(E, g.constant(f.lam * f.sigma))))
    r, R = len(t), f.B.shape[1] - len(t)
    eps, extra = g.split(g.reshape(for_first, (K, d_out, r + R)), 2, [r, R])
    less = g.mul(g.op("Sub", unknown, g.constant(1.0)), g.constant(f.lam))
    inner = g.mul(g.add(decided, g.mul(less, g.matmul(B_r_T, eps))), g.constant(f.sigma))
    scale = g.constant(f.lam * f.sigma)
    parts = [g.add(g.matmul(B_r, inner), g.mul(eps, scale))]
    B_T = B_c_T
    if R:
        parts.append(g.mul(extra, scale))
        B_T = g.op("Concat", B_c_T, g.weights(array(f.B)[:, r:].T), axis=0)
    if not f.spans:
        parts.append(g.mul(g.reshape(for_second, (K, d_out, 1)), scale))
    G = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=2)
    return Factored(B_T, r + R, G, not f.spans)


class _Side:
    """A and B of the rows or of the columns: stored outright, or as a pruned Z and the inverse of L."""

    def __init__(self, s: Sampler, Z: Free, D: Positive, Q: Tensor, q: Tensor) -> None:
        self.s, self.Q, self.root = s, Q, np.sqrt(array(q))
        self.Z = Z().detach().double().cpu()
        self.D = regularise(self.Z, D().detach().double().cpu())
        self.keep = None if Z.keep is None else Z.keep.cpu().numpy()
        self._turn: tuple[str, Array] | None = None

    def A_T(self) -> str:
        """(M, d)"""
        inverse = self._inverse()
        if self._sparse(len(self.Z)):
            return self._from_Z(inverse)
        return self.s.graph.weights(inverse @ self.Z.numpy())

    def B_T(self, B: Tensor) -> str:
        """(r, d), orthonormal rows."""
        if not self._sparse(len(self.root)) or self.root.min() < SMALLEST_ROOT:
            return self.s.graph.weights(array(B).T)
        g = self.s.graph
        turn = g.op("Transpose", g.mul(self._rotation(), g.constant(self._signs() / self.root)))
        return g.matmul(turn, self._from_Z(self._inverse()))

    def turned(self) -> str:
        """Q diag(√q): (M, r)"""
        return self.s.graph.mul(self._rotation(), self.s.graph.constant(self._signs() * self.root))

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
        """Whether a pruned Z, its bits and a triangle take fewer bytes than the matrix that they give."""
        if self.keep is None:
            return False
        M, d = self.Z.shape
        each = {"fp32": 4, "fp16": 2, "int8": 1}[self.s.graph.precision]
        return int(self.keep.sum()) * each + M * d // 8 + M * (M + 1) // 2 * max(each, 2) < r * d * each


def triangle(g: Graph, L: Array) -> str:
    """A lower triangular matrix in the entries that it has: the last columns stand, turned, above the first ones."""
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


def _law(s: Sampler, frozen: Frozen, law: Law | Any, noise: str) -> str:
    """(K, *shape) draws of a distribution over one tensor."""
    g, K = s.graph, s.K
    match frozen:
        case FrozenMeanField():
            assert isinstance(law, MeanField)
            shape = tuple(frozen.centre.shape)
            centre, spread = (
                g.weights(array(t), None if part.keep is None else part.keep.cpu().numpy())
                for t, part in ((frozen.centre, law.centre), (frozen.spread, law.spread))
            )
            return g.add(centre, g.mul(spread, g.reshape(noise, (K, *shape))))
        case FrozenFullCovariance():
            shape = tuple(frozen.centre.shape)
            root = g.op("Transpose", triangle(g, array(frozen.root)))
            return g.add(g.weights(array(frozen.centre)), g.reshape(g.matmul(noise, root), (K, *shape)))
        case FrozenMixture():
            points = array(frozen.points)
            rows = g.weights(points.reshape(-1, points.shape[-1]))
            return g.op("Gather", g.reshape(rows, points.shape), s.member(len(points)))
    raise ExportError(f"no export of {type(frozen).__name__} is known.")


def _weights(s: Sampler, name: str, q: WeightSpace, f: WeightFactors, V: str | None) -> Operand:
    return Dense(_law(s, f.q_W, q.law, s.normals(f.normals, name)))


def _dropout(s: Sampler, name: str, q: Any, f: DropoutFactors, V: str | None) -> Operand:
    g = s.graph
    below = g.op("Less", s.normals(f.normals, name), g.constant(NormalDist().inv_cdf(1 - f.rate)))
    kept = g.mul(g.op("Cast", below, to=1), g.constant(1 / (1 - f.rate)))
    return Masked(g.weights(array(f.W)), kept)


WRITERS: Mapping[type, Callable[..., Operand]] = {
    InducingFactors: _inducing,
    WeightFactors: _weights,
    DropoutFactors: _dropout,
}


def V_of_all(s: Sampler, above: BayesianLayer, factors: Factors) -> str:
    """What a hierarchy draws: (K, M_out, Σ M_in)."""
    match drawn := draw(s, "hierarchy", above, factors, None):
        case Dense():
            return drawn.W
        case Factored():
            assert not drawn.outside  # a hierarchy's own noise is exact
            return s.graph.matmul(drawn.G, drawn.B_T)
    raise ExportError("a hierarchy draws inducing weights only.")

