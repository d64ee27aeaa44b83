"""Features in a graph: finds them in the traced network, and computes their distance to a feature bank."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import EXACT, OURS, Array, Graph, layer_of
from dubito.models.network.network import BayesianNetwork


def features_in(traced: onnx.GraphProto, network: BayesianNetwork) -> str:
    """Name of the traced value that is the input of the bank's layer."""
    assert network.feature_bank is not None
    layer = network.feature_bank.entry.layer
    for node in traced.node:
        if node.domain == OURS and node.op_type == "Layer" and layer_of(node) == layer:
            return str(node.input[0])
    # a plain layer is a product with its weights, which may be transposed first
    weights = {v.name for v in (*traced.initializer, *traced.input) if v.name.endswith(f"{layer}.weight")}
    for node in traced.node:
        if node.op_type == "Transpose" and node.input[0] in weights:
            weights.add(node.output[0])
        elif node.op_type in ("Gemm", "MatMul") and len(weights & set(node.input)) == 1:
            return str(node.input[0])
    raise ExportError(
        f"the OOD measure is knn, and the exported network does not show the features before layer {layer!r}. "
        "Calibrate it by another measure, such as --measure energy, and export that."
    )


def nearest(g: Graph, z: str, levels: NDArray[np.int8], scale: Array) -> str:
    """Distances (rows,) of unit features z (rows, d) to the nearest of the points levels · scale (N, d)."""
    points = g.mul(g.op("Cast", g.keep(levels), to=TensorProto.FLOAT), g.keep(scale.astype(np.float32)))
    lengths = ((levels.astype(np.float64) * scale) ** 2).sum(-1)
    products = g.op("MatMul", z, g.op("Transpose", points))
    g.nodes[-1].name = f"{EXACT}{products}"  # not in int8: a small distance is a difference of large products
    squares = g.add(g.mul(products, g.constant(-2.0)), g.keep(lengths.astype(np.float32)))
    own = g.op("ReduceSum", g.mul(z, z), g.constant([-1]), keepdims=0)
    least = g.add(g.op("ReduceMin", squares, g.constant([-1]), keepdims=0), own)
    return g.op("Sqrt", g.op("Relu", least))
