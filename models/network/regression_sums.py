"""What a regression on the inputs of a layer needs of them: G = ΦᵀΛΦ and h = ΦᵀΛV, Φ a row for every place."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dubito.models.network.geometry import Geometry, Linear

PATCHES = 1 << 25  # numbers of patches that are formed at a time
FEW = 8  # features for each column of W


def regression_sums(geometry: Geometry, x: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Of K draws of M inputs x (K, M, ...), pseudo-outputs V (M, places, d_out) and precisions lam (M,).

    G (K, d_in, d_in) and h (K, d_in, d_out), of W's last column too, the bias. The patches of a convolution are formed
    for some of the inputs at a time, and formed again for the gradient: all of them would take as many times the memory
    of x as the kernel has taps.

    In float64 where features are few, which costs no more than the factorisation of G to come: G has then eigenvalues
    near 0 beside large ones, and rounded to float32 it would give wrong densities, or no Cholesky factor.
    """
    few = V.shape[0] * V.shape[1] < FEW * geometry.shape[1]
    x, V = (t.to(torch.double if few else torch.promote_types(t.dtype, torch.float32)) for t in (x, V))
    x = x.unflatten(1, (len(lam), -1))  # (K, M, rows of the layer for each input, ...)
    if isinstance(geometry, Linear):
        return _sums(geometry, x, V, lam)
    n = max(1, PATCHES // (len(x) * V.shape[1] * geometry.shape[1]))
    parts = [_formed_again(geometry, x[:, i : i + n], V[i : i + n], lam[i : i + n]) for i in range(0, len(lam), n)]
    return torch.stack([G for G, _ in parts]).sum(0), torch.stack([h for _, h in parts]).sum(0)


def _formed_again(geometry: Geometry, x: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return _sums(geometry, x, V, lam)
    sums: tuple[Tensor, Tensor] = checkpoint(_sums, geometry, x, V, lam, use_reentrant=False, preserve_rng_state=False)
    return sums


def _sums(geometry: Geometry, x: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    K, M = x.shape[:2]
    Phi = geometry.columns(x.flatten(0, 2)).reshape(K, M, -1, geometry.shape[1] - geometry.bias)
    if Phi.shape[2] != V.shape[1]:
        raise ValueError(
            f"a layer has {Phi.shape[2]} places for each inducing input, and pseudo-outputs for {V.shape[1]}"
        )
    if geometry.bias:
        Phi = torch.cat([Phi, Phi.new_ones(*Phi.shape[:-1], 1)], -1)
    weighted = (Phi * lam.to(Phi.dtype)[:, None, None]).flatten(1, 2).mT
    return weighted @ Phi.flatten(1, 2), weighted @ V.flatten(0, 1)
