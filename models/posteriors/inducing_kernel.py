"""Draws of many layers by one kernel, from no more than a seed: `inducing_together.py` in triton.

One program makes one draw of one layer. Everything but G stays on chip; the noise of the factored law waits in G for
what depends on all of it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dubito.models.numerics.normals_kernel import FOUR, normals, normals_at

MOST = 64  # rows and columns of V: more would not stay on chip
MANY = tl.constexpr(128)  # outputs at a time where nothing is multiplied
ALIGNED = 16  # outputs of every layer are a multiple of


@triton.jit
def _part(matrix, row, column, rows, columns):
    """Some rows and columns of a matrix; zeros beyond its edges."""
    here = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(matrix + (row[:, None] * columns + column[None, :]), mask=here, other=0.0)


@triton.jit
def _rotated(
    seed, sample, place, layer, centre, spread, Q_r, Q_c, M_out, M_in, r_out, r_in,
    MO: tl.constexpr, MI: tl.constexpr, RO: tl.constexpr, RI: tl.constexpr,
):  # fmt: skip
    """Q_cᵀ Vᵀ Q_r of a new V: (r_in, r_out)."""
    a, b, i, j = tl.arange(0, MO), tl.arange(0, MI), tl.arange(0, RO), tl.arange(0, RI)
    m = _part(centre + layer * (M_out * M_in), a, b, M_out, M_in).to(tl.float32)
    s = _part(spread + layer * (M_out * M_in), a, b, M_out, M_in).to(tl.float32)
    V = m + s * normals(seed, sample, place + a * M_in, MI)
    c = _part(Q_c + layer * (M_in * r_in), b, j, M_in, r_in).to(tl.float32)
    right = tl.dot(V, c, input_precision="tf32x3")
    r = _part(Q_r + layer * (M_out * r_out), a, i, M_out, r_out).to(tl.float32)
    return tl.dot(tl.trans(right), r, input_precision="tf32x3")


@triton.jit
def _shares(p, q, layer, r_out, r_in, RO: tl.constexpr, RI: tl.constexpr):
    """q pᵀ: (r_in, r_out)."""
    i, j = tl.arange(0, RO), tl.arange(0, RI)
    return (
        tl.load(q + layer * r_in + j, mask=j < r_in, other=0.0).to(tl.float32)[:, None]
        * tl.load(p + layer * r_out + i, mask=i < r_out, other=0.0).to(tl.float32)[None, :]
    )


@triton.jit(do_not_specialize=["K"])
def _projected_kernel(
    key, table, centre, spread, Q_r, Q_c, p, q, sigma, scale, B_r, G, e, K, M_out, M_in, r_out, r_in, r,
    MO: tl.constexpr, MI: tl.constexpr, RO: tl.constexpr, RI: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr,
    NOISE: tl.constexpr, FOURS: tl.constexpr, BEYOND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    layer = tl.num_programs(0) - 1 - tl.program_id(0)  # the largest first
    place, d_out, before = tl.load(table + 3 * layer), tl.load(table + 3 * layer + 1), tl.load(table + 3 * layer + 2)
    if WIDE:  # so that several numbers are read and written at a time
        d_out, before = tl.multiple_of(d_out, 16), tl.multiple_of(before, 16)
    k = tl.program_id(1)
    seed, sample = tl.load(key), tl.load(key + 1) + k
    i, j, n = tl.arange(0, RO), tl.arange(0, RI), tl.arange(0, BN)
    in_j = j < r_in
    inner = _rotated(seed, sample, place, layer, centre, spread, Q_r, Q_c, M_out, M_in, r_out, r_in, MO, MI, RO, RI)
    pq = _shares(p, q, layer, r_out, r_in, RO, RI)
    inner *= tl.load(sigma + layer).to(tl.float32) * tl.sqrt(pq)
    B_r += before.to(tl.int64) * r_out
    place += M_out * M_in
    G += (before.to(tl.int64) * K + k * d_out) * r
    if NOISE:
        noise = tl.load(scale + layer).to(tl.float32)
        along = tl.zeros((RI, RO), tl.float32)
        for o in range(0, d_out, BN):
            if FOURS:
                eps = normals(seed, sample, place + (o + n) * r, RI)
            else:
                eps = normals_at(seed, sample, (place + (o + n) * r)[:, None] + j[None, :])
            to = G + (j[:, None] * d_out + (o + n)[None, :])
            tl.store(to, tl.trans(noise * eps).to(G.dtype.element_ty), mask=in_j[:, None] & (o + n < d_out)[None, :])
            rows = _part(B_r, o + n, i, d_out, r_out)
            along = tl.dot(tl.trans(eps).to(rows.dtype), rows, along, input_precision="ieee")
        inner += noise * (tl.sqrt(1 - pq) - 1) * along
        tl.debug_barrier()  # other threads wrote what this one is about to read
    for o in range(0, d_out, BN):
        live = o + n < d_out
        rows = _part(B_r, o + n, i, d_out, r_out)
        g = tl.dot(inner.to(rows.dtype), tl.trans(rows), input_precision="ieee")  # (r_in, BN)
        to, known = G + (j[:, None] * d_out + (o + n)[None, :]), in_j[:, None] & live[None, :]
        if NOISE:
            g += tl.load(to, mask=known, other=0.0).to(tl.float32)
        tl.store(to, g.to(G.dtype.element_ty), mask=known)
    if MORE > 0:  # further directions, each with its own noise
        more, m = r_in + tl.arange(0, MORE), tl.arange(0, MANY)
        for o in range(0, d_out, MANY):
            if FOURS:
                extra = noise * tl.trans(normals(seed, sample, place + (o + m) * r + r_in, MORE))
            else:
                extra = noise * normals_at(seed, sample, (place + (o + m) * r)[None, :] + more[:, None])
            also = G + (more[:, None] * d_out + (o + m)[None, :])
            tl.store(also, extra.to(G.dtype.element_ty), mask=(more < r)[:, None] & (o + m < d_out)[None, :])
    if BEYOND:
        m = tl.arange(0, MANY)
        for o in range(0, d_out, MANY):
            z = noise * normals_at(seed, sample, place + d_out * r + o + m)
            tl.store(e + before.to(tl.int64) * K + k * d_out + o + m, z.to(e.dtype.element_ty), mask=o + m < d_out)


@triton.jit(do_not_specialize=["K"])
def _whole_kernel(
    key, table, centre, spread, Q_r, Q_c, p, q, sigma, scale, B_r, B_c, W, K, M_out, M_in, r_out, r_in,
    MO: tl.constexpr, MI: tl.constexpr, RO: tl.constexpr, RI: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    layer, k = tl.program_id(0), tl.program_id(1)
    place, d_out, d_in = tl.load(table + 6 * layer), tl.load(table + 6 * layer + 1), tl.load(table + 6 * layer + 2)
    if WIDE:
        d_out = tl.multiple_of(d_out, 16)
    B_r += tl.load(table + 6 * layer + 3).to(tl.int64) * r_out
    B_c += tl.load(table + 6 * layer + 4).to(tl.int64) * r_in
    W += tl.load(table + 6 * layer + 5).to(tl.int64) * K + k * (d_in * d_out)
    seed, sample = tl.load(key), tl.load(key + 1) + k
    noise = tl.load(scale + layer).to(tl.float32)
    i, j, n, c = tl.arange(0, RO), tl.arange(0, RI), tl.arange(0, BN), tl.arange(0, BI)
    inner = _rotated(seed, sample, place, layer, centre, spread, Q_r, Q_c, M_out, M_in, r_out, r_in, MO, MI, RO, RI)
    pq = _shares(p, q, layer, r_out, r_in, RO, RI)
    place += M_out * M_in
    eps = normals_at(seed, sample, place + d_out * d_in + i[None, :] * r_in + j[:, None])
    along = tl.zeros((RI, RO), tl.float32)  # B_cᵀ Eᵀ B_r
    for o in range(0, d_out, BN):
        across = tl.zeros((RI, BN), tl.float32)
        for first in range(0, d_in, BI):
            columns = _part(B_c, first + c, j, d_in, r_in)
            E = tl.trans(normals(seed, sample, place + (o + n) * d_in + first, BI))
            across = tl.dot(tl.trans(columns), E.to(columns.dtype), across, input_precision="ieee")
        rows = _part(B_r, o + n, i, d_out, r_out)
        along = tl.dot(across.to(rows.dtype), rows, along, input_precision="ieee")
    inner = inner * (tl.load(sigma + layer).to(tl.float32) * tl.sqrt(pq)) + noise * (tl.sqrt(1 - pq) * eps - along)
    for o in range(0, d_out, BN):
        rows = _part(B_r, o + n, i, d_out, r_out)
        mixed = tl.dot(inner.to(rows.dtype), tl.trans(rows), input_precision="ieee").to(rows.dtype)  # (r_in, BN)
        for first in range(0, d_in, BI):
            columns = _part(B_c, first + c, j, d_in, r_in)
            E = tl.trans(normals(seed, sample, place + (o + n) * d_in + first, BI))
            w = noise * E + tl.dot(columns, mixed, input_precision="ieee")
            here = (first + c < d_in)[:, None] & (o + n < d_out)[None, :]
            tl.store(W + ((first + c)[:, None] * d_out + (o + n)[None, :]), w.to(W.dtype.element_ty), mask=here)


def suits(M_out: int, M_in: int, even: list[int]) -> bool:
    """Whether layers of these sizes can be drawn so; what must be `even`, so that normals come in fours, is."""
    return max(M_out, M_in) <= MOST and all(n % FOUR == 0 for n in (M_in, *even))


def _side(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def draw_projected(
    key: Tensor, K: int, table: Tensor, centre: Tensor, spread: Tensor, Q_r: Tensor, Q_c: Tensor, p: Tensor, q: Tensor,
    sigma: Tensor, scale: Tensor | None, B_r: Tensor, r: int, beyond: bool, wide: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """G, each layer's (K, r, d_out) after the other's, and e, each layer's (K, d_out); `table` has for each layer the
    place of its first normal, d_out, and the sum of d_out before it, in ascending order of d_out; `wide` where every
    d_out is `ALIGNED`."""
    N, M_out, M_in = centre.shape
    rows, r_out = B_r.shape
    r_in = Q_c.shape[2]
    G = B_r.new_empty(rows * K * r)
    e = B_r.new_empty(rows * K) if beyond else None
    with torch.cuda.device_of(B_r):
        _projected_kernel[N, K](
            key, table, centre, spread, Q_r, Q_c, p, q, sigma, sigma if scale is None else scale, B_r, G,
            G if e is None else e, K, M_out, M_in, r_out, r_in, r,
            _side(M_out), _side(M_in), _side(r_out), _side(r_in), _side(r - r_in, FOUR) if r > r_in else 0,
            64 if scale is None else 32,
            scale is not None, r_in % FOUR == 0 and r % FOUR == 0, beyond, wide,
            num_warps=4, num_stages=2, maxnreg=168,  # so that a multiprocessor holds three programs
        )  # fmt: skip
    return G, e


def draw_whole(
    key: Tensor, K: int, table: Tensor, centre: Tensor, spread: Tensor, Q_r: Tensor, Q_c: Tensor, p: Tensor, q: Tensor,
    sigma: Tensor, scale: Tensor, B_r: Tensor, B_c: Tensor, numbers: int, wide: bool,
) -> Tensor:  # fmt: skip
    """W, each layer's (K, d_in, d_out) after the other's, `numbers` for each draw; `table` has for each layer the
    place of its first normal, d_out, d_in, and the sums of d_out, of d_in and of their products before it."""
    N, M_out, M_in = centre.shape
    r_out, r_in = B_r.shape[1], B_c.shape[1]
    W = B_r.new_empty(numbers * K)
    with torch.cuda.device_of(B_r):
        _whole_kernel[N, K](
            key, table, centre, spread, Q_r, Q_c, p, q, sigma, scale, B_r, B_c, W, K, M_out, M_in, r_out, r_in,
            _side(M_out), _side(M_in), _side(r_out), _side(r_in), 64, 32, wide, num_warps=8, num_stages=2,
        )  # fmt: skip
    return W
