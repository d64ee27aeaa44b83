"""The executions of a layer: the ways in which it can be computed, and a check of their results."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.models.network.geometry import Conv, Execution, Geometry, Linear, apply
from dubito.models.network.layers import BayesianLayer
from dubito.models.numerics.proof import WIDER, fault_in, name_of
from dubito.models.posteriors.protocol import Dense, Factored, Operand
from dubito.service.engine.fusion import Unit

if TYPE_CHECKING:
    from dubito.service.engine.kernels import Ahead, Projected

ROUNDINGS = 16  # tolerance in machine epsilons of the largest value: weights and intermediate results are rounded
SEEN = 2  # inputs of a draw that are compared


def layer_of(unit: nn.Module) -> BayesianLayer:
    """The layer itself, of a layer or the unit around it."""
    layer = unit.layer if isinstance(unit, Unit) else unit
    assert isinstance(layer, BayesianLayer)
    return layer


@dataclass(frozen=True)
class LayerCall:
    """A Bayesian layer, or the unit around it, with its inputs and weights in a pass of K draws."""

    unit: nn.Module
    x: Tensor  # (K·B, ...)
    residual: Tensor | None  # added by a unit
    operand: Operand
    K: int
    channels_last: bool
    begun: "Projected | None" = None  # for "mixed"

    @property
    def geometry(self) -> Geometry:
        assert isinstance(self.unit, Unit | BayesianLayer)
        return self.unit.geometry

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        fused = kernel_executions(self.geometry, self.operand, self.x) if isinstance(self.unit, Unit) else ()
        return executions_of(self.geometry, self.operand, self.K) + fused

    @cached_property
    def case(self) -> str:
        """Cache key of a measured layer: a hash of all that its speed depends on."""
        follows, r = None, None
        if isinstance(self.unit, Unit):
            follows = (self.unit.norm is not None, self.residual is not None, self.unit.then, self.unit.shared)
        if isinstance(self.operand, Factored):
            r = (self.operand.B.shape[1], self.operand.e is not None)
        parts = (str(self.geometry), tuple(self.x.shape), str(self.x.dtype), r, self.K, self.channels_last, follows)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def compute(self, execution: Execution, ahead: "Ahead | None" = None) -> Tensor:
        if isinstance(self.unit, Unit):
            given = (self.x, self.residual, self.operand, self.K, execution, self.channels_last)
            return self.unit.compute(*given, self.begun, ahead)
        return apply(self.geometry, self.x, self.operand, self.K, execution, self.channels_last)

    def expected(self, *, unsigned: bool = False) -> Tensor:
        """A few output rows of the first and last draw, computed draw by draw with dense weights in a wider dtype.

        `unsigned`: with absolute values of inputs and weights, so that nothing cancels.
        """
        wide = WIDER.get(self.x.dtype, self.x.dtype)

        def change(t: Tensor) -> Tensor:
            return t.to(wide).abs() if unsigned else t.to(wide)

        rows = [change(x) for x in _seen(self.x, self.K)]
        added = [None, None] if self.residual is None else [change(r) for r in _seen(self.residual, self.K)]
        operands = [_each(self.operand.part(k, 1), change) for k in (0, self.K - 1)]
        alone = [LayerCall(self.unit, *each, 1, False) for each in zip(rows, added, operands, strict=True)]
        return torch.cat([one.compute("loop") for one in alone])

    def fault(self, execution: Execution, expected: Tensor) -> str | None:
        """What is wrong with an execution's result on the rows of `expected`; None if it is right."""
        return self.fault_of(self.compute(execution), f"{execution!r}", expected)

    def fault_of(self, result: Tensor, what: str, expected: Tensor) -> str | None:
        rows = torch.cat(_seen(result, self.K))
        what = f"{what} in {name_of(rows.dtype)}"
        return fault_in(what, rows, expected, ROUNDINGS, partial(self.expected, unsigned=True))


@dataclass(frozen=True)
class Pair:
    """A unit, and the one that reads its outputs, in a pass: each by itself, or the second's first product within the
    first's kernel."""

    first: LayerCall
    then: LayerCall
    projection: tuple[Tensor, bool] | None  # of the second, as a pass knows it before its draws
    alone: bool  # nothing else reads the outputs

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        """Those of the first in which it can go on."""
        if not self._suits():
            return ()
        return ("mixed",) if self.first.begun is not None else ("fused", "parted")

    def _suits(self) -> bool:
        for call in (self.first, self.then):
            of_kernels = kernel_executions(call.geometry, call.operand, call.x)
            if not isinstance(call.operand, Factored) or "fused" not in of_kernels:
                return False
        from dubito.service.engine.kernels import WIDEST_AHEAD

        operand = self.then.operand
        if self.projection is None or not isinstance(operand, Factored):
            return False
        (B, outside), (d_in, r) = self.projection, operand.B.shape
        known = B.shape == operand.B.shape and B.dtype == self.then.x.dtype and outside == (operand.e is not None)
        return known and r <= WIDEST_AHEAD and 2 * r <= d_in

    @cached_property
    def case(self) -> str:
        parts = (self.first.case, self.then.case, self.first.begun is not None, self.alone)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def apart(self, first: Execution, then: Execution) -> Tensor:
        self.first.compute(first)
        return self.then.compute(then)

    def handed_over(self, first: Execution, *, stored: bool) -> LayerCall:
        """The second unit, with what the first has made for it."""
        assert isinstance(self.then.unit, Unit)
        assert self.projection is not None
        ahead = self.then.unit.asks(*self.projection, stored=stored)
        y = self.first.compute(first, ahead)
        return replace(self.then, x=y, begun=ahead.made)

    def together(self, first: Execution) -> Tensor:
        return self.handed_over(first, stored=not self.alone).compute("mixed")

    def fault(self, first: Execution) -> str | None:
        """What is wrong with the outputs of either, as they are made in a pass; None if they are right."""
        begun = self.handed_over(first, stored=True)
        wrong = self.first.fault_of(begun.x, f"{first!r} that goes on", self.first.expected())
        if wrong is None and self.alone:
            begun = replace(begun, begun=self.handed_over(first, stored=False).begun)
        return wrong or begun.fault("mixed", begun.expected())


def _seen(rows: Tensor, K: int) -> list[Tensor]:
    n = len(rows) // K
    return [rows[k * n : k * n + min(n, SEEN)] for k in (0, K - 1)]


def _each(operand: Operand, change: Callable[[Tensor], Tensor]) -> Operand:
    parts = {f.name: getattr(operand, f.name) for f in fields(operand)}
    changed: dict[str, Any] = {name: change(t) for name, t in parts.items() if isinstance(t, Tensor)}
    return replace(operand, **changed)


def executions_of(geometry: Geometry, operand: Operand, K: int) -> tuple[Execution, ...]:
    """Executions of an operand without custom kernels; all give the same result."""
    dense: tuple[Execution, ...] = ("loop",)
    if K > 1:
        dense = ("loop", "batch", "unfold") if isinstance(geometry, Conv) else ("loop", "batch")
    match operand:
        case Factored():
            return ("factored", *dense)
        case Dense(W) if len(W) > 1:
            return dense
    return ()


def kernel_executions(geometry: Geometry, operand: Operand, x: Tensor) -> tuple[Execution, ...]:
    """Executions by our GPU kernels, in half precision only: in float32 they would not use the tensor cores."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return ()
    from dubito.service.engine.kernels import suits

    if not suits(geometry):
        return ()
    match operand:
        case Factored(_, _, e) if isinstance(geometry, Linear) or geometry.taps_first:
            return ("fused", "parted", "grouped") if e is None else ("fused", "parted")
        case Dense(W) if len(W) > 1:
            return ("grouped",)
    return ()
