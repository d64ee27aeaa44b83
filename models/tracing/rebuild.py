"""From a description to a network: every name is looked up in a list, every size checked before it is allocated."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.models.errors import ArtifactError, first_line
from dubito.models.network.layers import layer_by_layer
from dubito.models.traced import OwnTensor, TorchModule, Traced, TracedCall, TracedForward
from dubito.models.tracing.arguments import InputDevice, Ref, decode, short
from dubito.models.tracing.modules import construct
from dubito.models.tracing.operators import (
    ATTRIBUTES,
    FUNCTIONS,
    MANIFOLD,
    METHODS,
    MOST_LAYERS,
    MOST_PIECES,
    PIECES,
    SUMS,
)

ROWS = 2  # of the trial
LARGEST_RESULT = 1 << 28  # numbers of any result for one input
PART = re.compile(r"(?!__)[A-Za-z0-9_-]{1,100}")


def rebuild(traced: Traced) -> nn.Module:
    """Call it where tensors have no storage."""
    root: Container = TracedNetwork(traced)
    if isinstance(whole := traced.parts.get(""), TorchModule):
        return construct(whole)
    _check_layers(traced)
    for name, entry in traced.parts.items():
        _place(root, name, entry)
    for name, first in traced.same.items():
        _repeat(root, name, first)
    _check_calls(root, traced)
    return root


def _check_layers(traced: Traced) -> None:
    """Each of these layers is several modules, which take memory even without storage."""
    entries = [entry for entry in traced.parts.values() if isinstance(entry, TorchModule) and entry.kind in MANIFOLD]
    stated = [entry.arguments.get("num_layers", 1) for entry in entries]
    layers = sum(number if isinstance(number, int) else 1 for number in stated)
    if layers > MOST_LAYERS:
        raise ArtifactError(f"its network has {layers:,} attention or recurrent layers; at most {MOST_LAYERS} fit.")


def _place(root: "Container", name: str, entry: TorchModule | TracedForward | OwnTensor) -> None:
    owner, last = _owner(root, name)
    if isinstance(entry, OwnTensor):
        _hold(owner, last, entry)
        return
    if isinstance(entry, TorchModule):
        owner.add_module(last, construct(entry))
        return
    inner = TracedNetwork(entry)
    for own, tensor in entry.tensors.items():
        if "." in own:
            raise ArtifactError(f"its network has a tensor {short(own)} inside {short(name)}; expected a plain name.")
        _hold(inner, _free(inner, own), tensor)
    _check_calls(inner, entry)
    owner.add_module(last, inner)


def _owner(root: "Container", name: str) -> tuple["Container", str]:
    """The part that holds this name, made where it is not there yet, and the last word of the name."""
    *above, last = name.split(".")
    for word in above:
        inner = root._modules.get(word)
        if inner is None:
            root.add_module(_free(root, word), inner := Container())
        if type(inner) is not Container:
            raise ArtifactError(f"its network has {short(name)} inside a module that has no other modules.")
        root = inner
    return root, _free(root, last)


def _free(part: nn.Module, word: str) -> str:
    """A name that stands for nothing yet: not `__class__`, and no attribute of torch's modules."""
    if not PART.fullmatch(word) or hasattr(part, word):
        raise ArtifactError(
            f"a part of its network is called {short(word)}, which is taken or no plain name (letters from A to Z, "
            "digits, _ and -). Give that part another name."
        )
    return word


def _hold(part: nn.Module, name: str, entry: OwnTensor) -> None:
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    if entry.parameter and entry.dtype == "float32":
        part.register_parameter(name, nn.Parameter(tensor))
    else:
        part.register_buffer(name, tensor)


def _repeat(root: "Container", name: str, first: str) -> None:
    owner, word = _walk(root, first)
    held = None if owner is None else {**owner._modules, **owner._parameters, **owner._buffers}.get(word)
    if held is None:
        raise ArtifactError(f"its network has {short(name)}, the same as {short(first)}, which is not there.")
    if isinstance(held, nn.Module):
        part, last = _owner(root, name)
        part.add_module(last, held)
        return
    module, last = _walk(root, name)
    kind = {} if module is None else module._parameters if isinstance(held, nn.Parameter) else module._buffers
    there = kind.get(last)
    if there is None or there.shape != held.shape or there.dtype != held.dtype:
        raise ArtifactError(f"its network has no tensor {short(name)} that could be the same as {short(first)}.")
    kind[last] = held  # type: ignore[assignment]


def _walk(root: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The module that holds this name, None where there is none, and the last word of the name."""
    *above, last = name.split(".")
    module: nn.Module | None = root
    for word in above:
        module = None if module is None else module._modules.get(word)
    return module, last


def _check_calls(net: nn.Module, forward: TracedForward | Traced) -> None:
    """Modules and tensors that are named are there."""
    modules, tensors = {name for name, _ in net.named_modules()} - {""}, net.state_dict().keys()
    for call in forward.calls:
        known = modules if call.do == "module" else tensors if call.do == "tensor" else None
        if known is not None and call.of not in known:
            raise ArtifactError(f"its network calls for the {call.do} {short(call.of)}, which it does not have.")


def try_out(net: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Run the network without storage on inputs of this shape: it fits together, and no result is beyond reason.

    Returns the shape of the answer to one input.
    """
    failed: Exception | None = None
    for dtype in (torch.float32, torch.int64):  # numbers, or indices
        try:
            with _evaluating(net), torch.no_grad(), torch.device("meta"), layer_by_layer(True), _Sizes():
                out = net(torch.empty(ROWS, *shape, dtype=dtype))
            if isinstance(out, Tensor) and out.dim() > 0 and len(out) == ROWS and out.is_floating_point():
                return tuple(out.shape[1:])
            kind = type(out).__name__
            came = f"a tensor of shape {tuple(out.shape)} and {out.dtype}" if isinstance(out, Tensor) else kind
            raise ValueError(f"it answers {ROWS} of them with {came}; expected one row of real numbers for each")
        except Exception as error:  # torch has many kinds
            failed = failed or error
    assert failed is not None  # of the first try
    reason = first_line(failed)
    raise ArtifactError(f"its network cannot take inputs of shape {shape}: {reason}.")


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    """In evaluation mode: in training, some BatchNorms read numbers, of which there are none without storage."""
    training = [m for m in net.modules() if m.training]
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Sizes(TorchFunctionMode):
    """Refuses results that no network needs: of more numbers for each row, or in more pieces."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (name := getattr(func, "__name__", "")) in PIECES and (n := _pieces(name, *args, **kwargs)) > MOST_PIECES:
            raise ValueError(f"a tensor cut into {n:,} pieces")
        if name.strip("_") in SUMS:
            _check_truth_values(name.strip("_"), *args, **kwargs)
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() > ROWS * LARGEST_RESULT:
                raise ValueError(f"a result of {tensor.numel() // ROWS:,} numbers for one input")
        return out


def _check_truth_values(name: str, *args: Any, alpha: Any = 1, **_: Any) -> None:
    """Sums of truth values that torch refuses, but not on tensors without storage."""
    if any(isinstance(one, bool) for one in (alpha, *args[2:])) or (len(args) > 2 and isinstance(args[1], bool)):
        raise ValueError("alpha is a truth value")
    if "sub" in name and any(isinstance(one, bool) or getattr(one, "dtype", None) == torch.bool for one in args):
        raise ValueError("truth values cannot be subtracted")


def _pieces(name: str, x: Tensor, *args: Any, **named: Any) -> int:
    """How many tensors such a call gives."""
    axis: int
    if name == "unbind":
        axis = named.get("dim", args[0] if args else 0)
        return x.shape[axis]
    axis = named.pop("dim", args[1] if len(args) > 1 else 0)
    how = args[0] if args else next(iter(named.values()))
    if isinstance(how, tuple | list):
        return len(how) + 1
    return x.shape[axis] // max(1, how) if name == "split" else int(how)


class Container(nn.Module):
    """Holds modules and tensors under their names, and computes nothing."""


class TracedNetwork(Container):
    """Runs calls in order; each was looked up in the lists of `operators.py` when it was built."""

    def __init__(self, forward: TracedForward | Traced) -> None:
        super().__init__()
        self.calls = Calls(forward)

    def forward(self, x: Tensor) -> Any:
        values: list[Any] = [x, *[None] * len(self.calls.steps)]
        for number, step in enumerate(self.calls.steps, 1):
            values[number] = step.run(self, step, values)
            for done in step.last_used:
                values[done] = None
        return _fill(self.calls.output, values)

    @property
    def tensors_read(self) -> frozenset[str]:
        """Names of parameters and buffers that are used without a call of the module that holds them."""
        return frozenset(".".join(step.path) for step in self.calls.steps if step.run is _run_tensor)

    def extra_repr(self) -> str:
        return f"{len(self.calls.steps)} calls"


@dataclass(frozen=True)
class _Step:
    run: Callable[["TracedNetwork", "_Step", list[Any]], Any]
    path: tuple[str, ...]  # of a module or a tensor
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    named: dict[str, Any]
    last_used: tuple[int, ...]  # results that no later step needs

    @cached_property
    def flat(self) -> bool:
        """No argument holds others, as most calls have it."""
        return not any(isinstance(one, tuple | list | dict | slice | InputDevice) for one in self.args)

    def call(self, function: Callable[..., Any], values: list[Any]) -> Any:
        """With the results that its arguments refer to."""
        if self.flat:
            args = [values[one] if type(one) is Ref else one for one in self.args]
        else:
            args = _fill(self.args, values)
        return function(*args, **_fill(self.named, values)) if self.named else function(*args)


class Calls:
    """Never changed, so that copies of a network share it."""

    def __init__(self, forward: TracedForward | Traced) -> None:
        self.described = forward if isinstance(forward, Traced) else None
        needs: list[tuple[Any, Any]] = []
        for number, call in enumerate(forward.calls, 1):
            args = tuple(decode(value, number) for value in call.args)
            named = {_keyword(key): decode(value, number) for key, value in call.named.items()}
            needs.append((args, named))
        self.output = decode(forward.output, len(forward.calls) + 1)
        last = dict[int, int]()
        for number, used in enumerate([*needs, self.output], 1):
            last |= dict.fromkeys(_refs(used), number)
        ends: dict[int, list[int]] = {}
        for result, number in last.items():
            if result:  # the input says which device a new tensor belongs on
                ends.setdefault(number, []).append(result)
        self.steps = tuple(
            _step(call, *used, tuple(ends.get(number, ())))
            for number, (call, used) in enumerate(zip(forward.calls, needs, strict=True), 1)
        )

    def __deepcopy__(self, memo: object) -> "Calls":
        return self


def _keyword(name: str) -> str:
    if not name.isidentifier() or name.startswith("_") or len(name) > 40:
        raise ArtifactError(f"a call of its network has an argument {short(name)}; expected a plain name.")
    return name


def _refs(used: Any) -> list[int]:
    match used:
        case Ref():
            return [used]
        case tuple() | list():
            return [ref for one in used for ref in _refs(one)]
        case dict():
            return [ref for one in used.values() for ref in _refs(one)]
        case slice():
            return _refs((used.start, used.stop, used.step))
    return []


def _step(call: TracedCall, args: tuple[Any, ...], named: dict[str, Any], last_used: tuple[int, ...]) -> _Step:
    match call.do:
        case "module":
            if not args and len(named) == 1:  # a layer's one input: by place, as what takes its place wants it
                args, named = tuple(named.values()), {}
            return _Step(_run_module, tuple(call.of.split(".")), None, args, named, last_used)
        case "tensor":
            return _Step(_run_tensor, tuple(call.of.split(".")), None, args, named, last_used)
        case "function" if call.of in FUNCTIONS:
            return _Step(_run_function, (), FUNCTIONS[call.of], args, named, last_used)
        case "method" if call.of in METHODS and args:
            return _Step(_run_function, (), _method(call.of), args, named, last_used)
        case "attribute" if call.of in ATTRIBUTES and len(args) == 1 and not named:
            return _Step(_run_function, (), attrgetter(call.of), args, named, last_used)
    raise ArtifactError(
        f"its network calls the {call.do} {short(call.of)}, which this version of dubito does not run. "
        "Update dubito, or serve the network by its class with --network."
    )


def _method(name: str) -> Callable[..., Any]:
    def call(of: Any, *args: Any, **named: Any) -> Any:
        return getattr(of, name)(*args, **named)  # `name` is one of METHODS

    return call


def _run_module(net: TracedNetwork, step: _Step, values: list[Any]) -> Any:
    module: nn.Module = net
    for part in step.path:
        module = module._modules[part]  # type: ignore[assignment]
    return step.call(module, values)


def _run_tensor(net: TracedNetwork, step: _Step, values: list[Any]) -> Any:
    module: nn.Module = net
    *above, last = step.path
    for part in above:
        module = module._modules[part]  # type: ignore[assignment]
    return getattr(module, last)  # named in the state of the network


def _run_function(net: TracedNetwork, step: _Step, values: list[Any]) -> Any:
    assert step.function is not None
    return step.call(step.function, values)


def _fill(template: Any, values: Sequence[Any]) -> Any:
    """The arguments with the results that they refer to."""
    kind = type(template)
    if kind is Ref:
        return values[template]
    if kind is tuple:
        return tuple([_fill(one, values) for one in template])
    if kind is dict:
        return {key: _fill(one, values) for key, one in template.items()}
    if kind is list:
        return [_fill(one, values) for one in template]
    if kind is slice:
        return slice(_fill(template.start, values), _fill(template.stop, values), _fill(template.step, values))
    return values[0].device if kind is InputDevice else template
