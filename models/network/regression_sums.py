"""What a regression on the inputs of a layer needs of them: G = ΦᵀΛΦ and h = ΦᵀΛV, Φ a row for every place."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dubito.models.network.geometry import Conv, Geometry, Linear

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
    if geometry.dims == 2 and geometry.padding_mode == "zeros":
        G, h = zip(*(_PictureSums.apply(geometry, pictures, V, lam) for pictures in x), strict=True)
        return torch.stack(G), torch.stack(h)
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
    _check_places(Phi.shape[2], V)
    if geometry.bias:
        Phi = torch.cat([Phi, Phi.new_ones(*Phi.shape[:-1], 1)], -1)
    weighted = (Phi * lam.to(Phi.dtype)[:, None, None]).flatten(1, 2).mT
    return weighted @ Phi.flatten(1, 2), weighted @ V.flatten(0, 1)


def _check_places(places: int, V: Tensor) -> None:
    if places != V.shape[1]:
        raise ValueError(f"a layer has {places} places for each inducing input, and pseudo-outputs for {V.shape[1]}")


@dataclass(frozen=True)
class _Rows:
    """A convolution of pictures, seen row by row.

    A patch is k rows of the padded picture, d apart, each with the same windows along the width. So the block of ΦᵀΛΦ
    for the kernel's rows i and i + δ is a sum over rows r of the picture of YᵀY', where Y are the windows of row r and
    Y' those of row r + δd; products of the same δ are shared by all i. That takes a third of the multiplications and of
    the memory of explicit 3 × 3 patches.
    """

    geometry: Conv
    height: int  # of a picture, without padding
    width: int

    @property
    def sides(self) -> list[int]:
        return self.geometry.sides()

    @property
    def rows(self) -> int:
        """Of a padded picture."""
        return self.height + self.sides[2] + self.sides[3]

    @property
    def q(self) -> int:
        """Numbers of a window: channels · taps along the width."""
        return self.geometry.inputs * self.geometry.kernel[1]

    @property
    def places(self) -> tuple[int, int]:
        """Height and width of the map that comes out."""
        sizes = (self.rows, self.width + self.sides[0] + self.sides[1])
        g = self.geometry
        out = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(sizes, g.dilation, g.kernel, g.stride, strict=True)]
        return out[0], out[1]

    def below(self, i: int) -> slice:
        """Rows of the picture that the kernel's row i meets."""
        first, step = i * self.geometry.dilation[0], self.geometry.stride[0]
        return slice(first, first + (self.places[0] - 1) * step + 1, step)

    def windows(self, x: Tensor) -> Tensor:
        """Of pictures (n, c, height, width): (rows, n · places along the width, q)."""
        g = self.geometry
        x = F.pad(x, self.sides).unfold(3, g.dilation[1] * (g.kernel[1] - 1) + 1, g.stride[1])[..., :: g.dilation[1]]
        order = (2, 0, 3, 4, 1) if g.taps_first else (2, 0, 3, 1, 4)
        return x.permute(order).reshape(self.rows, -1, self.q)

    def pictures(self, Y: Tensor) -> Tensor:
        """The adjoint of `windows`: (rows, n · places, q) -> (n, c, height, width)."""
        g = self.geometry
        left, right, top, _ = self.sides
        window = (g.kernel[1], g.inputs) if g.taps_first else (g.inputs, g.kernel[1])
        taps = Y.view(self.rows, -1, self.places[1], *window)
        of_tap = taps.permute(3, 1, 4, 0, 2) if g.taps_first else taps.permute(4, 1, 3, 0, 2)  # (taps, n, c, rows, w)
        x = Y.new_zeros(*of_tap.shape[1:4], self.width + left + right)
        for j, part in enumerate(of_tap):
            first = j * g.dilation[1]
            x[..., first : first + (self.places[1] - 1) * g.stride[1] + 1 : g.stride[1]] += part
        return x[..., top : top + self.height, left : left + self.width]

    def beside(self, V: Tensor) -> Tensor:
        """Pseudo-outputs (M, places, d) in the order of the windows: (height, M · width, d) of the map."""
        by_row = V.unflatten(1, (-1, *self.places)).flatten(0, 1)
        return by_row.transpose(0, 1).reshape(self.places[0], -1, V.shape[-1])

    def apart(self, V: Tensor, M: int) -> Tensor:
        """The inverse of `beside`."""
        by_row = V.unflatten(1, (-1, self.places[1])).transpose(0, 1)
        return by_row.reshape(M, -1, V.shape[-1])

    def in_order(self, columns: Tensor, axis: int) -> Tensor:
        """Columns (…, kernel rows · q, …) -> in the order of W's."""
        if self.geometry.taps_first:
            return columns
        by_tap = columns.unflatten(axis, (self.geometry.kernel[0], self.geometry.inputs, self.geometry.kernel[1]))
        return by_tap.transpose(axis, axis + 1).flatten(axis, axis + 2)

    def by_rows(self, columns: Tensor, axis: int) -> Tensor:
        """The inverse of `in_order`."""
        if self.geometry.taps_first:
            return columns
        by_tap = columns.unflatten(axis, (self.geometry.inputs, self.geometry.kernel[0], self.geometry.kernel[1]))
        return by_tap.transpose(axis, axis + 1).flatten(axis, axis + 2)


class _PictureSums(torch.autograd.Function):
    """G and h of pictures x (M, n, c, height, width) of one draw; the windows are formed again for the gradient.

    Windows and pseudo-outputs carry √Λ both, so that G stays positive semi-definite if products are rounded (TF32).
    """

    @staticmethod
    def forward(ctx: Any, geometry: Conv, x: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        rows = _Rows(geometry, *x.shape[-2:])
        _check_places(x.shape[1] * math.prod(rows.places), V)
        ctx.save_for_backward(x, V, lam)
        ctx.rows = rows
        k, q, d = geometry.kernel[0], rows.q, geometry.dilation[0]
        G, C = x.new_zeros(k, q, k, q), x.new_zeros(k, q, V.shape[-1] + 1)
        bottom = x.new_zeros(V.shape[-1] + 1)
        for some in _parts(rows, x):
            Y, E = _weighted(rows, x[some], V[some], lam[some])
            for delta in range(k):
                products = Y[: rows.rows - delta * d].mT @ Y[delta * d :]
                for i in range(k - delta):
                    G[i, :, i + delta] += products[rows.below(i)].sum(0)
            for i in range(k):
                C[i] += (Y[rows.below(i)].mT @ E).sum(0)
            bottom += (E[..., -1:] * E).sum((0, 1))
        for i in range(k):
            for j in range(i):
                G[i, :, j] = G[j, :, i].mT
        G = rows.in_order(rows.in_order(G.view(k * q, k * q), 0), 1)
        C = rows.in_order(C.flatten(0, 1), 0)
        h, ones = C[:, :-1], C[:, -1:]
        if not geometry.bias:
            return G, h.contiguous()
        corner = bottom[-1:, None]
        return torch.cat([torch.cat([G, ones], 1), torch.cat([ones.mT, corner], 1)]), torch.cat([h, bottom[None, :-1]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        (x, V, lam), rows = ctx.saved_tensors, ctx.rows
        geometry: Conv = rows.geometry
        k, q, d = geometry.kernel[0], rows.q, geometry.dilation[0]
        d_in = k * q
        dG, dh = gradients
        inner = dG[:d_in, :d_in]
        ones = dG[:d_in, d_in:].sum(1, keepdim=True) + dG[d_in:, :d_in].sum(0)[:, None]  # without a bias, 0
        inner = rows.by_rows(rows.by_rows(inner, 0), 1).view(k, q, k, q)
        dC = rows.by_rows(torch.cat([dh[:d_in], ones], 1), 0).view(k, q, -1)
        dbottom = x.new_zeros(V.shape[-1] + 1)
        if geometry.bias:
            dbottom = torch.cat([dh[d_in], dG[d_in, d_in:]])
        of_rows = []
        for delta in range(k):
            each = x.new_zeros(rows.rows - delta * d, q, q)
            for i in range(k - delta):
                each[rows.below(i)] += inner[i, :, i + delta] + inner[i + delta, :, i].mT
            of_rows.append(each)
        dx, dV, dlam = torch.empty_like(x), torch.empty_like(V), torch.empty_like(lam)
        for some in _parts(rows, x):
            Y, E = _weighted(rows, x[some], V[some], lam[some])
            dY, dE = torch.zeros_like(Y), E[..., -1:] * dbottom
            dE[..., -1] += E @ dbottom
            for delta, each in enumerate(of_rows):
                n = len(each)
                dY[:n].baddbmm_(Y[delta * d :], each.mT)
                if delta:
                    dY[delta * d :].baddbmm_(Y[:n], each)
            for i in range(k):
                where = rows.below(i)
                dY[where].baddbmm_(E, dC[i].mT.expand(len(E), -1, -1))
                dE.baddbmm_(Y[where], dC[i].expand(len(E), -1, -1))
            M = len(x[some])
            root = lam[some].sqrt().to(x.dtype)
            pictures = rows.pictures(dY).unflatten(0, (M, -1))
            outputs = rows.apart(dE, M)
            dx[some] = pictures * root[:, None, None, None, None]
            dV[some] = outputs[..., :-1] * root[:, None, None]
            droot = (pictures * x[some]).sum((1, 2, 3, 4)) + (outputs[..., :-1] * V[some]).sum((1, 2))
            dlam[some] = ((droot + outputs[..., -1].sum(1)) / (2 * root)).to(lam.dtype)
        return None, dx, dV, dlam


def _parts(rows: _Rows, x: Tensor) -> list[slice]:
    """Of the inducing inputs, so that not too many windows are formed at a time; all of nearly the same size."""
    M, each = len(x), x.shape[1] * rows.rows * rows.places[1] * rows.q
    parts = -(-M // max(1, PATCHES // each))
    n = -(-M // parts)
    return [slice(i, i + n) for i in range(0, M, n)]


def _weighted(rows: _Rows, x: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """√Λ times windows, and times pseudo-outputs with a column of ones."""
    root = lam.sqrt().to(x.dtype)
    Y = rows.windows((x * root[:, None, None, None, None]).flatten(0, 1))
    E = torch.cat([V, V.new_ones(*V.shape[:-1], 1)], -1) * root[:, None, None]
    return Y, rows.beside(E)
