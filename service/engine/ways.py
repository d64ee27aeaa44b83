"""The ways in which a layer can be computed where a pass reaches it, and whether one of them is right."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from dubito.models.network.geometry import Conv, Geometry, How, apply
from dubito.models.network.layers import BayesianLayer
from dubito.models.numerics.proof import WIDER, fault_in, name_of
from dubito.models.posteriors.protocol import Dense, Factored, Operand
from dubito.service.engine.fusion import Unit

ROUNDINGS = 16  # machine epsilons of the largest value that a way may be off: weights and what is between are rounded
SEEN = 2  # inputs of a sample that are compared


@dataclass(frozen=True)
class Reached:
    """A Bayesian layer, or a unit around one, with what it gets in a pass of K samples."""

    unit: nn.Module
    x: Tensor  # (K·B, ...)
    residual: Tensor | None  # of a unit: what is added
    operand: Operand
    K: int
    channels_last: bool

    @property
    def geometry(self) -> Geometry:
        assert isinstance(self.unit, Unit | BayesianLayer)
        return self.unit.geometry

    @cached_property
    def ways(self) -> tuple[How, ...]:
        ways = ways_of(self.geometry, self.operand, self.K)
        return ways + kernel_ways(self.geometry, self.operand, self.x) if isinstance(self.unit, Unit) else ways

    @cached_property
    def case(self) -> str:
        """What decides which way is fastest, in few letters."""
        follows, r = None, None
        if isinstance(self.unit, Unit):
            follows = (self.unit.norm is not None, self.residual is not None, self.unit.relu)
        if isinstance(self.operand, Factored):
            r = (self.operand.B.shape[1], self.operand.e is not None)
        told = (str(self.geometry), tuple(self.x.shape), str(self.x.dtype), r, self.K, self.channels_last, follows)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def compute(self, how: How) -> Tensor:
        if isinstance(self.unit, Unit):
            return self.unit.compute(self.x, self.residual, self.operand, self.K, how, self.channels_last)
        return apply(self.geometry, self.x, self.operand, self.K, how, self.channels_last)

    def expected(self, *, unsigned: bool = False) -> Tensor:
        """A few rows of the first and of the last sample, without plans: dense weights, one by one, in a wider type.

        `unsigned`: all numbers without their signs, so that nothing cancels.
        """
        wide = WIDER.get(self.x.dtype, self.x.dtype)

        def change(t: Tensor) -> Tensor:
            return t.to(wide).abs() if unsigned else t.to(wide)

        rows = [change(x) for x in _seen(self.x, self.K)]
        added = [None, None] if self.residual is None else [change(r) for r in _seen(self.residual, self.K)]
        operands = [_each(self.operand.part(k, 1), change) for k in (0, self.K - 1)]
        alone = [Reached(self.unit, *each, 1, False) for each in zip(rows, added, operands, strict=True)]
        return torch.cat([one.compute("loop") for one in alone])

    def fault(self, how: How, expected: Tensor) -> str | None:
        """What is wrong with those rows, where anything is."""
        found = torch.cat(_seen(self.compute(how), self.K))
        what = f"{how!r} in {name_of(found.dtype)}"
        return fault_in(what, found, expected, ROUNDINGS, partial(self.expected, unsigned=True))


def _seen(rows: Tensor, K: int) -> list[Tensor]:
    n = len(rows) // K
    return [rows[k * n : k * n + min(n, SEEN)] for k in (0, K - 1)]


def _each(operand: Operand, change: Callable[[Tensor], Tensor]) -> Operand:
    parts = {f.name: getattr(operand, f.name) for f in fields(operand)}
    changed: dict[str, Any] = {name: change(t) for name, t in parts.items() if isinstance(t, Tensor)}
    return replace(operand, **changed)


def ways_of(geometry: Geometry, operand: Operand, K: int) -> tuple[How, ...]:
    """In which the operand can be applied, all to the same result."""
    dense: tuple[How, ...] = ("loop",)
    if K > 1:
        dense = ("loop", "batch", "unfold") if isinstance(geometry, Conv) else ("loop", "batch")
    match operand:
        case Factored():
            return ("factored", *dense)
        case Dense(W) if len(W) > 1:
            return dense
    return ()


def kernel_ways(geometry: Geometry, operand: Operand, x: Tensor) -> tuple[How, ...]:
    """Those of a GPU's kernels, in half precision: in float32 they would not use its matrix units."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return ()
    from dubito.service.engine.kernels import suits

    if not suits(geometry):
        return ()
    match operand:
        case Factored(_, _, e) if geometry.taps_first:
            return ("fused", "parted", "grouped") if e is None else ("fused", "parted")
        case Dense(W) if len(W) > 1:
            return ("grouped",)
    return ()
