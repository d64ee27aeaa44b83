"""Convolutions of K samples on a GPU, with what follows them in one pass. Needs triton; imported on first use.

Activations lie channels last, the rows of sample k one after the other. A row is one place of one picture; what a
layer gives it is G_k Bᵀ(patch) + e_k ‖patch outside B‖, or W_k (patch), then a scale and a shift for each channel, a
residual added, and nothing below `floor`. Bᵀ(patch) stays on chip (`factored`), or is summed up in `splits` parts that
run side by side, for few rows (`parted`). Sums are in float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from dubito.models.geometry import Conv

LEAST = 16  # of any side of a product on chip


@triton.jit
def _place(row, Ho, Wo, stride, padding):
    """Picture, and the place of the kernel's first tap in it."""
    picture = row // (Ho * Wo)
    at = row % (Ho * Wo)
    return picture, (at // Wo) * stride - padding, (at % Wo) * stride - padding


@triton.jit
def _taps(x, picture, top, left, live, k, H, W, C, side: tl.constexpr, WHOLE: tl.constexpr, BK: tl.constexpr):
    """Numbers k … k + BK − 1 of each row's patch, ordered tap by tap."""
    if WHOLE:  # of one tap
        tap = k // C
        h, w = top + tap // side, left + tap % side
        inside = live & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        at = ((picture * H + h) * W + w).to(tl.int64)[:, None] * C + (k % C + tl.arange(0, BK))[None, :]
        return tl.load(x + at, mask=inside[:, None], other=0.0)
    one = k + tl.arange(0, BK)
    tap = one // C
    h, w = top[:, None] + (tap // side)[None, :], left[:, None] + (tap % side)[None, :]
    inside = live[:, None] & (one < side * side * C)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    at = ((picture[:, None] * H + h) * W + w).to(tl.int64) * C + (one % C)[None, :]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _finish(acc, y, residual, scale, shift, floor, row, live, n, d_out, RESIDUAL: tl.constexpr):
    here = live[:, None] & (n < d_out)[None, :]
    at = row.to(tl.int64)[:, None] * d_out + n[None, :]
    acc = (
        acc * tl.load(scale + n, mask=n < d_out, other=0.0)[None, :]
        + tl.load(shift + n, mask=n < d_out, other=0.0)[None, :]
    )
    if RESIDUAL:
        acc += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, tl.maximum(acc, floor).to(y.dtype.element_ty), mask=here)


@triton.jit
def _spread(
    c, c2, beyond, G, e, g_r, g_o, r, y, residual, scale, shift, floor, row, live, first, last, d_out,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, RESIDUAL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sample's matrix on c, a few outputs at a time."""
    Q: tl.constexpr = R2 if R2 > 0 else 1
    at, at2 = tl.arange(0, R), R + tl.arange(0, Q)
    for n0 in range(first, last, BN):
        n = n0 + tl.arange(0, BN)
        here = (n < d_out)[None, :]
        g = tl.load(G + at[:, None] * g_r + n[None, :] * g_o, mask=(at < r)[:, None] & here, other=0.0)
        acc = tl.dot(c, g, input_precision="ieee")
        if R2 > 0:
            g2 = tl.load(G + at2[:, None] * g_r + n[None, :] * g_o, mask=(at2 < r)[:, None] & here, other=0.0)
            acc = tl.dot(c2, g2, acc, input_precision="ieee")
        if NOISE:
            acc += beyond[:, None] * tl.load(e + n, mask=n < d_out, other=0.0).to(tl.float32)[None, :]
        _finish(acc, y, residual, scale, shift, floor, row, live, n, d_out, RESIDUAL)


@triton.jit
def _project(
    x, B, b_i, b_r, r, picture, top, left, live, start, end, H, W, C,
    side: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Bᵀ(patch) over a part of the patch, in two runs of columns, and the part's ‖·‖²."""
    Q: tl.constexpr = R2 if R2 > 0 else 1
    c = tl.zeros((BM, R), tl.float32)
    c2 = tl.zeros((BM, Q), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    at, at2 = tl.arange(0, R), R + tl.arange(0, Q)
    for k in range(start, end, BK):
        one = k + tl.arange(0, BK)
        a = _taps(x, picture, top, left, live, k, H, W, C, side, WHOLE, BK)
        here = (one < side * side * C)[:, None]
        p = tl.load(B + one[:, None] * b_i + at[None, :] * b_r, mask=here & (at < r)[None, :], other=0.0)
        c = tl.dot(a, p, c, input_precision="ieee")
        if R2 > 0:
            p2 = tl.load(B + one[:, None] * b_i + at2[None, :] * b_r, mask=here & (at2 < r)[None, :], other=0.0)
            c2 = tl.dot(a, p2, c2, input_precision="ieee")
        if NOISE:
            wide = a.to(tl.float32)
            energy += tl.sum(wide * wide, 1)
    return c, c2, energy


@triton.jit
def _beyond(energy, c, c2, R2: tl.constexpr):
    left = energy - tl.sum(c * c, 1)
    if R2 > 0:
        left -= tl.sum(c2 * c2, 1)
    return tl.sqrt(tl.maximum(left, 0.0))


@triton.jit(do_not_specialize=["floor", "rows", "H", "W", "Ho", "Wo", "stride", "padding", "width"])
def _factored_kernel(
    x, B, G, e, y, residual, scale, shift, floor, rows, H, W, C, Ho, Wo, d_out, r, stride, padding,
    b_i, b_r, g_k, g_r, g_o, width,
    side: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)  # of the sample
    live = row < rows
    picture, top, left = _place(row, Ho, Wo, stride, padding)
    x += k * (rows // (Ho * Wo) * H * W) * C
    y += k * rows * d_out
    residual += k * rows * d_out
    c, c2, energy = _project(
        x, B, b_i, b_r, r, picture, top, left, live, 0, side * side * C, H, W, C, side, WHOLE, BM, BK, R, R2, NOISE
    )
    beyond = _beyond(energy, c, c2, R2) if NOISE else energy
    first = tl.program_id(1) * width
    _spread(
        c.to(x.dtype.element_ty), c2.to(x.dtype.element_ty), beyond, G + k * g_k, e + k * d_out, g_r, g_o, r, y,
        residual, scale, shift, floor, row, live, first, tl.minimum(first + width, d_out), d_out,
        R, R2, NOISE, RESIDUAL, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "H", "W", "Ho", "Wo", "stride", "padding", "share"])
def _project_kernel(
    x, B, c_out, energy_out, rows, H, W, C, Ho, Wo, r, stride, padding, b_i, b_r, share,
    side: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    picture, top, left = _place(row, Ho, Wo, stride, padding)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, side * side * C)
    c, c2, energy = _project(
        x, B, b_i, b_r, r, picture, top, left, live, start, end, H, W, C, side, WHOLE, BM, BK, R, R2, NOISE
    )
    at = (tl.program_id(1).to(tl.int64) * rows + row) * (R + R2)
    tl.store(c_out + at[:, None] + tl.arange(0, R)[None, :], c, mask=live[:, None])
    if R2 > 0:
        tl.store(c_out + at[:, None] + R + tl.arange(0, R2)[None, :], c2, mask=live[:, None])
    if NOISE:
        tl.store(energy_out + tl.program_id(1) * rows + row, energy, mask=live)


@triton.jit(do_not_specialize=["floor", "rows", "all_rows", "width"])
def _mix_kernel(
    c_in, energy_in, G, e, y, residual, scale, shift, floor, rows, all_rows, d_out, r, g_k, g_r, g_o, width,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)  # of the sample
    live = row < rows
    y += k * rows * d_out
    residual += k * rows * d_out
    Q: tl.constexpr = R2 if R2 > 0 else 1
    c = tl.zeros((BM, R), tl.float32)
    c2 = tl.zeros((BM, Q), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    for part in tl.static_range(SPLITS):
        at = (k * rows + part * all_rows + row) * (R + R2)
        c += tl.load(c_in + at[:, None] + tl.arange(0, R)[None, :], mask=live[:, None], other=0.0)
        if R2 > 0:
            c2 += tl.load(c_in + at[:, None] + R + tl.arange(0, R2)[None, :], mask=live[:, None], other=0.0)
        if NOISE:
            energy += tl.load(energy_in + k * rows + part * all_rows + row, mask=live, other=0.0)
    beyond = _beyond(energy, c, c2, R2) if NOISE else energy
    first = tl.program_id(1) * width
    _spread(
        c.to(y.dtype.element_ty), c2.to(y.dtype.element_ty), beyond, G + k * g_k, e + k * d_out, g_r, g_o, r, y,
        residual, scale, shift, floor, row, live, first, tl.minimum(first + width, d_out), d_out,
        R, R2, NOISE, RESIDUAL, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["floor", "rows", "H", "W", "Ho", "Wo", "stride", "padding"])
def _dense_kernel(
    x, W_, y, residual, scale, shift, floor, rows, H, W, C, Ho, Wo, d_out, stride, padding, w_k,
    side: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(d_out, BN)
    row = tl.program_id(0) // across * BM + tl.arange(0, BM)  # of the sample
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    live = row < rows
    picture, top, left = _place(row, Ho, Wo, stride, padding)
    x += k * (rows // (Ho * Wo) * H * W) * C
    y += k * rows * d_out
    residual += k * rows * d_out
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, side * side * C, BK):
        one = i + tl.arange(0, BK)
        a = _taps(x, picture, top, left, live, i, H, W, C, side, WHOLE, BK)
        here = (one < side * side * C)[:, None] & (n < d_out)[None, :]
        w = tl.load(W_ + k * w_k + one[:, None] * d_out + n[None, :], mask=here, other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    _finish(acc, y, residual, scale, shift, floor, row, live, n, d_out, RESIDUAL)


@dataclass(frozen=True)
class After:
    """What follows a convolution: y ← max(scale y + shift + residual, floor)."""

    scale: Tensor  # (d_out,) float32
    shift: Tensor
    residual: Tensor | None
    floor: float  # 0 for a ReLU, −∞ for none


def suits(geometry: object) -> TypeGuard[Conv]:
    """Square kernels over zeros on both sides: what these kernels know."""
    if not isinstance(geometry, Conv) or geometry.dims != 2 or geometry.groups != 1 or geometry.bias:
        return False
    same = all(len(set(t)) == 1 for t in (geometry.kernel, geometry.stride) if isinstance(t, tuple))
    plain = geometry.padding_mode == "zeros" and set(geometry.dilation) == {1}
    return same and plain and isinstance(geometry.padding, tuple) and len(set(geometry.padding)) == 1


def tap_by_tap(geometry: Conv, B: Tensor) -> Tensor:
    """(d_in, n), or (K, d_in, n), whose rows run channel by channel, with rows as the kernels read patches."""
    taps = geometry.kernel[0] ** 2
    found: Tensor = B.unflatten(-2, (geometry.inputs, taps)).transpose(-3, -2).flatten(-3, -2).contiguous()
    return found


@dataclass(frozen=True)
class _Shape:
    """Sizes of one call."""

    N: int
    H: int
    W: int
    C: int
    Ho: int
    Wo: int
    side: int
    stride: int
    padding: int

    @classmethod
    def of(cls, geometry: Conv, x: Tensor) -> "_Shape":
        N, C, H, W = x.shape
        side, stride, padding = geometry.kernel[0], geometry.stride[0], int(geometry.padding[0])
        Ho, Wo = ((n + 2 * padding - side) // stride + 1 for n in (H, W))
        return cls(N, H, W, C, Ho, Wo, side, stride, padding)

    @property
    def rows(self) -> int:
        return self.N * self.Ho * self.Wo

    def tile(self) -> tuple[int, bool]:
        """Numbers of a patch taken at a time, and whether these are always of one tap."""
        BK = next((size for size in (64, 32, 16) if self.C % size == 0), None)
        return (32, False) if BK is None else (BK, True)

    def output(self, x: Tensor, d_out: int) -> Tensor:
        shape = (self.N, d_out, self.Ho, self.Wo)
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _runs(r: int) -> tuple[int, int]:
    """r columns as two runs of a power of two each, the second of which may be empty."""
    first = max(LEAST, 1 << (r.bit_length() - 1))
    return first, 0 if r <= first else max(LEAST, triton.next_power_of_2(r - first))


def _lies(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _in_rows(rows: int) -> int:
    """Rows of one program, so that few stay empty."""
    return 128 if rows >= 128 else 64 if rows > 32 else 32 if rows > 16 else 16


def factored(geometry: Conv, x: Tensor, B: Tensor, G: Tensor, e: Tensor | None, after: After) -> Tensor:
    """B (d_in, r) tap by tap, G (K, d_out, r), e (K, d_out): one kernel, Bᵀ(patch) on chip."""
    x, s = _lies(x), _Shape.of(geometry, x)
    K, d_out, r = G.shape
    rows, (R, R2), (BK, whole) = s.rows // K, _runs(r), s.tile()
    y = s.output(x, d_out)
    BM = _in_rows(rows)
    residual = y if after.residual is None else _lies(after.residual.expand_as(y))
    tiles = triton.cdiv(rows, BM) * K
    width = d_out if tiles >= 132 else max(128, triton.cdiv(d_out, triton.cdiv(132, tiles)) // 128 * 128)
    grid = (triton.cdiv(rows, BM), triton.cdiv(d_out, width), K)
    with torch.cuda.device_of(x):
        _factored_kernel[grid](
            x, B, G, G if e is None else e, y, residual, after.scale, after.shift, after.floor,
            rows, s.H, s.W, s.C, s.Ho, s.Wo, d_out, r, s.stride, s.padding, *B.stride(),
            G.stride(0), G.stride(2), G.stride(1), width,
            s.side, whole, BM, 64, BK, R, R2, e is not None, after.residual is not None,
            num_warps=8 if BM == 128 else 4, num_stages=3,
        )  # fmt: skip
    return y


def parted(geometry: Conv, x: Tensor, B: Tensor, G: Tensor, e: Tensor | None, after: After) -> Tensor:
    """The same by two kernels: patches in parts that run side by side, then each sample's matrix."""
    x, s = _lies(x), _Shape.of(geometry, x)
    K, d_out, r = G.shape
    rows, (R, R2), (BK, whole) = s.rows // K, _runs(r), s.tile()
    d_in = s.side**2 * s.C
    BM = 64 if s.rows >= 64 * 66 else 32
    tiles = triton.cdiv(s.rows, BM)
    splits = max(1, min(8, triton.cdiv(132, tiles), d_in // (2 * BK)))
    share = triton.cdiv(triton.cdiv(d_in, splits), BK) * BK
    splits = triton.cdiv(d_in, share)
    c = torch.empty(splits, s.rows, R + R2, device=x.device)
    energy = torch.empty(splits, s.rows, device=x.device) if e is not None else c
    y = s.output(x, d_out)
    residual = y if after.residual is None else _lies(after.residual.expand_as(y))
    BM_mix = min(64, _in_rows(rows))
    width = 64 if triton.cdiv(rows, BM_mix) * K * triton.cdiv(d_out, 64) <= 8 * 132 else 256
    with torch.cuda.device_of(x):
        _project_kernel[tiles, splits](
            x, B, c, energy, s.rows, s.H, s.W, s.C, s.Ho, s.Wo, r, s.stride, s.padding, *B.stride(), share,
            s.side, whole, BM, BK, R, R2, e is not None, num_warps=4, num_stages=4,
        )  # fmt: skip
        _mix_kernel[triton.cdiv(rows, BM_mix), triton.cdiv(d_out, width), K](
            c, energy, G, G if e is None else e, y, residual, after.scale, after.shift, after.floor,
            rows, s.rows, d_out, r, G.stride(0), G.stride(2), G.stride(1), width,
            splits, BM_mix, 64, R, R2, e is not None, after.residual is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    return y


def dense(geometry: Conv, x: Tensor, W: Tensor, after: After) -> Tensor:
    """W (K or 1, d_in, d_out) tap by tap: one kernel for all samples."""
    x, s = _lies(x), _Shape.of(geometry, x)
    K, _, d_out = W.shape
    rows, (BK, whole) = s.rows // K, s.tile()
    y = s.output(x, d_out)
    residual = y if after.residual is None else _lies(after.residual.expand_as(y))
    BM = _in_rows(rows)
    BN = 128 if d_out % 128 == 0 and rows >= 1024 else 64
    with torch.cuda.device_of(x):
        _dense_kernel[triton.cdiv(rows, BM) * triton.cdiv(d_out, BN), K](
            x, W, y, residual, after.scale, after.shift, after.floor,
            rows, s.H, s.W, s.C, s.Ho, s.Wo, d_out, s.stride, s.padding, W.stride(0),
            s.side, whole, BM, BN, BK, after.residual is not None,
            num_warps=8 if BM * BN == 128 * 128 else 4, num_stages=3,
        )  # fmt: skip
    return y
