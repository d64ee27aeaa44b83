"""What a method is: its options, what an artifact says of a layer, how a posterior starts, what `inspect` shows.

The class of a method's manifest entries answers all of it; draws and KL are the posterior's that it starts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pydantic import model_validator

from dubito.models.errors import ConversionError
from dubito.models.fields import MOST_MEMBERS, Strict

if TYPE_CHECKING:
    from torch import Tensor

    from dubito.models.posteriors.protocol import Factors, Gathered, Posterior, Seen


class LayerSizes(Protocol):
    """The sizes of a linear layer or a convolution."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of W, the bias as its last column: (d_out, d_in)."""

    @property
    def inputs(self) -> int:
        """Features or channels."""

    @property
    def groups(self) -> int: ...

    @property
    def bias(self) -> bool: ...

    @property
    def dims(self) -> int:
        """Axes of a picture; 0 for a linear layer."""


def is_depthwise(geometry: LayerSizes) -> bool:
    """Each channel has a kernel of its own: few numbers, and K draws of them cost more than all that shares them."""
    return geometry.groups == geometry.inputs > 1


@dataclass(frozen=True)
class Origin:
    """A layer of a plain network, which a posterior starts from."""

    geometry: LayerSizes
    W: "Tensor"  # (d_out, d_in)
    trained: bool  # start at W; else at the prior
    spread: float | None  # of q(V) at the start; None: the method's own
    afresh: "Callable[[], Tensor]"  # another W, as the layer initialises itself


@dataclass(frozen=True)
class Option:
    """A keyword of `bayesianize`."""

    default: Any
    expected: str  # in words
    allows: Callable[[Any], bool]
    of: tuple[str, ...] = ()  # methods of its class that take it; empty: all

    def check(self, name: str, value: Any) -> None:
        try:
            allowed = self.allows(value)
        except TypeError:  # a word where a number belongs
            allowed = False
        if not allowed:
            raise ConversionError(f"{name} is {value!r}; expected {self.expected}.")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


# options of several methods
PRIOR_SCALE = Option(None, "a positive number", lambda v: v is None or 0 < v < math.inf)  # W: N(0, prior_scale²/d_in)
SIGMA_MAX = Option(0.1, "a number from 1e-5", lambda v: 1e-5 <= v < math.inf)  # cap of the deviations of q(V) or q(W)
MEMBERS = Option(5, f"at most {MOST_MEMBERS}, and at least 1", lambda v: is_count(v) and v <= MOST_MEMBERS)


def prior_of(options: Mapping[str, Any], d_in: int) -> float:
    """σ, the standard deviation of the prior of each weight."""
    scale: float | None = options["prior_scale"]
    return (1.0 if scale is None else scale) / math.sqrt(d_in)


class Entry(Strict, ABC):
    """What an artifact says of one layer. Methods of one kind share a class, and its tensors have the same names."""

    if TYPE_CHECKING:  # fields, which each class declares in an order of its own
        kind: str
        method: str
        sigma: float  # of the prior

    what: ClassVar[Mapping[str, str]]  # method -> one line of `inspect`
    options: ClassVar[Mapping[str, Option]] = {}
    spreads: ClassVar[frozenset[str]] = frozenset()  # methods whose start goes by `spread`
    copies_rest: ClassVar[frozenset[str]] = frozenset()  # methods whose members own all other layers too
    in_sequence: ClassVar[bool] = False  # layers are drawn one after the other, by what inducing inputs become
    of_functions: ClassVar[bool] = False  # draws are functions of the layer's inputs, and no weights
    not_exported: ClassVar[str] = ""  # what to do instead of exporting it as ONNX, where that is refused
    below: ClassVar[str | None] = None  # its method where a hierarchy draws V; None: it has no V

    @classmethod
    @abstractmethod
    def describe(cls, method: str, o: Mapping[str, Any], geometry: LayerSizes, W: "Tensor | None" = None) -> Self:
        """From options, each of which is there, for a layer of these sizes; W where the posterior starts there."""

    @abstractmethod
    def start(self, origin: Origin) -> "Posterior":
        """The posterior before training, or before the tensors of an artifact are loaded into it."""

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """False: such a layer stays as it is, unless it is named."""
        return True

    @classmethod
    def gather(cls, factors: "Mapping[str, Factors]", places: Mapping[str, int]) -> "Gathered":
        """Groups of layers, by name, that a GPU draws by few products, and their factors with the groups' memory.

        `places` says where the normals of each layer begin.
        """
        return [], {}

    def check(self, d_out: int, d_in: int) -> None:
        """Refuse sizes that make no sense for such a W: a file may claim any."""

    @property
    def ensemble(self) -> int:
        """Number of members, which such a class has a field for; 0 for a continuous distribution."""
        members: int | None = getattr(self, "members", None)
        return members or 0

    @model_validator(mode="after")
    def _members(self) -> Self:
        if self.method.startswith("ensemble") != bool(self.ensemble):
            members = self.ensemble or None
            raise ValueError(f"a layer of method {self.method} has members {members}; only ensembles have members")
        return self

    @property
    def from_above(self) -> tuple[int, int] | None:
        """(M_out, M_in) of the V that a hierarchy draws for it."""
        return None

    @property
    def examples(self) -> int:
        """Number of training examples that its inducing points start at; 0: it has none."""
        return 0

    def seeing(self, seen: "Seen") -> Self:
        """The entry of a layer that makes this of those examples."""
        return self

    def row(self) -> dict[str, Any]:
        """What `inspect --json` says of the layer beyond sizes."""
        return {}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Two columns of `inspect`, from the layer's row: what q is over, and which law it has."""
        return "", ""


class JointEntry(Strict, ABC):
    """What an artifact says of a posterior over a network as a whole."""

    if TYPE_CHECKING:
        method: str

    since: ClassVar[int] = 1  # first format that has it
    closed_form: ClassVar[bool] = False  # outputs have a mean and a variance without draws
    in_sequence: ClassVar[bool] = False  # it draws layers one after the other

    @abstractmethod
    def check(self, manifest: Any) -> None:
        """Raises a ValueError where it does not go with the rest of its manifest."""
