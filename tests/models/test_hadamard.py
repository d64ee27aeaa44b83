"""The Walsh–Hadamard transform against scipy's matrix; `tests/service/interpreted.py` has its GPU kernel."""

import math

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from dubito.models.numerics.hadamard import BY_PRODUCT, by_steps, matrix, transform
from tests.faulty import need

SIDES = [2**n for n in range(12)]


def oracle(x: Tensor) -> Tensor:
    H: Tensor = torch.from_numpy(hadamard(x.shape[-1])).double()
    return x.double() @ H / math.sqrt(len(H))


@pytest.mark.parametrize("D", SIDES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (3, 1, 4)])
def test_it_is_the_orthonormal_product_along_the_last_axis(D: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(D)
    x = torch.randn(*shape, D)
    for found in (transform(x), by_steps(x)):
        torch.testing.assert_close(found, oracle(x).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(transform(transform(x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [64, 512])
def test_in_half_precision_it_is_rounded_once(D: int) -> None:
    need(torch.bfloat16)
    x = torch.randn(20, D).bfloat16()
    found = by_steps(x)
    assert found.dtype == transform(x).dtype == torch.bfloat16
    assert torch.equal(found, by_steps(x.float()).bfloat16())
    torch.testing.assert_close(transform(x).double(), oracle(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("D", [8, 256])
def test_its_gradients(D: int) -> None:
    assert 8 <= BY_PRODUCT["cpu"] < 256, "one size on either side"
    x = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(transform, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(transform, x, fast_mode=True)


def test_what_is_not_contiguous_and_what_is_a_view() -> None:
    x = torch.randn(512, 6).T[::2]
    torch.testing.assert_close(transform(x), oracle(x).float(), rtol=1e-5, atol=1e-5)
    wide = torch.randn(3, 2, 256)[:, 1]
    torch.testing.assert_close(transform(wide), oracle(wide).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [0, 3, 12, 1000])
def test_a_side_that_is_no_power_of_two(D: int) -> None:
    with pytest.raises(ValueError, match=f"has {D} entries; .* power of two"):
        transform(torch.zeros(2, D))


def test_the_matrix_outlives_inference_mode() -> None:
    """It is kept, and a later gradient may need it."""
    matrix.cache_clear()
    with torch.inference_mode():
        transform(torch.randn(4, 16))
    x = torch.randn(4, 16, requires_grad=True)
    transform(x).sum().backward()
    assert x.grad is not None
