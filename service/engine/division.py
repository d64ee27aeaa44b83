"""Divides the ONNX graph of a pass in two: one makes the draws, which do not depend on the inputs; the other applies
them. So draws can be made before a request comes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

MOST = 1 << 26  # bytes of the draws that are made apart


@dataclass(frozen=True)
class Divided:
    draws: bytes  # columns of normals -> operands; empty where `network` takes the columns itself
    network: bytes  # inputs and operands -> sums
    operands: tuple[str, ...]
    size: int  # bytes of the operands


def divide(model: onnx.ModelProto, given: Sequence[str], most: int = MOST) -> Divided:
    """What does not depend on the inputs `given` becomes a graph of its own, unless its results take more than `most`
    bytes. Equal draws give equal bytes, whatever they are applied to."""
    graph, late = model.graph, {*given}
    for node in graph.node:
        if late.intersection(node.input):
            late.update(node.output)
    early, later = (
        [node for node in graph.node if bool(late.intersection(node.output)) == depends] for depends in (False, True)
    )
    columns = {one.name: one for one in graph.input if one.name not in given}
    made = columns.keys() | {name for node in early for name in node.output}
    crossing = list(dict.fromkeys(name for node in later for name in node.input if name in made))
    known = {one.name: one for one in onnx.shape_inference.infer_shapes(model).graph.value_info} | columns
    if not early or not crossing or not known.keys() >= set(crossing):
        return Divided(b"", model.SerializeToString(), (), 0)
    size = sum(_bytes(known[name]) for name in crossing)
    if size > most:
        return Divided(b"", model.SerializeToString(), (), 0)
    names = {name: f"operand{i}" for i, name in enumerate(crossing)}
    operands = [_value(new, known[name]) for name, new in names.items()]
    passed_on = [helper.make_node("Identity", [name], [new]) for name, new in names.items() if name in columns]
    # names that do not depend on what else the graph had
    own = {name: new for name, new in names.items() if name not in columns}
    for name in dict.fromkeys(name for node in early for name in (*node.input, *node.output)):
        if name and name not in columns:
            own.setdefault(name, f"value{len(own)}")
    draws = _part(model, [*_renamed(early, own), *passed_on], columns.values(), operands, own)
    taken = [one for one in graph.input if one.name in given]
    network = _part(model, _renamed(later, names), [*taken, *operands], graph.output, {})
    return Divided(draws, network, tuple(names.values()), size)


def _renamed(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
        copies.append(copy)
    return copies


def _part(
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    names: Mapping[str, str],
) -> bytes:
    """The nodes as a model, with the constants that they need under their new names."""
    used, constants = {name for node in nodes for name in node.input}, list[TensorProto]()
    for constant in model.graph.initializer:
        if names.get(constant.name, constant.name) in used:
            copy = TensorProto()
            copy.CopyFrom(constant)
            copy.name = names.get(constant.name, constant.name)
            constants.append(copy)
    constants.sort(key=lambda constant: constant.name)
    graph = helper.make_graph(nodes, "pass", list(inputs), list(outputs), constants)
    part: bytes = helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    ).SerializeToString()
    return part


def _value(name: str, like: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    value = onnx.ValueInfoProto()
    value.CopyFrom(like)
    value.name = name
    return value


def _bytes(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    itemsize = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return int(itemsize * math.prod(size.dim_value for size in kind.shape.dim))
