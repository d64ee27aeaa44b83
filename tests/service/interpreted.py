"""Checks of the GPU's kernels, run by triton's interpreter where there is no GPU: `python interpreted.py`, or in short
`python interpreted.py short`: every kernel, each at its quickest case that has noise and sizes that fill no tile."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard
from torch import Tensor

from dubito.models import bayesianize
from dubito.models.conversion.directions import set_directions
from dubito.models.network.geometry import Conv, Execution, Linear, apply
from dubito.models.network.network import Draws, Plan
from dubito.models.network.plan import cheapest
from dubito.models.numerics.hadamard_kernel import transform_on_gpu
from dubito.models.numerics.normals_kernel import FOUR, fill
from dubito.models.numerics.parameters import alike
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.inducing_factors import InducingFactors, LambdaLaw
from dubito.models.posteriors.inducing_together import _size, stack, stack_dense
from dubito.models.posteriors.protocol import Dense, Factored
from dubito.models.predictions.prediction import Job
from dubito.models.predictions.uncertainty import class_sums
from dubito.service.engine import executions, kernels, plain_kernels
from dubito.service.engine import plans as plans_module
from dubito.service.engine.between import Between, with_between
from dubito.service.engine.fusion import Unit, fuse
from dubito.service.engine.graphs import first_alone
from dubito.service.engine.graphs import tap_by_tap as tap_by_tap_of
from dubito.service.engine.kernels import Ahead, Epilogue, dense, factored, parted, suits, tap_by_tap
from dubito.service.engine.plans import PlanCache, Plans
from tests.small_models import bottlenecks, mixed, spoiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # numpy has no bfloat16
CLOSE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
AGAIN = 10
EVEN = [(4, 8, 3), (8, 72, 3), (72, 8, 1), (8, 20, 1), (20, 10, 1)]

# K, B, size, channels, filters, side, stride, padding, bias, r, λ-noise, residual, activation
CASES = [
    (2, 2, 6, 3, 40, 3, 2, 1, False, 27, False, False, None),
    (1, 1, 9, 64, 32, 1, 2, 0, False, 64, False, False, "relu"),
    (2, 3, 5, 48, 72, 1, 1, 0, True, 48, False, True, "relu"),
    (2, 1, 2, 48, 24, 3, 1, 1, True, 7, True, False, "gelu"),
    (2, 1, 4, 32, 80, 3, 1, 1, False, 36, True, True, "relu"),
]
DEPTHWISE = [
    (1, 40, 5, 19, 7, 1, 3, None),
    (2, 5, 9, 7, 3, 2, 1, "silu"),
    (1, 70, 11, 6, 5, 2, 2, "relu"),
    (1, 8, 6, 6, 3, 1, 0, "gelu"),
]
POOLED = [(3, 5, 9, 7, 3, 2, 1), (1, 70, 6, 8, 2, 2, 0), (1, 64, 5, 5, 3, 1, 1)]
SUMMED = [(3, 2, 10, True), (37, 3, 1, False), (2, 2, 21, False)]  # K, B, classes, whether there are distances
NORMED = [((7, 40), True), ((3, 5, 96), True), ((2, 130), False)]
# K, axes before the last, inputs, outputs, bias, r, λ-noise, residual, activation
LINEAR = [
    (2, (3, 5), 40, 72, True, 36, True, True, "gelu"),
    (3, (7,), 128, 24, False, 17, False, False, None),
    (2, (2, 2, 3), 48, 40, True, 49, True, False, "silu"),
]
# inputs, outputs of three layers, of which the last has 24; side of the first, or linear; bias, λ-noise, residual
AHEAD: list[tuple[int, int, int, int | None, bool, bool, bool]] = [
    (8, 40, 36, 3, True, True, True),
    (20, 72, 40, 3, True, True, True),
    (18, 64, 33, 1, False, False, False),
    (24, 130, 48, None, True, True, True),
    (18, 40, 32, None, False, True, False),
]
LAWS: list[tuple[float, LambdaLaw]] = [(0.0, "exact"), (0.3, "factored"), (0.3, "exact")]


def check_convolution(
    K: int, B: int, size: int, C: int, d_out: int, side: int, stride: int, padding: int, bias: bool, r: int,
    noise: bool, add: bool, then: str | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    geometry = Conv(C, d_out, (side, side), (stride, stride), (padding, padding), (1, 1), 1, bias)
    check_layer(geometry, (B, C, size, size), K, r, noise, add, then, dtype)


def check_linear(
    K: int, leading: tuple[int, ...], d_in: int, d_out: int, bias: bool, r: int,
    noise: bool, add: bool, then: str | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    check_layer(Linear(d_in, d_out, bias), (*leading, d_in), K, r, noise, add, then, dtype)


def check_layer(
    geometry: Conv | Linear, shape: tuple[int, ...], K: int, r: int,
    noise: bool, add: bool, then: str | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Every kernel against torch in float64, on inputs rounded as the kernel's are; `shape` of one draw's inputs."""
    torch.manual_seed(0)
    assert suits(geometry)
    d_out, d_in = geometry.shape
    x = torch.randn(K * shape[0], *shape[1:], device=DEVICE).to(dtype)
    basis = torch.linalg.qr(torch.randn(d_in, r))[0].to(DEVICE, dtype)
    G = (torch.randn(K, d_out, r, device=DEVICE) / math.sqrt(r)).to(dtype)
    e = (torch.randn(K, d_out, device=DEVICE) / 10).to(dtype) if noise else None
    scale, shift = torch.randn(2, d_out, device=DEVICE)
    wide = Factored(basis.double(), G.double(), None if e is None else e.double())
    expected = {
        "factored": apply(geometry, x.double(), wide, K, "factored"),
        "dense": apply(geometry, x.double(), Dense(wide.dense()), K, "loop"),
    }
    residual = torch.randn(expected["dense"].shape, device=DEVICE).to(dtype) if add else None
    after = Epilogue(scale, shift, residual, then)  # type: ignore[arg-type]
    W = tap_by_tap(geometry, (G @ basis.T).mT)
    B_ = tap_by_tap(geometry, basis).T.contiguous().T  # one filter after the other, as factors have them
    found = {
        "factored": [k(geometry, x, B_, G, e, after) for k in (factored, parted)],
        "dense": [dense(geometry, x, W, after)],
    }
    for _ in range(AGAIN if DEVICE == "cuda" else 0):  # to the bit, however the programs of a kernel are interleaved
        for k, first in zip((factored, parted), found["factored"], strict=True):
            assert torch.equal(k(geometry, x, B_, G, e, after), first)
        assert torch.equal(dense(geometry, x, W, after), found["dense"][0])
    same = x[: shape[0]].repeat(K, *[1] * (x.dim() - 1))
    of_same, of_one = (parted(geometry, same, B_, G, e, after, shared=shared).double() for shared in (False, True))
    assert float((of_one - of_same).norm() / of_same.norm()) < CLOSE[dtype]
    own = (-1, 1, 1) if isinstance(geometry, Conv) else (-1,)
    for name, y in expected.items():
        y = y * scale.double().view(own) + shift.double().view(own)
        y = y if residual is None else y + residual.double()
        y = y if then is None else getattr(torch.nn.functional, then)(y)
        for out in found[name]:
            assert out.shape == y.shape
            error = float((out.double() - y).norm() / y.norm())
            assert error < CLOSE[dtype], (name, geometry, shape, K, r, noise, add, then, error)


def check_ahead(
    d_in: int, hidden: int, d_out: int, side: int | None, bias: bool, noise: bool, residual: bool, dtype: torch.dtype
) -> None:
    """Two layers, the second one's first product within the first one's kernel, and a third from the second, against
    torch in float64; `side` of the first layer's taps, None: linear layers."""
    torch.manual_seed(0)
    K, sizes, r = 2, [(d_in, hidden), (hidden, d_out), (d_out, 24)], (17, 24 if bias else 12, 16)
    geometries: list[Conv | Linear] = [Linear(a, b, bias) for a, b in sizes]
    if side is not None:
        sides = (side, 1, 1)
        geometries = [
            Conv(a, b, (n, n), (1, 1), (n // 2, n // 2), (1, 1), 1, bias)
            for n, (a, b) in zip(sides, sizes, strict=True)
        ]
    shape = (K, d_in, 4, 5) if side is not None else (K * 3, 7, d_in)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    operands = []
    for geometry, columns in zip(geometries, r, strict=True):
        outputs, inputs = geometry.shape
        B = torch.linalg.qr(torch.randn(inputs, columns))[0].to(DEVICE, dtype)
        G = (torch.randn(K, outputs, columns, device=DEVICE) / math.sqrt(columns)).to(dtype)
        e = (torch.randn(K, outputs, device=DEVICE) / 10).to(dtype) if noise else None
        operands.append((B, tap_by_tap(geometry, B).T.contiguous().T, G, e))
    after = []
    for geometry, then in zip(geometries, ("gelu", "relu", None), strict=True):
        scale, shift = torch.randn(2, geometry.outputs, device=DEVICE)
        after.append(Epilogue(scale, shift, None, then))  # type: ignore[arg-type]

    def wide(i: int, y: Tensor) -> Tensor:
        (B, _, G, e), (more, then) = operands[i], (after[i].residual, after[i].then)
        layer = Factored(B.double(), G.double(), None if e is None else e.double())
        y = apply(geometries[i], y.double(), layer, K, "factored")
        own = (-1, 1, 1) if side is not None else (-1,)
        y = y * after[i].scale.double().view(own) + after[i].shift.double().view(own)
        y = y if more is None else y + more.double()
        return y if then is None else getattr(torch.nn.functional, then)(y)

    if residual:
        after[1] = replace(after[1], residual=torch.randn(wide(1, wide(0, x)).shape, device=DEVICE).to(dtype))

    found: list[tuple[Tensor, int, Tensor]] = []
    for run, stored in product((factored, parted), (True, False)):
        first = Ahead(operands[1][1], bias, noise)
        other, second = replace(first, stored=stored), Ahead(operands[2][1], bias, noise)
        with poisoned():
            y = run(geometries[0], x, *operands[0][1:], after[0], first)
            run(geometries[0], x, *operands[0][1:], after[0], other)
            assert first.made is not None
            assert other.made is not None
            z = kernels.mixed(
                geometries[1], torch.full_like(y, math.nan), other.made, *operands[1][2:], after[1], second
            )
            assert second.made is not None
            out = kernels.mixed(geometries[2], torch.full_like(z, math.nan), second.made, *operands[2][2:], after[2])
        found += [(y, 0, x), (z, 1, y), (out, 2, z)]
        for _ in range(AGAIN if DEVICE == "cuda" else 0):  # to the bit, however the programs are interleaved
            again = replace(first, made=None)
            run(geometries[0], x, *operands[0][1:], after[0], again)
            assert again.made is not None
            assert torch.equal(again.made.c, first.made.c)
            assert torch.equal(again.made.energy, first.made.energy)
    for result, i, given in found:  # last: where kernels are compiled alone, all of them are
        expected = wide(i, given)
        assert result.shape == expected.shape
        assert float((result.double() - expected).norm() / expected.norm()) < CLOSE[dtype]


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing has been written to is NaN."""
    empty = torch.empty

    def of_nan(*size: Any, **options: Any) -> Tensor:
        made: Tensor = empty(*size, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    torch.empty = of_nan
    try:
        yield
    finally:
        torch.empty = empty


@contextmanager
def one_program() -> Iterator[None]:
    """Each of a kernel's programs computes all outputs of its rows, as where there are many rows."""
    many, kernels.MANY = kernels.MANY, 1
    try:
        yield
    finally:
        kernels.MANY = many


def check_pairs(dtype: torch.dtype) -> None:
    """A network whose units begin the next one wherever they can, against the same one without."""
    torch.manual_seed(0)
    net = spoiled(bottlenecks())
    network = bayesianize(net, "ffg-u", inducing=4).to(DEVICE)
    factors = network.factors()
    form = fuse(network.net, torch.device(DEVICE))
    factors = tap_by_tap_of(factors, form)
    layers = {layer: name for name, layer in network.layers.items()}
    units = [m for m in form.modules() if isinstance(m, Unit)]
    begun = {u.next.unit for u in units if u.next is not None}
    assert len(begun) == 4  # all of one tap, but one of the two that read the stem
    plan: dict[str, Execution] = {layers[u.layer]: "mixed" if u in begun else "parted" for u in units}
    x, noise = torch.randn(2, 3, 8, 8, device=DEVICE).to(dtype), torch.randn(2, factors.normals, device=DEVICE)
    made = replace(factors, form=form.to(dtype))
    with torch.inference_mode():
        run = network.arrange(made, Draws(2, noise, 0), plan)
        assert first_alone(run)
        with poisoned():
            found = network.go(x, replace(run, first_alone=True))
        expected = network.run(x, made, Draws(2, noise, 0), dict.fromkeys(plan, "factored"))
    assert float((found - expected).norm() / expected.norm()) < CLOSE[dtype]


def check_plans(*faults: str | None) -> None:
    """A plan joins units where that is faster, which by the clock here it always is, but none of which an output would
    be wrong: one that a kernel stores, what it makes for the next layer, or what that layer makes of it."""
    was = kernels.factored, kernels.parted, kernels.mixed
    for wrong in faults:

        def goes_on(run: Any, *given: Any, wrong: str | None = wrong, **named: Any) -> Any:
            y, ahead = run(*given, **named), given[6]
            if ahead is not None and wrong == "made" and not ahead.stored:
                ahead.made.c.mul_(3)
            return 3 * y if ahead is not None and wrong == "stored" else y

        kernels.factored, kernels.parted = (partial(goes_on, run) for run in was[:2])
        if wrong == "mixed":
            kernels.mixed = lambda *given: 3 * was[2](*given)
        try:
            plan, error = joined_plan()
        finally:
            kernels.factored, kernels.parted, kernels.mixed = was
        assert ("mixed" in plan.values()) == (wrong is None), (wrong, plan)
        assert error < CLOSE[torch.float32]


def by_name(run: Any, device: torch.device, limit: float) -> float:
    """Seconds by which layers that are joined are always faster."""
    return float(run.func.__name__ != "together")


def joined_plan() -> tuple[Plan, float]:
    """A plan for two layers, measured as on a GPU, and how far its outputs are from those without one."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 5)
    network = bayesianize(torch.nn.Sequential(*layers), "ffg-u", inducing=4, lam_max=0.3).eval()
    factors = replace(network.factors(), form=fuse(network.net, torch.device("cpu")))
    job = Job.of(network, factors, torch.randn(2, 12), 0)
    plans = Plans(cheapest(factors), PlanCache(None, job.device), 60.0)
    was = executions.kernel_executions, plans_module._seconds
    executions.kernel_executions = lambda geometry, operand, x: ("fused", "parted")
    plans_module._seconds = by_name
    try:
        plans.measure(job, 2)
    finally:
        executions.kernel_executions, plans_module._seconds = was
    noise, plan = torch.randn(2, factors.normals), plans.at(2, 2)
    with torch.inference_mode():
        found = network.run(job.given, factors, Draws(2, noise, 0), plan)
        expected = network.run(job.given, factors, Draws(2, noise, 0), cheapest(factors))
    return plan, float((found - expected).norm() / expected.norm())


def check_layer_norm(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (3 + torch.randn(shape, device=DEVICE)).to(dtype)
    weight, bias = torch.randn(2, shape[-1], device=DEVICE).to(dtype) if affine else (None, None)
    wide = [None if t is None else t.double() for t in (weight, bias)]
    expected = torch.nn.functional.layer_norm(x.double(), shape[-1:], wide[0], wide[1], 1e-6)
    found = plain_kernels.layer_norm(x, weight, bias, 1e-6)
    assert float((found.double() - expected).norm() / expected.norm()) < CLOSE[dtype], (shape, affine, dtype)


def check_depthwise(
    N: int, C: int, H: int, W: int, side: int, stride: int, padding: int, then: str | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(N, C, H, W, device=DEVICE).to(dtype), torch.randn(C, 1, side, side, device=DEVICE).to(dtype)
    scale, shift = torch.randn(2, C, device=DEVICE)
    y = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding, 1, C)
    y = y * scale.double()[:, None, None] + shift.double()[:, None, None]
    y = y if then is None else getattr(torch.nn.functional, then)(y)
    after = Epilogue(scale, shift, None, then)  # type: ignore[arg-type]
    found = plain_kernels.depthwise(x, w[:, 0].permute(1, 2, 0).float().contiguous(), stride, padding, after)
    assert found.shape == y.shape
    error = float((found.double() - y).norm() / y.norm())
    assert error < CLOSE[dtype], (N, C, H, W, side, stride, padding, then, dtype, error)
    for strange in (math.inf, math.nan):  # reaches the positions that read it, and no others
        x[0, 0, H // 2, W // 2] = strange
        taps = w[:, 0].abs().permute(1, 2, 0).float().contiguous()
        y = torch.nn.functional.conv2d(x.double(), w.double().abs(), None, stride, padding, 1, C)
        found = plain_kernels.depthwise(x, taps, stride, padding, Epilogue(scale.abs(), shift, None, "relu"))
        assert torch.equal(found.isnan(), y.isnan())
        assert torch.equal(found.isfinite(), y.isfinite())


def check_finish(then: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 40, 5, 7, device=DEVICE).to(dtype)
    scale, shift = torch.randn(2, 40, device=DEVICE)
    y = x.double() * scale.double()[:, None, None] + shift.double()[:, None, None]
    y = y if then is None else getattr(torch.nn.functional, then)(y)
    found = plain_kernels.finish(x, Epilogue(scale, shift, None, then))  # type: ignore[arg-type]
    assert float((found.double() - y).norm() / y.norm()) < CLOSE[dtype], (then, dtype)


def check_class_sums(K: int, B: int, C: int, far: bool, dtype: torch.dtype) -> None:
    """Against torch in float64; one draw is sure of its answer, another input is NaN."""
    torch.manual_seed(0)
    logits, distance = (20 * torch.randn(K, B, C, device=DEVICE)).to(dtype), torch.rand(K, B, device=DEVICE)
    logits[0, 0, 0] = 2000.0
    logits[-1, -1, -1] = math.nan
    given = distance if far else None
    found, expected = plain_kernels.class_sums(logits, given), class_sums(logits, given)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11, equal_nan=True)


def check_max_pool(N: int, C: int, H: int, W: int, side: int, stride: int, padding: int, dtype: torch.dtype) -> None:
    """To the bit; one number is NaN, and so are all that it belongs to."""
    torch.manual_seed(0)
    x = torch.randn(N, C, H, W, device=DEVICE).to(dtype)
    x[0, 0, H // 2, W // 2] = math.nan
    expected = torch.nn.functional.max_pool2d(x, side, stride, padding)
    found = plain_kernels.max_pool(x, side, stride, padding)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def check_between(dtype: torch.dtype) -> None:
    """Each kernel that a network is given between its layers against torch's operators, where they stand."""
    torch.manual_seed(0)
    network = bayesianize(spoiled(mixed()), "ffg-u", inducing=4).to(DEVICE)
    factors = network.factors()
    form = with_between(fuse(network.net, torch.device(DEVICE))).to(dtype)
    tried: list[tuple[str, str]] = []

    def check(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Between)
        (x,) = given
        expected = module.compute(x, "loop").double()
        for execution in module.executions[1:]:
            found = module.compute(x, execution)
            assert found.shape == expected.shape
            error = float((found.double() - expected).norm() / expected.norm())
            assert error < CLOSE[dtype], (type(module).__name__, module.what, execution, dtype, error)
            tried.append((type(module).__name__, execution))

    for module in form.modules():
        if isinstance(module, Between):
            module.register_forward_pre_hook(check)
    x, noise = torch.randn(2, 3, 11, 10, device=DEVICE).to(dtype), torch.randn(2, factors.normals, device=DEVICE)
    with torch.inference_mode():
        network.run(x, replace(factors, form=form), Draws(2, noise, 0), cheapest(factors))
    of_each = [("Norm", "fused"), ("MaxPool", "fused"), *4 * [("Depthwise", "fused"), ("Depthwise", "parted")]]
    assert sorted(tried) == sorted(of_each)


def philox(counter: list[NDArray[np.uint64]], key: tuple[int, int]) -> list[NDArray[np.uint64]]:
    """Four words of 32 bits from four, after Salmon et al. 2011."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = key
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        first, third = (right >> half) ^ counter[1] ^ np.uint64(a), (left >> half) ^ counter[3] ^ np.uint64(b)
        counter = [first, right & low, third, left & low]
        a, b = (a + 0x9E3779B9) & 0xFFFFFFFF, (b + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def normals(seed: int, sample: int, n: int) -> NDArray[np.float64]:
    place = np.arange(-(-n // FOUR), dtype=np.uint64)
    nothing = np.zeros_like(place)
    words = philox([place, nothing + np.uint64(sample), nothing, nothing], (seed & 0xFFFFFFFF, seed >> 32))
    signed = [word.astype(np.uint32).view(np.int32) for word in words]
    u = [np.float64(np.where(s < 0, ~s, s).astype(np.float32) * np.float32(4.6566127342e-10)) for s in signed]
    found = []
    for one, other in ((u[0], u[1]), (u[2], u[3])):
        radius, angle = np.sqrt(-2 * np.log(np.maximum(1e-7, one))), 2 * np.pi * other
        found += [radius * np.cos(angle), radius * np.sin(angle)]
    whole: NDArray[np.float64] = np.stack(found, 1).reshape(-1)[:n]
    return whole


def check_normals(seed: int, start: int, K: int, n: int) -> None:
    key = torch.tensor([seed, start], device=DEVICE)
    found: Tensor = fill(torch.full((K, n), torch.nan, device=DEVICE), key)
    for k in range(K):
        np.testing.assert_allclose(found[k].cpu().numpy(), normals(seed, start + k, n), atol=1e-5)
    later = fill(torch.full((K, n - 5), torch.nan, device=DEVICE), key, 5)
    assert torch.equal(later, found[:, 5:])


def check_together(lam: float, noise: LambdaLaw, dtype: torch.dtype) -> None:
    """The kernels that draw many layers against torch, from the same normals; layers of 27 and of 10 are uneven."""
    torch.manual_seed(0)
    sizes = [(3, 8, 3), (8, 72, 3), (72, 8, 1), (8, 20, 1), (20, 10, 1)] if noise == "factored" else EVEN
    net = torch.nn.Sequential(*(torch.nn.Conv2d(a, b, side, bias=False) for a, b, side in sizes), torch.nn.Flatten())
    network = bayesianize(net, "ffg-u", inducing=28, lam_max=lam, noise=noise)
    for layer in network.layers.values():
        q = layer.posterior
        assert isinstance(q, Inducing)
        if q.lam is not None:
            torch.nn.init.zeros_(q.lam.raw)
    if lam:
        set_directions(network, torch.randn(2, sizes[0][0], 9, 9), 4)
    factors = network.to(DEVICE).factors()
    layers = {name: f.narrow(dtype) for name, f in factors.layers.items() if isinstance(f, InducingFactors)}
    key, K, drawn = torch.tensor([9, 3], device=DEVICE), 2, 0
    rows = fill(torch.empty(K, factors.normals, device=DEVICE), key)
    for at in alike([_size(f) for f in layers.values()]):
        names = tuple(sorted((list(layers)[i] for i in at), key=lambda name: layers[name].shape[0]))
        those, places = [layers[name] for name in names], [factors.places[name] for name in names]
        whole = those[0].forms_W
        group = stack_dense(names, those, places) if whole else stack(names, those, places)
        found = group.draw_by(key, K)
        for f, place, a in zip(those, places, found, strict=True):
            b = f.draw(rows[:, place : place + f.normals], None)
            drawn += 1
            if isinstance(a, Factored) and isinstance(b, Factored):
                pairs = [(a.G, b.G), (a.e, b.e)]
            else:
                assert isinstance(a, Dense)
                assert isinstance(b, Dense)
                pairs = [(a.W, b.W), (None, None)]
            assert (pairs[1][0] is None) == (pairs[1][1] is None)
            for one, other in pairs:
                if one is not None and other is not None:
                    assert one.shape == other.shape
                    assert float((one.float() - other.float()).norm() / other.float().norm()) < CLOSE[dtype]
    assert drawn == len(sizes)


def check_hadamard(D: int, dtype: torch.dtype) -> None:
    """Against scipy's matrix; three rows do not fill a tile."""
    torch.manual_seed(0)
    x = torch.randn(3, D).to(dtype)
    # H of D = a b is the Kronecker product of those of a and b
    H_a, H_b = (torch.from_numpy(hadamard(n)).double() for n in (16, D // 16))
    expected = (H_a @ x.double().view(3, 16, -1) @ H_b).view(3, D) / math.sqrt(D)
    found = transform_on_gpu(x.to(DEVICE)).cpu()
    assert found.dtype == dtype
    worst = float((found.double() - expected).abs().max() / expected.abs().max())
    assert worst < (2**-7 if dtype == torch.bfloat16 else 1e-5), (D, dtype, worst)


if __name__ == "__main__":
    short = sys.argv[1:] == ["short"]
    if short and DEVICE == "cpu":  # whether sums of integers overflow is a quarter of the work
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    for side in (16, 512) if short else (16, 128, 512, 2048, 8192):
        for dtype in (torch.float32, torch.bfloat16):
            check_hadamard(side, dtype)
    check_normals((1 << 52) + 12345, 7, 3, 777)
    for case in [CASES[0], CASES[4]] if short else CASES:
        check_convolution(*case, torch.float32)
    for linear in LINEAR[:1] if short else LINEAR:
        check_linear(*linear, torch.float32)
    for ahead in AHEAD[:1] if short else AHEAD:
        check_ahead(*ahead, torch.float32)
        if not short:
            with one_program():
                check_ahead(*ahead, torch.float32)
    check_pairs(torch.float32)
    if DEVICE == "cpu":
        check_plans(*((None, "made") if short else (None, "stored", "made", "mixed")))
    for shape, affine in NORMED[1:2] if short else NORMED:
        check_layer_norm(shape, affine, torch.float32)
    for depthwise in DEPTHWISE[1:2] if short else DEPTHWISE:
        check_depthwise(*depthwise, torch.float32)
    for pooled in POOLED[:1] if short else POOLED:
        check_max_pool(*pooled, torch.float32)
    for summed in SUMMED[:1] if short else SUMMED:
        check_class_sums(*summed, torch.float32)
    for then in ("relu",) if short else (None, "relu", "gelu", "silu"):
        check_finish(then, torch.float32)
    check_between(torch.float32)
    for lam, law in LAWS[:2] if short else LAWS:
        check_together(lam, law, torch.float32)
    if not short:
        check_convolution(*CASES[-1], HALF)
        check_linear(*LINEAR[0], HALF)
        check_class_sums(*SUMMED[0], HALF)
        check_ahead(*AHEAD[0], HALF)
        check_normals(3, 0, 2, 5000)
