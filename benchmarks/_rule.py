"""The paper's own rule for draws of W given V, which tests and benchmarks compare the faster forms with."""

import torch
from torch import Tensor

from dubito.models.posteriors.matheron import cholesky


def draw_by_rule(
    Z_r: Tensor, D_r: Tensor, Z_c: Tensor, D_c: Tensor, V: Tensor, lam: float, sigma: float, rng: torch.Generator
) -> Tensor:
    """Way 1, the paper's own rule (eqs. 11-12): (K, M_out, M_in) -> (K, d_out, d_in).

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
