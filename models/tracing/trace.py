"""From a network to its description: torch.fx follows the forward method, and every call is looked up in the lists.

Where the shape of an input is known, each result also has two shapes, for two and for three inputs, without storage:
code that branches on sizes is followed where both agree.
"""

import copy
import inspect
import linecache
import operator
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_args

import torch
from pydantic import JsonValue
from torch import Tensor, fx, nn

from dubito.models.errors import DubitoError, first_line
from dubito.models.network.attention import Attention
from dubito.models.network.features import watched
from dubito.models.network.geometry import Conv, Geometry
from dubito.models.network.layers import BayesianLayer, MemberLayer, layer_by_layer
from dubito.models.traced import Dtype, OwnTensor, TorchModule, Traced, TracedCall, TracedForward
from dubito.models.tracing.arguments import encode
from dubito.models.tracing.modules import construct, describe, describe_base
from dubito.models.tracing.operators import ATTRIBUTES, FACTORIES, METHODS, NAMES, proxy_among, words
from dubito.models.tracing.thread_tracer import ThreadTracer

ROWS = (2, 3)
ONE = "Wrap it in an nn.Module whose forward method returns the one that is asked for, such as the logits."
ASSERTIONS = (torch._assert, fx.proxy.assert_fn)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
UNUSED = (getattr, operator.getitem)  # calls that do nothing where nobody uses their result
SIDED = words("add sub mul truediv floordiv mod pow matmul and_ or_ xor eq ne lt le gt ge")
DUNDER = {  # what torch.fx calls an operator between a constant and a result
    **{f"__{side}{name.rstrip('_')}__": getattr(operator, name) for side in ("", "r") for name in SIDED},
    **{f"__{name}__": getattr(operator, name) for name in words("getitem setitem iadd isub imul itruediv neg")},
}
IN_PLACE = [getattr(operator, name) for name in words("iadd isub imul itruediv ifloordiv ipow iand ior setitem")]
FIXED = ("is_floating_point", "ndimension", "is_complex")  # methods whose answer the shape and type decide
PYTHONS = sysconfig.get_path("stdlib")
THEIRS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", "<frozen")  # files of torch and of ours


def changed_by_hand(part: nn.Module) -> str | None:
    """What was done to a module after it was made that no description of it holds; None: nothing."""
    if "forward" in vars(part):
        return "had its forward method replaced"
    return "has hooks" if len(part._forward_pre_hooks) > watched(part) or part._forward_hooks else None


class TraceError(DubitoError):
    """A network that cannot be written as data; the message names the line of its code."""


class _Stuck(Exception):
    """Raised where the network's code is left, so that the traceback shows the line."""


def bare_of(net: nn.Module) -> nn.Module:
    """A copy without storage, in evaluation mode, with plain layers where Bayesian ones stand."""
    memo: dict[int, object] = {}
    for module in net.modules():
        if isinstance(module, BayesianLayer):
            memo[id(module)] = _plain(module.geometry)
        elif isinstance(module, MemberLayer):
            memo[id(module)] = bare_of(module.copies[0])
        elif isinstance(module, Attention):
            memo[id(module)] = module.closed()
    for p in net.parameters():
        memo.setdefault(id(p), nn.Parameter(_without_storage(p), p.requires_grad))
    for b in net.buffers():
        memo.setdefault(id(b), _without_storage(b))
    for module in net.modules():  # results of a pass that were kept, which no copy could have: a hook's weight, say
        memo |= {id(t): _without_storage(t) for t in vars(module).values() if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(net, memo).eval()
    except Exception as error:  # whatever the network's objects come up with
        raise TraceError(f"the network cannot be copied: {first_line(error)}.") from None


def _without_storage(tensor: Tensor) -> Tensor:
    """Real numbers in float32, as `load` gives them."""
    return tensor.detach().to("meta", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _plain(g: Geometry) -> nn.Module:
    with torch.device("meta"):
        if not isinstance(g, Conv):
            return nn.Linear(g.inputs, g.outputs, g.bias)
        kind: Any = CONVOLUTIONS[g.dims - 1]
        sizes = (g.kernel, g.stride, g.padding, g.dilation, g.groups, g.bias, g.padding_mode)
        conv: nn.Module = kind(g.inputs, g.outputs, *sizes)
        return conv


def trace(net: nn.Module, shape: tuple[int, ...] | None) -> tuple[Traced, dict[str, Tensor]]:
    """The description of `net`, whose layers may be Bayesian, and the constants of its forward method by name."""
    bare = bare_of(net)
    called = next(kind for kind in type(bare).__mro__ if "__call__" in vars(kind))
    if called is not nn.Module and not isinstance(bare, fx.GraphModule):
        raise TraceError(f"{called.__name__} has a __call__ of its own, which is not followed: move it into forward.")
    if (whole := describe(bare)) is not None:
        return Traced(parts={"": whole}, calls=(), output={"#": 0}), {}
    hints = None if shape is None else tuple(torch.empty(rows, *shape, device="meta") for rows in ROWS)
    tracer = _NetworkTracer(hints)
    calls, output = tracer.follow(bare)
    inner = {name: _NetworkTracer(given) for name, given in tracer.inner.items()}
    parts: dict[str, TorchModule | TracedForward | OwnTensor] = {}
    constants = dict(tracer.constants)
    within = ""  # the module whose parts come with it
    for name, module in bare.named_modules():
        if within and name.startswith(within):
            continue
        dot = f"{name}." if name else ""
        own = {key: _entry(dot + key, t) for key, t in _held(module)}
        if name in inner:
            forward, result = inner[name].follow(module)
            constants |= {dot + key: t for key, t in inner[name].constants.items()}
            own |= {key: _entry(dot + key, t, constant=True) for key, t in inner[name].constants.items()}
            parts[name] = TracedForward(tensors=own, calls=forward, output=result)
            entry = describe_base(module)
            if entry is not None and _follows_base(entry, inner[name], forward, result):
                parts[name] = entry
        elif (entry := tracer.entry(module)) is not None:
            parts[name] = entry
        else:
            parts |= {dot + key: t for key, t in own.items()}
            continue
        within = dot
    parts |= {name: _entry(name, t, constant=True) for name, t in tracer.constants.items()}
    special = any(one.special for one in (tracer, *inner.values()))
    traced = Traced(parts=parts, same=_repeated(bare), calls=calls, output=output, input=shape if special else None)
    return traced, constants


def _follows_base(
    entry: TorchModule, tracer: "_NetworkTracer", calls: tuple[TracedCall, ...], output: JsonValue
) -> bool:
    """Whether a module that extends one of torch's makes the same calls as that one: a Linear of another library."""
    with torch.device("meta"):
        plain = construct(entry).eval()
    return (calls, output) == _NetworkTracer(tracer.hints).follow(plain)


def _held(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own parameters and buffers."""
    return [(key, t) for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]


def _entry(name: str, tensor: Tensor, constant: bool = False) -> OwnTensor:
    kind = "float32" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    if kind not in get_args(Dtype):
        raise TraceError(f"tensor {name!r} of the network holds {kind}; expected real or whole numbers.")
    if constant and tensor.is_meta:
        raise TraceError(f"tensor {name!r} of the network is computed from its weights; make it a buffer.")
    return OwnTensor(shape=tuple(tensor.shape), dtype=kind, parameter=isinstance(tensor, nn.Parameter))  # type: ignore[arg-type]


def _repeated(bare: nn.Module) -> dict[str, str]:
    """Further names of modules and tensors that have several, with the first one."""
    first: dict[int, str] = {}
    same: dict[str, str] = {}
    for name, module in bare.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{again}.") for again in same):
            continue
        if first.setdefault(id(module), name) != name:
            same[name] = first[id(module)]
            continue
        for key, tensor in _held(module):
            full = f"{name}.{key}" if name else key
            if first.setdefault(id(tensor), full) != full:
                same[full] = first[id(tensor)]
    return same


class _Proxy(fx.Proxy):
    """A result during tracing; sizes that do not depend on the number of inputs can be used as plain numbers."""

    tracer: "_NetworkTracer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(self, name)

    def __len__(self) -> int:
        value: int = self.tracer.settle(self, len)
        return value

    def __int__(self) -> int:
        value: int = self.tracer.settle(self, int)
        return value

    def __index__(self) -> int:
        value: int = self.tracer.settle(self, operator.index)
        return value

    def __float__(self) -> float:
        value: float = self.tracer.settle(self, float)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


class _Attribute(_Proxy, fx.proxy.Attribute):
    pass


class _NetworkTracer(ThreadTracer):
    proxy_buffer_attributes = True

    def __init__(self, hints: tuple[Any, ...] | None) -> None:
        super().__init__(autowrap_modules=())
        self.hints = hints  # the input for each number of rows, without storage
        self.inner: dict[str, tuple[Any, ...] | None] = {}  # modules that hold tensors alone, and their inputs
        self.constants: dict[str, Tensor] = {}
        self.special = False  # whether the shape of the input decided anything
        self.evaluating = False
        self.entries: dict[nn.Module, TorchModule | None] = {}

    def follow(self, module: nn.Module) -> tuple[tuple[TracedCall, ...], JsonValue]:
        """The calls of its forward method, and which result it returns."""
        given = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
        if len(given) > 1 and given[1].kind is given[1].POSITIONAL_OR_KEYWORD:
            names = ", ".join(p.name for p in given)
            raise TraceError(f"the network takes several inputs ({names}); expected one: join them into one tensor.")
        if (changed := changed_by_hand(module)) is not None:
            raise TraceError(f"the network {changed}, which cannot be written as data.")
        self.entries = {part: describe(part) for part in module.modules()}  # while torch's modules are as ever
        try:
            with self.alone(), _recorded_factories(self), _recorded_len(self, module), torch.no_grad():
                graph = self.trace(module)
        except Exception as error:  # whatever the network's code, or torch inside it, comes up with
            raise TraceError(_where(error)) from None
        for node in reversed(graph.nodes):
            if not node.users and (node.op == "get_attr" or node.target in UNUSED):
                graph.erase_node(node)
        numbers: dict[fx.Node, int] = {}
        calls = []
        output: JsonValue = None

        def number(value: Any) -> int | None:
            return numbers[value] if isinstance(value, fx.Node) else None

        for node in graph.nodes:
            if node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    came = type(node.args[0]).__name__.removeprefix("immutable_")
                    raise TraceError(f"the network's forward method returns a {came}; expected one tensor. {ONE}")
                output = encode(node.args[0], number)
            elif node.op != "placeholder":
                calls.append(self._call(node, number))
            numbers[node] = len(calls)
        return tuple(calls), output

    def _call(self, node: fx.Node, number: Callable[[Any], int | None]) -> TracedCall:
        args, target = tuple(node.args), node.target
        named = {key: encode(value, number) for key, value in node.kwargs.items()}
        if node.op == "get_attr":
            held = dict(self.root.named_parameters()) | dict(self.root.named_buffers())
            if str(target) not in held:
                self.constants[str(target)] = operator.attrgetter(str(target))(self.root).detach().cpu()
            return TracedCall(do="tensor", of=str(target))
        if target is getattr:
            return TracedCall(do="attribute", of=str(args[1]), args=(encode(args[0], number),))
        encoded = tuple(encode(value, number) for value in args)
        match node.op:
            case "call_module":
                return TracedCall(do="module", of=str(target), args=encoded, named=named)
            case "call_method":
                return TracedCall(do="method", of=str(target), args=encoded, named=named)
        if target not in NAMES:  # torch.fx records that a named tuple is made
            name = getattr(target, "__name__", str(target))
            raise TraceError(f"the network's forward method makes a {name}; expected to return one tensor. {ONE}")
        return TracedCall(do="function", of=NAMES[target], args=encoded, named=named)

    # what torch.fx asks

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, self.create_proxy("placeholder", "x", (), {})]  # further arguments keep defaults

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def entry(self, module: nn.Module) -> TorchModule | None:
        return self.entries[module]

    def attribute(self, name: str, value: Any, known: Any) -> Any:
        return value if self.evaluating else super().attribute(name, value, known)

    def module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        alone = not any(m.children()) and bool(_held(m))
        alone = alone and len(args) == 1 and isinstance(args[0], fx.Proxy) and not kwargs
        if self.entry(m) is None and not alone:
            return super().module(m, forward, args, kwargs)
        if (changed := changed_by_hand(m)) is not None:
            raise _Stuck(f"{type(m).__name__} {changed}, which cannot be written as data")
        name = self.path_of_module(m)
        if self.entry(m) is None:
            self.inner.setdefault(name, args[0].node.meta["hints"])
        return self.create_proxy("call_module", name, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False  # `module` has seen to those that are

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        if kind == "call_method" and (function := DUNDER.get(target)) is not None:
            turned = (args[1], args[0]) if target.startswith("__r") else args
            kind, target, args = "call_function", function, turned
        kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}  # of warnings
        if kind == "call_function" and target in ASSERTIONS:
            return next(value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy))
        if kind == "call_function" and target is getattr and args[1] not in ATTRIBUTES:
            raise _Stuck(f"the attribute {args[1]!r} is not on the list")
        if kind == "call_method" and target in FIXED:
            return self.settle(args[0], operator.methodcaller(target))
        if kind == "call_method" and target not in METHODS:
            raise _Stuck(f"the method {target!r} is not on the list")
        if kind == "call_function" and target not in NAMES and target is not getattr:
            if isinstance(target, types.FunctionType) and not str(target.__module__).startswith("torch."):
                return target(*args, **kwargs)  # kept whole by torch.fx.wrap; followed here
            name = getattr(target, "__name__", str(target))
            raise _Stuck(f"the function {name!r} is not on the list")
        return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Node:
        if kind.startswith("call") and target is not getattr:
            self._check(target, args, kwargs)
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        node.meta["hints"] = self._shapes(kind, target, args, kwargs)
        return node

    def _check(self, target: Any, args: Any, kwargs: Any) -> None:
        """Arguments can be written down, and what is changed in place is made anew for every input."""
        try:
            encode((args, kwargs), lambda value: 0 if isinstance(value, fx.Node) else None)
        except TypeError as error:
            raise _Stuck(f"an argument is of type {error}, which cannot be written as data") from None
        name = target if isinstance(target, str) else target.__name__
        changes = (name.endswith("_") and name not in ("and_", "or_", "not_")) or target in IN_PLACE
        if changes and args and isinstance(args[0], fx.Node) and args[0].op == "get_attr":
            raise _Stuck(f"it changes {args[0].target!r} in place, which belongs to the network")

    # sizes

    def to_bool(self, obj: fx.Proxy) -> bool:
        value: bool = self.settle(obj, bool)
        return value

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[i] for i in range(self.settle(obj, len))])

    def settle(self, proxy: fx.Proxy, convert: Callable[[Any], Any]) -> Any:
        """The plain value of a result that is the same for every batch of such inputs."""
        hints = proxy.node.meta["hints"]
        if hints is None and self.hints is None:
            raise _Stuck(
                "it needs the size or the numbers of an input; branches on sizes are followed where the shape of an "
                "input is known: save(..., card=Card(input=Input(shape=...)))"
            )
        if hints is None:
            raise _Stuck("it needs the size of a result that could not be worked out")
        try:
            values = [convert(hint) for hint in hints]
        except Exception:
            raise _Stuck("it needs the numbers of an input, and only its shape is known ahead") from None
        if any(value != values[0] for value in values):
            raise _Stuck("it needs the number of inputs in a batch, which differs from pass to pass")
        self.special = True
        return values[0]

    def _shapes(self, kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """The result for each number of rows, without storage; None where it is not known."""
        if self.hints is None or kind == "placeholder":
            return self.hints
        self.evaluating = True
        try:
            if kind == "get_attr":
                return (operator.attrgetter(target)(self.root).to("meta"),) * len(ROWS)
            with torch.device("meta"), layer_by_layer(True):
                return tuple(self._evaluate(kind, target, args, kwargs, i) for i in range(len(ROWS)))
        except Exception:  # a later branch on it says so
            return None
        finally:
            self.evaluating = False

    def _evaluate(self, kind: str, target: Any, args: Any, kwargs: Any, i: int) -> Any:
        args, kwargs = (fx.node.map_arg(part, lambda node: node.meta["hints"][i]) for part in (args, kwargs))
        if kind == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


@contextmanager
def _recorded_factories(tracer: _NetworkTracer) -> Iterator[None]:
    """torch.zeros and its like, called with sizes of an input, are recorded; torch.fx does not see them."""
    before = {name: getattr(torch, name) for name in FACTORIES}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            found = proxy_among((args, kwargs)) is not None or str(kwargs.get("device")) == "meta"
            if tracer.evaluating or not tracer.records or not found:
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return made

    for name, function in before.items():
        setattr(torch, name, recording(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


@contextmanager
def _recorded_len(tracer: _NetworkTracer, net: nn.Module) -> Iterator[None]:
    """`len(x)` in the network's own files gives the number of rows as a result; Python's must give a plain number."""

    def length(value: Any) -> Any:
        if not isinstance(value, fx.Proxy) or tracer.evaluating:
            return len(value)
        hints, shape = value.node.meta["hints"], operator.attrgetter("shape")
        return shape(value)[0] if hints is None or isinstance(hints[0], Tensor) else tracer.settle(value, len)

    scopes = [getattr(type(module).forward, "__globals__", {}) for module in net.modules()]
    own = {id(scope): scope for scope in scopes if "len" not in scope and _is_own(scope.get("__file__", ""))}
    for scope in own.values():
        scope["len"] = length
    try:
        yield
    finally:
        for scope in own.values():
            del scope["len"]


def _is_own(file: str) -> bool:
    """Whether a file is the network's, and not of Python, torch or this folder."""
    return not file.startswith(THEIRS) and ("site-packages" in file or not file.startswith(PYTHONS))


def _where(error: Exception) -> str:
    """The line of the network's own code that stands in the way, and why."""
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(code, line) for code, line in frames if _is_own(code.co_filename)]
    reason = first_line(error)
    advice = (
        "{}et the network be built by its own code: "
        'build("package.module:factory", ...) here, and --network package.module:factory where it is loaded.'
    )
    said = "the network cannot be written as data:"
    if not own:
        return f"{said} {reason}. {advice.format('L')}"
    code, line = own[-1]
    source = linecache.getline(code.co_filename, line).strip()
    place = f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"
    return f"{said} {place}: {source and f'`{source}`: '}{reason}. {advice.format('Change that line, or l')}"
