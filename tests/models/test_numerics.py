"""A device proves itself: right ones pass, and each kind of wrong one is seen, by the probe and in a pass.

The oracle is float64; rounding is a few machine epsilons of the largest value.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models import bayesianize, predict
from dubito.models.errors import NumericsError
from dubito.models.numerics.proof import Checked, check, convolve, fault_of, probe
from tests.faulty import FOUR, Faulty, known_anew, need, one_column, one_convolution, patches

CPU = torch.device("cpu")
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


def off(found: Tensor, expected: Tensor) -> float:
    """Relative error, NaN counted as infinite."""
    error = float((found.double() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def test_float32_and_float64_are_right_here() -> None:
    assert probe(CPU, FLOAT) is None
    assert probe(CPU, torch.float64) is None


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_the_probe_says_what_torch_itself_shows(dtype: torch.dtype) -> None:
    """Where one of the four is wrong, the type is refused and the message says why; elsewhere it may be used."""
    rng = torch.Generator().manual_seed(0)
    errors = []
    for x_shape, W_shape, options in FOUR:
        x, W = (torch.randn(shape, generator=rng).to(dtype) for shape in (x_shape, W_shape))
        errors.append(off(F.conv2d(x, W, **options), F.conv2d(x.double(), W.double(), **options)))
    print(f"{dtype}: relative errors of the four {errors}; the probe: {probe(CPU, dtype)}")
    if max(errors) > 0.05:
        assert fault_of(CPU, dtype) is not None
        with pytest.raises(NumericsError, match=r"cannot be trusted with .*float16.* a convolution of .* is off by"):
            check(CPU, dtype)
    elif fault_of(CPU, dtype) is None:  # it may know of more than the four
        check(CPU, dtype)


def whole(found: Tensor) -> Tensor:
    return found.roll(1, 1)


def one_entry(found: Tensor) -> Tensor:
    found = found.clone()
    found.view(-1)[-1] += found.abs().max() / 10
    return found


def unwritten(found: Tensor) -> Tensor:
    return torch.full_like(found, float("nan"))


def huge(found: Tensor) -> Tensor:
    return found * 1e30


def is_patch(x: Tensor, W: Tensor, stride: Any = 1, **_: Any) -> bool:
    return bool(stride == W.shape[-1] == W.shape[-2])


def is_one_column(x: Tensor, W: Tensor, **options: Any) -> bool:
    return convolve(x, W, **options).shape[-1] == 1


def dilates(x: Tensor, W: Tensor, dilation: Any = 1, **_: Any) -> bool:
    return bool(dilation != 1)


def lies_channels_last(x: Tensor, W: Tensor, **_: Any) -> bool:
    return x.stride(1) == 1


Such = Callable[..., bool]
Spoilt = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize("how", [whole, one_entry, unwritten, huge])
@pytest.mark.parametrize("such", [is_patch, is_one_column, dilates, lies_channels_last])
def test_a_wrong_convolution_of_any_kind_is_seen(
    such: Such, how: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    def wrong(x: Tensor, W: Tensor, **options: Any) -> Tensor:
        """In a type that this CPU computes right in, whatever the type is called."""
        found = convolve(x.float(), W.float(), **options)
        return (how(found) if such(x, W, **options) else found).to(x.dtype)

    def right(x: Tensor, W: Tensor, **options: Any) -> Tensor:
        return convolve(x.float(), W.float(), **options).to(x.dtype)

    fault = probe(CPU, dtype, wrong)
    assert fault is not None
    assert fault.startswith("a convolution of (2, ")
    if dtype is FLOAT or fault_of(CPU, dtype) is None:  # products are the machine's own
        assert probe(CPU, dtype, right) is None


def test_what_cannot_be_computed_is_not_right() -> None:
    def missing(x: Tensor, W: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("\"conv\" not implemented for 'Half'\nand so on")

    told = probe(CPU, HALF, missing)
    assert told is not None
    assert told.endswith("cannot be computed: \"conv\" not implemented for 'Half'")


@pytest.mark.parametrize("such", [patches, one_column])
def test_on_a_faulty_cpu_no_pass_is_run_in_that_type(such: Callable[[Any], bool]) -> None:
    """Predictions by draws, by the mean and until they settle; a training step; and under autocast."""
    network = bayesianize(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(16, 5)), "ffg-u", inducing=3)
    factors, x = network.factors(), torch.randn(2, 3, 8, 8)
    with known_anew(), Faulty(such):
        assert probe(CPU, FLOAT) is None
        predict(network, factors, x, 3, 0)
        with pytest.raises(NumericsError, match="cannot be trusted with bfloat16"), torch.autocast("cpu", BRAIN):
            predict(network, factors, x, 3, 0)
        with pytest.raises(NumericsError, match="without autocast"), torch.autocast("cpu", BRAIN):
            network(x)
        narrow = bayesianize(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), "ffg-w").to(BRAIN)
        for samples in (0, 3):
            with pytest.raises(NumericsError, match=r"Compute in float32: `network\.float\(\)`"):
                predict(narrow, narrow.factors(), x, samples, 0)
        with pytest.raises(NumericsError):
            narrow(x.to(BRAIN))
        predict(network, factors, x, 3, 0)


class Functional(nn.Module):
    """A convolution that is no layer, a transposed one, attention and products of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(8, 3, 2, 2) / 4)
        self.up, self.fc = nn.ConvTranspose2d(8, 4, 3), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.conv2d(x, self.W, stride=2)).flatten(2).mT
        x = F.scaled_dot_product_attention(x, x, x)
        return self.fc(torch.einsum("btd,bsd->btd", x, x).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
@torch.inference_mode()
def test_each_product_of_a_pass_is_seen_whatever_asks_for_it(dtype: torch.dtype) -> None:
    need(dtype)
    torch.manual_seed(0)
    net, x = Functional().to(dtype), torch.randn(2, 3, 8, 8).to(dtype)
    with Checked() as checked:
        out = net(x)
    assert checked.fault is None
    assert torch.equal(out, net(x))
    with Faulty(patches, dtype), Checked() as checked:
        net(x)
    assert checked.fault is not None
    assert checked.fault.startswith("conv2d of (2, 3, 8, 8), (8, 3, 2, 2) in ")


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
@torch.inference_mode()
def test_what_cancels_is_no_fault(dtype: torch.dtype) -> None:
    """Sums of 0 but for rounding, which is as large as they are."""
    need(dtype)
    x = torch.randn(4, 1000).to(dtype)
    x = torch.cat([x, -x], 1)[:, torch.randperm(2000)]
    W = torch.full((1, 2000), 1 / 3).to(dtype)
    with Checked() as checked:
        out = F.linear(x, W)
    print(f"{dtype}: {out.flatten().tolist()}")
    assert checked.fault is None
    with Checked() as checked:
        F.linear(x[:0], W)  # no rows at all
    assert checked.fault is None


@torch.inference_mode()
def test_a_gradient_that_nobody_asked_for_is_no_fault() -> None:
    """In float32 it may be a tensor that nobody reads, in float64 None."""
    x, W, g = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 3, 3), torch.randn(2, 8, 8, 8)
    sizes: Any = ([8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for mask in itertools.product([False, True], repeat=3):
        with Checked() as checked:
            torch.ops.aten.convolution_backward(g, x, W, *sizes, list(mask))
        assert checked.fault is None


@torch.inference_mode()
def test_what_is_infinite_in_any_type_is_no_fault() -> None:
    x = torch.tensor([[1.0, float("inf")], [2.0, 3.0]])
    with Checked() as checked:
        x @ x
    assert checked.fault is None


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("method", ["deterministic", "ffg-u", "ffg-w", "mc-dropout"])
def test_the_four_are_right_or_refused(dtype: torch.dtype, method: str) -> None:
    """Whether layers are ours or left as they were: an answer is right within rounding, or there is none.

    On a CPU with AMX this fails without `check`.
    """
    for x_shape, W_shape, options in FOUR:
        network = one_convolution(W_shape, options, method)
        x = torch.randn(x_shape)
        expected = predict(network, network.factors(), x, 4, 0, keep_outputs=True).outputs
        factors, narrow = network.factors(), network.to(dtype)
        try:
            found = predict(narrow, factors, x, 4, 0, keep_outputs=True).outputs
        except NumericsError:
            assert fault_of(CPU, dtype) is not None
            continue
        assert found is not None
        assert expected is not None
        assert off(found, expected.double()) < 16 * torch.finfo(dtype).eps
