"""A network as data: torch modules of a list with their arguments, and the calls that its forward method makes."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from dubito.models.fields import Strict

MOST_CALLS = 1 << 15  # of a network; the largest of torchvision and timm have a few thousand
MOST_PARTS = 1 << 15  # modules, and tensors that no torch module owns
LARGEST = 1 << 24  # of any whole number among the arguments, and of any side of a tensor

Path = Annotated[str, Field(max_length=500)]  # dotted, as in `named_modules`
Side = Annotated[int, Field(ge=0, le=LARGEST)]
Dtype = Literal["float32", "bool", "uint8", "int8", "int16", "int32", "int64"]


class OwnTensor(Strict):
    """A tensor that belongs to no torch module: a class token, a scale per channel, a constant."""

    shape: Annotated[tuple[Side, ...], Field(max_length=8)]
    dtype: Dtype = "float32"
    parameter: bool = True  # False: a buffer


class TracedCall(Strict):
    """One step of a forward method; its result is referred to by its number, the input being number 0.

    An argument is a JSON value, where an array stands for a tuple and {"#": 3} for the result number 3; `arguments.py`
    lists the other objects.
    """

    do: Literal["module", "function", "method", "attribute", "tensor"]
    of: Path  # which one
    args: tuple[JsonValue, ...] = ()
    named: dict[str, JsonValue] = {}


class TracedForward(Strict):
    """A forward method of one input, of a module that holds tensors and no other modules."""

    tensors: Annotated[dict[Path, OwnTensor], Field(max_length=MOST_PARTS)] = {}
    calls: Annotated[tuple[TracedCall, ...], Field(max_length=MOST_CALLS)]
    output: JsonValue


class TorchModule(Strict):
    """A module of the list by name, and the arguments of its constructor that are not the default."""

    kind: Annotated[str, Field(max_length=40)]
    arguments: dict[str, JsonValue] = {}


class Traced(Strict):
    """A whole network. Its parts stand in the order of `named_modules`, on which the order of its weights depends."""

    parts: Annotated[dict[Path, TorchModule | TracedForward | OwnTensor], Field(max_length=MOST_PARTS)]
    same: Annotated[dict[Path, Path], Field(max_length=MOST_PARTS)] = {}  # further names of a module or a tensor
    calls: Annotated[tuple[TracedCall, ...], Field(max_length=MOST_CALLS)]
    output: JsonValue
    input: Annotated[tuple[Side, ...], Field(max_length=8)] | None = None  # of one row, where no other shape will do
