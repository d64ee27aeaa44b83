"""Standard normals on a GPU, each a function of (seed, draw, position): one kernel for all. Needs triton.

Philox with the seed as its key and counters (position ÷ 4, draw), then Box-Muller pairs: four positions per counter.
The seed and the index of the first draw are read from memory, so that a graph makes new draws with every replay.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

FOUR = 4  # positions of one counter; changing it would change the draws of a seed
BLOCK = 512  # counters of one triton program


@triton.jit
def _pair(x, y):
    """A Box-Muller pair: √(−2 ln u) times cosine and sine of 2πv, where u and v are the words scaled to [0, 1).

    Polynomials for both (accurate to 1e-7) are many times as fast as the general functions.
    """
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.uint_to_uniform_float(x), 1e-7)))
    v = tl.uint_to_uniform_float(y)
    b = 0.25 - tl.abs(v - 0.5)  # reduced to a quarter turn either way: cos 2πv = −sin 2πb, sin 2πv = ± cos 2πb
    z = b * b
    sine = -15.094642576822984 * z + 42.05869394489765
    sine = (
        (((sine * z - 76.70585975306136) * z + 81.60524927607504) * z - 41.34170224039975) * z + 6.283185307179586
    ) * b
    cosine = 7.903536371318467 * z - 26.42625678337438
    cosine = (
        (((cosine * z + 60.24464137187666) * z - 85.45681720669373) * z + 64.93939402266829) * z - 19.739208802178716
    ) * z + 1.0
    return -radius * sine, radius * tl.where(v < 0.5, cosine, -cosine)


@triton.jit
def _four(seed, sample, counter):
    """The normals of a counter's four positions."""
    w, x, y, z = tl.randint4x(seed, (sample << 32) | counter.to(tl.int64))
    a, b = _pair(w, x)
    c, d = _pair(y, z)
    return a, b, c, d


@triton.jit
def normals(seed, sample, place, n: tl.constexpr):
    """Normals at positions place[i] … place[i] + n − 1, all multiples of four: (rows,) -> (rows, n)."""
    a, b, c, d = _four(seed, sample, (place // 4)[:, None] + tl.arange(0, n // 4)[None, :])
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(place.shape[0], n)


@triton.jit
def normals_at(seed, sample, place):
    """Normals at any positions; four times the work of `normals`."""
    a, b, c, d = _four(seed, sample, place // 4)
    lane = place % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def _kernel(key, out, first, n, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    seed, start = tl.load(key), tl.load(key + 1)
    place = first // 4 * 4 + tl.program_id(0) * (4 * BLOCK)
    z = normals(seed, start + sample, place + tl.arange(0, BLOCK) * 4, 4)
    offsets = place - first + tl.arange(0, BLOCK)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + sample * n + offsets, z, mask=(offsets >= 0) & (offsets < n))


def fill(out: Tensor, key: Tensor, first: int = 0) -> Tensor:
    """Fill `out` (K, n) with positions `first` … `first` + n − 1 of draws start … start + K − 1 of a seed.

    `key` is (seed, start), int64, on the same device.
    """
    K, n = out.shape
    if out.numel():
        with torch.cuda.device_of(out):
            _kernel[triton.cdiv(n + first % FOUR, FOUR * BLOCK), K](key, out, first, n, BLOCK, num_warps=4)
    return out
