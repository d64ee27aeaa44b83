"""Draws of W given the whitened inducing weights V: two forms of [Ritter21, eqs. 11-12] that are faster than the rule.

The paper's own rule, way 1, stands in `benchmarks/_rule.py`, which tests compare these with.

One side of a layer is a projection Z (M, d) and a positive diagonal D (M,); `r` marks rows, `c` columns:
Ψ = Z Zᵀ + D², L = chol(Ψ), A = Zᵀ L⁻ᵀ. Given V, W has mean σ A_r V A_cᵀ and covariance
λ²σ² (I − A_c A_cᵀ ⊗ A_r A_rᵀ) [Ritter21, eq. 34, columns stacked].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.models.numerics.parameters import alike, parted
from dubito.models.numerics.threads import by_one_thread
from dubito.models.posteriors.protocol import Value

JITTER = 1e-4  # of the mean diagonal of Ψ: with M > d, Z Zᵀ is singular and D may be tiny


def regularise(Z: Tensor, D: Tensor) -> Tensor:
    """D with the jitter inside: it is part of D² everywhere, or the ways of sampling disagree."""
    return _with_jitter(Z.square().sum(-1), D)


def _with_jitter(norms: Tensor, D: Tensor) -> Tensor:
    """`norms` (..., M): the diagonal of Z Zᵀ."""
    diagonal = norms + D.square()
    return (D.square() + JITTER * diagonal.mean(-1, keepdim=True)).sqrt()


def cholesky(Z: Tensor, D: Tensor) -> Tensor:
    """L with L Lᵀ = Ψ: (..., M, d) and (..., M) -> (..., M, M)."""
    L: Tensor = torch.linalg.cholesky(Z @ Z.mT + torch.diag_embed(D.square()))
    return L


def whiten(Z: Tensor, D: Tensor) -> Tensor:
    """A = Zᵀ L⁻ᵀ: (M, d) and (M,) -> (d, M)."""
    A: Tensor = torch.linalg.solve_triangular(cholesky(Z, D), Z, upper=False).mT
    return A


@by_one_thread
def project(Z_r: Tensor, D_r: Tensor, Z_c: Tensor, D_c: Tensor) -> tuple[Tensor, Tensor]:
    """A_r and A_c, the jitter still to come."""
    return whiten(Z_r, regularise(Z_r, D_r)), whiten(Z_c, regularise(Z_c, D_c))


@dataclass(frozen=True)
class MatheronFactors(Value):
    """The part of q(W | V) that is the same for every draw, so it is computed once and cached."""

    B_r: Tensor  # (d_out, r_out)  A_r = B_r diag(√p) Q_rᵀ, r_out = min(M_out, d_out)
    B_c: Tensor  # (d_in, r_in)    A_c = B_c diag(√q) Q_cᵀ
    p: Tensor  # (r_out,)  in [0, 1]
    q: Tensor  # (r_in,)   in [0, 1]
    Q_r: Tensor  # (M_out, r_out)
    Q_c: Tensor  # (M_in, r_in)

    @property
    def known(self) -> Tensor:
        """√(p qᵀ), the share of each direction that V decides: (r_out, r_in)."""
        return torch.outer(self.p, self.q).sqrt()

    @property
    def unknown(self) -> Tensor:
        """√(1 − p qᵀ): (r_out, r_in)."""
        return (1 - torch.outer(self.p, self.q)).sqrt()

    def decided(self, V: Tensor) -> Tensor:
        """B_rᵀ A_r V A_cᵀ B_c: (..., M_out, M_in) -> (..., r_out, r_in)."""
        return self.known * (self.Q_r.T.to(V.dtype) @ V @ self.Q_c.to(V.dtype))

    def narrow(self, dtype: torch.dtype) -> "MatheronFactors":
        """The matrices in another type; draws are still made in that of p and q."""
        B_r, B_c, Q_r, Q_c = (t.to(dtype) for t in (self.B_r, self.B_c, self.Q_r, self.Q_c))
        return MatheronFactors(B_r, B_c, self.p, self.q, Q_r, Q_c)


def factorise(A_r: Tensor, A_c: Tensor) -> MatheronFactors:
    """Thin SVDs, to be taken in float64: in float32 a quarter of random layers have some p or q above 1."""
    B_r, s_r, Q_rT = torch.linalg.svd(A_r, full_matrices=False)
    B_c, s_c, Q_cT = torch.linalg.svd(A_c, full_matrices=False)
    return MatheronFactors(B_r, B_c, s_r.square().clamp(max=1), s_c.square().clamp(max=1), Q_rT.mT, Q_cT.mT)


@by_one_thread
def factors_of(Z_r: Tensor, D_r: Tensor, Z_c: Tensor, D_c: Tensor) -> MatheronFactors:
    """The factors of both sides, the jitter still to come."""
    return factorise(*project(Z_r, D_r, Z_c, D_c))


def draw_weights(f: MatheronFactors, V: Tensor, lam: Tensor | float, sigma: float, E: Tensor, eps: Tensor) -> Tensor:
    """Way 2, spectral: E (K, d_out, d_in) and eps (K, r_out, r_in) standard normal -> W (K, d_out, d_in)."""
    B_r, B_c = f.B_r.to(E.dtype), f.B_c.to(E.dtype)
    inner = f.decided(V) + lam * (f.unknown * eps - B_r.T @ E @ B_c)
    return torch.baddbmm(E, (sigma * B_r) @ inner, B_c.T.expand(len(E), -1, -1), beta=float(lam) * sigma)


def draw_projected(f: MatheronFactors, V: Tensor, lam: float, sigma: float, eps: Tensor) -> Tensor:
    """Way 3, G = W B_c without W: eps (K, d_out, r_in) standard normal -> (K, d_out, r_in)."""
    B_r = f.B_r.to(eps.dtype)
    inner = f.decided(V) + lam * (f.unknown - 1) * (B_r.T @ eps)
    return sigma * (B_r @ inner + lam * eps)


@dataclass(frozen=True)
class Side(Value):
    """One side of n layers for training: differentiable, no SVD (whose gradient breaks where two values meet)."""

    A: Tensor  # (n, d, M)
    P: Tensor  # (n, M, d + M)  [Aᵀ, L⁻¹ D], orthonormal rows: it takes joint noise to whitened noise


def sides(Z: Sequence[Sequence[Tensor]], D: Sequence[Sequence[Tensor]]) -> list[Side]:
    """Runs of layers' Z (M, d) and D (M,), the jitter still to come; those of a run have one shape and are stacked.

    A captured step costs what its kernels are in number, so there is one factorisation for each M and one product
    for each shape, however many runs. L⁻¹ is formed, once, so that all that grows with d is a matrix product.
    """
    by_index: dict[int, Side] = {}
    for of_M in alike([run[0].shape[0] for run in Z]):
        by_shape = [[of_M[i] for i in indices] for indices in alike([Z[i][0].shape for i in of_M])]
        Zs = [torch.stack([z for i in indices for z in Z[i]]) for indices in by_shape]  # (n, M, d) each
        L_inv, L_inv_D = _invert(
            [z @ z.mT for z in Zs], torch.stack([d for indices in by_shape for i in indices for d in D[i]])
        )
        lengths = [len(z) for z in Zs]
        for indices, *of_shape in zip(by_shape, Zs, parted(L_inv, lengths), parted(L_inv_D, lengths), strict=True):
            z, inverse, times_D = of_shape
            A_T = inverse @ z
            P = torch.cat([A_T, times_D], -1)
            runs = [len(Z[i]) for i in indices]
            by_index |= {i: Side(a.mT, p) for i, a, p in zip(indices, parted(A_T, runs), parted(P, runs), strict=True)}
    return [by_index[i] for i in range(len(Z))]


def _invert(grams: Sequence[Tensor], D: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ and L⁻¹ D, the jitter in D, of all Z Zᵀ (n, M, M) and their D (N, M): (N, M, M) each."""
    gram = torch.cat(list(grams))
    D = _with_jitter(gram.diagonal(dim1=-2, dim2=-1), D)
    L, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(D.square()))  # does not wait, as `cholesky` does
    L = torch.where(failed[:, None, None] > 0, torch.nan, L)
    eye = torch.eye(D.shape[1], dtype=D.dtype, device=D.device)
    L_inv: Tensor = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
    return L_inv, L_inv * D[:, None]


def draw_jointly(
    runs: Sequence[tuple[Side, Side]], V: Tensor, lam: Tensor, sigma: Tensor, N: Sequence[Tensor]
) -> list[Tensor]:
    """Way 1 in whitened form, for training K draws of n layers at once: (K, layers, d_out, d_in) for each run.

    A run is layers of one shape, its N (K, layers, d_out + M_out, d_in + M_in) standard normal: the noise of the whole
    augmented matrix (eq. 46), whose corner is the noise of W; P_r N P_cᵀ is that of V. V (K, n, M_out, M_in), λ and σ
    (n, 1, 1) are those of all layers, run after run.
    """
    scale = sigma * lam
    of_V = torch.cat([r.P[None] @ noise @ c.P[None].mT for (r, c), noise in zip(runs, N, strict=True)], 1)
    inner = torch.addcmul(sigma * V, scale[None], of_V, value=-1)
    lengths = [len(r.A) for r, _ in runs]
    drawn = []
    for (r, c), noise, u, s in zip(runs, N, parted(inner, lengths, 1), parted(scale, lengths), strict=True):
        E = s[None] * noise[..., : r.A.shape[1], : c.A.shape[1]]
        left, right = r.A[None] @ u, c.A.mT.expand(len(u), -1, -1, -1)
        drawn.append(torch.baddbmm(E.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1)).view(E.shape))
    return drawn


def through(runs: Sequence[tuple[Side, Side]], V: Tensor) -> list[Tensor]:
    """A_r V A_cᵀ of all layers: (K, n, M_out, M_in) -> (K, layers, d_out, d_in) for each run."""
    of_each = parted(V, [len(r.A) for r, _ in runs], 1)
    return [r.A[None] @ v @ c.A[None].mT for (r, c), v in zip(runs, of_each, strict=True)]
