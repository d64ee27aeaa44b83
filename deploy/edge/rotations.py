"""Orthogonal matrices stored by half their entries: Q = exp(S) S′ with S skew and S′ a diagonal of signs.

The λ-noise of an inducing layer needs the rotations Q_r and Q_c of its factors. Two of them share one square matrix, S
of the one below the diagonal and S of the other above it, so the file holds no more numbers than there are degrees of
freedom. The graph computes the exponentials of all layers together.
"""

import numpy as np

from dubito.deploy.edge.graph import Array, Graph

HALVINGS, DEGREE = 3, 10  # ‖S‖ ≤ π: (π/8)¹¹/11! is below the rounding of float32


class Rotations:
    """Collects the rotations of layers; `write` writes the matrices to the graph."""

    def __init__(self) -> None:
        self._skews: dict[int, list[Array]] = {}

    def add(self, Q: Array) -> tuple[str, Array]:
        """Add Q (M, r) with orthonormal columns; returns the name of an (M, r) matrix and its columns' signs (r,)."""
        M, r = Q.shape
        S, signs = logarithm(completed(Q))
        self._skews.setdefault(M, []).append(S)
        return f"Q{M}.{len(self._skews[M]) - 1}.{r}", signs[:r]

    def write(self, graph: Graph, used: list[str]) -> None:
        for M, skews in self._skews.items():
            n = len(skews)
            lower, upper = skews[: (n + 1) // 2], skews[(n + 1) // 2 :]
            upper = upper + [np.zeros((M, M))] * (len(lower) - len(upper))
            packed = np.stack([np.tril(a, -1) + np.triu(b, 1) for a, b in zip(lower, upper, strict=True)])
            every = _exponentials(graph, graph.weights(packed, least="fp16"), M)
            for name in used:
                size, i, r = (int(part) for part in name[1:].split("."))
                if size == M:
                    one = graph.op("Gather", every, graph.constant(i))
                    graph.op("Slice", one, *(graph.constant([v]) for v in (0, r, 1)), out=name)


def _exponentials(graph: Graph, packed: str, M: int) -> str:
    triangles = []
    for upper, k in ((0, -1), (1, 1)):
        part = graph.op("Trilu", packed, graph.constant(k), upper=upper)
        triangles.append(graph.op("Sub", part, graph.op("Transpose", part, perm=[0, 2, 1])))
    X = graph.mul(graph.op("Concat", *triangles, axis=0), graph.constant(0.5**HALVINGS))
    eye = graph.op("EyeLike", graph.op("ConstantOfShape", graph.constant([M, M])), dtype=1)
    E = graph.add(eye, graph.mul(X, graph.constant(1 / DEGREE)))
    for k in range(DEGREE - 1, 0, -1):  # Horner: I + X(I + X/2(I + X/3(…)))
        E = graph.add(eye, graph.mul(graph.matmul(X, E), graph.constant(1 / k)))
    for _ in range(HALVINGS):
        E = graph.matmul(E, E)
    return E


def completed(Q: Array) -> Array:
    """A square orthogonal matrix whose first columns are Q."""
    M, r = Q.shape
    if r == M:
        return Q
    rest = np.linalg.svd(np.eye(M) - Q @ Q.T)[0][:, : M - r]
    return np.concatenate([Q, rest], 1)


def logarithm(Q: Array) -> tuple[Array, Array]:
    """S skew and signs with Q = exp(S) diag(signs)."""
    signs = _signs(Q)
    R = Q * signs
    # both parts of a normal matrix have the same eigenvectors, and a combination of the two has distinct eigenvalues
    _, U = np.linalg.eigh((R + R.T) / 2 + 0.7368 * (R - R.T) / 2j)
    angles = np.angle(np.einsum("ij,ik,kj->j", U.conj(), R, U))
    S = ((U * (1j * angles)) @ U.conj().T).real
    return (S - S.T) / 2, signs


def _signs(Q: Array) -> Array:
    """Signs of columns for which no angle is π, where the logarithm would not be real.

    By elimination on I + Q diag(signs): each sign makes its pivot 1 or more, so the determinant is not 0.
    """
    left, signs = Q.copy(), np.ones(len(Q))
    for k in range(len(Q)):
        signs[k] = 1.0 if left[k, k] >= 0 else -1.0
        left[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k] * signs[k], left[k, k + 1 :]) / (1 + abs(left[k, k]))
    return signs
