"""The Walsh–Hadamard transform on a GPU: one read and one write of each element. Needs triton; imported on first use.

H_D is the Kronecker product of smaller Hadamard matrices, in any grouping of D's bits: a row is seen as a box of up to
three sides of 16 to 64, and each side in turn is multiplied by its own small H, which is made from its indices.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # elements of one program: as many rows as that holds

SIDES = {  # of the box, by log₂ D; tl.dot wants 16 or more on every side
    4: (1, 1, 16),
    5: (1, 1, 32),
    6: (1, 1, 64),
    7: (1, 1, 128),
    8: (1, 16, 16),
    9: (1, 16, 32),
    10: (1, 32, 32),
    11: (1, 32, 64),
    12: (16, 16, 16),
    13: (16, 16, 32),
}


@triton.jit
def _small(n: tl.constexpr):
    """The n × n matrix of ±1: the parity of the bits that the two indices share."""
    shared = tl.arange(0, n)[:, None] & tl.arange(0, n)[None, :]
    shared = shared ^ (shared >> 4)
    shared = shared ^ (shared >> 2)
    shared = shared ^ (shared >> 1)
    return 1.0 - 2.0 * (shared & 1).to(tl.float32)


@triton.jit
def _along_last(box, rows: tl.constexpr, n: tl.constexpr, precision: tl.constexpr):
    return tl.dot(tl.reshape(box, (rows, n)), _small(n), input_precision=precision)


@triton.jit
def _kernel(
    x, y, N, scale, R: tl.constexpr, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, precision: tl.constexpr
):
    D: tl.constexpr = a * b * c
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    here = row[:, None] < N
    box = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    box = _along_last(box, R * a * b, c, precision)
    if b > 1:  # the next side to the end: (R, a, b, c) -> (R, a, c, b)
        box = tl.permute(tl.reshape(box, (R * a, b, c)), (0, 2, 1))
        box = _along_last(box, R * a * c, b, precision)
        if a > 1:  # (R, a, c·b) -> (R, c·b, a)
            box = tl.permute(tl.reshape(box, (R, a, c * b)), (0, 2, 1))
            box = _along_last(box, R * c * b, a, precision)
            box = tl.permute(tl.reshape(box, (R, c * b, a)), (0, 2, 1))
        box = tl.permute(tl.reshape(box, (R * a, c, b)), (0, 2, 1))
    tl.store(y + at, (tl.reshape(box, (R, D)) * scale).to(y.dtype.element_ty), mask=here)


def transform_on_gpu(x: Tensor) -> Tensor:
    """H x along the last axis, for D from 16 to 8192; summed in float32, rounded once."""
    x = x.contiguous()
    D = x.shape[-1]
    N, y = x.numel() // D, torch.empty_like(x)
    if N == 0:
        return y
    a, b, c = SIDES[D.bit_length() - 1]
    R = max(TILE // D, 16 * c // D, 1)  # tl.dot wants 16 rows at least
    precision = "tf32" if x.dtype == torch.bfloat16 else "tf32x3"  # 11 bits hold 8; 24 go in three parts
    grid = (triton.cdiv(N, R),)
    with torch.cuda.device_of(x):
        _kernel[grid](x, y, N, 1 / math.sqrt(D), R, a, b, c, precision, num_warps=8)
    return y
