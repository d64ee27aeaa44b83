"""Arguments of calls and constructors: between Python's objects and JSON.

Numbers, text, true, false and null stand for themselves, an array for a tuple. An object has one key:

    {"#": 3}                result number 3              {"list": [...]}       a list
    {"slice": [a, b, c]}    a slice                      {"dict": {...}}       keyword arguments inside an argument
    {"...": true}           an ellipsis                  {"number": "-inf"}    inf, -inf or nan
    {"dtype": "float32"}    a type of numbers            {"device": true}      the device of the input
    {"memory": "channels_last"}  a memory format
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import JsonValue

from dubito.models.errors import ArtifactError
from dubito.models.traced import LARGEST

DEEPEST = 6  # lists in lists
LONGEST = 1024  # entries of a list
LONGEST_TEXT = 100
LARGEST_WHOLE = 1 << 48  # of a literal in a forward method, which may be a mask or a seed of positions
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
}
MEMORY = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Ref(int):
    """The result of an earlier call, by its number."""


class InputDevice:
    """The device that the input is on."""


def encode(value: Any, number: Callable[[Any], int | None]) -> JsonValue:
    """`number` gives the place of a result of an earlier call, None for anything else; raises TypeError."""
    if (place := number(value)) is not None:
        return {"#": place}
    match value:
        case None | bool() | str():
            return value
        case int() if type(value) is int:
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"number": str(value)}
        case tuple():  # torch.Size too
            return [encode(one, number) for one in value]
        case list():
            return {"list": [encode(one, number) for one in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(one, number) for key, one in value.items()}}
        case slice():
            return {"slice": [encode(one, number) for one in (value.start, value.stop, value.step)]}
        case torch.dtype() if (name := str(value).removeprefix("torch.")) in DTYPES:
            return {"dtype": name}
        case torch.memory_format() if (name := str(value).removeprefix("torch.")) in MEMORY:
            return {"memory": name}
        case torch.device():
            return {"device": True}
    if value is Ellipsis:
        return {"...": True}
    raise TypeError(type(value).__name__)


def decode(value: JsonValue, before: int, depth: int = DEEPEST, largest: int = LARGEST_WHOLE) -> Any:
    """The Python object, with a `Ref` for a result; only the results of calls `before` this one are known."""
    match value:
        case None | bool():
            return value
        case str():
            if len(value) > LONGEST_TEXT:
                raise ArtifactError(f"an argument has {len(value):,} letters; expected at most {LONGEST_TEXT}.")
            return value
        case int():
            if abs(value) > largest:
                raise ArtifactError(f"an argument is {short(value)}; expected at most {largest:,}.")
            return value
        case float():
            return value
        case list():
            return tuple(_each(value, before, depth, largest))
        case dict() if len(value) == 1:
            (kind, content), *_ = value.items()
            return _object(kind, content, before, depth, largest)
    raise ArtifactError(f"an argument is {short(value)}; expected a number, a list or an object with one known key.")


def _each(values: Sequence[JsonValue], before: int, depth: int, largest: int) -> list[Any]:
    if len(values) > LONGEST or depth == 0:
        raise ArtifactError(f"an argument has lists of more than {LONGEST} entries, or {DEEPEST} inside each other.")
    return [decode(one, before, depth - 1, largest) for one in values]


def _object(kind: str, content: JsonValue, before: int, depth: int, largest: int) -> Any:
    match kind, content:
        case "#", int() if type(content) is int:
            if not 0 <= content < before:
                raise ArtifactError(f"it uses result {short(content)} before it is there; expected 0 to {before - 1}.")
            return Ref(content)
        case "list", list():
            return _each(content, before, depth, largest)
        case "slice", [_, _, _]:
            return slice(*_each(content, before, depth, largest))
        case "dict", dict():
            return dict(zip(content, _each([*content.values()], before, depth, largest), strict=True))
        case "...", True:
            return Ellipsis
        case "number", "inf" | "-inf" | "nan":
            return NUMBERS[content]
        case "dtype", str() if content in DTYPES:
            return DTYPES[content]
        case "memory", str() if content in MEMORY:
            return MEMORY[content]
        case "device", True:
            return InputDevice()
    raise ArtifactError(f"an argument is {short({kind: content})}, which stands for nothing that is known here.")


def sizes(value: JsonValue) -> Any:
    """An argument of a constructor: numbers, text and lists of them."""
    return decode(value, 0, 2, LARGEST)


def short(value: object) -> str:
    """For a message: a file may hold anything."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
