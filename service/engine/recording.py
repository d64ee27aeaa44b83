"""Records the operators of a torch function as it runs once: calls whose arguments are values or constants."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BY_SHAPE = {"new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like"}
LARGEST = 1 << 30


class NotRecorded(Exception):
    """The function cannot be replayed as a list of operators; the message says why."""


@dataclass(frozen=True)
class Recorded:
    """A result of an earlier call, or an input."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OperatorCall:
    """One operator. Tensors among the arguments are constants: they do not depend on the inputs."""

    name: str  # without the overload: "add"
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Recorded, ...]


@dataclass(frozen=True)
class Recording:
    inputs: tuple[Recorded, ...]
    calls: tuple[OperatorCall, ...]
    output: Recorded


@dataclass
class _Known:
    value: Recorded
    tensor: Tensor  # kept, so that its id stays its own
    valid: bool = True  # False: an operator in place has changed its memory under another name


class _Recorder(TorchDispatchMode):
    def __init__(self, kept_whole: frozenset[str], largest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept_whole, self.largest = kept_whole, largest
        self.calls: list[OperatorCall] = []
        self.known: dict[int, _Known] = {}  # by the id of its tensor
        self.bytes = self.values = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler, which takes seconds, and nothing is compiled here."""
        return False

    def add(self, tensor: Tensor) -> Recorded:
        value = Recorded(self.values, tuple(tensor.shape), tensor.dtype)
        self.values += 1
        self.known[id(tensor)] = _Known(value, tensor)
        return value

    def value(self, tensor: Any) -> Any:
        """The value that a tensor is; anything else as it is."""
        if not isinstance(tensor, Tensor) or id(tensor) not in self.known:
            return tensor
        known = self.known[id(tensor)]
        if not known.valid:
            raise NotRecorded("a tensor is changed in place, and then used under another name")
        return known.value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [t for t in _leaves((*args, *kwargs.values())) if isinstance(t, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and not _quiet(name, args, kwargs):
            raise NotRecorded(f"the network draws random numbers by {name}")
        if not any(id(t) in self.known for t in tensors):
            return func(*args, **kwargs)
        if name not in self.kept_whole:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        values, options = self._values(args), {key: self._values(value) for key, value in kwargs.items()}
        out = func(*args, **kwargs)
        if name in BY_SHAPE:
            return out
        outputs = list(out) if isinstance(out, list | tuple) else [out]
        if not all(isinstance(t, Tensor) for t in outputs):
            raise NotRecorded(f"the network reads numbers by {name}, and may decide by them")
        if func._schema.is_mutable:
            self._change(name, outputs)
        elif any(t is out for t in tensors):  # as `to` does where there is nothing to do
            return out
        self.bytes += sum(t.nbytes for t in outputs)
        if self.bytes > self.largest:
            raise NotRecorded(f"its values take more than {self.largest:,} bytes")
        results = tuple(self.add(t) for t in outputs)
        self.calls.append(OperatorCall(name.removesuffix("_"), values, options, results))
        return out

    def _values(self, arguments: Any) -> Any:
        """The same lists and tuples of them, with values in place of tensors."""
        if isinstance(arguments, list | tuple):
            inner = map(self._values, arguments)
            return list(inner) if isinstance(arguments, list) else tuple(inner)
        return self.value(arguments)

    def _change(self, name: str, outputs: Sequence[Tensor]) -> None:
        """An operator has changed a value in place: all other names of its memory become invalid."""
        if len(outputs) > 1 or not name.endswith("_") or id(outputs[0]) not in self.known:
            raise NotRecorded(f"{name} writes to a tensor that it was given")
        (tensor,) = outputs
        storage = tensor.untyped_storage()._cdata
        for known in self.known.values():
            if known.tensor.untyped_storage()._cdata == storage and known.tensor is not tensor:
                known.valid = False


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Of an operator's arguments, which are values and lists of them."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _leaves(argument)
        else:
            yield argument


def _quiet(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operator that can be random is not: dropout when no network is trained, attention without it."""
    if "dropout" in name:
        return not (args[2] if len(args) > 2 else kwargs.get("train", True))
    return name == "scaled_dot_product_attention" and not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def record(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], kept_whole: frozenset[str], largest: int = LARGEST
) -> Recording:
    """Run a function of tensors once, and record what it does; `kept_whole`: composite operators that stay whole.

    Values are kept until it ends; `largest` is the limit of their bytes.

    Raises NotRecorded where the same list of operators would not give the function's result for other inputs.
    """
    recorder = _Recorder(kept_whole, largest)
    with recorder:
        first = tuple(recorder.add(t) for t in inputs)
        output = recorder.value(function(*inputs))
    if not isinstance(output, Recorded):
        raise NotRecorded("its result does not depend on its inputs")
    return Recording(first, tuple(_needed(recorder.calls, output)), output)


def _needed(calls: Sequence[OperatorCall], output: Recorded) -> list[OperatorCall]:
    """Calls whose results are used."""
    wanted, kept = {output.number}, list[OperatorCall]()
    for call in reversed(calls):
        if any(value.number in wanted for value in call.results):
            kept.append(call)
            leaves = _leaves((*call.args, *call.options.values()))
            wanted |= {leaf.number for leaf in leaves if isinstance(leaf, Recorded)}
    return kept[::-1]
