"""Bayesian layers, and the value that takes the K draws of a pass to them.

A layer holds a geometry and a posterior, and no draws: what a forward pass uses (the factors, the normals and the
plan) is a value that its caller owns. The value reaches the layers, which stand anywhere inside somebody else's
network, through a value of the thread, so that threads sharing a network do not see each other's draws.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from dubito.models.errors import ConversionError, InputError
from dubito.models.manifest import Layer
from dubito.models.network.geometry import Conv, Execution, Geometry, Linear, apply
from dubito.models.posteriors.functions import Functions
from dubito.models.posteriors.protocol import Dense, Factors, Operand, Posterior


class Reading(Protocol):
    """Computes further columns of the outputs from the features, the inputs of the last linear layer."""

    @property
    def columns(self) -> int:
        """Number of columns."""

    def __call__(self, features: Tensor, K: int, member: Callable[[int], Tensor]) -> Tensor:
        """Features (K·B, d) of K draws, in order -> (K·B, columns) in float32; `member` as in `Run`."""

    def to(self, device: torch.device) -> Self: ...


@dataclass(frozen=True)
class Run:
    """One forward pass of K draws folded into the batch."""

    K: int
    operands: Mapping[nn.Module, Callable[[], Operand]]  # made when a layer is reached
    plan: Mapping[nn.Module, Execution]
    member: Callable[[int], Tensor]  # number of members -> each draw's member (K,)
    structure: "Structure"
    B: int = 1  # inputs
    channels_last: bool = False
    first_alone: bool = False  # of the inputs, only the rows of the first draw are read; the others are not written
    factors: Mapping[str, Factors] = field(default_factory=dict)  # what the draws are made from, by layer
    form: nn.Module | None = None  # the network in another form, to be run instead
    begun: Sequence[Callable[[], object]] = ()  # draws that are under way: a capture ends when all were called for
    read: Reading | None = None  # what is read off the features, in further columns of the outputs
    features: list[Tensor] = field(default_factory=list)  # filled by the layer that is watched for `read`
    arrived: list[tuple[int, float]] | None = None  # filled by the layers: what they get of the first draw, in brief
    points: int = 0  # inducing inputs, the first rows of each draw
    on_arrival: Mapping[nn.Module, "OnArrival"] = field(default_factory=dict)  # layers that are drawn in sequence
    drawn: dict[nn.Module, "Drawn"] = field(default_factory=dict)  # filled by them
    ahead: dict[nn.Module, Any] = field(default_factory=dict)  # what the kernel of one layer has made for the next


Drawn = tuple[Dense | Functions, Tensor]  # and log Q − log P of each draw (K,)
OnArrival = Callable[[Geometry, Tensor], Drawn]  # by inducing inputs as they arrive: (K, M, ...)


class _Thread(local):
    """The pass that a thread is in.

    Layers are called by the forward code of somebody else's network, which has no argument for it. Each thread has its
    own, so that threads may share a network; a `ContextVar` would do as well, but torch.compile cannot set one.
    """

    def __init__(self) -> None:
        self.run: Run | None = None


_thread = _Thread()


@contextmanager
def running(run: Run) -> Iterator[None]:
    before = _thread.run
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = before


def first_input(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """What a layer was called with, as its one argument: by place or by name."""
    return inputs[0] if inputs else next(iter(named.values()))


def keep_features(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A hook of the layer that is watched: keeps its inputs where the pass reads something off them."""
    run = _thread.run
    if run is not None and run.read is not None:
        run.features.append(first_input(inputs, named))


@contextmanager
def layer_by_layer(attends: bool) -> Iterator[None]:
    """torch's transformers have a fast path that reads weights past their layers; it must not be taken."""
    if not attends:
        yield
        return
    global _inside, _fast_before
    with _fast_lock:
        if _inside == 0:
            _fast_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _inside += 1
    try:
        yield
    finally:
        with _fast_lock:
            _inside -= 1
            if _inside == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_before)


# torch has one switch for the whole process, so passes of all networks and threads are counted here: the first turns it
# off, the last restores it
_fast_lock, _inside, _fast_before = Lock(), 0, True


def current(layer: nn.Module, x: Tensor) -> Run:
    """The pass that the layer is reached by."""
    run = _thread.run
    if run is None:
        raise InputError(
            f"{type(layer).__name__} was called outside a Bayesian network, so it has no draws. Call the network that "
            "`bayesianize` or `load` returned, not a part of it (activation checkpointing calls parts, too)."
        )
    if run.K > 1 and len(x) % (run.K * run.B):
        name = run.structure.names.get(layer, type(layer).__name__)
        raise FoldError(
            f"layer {name!r} got {len(x)} rows, which are not K = {run.K} samples of {run.B} inputs: the network "
            "mixes or drops rows of the batch before it, or makes its own. Only layers that act on each input alone "
            f"can be sampled: leave this one out with layers={{{name!r}: 'deterministic'}}."
        )
    if run.arrived is not None:
        run.arrived.append(_in_brief(x[: len(x) // run.K]))
    return run


def _in_brief(x: Tensor) -> tuple[int, float]:
    """How many numbers, and a sum in which each has a weight of its own: another order shows, too."""
    flat = x.detach().double().flatten()
    flat = flat.nan_to_num()
    return len(flat), float(flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device))


# what torch's layers call the sizes, for networks that ask their layers
SIZES = {
    Linear: {"in_features": "inputs", "out_features": "outputs"},
    Conv: {
        "in_channels": "inputs",
        "out_channels": "outputs",
        "kernel_size": "kernel",
        **{name: name for name in ("stride", "padding", "dilation", "groups", "padding_mode")},
    },
}


class FoldError(InputError):
    """Draws cannot share a pass of this network, which mixes rows of the batch; one at a time they may still run."""


class NoWeightError(ConversionError, AttributeError):
    """Also an AttributeError, so that `hasattr` answers no."""


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

    def set_prior(self, sigma: float) -> None:
        """The scale of the prior, which may follow from the weights of the start and stands in no tensor."""
        self.entry = self.entry.model_copy(update={"sigma": sigma})
        self.posterior.sigma = sigma  # type: ignore[assignment]  # a number, by construction

    def forward(self, input: Tensor) -> Tensor:
        run = current(self, input)
        draw = run.on_arrival.get(self)
        operand: Operand
        if draw is None:
            operand = run.operands[self]()
        else:
            by_draw = input.unflatten(0, (run.K, -1))
            rows = run.points * (len(input) // (run.K * run.B))  # a network may make several of each input
            operand, _ = run.drawn[self] = draw(self.geometry, by_draw[:, :rows])
            if isinstance(operand, Functions):
                return operand.beyond(by_draw, rows).flatten(0, 1)
        return apply(self.geometry, input, operand, run.K, run.plan.get(self, "loop"), run.channels_last)

    def __getattr__(self, name: str) -> Any:
        """What the layer that stood here would say of its sizes; it has no one weight to show."""
        if name in ("weight", "bias"):
            run = _thread.run
            where = "its name" if run is None else run.structure.names.get(self, "its name")
            raise NoWeightError(
                f"a Bayesian layer has no one {name}: it has a distribution. The network reads this layer's {name} "
                f"past its forward method; leave that layer out with layers={{{where!r}: 'deterministic'}}."
            )
        if name in (known := SIZES[type(self.__dict__["geometry"])] if "geometry" in self.__dict__ else {}):
            return getattr(self.geometry, known[name])
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return str(self.geometry)


class MemberLayer(nn.Module):
    """Each ensemble member's own copy of a layer that is no weight matrix (a BatchNorm, say), on that member's rows."""

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copies)

    def __getattr__(self, name: str) -> Any:
        """What the layer that stood here would say, as far as it is the same for all members."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "copies" not in self.__dict__.get("_modules", {}):
                raise
        value = getattr(self.copies[0], name)
        if isinstance(value, Tensor | nn.Module):
            run = _thread.run
            where = "its name" if run is None else run.structure.names.get(self, "its name")
            raise NoWeightError(
                f"a layer of which each member has a copy has no one {name}. The network reads it past its forward "
                f"method; leave that layer out with layers={{{where!r}: 'deterministic'}}."
            )
        return value

    def forward(self, *given: Any, **named: Any) -> Tensor:
        if not given and len(named) == 1:
            given, named = (first_input(given, named),), {}
        x, *further = given
        run = current(self, x)
        chosen = run.member(len(self.copies)).tolist()
        if run.K == 1:
            return self.copies[chosen[0]](x, *further, **named)  # type: ignore[no-any-return]
        if further or named:
            raise FoldError("a layer with several inputs is kept in copies, and one sample at a time is all it can do.")
        answers = [self.copies[m](rows) for m, rows in zip(chosen, x.chunk(run.K), strict=True)]
        if not all(isinstance(answer, Tensor) for answer in answers):
            raise FoldError("a layer that answers with several tensors is kept in copies: one sample at a time.")
        return torch.cat(answers)


@dataclass(frozen=True)
class Structure:
    """What a pass looks up among a network's modules."""

    layers: Mapping[str, BayesianLayer]
    names: Mapping[nn.Module, str]  # of the layers, those kept in copies too
    attends: bool  # by torch's own transformers
    convolves: bool

    @classmethod
    def of(cls, net: nn.Module) -> "Structure":
        modules = dict(net.named_modules())
        layers = {name: m for name, m in modules.items() if isinstance(m, BayesianLayer)}
        names: dict[nn.Module, str] = {
            m: name for name, m in modules.items() if isinstance(m, BayesianLayer | MemberLayer)
        }
        attends = any(isinstance(m, nn.TransformerEncoderLayer | nn.MultiheadAttention) for m in modules.values())
        convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in modules.values())
        convolves = convolves or any(isinstance(layer.geometry, Conv) for layer in layers.values())
        return cls(layers, names, attends, convolves)


def takes_ids(net: nn.Module) -> bool:
    """Whether its inputs may be indices into a table."""
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in net.modules())


def layers_in(net: nn.Module) -> dict[str, BayesianLayer]:
    """By name; `Structure.of` has more, and takes longer."""
    return {name: m for name, m in net.named_modules() if isinstance(m, BayesianLayer)}
