"""Activations in int8: their ranges come from data, and products with stored weights use integer kernels.

Only products with weights stored in int8, the same for all draws, are changed: projections and plain layers, not drawn
matrices. They are written as QuantizeLinear and DequantizeLinear around an operator, which runtimes turn into integer
kernels; weights have a scale per channel, activations one scale and a zero point.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dubito.deploy.edge.graph import EXACT, Array

SEED = 7
CUT = 1e-4  # quantile of activations cut off at either end, so that outliers do not widen the range
VIEWS = {"Cast", "Mul", "Slice", "Reshape", "Transpose", "Concat", "Identity"}  # between a stored matrix and its use


@dataclass(frozen=True)
class Product:
    """A node, and the axis of its weights that is the output axis."""

    node: onnx.NodeProto
    axis: int

    @property
    def observed(self) -> list[str]:
        """Values whose range is needed; only a convolution has a quantised output."""
        return [self.node.input[0], *(self.node.output if self.node.op_type == "Conv" else [])]

    @property
    def constants(self) -> list[str]:
        return list(self.node.input[1:])


def quantised(model: onnx.ModelProto, x: NDArray[np.generic], rows: int) -> tuple[onnx.ModelProto, int]:
    """The model with int8 activations, by the ranges on inputs `x`, and the number of its int8 products."""
    products = list(_products(model.graph))
    if not products:
        return model, 0
    ranges, constants = _observed(model, products, x, rows)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    names = {p.node.output[0]: p for p in products}
    nodes, initializers = [], list(changed.graph.initializer)
    written: dict[str, str] = {}
    for node in changed.graph.node:
        product = names.get(node.output[0])
        if product is None:
            nodes.append(node)
        else:
            more, stored = _written(product, ranges, constants, written)
            nodes += more
            initializers += stored
    _replace(changed.graph, nodes, initializers)
    return changed, len(products)


def _products(graph: onnx.GraphProto) -> Iterable[Product]:
    stored = {t.name: t.data_type for t in graph.initializer}
    maker = {name: node for node in graph.node for name in node.output}

    def leaves(name: str) -> set[int]:
        """Types of the constants from which a value is computed; 0 for anything else."""
        if name in stored:
            return {stored[name]}
        node = maker.get(name)
        if node is None or node.op_type not in VIEWS:
            return {0}
        return set().union(*(leaves(one) for one in node.input if one))

    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or node.name.startswith(EXACT):
            continue
        weights, activations = leaves(node.input[1]), leaves(node.input[0])
        if 0 in weights or TensorProto.INT8 not in weights or 0 not in activations:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Gemm" and (attributes.get("alpha", 1) != 1 or attributes.get("transA", 0)):
            continue
        plain = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attributes.get("transB", 0))
        if len(node.input) < 3 or 0 not in leaves(node.input[2]):
            yield Product(node, 1 if plain else 0)


def _observed(
    model: onnx.ModelProto, products: Sequence[Product], x: NDArray[np.generic], rows: int
) -> tuple[dict[str, tuple[float, float]], dict[str, Array]]:
    """Ranges of activations on the data, and the values of constant operands."""
    watched = sorted({name for p in products for name in p.observed})
    fixed = sorted({name for p in products for name in p.constants})
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    del opened.graph.output[:]
    inputs = {entry.name for entry in model.graph.input}
    for name in watched + fixed:
        if name not in inputs:
            opened.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(opened.SerializeToString(), options, providers=["CPUExecutionProvider"])
    entry, *seed = (e.name for e in session.get_inputs())
    names = [o.name for o in session.get_outputs()]
    ranges: dict[str, tuple[float, float]] = {}
    constants: dict[str, Array] = {}
    for start in range(0, len(x), rows):
        feed = {entry: x[start : start + rows]} | dict.fromkeys(seed, np.array(SEED, np.int64))
        values = feed | dict(zip(names, session.run(names, feed), strict=True))
        constants |= {name: values[name] for name in fixed}
        for name in watched:
            low, high = np.quantile(values[name], [CUT, 1 - CUT])
            before = ranges.get(name, (0.0, 0.0))  # 0 must be representable
            ranges[name] = (min(before[0], float(low)), max(before[1], float(high)))
    return ranges, constants


def _written(
    p: Product, ranges: dict[str, tuple[float, float]], constants: dict[str, Array], written: dict[str, str]
) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
    """Nodes and constants of a product in int8. `written` holds activations that are already quantised."""
    nodes: list[onnx.NodeProto] = []
    stored: list[TensorProto] = []
    node, out = p.node, p.node.output[0]

    def keep(name: str, value: Array) -> str:
        stored.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def rounded(name: str, source: str, to: str) -> None:
        scale = _scale(ranges[name])
        zero = np.array(np.clip(np.rint(-ranges[name][0] / scale), 0, 255), np.uint8)
        about = [keep(f"{to}.scale", scale), keep(f"{to}.zero", zero)]
        nodes.append(helper.make_node("QuantizeLinear", [source, *about], [f"{to}.int8"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{to}.int8", *about], [to]))

    x, weights = node.input[0], constants[node.input[1]]
    if x not in written:
        written[x] = f"{x}.rounded"
        rounded(x, x, written[x])
    own = p.axis if node.op_type != "MatMul" or weights.ndim == 2 else None  # stacks of matrices have one step for all
    others = tuple(i for i in range(weights.ndim) if i != own)
    most = np.abs(weights).max(axis=others)
    scale = (np.where(most > 0, most, 1) / 127).astype(np.float32)
    shape = [-1 if i == own else 1 for i in range(weights.ndim)]
    values = np.clip(np.rint(weights / scale.reshape(shape)), -127, 127).astype(np.int8)
    inputs = [written[x], f"{out}.weights"]
    about = [keep(f"{out}.weights.int8", values), keep(f"{out}.weights.scale", scale)]
    nodes.append(helper.make_node("DequantizeLinear", about, [inputs[1]], axis=p.axis))
    if len(node.input) > 2:
        fine = (_scale(ranges[x]) * scale).astype(np.float32)
        bias = constants[node.input[2]].astype(np.float64).reshape(-1)
        whole = np.clip(np.rint(bias / fine), -(2**31) + 1, 2**31 - 1).astype(np.int32)
        about = [keep(f"{out}.bias.int32", whole), keep(f"{out}.bias.scale", fine)]
        nodes.append(helper.make_node("DequantizeLinear", about, [f"{out}.bias"], axis=0))
        inputs.append(f"{out}.bias")
    integer = onnx.NodeProto()
    integer.CopyFrom(node)
    del integer.input[:]
    integer.input.extend(inputs)
    if node.op_type == "Conv":
        integer.output[0] = f"{out}.exact"
        nodes.append(integer)
        rounded(out, integer.output[0], out)
    else:
        nodes.append(integer)
    return nodes, stored


def _scale(between: tuple[float, float]) -> Array:
    """The quantisation step of a range."""
    return np.array((between[1] - between[0]) / 255 or 1.0, np.float32)


def _replace(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], initializers: list[TensorProto]) -> None:
    """Set nodes and constants of the graph, without those that nothing reads."""
    needed = {o.name for o in graph.output}
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
            needed.update(node.input)
    used = [TensorProto.FromString(t.SerializeToString()) for t in initializers if t.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(used)
