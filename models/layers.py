"""Bayesian layers, and the run that tells them which K samples they are.

A layer holds a geometry and a posterior, and no draws: what a forward pass uses (the factors, the normals and the
plan) is a value that its caller owns. The value reaches the layers, which stand anywhere inside somebody else's
network, through a context variable, so that threads sharing a network do not see each other's draws.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.models.errors import InputError
from dubito.models.geometry import Geometry, How, apply
from dubito.models.manifest import Layer
from dubito.models.posterior import Operand, Posterior


@dataclass(frozen=True)
class Run:
    """One forward pass of K samples folded into the batch."""

    K: int
    operands: Mapping[nn.Module, Callable[[], Operand]]  # made when a layer is reached, freed when it is done
    plan: Mapping[nn.Module, How]
    member: Callable[[int], Tensor]  # number of members -> each sample's member (K,)


_run: ContextVar[Run | None] = ContextVar("run", default=None)


@contextmanager
def running(run: Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def _current(layer: nn.Module, x: Tensor) -> Run:
    run = _run.get()
    if run is None:
        raise InputError(
            f"{type(layer).__name__} was called outside a Bayesian network, so it has no draws. "
            "Call the network that `bayesianize` or `load` returned, not a part of it."
        )
    if len(x) % run.K:
        raise InputError(
            f"a layer got {len(x)} rows, which are not K = {run.K} samples of the same inputs: "
            "some layer before it mixes or drops rows of the batch. "
            "Only networks that act on each row alone can be sampled."
        )
    return run


class BayesianLayer(nn.Module):
    """Stands where a Linear or Conv layer stood."""

    def __init__(self, geometry: Geometry, posterior: nn.Module, entry: Layer) -> None:
        super().__init__()
        self.geometry = geometry
        self.posterior = posterior
        self.entry = entry  # what an artifact says of it

    @property
    def q(self) -> Posterior:
        return self.posterior  # type: ignore[return-value]  # nn.Module by type, a posterior by construction

    def forward(self, x: Tensor) -> Tensor:
        run = _current(self, x)
        return apply(self.geometry, x, run.operands[self](), run.K, run.plan.get(self, "loop"))

    def extra_repr(self) -> str:
        return str(self.geometry)


class MemberLayer(nn.Module):
    """Each ensemble member's own copy of a layer that is no weight matrix (a BatchNorm, say), on that member's rows."""

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copies)

    def forward(self, x: Tensor) -> Tensor:
        run = _current(self, x)
        chosen = run.member(len(self.copies)).tolist()
        return torch.cat([self.copies[m](rows) for m, rows in zip(chosen, x.chunk(run.K), strict=True)])
