"""Triton kernels: convolutions and linear layers of K draws with a fused epilogue. Imported on first use, since triton
is optional.

Activations are channels last, the rows of draw k one after the other. A row is one position of one picture, or one
vector of a linear layer, which is computed as a 1 × 1 convolution. A layer computes G_k Bᵀ(patch) + e_k ‖patch outside
B‖, or W_k (patch), for it, then the epilogue: scale and shift per channel, residual sum, max with `floor`, GELU or
SiLU. With a bias, the patch ends with a 1 that is not loaded: the last row of B or W_k is added. Bᵀ(patch) stays on
chip (`factored`), or, for few rows, is computed in `splits` parallel parts that are then added (`parted`). Sums are in
float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from dubito.models.network.geometry import Conv, Linear

LEAST = 16  # smallest dimension of tl.dot
MANY = 132  # triton programs that fill a large GPU
MOST_PARTS = 8
WIDEST_AHEAD = 128  # columns of the next layer's B
CURVES: dict[str | None, int] = {"gelu": 1, "silu": 2}


@triton.jit
def positions(first, H, W, C, Ho, Wo, stride, padding, POINT: tl.constexpr, BM: tl.constexpr):
    """For rows first … first + BM − 1: the 64-bit offset of their first picture in x, each row's 32-bit offset from
    there, and the coordinates of its first tap.

    With 64 bits for every row, addresses would take most of the registers.
    """
    row = tl.arange(0, BM)
    if POINT:
        return first.to(tl.int64) * C, row * C, row, row
    start = first // (Ho * Wo)
    picture, position = (first + row) // (Ho * Wo) - start, (first + row) % (Ho * Wo)
    top, left = (position // Wo) * stride - padding, (position % Wo) * stride - padding
    return start.to(tl.int64) * (H * W * C), ((picture * H + top) * W + left) * C, top, left


@triton.jit
def _taps(
    x, place, top, left, live, k, H, W, C,
    side: tl.constexpr, WHOLE: tl.constexpr, POINT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load elements k … k + BK − 1 of each row's patch, ordered tap by tap."""
    if POINT:
        one = k + tl.arange(0, BK)
        inside = live[:, None] if WHOLE else live[:, None] & (one < C)[None, :]
        return tl.load(x + (place[:, None] + one[None, :]), mask=inside, other=0.0)
    if WHOLE:  # of one tap
        tap = k // C
        down, right = tap // side, tap % side
        h, w = top + down, left + right
        inside = live & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        one = (down * W + right - tap) * C + k + tl.arange(0, BK)
        return tl.load(x + (place[:, None] + one[None, :]), mask=inside[:, None], other=0.0)
    one = k + tl.arange(0, BK)
    tap = one // C
    down, right = tap // side, tap % side
    h, w = top[:, None] + down[None, :], left[:, None] + right[None, :]
    inside = live[:, None] & (one < side * side * C)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    return tl.load(x + (place[:, None] + ((down * W + right) * C + one % C)[None, :]), mask=inside, other=0.0)


@triton.jit
def at_least(a, floor):
    """NaN where `a` is, as torch has it."""
    return tl.maximum(a, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def curved(a, CURVE: tl.constexpr):
    if CURVE == 1:  # the exact GELU
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    if CURVE == 2:  # SiLU
        a = a / (1.0 + tl.exp(-a))
    return a


@triton.jit
def _finish(
    acc, y, residual, scale, shift, floor, live, n, d_out,
    RESIDUAL: tl.constexpr, CURVE: tl.constexpr, STORE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The epilogue, and the store of the result; `y` and `residual` point to the first row."""
    mask = live[:, None] & (n < d_out)[None, :]
    offset = tl.arange(0, BM)[:, None] * d_out + n[None, :]
    acc = (
        acc * tl.load(scale + n, mask=n < d_out, other=0.0)[None, :]
        + tl.load(shift + n, mask=n < d_out, other=0.0)[None, :]
    )
    if RESIDUAL:
        acc += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    out = at_least(curved(acc, CURVE), floor).to(y.dtype.element_ty)
    if STORE:
        tl.store(y + offset, out, mask=mask)
    return out


@triton.jit
def _beyond(energy, c, c2, R2: tl.constexpr, LEFT: tl.constexpr):
    """The norm outside B; with `LEFT`, its square is what `energy` is."""
    if not LEFT:
        energy -= tl.sum(c * c, 1)
        if R2 > 0:
            energy -= tl.sum(c2 * c2, 1)
    return tl.sqrt(tl.maximum(energy, 0.0))


@triton.jit
def _spread(
    c, c2, energy, k, G, e, g_k, g_r, g_o, r, y, residual, scale, shift, floor, live, blocks, d_out,
    P, c_next, energy_next, p_i, p_r, q,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, LEFT: tl.constexpr, RESIDUAL: tl.constexpr,
    CURVE: tl.constexpr, Q: tl.constexpr, Q2: tl.constexpr, STORE: tl.constexpr, LAST: tl.constexpr,
    WHOLE: tl.constexpr, OUTSIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Multiply c by draw k's matrix, `blocks` blocks of BN outputs; program_id(1) gives the first block.

    With Q > 0, multiply these outputs by P, the q columns of the next layer's B in blocks of Q and Q2, and store what
    that comes to for this part of them; `c_next` and `energy_next` point to the first row of the part. `LAST`: P has a
    further row, of the next layer's bias. `WHOLE`: there is one part, so that what is left outside is known. `OUTSIDE`:
    it is asked for.
    """
    S: tl.constexpr = R2 if R2 > 0 else 1
    col, col2 = tl.arange(0, R), R + tl.arange(0, S)
    beyond = _beyond(energy, c, c2, R2, LEFT) if NOISE else energy
    c, c2 = c.to(y.dtype.element_ty), c2.to(y.dtype.element_ty)
    G += k * g_k
    e += k * d_out
    T: tl.constexpr = Q if Q > 0 else 1
    T2: tl.constexpr = Q2 if Q2 > 0 else 1
    of_next, of_next2 = tl.arange(0, T), Q + tl.arange(0, T2)
    d = tl.zeros((BM, T), tl.float32)
    d2 = tl.zeros((BM, T2), tl.float32)
    sizes = tl.zeros((BM,), tl.float32)
    if LAST:
        ones = (tl.program_id(1) == 0).to(tl.float32)
        last = P + d_out * p_i
        d += ones * tl.load(last + of_next * p_r, mask=of_next < q, other=0.0).to(tl.float32)[None, :]
        if Q2 > 0:
            d2 += ones * tl.load(last + of_next2 * p_r, mask=of_next2 < q, other=0.0).to(tl.float32)[None, :]
        sizes += ones
    first = tl.program_id(1) * blocks * BN
    for n0 in range(first, tl.minimum(first + blocks * BN, d_out), BN):
        n = n0 + tl.arange(0, BN)
        inside = (n < d_out)[None, :]
        g = tl.load(G + (col[:, None] * g_r + n[None, :] * g_o), mask=(col < r)[:, None] & inside, other=0.0)
        acc = tl.dot(c, g, input_precision="ieee")
        if R2 > 0:
            g2 = tl.load(G + (col2[:, None] * g_r + n[None, :] * g_o), mask=(col2 < r)[:, None] & inside, other=0.0)
            acc = tl.dot(c2, g2, acc, input_precision="ieee")
        if NOISE:
            acc += beyond[:, None] * tl.load(e + n, mask=n < d_out, other=0.0).to(tl.float32)[None, :]
        out = _finish(acc, y, residual, scale, shift, floor, live, n, d_out, RESIDUAL, CURVE, STORE, BM)
        if Q > 0:
            known = (n < d_out)[:, None]
            at = P + n[:, None] * p_i
            p = tl.load(at + of_next[None, :] * p_r, mask=known & (of_next < q)[None, :], other=0.0)
            d = tl.dot(out, p, d, input_precision="ieee")
            if Q2 > 0:
                p2 = tl.load(at + of_next2[None, :] * p_r, mask=known & (of_next2 < q)[None, :], other=0.0)
                d2 = tl.dot(out, p2, d2, input_precision="ieee")
            if OUTSIDE:
                sizes += tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)
    if Q > 0:
        local = tl.arange(0, BM)
        if OUTSIDE:
            if WHOLE:
                sizes -= tl.sum(d * d, 1)
                if Q2 > 0:
                    sizes -= tl.sum(d2 * d2, 1)
            tl.store(energy_next + local, sizes, mask=live)
        to = c_next + local[:, None] * (Q + Q2)
        tl.store(to + of_next[None, :], d.to(c_next.dtype.element_ty), mask=live[:, None])
        if Q2 > 0:
            tl.store(to + of_next2[None, :], d2.to(c_next.dtype.element_ty), mask=live[:, None])


@triton.jit
def _project(
    x, B, b_i, b_r, r, place, top, left, live, start, end, ones, H, W, C,
    side: tl.constexpr, WHOLE: tl.constexpr, POINT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bᵀ(patch) over a part of the patch, its columns in two blocks of R and R2, and the part's squared norm.

    `ones` is 1 for the part that has the 1 of the bias, else 0.
    """
    Q: tl.constexpr = R2 if R2 > 0 else 1
    c = tl.zeros((BM, R), tl.float32)
    c2 = tl.zeros((BM, Q), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    col, col2 = tl.arange(0, R), R + tl.arange(0, Q)
    if BIAS:
        last = B + side * side * C * b_i
        c += ones * tl.load(last + col * b_r, mask=col < r, other=0.0).to(tl.float32)[None, :]
        if R2 > 0:
            c2 += ones * tl.load(last + col2 * b_r, mask=col2 < r, other=0.0).to(tl.float32)[None, :]
        energy += ones
    for k in range(start, end, BK):
        one = k + tl.arange(0, BK)
        a = _taps(x, place, top, left, live, k, H, W, C, side, WHOLE, POINT, BK)
        inside = (one < side * side * C)[:, None]
        p = tl.load(B + (one[:, None] * b_i + col[None, :] * b_r), mask=inside & (col < r)[None, :], other=0.0)
        c = tl.dot(a, p, c, input_precision="ieee")
        if R2 > 0:
            p2 = tl.load(B + (one[:, None] * b_i + col2[None, :] * b_r), mask=inside & (col2 < r)[None, :], other=0.0)
            c2 = tl.dot(a, p2, c2, input_precision="ieee")
        if NOISE:
            # `where` leaves the values as they are, and makes triton wait for the products: triton 3.6 frees a buffer
            # when its other reader is done, and would overwrite what the matrix units still read
            c, c2 = tl.where(live[:, None], c, 0.0), tl.where(live[:, None], c2, 0.0)
            wide = a.to(tl.float32)
            energy += tl.sum(wide * wide, 1)
    return c, c2, energy


@triton.jit(do_not_specialize=["floor", "rows", "H", "W", "Ho", "Wo", "stride", "padding", "blocks"])
def _factored_kernel(
    x, B, G, e, y, residual, scale, shift, floor, rows, H, W, C, Ho, Wo, d_out, r, stride, padding,
    b_i, b_r, g_k, g_r, g_o, blocks, P, c_next, energy_next, p_i, p_r, q,
    side: tl.constexpr, WHOLE: tl.constexpr, POINT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    CURVE: tl.constexpr, Q: tl.constexpr, Q2: tl.constexpr, STORE: tl.constexpr, LAST: tl.constexpr, ONE: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM  # within the draw
    live = row + tl.arange(0, BM) < rows
    begin, place, top, left = positions(row, H, W, C, Ho, Wo, stride, padding, POINT, BM)
    x += k * (rows // (Ho * Wo) * H * W) * C + begin
    y += (k * rows + row) * d_out
    residual += (k * rows + row) * d_out
    c, c2, energy = _project(
        x, B, b_i, b_r, r, place, top, left, live, 0, side * side * C, 1.0, H, W, C,
        side, WHOLE, POINT, BM, BK, R, R2, NOISE, BIAS,
    )  # fmt: skip
    place_next = tl.program_id(1).to(tl.int64) * (tl.num_programs(2) * rows) + k * rows + row
    _spread(
        c, c2, energy, k, G, e, g_k, g_r, g_o, r, y, residual, scale, shift, floor, live, blocks, d_out,
        P, c_next + place_next * (Q + Q2), energy_next + place_next, p_i, p_r, q,
        R, R2, NOISE, False, RESIDUAL, CURVE, Q, Q2, STORE, LAST, ONE, OUTSIDE, BM, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "H", "W", "Ho", "Wo", "stride", "padding", "blocks"])
def _project_kernel(
    x, B, c_out, energy_out, rows, H, W, C, Ho, Wo, r, stride, padding, b_i, b_r, blocks,
    side: tl.constexpr, WHOLE: tl.constexpr, POINT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    local = tl.arange(0, BM)
    live = row + local < rows
    begin, place, top, left = positions(row, H, W, C, Ho, Wo, stride, padding, POINT, BM)
    start = tl.program_id(1) * blocks * BK
    c, c2, energy = _project(
        x + begin, B, b_i, b_r, r, place, top, left, live, start, tl.minimum(start + blocks * BK, side * side * C),
        (part == 0).to(tl.float32), H, W, C, side, WHOLE, POINT, BM, BK, R, R2, NOISE, BIAS,
    )  # fmt: skip
    c_out += (part * rows + row) * (R + R2)
    offset = local[:, None] * (R + R2)
    tl.store(c_out + (offset + tl.arange(0, R)[None, :]), c, mask=live[:, None])
    if R2 > 0:
        tl.store(c_out + (offset + R + tl.arange(0, R2)[None, :]), c2, mask=live[:, None])
    if NOISE:
        tl.store(energy_out + part * rows + row + local, energy, mask=live)


@triton.jit(do_not_specialize=["floor", "rows", "next_rows", "all_rows", "blocks"])
def _mix_kernel(
    c_in, energy_in, G, e, y, residual, scale, shift, floor, rows, next_rows, all_rows, d_out, r, g_k, g_r, g_o, blocks,
    P, c_next, energy_next, p_i, p_r, q,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    R: tl.constexpr, R2: tl.constexpr, NOISE: tl.constexpr, LEFT: tl.constexpr, RESIDUAL: tl.constexpr,
    CURVE: tl.constexpr, Q: tl.constexpr, Q2: tl.constexpr, STORE: tl.constexpr, LAST: tl.constexpr, ONE: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM  # within the draw
    local = tl.arange(0, BM)
    live = row + local < rows
    y += (k * rows + row) * d_out
    residual += (k * rows + row) * d_out
    c_in += (k * next_rows + row) * (R + R2)  # of the next draw; 0 where all have the same
    energy_in += k * next_rows + row
    S: tl.constexpr = R2 if R2 > 0 else 1
    c = tl.zeros((BM, R), tl.float32)
    c2 = tl.zeros((BM, S), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    offset = local[:, None] * (R + R2)
    for part in tl.static_range(SPLITS):
        of_part = c_in + (all_rows.to(tl.int64) * part) * (R + R2)
        c += tl.load(of_part + (offset + tl.arange(0, R)[None, :]), mask=live[:, None], other=0.0).to(tl.float32)
        if R2 > 0:
            second = offset + R + tl.arange(0, R2)[None, :]
            c2 += tl.load(of_part + second, mask=live[:, None], other=0.0).to(tl.float32)
        if NOISE:
            energy += tl.load(energy_in + all_rows.to(tl.int64) * part + local, mask=live, other=0.0)
    place_next = tl.program_id(1).to(tl.int64) * (tl.num_programs(2) * rows) + k * rows + row
    _spread(
        c, c2, energy, k, G, e, g_k, g_r, g_o, r, y, residual, scale, shift, floor, live, blocks, d_out,
        P, c_next + place_next * (Q + Q2), energy_next + place_next, p_i, p_r, q,
        R, R2, NOISE, LEFT, RESIDUAL, CURVE, Q, Q2, STORE, LAST, ONE, OUTSIDE, BM, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["floor", "rows", "H", "W", "Ho", "Wo", "stride", "padding"])
def _dense_kernel(
    x, W_, y, residual, scale, shift, floor, rows, H, W, C, Ho, Wo, d_out, stride, padding, w_k,
    side: tl.constexpr, WHOLE: tl.constexpr, POINT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(d_out, BN)
    row = tl.program_id(0) // across * BM  # within the draw
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    live = row + tl.arange(0, BM) < rows
    begin, place, top, left = positions(row, H, W, C, Ho, Wo, stride, padding, POINT, BM)
    x += k * (rows // (Ho * Wo) * H * W) * C + begin
    W_ += k * w_k
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, side * side * C, BK):
        one = i + tl.arange(0, BK)
        a = _taps(x, place, top, left, live, i, H, W, C, side, WHOLE, POINT, BK)
        inside = (one < side * side * C)[:, None] & (n < d_out)[None, :]
        w = tl.load(W_ + (one[:, None] * d_out + n[None, :]), mask=inside, other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(W_ + side * side * C * d_out + n, mask=n < d_out, other=0.0).to(tl.float32)[None, :]
    offset = (k * rows + row) * d_out
    _finish(acc, y + offset, residual + offset, scale, shift, floor, live, n, d_out, RESIDUAL, CURVE, True, BM)


@dataclass(frozen=True)
class Epilogue:
    """Fused after a layer: y ← then(scale y + shift + residual)."""

    scale: Tensor  # (d_out,) float32
    shift: Tensor
    residual: Tensor | None
    then: Literal["relu", "gelu", "silu"] | None = None  # the exact GELU

    @property
    def floor(self) -> float:
        return 0.0 if self.then == "relu" else -math.inf

    @property
    def curve(self) -> int:
        return CURVES.get(self.then, 0)


@dataclass(frozen=True)
class Projected:
    """Bᵀ of a layer's inputs, in parts of them that are to be added, and their squared norm; of one part, what is left
    of that outside B."""

    c: Tensor  # (parts, rows, columns), in float32 where there are several
    energy: Tensor  # (parts, rows) float32; any tensor where nothing is asked for outside


@dataclass
class Ahead:
    """What a kernel makes of its outputs for the next layer."""

    B: Tensor  # (d_out, r), with a further row where there is a bias; r ≤ WIDEST_AHEAD
    bias: bool
    outside: bool  # whether the next layer has noise outside B
    stored: bool = True  # whether anything else reads the outputs
    made: Projected | None = None  # by the kernel

    def prepare(self, parts: int, rows: int, like: Tensor) -> None:
        dtype = like.dtype if parts == 1 else torch.float32
        c = torch.empty(parts, rows, sum(_runs(self.B.shape[1])), dtype=dtype, device=like.device)
        self.made = Projected(c, torch.empty(parts, rows, device=like.device) if self.outside else c)


def _next(ahead: Ahead | None, y: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A kernel's arguments and constants for the next layer; any tensor where there is none."""
    if ahead is None:
        return (y, y, y, 0, 0, 0), (0, 0, True, False, True, False)
    assert ahead.made is not None
    given = (ahead.B, ahead.made.c, ahead.made.energy, *ahead.B.stride(), ahead.B.shape[1])
    return given, (*_runs(ahead.B.shape[1]), ahead.stored, ahead.bias, len(ahead.made.c) == 1, ahead.outside)


def suits(geometry: object) -> TypeGuard[Conv | Linear]:
    """Whether these kernels support the layer: linear, or a convolution that is square, zero-padded, without dilation
    and groups."""
    if isinstance(geometry, Linear):
        return geometry.groups == 1
    if not isinstance(geometry, Conv) or geometry.dims != 2 or geometry.groups != 1:
        return False
    same = all(len(set(t)) == 1 for t in (geometry.kernel, geometry.stride) if isinstance(t, tuple))
    plain = geometry.padding_mode == "zeros" and set(geometry.dilation) == {1}
    return same and plain and isinstance(geometry.padding, tuple) and len(set(geometry.padding)) == 1


def tap_by_tap(geometry: Conv | Linear, B: Tensor) -> Tensor:
    """Reorder rows of a (d_in, n) or (K, d_in, n) matrix from channel by channel to tap by tap; a bias stays last."""
    if isinstance(geometry, Linear):
        return B.contiguous()
    taps, bias = geometry.kernel[0] ** 2, int(geometry.bias)
    rows, last = B.split([B.shape[-2] - bias, bias], -2)
    rows = rows.unflatten(-2, (geometry.inputs, taps)).transpose(-3, -2).flatten(-3, -2)
    return torch.cat([rows, last], -2) if bias else rows.contiguous()


@dataclass(frozen=True)
class _Shape:
    """Sizes of one layer; a linear one is a 1 × 1 convolution of pictures that have one pixel."""

    N: int
    H: int
    W: int
    C: int
    Ho: int
    Wo: int
    side: int
    stride: int
    padding: int
    leading: tuple[int, ...] | None  # axes before the last, of a linear layer's inputs

    @classmethod
    def of(cls, geometry: Conv | Linear, x: Tensor) -> "_Shape":
        if isinstance(geometry, Linear):
            leading, C = tuple(x.shape[:-1]), x.shape[-1]
            return cls(math.prod(leading), 1, 1, C, 1, 1, 1, 1, 0, leading)
        N, C, H, W = x.shape
        side, stride, padding = geometry.kernel[0], geometry.stride[0], int(geometry.padding[0])
        Ho, Wo = ((n + 2 * padding - side) // stride + 1 for n in (H, W))
        return cls(N, H, W, C, Ho, Wo, side, stride, padding, None)

    @property
    def rows(self) -> int:
        return self.N * self.Ho * self.Wo

    @property
    def point(self) -> bool:
        """Whether the patch is a single row of x: a 1 × 1 convolution."""
        return self.side == 1 and self.stride == 1 and self.padding == 0

    def tile(self) -> tuple[int, bool]:
        """BK, the elements of a patch loaded at a time, and whether these always belong to one tap."""
        BK = next((size for size in (64, 32, 16) if self.C % size == 0), None)
        return (32, False) if BK is None else (BK, True)

    def laid(self, x: Tensor) -> Tensor:
        """Channels last."""
        return x.contiguous(memory_format=torch.channels_last if self.leading is None else torch.contiguous_format)

    def output(self, x: Tensor, d_out: int) -> Tensor:
        if self.leading is not None:
            return torch.empty((*self.leading, d_out), dtype=x.dtype, device=x.device)
        shape = (self.N, d_out, self.Ho, self.Wo)
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)

    def added(self, residual: Tensor | None, y: Tensor) -> Tensor:
        """What is added to the result; any tensor where nothing is."""
        return y if residual is None else self.laid(residual.expand_as(y))


def _runs(r: int) -> tuple[int, int]:
    """r columns as two blocks whose sizes are powers of two; the second may be empty."""
    first = max(LEAST, 1 << (r.bit_length() - 1))
    return first, 0 if r <= first else max(LEAST, triton.next_power_of_2(r - first))


@dataclass(frozen=True)
class Tile:
    """Tile of one triton program, and its launch parameters."""

    BM: int  # rows
    BN: int  # outputs per step
    warps: int
    stages: int


def factored(
    geometry: Conv | Linear,
    x: Tensor,
    B: Tensor,
    G: Tensor,
    e: Tensor | None,
    after: Epilogue,
    ahead: Ahead | None = None,
) -> Tensor:
    """B (d_in, r) ordered tap by tap, G (K, d_out, r), e (K, d_out): one kernel, with Bᵀ(patch) on chip."""
    s = _Shape.of(geometry, x)
    x = s.laid(x)
    K, d_out, r = G.shape
    rows, (R, R2), (BK, whole) = s.rows // K, _runs(r), s.tile()
    y = s.output(x, d_out)
    residual = s.added(after.residual, y)
    tile = (
        tile_factored(after.residual is not None) if ahead is None else tile_factored_ahead(after.curve, e is not None)
    )
    tiles, columns = triton.cdiv(rows, tile.BM) * K, triton.cdiv(d_out, tile.BN)
    parts = triton.cdiv(MANY, tiles)
    blocks = triton.cdiv(columns, parts if ahead is None else min(MOST_PARTS, parts))
    if ahead is not None:
        ahead.prepare(triton.cdiv(columns, blocks), s.rows, x)
    given, constants = _next(ahead, y)
    with torch.cuda.device_of(x):
        _factored_kernel[triton.cdiv(rows, tile.BM), triton.cdiv(columns, blocks), K](
            x, B, G, G if e is None else e, y, residual, after.scale, after.shift, after.floor,
            rows, s.H, s.W, s.C, s.Ho, s.Wo, d_out, r, s.stride, s.padding, *B.stride(),
            G.stride(0), G.stride(2), G.stride(1), blocks, *given,
            s.side, whole, s.point, tile.BM, tile.BN, BK, R, R2, e is not None, geometry.bias,
            after.residual is not None, after.curve, *constants,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def parted(
    geometry: Conv | Linear,
    x: Tensor,
    B: Tensor,
    G: Tensor,
    e: Tensor | None,
    after: Epilogue,
    ahead: Ahead | None = None,
    shared: bool = False,
) -> Tensor:
    """`factored` in two kernels: Bᵀ(patch) in parallel parts of the patch, then each draw's matrix. With `shared`, the
    inputs of all draws are the same: Bᵀ(patch) is computed for those of the first alone."""
    whole_pass = _Shape.of(geometry, x)
    K, d_out, r = G.shape
    s = whole_pass
    (R, R2), (BK, whole) = _runs(r), s.tile()
    if shared:
        x = x[: len(x) // K]
        s = _Shape.of(geometry, x)
    x = s.laid(x)
    tile = tile_project(whole_pass.rows // K)
    steps, tiles = triton.cdiv(s.side**2 * s.C, BK), triton.cdiv(s.rows, tile.BM)
    blocks = triton.cdiv(steps, max(1, min(MOST_PARTS, triton.cdiv(MANY, tiles), steps // 2)))
    splits = triton.cdiv(steps, blocks)
    c = torch.empty(splits, s.rows, R + R2, device=x.device)
    energy = torch.empty(splits, s.rows, device=x.device) if e is not None else c
    with torch.cuda.device_of(x):
        _project_kernel[triton.cdiv(s.rows, tile.BM), splits](
            x, B, c, energy, s.rows, s.H, s.W, s.C, s.Ho, s.Wo, r, s.stride, s.padding, *B.stride(), blocks,
            s.side, whole, s.point, tile.BM, BK, R, R2, e is not None, geometry.bias,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return _mix(whole_pass, whole_pass.output(x, d_out), Projected(c, energy), False, G, e, after, ahead)


def mixed(
    geometry: Conv | Linear,
    x: Tensor,
    projected: Projected,
    G: Tensor,
    e: Tensor | None,
    after: Epilogue,
    ahead: Ahead | None = None,
) -> Tensor:
    """A layer of one tap from what the layer before has made; of x, only the shape is read."""
    s, alone = _Shape.of(geometry, x), len(projected.c) == 1
    return _mix(s, s.output(x, G.shape[1]), projected, alone, G, e, after, ahead)


def _mix(
    s: "_Shape",
    y: Tensor,
    projected: Projected,
    left: bool,
    G: Tensor,
    e: Tensor | None,
    after: Epilogue,
    ahead: Ahead | None,
) -> Tensor:
    """Each draw's matrix. `left`: the norm's part outside B is given, not the whole."""
    K, d_out, r = G.shape
    splits, all_rows, _ = projected.c.shape
    residual, rows = s.added(after.residual, y), s.rows // K
    tile = tile_mix(rows) if ahead is None else tile_mix_ahead(rows, ahead.stored)
    tiles, columns = triton.cdiv(rows, tile.BM), triton.cdiv(d_out, tile.BN)
    wide = 1 if tiles * K * columns <= 8 * MANY else 4
    if ahead is not None:
        wide = triton.cdiv(columns, min(MOST_PARTS, triton.cdiv(MANY, tiles * K)))
        ahead.prepare(triton.cdiv(columns, wide), s.rows, y)
    given, constants = _next(ahead, y)
    with torch.cuda.device_of(y):
        _mix_kernel[tiles, triton.cdiv(columns, wide), K](
            projected.c, projected.energy, G, G if e is None else e, y, residual, after.scale, after.shift, after.floor,
            rows, rows if all_rows == s.rows else 0, all_rows, d_out, r, G.stride(0), G.stride(2), G.stride(1), wide,
            *given, splits, tile.BM, tile.BN, *_runs(r), e is not None, left, after.residual is not None, after.curve,
            *constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def dense(geometry: Conv | Linear, x: Tensor, W: Tensor, after: Epilogue) -> Tensor:
    """W (K or 1, d_in, d_out) ordered tap by tap: one kernel for all draws."""
    s = _Shape.of(geometry, x)
    x = s.laid(x)
    K, _, d_out = W.shape
    rows, (BK, whole) = s.rows // K, s.tile()
    y = s.output(x, d_out)
    residual = s.added(after.residual, y)
    tile = tile_dense(rows, d_out, after.residual is not None)
    with torch.cuda.device_of(x):
        _dense_kernel[triton.cdiv(rows, tile.BM) * triton.cdiv(d_out, tile.BN), K](
            x, W, y, residual, after.scale, after.shift, after.floor,
            rows, s.H, s.W, s.C, s.Ho, s.Wo, d_out, s.stride, s.padding, W.stride(0),
            s.side, whole, s.point, tile.BM, tile.BN, BK, geometry.bias, after.residual is not None, after.curve,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


# Tile sizes measured on an H200 with a ResNet-50 and 1 to 500 pictures: each is within a few per cent of the best.
# Those that go on to the next layer: with a ResNet-50, a ConvNeXt and a ViT at 224 × 224, 1 and 8 pictures.


def tile_factored(residual: bool) -> Tile:
    return Tile(128 if residual else 64, 64, 4, 3)


def tile_project(rows: int) -> Tile:
    """`rows` of one draw."""
    return Tile(64 if rows > 32 else 32, 0, 4, 4)


def tile_mix(rows: int) -> Tile:
    return Tile(16 if rows <= 32 else 64 if rows <= 128 else 128, 64, 4, 2)


def tile_factored_ahead(curve: int, noise: bool) -> Tile:
    """With noise, 128 × 64 numbers for each of four warps would not fit the registers."""
    return Tile(128, 32, 8, 3) if curve or noise else Tile(128, 64, 4, 3)


def tile_mix_ahead(rows: int, stored: bool) -> Tile:
    if rows <= 32:
        return Tile(16, 64, 4, 2)
    return Tile(64, 64, 4, 3) if stored else Tile(128, 32, 8, 2)


def tile_dense(rows: int, d_out: int, residual: bool) -> Tile:
    if rows < 128:
        return Tile(64 if rows > 32 else 32 if rows > 16 else 16, 64, 4, 3)
    if residual or d_out < 128:
        return Tile(128, 64, 4, 3)
    return Tile(64, 128, 4, 3) if d_out < 256 else Tile(128, 256, 8, 3)
