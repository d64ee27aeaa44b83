"""Writes a recorded pass as an ONNX graph for onnxruntime. Shapes are fixed, so that the runtime plans its memory."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from dubito.service.engine.recording import NotRecorded, OperatorCall, Recorded, Recording

OPSET, IR = 18, 9
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}
Node = Callable[["Writer", OperatorCall], str]


class Writer:
    """Values of the graph are their names; a tensor among the arguments of a call becomes a constant."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.made_by: dict[str, tuple[str, tuple[str, ...]]] = {}  # operator and inputs of each value
        self._names: dict[int, str] = {}  # of recorded values
        self.parts: dict[
            int, int
        ] = {}  # columns of that input that the graph takes: the first, and the one after the last
        self.prefix = ""
        self._columns: dict[int, tuple[int, int]] = {}  # values that are columns of the input which is taken apart
        self.matrices: dict[str, tuple[int, int]] = {}  # shapes of constants with two axes
        self.shapes: dict[str, tuple[int, ...]] = {}  # of recorded values and constants
        self._reshaped: dict[tuple[str, tuple[int, ...]], str] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._next = 0

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; its output, or a list of several."""
        names = [self._name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        self.made_by[names[0]] = (kind, inputs)
        return names[0] if outputs == 1 else names

    def attribute(self, name: str, key: str) -> int:
        """An attribute of the operator that made a value."""
        return next(int(a.i) for node in self.nodes if node.output[0] == name for a in node.attribute if a.name == key)

    def _name(self) -> str:
        self._next += 1
        return f"v{self._next}"

    def constant(self, value: NDArray[Any] | Sequence[int] | float, dtype: torch.dtype | None = None) -> str:
        array = np.asarray(value) if dtype is None else torch.as_tensor(value, dtype=dtype).numpy()
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._name()
            self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), self._known[key]))
            self.shapes[self._known[key]] = array.shape
            if array.ndim == 2:
                self.matrices[self._known[key]] = array.shape
        return self._known[key]

    def __call__(self, x: Any, dtype: torch.dtype | None = None, broadcast: bool = False) -> str:
        """Name of a value, a constant or a number, cast to the dtype; a constant that repeats itself is stored once
        where it will be broadcast."""
        if isinstance(x, Recorded):
            if x.number in self._columns:
                self._names[x.number] = self._part(*self._columns[x.number], x.shape[0])
            name = self._names[x.number]
            return name if dtype in (None, x.dtype) else self.op("Cast", name, to=self.type(dtype))
        if isinstance(x, Tensor):
            if broadcast:
                for axis, step in enumerate(x.stride()):
                    x = x.narrow(axis, 0, 1) if step == 0 and x.shape[axis] > 1 else x
            x = x.detach().to(dtype=dtype or x.dtype)
            self.type(x.dtype)
            return self.constant(x.contiguous().numpy())
        assert dtype is not None
        return self.constant(x, dtype)

    def type(self, dtype: torch.dtype | None) -> int:
        if dtype not in TYPES:
            raise NotRecorded(f"no graph of {dtype} is written")
        return TYPES[dtype]

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        kind, inputs = self.made_by.get(x, ("", ()))
        if kind == "Reshape":  # of a reshaped value
            x = inputs[0]
        key = x, tuple(shape)
        if self.shapes.get(x) == key[1]:
            return x
        if key not in self._reshaped:
            self._reshaped[key] = self.op("Reshape", x, self.constant(np.array(shape, np.int64)))
        return self._reshaped[key]

    def _part(self, start: int, end: int, rows: int) -> str:
        self.parts[start], name = end, f"{self.prefix}{start}"
        self.shapes[name] = rows, end - start
        return name

    def _took_apart(self, call: OperatorCall) -> bool:
        """Whether a call only takes columns of the input that is taken apart."""
        x = call.args[0] if call.args else None
        if not isinstance(x, Recorded) or x.number not in self._columns or call.name not in TAKE_APART:
            return False
        start, end = self._columns[x.number]
        axis = _arg(call, 2 if call.name.startswith("split") else 1, "dim", 0)
        if axis % 2 != 1 or _arg(call, 4, "step", 1) != 1:
            return False
        if call.name == "slice":
            first, last, _ = slice(_arg(call, 2, "start"), _arg(call, 3, "end")).indices(end - start)
            self._columns[_result(call).number] = start + first, start + last
            return True
        for value in call.results:
            self._columns[value.number] = start, start + value.shape[1]
            start += value.shape[1]
        return True

    def write(
        self, recording: Recording, names: Sequence[str], output: str, apart: str, columns: str
    ) -> tuple[onnx.ModelProto, list[int]]:
        """The model, and the sizes of the parts that are its inputs in place of the input `apart` (rows, columns).

        Those that it uses are named `columns` with the number of their first column.
        """
        self.prefix = columns
        for name, value in zip(names, recording.inputs, strict=True):
            if name == apart:
                self._columns[value.number] = 0, value.shape[1]
                rows, width = value.shape
            else:
                self._names[value.number], self.shapes[name] = name, value.shape
        for call in recording.calls:
            if self._took_apart(call):
                continue
            if call.name not in OPERATORS:
                raise NotRecorded(f"no operator of ONNX is known for {call.name}")
            written = OPERATORS[call.name](self, call)
            for result, name in zip(call.results, [written] if isinstance(written, str) else written, strict=False):
                self._names[result.number] = name
                self.shapes.setdefault(name, result.shape)
        self.nodes.append(helper.make_node("Identity", [self._names[recording.output.number]], [output]))
        inputs = [
            helper.make_tensor_value_info(name, self.type(value.dtype), value.shape)
            for name, value in zip(names, recording.inputs, strict=True)
            if name != apart
        ]
        edges = sorted({0, width, *self.parts, *self.parts.values()})
        sizes = [end - start for start, end in pairwise(edges)]
        if any(self.parts.get(start, end) != end for start, end in pairwise(edges)):
            raise NotRecorded("layers share normals")
        inputs += [
            helper.make_tensor_value_info(f"{self.prefix}{start}", TensorProto.FLOAT, (rows, self.parts[start] - start))
            for start in sorted(self.parts)
        ]
        last = recording.output
        outputs = [helper.make_tensor_value_info(output, self.type(last.dtype), last.shape)]
        nodes, constants = self._used(output)
        graph = helper.make_graph(nodes, "pass", inputs, outputs, constants)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR), sizes

    def _used(self, output: str) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
        """Nodes and constants that the output depends on: some nodes were replaced by others."""
        used, nodes = {output}, list[onnx.NodeProto]()
        for node in reversed(self.nodes):
            if used & set(node.output):
                used |= set(node.input)
                nodes.append(node)
        return nodes[::-1], [constant for constant in self.constants if constant.name in used]


TAKE_APART = ("slice", "split", "split_with_sizes")


def _result(call: OperatorCall) -> Recorded:
    return call.results[0]


def _arg(call: OperatorCall, i: int, name: str, default: Any = None) -> Any:
    return call.args[i] if len(call.args) > i else call.options.get(name, default)


def _axes(axes: int | Sequence[int] | None, rank: int) -> list[int]:
    if axes is None or (isinstance(axes, list | tuple) and not axes):
        return list(range(rank))
    return [axis % rank for axis in ([axes] if isinstance(axes, int) else axes)]


def _shape_of(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Recorded | Tensor) else ()


def _common(*given: Any) -> torch.dtype:
    """The dtype in which torch computes: numbers do not widen tensors of their kind."""
    dtypes = [x.dtype for x in given if isinstance(x, Recorded | Tensor) and _shape_of(x)]
    dtypes = dtypes or [x.dtype for x in given if isinstance(x, Recorded | Tensor)]
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    if not dtype.is_floating_point and any(isinstance(x, float) for x in given):
        dtype = torch.get_default_dtype()
    return dtype


# operators element by element


def _unary(kind: str) -> Node:
    return lambda g, call: g.op(kind, g(call.args[0], _result(call).dtype))


def _binary(kind: str) -> Node:
    def node(g: Writer, call: OperatorCall) -> str:
        a, b = call.args[:2]
        dtype = _common(a, b)
        name: str = g.op(kind, g(a, dtype, True), g(b, dtype, True))
        return _to(g, name, dtype, _result(call).dtype, compares=kind in COMPARISONS)

    return node


COMPARISONS = ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")


def _to(g: Writer, name: str, dtype: torch.dtype, wanted: torch.dtype, compares: bool = False) -> str:
    return name if compares or dtype == wanted else g.op("Cast", name, to=g.type(wanted))


def _add(kind: str) -> Node:
    """a + alpha · b, or a − alpha · b."""

    def node(g: Writer, call: OperatorCall) -> str:
        a, b = call.args[:2]
        alpha, dtype = _arg(call, 2, "alpha", 1), _result(call).dtype
        second = g(b, dtype, True)
        if alpha != 1:
            second = g.op("Mul", second, g(alpha, dtype))
        name: str = g.op(kind, g(a, dtype, True), second)
        return name

    return node


def _rsub(g: Writer, call: OperatorCall) -> str:
    a, b, dtype = *call.args[:2], _result(call).dtype
    alpha = _arg(call, 2, "alpha", 1)
    first = g(a, dtype, True)
    if alpha != 1:
        first = g.op("Mul", first, g(alpha, dtype))
    name: str = g.op("Sub", g(b, dtype, True), first)
    return name


def _div(g: Writer, call: OperatorCall) -> str:
    if call.options.get("rounding_mode") is not None:
        raise NotRecorded("no operator of ONNX is known for a division that rounds")
    dtype = _result(call).dtype
    name: str = g.op("Div", g(call.args[0], dtype, True), g(call.args[1], dtype, True))
    return name


def _pow(g: Writer, call: OperatorCall) -> str:
    x, power, dtype = *call.args[:2], _result(call).dtype
    name = g(x, dtype, True)
    if power == 2:
        kind, inputs = g.made_by.get(name, ("", ()))
        if kind == "ReduceL2":  # ‖x‖²
            return str(g.op("ReduceSumSquare", *inputs, keepdims=g.attribute(name, "keepdims")))
        return str(g.op("Mul", name, name))
    return str(g.op("Pow", name, g(power, dtype, True)))


def _square(g: Writer, call: OperatorCall) -> str:
    return _pow(g, OperatorCall("pow", (call.args[0], 2), {}, call.results))


def _rsqrt(g: Writer, call: OperatorCall) -> str:
    name: str = g.op("Reciprocal", g.op("Sqrt", g(call.args[0])))
    return name


def _addcmul(g: Writer, call: OperatorCall) -> str:
    a, b, c = call.args[:3]
    dtype, value = _result(call).dtype, call.options.get("value", 1)
    if value == 1 and isinstance(b, Recorded) and all(isinstance(t, Tensor) and _by_channel(t, b) for t in (a, c)):
        one, zero = (g.constant(np.full(b.shape[1], v, np.float32)) for v in (1, 0))  # of variance and mean
        scale, shift = g(c.reshape(-1), dtype), g(a.reshape(-1), dtype)
        return str(g.op("BatchNormalization", g(b, dtype), scale, shift, zero, one, epsilon=0.0))
    product = g.op("Mul", g(b, dtype, True), g(c, dtype, True))
    if value != 1:
        product = g.op("Mul", product, g(value, dtype))
    return str(g.op("Add", g(a, dtype, True), product))


def _by_channel(t: Tensor, x: Recorded) -> bool:
    """Whether a constant holds a number for each channel of x."""
    return x.dtype == torch.float32 and tuple(t.shape) == (1, x.shape[1], *[1] * (len(x.shape) - 2))


def _where(g: Writer, call: OperatorCall) -> str:
    condition, a, b = call.args
    dtype = _result(call).dtype
    return str(g.op("Where", g(condition, torch.bool, True), g(a, dtype, True), g(b, dtype, True)))


def _clamp(g: Writer, call: OperatorCall) -> str:
    x, low, high = call.args[0], _arg(call, 1, "min"), _arg(call, 2, "max")
    dtype, name = _result(call).dtype, g(x, _result(call).dtype)
    if low is not None:
        name = g.op("Relu", name) if low == 0 and not isinstance(low, Tensor) else g.op("Max", name, g(low, dtype))
    return name if high is None else str(g.op("Min", name, g(high, dtype)))


def _clamp_max(g: Writer, call: OperatorCall) -> str:
    return _clamp(g, OperatorCall("clamp", (call.args[0], None, call.args[1]), {}, call.results))


def _hardtanh(g: Writer, call: OperatorCall) -> str:
    low, high = _arg(call, 1, "min_val", -1.0), _arg(call, 2, "max_val", 1.0)
    return _clamp(g, OperatorCall("clamp", (call.args[0], low, high), {}, call.results))


def _relu6(g: Writer, call: OperatorCall) -> str:
    return _clamp(g, OperatorCall("clamp", (call.args[0], 0.0, 6.0), {}, call.results))


def _entr(g: Writer, call: OperatorCall) -> str:
    """−p log p, and 0 where p is 0; a NaN stays one."""
    p, dtype = g(call.args[0]), _result(call).dtype
    if g.made_by.get(p, ("",))[0] == "Exp":  # of log p, which is finite or −∞
        log_p = g.made_by[p][1][0]
        zero = g.op("Equal", p, g(0.0, dtype))
        return str(g.op("Where", zero, g(0.0, dtype), g.op("Neg", g.op("Mul", p, log_p))))
    zero = g.op("Equal", p, g(0.0, dtype))
    log_p = g.op("Log", g.op("Where", zero, g(1.0, dtype), p))
    return str(g.op("Neg", g.op("Mul", p, log_p)))


def _gelu(g: Writer, call: OperatorCall) -> str:
    x, dtype = g(call.args[0]), _result(call).dtype
    if call.options.get("approximate", "none") == "tanh":
        cube = g.op("Mul", g.op("Mul", x, x), x)
        inner = g.op("Mul", g.op("Add", x, g.op("Mul", cube, g(0.044715, dtype))), g(math.sqrt(2 / math.pi), dtype))
        bent = g.op("Tanh", inner)
    else:
        bent = g.op("Erf", g.op("Mul", x, g(math.sqrt(0.5), dtype)))
    return str(g.op("Mul", g.op("Mul", x, g.op("Add", bent, g(1.0, dtype))), g(0.5, dtype)))


def _silu(g: Writer, call: OperatorCall) -> str:
    x = g(call.args[0])
    return str(g.op("Mul", x, g.op("Sigmoid", x)))


def _leaky_relu(g: Writer, call: OperatorCall) -> str:
    return str(g.op("LeakyRelu", g(call.args[0]), alpha=float(_arg(call, 1, "negative_slope", 0.01))))


def _elu(g: Writer, call: OperatorCall) -> str:
    if _arg(call, 2, "scale", 1) != 1 or _arg(call, 3, "input_scale", 1) != 1:
        raise NotRecorded("no operator of ONNX is known for a scaled elu")
    return str(g.op("Elu", g(call.args[0]), alpha=float(_arg(call, 1, "alpha", 1.0))))


def _same(g: Writer, call: OperatorCall) -> str:
    return g(call.args[0])


def _cast(g: Writer, call: OperatorCall) -> str:
    return g(call.args[0], _result(call).dtype)


# shapes


def _reshape(g: Writer, call: OperatorCall) -> str:
    return g.reshape(g(call.args[0]), _result(call).shape)


def _expand(g: Writer, call: OperatorCall) -> str:
    x, shape = call.args[0], _result(call).shape
    return g(x) if _shape_of(x) == shape else str(g.op("Expand", g(x), g.constant(np.array(shape, np.int64))))


def _permute(g: Writer, call: OperatorCall) -> str:
    rank = len(_shape_of(call.args[0]))
    return _transposed(g, g(call.args[0]), [axis % rank for axis in call.args[1]], _shape_of(call.args[0]))


def _transpose(g: Writer, call: OperatorCall) -> str:
    shape = _shape_of(call.args[0])
    order = list(range(len(shape)))
    a, b = (axis % len(shape) for axis in (call.args[1:3] if call.name == "transpose" else (-1, -2)))
    order[a], order[b] = b, a
    return _transposed(g, g(call.args[0]), order, shape)


def _t(g: Writer, call: OperatorCall) -> str:
    shape = _shape_of(call.args[0])
    return _transposed(g, g(call.args[0]), list(range(len(shape)))[::-1], shape)


def _transposed(g: Writer, x: str, order: list[int], shape: tuple[int, ...]) -> str:
    """A transposition that moves axes of length 1 only is a reshape, which copies nothing."""
    if order == sorted(order):
        return x
    if [axis for axis in order if shape[axis] > 1] == [axis for axis in sorted(order) if shape[axis] > 1]:
        return g.reshape(x, [shape[axis] for axis in order])
    return str(g.op("Transpose", x, perm=order))


def _select(g: Writer, call: OperatorCall) -> str:
    x, axis, index = call.args
    shape = _shape_of(x)
    start = index % shape[axis]
    part = _sliced(g, g(x), axis % len(shape), start, start + 1, 1)
    return g.reshape(part, _result(call).shape)


def _slice(g: Writer, call: OperatorCall) -> str:
    x, axis = call.args[0], _arg(call, 1, "dim", 0)
    start, end, step = _arg(call, 2, "start"), _arg(call, 3, "end"), _arg(call, 4, "step", 1)
    if _shape_of(x) == _result(call).shape and step == 1:
        return g(x)
    length = _shape_of(x)[axis]
    first, last, _ = slice(start, end).indices(length)
    return _sliced(g, g(x), axis % len(_shape_of(x)), first, last, step)


def _narrow(g: Writer, call: OperatorCall) -> str:
    x, axis, start, length = call.args
    start = start % _shape_of(x)[axis]
    return _sliced(g, g(x), axis % len(_shape_of(x)), start, start + length, 1)


def _sliced(g: Writer, x: str, axis: int, start: int, end: int, step: int) -> str:
    return str(g.op("Slice", x, *(g.constant(np.array([i], np.int64)) for i in (start, end, axis, step))))


def _split(g: Writer, call: OperatorCall) -> list[str]:
    x = call.args[0]
    axis = _arg(call, 2, "dim", 0) % len(_shape_of(x))
    sizes = [value.shape[axis] for value in call.results]
    if len(sizes) == 1:
        return [g(x)]
    if (parts := _joined(g, g(x), axis, sizes)) is not None:
        return [g.reshape(part, value.shape) for part, value in zip(parts, call.results, strict=True)]
    names: list[str] = g.op("Split", g(x), g.constant(np.array(sizes, np.int64)), outputs=len(sizes), axis=axis)
    return names


def _joined(g: Writer, x: str, axis: int, sizes: list[int]) -> tuple[str, ...] | None:
    """Values of these sizes along the last axis, which were joined to x and only reshaped since."""
    kind, inputs = g.made_by.get(x, ("", ()))
    shape = g.shapes.get(x, ())
    if kind == "Reshape":
        x = inputs[0]
        kind, inputs = g.made_by.get(x, ("", ()))
    if kind != "Concat" or axis != len(shape) - 1:
        return None
    along = g.attribute(x, "axis")
    last = all(along in (-1, len(g.shapes.get(part, ())) - 1) for part in inputs)
    joined = [g.shapes.get(part, ())[-1:] for part in inputs]
    return inputs if last and joined == [(size,) for size in sizes] else None


def _unbind(g: Writer, call: OperatorCall) -> list[str]:
    x = call.args[0]
    axis, shape = _arg(call, 1, "dim", 0) % len(_shape_of(x)), _result(call).shape
    return [g.reshape(_sliced(g, g(x), axis, i, i + 1, 1), shape) for i in range(len(call.results))]


def _cat(g: Writer, call: OperatorCall) -> str:
    parts = [part for part in call.args[0] if math.prod(_shape_of(part))]
    dtype, axis = _result(call).dtype, _arg(call, 1, "dim", 0) % len(_result(call).shape)
    if len(parts) == 1:
        return g(parts[0], dtype)
    return str(g.op("Concat", *(g(part, dtype) for part in parts), axis=axis))


def _stack(g: Writer, call: OperatorCall) -> str:
    dtype, axis = _result(call).dtype, _arg(call, 1, "dim", 0) % len(_result(call).shape)
    at = g.constant(np.array([axis], np.int64))
    return str(g.op("Concat", *(g.op("Unsqueeze", g(part, dtype), at) for part in call.args[0]), axis=axis))


def _repeat(g: Writer, call: OperatorCall) -> str:
    x, times = call.args
    shape = (1,) * (len(times) - len(_shape_of(x))) + _shape_of(x)
    name = g(x) if shape == _shape_of(x) else g.reshape(g(x), shape)
    if all(n == 1 or size == 1 for n, size in zip(times, shape, strict=True)):
        if math.prod(times) == 1:
            return name
        return str(g.op("Expand", name, g.constant(np.array(_result(call).shape, np.int64))))
    return str(g.op("Tile", name, g.constant(np.array(times, np.int64))))


def _roll(g: Writer, call: OperatorCall) -> str:
    x, shifts, axes = call.args[0], _arg(call, 1, "shifts"), _arg(call, 2, "dims", ())
    if not axes:
        raise NotRecorded("no operator of ONNX is known for a roll over all axes")
    name: str = g(x)
    for shift, axis in zip(shifts, axes, strict=True):
        places = np.roll(np.arange(_shape_of(x)[axis]), shift)
        name = g.op("Gather", name, g.constant(places), axis=axis % len(_shape_of(x)))
    return name


def _unfold(g: Writer, call: OperatorCall) -> str:
    """Windows along an axis, their entries along a new last axis."""
    x, axis, size, step = call.args
    rank = len(_shape_of(x))
    axis %= rank
    n = _result(call).shape[axis]
    windows = g.op("Gather", g(x), g.constant(np.arange(n)[:, None] * step + np.arange(size)), axis=axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return str(g.op("Transpose", windows, perm=order))


def _index_select(g: Writer, call: OperatorCall) -> str:
    x, axis, index = call.args
    return str(g.op("Gather", g(x), g(index), axis=axis % len(_shape_of(x))))


def _embedding(g: Writer, call: OperatorCall) -> str:
    return str(g.op("Gather", g(call.args[0]), g(call.args[1]), axis=0))


def _pad(g: Writer, call: OperatorCall) -> str:
    x, sides, value = call.args[0], call.args[1], _arg(call, 2, "value", 0)
    rank = len(_shape_of(x))
    before, after = [0] * rank, [0] * rank
    for i in range(len(sides) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = sides[2 * i], sides[2 * i + 1]
    if not any(before) and not any(after):
        return g(x)
    around = g.constant(np.array([*before, *after], np.int64))
    if call.name == "constant_pad_nd":
        return str(g.op("Pad", g(x), around, g(value or 0, _result(call).dtype)))
    return str(g.op("Pad", g(x), around, mode="reflect" if "reflection" in call.name else "edge"))


# sums


def _reduce(kind: str) -> Node:
    def node(g: Writer, call: OperatorCall) -> str:
        x = call.args[0]
        axes, keep = _axes(_arg(call, 1, "dim"), len(_shape_of(x))), bool(_arg(call, 2, "keepdim", False))
        name, at = g(x, _result(call).dtype), g.constant(np.array(axes, np.int64))
        made_by, factors = g.made_by.get(name, ("", ()))
        if (kind, made_by) == ("ReduceSum", "Mul") and factors[0] == factors[1]:  # ‖x‖²
            return str(g.op("ReduceSumSquare", factors[0], at, keepdims=int(keep)))
        return str(g.op(kind, name, at, keepdims=int(keep)))

    return node


def _vector_norm(g: Writer, call: OperatorCall) -> str:
    x, order = call.args[0], _arg(call, 1, "ord", 2)
    if order != 2:
        raise NotRecorded(f"no operator of ONNX is known for a norm of order {order}")
    axes, keep = _axes(_arg(call, 2, "dim"), len(_shape_of(x))), bool(_arg(call, 3, "keepdim", False))
    at = g.constant(np.array(axes, np.int64))
    return str(g.op("ReduceL2", g(x, _result(call).dtype), at, keepdims=int(keep)))


def _softmax(kind: str) -> Node:
    def node(g: Writer, call: OperatorCall) -> str:
        x = call.args[0]
        return str(g.op(kind, g(x, _result(call).dtype), axis=call.args[1] % len(_shape_of(x))))

    return node


# products


def _matmul(g: Writer, call: OperatorCall) -> str:
    a, b = call.args[:2]
    dtype = _result(call).dtype
    return _product(g, a, b, dtype, _result(call).shape)


def _product(g: Writer, a: Any, b: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """a b. A constant b that is the same for all is a matrix, so that the rows of all a meet it in one product.

    (c a) b of constants c and b is c (a b) where that takes fewer multiplications.
    """
    if isinstance(a, Recorded) and isinstance(b, Tensor) and b.dim() == 2:
        kind, inputs = g.made_by.get(g(a), ("", ()))
        c = g.matrices.get(inputs[0]) if kind == "MatMul" else None
        if c is not None:
            (m, p), (n, q) = c, b.shape
            if p * n * q + m * p * q < m * p * n + m * n * q:
                return str(g.op("MatMul", inputs[0], g.op("MatMul", inputs[1], g(b, dtype))))
    right = g(b, dtype, True)
    if isinstance(b, Tensor) and b.dim() > 2 and _one_matrix(b):
        right = g(b[(0,) * (b.dim() - 2)], dtype)
    elif isinstance(b, Recorded) and isinstance(a, Tensor):
        a = a[(0,) * (a.dim() - 2)] if _one_matrix(a) else a
    return str(g.op("MatMul", g(a, dtype, True), right))


def _one_matrix(t: Tensor) -> bool:
    """Whether a constant repeats one matrix."""
    return t.dim() >= 2 and all(s == 0 or n == 1 for s, n in zip(t.stride()[:-2], t.shape[:-2], strict=True))


def _addmm(g: Writer, call: OperatorCall) -> str:
    """beta · c + alpha · a b."""
    c, a, b = call.args[:3]
    result, beta, alpha = _result(call), call.options.get("beta", 1), call.options.get("alpha", 1)
    if isinstance(b, Tensor) and _one_matrix(b) and _shape_of(c) == result.shape and len(result.shape) > 2:
        rows, (n, q) = math.prod(result.shape[:-1]), b.shape[-2:]
        flat = g.reshape(g(a, result.dtype), (rows, n)), g(b[(0,) * (b.dim() - 2)], result.dtype)
        sums = g.op("Gemm", *flat, g.reshape(g(c, result.dtype), (rows, q)), alpha=float(alpha), beta=float(beta))
        return g.reshape(sums, result.shape)
    product = _product(g, a, b, result.dtype, result.shape)
    if alpha != 1:
        product = g.op("Mul", product, g(alpha, result.dtype))
    if beta == 0:
        return product
    first = g(c, result.dtype, True)
    first = first if beta == 1 else g.op("Mul", first, g(beta, result.dtype))
    return str(g.op("Add", product, first))


def _linear(g: Writer, call: OperatorCall) -> str:
    x, W, b = call.args[0], call.args[1], _arg(call, 2, "bias")
    dtype = _result(call).dtype
    if isinstance(W, Tensor):
        weights = g(W.mT, dtype)
    else:
        weights = _transposed(g, g(W, dtype), list(range(len(W.shape)))[::-1], W.shape)
    product: str = g.op("MatMul", g(x, dtype), weights)
    return product if b is None else str(g.op("Add", product, g(b, dtype)))


def _convolution(g: Writer, call: OperatorCall) -> str:
    if call.name == "convolution":
        x, W, b, stride, padding, dilation, transposed, _, groups = call.args[:9]
        if transposed:
            raise NotRecorded("no graph of a transposed convolution is written")
    else:
        x, W = call.args[:2]
        b, stride, padding = _arg(call, 2, "bias"), _arg(call, 3, "stride", 1), _arg(call, 4, "padding", 0)
        dilation, groups = _arg(call, 5, "dilation", 1), _arg(call, 6, "groups", 1)
    kernel = _shape_of(W)[2:]
    stride, dilation = _each(stride, len(kernel)), _each(dilation, len(kernel))
    if isinstance(padding, str):
        reach = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        around = [r // 2 for r in reach] + [r - r // 2 for r in reach]
    else:
        around = _each(padding, len(kernel)) * 2
    bias = [] if b is None else [g(b)]
    return str(
        g.op(
            "Conv",
            g(x),
            g(W),
            *bias,
            kernel_shape=list(kernel),
            strides=stride,
            dilations=dilation,
            pads=around,
            group=groups,
        )
    )


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _col2im(g: Writer, call: OperatorCall) -> str:
    x, size, kernel, dilation, padding, stride = call.args
    rank = len(kernel)
    return str(
        g.op(
            "Col2Im",
            g(x),
            g.constant(np.array(size, np.int64)),
            g.constant(np.array(kernel, np.int64)),
            dilations=_each(dilation, rank),
            pads=_each(padding, rank) * 2,
            strides=_each(stride, rank),
        )
    )


def _max_pool(g: Writer, call: OperatorCall) -> list[str]:
    x, kernel = call.args[:2]
    rank = len(_shape_of(x)) - 2
    sizes = _each(kernel, rank)
    stride, padding = _arg(call, 2, "stride", []), _each(_arg(call, 3, "padding", 0), rank)
    dilation, ceil = _each(_arg(call, 4, "dilation", 1), rank), _arg(call, 5, "ceil_mode", False)
    pooled: str = g.op(
        "MaxPool",
        g(x),
        kernel_shape=sizes,
        strides=_each(stride, rank) if stride else sizes,
        pads=padding * 2,
        dilations=dilation,
        ceil_mode=int(ceil),
    )
    return [pooled]  # and not the indices


def _avg_pool(g: Writer, call: OperatorCall) -> str:
    x, kernel = call.args[:2]
    rank = len(_shape_of(x)) - 2
    sizes, stride = _each(kernel, rank), _arg(call, 2, "stride", [])
    if _arg(call, 4, "ceil_mode", False) or _arg(call, 6, "divisor_override") is not None:
        raise NotRecorded("no operator of ONNX is known for this average pooling")
    return str(
        g.op(
            "AveragePool",
            g(x),
            kernel_shape=sizes,
            strides=_each(stride, rank) if stride else sizes,
            pads=_each(_arg(call, 3, "padding", 0), rank) * 2,
            count_include_pad=int(_arg(call, 5, "count_include_pad", True)),
        )
    )


def _adaptive_avg_pool(g: Writer, call: OperatorCall) -> str:
    x = call.args[0]
    before, after = _shape_of(x)[2:], _result(call).shape[2:]
    if any(n % m for n, m in zip(before, after, strict=True)):
        raise NotRecorded("no operator of ONNX is known for an average pooling with windows of several sizes")
    sizes = [n // m for n, m in zip(before, after, strict=True)]
    return str(g.op("AveragePool", g(x), kernel_shape=sizes, strides=sizes))


# normalisation and attention


def _layer_norm(g: Writer, call: OperatorCall) -> str:
    x, shape, weight, bias = (*call.args, None, None)[:4]
    axis, eps = len(_shape_of(x)) - len(shape), float(_arg(call, 4, "eps", 1e-5))
    scale = torch.ones(*shape) if weight is None else weight
    more = [] if bias is None else [g(bias)]
    return str(g.op("LayerNormalization", g(x), g(scale), *more, axis=axis, epsilon=eps))


def _group_norm(g: Writer, call: OperatorCall) -> str:
    x, groups, weight, bias = (*call.args, None, None)[:4]
    shape, eps = _shape_of(x), float(_arg(call, 4, "eps", 1e-5))
    rows = g.reshape(g(x), (shape[0], groups, -1))
    ones, zeros = (g.constant(np.full(groups, v, np.float32)) for v in (1, 0))
    out = g.reshape(g.op("InstanceNormalization", rows, ones, zeros, epsilon=eps), shape)
    by_channel = (-1, *[1] * (len(shape) - 2))
    out = out if weight is None else g.op("Mul", out, g(weight.reshape(by_channel)))
    return out if bias is None else str(g.op("Add", out, g(bias.reshape(by_channel))))


def _attention(g: Writer, call: OperatorCall) -> str:
    """softmax(q kᵀ scale + mask) v."""
    q, k, v = call.args[:3]
    mask, causal = _arg(call, 3, "attn_mask"), _arg(call, 5, "is_causal", False)
    scale, dtype = call.options.get("scale"), _result(call).dtype
    if causal or call.options.get("enable_gqa") or (mask is not None and mask.dtype == torch.bool):
        raise NotRecorded("no graph of this attention is written")
    order = [*range(len(k.shape) - 2), len(k.shape) - 1, len(k.shape) - 2]
    scores = g.op("MatMul", g(q), g.op("Transpose", g(k), perm=order))
    scores = g.op("Mul", scores, g(1 / math.sqrt(q.shape[-1]) if scale is None else scale, dtype))
    if mask is not None:
        scores = g.op("Add", scores, g(mask, dtype, True))
    return str(g.op("MatMul", g.op("Softmax", scores, axis=-1), g(v)))


OPERATORS: dict[str, Callable[[Writer, OperatorCall], str | list[str]]] = {
    **{name.lower(): _unary(name) for name in ("Abs", "Cos", "Erf", "Exp", "Floor", "Log", "Neg", "Relu", "Round")},
    **{name.lower(): _unary(name) for name in ("Reciprocal", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Tanh")},
    "hardswish": _unary("HardSwish"),
    "add": _add("Add"),
    "sub": _add("Sub"),
    "rsub": _rsub,
    "mul": _binary("Mul"),
    "div": _div,
    "pow": _pow,
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "square": _square,
    "rsqrt": _rsqrt,
    "lt": _binary("Less"),
    "le": _binary("LessOrEqual"),
    "eq": _binary("Equal"),
    "gt": _binary("Greater"),
    "ge": _binary("GreaterOrEqual"),
    "addcmul": _addcmul,
    "where": _where,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "special_entr": _entr,
    "gelu": _gelu,
    "silu": _silu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    **dict.fromkeys(("clone", "contiguous", "detach", "alias", "dropout", "lift_fresh"), _same),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float", "double"), _cast),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("unsqueeze", "squeeze", "view_as"), _reshape),
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "select": _select,
    "slice": _slice,
    "narrow": _narrow,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    "roll": _roll,
    "unfold": _unfold,
    "index_select": _index_select,
    "embedding": _embedding,
    **dict.fromkeys(("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"), _pad),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d", "replication_pad3d"), _pad),
    "sum": _reduce("ReduceSum"),
    "mean": _reduce("ReduceMean"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "logsumexp": _reduce("ReduceLogSumExp"),
    "linalg_vector_norm": _vector_norm,
    "softmax": _softmax("Softmax"),
    "_softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "_log_softmax": _softmax("LogSoftmax"),
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "col2im": _col2im,
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _avg_pool),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _adaptive_avg_pool),
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
}
