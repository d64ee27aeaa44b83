"""Checks whether a device computes right in a dtype: by a few convolutions and products, and by those of a pass.

Some do not. On CPUs with AMX, torch 2.15 (its oneDNN) gives wrong bfloat16 convolutions, without any warning, where the
stride along the width exceeds 1: patches (the kernel is the stride), and outputs one column wide
(pytorch/pytorch#169688). A list of CPUs would soon be out of date, so every device is checked.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dubito.models.errors import NumericsError, first_line

TF32 = 2.0**-10  # machine epsilon of TF32, to which GPUs may round the factors of float32 products
ROUNDINGS = 4  # tolerance of one product, in machine epsilons of its largest value: it is rounded once, at its end
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
Convolve = Callable[..., Tensor]  # x, W, stride, padding, dilation, groups

# shapes of x and W, and options: cases known to be wrong on some device, and usual ones
CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 16, 16, 16), (32, 16, 4, 4), {"stride": 4}),
    ((2, 16, 12, 12), (32, 16, 6, 6), {"stride": 6}),
    ((2, 16, 28, 28), (32, 16, 14, 14), {"stride": 14}),
    ((2, 8, 16, 16), (16, 8, 8, 8), {"stride": 8}),
    ((2, 8, 32, 32), (16, 8, 16, 16), {"stride": 16}),
    ((2, 3, 32, 32), (64, 3, 16, 16), {"stride": 16}),
    ((2, 8, 32), (16, 8, 8), {"stride": 8}),
    ((2, 64, 13, 2), (48, 64, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 2, 5, 6), (2, 2, 1, 3), {"stride": (1, 2), "dilation": (1, 2)}),
    ((2, 8, 3, 4, 2), (16, 8, 3, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 32, 16, 4), (48, 32, 1, 1), {"stride": (3, 1)}),
    ((2, 16, 16, 16), (32, 16, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 32, 8, 8), (48, 16, 3, 3), {"padding": 1, "groups": 2}),
    ((2, 3, 9, 9), (24, 3, 3, 3), {"padding": 1}),
)
PRODUCTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((33, 77), (77, 65)), ((3, 17, 40), (3, 40, 24)))
CHECKED = {  # operators on which a pass spends its time, with and without autograd
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("convolution", "convolution_backward", "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum"),
    "scaled_dot_product_attention",
}


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise NumericsError if the device computes wrongly in the dtype of a pass (autocast's, if that is on)."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype.is_floating_point and dtype.itemsize < 4 and (fault := fault_of(device, dtype)) is not None:
        raise NumericsError(
            f"this {device.type} cannot be trusted with {name_of(dtype)} (torch {torch.__version__}): {fault}. "
            "Compute in float32: `network.float()`, and without autocast."
        )


def convolve(x: Tensor, W: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, W, None, stride, padding, dilation, groups)


@torch.inference_mode()
def probe(device: torch.device, dtype: torch.dtype, tried: Convolve = convolve) -> str | None:
    """The first wrong result of the device in this dtype, compared with float64 on the host; None if there is none."""
    rng = torch.Generator("cpu").manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, device="cpu").to(dtype)

    with torch.autocast(device.type, enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about dtypes that this device has no units for
        for *shapes, options in CONVOLUTIONS:
            x, W = map(random, shapes)
            expected = convolve(x.double(), W.double(), **options)
            for last in (False, True):
                a, b = (_channels_last(t) if last else t for t in (x.to(device), W.to(device)))
                what = f"a convolution of {tuple(x.shape)} by {tuple(W.shape)} with {options}"
                if fault := _compare(what, partial(tried, a, b, **options), expected, device):
                    return fault
        for left, right in PRODUCTS:
            x, W = random(left), random(right)
            what = f"a product of {left} by {right}"
            if fault := _compare(
                what, partial(torch.matmul, x.to(device), W.to(device)), x.double() @ W.double(), device
            ):
                return fault
    return None


fault_of = cache(probe)  # once per process


def _channels_last(t: Tensor) -> Tensor:
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def _compare(what: str, run: Callable[[], Tensor], expected: Tensor, device: torch.device) -> str | None:
    torch.full((1 << 17,), math.nan, device=device)  # freed at once: a read of uninitialised memory then gives NaN
    try:
        result = run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        return f"{what} cannot be computed: {first_line(error)[:200]}"
    return fault_in(what, result, expected, ROUNDINGS)


def fault_in(
    what: str, result: Tensor, expected: Tensor, roundings: int, bound: Callable[[], Tensor] | None = None
) -> str | None:
    """A message if `result` differs from `expected` by more than `roundings` machine epsilons of its largest value.

    `bound` gives the same sums of absolute values, computed only if terms may have cancelled. Infinite values are
    not compared.
    """
    if not expected.numel():
        return None
    eps, tiny = max(torch.finfo(result.dtype).eps, TF32), torch.finfo(result.dtype).tiny
    fine = expected.isfinite()
    exact = torch.where(fine, expected, 0).double()
    error = float(torch.where(fine, result.to(expected.device).double() - exact, 0).abs().max())
    size = float(exact.abs().max())
    if error <= roundings * eps * size + tiny:  # false for NaN
        return None
    if bound is not None and error <= roundings * eps * size + eps * float(bound().abs().nan_to_num(0, 0, 0).max()):
        return None
    times = f"{error / size:.2g} times its largest value" if size else f"{error:.2g}"
    return f"{what} is off by {times}, where rounding is {roundings * eps:.2g}"


class Checked(TorchDispatchMode):
    """Recomputes the products of a pass in a wider dtype, once for each shape, and keeps the first wrong one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault: str | None = None  # the first
        self._seen: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler, which takes seconds, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        out = func(*given[0], **given[1])
        if self.fault is None and func.overloadpacket.__name__ in CHECKED:
            case = str((func, tree_map(_layout, given)))
            if case not in self._seen:
                self._seen.add(case)
                self.fault = _fault_of_call(func, given, out)
        return out


def _layout(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def _fault_of_call(func: Any, given: tuple[Any, Any], out: Any) -> str | None:
    def again(*, unsigned: bool) -> list[Any]:
        def wider(t: Any) -> Any:
            if not isinstance(t, Tensor) or t.dtype not in WIDER:
                return t
            return t.to(WIDER[t.dtype]).abs() if unsigned else t.to(WIDER[t.dtype])

        args, kwargs = tree_map(wider, given)
        return tree_leaves(func(*args, **kwargs))

    shapes = ", ".join(str(tuple(t.shape)) for t in tree_leaves(given) if isinstance(t, Tensor))
    try:
        expected = again(unsigned=False)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # no such operator in the wider dtype, or too little memory
        return None
    for i, result in enumerate(tree_leaves(out)):
        asked = isinstance(expected[i], Tensor)  # a gradient that nobody asked for is None, or anything at all
        if asked and isinstance(result, Tensor) and result.dtype in WIDER:
            what = f"{func.overloadpacket.__name__} of {shapes} in {name_of(result.dtype)}"
            if fault := fault_in(what, result, expected[i], ROUNDINGS, lambda: again(unsigned=True)[i]):  # noqa: B023
                return fault
    return None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
