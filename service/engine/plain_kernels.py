"""Triton kernels for what runs between Bayesian layers, LayerNorm, depthwise convolutions and max pooling, and for the
sums over a pass's draws. Imported on first use, since triton is optional.

Activations are channels last, in half precision; sums are in float32. These operators have no weights that are drawn,
so the draws of a pass are rows like any others.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dubito.service.engine.kernels import LEAST, Epilogue, at_least, curved, positions

WIDEST = 8192  # classes that are summed
PER_PROGRAM = 4096  # numbers of a normalised or pooled tile
HIGH = 4  # rows of outputs of a depthwise tile, which the kernel writes out
DRAWS, COLUMNS = 32, 32  # of a tile that is summed over its draws
WIDE, CHANNELS, WARPS = 16, 32, 1  # its columns and channels, and warps: the best of eight for 7 × 7 on an H200


@triton.jit(do_not_specialize=["rows", "eps"])
def _layer_norm_kernel(
    x, y, weight, bias, shift, rows, C, eps,
    BM: tl.constexpr, BC: tl.constexpr, AFFINE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM
    col = tl.arange(0, BC)
    inside = col < C
    live = (row + tl.arange(0, BM) < rows)[:, None] & inside[None, :]
    offset = tl.arange(0, BM)[:, None] * C + col[None, :]
    a = tl.load(x + row * C + offset, mask=live, other=0.0).to(tl.float32)
    if SHIFTED:
        a += tl.load(shift + col, mask=inside, other=0.0)[None, :]
    mean = tl.sum(a, 1) / C
    away = tl.where(live, a - mean[:, None], 0.0)
    out = away * tl.rsqrt(tl.sum(away * away, 1) / C + eps)[:, None]
    if AFFINE:
        out = out * tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)[None, :]
        out += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row * C + offset, out.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["floor", "rows"])
def _finish_kernel(
    x, scale, shift, floor, rows, C, CURVE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    live = (row + tl.arange(0, BM) < rows)[:, None] & (col < C)[None, :]
    at = x + row * C + (tl.arange(0, BM)[:, None] * C + col[None, :])
    a = tl.load(at, mask=live, other=0.0).to(tl.float32) * tl.load(scale + col, mask=col < C, other=0.0)[None, :]
    a = curved(a + tl.load(shift + col, mask=col < C, other=0.0)[None, :], CURVE)
    tl.store(at, at_least(a, floor).to(x.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "H", "W", "Ho", "Wo", "stride", "padding"])
def _max_pool_kernel(
    x, y, rows, H, W, C, Ho, Wo, stride, padding, side: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BM
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    local = tl.arange(0, BM)
    live = (row + local < rows)[:, None] & (col < C)[None, :]
    begin, place, top, left = positions(row, H, W, C, Ho, Wo, stride, padding, False, BM)
    best = tl.full((BM, BC), float("-inf"), tl.float32)
    for down in tl.static_range(side):
        for right in tl.static_range(side):
            h, w = top + down, left + right
            inside = live & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
            at = (place + (down * W + right) * C)[:, None] + col[None, :]
            value = tl.load(x + begin + at, mask=inside, other=float("-inf")).to(tl.float32)
            best = at_least(best, value)
    to = y + row.to(tl.int64) * C
    tl.store(to + (local[:, None] * C + col[None, :]), best.to(y.dtype.element_ty), mask=live)


@triton.jit
def _added(acc, a, w, down, right: tl.constexpr, col, inside, C, side: tl.constexpr):
    """With one tap, where the input row is among those of the output row: elsewhere it may be infinite."""
    if (down >= 0) & (down < side):
        acc += a * tl.load(w + (down * side + right) * C + col, mask=inside, other=0.0)[None, :]
    return acc


@triton.jit
def _store(y, at, acc, by, plus, floor, out, row, Wo, Ho, inside, CURVE: tl.constexpr):
    live = (out < tl.where(row < Ho, Wo, 0))[:, None] & inside[None, :]
    tl.store(y + at, at_least(curved(acc * by + plus, CURVE), floor).to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["floor", "H", "W", "Ho", "Wo", "padding"])
def _depthwise_kernel(
    x, w, y, scale, shift, floor, H, W, C, Ho, Wo, padding,
    side: tl.constexpr, stride: tl.constexpr, CURVE: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BW columns of four output rows: an input is loaded once for the rows that it belongs to."""
    across, tiles = tl.cdiv(Wo, BW), tl.cdiv(Wo, BW) * tl.cdiv(Ho, 4)
    picture, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    top, left = tile // across * 4, tile % across * BW
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = col < C
    out = left + tl.arange(0, BW)
    x += picture * (H * W * C)
    acc0 = tl.zeros((BW, BC), tl.float32)
    acc1 = tl.zeros((BW, BC), tl.float32)
    acc2 = tl.zeros((BW, BC), tl.float32)
    acc3 = tl.zeros((BW, BC), tl.float32)
    for row in range(side + 3 * stride):
        h = top * stride - padding + row
        end = tl.where((h >= 0) & (h < H), W, 0)  # no column of a row that is outside
        for right in tl.static_range(side):
            across_x = out * stride - padding + right
            live = ((across_x >= 0) & (across_x < end))[:, None] & inside[None, :]
            a = tl.load(x + ((h * W + across_x) * C)[:, None] + col[None, :], mask=live, other=0.0).to(tl.float32)
            acc0 = _added(acc0, a, w, row, right, col, inside, C, side)
            acc1 = _added(acc1, a, w, row - stride, right, col, inside, C, side)
            acc2 = _added(acc2, a, w, row - 2 * stride, right, col, inside, C, side)
            acc3 = _added(acc3, a, w, row - 3 * stride, right, col, inside, C, side)
    by = tl.load(scale + col, mask=inside, other=0.0)[None, :]
    plus = tl.load(shift + col, mask=inside, other=0.0)[None, :]
    y += picture * (Ho * Wo * C)
    at = ((top * Wo + out) * C)[:, None] + col[None, :]
    _store(y, at, acc0, by, plus, floor, out, top, Wo, Ho, inside, CURVE)
    _store(y, at + Wo * C, acc1, by, plus, floor, out, top + 1, Wo, Ho, inside, CURVE)
    _store(y, at + 2 * Wo * C, acc2, by, plus, floor, out, top + 2, Wo, Ho, inside, CURVE)
    _store(y, at + 3 * Wo * C, acc3, by, plus, floor, out, top + 3, Wo, Ho, inside, CURVE)


@triton.jit(do_not_specialize=["width"])
def _class_kernel(logits, distance, parts, C, width, DISTANCE: tl.constexpr, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BC)
    inside = col < C
    value = tl.load(logits + row * C + col, mask=inside, other=float("-inf")).to(tl.float64)
    top = tl.max(value, 0)
    away = value - top
    each = tl.exp(away)
    total = tl.sum(each, 0)
    p = each / total
    left = tl.log(total)
    parts += row * width
    tl.store(parts + col, p, mask=inside)
    tl.store(parts + C + col, p * p, mask=inside)
    tl.store(parts + 2 * C, -tl.sum(tl.where(p == 0, 0.0, p * (away - left)), 0))  # NaN where p is
    tl.store(parts + 2 * C + 1, -(top + left))
    if DISTANCE:
        tl.store(parts + 2 * C + 2, tl.load(distance + row).to(tl.float64))


@triton.jit(do_not_specialize=["K", "B", "width"])
def _over_draws_kernel(parts, out, K, B, width, BK: tl.constexpr, BC: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BC,), tl.float64)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        live = (k < K)[:, None] & (col < width)[None, :]
        at = (k.to(tl.int64) * B + b)[:, None] * width + col[None, :]
        acc += tl.sum(tl.load(parts + at, mask=live, other=0.0), 0)
    tl.store(out + b * width + col, acc, mask=col < width)


def class_sums(logits: Tensor, distance: Tensor | None = None) -> Tensor:
    """`uncertainty.class_sums` of all draws (K, B, C), in two kernels."""
    K, B, C = logits.shape
    width = 2 * C + (2 if distance is None else 3)
    logits = logits.contiguous()
    parts = torch.empty(K * B, width, dtype=torch.float64, device=logits.device)
    out = torch.empty(B, width, dtype=torch.float64, device=logits.device)
    given = logits if distance is None else distance.contiguous()
    with torch.cuda.device_of(logits):
        _class_kernel[(K * B,)](
            logits, given, parts, C, width, distance is not None, max(LEAST, triton.next_power_of_2(C)), num_warps=4
        )
        _over_draws_kernel[B, triton.cdiv(width, COLUMNS)](parts, out, K, B, width, DRAWS, COLUMNS, num_warps=4)
    return out


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None
) -> Tensor:
    """Over the last axis of x, or of x + shift, in float32."""
    x = x.contiguous()
    C = x.shape[-1]
    rows, BC, y = x.numel() // C, triton.next_power_of_2(C), torch.empty_like(x)
    BM = max(1, PER_PROGRAM // BC)
    affine = weight is not None or bias is not None
    weight = x.new_ones(C) if weight is None else weight
    bias = x.new_zeros(C) if bias is None else bias
    with torch.cuda.device_of(x):
        _layer_norm_kernel[(triton.cdiv(rows, BM),)](
            x, y, weight, bias, bias if shift is None else shift, rows, C, eps, BM, BC, affine, shift is not None,
            num_warps=4,
        )  # fmt: skip
    return y


def finish(x: Tensor, after: Epilogue) -> Tensor:
    """Scale, shift and activation of pictures' channels, in place."""
    x = x.contiguous(memory_format=torch.channels_last)
    C = x.shape[1]
    rows, BC = x.numel() // C, min(128, triton.next_power_of_2(C))
    BM = PER_PROGRAM // BC
    with torch.cuda.device_of(x):
        _finish_kernel[triton.cdiv(rows, BM), triton.cdiv(C, BC)](
            x, after.scale, after.shift, after.floor, rows, C, after.curve, BM, BC, num_warps=4
        )  # fmt: skip
    return x


def max_pool(x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    N, C, H, W = x.shape
    Ho, Wo = ((n + 2 * padding - side) // stride + 1 for n in (H, W))
    y = torch.empty((N, C, Ho, Wo), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, BC = N * Ho * Wo, min(128, triton.next_power_of_2(C))
    BM = PER_PROGRAM // 2 // BC
    with torch.cuda.device_of(x):
        _max_pool_kernel[triton.cdiv(rows, BM), triton.cdiv(C, BC)](
            x, y, rows, H, W, C, Ho, Wo, stride, padding, side, BM, BC, num_warps=4
        )  # fmt: skip
    return y


def depthwise(x: Tensor, taps: Tensor, stride: int, padding: int, after: Epilogue) -> Tensor:
    """`taps` (side, side, C) in float32; nothing is added after it."""
    x = x.contiguous(memory_format=torch.channels_last)
    (N, C, H, W), side = x.shape, len(taps)
    Ho, Wo = ((n + 2 * padding - side) // stride + 1 for n in (H, W))
    y = torch.empty((N, C, Ho, Wo), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    BC = min(CHANNELS, triton.next_power_of_2(C))
    BW = min(WIDE, triton.next_power_of_2(Wo))
    with torch.cuda.device_of(x):
        _depthwise_kernel[N * triton.cdiv(Ho, HIGH) * triton.cdiv(Wo, BW), triton.cdiv(C, BC)](
            x, taps, y, after.scale, after.shift, after.floor, H, W, C, Ho, Wo, padding,
            side, stride, after.curve, BW, BC, num_warps=WARPS,
        )  # fmt: skip
    return y
