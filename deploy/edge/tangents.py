"""Forward-mode differentiation of a traced network: K tangents of each value, for K moves of the weights.

A value has B rows and is computed once; its tangent has a further first axis of length K. The tangent of a weight stays
a sparse list of moved entries until an operator needs it, and products form only the rows and columns with moves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array, Graph, copy_of, shape_of

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Moved:
    """Sparse tangent of a weight: the entries that draws move, and by how much."""

    moves: str  # (s, K)
    places: Ints  # (s,)  indices into the flattened weight
    shape: tuple[int, ...]

    def transposed(self, perm: Sequence[int]) -> "Moved":
        index = np.unravel_index(self.places, self.shape)
        shape = tuple(self.shape[p] for p in perm)
        return Moved(self.moves, np.ravel_multi_index(tuple(index[p] for p in perm), shape), shape)

    def formed(self, g: Graph, K: int) -> str:
        """Dense tangent, (K, *shape)."""
        n = math.prod(self.shape)
        if len(self.places) == n and (np.diff(self.places) > 0).all():
            columns = self.moves
        else:
            nothing = g.op("ConstantOfShape", g.constant([n, K]))
            columns = g.op("ScatterND", nothing, g.keep(self.places[:, None]), self.moves)
        return g.reshape(g.op("Transpose", columns), (K, *self.shape))

    def submatrix(self) -> tuple["Moved", Ints, Ints]:
        """The tangent restricted to rows and columns with moves, and the indices of these."""
        out, into, *rest = np.unravel_index(self.places, self.shape)
        outs, out = np.unique(out, return_inverse=True)
        ins, into = np.unique(into, return_inverse=True)
        shape = (len(outs), len(ins), *self.shape[2:])
        return Moved(self.moves, np.ravel_multi_index((out, into, *rest), shape), shape), outs, ins


Tangent = str | Moved | None

STILL = {  # operators with zero derivative, or whose output is not a float
    "And", "Ceil", "ConstantOfShape", "Equal", "Floor", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual",
    "Not", "Or", "Range", "Round", "Shape", "Sign", "Size",
}  # fmt: skip


class Forward:
    """Copies each node of the traced network, and differentiates those that depend on moved weights."""

    def __init__(self, g: Graph, K: int, traced: onnx.GraphProto) -> None:
        self.g, self.K, self.traced = g, K, traced
        everything = [*traced.input, *traced.value_info, *traced.output]
        self.shapes: dict[str, tuple[int, ...]] = {v.name: shape_of(v) for v in everything} | {
            t.name: tuple(t.dims) for t in traced.initializer
        }
        self.axes = {v.name: _axes_of(v) for v in everything} | {t.name: list(t.dims) for t in traced.initializer}
        self.known = {t.name: numpy_helper.to_array(t) for t in traced.initializer}
        self.value: dict[str, str] = {}
        self.tangent: dict[str, str | Moved] = {}
        for name, stored in self.known.items():
            self.value[name] = g.weights(stored) if stored.dtype == np.float32 else g.keep(stored)

    def run(self, rules: Mapping[str, "TangentRule"]) -> None:
        """`rules` are those of `tangent_rules`, by operator."""
        for node in self.traced.node:
            inside = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
            if node.domain or any(a.type in inside for a in node.attribute):
                raise ExportError(f"the network uses {node.domain or 'ONNX'} {node.op_type}, which cannot be exported.")
            moving = any(name in self.tangent for name in node.input) and node.op_type not in STILL
            if moving and node.op_type not in rules:
                raise ExportError(
                    f"the network uses the operator {node.op_type}, for which no derivative is known here, so its "
                    "linearised predictive cannot be exported. Choose weights behind it (select last-layer)."
                )
            self._copy(node, indices=moving and node.op_type == "MaxPool")
            if moving:
                tangents = rules[node.op_type](self, node)
                every: Sequence[Tangent] = tangents if isinstance(tangents, list) else [tangents]
                self.tangent |= {n: t for n, t in zip(node.output, every, strict=False) if n and t is not None}

    def _copy(self, node: onnx.NodeProto, indices: bool) -> None:
        copied = copy_of(node)
        for i, name in enumerate(node.input):
            copied.input[i] = self.value[name] if name else ""
        for i, name in enumerate(node.output):
            self.value[name] = copied.output[i] = self.g.name() if name else ""
        if indices and len(copied.output) == 1:
            copied.output.append(self.places_of(node))
        self.g.nodes.append(copied)

    # used by the rules

    def places_of(self, node: onnx.NodeProto) -> str:
        """Flat indices of the largest entries of a max pooling."""
        return f"{self.value[node.output[0]]}.places"

    def of(self, name: str) -> str | None:
        """Dense tangent of a value, (K, *shape); None if it does not move."""
        tangent = self.tangent.get(name)
        if isinstance(tangent, Moved):
            tangent = self.tangent[name] = tangent.formed(self.g, self.K)
        return tangent

    def moving(self, name: str) -> str:
        """Dense tangent of a value that is known to move."""
        tangent = self.of(name)
        assert tangent is not None
        return tangent

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise ExportError(f"the shape of the value {name!r} is not known, so no derivative of it can be exported.")
        return self.shapes[name]

    def numbers(self, name: str) -> Array:
        """The values of a constant input of an operator."""
        if name not in self.known:
            raise ExportError(
                f"the value {name!r} decides a shape, and is no constant: its network cannot be exported."
            )
        return self.known[name]

    def fit(self, t: str, name: str, out: str) -> str:
        """The tangent of `name`, broadcast to the shape of `out`."""
        t = self.lined_up(t, name, len(self.shape(out)))
        alike = self.axes.get(name) == self.axes.get(out) and None not in self.axes.get(name, [None])
        return t if alike else self.g.op("Expand", t, self._stacked(out))

    def lined_up(self, t: str, name: str, rank: int) -> str:
        """The tangent with axes of length 1 after K, as broadcasting to this rank needs."""
        more = rank - len(self.shape(name))
        return self.g.op("Unsqueeze", t, self.g.constant(list(range(1, more + 1)))) if more else t

    def unfolded(self, t: str, out: str) -> str:
        """The tangent reshaped to (K, *shape of `out`)."""
        shape = self.shape(out)
        if shape.count(-1) < 2:
            return self.g.reshape(t, (self.K, *shape))
        return self.g.op("Reshape", t, self._stacked(out))

    def nothing(self, name: str) -> str:
        return self.g.op("Expand", self.g.constant(0.0), self._stacked(name))

    def _stacked(self, name: str) -> str:
        return self.g.op("Concat", self.g.constant([self.K]), self.g.op("Shape", self.value[name]), axis=0)

    def folded(self, t: str, name: str) -> str:
        """(K, B, ...) -> (K·B, ...)"""
        return self.g.reshape(t, (-1, *self.shape(name)[1:]))

    def sum(self, *parts: str | None) -> str | None:
        moving = [part for part in parts if part is not None]
        total = moving[0] if moving else None
        for part in moving[1:]:
            total = self.g.add(total, part)  # type: ignore[arg-type]  # the first is there if the second is
        return total


def _axes_of(value: onnx.ValueInfoProto) -> list[int | str | None]:
    """Lengths or names of the axes; None where not known."""
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


TangentRule = Callable[[Forward, onnx.NodeProto], Tangent | list[Tangent]]
