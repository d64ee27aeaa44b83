"""Derivatives of ONNX operators in forward mode: from the tangents of an operator's inputs to those of its outputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Graph
from dubito.deploy.edge.tangents import Forward, Ints, Moved, Tangent, TangentRule


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _attribute(node: onnx.NodeProto, name: str, otherwise: float) -> float:
    value = _attributes(node).get(name, otherwise)
    assert isinstance(value, int | float)
    return value


def _axis(node: onnx.NodeProto, rank: int, otherwise: int) -> int:
    return int(_attribute(node, "axis", otherwise)) % rank


# elementwise: the derivative has B rows and is multiplied with K tangents


Slope = Callable[[Graph, onnx.NodeProto, str, str], str]  # of x and y


def _elementwise(slope: Slope, f: Forward, node: onnx.NodeProto) -> str:
    return f.g.mul(f.moving(node.input[0]), slope(f.g, node, f.value[node.input[0]], f.value[node.output[0]]))


def _flag(g: Graph, condition: str) -> str:
    return g.op("Cast", condition, to=TensorProto.FLOAT)


def _one_minus(g: Graph, y: str) -> str:
    return g.op("Sub", g.constant(1.0), y)


def _leaky(g: Graph, node: onnx.NodeProto, x: str, y: str) -> str:
    slope = g.constant(_attribute(node, "alpha", 0.01))
    return g.op("Where", g.op("Greater", x, g.constant(0.0)), g.constant(1.0), slope)


def _elu(g: Graph, node: onnx.NodeProto, x: str, y: str) -> str:
    below = g.add(y, g.constant(_attribute(node, "alpha", 1.0)))
    return g.op("Where", g.op("Greater", x, g.constant(0.0)), g.constant(1.0), below)


def _hard_sigmoid(g: Graph, node: onnx.NodeProto, x: str, y: str) -> str:
    within = g.op("And", g.op("Greater", y, g.constant(0.0)), g.op("Less", y, g.constant(1.0)))
    return g.mul(_flag(g, within), g.constant(_attribute(node, "alpha", 0.2)))


def _hard_swish(g: Graph, node: onnx.NodeProto, x: str, y: str) -> str:
    between = g.add(g.mul(x, g.constant(1 / 3)), g.constant(0.5))
    above = g.op("Where", g.op("Less", x, g.constant(3.0)), between, g.constant(1.0))
    return g.op("Where", g.op("Greater", x, g.constant(-3.0)), above, g.constant(0.0))


def _erf(g: Graph, node: onnx.NodeProto, x: str, y: str) -> str:
    return g.mul(g.op("Exp", g.op("Neg", g.mul(x, x))), g.constant(2 / math.sqrt(math.pi)))


SLOPES: Mapping[str, Slope] = {
    "Abs": lambda g, node, x, y: g.op("Sign", x),
    "Cos": lambda g, node, x, y: g.op("Neg", g.op("Sin", x)),
    "Elu": _elu,
    "Erf": _erf,
    "Exp": lambda g, node, x, y: y,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky,
    "Log": lambda g, node, x, y: g.op("Reciprocal", x),
    "Reciprocal": lambda g, node, x, y: g.op("Neg", g.mul(y, y)),
    "Relu": lambda g, node, x, y: g.op("Sign", y),
    "Sigmoid": lambda g, node, x, y: g.mul(y, _one_minus(g, y)),
    "Sin": lambda g, node, x, y: g.op("Cos", x),
    "Softplus": lambda g, node, x, y: g.op("Sigmoid", x),
    "Sqrt": lambda g, node, x, y: g.op("Div", g.constant(0.5), y),
    "Tanh": lambda g, node, x, y: _one_minus(g, g.mul(y, y)),
}


def _clip(f: Forward, node: onnx.NodeProto) -> str:
    g, (x, *limits) = f.g, node.input
    t = f.moving(x)
    for limit, kind in zip(limits, ("Greater", "Less"), strict=False):
        if limit:
            t = g.mul(t, _flag(g, g.op(kind, f.value[x], f.value[limit])))
    return t


def _power(f: Forward, node: onnx.NodeProto) -> str:
    g, (x, exponent) = f.g, node.input
    t = f.of(x)
    if t is None or exponent in f.tangent:
        raise ExportError("the network moves an exponent (operator Pow), which cannot be exported.")
    less = g.op("Sub", f.value[exponent], g.constant(1.0))
    slope = g.mul(f.value[exponent], g.op("Pow", f.value[x], less))
    return g.mul(f.fit(t, x, node.output[0]), slope)


# two operands


def _sum_of(signs: Sequence[int], f: Forward, node: onnx.NodeProto) -> str | None:
    parts = []
    for name, sign in zip(node.input, signs, strict=True):
        t = f.of(name)
        if t is not None:
            t = f.fit(t, name, node.output[0])
            parts.append(t if sign > 0 else f.g.op("Neg", t))
    return f.sum(*parts)


def _product(f: Forward, node: onnx.NodeProto) -> str | None:
    parts = []
    for name, other in zip(node.input, reversed(node.input), strict=True):
        t = f.of(name)
        if t is not None:
            parts.append(f.g.mul(f.fit(t, name, node.output[0]), f.value[other]))
    return f.sum(*parts)


def _quotient(f: Forward, node: onnx.NodeProto) -> str:
    """d(a/b) = (da − (a/b) db)/b"""
    (a, b), (out,), g = node.input, node.output, f.g
    above, below = f.of(a), f.of(b)
    parts = [None if above is None else f.fit(above, a, out)]
    if below is not None:
        parts.append(g.op("Neg", g.mul(f.fit(below, b, out), f.value[out])))
    total = f.sum(*parts)
    assert total is not None
    return g.op("Div", total, f.value[b])


def _larger(kind: str, f: Forward, node: onnx.NodeProto) -> str:
    if len(node.input) != 2:
        raise ExportError(f"the network compares {len(node.input)} values (operator {node.op_type}); expected two.")
    g, (a, b), (out,) = f.g, node.input, node.output
    return g.op("Where", g.op(kind, f.value[a], f.value[b]), *_both(f, a, b, out))


def _where(f: Forward, node: onnx.NodeProto) -> str:
    condition, a, b = node.input
    return f.g.op("Where", f.value[condition], *_both(f, a, b, node.output[0]))


def _both(f: Forward, a: str, b: str, out: str) -> list[str]:
    every = [(f.of(name), name) for name in (a, b)]
    return [f.nothing(out) if t is None else f.fit(t, name, out) for t, name in every]


# products with weights


def _matmul(f: Forward, node: onnx.NodeProto) -> str | None:
    g, (a, b) = f.g, node.input
    rank = len(f.shape(node.output[0]))
    if min(len(f.shape(a)), len(f.shape(b))) < 2:
        raise ExportError("the network multiplies a vector (operator MatMul), which cannot be exported; use matrices.")
    parts = []
    moved = f.tangent.get(b)
    if a in f.tangent:
        t = f.moving(a)
        parts.append(g.matmul(f.lined_up(t, a, rank), f.value[b]))
    if isinstance(moved, Moved) and len(moved.shape) == 2:
        parts.append(_by_columns(f, a, moved, rank))
    elif moved is not None:
        t = f.moving(b)
        parts.append(g.matmul(f.value[a], f.lined_up(t, b, rank)))
    return f.sum(*parts)


def _by_columns(f: Forward, a: str, moved: Moved, rank: int) -> str:
    """a ΔW for a weight (d_in, d_out) with few moved entries: (..., d_in) -> (K, ..., d_out)."""
    g, d_out = f.g, moved.shape[1]
    small, ins, outs = moved.submatrix()
    x = f.value[a]
    if len(ins) < moved.shape[0]:
        x = g.op("Gather", x, g.keep(ins), axis=len(f.shape(a)) - 1)
    W = g.reshape(small.formed(g, f.K), (f.K, *[1] * (rank - 2), len(ins), len(outs)))
    return _spread(g, g.matmul(x, W), rank, outs, d_out)


def _spread(g: Graph, t: str, axis: int, positions: Ints, n: int) -> str:
    """Insert zeros along an axis, so that it has n entries and the given ones are at `at`."""
    if len(positions) == n:
        return t
    where = np.full(n, len(positions))
    where[positions] = np.arange(len(positions))
    pads = g.op("Pad", t, g.constant([0, 1]), "", g.constant([axis]))
    return g.op("Gather", pads, g.keep(where), axis=axis)


def _gemm(f: Forward, node: onnx.NodeProto) -> str | None:
    g, (x, W, *more) = f.g, node.input
    if _attribute(node, "transA", 0) or any(_attribute(node, name, 1.0) != 1 for name in ("alpha", "beta")):
        raise ExportError("the network uses Gemm with a scale or a transposed input, which cannot be exported.")
    flipped = bool(_attribute(node, "transB", 0))
    t, moved = f.of(x), f.tangent.get(W)
    parts: list[str | None] = []
    if t is not None:
        parts.append(g.matmul(t, g.op("Transpose", f.value[W]) if flipped else f.value[W]))
    if isinstance(moved, Moved):
        parts.append(_by_columns(f, x, moved.transposed((1, 0)) if flipped else moved, 2))
    elif moved is not None:
        parts.append(g.matmul(f.value[x], g.op("Transpose", moved, perm=[0, 2, 1]) if flipped else moved))
    for bias in more:
        if bias and (shift := f.of(bias)) is not None:
            parts.append(f.fit(shift, bias, node.output[0]))
    return f.sum(*parts)


def _conv(f: Forward, node: onnx.NodeProto) -> str | None:
    g, (x, W, *more) = f.g, node.input
    attributes = _attributes(node)
    groups = int(_attribute(node, "group", 1))
    channels, *sizes = f.shape(node.output[0])[1:]
    t, moved = f.of(x), f.tangent.get(W)
    parts: list[str | None] = []
    if t is not None:
        product = g.op("Conv", f.folded(t, x), f.value[W], **attributes)
        parts.append(f.unfolded(product, node.output[0]))
    if moved is not None:
        parts.append(_conv_moved(f, x, W, moved, attributes, groups, (channels, *sizes)))
    for bias in more:
        if bias and (shift := f.of(bias)) is not None:
            by_channel = g.reshape(shift, (f.K, 1, channels, *[1] * len(sizes)))
            parts.append(by_channel if parts else g.op("Expand", by_channel, f._stacked(node.output[0])))
    return f.sum(*parts)


def _conv_moved(
    f: Forward, x: str, W: str, moved: str | Moved, attributes: dict[str, Any], groups: int, after: tuple[int, ...]
) -> str:
    """The inputs, which all draws share, through the filters of K draws in one convolution."""
    g, K, value, outs = f.g, f.K, f.value[x], np.arange(after[0])
    shape = f.shape(W)
    if isinstance(moved, Moved) and groups == 1:
        moved, outs, ins = moved.submatrix()
        if len(ins) < shape[1]:
            value = g.op("Gather", value, g.keep(ins), axis=1)
        shape = moved.shape
    if isinstance(moved, Moved):
        moved = moved.formed(g, K)
    if groups > 1:
        value = g.op("Tile", value, g.constant([1, K, *[1] * (len(shape) - 2)]))
        attributes = {**attributes, "group": K * groups}
    product = g.op("Conv", value, g.reshape(moved, (K * shape[0], *shape[1:])), **attributes)
    beside = g.reshape(product, (-1, K, shape[0] * math.prod(after[1:])))
    stacked = g.reshape(g.op("Transpose", beside, perm=[1, 0, 2]), (K, -1, shape[0], *after[1:]))
    return _spread(g, stacked, 2, outs, after[0])


# normalisation


def _batchnorm(f: Forward, node: onnx.NodeProto) -> str | None:
    g, (x, scale, shift, mean, var) = f.g, node.input
    ones = [1] * (len(f.shape(x)) - 2)
    spread = g.op("Sqrt", g.add(f.value[var], g.constant(_attribute(node, "epsilon", 1e-5))))
    t, of_scale, of_shift = f.of(x), f.of(scale), f.of(shift)
    parts: list[str | None] = []
    if t is not None:
        parts.append(g.mul(t, g.reshape(g.op("Div", f.value[scale], spread), (-1, *ones))))
    if of_scale is not None:
        centred = g.op("Sub", f.value[x], g.reshape(f.value[mean], (-1, *ones)))
        parts.append(g.mul(centred, g.reshape(g.op("Div", of_scale, spread), (f.K, 1, -1, *ones))))
    if of_shift is not None:
        by_channel = g.reshape(of_shift, (f.K, 1, -1, *ones))
        parts.append(by_channel if parts else g.op("Expand", by_channel, f._stacked(x)))
    return f.sum(*parts)


def _layernorm(f: Forward, node: onnx.NodeProto) -> str | None:
    """The tangent of n = (x − x̄)/s is (dx − mean dx − n mean(n dx))/s."""
    g, (x, scale, *more), (out, *_) = f.g, node.input, node.output
    rank = len(f.shape(x))
    axes = g.constant(list(range(_axis(node, rank, -1) - rank, 0)))
    centred = g.op("Sub", f.value[x], g.op("ReduceMean", f.value[x], axes))
    variance = g.op("ReduceMean", g.mul(centred, centred), axes)
    s = g.op("Sqrt", g.add(variance, g.constant(_attribute(node, "epsilon", 1e-5))))
    n = g.op("Div", centred, s)
    t, of_scale = f.of(x), f.of(scale)
    parts: list[str | None] = []
    if t is not None:
        along = g.mul(n, g.op("ReduceMean", g.mul(n, t), axes))
        moved = g.op("Sub", g.op("Sub", t, g.op("ReduceMean", t, axes)), along)
        parts.append(g.mul(g.op("Div", moved, s), f.value[scale]))
    if of_scale is not None:
        parts.append(g.mul(n, f.lined_up(of_scale, scale, rank)))
    for bias in more:
        if bias and (shift := f.of(bias)) is not None:
            parts.append(f.fit(shift, bias, out))
    return f.sum(*parts)


def _softmax(log: bool, f: Forward, node: onnx.NodeProto) -> str:
    g, (x,), (out,) = f.g, node.input, node.output
    t, rank = f.moving(x), len(f.shape(x))
    axes = g.constant([_axis(node, rank, -1) - rank])
    y = g.op("Exp", f.value[out]) if log else f.value[out]
    moved = g.op("Sub", t, g.op("ReduceSum", g.mul(t, y), axes))
    return moved if log else g.mul(moved, y)


# pooling


def _maxpool(f: Forward, node: onnx.NodeProto) -> str:
    """The tangent of the largest entries."""
    return f.g.op("Gather", f.g.reshape(f.moving(node.input[0]), (f.K, -1)), f.places_of(node), axis=1)


def _pool(f: Forward, node: onnx.NodeProto) -> str:
    (x,), (out,) = node.input, node.output
    return f.unfolded(f.g.op(node.op_type, f.folded(f.moving(x), x), **_attributes(node)), out)


def _reduced(f: Forward, node: onnx.NodeProto) -> str:
    t = f.moving(node.input[0])
    return f.g.op(node.op_type, t, f.g.constant(_axes(f, node)), keepdims=int(_attribute(node, "keepdims", 1)))


def _axes(f: Forward, node: onnx.NodeProto) -> list[int]:
    """Axes of the tangent that a reduction reduces."""
    rank = len(f.shape(node.input[0]))
    if len(node.input) < 2 or not node.input[1]:
        return list(range(1, rank + 1))
    return [int(a) % rank + 1 for a in f.numbers(node.input[1])]


def _largest(f: Forward, node: onnx.NodeProto) -> str:
    """The tangent of a maximum; ties share it, as in torch."""
    g, x = f.g, node.input[0]
    t, rank = f.moving(x), len(f.shape(x))
    axes = list(range(3, rank + 1)) if node.op_type == "GlobalMaxPool" else _axes(f, node)
    kept = int(_attribute(node, "keepdims", 1))
    before = g.constant([a - 1 for a in axes])
    top = g.op("Equal", f.value[x], g.op("ReduceMax", f.value[x], before))
    share = g.op("Div", _flag(g, top), g.op("ReduceSum", _flag(g, top), before))
    return g.op("ReduceSum", g.mul(t, share), g.constant(axes), keepdims=kept)


# shapes and positions


def _cast(f: Forward, node: onnx.NodeProto) -> Tangent:
    return f.tangent.get(node.input[0]) if _attribute(node, "to", 1) == TensorProto.FLOAT else None


def _transpose(f: Forward, node: onnx.NodeProto) -> Tangent:
    tangent = f.tangent[node.input[0]]
    perm = _attributes(node).get("perm", list(range(len(f.shape(node.input[0]))))[::-1])
    assert isinstance(perm, list)
    if isinstance(tangent, Moved):
        return tangent.transposed(perm)
    return f.g.op("Transpose", tangent, perm=[0, *(p + 1 for p in perm)])


def _concat(f: Forward, node: onnx.NodeProto) -> str:
    axis = _axis(node, len(f.shape(node.output[0])), 0) + 1
    every = [(f.of(name), name) for name in node.input]
    return f.g.op("Concat", *[f.nothing(name) if t is None else t for t, name in every], axis=axis)


def _split(f: Forward, node: onnx.NodeProto) -> list[Tangent]:
    x, *sizes = node.input
    t = f.moving(x)
    names = [f.g.name() for _ in node.output]
    more = {k: v for k, v in _attributes(node).items() if k != "axis"}
    axis = _axis(node, len(f.shape(x)), 0) + 1
    return list(f.g.ops("Split", t, *[f.value[s] for s in sizes if s], outputs=names, axis=axis, **more))


def _slice(f: Forward, node: onnx.NodeProto) -> str:
    x, start, stop, *more = node.input
    t, rank = f.moving(x), len(f.shape(x))
    axes = [int(a) % rank for a in f.numbers(more[0])] if more and more[0] else list(range(len(f.numbers(start))))
    steps = [f.value[more[1]]] if len(more) > 1 and more[1] else []
    return f.g.op("Slice", t, f.value[start], f.value[stop], f.g.constant([a + 1 for a in axes]), *steps)


def _gather(f: Forward, node: onnx.NodeProto) -> str:
    x, index = node.input
    return f.g.op("Gather", f.moving(x), f.value[index], axis=_axis(node, len(f.shape(x)), 0) + 1)


def _pad(f: Forward, node: onnx.NodeProto) -> str:
    x, pads, *more = node.input
    t, rank = f.moving(x), len(f.shape(x))
    if len(more) > 1 and more[1]:
        raise ExportError("the network pads some axes only (operator Pad), which cannot be exported.")
    sides = [int(n) for n in f.numbers(pads)]
    return f.g.op("Pad", t, f.g.constant([0, *sides[:rank], 0, *sides[rank:]]), **_attributes(node))


RULES: Mapping[str, TangentRule] = {
    **{name: partial(_elementwise, slope) for name, slope in SLOPES.items()},
    **dict.fromkeys(("AveragePool", "GlobalAveragePool"), _pool),
    **dict.fromkeys(("Dropout", "Identity"), lambda f, node: f.tangent.get(node.input[0])),
    **dict.fromkeys(
        ("Flatten", "Reshape", "Squeeze", "Unsqueeze"),
        lambda f, node: f.unfolded(f.moving(node.input[0]), node.output[0]),
    ),
    **dict.fromkeys(("GlobalMaxPool", "ReduceMax"), _largest),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), _reduced),
    "Add": partial(_sum_of, (1, 1)),
    "BatchNormalization": _batchnorm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _quotient,
    "Expand": lambda f, node: f.fit(f.moving(node.input[0]), node.input[0], node.output[0]),
    "Gather": _gather,
    "Gemm": _gemm,
    "LayerNormalization": _layernorm,
    "LogSoftmax": partial(_softmax, True),
    "MatMul": _matmul,
    "Max": partial(_larger, "Greater"),
    "MaxPool": _maxpool,
    "Min": partial(_larger, "Less"),
    "Mul": _product,
    "Neg": lambda f, node: f.g.op("Neg", f.moving(node.input[0])),
    "Pad": _pad,
    "Pow": _power,
    "Slice": _slice,
    "Softmax": partial(_softmax, False),
    "Split": _split,
    "Sub": partial(_sum_of, (1, -1)),
    "Transpose": _transpose,
    "Where": _where,
}
