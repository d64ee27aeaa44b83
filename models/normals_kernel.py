"""Standard normals on a GPU, each a function of (seed, sample, place): one kernel for all. Needs triton.

Philox, counters (place ÷ 4, sample) and the seed for a key, then Box and Muller's pairs: a counter has four places. The
seed and the number of the first sample are read from memory, so that a captured graph draws anew with every replay.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

FOUR = 4  # places of one counter; part of what a seed means
BLOCK = 512  # counters of one program


@triton.jit
def normals(seed, sample, place, n: tl.constexpr):
    """At places place[i] … place[i] + n − 1, where all of place and n are multiples of four: (rows,) -> (rows, n)."""
    counter = (place // 4)[:, None] + tl.arange(0, n // 4)[None, :]
    a, b, c, d = tl.randn4x(seed, (sample << 32) | counter.to(tl.int64))
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(place.shape[0], n)


@triton.jit
def _kernel(key, out, first, n, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    seed, start = tl.load(key), tl.load(key + 1)
    place = first // 4 * 4 + tl.program_id(0) * (4 * BLOCK)
    z = normals(seed, start + sample, place + tl.arange(0, BLOCK) * 4, 4)
    at = place - first + tl.arange(0, BLOCK)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + sample * n + at, z, mask=(at >= 0) & (at < n))


def fill(out: Tensor, key: Tensor, first: int = 0) -> Tensor:
    """`out` (K, n) with places `first` … `first` + n − 1 of samples start … start + K − 1 of a seed.

    `key` is (seed, start), int64, on the same device.
    """
    K, n = out.shape
    if out.numel():
        with torch.cuda.device_of(out):
            _kernel[triton.cdiv(n + first % FOUR, FOUR * BLOCK), K](key, out, first, n, BLOCK, num_warps=4)
    return out
