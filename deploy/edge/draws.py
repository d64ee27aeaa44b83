"""Shared by the writers of all posteriors: draws of a layer as values of a graph, and draws of one tensor."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dubito.deploy.edge.blocks import BlockDraws
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array, Graph
from dubito.deploy.edge.normals import GraphNormals
from dubito.deploy.edge.rotations import Rotations
from dubito.models.posteriors.flows import FrozenPlanar, Planar
from dubito.models.posteriors.full_covariance import FrozenFullCovariance
from dubito.models.posteriors.mean_field import FrozenMeanField, MeanField
from dubito.models.posteriors.mixture import FrozenMixture
from dubito.models.posteriors.protocol import Distribution, Frozen


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


Drawn = DenseDraws | FactoredDraws | MaskedDraws | BlockDraws


class Sampler:
    """Shared by all layers of a graph: normals, order of the members, rotations."""

    def __init__(self, graph: Graph, K: int, seed: str | None) -> None:
        self.graph, self.K = graph, K
        self.noise = None if seed is None else GraphNormals(graph, K, seed)
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


def law_draws(s: Sampler, frozen: Frozen, law: Distribution | Any, noise: str) -> str:
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
            return g.add(centre, g.mul(spread, g.reshape(noise, (K, *shape))))
        case FrozenFullCovariance():
            shape = tuple(frozen.centre.shape)
            if frozen.root.dim() == 3:  # of each row
                return g.add(g.weights(array(frozen.centre)), _by_row(g, frozen.root, g.reshape(noise, (K, *shape))))
            root = g.op("Transpose", triangle(g, array(frozen.root)))
            return g.add(g.weights(array(frozen.centre)), g.reshape(g.matmul(noise, root), (K, *shape)))
        case FrozenPlanar():
            assert isinstance(law, Planar)
            return _bent(g, frozen, law_draws(s, frozen.q_0, law.law, noise))
        case FrozenMixture():
            points = array(frozen.points)
            rows = g.weights(points.reshape(-1, points.shape[-1]))
            return g.op("Gather", g.reshape(rows, points.shape), s.member(len(points)))
    raise ExportError(f"no export of {type(frozen).__name__} is known.")


def _by_row(g: Graph, roots: Tensor, noise: str) -> str:
    """Multiply each row of the noise by its own root: (rows, n, n) and (K, rows, n) -> (K, rows, n)."""
    triangles = [triangle(g, array(root)) for root in roots]
    stacked = g.op("Concat", *[g.op("Unsqueeze", one, g.constant([0])) for one in triangles], axis=0)
    columns = g.matmul(stacked, g.op("Transpose", noise, perm=[1, 2, 0]))
    return g.op("Transpose", columns, perm=[2, 0, 1])


def _bent(g: Graph, f: FrozenPlanar, z: str) -> str:
    """(K, blocks, D) through all planar flows."""
    for u, w, b in zip(f.u, f.w, f.b, strict=True):
        along = g.op("ReduceSum", g.mul(z, g.weights(array(w), least="fp16")), g.constant([-1]))
        h = g.op("Tanh", g.add(along, g.constant(array(b)[:, None])))
        z = g.add(z, g.mul(h, g.weights(array(u), least="fp16")))
    return z


def scaled(g: Graph, W: str, scale: Array) -> str:
    return W if (scale == 1).all() else g.mul(W, g.constant(scale[:, None]))
