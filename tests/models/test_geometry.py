"""`apply` against torch's own layers sample by sample, and against patches cut out by hand with numpy.

The oracles run in float64; a result may differ by rounding, as a multiple of the machine epsilon times what the same
layer gives with all weights and inputs positive.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from dubito.models.network.geometry import Conv, Execution, Geometry, Linear, apply
from dubito.models.posteriors.protocol import Dense, Factored
from tests.examples import at_most
from tests.faulty import those_right

EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
MODES = {"zeros": "constant", "reflect": "reflect", "circular": "wrap", "replicate": "edge"}  # torch's names, numpy's
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),  # even kernels: torch copies the input, and says so
    pytest.mark.filterwarnings(
        "ignore:mkldnn_matmul failed"
    ),  # bfloat16 on a CPU without it: slower, and torch says so
]


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    x: Tensor  # (K·B, ...)
    K: int
    seed: int

    def random(self, *shape: int, at: int = 0) -> Tensor:
        """Draws are made in float32 or better, whatever the activations are."""
        rng = torch.Generator().manual_seed(1000 * self.seed + at)
        return torch.randn(*shape, generator=rng).to(torch.promote_types(self.x.dtype, torch.float32))

    def weights(self, K: int) -> Tensor:
        return self.random(K, *self.geometry.shape)

    def factored(self, r: int, outside: bool) -> Factored:
        """Orthonormal B (d_in, r), and noise outside its span where wanted."""
        d_out, d_in = self.geometry.shape
        B = torch.linalg.qr(self.random(d_in, d_in, at=1))[0][:, :r].contiguous()
        e = self.random(self.K, d_out, at=3) if outside else None
        return Factored(B, self.random(self.K, d_out, r, at=2), e)


sizes = st.integers(1, 3)
# torch alone gets some bfloat16 convolutions wrong on CPUs with AMX: see models/numerics/proof.py
dtypes = st.sampled_from([torch.float32, torch.float64, *those_right(torch.bfloat16)])


@st.composite
def linears(draw: st.DrawFn) -> Case:
    K, rows, seed = draw(sizes), draw(st.lists(sizes, min_size=1, max_size=3)), draw(st.integers(0, 999))
    geometry = Linear(draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.booleans()))
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(K * rows[0], *rows[1:], geometry.inputs, generator=rng)
    return Case(geometry, x.to(draw(dtypes)), K, seed)


@st.composite
def convolutions(draw: st.DrawFn, plain: bool = False) -> Case:
    """`plain`: in two dimensions, of stride 1 and in one group, where a CPU has a short cut."""
    dims, groups = (2, 1) if plain else (draw(sizes), draw(sizes))
    K, B, seed = draw(sizes), draw(st.integers(1, 2)), draw(st.integers(0, 999))
    each = st.tuples(*[st.integers(1, 2)] * dims)
    stride = (1, 1) if plain else draw(each)
    numbers = st.tuples(*[st.integers(0, 2)] * dims)
    named = st.sampled_from(["same", "valid"] if set(stride) == {1} else ["valid"])
    geometry = Conv(
        inputs=groups * draw(st.integers(1, 2)),
        outputs=groups * draw(st.integers(1, 2)),
        kernel=draw(st.tuples(*[sizes] * dims)),
        stride=stride,
        padding=draw(numbers | named),
        dilation=draw(each),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(list(MODES))),
    )
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(K * B, geometry.inputs, *draw(st.tuples(*[st.integers(5, 6)] * dims)), generator=rng)
    if draw(st.booleans()):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)  # channels last in memory, as a convolution leaves it
    return Case(geometry, x.to(draw(dtypes)), K, seed)


cases = linears() | convolutions()
checked = settings(max_examples=at_most(80), deadline=None, derandomize=True)


def torchs(geometry: Geometry, W: Tensor) -> nn.Module:
    """torch's own layer with the weights W (d_out, d_in), in float64."""
    g = geometry
    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    if isinstance(g, Linear):
        layer = nn.Linear(g.inputs, g.outputs, g.bias)
    else:
        options: dict[str, Any] = {"groups": g.groups, "bias": g.bias, "padding_mode": g.padding_mode}
        layer = CONVS[g.dims - 1](g.inputs, g.outputs, g.kernel, g.stride, g.padding, g.dilation, **options)  # type: ignore[arg-type]
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(W[:, : math.prod(layer.weight.shape[1:])].view_as(layer.weight))
        if g.bias:
            assert layer.bias is not None
            layer.bias.copy_(W[:, -1])
    return layer.requires_grad_(False)


def by_torch(c: Case, W: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and its scale for rounding errors: the same with all weights and inputs positive."""
    x = c.x.double()
    parts = [
        (torchs(c.geometry, W_k), torchs(c.geometry, W_k.abs()), rows)
        for W_k, rows in zip(W, x.chunk(c.K), strict=True)
    ]
    return torch.cat([layer(rows) for layer, _, rows in parts]), torch.cat(
        [bound(rows.abs()) for _, bound, rows in parts]
    )


def cut(geometry: Geometry, x: Tensor) -> np.ndarray:
    """Every patch by hand: (n, *locations, groups, d_in), a 1 at its end for the bias, in float64."""
    a = x.double().numpy()
    g = geometry
    if isinstance(g, Linear):
        patches = a[..., None, :]
    else:
        spans = [d * (k - 1) for d, k in zip(g.dilation, g.kernel, strict=True)]
        sides = [(s // 2, s - s // 2) if g.padding == "same" else (0, 0) for s in spans]
        if not isinstance(g.padding, str):
            sides = [(p, p) for p in g.padding]
        a = np.pad(a, [(0, 0), (0, 0), *sides], mode=MODES[g.padding_mode])  # type: ignore[call-overload]
        windows = sliding_window_view(a, [s + 1 for s in spans], axis=tuple(range(2, a.ndim)))
        apart = [slice(None, None, s) for s in (*g.stride, *g.dilation)]
        windows = windows[(slice(None), slice(None), *apart)]  # (n, c, *locations, *kernel)
        windows = np.moveaxis(windows, 1, g.dims + 1)  # (n, *locations, c, *kernel)
        patches = windows.reshape(*windows.shape[: g.dims + 1], g.groups, -1)
    return np.concatenate([patches, np.ones((*patches.shape[:-1], 1))], -1) if g.bias else patches


def by_hand(c: Case, f: Factored) -> tuple[Tensor, Tensor]:
    """G Bᵀx + e ‖x − B Bᵀx‖ patch by patch, and how far rounding may take it."""
    B, eps = f.B.double().numpy(), torch.finfo(c.x.dtype).eps
    outputs, errors = [], []
    for k, rows in enumerate(c.x.chunk(c.K)):
        x = cut(c.geometry, rows)
        G = f.G[k].double().numpy().reshape(c.geometry.groups, -1, B.shape[1])
        out = np.einsum("...gr,gor->...go", x @ B, G)
        error = 8 * eps * np.einsum("...gr,gor->...go", np.abs(x) @ np.abs(B), np.abs(G))
        if f.e is not None:
            e = f.e[k].double().numpy().reshape(c.geometry.groups, -1)
            length = np.linalg.norm(x - x @ B @ B.T, axis=-1, keepdims=True)
            out = out + e * length
            square = 8 * eps * (x**2).sum(-1, keepdims=True)  # of the difference of two squares, before the root
            error = error + np.abs(e) * (square / np.maximum(length, np.sqrt(square) + 1e-300) + 8 * eps * length)
        outputs.append(channels_first(c.geometry, out))
        errors.append(channels_first(c.geometry, error))
    return torch.cat(outputs), torch.cat(errors)


def channels_first(geometry: Geometry, out: np.ndarray) -> Tensor:
    flat = out.reshape(*out.shape[:-2], -1)
    return torch.tensor(flat if isinstance(geometry, Linear) else np.moveaxis(flat, -1, 1))


def assert_within(found: Tensor, expected: Tensor, error: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= error + torch.finfo(dtype).tiny).all()


@given(c=cases)
@checked
def test_dense_weights_act_as_torchs_own_layers(c: Case) -> None:
    W = c.weights(c.K)
    expected, scale = by_torch(c, W.to(c.x.dtype).double())
    error = (4 if c.x.dtype == torch.bfloat16 else W.shape[2] + 4) * torch.finfo(c.x.dtype).eps * scale
    for execution in EXECUTIONS:
        assert_within(apply(c.geometry, c.x, Dense(W), c.K, execution), expected, error, c.x.dtype)


@given(c=cases)
@checked
def test_one_matrix_stands_for_all_samples(c: Case) -> None:
    W = c.weights(1)
    expected, scale = by_torch(c, W.to(c.x.dtype).double().expand(c.K, -1, -1))
    error = (4 if c.x.dtype == torch.bfloat16 else W.shape[2] + 4) * torch.finfo(c.x.dtype).eps * scale
    for execution in EXECUTIONS:
        assert_within(apply(c.geometry, c.x, Dense(W), c.K, execution), expected, error, c.x.dtype)


@given(c=cases | convolutions(plain=True), share=st.floats(0, 1), outside=st.booleans())
@checked
def test_factored_weights_act_on_patches_cut_by_hand(c: Case, share: float, outside: bool) -> None:
    f = c.factored(1 + round(share * (c.geometry.shape[1] - 1)), outside)
    expected, error = by_hand(c, f)
    for execution in EXECUTIONS:
        assert_within(apply(c.geometry, c.x, f, c.K, execution), expected, error, c.x.dtype)


@given(c=cases)
@checked
def test_factored_weights_without_a_rest_act_as_torchs_own_layers(c: Case) -> None:
    f = c.factored(max(1, c.geometry.shape[1] // 2), outside=False)
    W = f.G.double() @ f.B.double().T
    expected, _ = by_torch(c, W)
    _, error = by_hand(c, f)
    for execution in EXECUTIONS:
        assert_within(apply(c.geometry, c.x, f, c.K, execution), expected, error, c.x.dtype)


@given(c=cases)
@checked
def test_one_factored_matrix_stands_for_all_samples(c: Case) -> None:
    """As the posterior mean has it: G of length 1."""
    f = c.factored(1, outside=False)
    one = Factored(f.B, f.G[:1], None)
    expected, error = by_hand(c, Factored(f.B, f.G[:1].expand(c.K, -1, -1), None))
    for execution in EXECUTIONS:
        assert_within(apply(c.geometry, c.x, one, c.K, execution), expected, error, c.x.dtype)


@given(c=cases)
@checked
def test_patches_are_those_the_matrix_meets(c: Case) -> None:
    expected = torch.tensor(cut(c.geometry, c.x)).flatten(0, -2).to(c.x.dtype)
    torch.testing.assert_close(c.geometry.patches(c.x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_the_bias_is_1_at_padded_borders_too(dims: int, mode: str, padding: int | str) -> None:
    """Groups, a bias and padding at once, whatever hypothesis happens to try."""
    rng = torch.Generator().manual_seed(0)
    pad = (padding,) * dims if isinstance(padding, int) else padding
    geometry = Conv(4, 6, (3,) * dims, (1,) * dims, pad, (1,) * dims, groups=2, bias=True, padding_mode=mode)
    c = Case(geometry, torch.randn(6, 4, *[5] * dims, generator=rng).double(), K=3, seed=0)
    W = c.weights(3)
    expected, scale = by_torch(c, W)
    for execution in EXECUTIONS:
        assert_within(apply(geometry, c.x, Dense(W), 3, execution), expected, 1e-14 * scale, torch.float64)
    f = c.factored(3, outside=True)
    expected, error = by_hand(c, f)
    for execution in EXECUTIONS:
        assert_within(apply(geometry, c.x, f, 3, execution), expected, error, torch.float64)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    "geometry",
    [Linear(150, 7, bias=True), Conv(30, 6, (3, 3), (2, 1), (1, 1), (1, 1), groups=2, bias=True)],
    ids=["linear", "conv"],
)
def test_many_filters_act_as_few_do(geometry: Geometry, outside: bool) -> None:
    """More than any one call may take at a time."""
    rng = torch.Generator().manual_seed(0)
    shape = (geometry.inputs,) if isinstance(geometry, Linear) else (geometry.inputs, 5, 5)
    c = Case(geometry, torch.randn(6, *shape, generator=rng).double(), K=3, seed=0)
    for r in (63, 64, 65, 130):
        f = c.factored(r, outside)
        expected, error = by_hand(c, f)
        for execution in EXECUTIONS:
            assert_within(apply(geometry, c.x, f, 3, execution), expected, error, torch.float64)


def test_half_precision_never_takes_the_root_of_less_than_nothing() -> None:
    """Inputs inside the span of B: the rounded ‖x‖² − ‖Bᵀx‖² has either sign, and nothing comes out as NaN."""
    rng = torch.Generator().manual_seed(0)
    B = torch.linalg.qr(torch.randn(64, 16, generator=rng))[0]
    x = 100 * (torch.randn(200, 16, generator=rng) @ B.T)
    f = Factored(B, torch.zeros(1, 3, 16), torch.ones(1, 3))
    for dtype in those_right(torch.float32, torch.bfloat16, torch.float16):
        rounded = x.to(dtype)
        squares = rounded.float().square().sum(1) - (rounded @ B.to(dtype)).float().square().sum(1)
        assert squares.min() < 0  # or the clamp was not needed, and this test is idle
        out = apply(Linear(64, 3, bias=False), rounded, f, 1, "factored")
        assert out.isfinite().all()
        bound = (64 * torch.finfo(dtype).eps) ** 0.5 * x.norm(dim=1, keepdim=True)
        assert (out.float() <= bound).all()
