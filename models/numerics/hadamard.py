"""The Walsh–Hadamard transform along the last axis: x ↦ H x, where H is D × D with entries ±1/√D and H = Hᵀ = H⁻¹.

D is a power of two. H is never formed above `BY_PRODUCT` columns: on a GPU one kernel reads and writes each element
once, elsewhere 32 columns at a time are transformed by a product and the rest by sums and differences, D log D in all.
"""

import math
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BY_PRODUCT = {"cpu": 128, "cuda": 32}  # columns up to which the product x H is as fast, as measured in RESULTS.md
LARGEST_KERNEL = 8192  # columns: a longer row does not fit the registers of one triton program
STEP = 32  # columns that are transformed by a product before the rounds of sums and differences


def transform(x: Tensor) -> Tensor:
    """H x for each vector of the last axis; differentiable, and the gradient is a transform too."""
    D = x.shape[-1]
    if D < 1 or D & (D - 1):
        raise ValueError(f"the last axis has {D} entries; a Walsh–Hadamard transform needs a power of two.")
    if x.device.type == "cpu" and BY_PRODUCT["cpu"] >= D and not torch.is_autocast_enabled("cpu"):
        return x @ matrix(D, x.dtype, x.device)  # here torch's own gradient is cheaper than ours
    return _Transform.apply(x)  # type: ignore[no-any-return]


class _Transform(torch.autograd.Function):
    """The transform with its gradient. H is symmetric, so nothing is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return _Transform._run(x)

    @staticmethod
    def _run(x: Tensor) -> Tensor:
        D = x.shape[-1]
        if BY_PRODUCT.get(x.device.type, STEP) >= D:
            return x @ matrix(D, x.dtype, x.device)
        if x.is_cuda and D <= LARGEST_KERNEL and x.dtype != torch.float64 and _has_triton():
            from dubito.models.numerics.hadamard_kernel import transform_on_gpu

            return transform_on_gpu(x)
        return by_steps(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return transform(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return transform(tangent)


def by_steps(x: Tensor) -> Tensor:
    """The transform without a kernel: a product with a small H, then log₂(D/STEP) rounds of sums and differences.

    Computed in at least float32, and rounded once to the dtype of x.
    """
    D = x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    h = min(STEP, D)
    y = x.to(dtype).reshape(-1, h) @ (matrix(h, dtype, x.device) * math.sqrt(h / D))
    z = torch.empty_like(y) if h < D else y
    while h < D:
        pairs, out = y.view(-1, 2, h), z.view(-1, 2, h)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        y, z, h = z, y, 2 * h
    return y.view(x.shape).to(x.dtype)


@cache
def matrix(D: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H itself (D, D), rows and columns in natural order: H_ij = (−1)^(bits that i and j share)/√D."""
    with torch.inference_mode(False), torch.no_grad():
        H = torch.ones(1, 1, dtype=torch.float64)
        while len(H) < D:
            H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
        return (H / math.sqrt(D)).to(device, dtype)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
