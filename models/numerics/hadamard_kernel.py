"""The Walsh–Hadamard transform on a GPU: one read and one write of each element. Needs triton; imported on first use.

A triton program holds its rows in registers. Each of the log₂ D rounds takes sums and differences of the elements whose
indices differ in one bit; triton moves them between lanes (or warps, for long rows) only for bits that a thread does
not hold itself.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

HELD = 64  # most elements of a thread: with more, registers run out
LEAST = 1024  # fewest elements of a triton program, which takes several short rows


@triton.jit
def _round(box, size: tl.constexpr, h: tl.constexpr):
    """Replace each pair of elements h apart by its sum and difference."""
    pairs = tl.permute(tl.reshape(box, (size // (2 * h), 2, h)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (size,))


@triton.jit
def _kernel(x, y, N, scale, R: tl.constexpr, D: tl.constexpr, rounds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    offsets = row[:, None] * D + tl.arange(0, D)[None, :]
    here = row[:, None] < N
    box = tl.reshape(tl.load(x + offsets, mask=here, other=0.0).to(tl.float32), (R * D,))
    for i in tl.static_range(rounds):
        box = _round(box, R * D, 1 << i)
    tl.store(y + offsets, (tl.reshape(box, (R, D)) * scale).to(y.dtype.element_ty), mask=here)


def transform_on_gpu(x: Tensor) -> Tensor:
    """H x along the last axis, for D up to 8192; summed in float32, rounded once."""
    x = x.contiguous()
    D = x.shape[-1]
    N, y = x.numel() // D, torch.empty_like(x)
    if N == 0:
        return y
    R = max(LEAST // D, 1)
    warps = max(R * D // (32 * HELD), 1)
    with torch.cuda.device_of(x):
        _kernel[(triton.cdiv(N, R),)](x, y, N, 1 / math.sqrt(D), R, D, D.bit_length() - 1, num_warps=warps)
    return y
