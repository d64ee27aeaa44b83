"""Draws of W given the whitened inducing weights V: the rule of [Ritter21, eqs. 11-12] and two faster forms of it.

One side of a layer is a projection Z (M, d) and a positive diagonal D (M,); `r` marks rows, `c` columns:
Ψ = Z Zᵀ + D², L = chol(Ψ), A = Zᵀ L⁻ᵀ. Given V, W has mean σ A_r V A_cᵀ and covariance
λ²σ² (I − A_c A_cᵀ ⊗ A_r A_rᵀ) [Ritter21, eq. 34, columns stacked].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.models.posterior import Value

JITTER = 1e-4  # of the mean diagonal of Ψ: with M > d, Z Zᵀ is singular and D may be tiny


def regularise(Z: Tensor, D: Tensor) -> Tensor:
    """D with the jitter inside: it is part of D² everywhere, or the ways of sampling disagree."""
    diagonal = Z.square().sum(-1) + D.square()
    return (D.square() + JITTER * diagonal.mean(-1, keepdim=True)).sqrt()


def cholesky(Z: Tensor, D: Tensor) -> Tensor:
    """L with L Lᵀ = Ψ: (..., M, d) and (..., M) -> (..., M, M)."""
    L: Tensor = torch.linalg.cholesky(Z @ Z.mT + torch.diag_embed(D.square()))
    return L


def whiten(Z: Tensor, D: Tensor) -> Tensor:
    """A = Zᵀ L⁻ᵀ: (M, d) and (M,) -> (d, M)."""
    A: Tensor = torch.linalg.solve_triangular(cholesky(Z, D), Z, upper=False).mT
    return A


@dataclass(frozen=True)
class MatheronFactors(Value):
    """The part of q(W | V) that is the same for every draw, so it is computed once and cached."""

    B_r: Tensor  # (d_out, r_out)  A_r = B_r diag(√p) Q_rᵀ, r_out = min(M_out, d_out)
    B_c: Tensor  # (d_in, r_in)    A_c = B_c diag(√q) Q_cᵀ
    p: Tensor  # (r_out,)  in [0, 1]
    q: Tensor  # (r_in,)   in [0, 1]
    Q_r: Tensor  # (M_out, r_out)
    Q_c: Tensor  # (M_in, r_in)
    known: Tensor  # (r_out, r_in)  √(p qᵀ), the share of each direction that V decides
    unknown: Tensor  # (r_out, r_in)  √(1 − p qᵀ)

    def decided(self, V: Tensor) -> Tensor:
        """B_rᵀ A_r V A_cᵀ B_c: (..., M_out, M_in) -> (..., r_out, r_in)."""
        return self.known * (self.Q_r.T @ V @ self.Q_c)


def factorise(A_r: Tensor, A_c: Tensor) -> MatheronFactors:
    """Thin SVDs, to be taken in float64: in float32 a quarter of random layers have some p or q above 1."""
    B_r, s_r, Q_rT = torch.linalg.svd(A_r, full_matrices=False)
    B_c, s_c, Q_cT = torch.linalg.svd(A_c, full_matrices=False)
    p, q = s_r.square().clamp(max=1), s_c.square().clamp(max=1)
    pq = torch.outer(p, q)
    return MatheronFactors(B_r, B_c, p, q, Q_rT.mT, Q_cT.mT, pq.sqrt(), (1 - pq).sqrt())


def draw_by_rule(
    Z_r: Tensor, D_r: Tensor, Z_c: Tensor, D_c: Tensor, V: Tensor, lam: float, sigma: float, rng: torch.Generator
) -> Tensor:
    """Way 1, the paper's own rule (eqs. 11-12), kept as the reference: (K, M_out, M_in) -> (K, d_out, d_in).

    Any square root of Z Zᵀ serves where the paper writes a Cholesky factor, which M > d would make singular.
    """
    (M_out, d_out), (M_in, d_in), K = Z_r.shape, Z_c.shape, len(V)
    normal = [(d_out, d_in), (M_out, M_in), (M_out, M_in), (M_out, M_in)]
    E_1, E_2, E_3, E_4 = (torch.randn(K, *s, generator=rng, dtype=Z_r.dtype, device=Z_r.device) for s in normal)
    L_r, L_c = cholesky(Z_r, D_r), cholesky(Z_c, D_c)
    root_r, root_c = _square_root(Z_r @ Z_r.T), _square_root(Z_c @ Z_c.T)
    U_bar = Z_r @ E_1 @ Z_c.T + root_r @ E_2 * D_c + D_r[:, None] * E_3 @ root_c.T + D_r[:, None] * E_4 * D_c
    U = L_r @ V @ L_c.T
    left, right = torch.cholesky_solve(Z_r, L_r), torch.cholesky_solve(Z_c, L_c)  # Ψ⁻¹ Z
    return lam * sigma * E_1 + sigma * left.T @ (U - lam * U_bar) @ right


def _square_root(S: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(S)
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root


def draw_weights(f: MatheronFactors, V: Tensor, lam: Tensor | float, sigma: float, E: Tensor, eps: Tensor) -> Tensor:
    """Way 2, spectral: E (K, d_out, d_in) and eps (K, r_out, r_in) standard normal -> W (K, d_out, d_in)."""
    inner = f.decided(V) + lam * (f.unknown * eps - f.B_r.T @ E @ f.B_c)
    return torch.baddbmm(E, (sigma * f.B_r) @ inner, f.B_c.T.expand(len(E), -1, -1), beta=float(lam) * sigma)


def draw_projected(f: MatheronFactors, V: Tensor, lam: float, sigma: float, eps: Tensor) -> Tensor:
    """Way 3, G = W B_c without W: eps (K, d_out, r_in) standard normal -> (K, d_out, r_in)."""
    inner = f.decided(V) + lam * (f.unknown - 1) * (f.B_r.T @ eps)
    return sigma * (f.B_r @ inner + lam * eps)


@dataclass(frozen=True)
class Side(Value):
    """One side of a layer for training: differentiable, no SVD (whose gradient breaks where two values meet)."""

    A: Tensor  # (d, M)
    P: Tensor  # (M, d + M)  [Aᵀ, L⁻¹ D], orthonormal rows: it takes joint noise to whitened noise


def sides(Z: Sequence[Tensor], D: Sequence[Tensor]) -> list[Side]:
    """The sides of many layers: one factorisation for each M and one product for each shape, however many layers.

    L⁻¹ is formed, once, so that all that grows with d is a matrix product.
    """
    shapes = sorted({z.shape for z in Z})
    members = {shape: [i for i, z in enumerate(Z) if z.shape == shape] for shape in shapes}
    Zs = {shape: torch.stack([Z[i] for i in at]) for shape, at in members.items()}  # (n, M, d)
    Ds = {shape: torch.stack([D[i] for i in at]) for shape, at in members.items()}  # (n, M)
    inverse: dict[torch.Size, Tensor] = {}  # L⁻¹ (n, M, M)
    for M in {shape[0] for shape in shapes}:
        alike = [shape for shape in shapes if shape[0] == M]
        Psi = torch.cat([Zs[s] @ Zs[s].mT + torch.diag_embed(Ds[s].square()) for s in alike])
        eye = torch.eye(M, dtype=Psi.dtype, device=Psi.device)
        L, failed = torch.linalg.cholesky_ex(Psi)  # which does not wait for the device, as `cholesky` does
        L = torch.where(failed[:, None, None] > 0, torch.nan, L)
        solved = torch.linalg.solve_triangular(L, eye.expand_as(Psi), upper=False)
        inverse |= zip(alike, solved.split([len(Zs[s]) for s in alike]), strict=True)
    found: dict[int, Side] = {}
    for shape, at in members.items():
        L_inv = inverse[shape]
        P = torch.cat([L_inv @ Zs[shape], L_inv * Ds[shape][:, None]], -1)  # (n, M, d + M)
        found |= {i: Side(p[:, : shape[1]].mT, p) for i, p in zip(at, P.unbind(), strict=True)}
    return [found[i] for i in range(len(Z))]


def draw_jointly(r: Side, c: Side, V: Tensor, lam: Tensor, sigma: float, N: Tensor) -> Tensor:
    """Way 1 in whitened form, for training: N (K, d_out + M_out, d_in + M_in) standard normal -> (K, d_out, d_in).

    N is the noise of the whole augmented matrix (eq. 46): its corner is the noise of W, P_r N P_cᵀ that of V.
    """
    E = N[:, : len(r.A), : len(c.A)]
    return sigma * (lam * E + r.A @ (V - lam * (r.P @ N @ c.P.mT)) @ c.A.mT)
