"""Draws of many layers by one kernel, from no more than a seed: what `together.py` says in torch. Needs triton.

One program draws one sample of one layer. Everything but G stays on chip; the noise of the factored law waits in G for
what depends on all of it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dubito.models.normals_kernel import FOUR, normals

MOST = 64  # rows and columns of V: more would not stay on chip


@triton.jit(do_not_specialize=["K"])
def _kernel(
    key, table, centre, spread, Q_r, Q_c, p, q, sigma, scale, B_r, G, e, K, M_out, M_in, r_out, r_in, r,
    MO: tl.constexpr, MI: tl.constexpr, RO: tl.constexpr, RI: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr,
    NOISE: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    layer = tl.num_programs(0) - 1 - tl.program_id(0)  # the largest first
    place, d_out, before = tl.load(table + 3 * layer), tl.load(table + 3 * layer + 1), tl.load(table + 3 * layer + 2)
    k = tl.program_id(1)
    seed, sample = tl.load(key), tl.load(key + 1) + k
    a, b, i, j, n = tl.arange(0, MO), tl.arange(0, MI), tl.arange(0, RO), tl.arange(0, RI), tl.arange(0, BN)
    in_a, in_b, in_i, in_j = a < M_out, b < M_in, i < r_out, j < r_in
    at = layer * (M_out * M_in) + a[:, None] * M_in + b[None, :]
    here = in_a[:, None] & in_b[None, :]
    m = tl.load(centre + at, mask=here, other=0.0).to(tl.float32)
    s = tl.load(spread + at, mask=here, other=0.0).to(tl.float32)
    V = m + s * normals(seed, sample, place + a * M_in, MI)
    rotate = tl.load(Q_c + layer * (M_in * r_in) + b[:, None] * r_in + j[None, :], mask=in_b[:, None] & in_j[None, :],
                     other=0.0).to(tl.float32)  # fmt: skip
    right = tl.dot(V, rotate, input_precision="tf32x3")
    rotate = tl.load(Q_r + layer * (M_out * r_out) + a[:, None] * r_out + i[None, :],
                     mask=in_a[:, None] & in_i[None, :], other=0.0).to(tl.float32)  # fmt: skip
    inner = tl.dot(tl.trans(right), rotate, input_precision="tf32x3")  # (r_in, r_out)
    pq = (
        tl.load(q + layer * r_in + j, mask=in_j, other=0.0).to(tl.float32)[:, None]
        * tl.load(p + layer * r_out + i, mask=in_i, other=0.0).to(tl.float32)[None, :]
    )
    inner *= tl.load(sigma + layer).to(tl.float32) * tl.sqrt(pq)
    B_r += before.to(tl.int64) * r_out
    place += M_out * M_in
    G += (before.to(tl.int64) * K + k * d_out) * r
    if NOISE:
        noise = tl.load(scale + layer).to(tl.float32)
        along = tl.zeros((RI, RO), tl.float32)
        for o in range(0, d_out, BN):
            eps = normals(seed, sample, place + (o + n) * r, RI)
            to = G + (j[:, None] * d_out + (o + n)[None, :])
            tl.store(to, tl.trans(noise * eps).to(G.dtype.element_ty), mask=in_j[:, None] & (o + n < d_out)[None, :])
            rows = tl.load(B_r + ((o + n)[:, None] * r_out + i[None, :]),
                           mask=(o + n < d_out)[:, None] & in_i[None, :], other=0.0)  # fmt: skip
            along = tl.dot(tl.trans(eps).to(rows.dtype), rows, along, input_precision="ieee")
        inner += noise * (tl.sqrt(1 - pq) - 1) * along
        tl.debug_barrier()  # other threads wrote what this one is about to read
    for o in range(0, d_out, BN):
        live = o + n < d_out
        rows = tl.load(B_r + ((o + n)[:, None] * r_out + i[None, :]), mask=live[:, None] & in_i[None, :], other=0.0)
        g = tl.dot(inner.to(rows.dtype), tl.trans(rows), input_precision="ieee")  # (r_in, BN)
        to, known = G + (j[:, None] * d_out + (o + n)[None, :]), in_j[:, None] & live[None, :]
        if NOISE:
            g += tl.load(to, mask=known, other=0.0).to(tl.float32)
        tl.store(to, g.to(G.dtype.element_ty), mask=known)
        if MORE > 0:  # further directions, each with its own noise
            more = r_in + tl.arange(0, MORE)
            extra = noise * tl.trans(normals(seed, sample, place + (o + n) * r + r_in, MORE))
            also = G + (more[:, None] * d_out + (o + n)[None, :])
            tl.store(also, extra.to(G.dtype.element_ty), mask=(more < r)[:, None] & live[None, :])
        if BEYOND:
            first = place + d_out * r + o + tl.arange(0, BN // 4) * 4
            z = noise * normals(seed, sample, first, 4).reshape(BN)
            tl.store(e + before.to(tl.int64) * K + k * d_out + o + n, z.to(e.dtype.element_ty), mask=live)


def suits(places: list[int], M_out: int, M_in: int, r_in: int, r: int, noisy: bool) -> bool:
    """Whether layers of these sizes, whose normals begin at these places, can be drawn so: places come in fours."""
    fours = [*places, M_in, *([r_in, r] if noisy else [])]
    return max(M_out, M_in) <= MOST and all(n % FOUR == 0 for n in fours)


def _side(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def draw(
    key: Tensor, K: int, table: Tensor, centre: Tensor, spread: Tensor, Q_r: Tensor, Q_c: Tensor, p: Tensor, q: Tensor,
    sigma: Tensor, scale: Tensor | None, B_r: Tensor, r: int, beyond: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """G, each layer's (K, r, d_out) after the other's, and e, each layer's (K, d_out); `table` has for each layer the
    place of its first normal, d_out, and the sum of d_out before it, in ascending order of d_out."""
    N, M_out, M_in = centre.shape
    rows, r_out = B_r.shape
    r_in = Q_c.shape[2]
    G = B_r.new_empty(rows * K * r)
    e = B_r.new_empty(rows * K) if beyond else None
    with torch.cuda.device_of(B_r):
        _kernel[N, K](
            key, table, centre, spread, Q_r, Q_c, p, q, sigma, sigma if scale is None else scale, B_r, G,
            G if e is None else e, K, M_out, M_in, r_out, r_in, r,
            _side(M_out), _side(M_in), _side(r_out), _side(r_in), _side(r - r_in) if r > r_in else 0,
            64 if scale is None else 32,
            scale is not None, beyond, num_warps=4, num_stages=2,
        )  # fmt: skip
    return G, e
