"""Builder of an ONNX graph: nodes in order, compact constants, short names."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

NumberType = Literal["fp32", "fp16", "int8"]
Array = NDArray[Any]

OPSET = 18  # the first that has all operators that we use
OURS = "dubito"  # domain of our functions
EXACT = "exact"  # prefix of the names of products that stay in float32 with int8 activations
FEW = 256  # constants with at most so many entries stay in float32


class Graph:
    """Values are represented by their names. Runtimes convert constants to float32 once, at load."""

    def __init__(self, precision: NumberType = "fp32") -> None:
        self.precision = precision
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.shared: dict[str, str] = {}  # values that several layers use, by description
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"_{self._names}"

    def op(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        (name,) = self.ops(kind, *inputs, outputs=[out or self.name()], domain=domain, **attributes)
        return name

    def ops(self, kind: str, *inputs: str, outputs: Sequence[str], domain: str = "", **attributes: Any) -> list[str]:
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), domain=domain, **attributes))
        return list(outputs)

    def constant(self, value: Array | float | int | Sequence[int], dtype: Any = None) -> str:
        """A small constant; floats are float32 and integers int64 unless a dtype is given."""
        array = np.asarray(value, dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.keep(array)
        return self._known[key]

    def keep(self, array: Array, name: str | None = None) -> str:
        name = name or self.name()
        self.initializers.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def weights(self, array: Array, mask: NDArray[np.bool_] | None = None, least: NumberType | None = None) -> str:
        """A large constant, stored in the file's precision (at least `least`) and used in float32.

        In int8 each entry of the first axis has a scale. With a mask, only the kept values and a bit mask are stored.
        """
        array = np.asarray(array, np.float32)
        precision = least if least is not None and self.precision == "int8" else self.precision
        if array.size <= FEW or (precision == "fp16" and not _fits_half(array)):
            precision = "fp32"
        if mask is not None and array.size > FEW:
            return self._scattered(array, mask, precision)
        if precision == "fp32":
            return self.keep(array)
        if precision == "int8" and array.ndim > 1:
            values, scale = quantised(array)
            return self.op("Mul", self._floats(self.keep(values)), self.keep(scale))
        return self._floats(self.keep(array.astype(np.float16)))

    def _scattered(self, array: Array, mask: NDArray[np.bool_], precision: NumberType) -> str:
        """A pruned constant: kept values and a bit mask; the index of a value is the count of bits before it."""
        kept, scale = array[mask], None
        if precision == "int8":
            quantities, scale = quantised(array)
            kept = quantities[mask]
        elif precision == "fp16":
            kept = kept.astype(np.float16)
        padded = np.concatenate([np.zeros(1, kept.dtype), kept])
        values = self.keep(padded) if precision == "fp32" else self._floats(self.keep(padded))
        bits = self.keep(np.packbits(mask.ravel(), bitorder="little"))
        eight = self.constant(np.arange(8, dtype=np.uint8))
        flags = self.op("BitShift", self.op("Unsqueeze", bits, self.constant([1])), eight, direction="RIGHT")
        flags = self.op("BitwiseAnd", flags, self.constant(1, np.uint8))
        flags = self.op("Slice", self.reshape(flags, [-1]), self.constant([0]), self.constant([array.size]))
        flags = self.op("Cast", flags, to=TensorProto.INT32)
        place = self.op("Mul", self.op("CumSum", flags, self.constant(0)), flags)  # index 0 is the zero
        values_ = self.reshape(self.op("Gather", values, place), array.shape)
        return values_ if scale is None else self.op("Mul", values_, self.keep(scale))

    def _floats(self, value: str) -> str:
        return self.op("Cast", value, to=TensorProto.FLOAT)

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        return self.op("Reshape", value, self.constant(np.array(shape, np.int64)))

    def part(self, value: str, axis: int, start: int, stop: int) -> str:
        return self.op("Slice", value, *(self.constant([i]) for i in (start, stop, axis)))

    def split(self, value: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """Parts of these sizes along an axis; an empty part has the name ""."""
        nonempty = [n for n in sizes if n]
        if len(nonempty) == 1:
            parts = iter([value])
        else:
            names = [self.name() for _ in nonempty]
            parts = iter(self.ops("Split", value, self.constant(np.array(nonempty)), outputs=names, axis=axis))
        return [next(parts) if n else "" for n in sizes]

    def add(self, a: str, b: str) -> str:
        return self.op("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.op("Mul", a, b)

    def matmul(self, a: str, b: str) -> str:
        return self.op("MatMul", a, b)


def quantised(array: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 values, and a scale for each entry of the first axis."""
    rows = np.abs(array).reshape(len(array), -1).max(1)
    scale = (np.where(rows > 0, rows, 1) / 127).astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))
    return np.rint(array / scale).astype(np.int8), scale


def copy_of(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node without its name and what the tracer says of it."""
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    for field in ("metadata_props", "doc_string", "name"):
        copied.ClearField(field)
    return copied


def layer_of(node: onnx.NodeProto) -> str:
    """Name of the layer that a node of our domain stands for."""
    return next(str(a.s.decode()) for a in node.attribute if a.name == "name")


def shape_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Shape, with −1 for axes that depend on the inputs."""
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)


def _fits_half(array: Array) -> bool:
    return bool(np.abs(array).max(initial=0) <= np.finfo(np.float16).max)
