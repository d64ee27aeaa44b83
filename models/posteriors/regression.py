"""Bayesian linear regression of pseudo-outputs on features: the law of a layer's weights in [Ober21, eq. 11].

With features Φ (n × d_in), pseudo-outputs V (n × d_out) and their precisions Λ, the weights of each output unit are
N(Σ ΦᵀΛv, Σ), Σ = (P + ΦᵀΛΦ)⁻¹, P the precision of the prior. The features enter by G = ΦᵀΛΦ and h = ΦᵀΛV alone.
"""

import torch
from torch import Tensor

from dubito.models.posteriors.weight_priors import Precision


def regress(G: Tensor, h: Tensor, P: Precision, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """K draws W (K, d_out, d_in) by normals (K, d_out · d_in), or their mean; and log Q(W) − log P(W) of each, (K,).

    G (K or 1, d_in, d_in) and h (K or 1, d_in, d_out). One batched Cholesky factorisation, in float64: where features
    are few and sure, G is many times P in some directions and 0 in others, which float32 cannot factorise.
    """
    L, white = factorised(G, h, P)
    d_in, d_out = white.shape[-2:]
    eps = torch.zeros_like(white) if noise is None else noise.double().view(-1, d_out, d_in).mT
    W = torch.linalg.solve_triangular(L.mT, white + eps, upper=True).mT
    log_Q = d_out * L.diagonal(dim1=-2, dim2=-1).log().sum(-1) - eps.square().sum((1, 2)) / 2
    log_P = (d_out * P.log_det(d_in) - P.energy(W)) / 2  # both without −(d_in d_out/2) log 2π
    return W, log_Q - log_P


def kl_of(G: Tensor, h: Tensor, P: Precision) -> Tensor:
    """KL of the weights' Gaussian to the prior, in closed form: (K,)."""
    L, white = factorised(G, h, P)
    d_in, d_out = white.shape[-2:]
    mean = torch.linalg.solve_triangular(L.mT, white, upper=True).mT
    root = torch.linalg.solve_triangular(L, torch.eye(d_in, dtype=L.dtype, device=L.device), upper=False)  # Σ = RᵀR
    log_det_Sigma = -2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    spread = d_out * (P.energy(root) - d_in - P.log_det(d_in) - log_det_Sigma)
    return (P.energy(mean) + spread) / 2


def factorised(G: Tensor, h: Tensor, P: Precision) -> tuple[Tensor, Tensor]:
    """L of Σ⁻¹ = L Lᵀ, and L⁻¹h, from which the mean is L⁻ᵀL⁻¹h: (K, d_in, d_in) and (K, d_in, d_out)."""
    L = torch.linalg.cholesky_ex(P.added_to(G.double())).L
    return L, torch.linalg.solve_triangular(L, h.double().expand(len(L), -1, -1), upper=False)
