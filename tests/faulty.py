"""A stand-in for hardware that computes wrongly in some type of numbers, and what tests may expect of the real one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.models import bayesianize
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.proof import fault_of

CPU = torch.device("cpu")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
Told = dict[str, Any]  # the arguments of a convolution, by name
# x, W and options of issue 17: in bfloat16 wrong on CPUs with AMX but for the last, by torch 2.15 alone
FOUR: tuple[tuple[tuple[int, ...], tuple[int, ...], Told], ...] = (
    ((2, 16, 16, 16), (32, 16, 4, 4), {"stride": 4}),
    ((2, 64, 13, 2), (48, 64, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 2, 5, 6), (2, 2, 1, 3), {"stride": (1, 2), "dilation": (1, 2)}),
    ((2, 16, 16, 16), (32, 16, 3, 3), {"stride": 2, "padding": 1}),
)


def need(*dtypes: torch.dtype) -> None:
    """Skips a test where this CPU computes wrongly in a type that it is about."""
    for dtype in dtypes:
        if fault := fault_of(CPU, dtype):
            pytest.skip(f"this CPU cannot be trusted with {dtype}: {fault}")


def those_right(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Of these types, those that this CPU computes right in."""
    return [dtype for dtype in dtypes if fault_of(CPU, dtype) is None]


@contextmanager
def known_anew() -> Iterator[None]:
    """What was found before is not known, and what is found within is forgotten."""
    fault_of.cache_clear()
    try:
        yield
    finally:
        fault_of.cache_clear()


def one_convolution(W_shape: tuple[int, ...], options: Told, method: str) -> BayesianNetwork:
    torch.manual_seed(0)
    layer = nn.Conv2d(W_shape[1], W_shape[0], W_shape[2:], **options)  # type: ignore[arg-type]
    chosen: Told = {"inducing": 3} if method == "ffg-u" else {}
    if method == "mc-dropout":  # which leaves layers of few channels alone
        chosen["layers"] = {"0": method}
    return bayesianize(nn.Sequential(layer, nn.Flatten()), method, **chosen)


class Faulty(TorchDispatchMode):
    """While it is entered, in this thread: convolutions in one type whose arguments are `such` come out wrong."""

    def __init__(self, such: Callable[[Told], bool], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.such, self.dtype = such, dtype
        self.met = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in CONVOLUTIONS and out.dtype == self.dtype:
            names = [argument.name for argument in func._schema.arguments]
            defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            if self.such(defaults | dict(zip(names, args, strict=False)) | (kwargs or {}) | {"out": out}):
                self.met += 1
                return out.flip(1) if out.shape[1] > 1 else out + 1
        return out


def patches(told: Told) -> bool:
    """The kernel is the stride, as oneDNN has it wrong on CPUs with AMX."""
    kernel, stride = list(told["weight"].shape[2:]), list(told["stride"])
    return max(stride) > 1 and kernel == (stride * len(kernel))[: len(kernel)]


def one_column(told: Told) -> bool:
    """Its other fault: the output is one column wide, and the stride along the width exceeds 1."""
    out: Tensor = told["out"]
    return out.shape[-1] == 1 and told["stride"][-1] > 1


def grouped(told: Told) -> bool:
    """Another kind: only where samples lie beside each other."""
    return bool(told["groups"] > 1)
