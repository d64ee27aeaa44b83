"""Draws of layers with inducing weights in a graph, and the law of their λ-noise."""

import copy
from typing import Literal

import numpy as np
from torch import Tensor

from dubito.deploy.edge.draws import DenseDraws, Drawn, FactoredDraws, Sampler, array, law_draws, triangle
from dubito.deploy.edge.graph import Array, Graph
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import Free, Positive
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.inducing_factors import InducingFactors
from dubito.models.posteriors.matheron import cholesky, regularise

SMALLEST_ROOT = 1e-3  # of √q or √p: a smaller one cannot be recovered from Z

ExportedLaw = Literal["factored", "artifact"]


def laws(network: BayesianNetwork) -> dict[str, str]:
    """The law of each layer with λ-noise."""
    posteriors = {name: layer.posterior for name, layer in network.layers.items()}
    return {name: q.noise for name, q in posteriors.items() if isinstance(q, Inducing) and q.lam is not None}


def with_law(network: BayesianNetwork, law: ExportedLaw) -> BayesianNetwork:
    """The network that the graph computes; `factored` gives every layer the factored law."""
    exact = [
        q for layer in network.layers.values() if isinstance(q := layer.posterior, Inducing) and q.noise == "exact"
    ]
    if law == "artifact" or not exact:
        return network
    changed = copy.deepcopy(network)
    for layer in changed.layers.values():
        if isinstance(layer.posterior, Inducing):
            layer.posterior.noise = "factored"
    return changed


def write_inducing(s: Sampler, name: str, q: Inducing, f: InducingFactors, scale: Array, V: str | None = None) -> Drawn:
    g, K = s.graph, s.K
    if V is None:
        assert f.q_V is not None
        V = law_draws(s, f.q_V, q.law, s.normals(f.normals_of_V, f"{name}:V"))
    rows = _Side(s, q.Z_r, q.D_r, f.matheron.Q_r, f.matheron.p)
    columns = _Side(s, q.Z_c, q.D_c, f.matheron.Q_c, f.matheron.q)
    if f.lam == 0:
        A_r = g.mul(g.op("Transpose", rows.A_T()), _times(g, f.sigma, scale))
        return FactoredDraws(columns.A_T(), len(q.Z_c.value), A_r, V)
    if f.noise == "exact":
        return DenseDraws(_exact_law(s, name, f, V, rows, columns, scale))
    B_r_T, B_c_T = rows.B_T(f.matheron.B_r), columns.B_T(f.matheron.B_c)
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


def _exact_law(s: Sampler, name: str, f: InducingFactors, V: str, rows: "_Side", columns: "_Side", scale: Array) -> str:
    """Draws by the exact law: W itself, (K, d_out, d_in)."""
    B_r_T, B_c_T = rows.B_T(f.matheron.B_r), columns.B_T(f.matheron.B_c)
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
        turned = g.mul(self._rotation(), g.constant(self._signs() * self.root))
        return g.op("Pad", turned, g.constant([0, 0, 0, more])) if more else turned

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


def as_eps(f: InducingFactors, eta: Array, K: int) -> Array:
    """Torch's ε of the η = B_rᵀε that a graph drew."""
    rotated: Array = array(f.matheron.B_r).astype(np.float32) @ eta.reshape(K, len(f.matheron.p), -1)
    return rotated.reshape(K, -1)
