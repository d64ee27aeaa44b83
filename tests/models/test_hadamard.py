"""The Walsh–Hadamard transform against scipy's matrix, and its GPU kernel by triton's interpreter."""

import math
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from dubito.models.numerics.hadamard import BY_PRODUCT, by_steps, matrix, transform
from tests import forked
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


KERNEL = """
import torch
from scipy.linalg import hadamard
from dubito.models.numerics.hadamard_kernel import transform_on_gpu

torch.manual_seed(0)
for D in (16, 128, 512, 2048, 8192):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        x = torch.randn(3, D).to(dtype)
        # H of D = a b is the Kronecker product of those of a and b
        H_a, H_b = (torch.from_numpy(hadamard(n)).double() for n in (16, D // 16))
        expected = (H_a @ x.double().view(3, 16, -1) @ H_b).view(3, D) / D**0.5
        found = transform_on_gpu(x)
        assert found.dtype == dtype
        worst = float((found.double() - expected).abs().max() / expected.abs().max())
        assert worst < tolerance, (D, dtype, worst)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton: the GPU kernel is not tested")
def test_the_gpu_kernel_by_triton_interpreter() -> None:
    """Every number of sides, rows that do not fill the tile."""
    run = forked.interpret(KERNEL)
    assert run.returncode == 0, run.stderr


def test_models_need_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import dubito.models.numerics.hadamard, dubito.models"
    subprocess.run([sys.executable, "-c", code], check=True)
