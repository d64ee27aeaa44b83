"""Standard normals on a GPU, each a function of (seed, sample, place): one kernel for all. Needs triton.

Philox, counters (place, sample) and the seed for a key, then Box and Muller's pairs. The seed and the number of the
first sample are read from memory, so that a captured graph draws anew with every replay.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # counters of one program, four normals each; part of what a seed means


@triton.jit
def _kernel(key, out, n, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    seed, start = tl.load(key), tl.load(key + 1)
    counter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randn4x(seed, ((start + sample) << 32) | counter.to(tl.int64))
    at = tl.program_id(0) * (4 * BLOCK) + tl.arange(0, BLOCK)
    row = out + sample * n
    tl.store(row + at, a, mask=at < n)
    tl.store(row + at + BLOCK, b, mask=at + BLOCK < n)
    tl.store(row + at + 2 * BLOCK, c, mask=at + 2 * BLOCK < n)
    tl.store(row + at + 3 * BLOCK, d, mask=at + 3 * BLOCK < n)


def fill(out: Tensor, key: Tensor) -> Tensor:
    """`out` (K, n) with samples start … start + K − 1 of a seed: key is (seed, start), int64, on the same device."""
    K, n = out.shape
    if out.numel():
        with torch.cuda.device_of(out):
            _kernel[triton.cdiv(n, 4 * BLOCK), K](key, out, n, BLOCK, num_warps=4)
    return out
