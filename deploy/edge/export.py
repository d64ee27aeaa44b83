"""Exports an artifact as an ONNX graph: pictures or tensors in, predictions with their uncertainty out."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dubito.deploy.edge.apply import LayerInput, apply, by_channel
from dubito.deploy.edge.blocks import BlockDraws
from dubito.deploy.edge.draws import DenseDraws, Drawn, Sampler, array
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.features import features_in, nearest
from dubito.deploy.edge.graph import OPSET, OURS, Array, Graph, NumberType, copy_of, layer_of, shape_of
from dubito.deploy.edge.inducing import ExportedLaw, laws, with_law
from dubito.deploy.edge.linear import linear_samples, trace_open
from dubito.deploy.edge.quantise import quantised
from dubito.deploy.edge.runtime import ROWS
from dubito.deploy.edge.summary import classified, regressed
from dubito.deploy.edge.trace import affines_of, refuse_copies, trace
from dubito.deploy.edge.writers import V_of_all, draw, refuse
from dubito.models.disk import write_by
from dubito.models.errors import first_line
from dubito.models.manifest import Fitting, Image, Interpolation
from dubito.models.network.geometry import Conv
from dubito.models.network.layers import takes_ids
from dubito.models.network.network import BayesianNetwork, NetworkFactors
from dubito.models.network.normalisation import fold_batchnorm
from dubito.models.predictions.answers import Rule, rule_for
from dubito.models.predictions.model import Model

CALIBRATED = 256  # inputs from which the ranges of activations are found
KEY = "dubito"  # of the metadata, which is a JSON object

InputKind = Literal["tensor", "image"]


@dataclass(frozen=True)
class ExportedModel:
    model: onnx.ModelProto
    skeleton: onnx.ModelProto  # the traced network
    samples: int  # K; 1 for a model without draws
    formed: tuple[str, ...]  # layers whose weight matrices are formed
    changed: tuple[str, ...]  # layers of the exact law that the graph draws by the factored law
    products: int = 0  # number of products with int8 activations

    @property
    def rounded(self) -> bool:
        """Whether any tensor is stored in less than float32."""
        narrow = (TensorProto.INT8, TensorProto.FLOAT16)
        return any(tensor.data_type in narrow for tensor in self.model.graph.initializer)


def export(
    model: Model,
    *,
    samples: int = 20,
    precision: NumberType = "fp32",
    law: ExportedLaw = "factored",
    take: InputKind = "tensor",
    skeleton: onnx.ModelProto | None = None,
    data: NDArray[Any] | None = None,
    group: str | None = None,
) -> ExportedModel:
    """Export a model.

    `law` of the λ-noise: factored in every layer, or the artifact's own, whose `exact` layers form W. `data` are inputs
    of the graph, which give the ranges for int8 activations. `group` of the calibration, whose quantile the file gets.
    `skeleton` of an earlier export of the same network saves tracing, which takes most of the time.
    """
    declared = model.card.input
    if declared is None:
        raise ExportError("this artifact does not say what its inputs look like; save it with a card that does.")
    if take == "image" and declared.image is None:
        raise ExportError(
            f"this model takes tensors of shape {declared.shape}, not pictures: export it without --image."
        )
    if data is not None and precision != "int8":
        raise ExportError(f"data give the ranges of activations in int8; the precision is {precision}.")
    if samples < 1:
        raise ExportError(f"samples is {samples}; expected 1 or more.")
    refuse(model.network.layers)
    refuse_copies(model.network.net)
    network = with_law(model.network, law)
    factors = network.factors()
    K = samples if factors.random else 1
    if K > 1 and network.joint is None:
        _check_apart(network, factors, declared.shape)
    folded = fold_batchnorm(network)
    if skeleton is None:
        skeleton = trace(folded, declared.shape) if network.joint is None else trace_open(network.net, declared.shape)
    writer = _Writer(skeleton, folded, factors, K, precision)
    if take == "image":
        assert declared.image is not None
        x = writer.pixels(declared.shape, declared.image)
        inputs = [
            helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", "height", "width", declared.shape[0]])
        ]
    else:
        x = "input"
        kind = skeleton.graph.input[0].type.tensor_type.elem_type
        inputs = [helper.make_tensor_value_info("input", kind, ["batch", *declared.shape])]
    if factors.random:
        inputs.append(helper.make_tensor_value_info("seed", TensorProto.INT64, []))
    rule = rule_for(model.card.calibration, K if factors.random else 1, group)
    outputs = writer.write(x, model, rule)
    graph, products = _model(writer, inputs, outputs), 0
    if data is not None:
        graph, products = quantised(graph, data[:CALIBRATED], max(1, ROWS // K))
    activations = "int8" if products else "float32"
    facts = _facts(model, writer, rule, precision, law, take) | {"activations": activations, "group": group}
    helper.set_model_props(graph, {KEY: json.dumps(facts)})
    changed = tuple(name for name, law in laws(model.network).items() if law != laws(network)[name])
    return ExportedModel(_checked(graph), skeleton, K, tuple(writer.formed), changed, products)


def save(exported: ExportedModel, path: Path) -> int:
    """Write the file atomically; returns its size in bytes."""
    content = exported.model.SerializeToString()
    try:
        write_by(path.with_name(f".{path.name}.part"), path, content, mode="wb")
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}.") from None
    return len(content)


class _Writer:
    """Writes the graph: copies the plain nodes of the traced network, and expands the nodes of our domain."""

    def __init__(
        self, skeleton: onnx.ModelProto, folded: BayesianNetwork, factors: NetworkFactors, K: int, precision: NumberType
    ) -> None:
        self.traced, self.network, self.factors, self.K = skeleton.graph, folded, factors, K
        self.layers, self.affines = folded.layers, affines_of(folded)
        self.g = Graph(precision)
        self.formed: list[str] = []
        self.s = Sampler(self.g, K, "seed" if factors.random else None)
        graph = self.traced
        self.shapes = {v.name: shape_of(v) for v in [*graph.input, *graph.value_info, *graph.output]}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.calls = Counter(layer_of(node) for node in graph.node if node.domain == OURS)
        self.value: dict[str, str] = {}  # name in the graph of each traced value
        self.once: set[str] = set()  # traced values that all draws share: they have B rows
        self.fixed: set[str] = set()  # traced values that do not depend on the input
        self.skip: set[str] = set()
        self.operands: dict[str, Drawn] = {}

    def pixels(self, shape: tuple[int, ...], image: Image) -> str:
        """The network's input from uint8 pictures (B, height, width, channels) of any size."""
        g, fitting = self.g, image.fitting or Fitting()
        x = g.op("Cast", g.op("Transpose", "image", perm=[0, 3, 1, 2]), to=TensorProto.FLOAT)
        shown = g.op("Shape", x)
        height, width = (g.part(shown, 0, axis, axis + 1) for axis in (2, 3))
        rows = self._resized(height, width, shape[1], fitting)
        x = g.matmul(g.matmul(rows, x), g.op("Transpose", self._resized(width, height, shape[2], fitting)))
        if fitting.interpolation == "bicubic":
            x = g.op("Clip", x, g.constant(0.0), g.constant(255.0))
        of_channel, mean, std = (-1, 1, 1), np.array(image.mean), np.array(image.std)
        scale = 1 / (255 * std).reshape(of_channel)
        return g.add(g.mul(x, g.constant(scale)), g.constant((-mean / std).reshape(of_channel)))

    def _resized(self, side: str, other: str, n: int, fitting: Fitting) -> str:
        """Matrix (n, side) that resizes and cuts out: a filter as wide as the larger of a new and an old pixel.

        Runtimes differ in their Resize operator when shrinking; this is the filter of Pillow and torch.
        """
        g = self.g
        length, first = g.op("Cast", side, to=TensorProto.FLOAT), g.constant(np.arange(n)[:, None] + 0.5)
        new = g.constant(float(n))
        if fitting.resize is not None:  # `Fitting.box`
            shorter = g.constant(fitting.resize)
            new = g.op("Max", shorter, g.op("Div", g.op("Mul", shorter, side), other))
            new = g.op("Cast", new, to=TensorProto.FLOAT)
            cut = g.op("Round", g.mul(g.op("Sub", new, g.constant(float(n))), g.constant(0.5)))
            first = g.add(first, cut)
        scale = g.op("Div", length, new)
        reach = g.op("Max", scale, g.constant(1.0))
        centres = g.mul(first, scale)
        zero, one = g.constant(0), g.constant(1)
        places = g.op("Cast", g.op("Range", zero, g.op("Squeeze", side), one), to=TensorProto.FLOAT)
        distance = g.op("Abs", g.op("Sub", g.add(places, g.constant(0.5)), centres))
        weights = self._filter(g.op("Div", distance, reach), fitting.interpolation)
        return g.op("Div", weights, g.op("ReduceSum", weights, g.constant([1])))

    def _filter(self, x: str, interpolation: Interpolation) -> str:
        """Weight of a pixel at a distance x from the centre: a triangle, or Keys' cubic with a = −1/2."""
        g = self.g
        if interpolation == "bilinear":
            return g.op("Relu", g.op("Sub", g.constant(1.0), x))

        def cubic(*coefficients: float) -> str:
            value = g.constant(coefficients[0])
            for c in coefficients[1:]:
                value = g.add(g.mul(value, x), g.constant(c))
            return value

        far = g.op("Where", g.op("Less", x, g.constant(2.0)), cubic(-0.5, 2.5, -4.0, 2.0), g.constant(0.0))
        return g.op("Where", g.op("Less", x, g.constant(1.0)), cubic(1.5, -2.5, 0.0, 1.0), far)

    def write(self, x: str, model: Model, rule: Rule) -> dict[str, int]:
        (logits,) = (o.name for o in self.traced.output)
        if len(self.shapes[logits]) != 2:
            raise ExportError(
                f"the network answers with shape {self.shapes[logits]}; expected (rows, classes or values)."
            )
        features = features_in(self.traced, self.network) if rule.ood is not None and rule.ood[0] == "knn" else None
        distance = None
        if self.network.joint is None:
            out = self._samples(x, logits)
            if features is not None:
                distance = self._distance(self.value[features], features in self.once)
        else:
            out, value = linear_samples(self.s, self.traced, self.network.net, self.factors, x)
            if features is not None:
                distance = self._distance(value[features], shared=True)
        if self.s.noise is not None:
            self.s.noise.finish()
        self._rotations()
        if self.network.task.kind == "classification":
            return classified(self.g, out, self.shapes[logits][1], model.temperature, rule, distance)
        return regressed(self.g, out, self.network, rule)

    def _samples(self, x: str, logits: str) -> str:
        """Outputs of all draws, (K, B, C)."""
        graph, g = self.traced, self.g
        self.s.start_members(self.factors.members)
        V = self._hierarchy()
        for tensor in graph.initializer:
            stored = numpy_helper.to_array(tensor)
            floats = tensor.data_type == TensorProto.FLOAT
            self.value[tensor.name] = g.weights(stored) if floats else g.keep(stored)
            self.fixed.add(tensor.name)
        # a Shape node must see K·B rows, so the input cannot have B rows if there is one
        apart = self.K == 1 or not any(node.op_type == "Shape" for node in graph.node)
        self.value["x"] = x if apart else self._tiled(x, len(self.shapes["x"]))
        if apart:
            self.once.add("x")
        for node in graph.node:
            if node.output[0] not in self.skip:
                self._node(node, V)
        out = self.value[logits] if logits not in self.once or self.K == 1 else self._tiled(self.value[logits], 2)
        return g.reshape(out, (self.K, -1, self.shapes[logits][1]))

    def _distance(self, features: str, shared: bool) -> str:
        """Distance of the features to the nearest point of the bank, mean over draws: (B,)."""
        g, bank = self.g, self.network.feature_bank
        assert bank is not None
        length = g.op("ReduceL2", features, g.constant([-1]), keepdims=1)
        z = g.op("Div", features, g.op("Max", length, g.constant(1e-12)))
        E = bank.entry.members
        scales = array(bank.scale).reshape(E, -1, 1)
        each = [nearest(g, z, own, scale) for own, scale in zip(bank.levels.cpu().numpy(), scales, strict=True)]
        if shared and E == 1:
            return each[0]
        if shared:
            each = [self._tiled(one, 1) for one in each]
        distances = each[0] if E == 1 else self._chosen(each, ())
        return g.op("ReduceMean", g.reshape(distances, (self.K, -1)), g.constant([0]), keepdims=0)

    def _rotations(self) -> None:
        """Write the rotations of all layers, and move them to the front of the graph."""
        before = len(self.g.nodes)
        self.s.rotations.write(self.g, self.s.rotated)
        self.g.nodes[:] = self.g.nodes[before:] + self.g.nodes[:before]

    def _hierarchy(self) -> dict[str, str]:
        if self.network.hierarchy is None:
            return {}
        assert self.factors.hierarchy is not None
        V, start, by_layer = V_of_all(self.s, self.network.hierarchy, self.factors.hierarchy), 0, {}
        for name, layer in self.network.layers.items():
            if (shape := layer.entry.from_above) is not None:
                by_layer[name], start = self.g.part(V, 2, start, start + shape[1]), start + shape[1]
        return by_layer

    def _node(self, node: onnx.NodeProto, V: Mapping[str, str]) -> None:
        if node.domain != OURS:
            return self._plain(node)
        (out,) = node.output
        match node.op_type:
            case "Layer":
                name = layer_of(node)
                layer = self.layers[name]
                follower = self._affine_behind(out, name)
                scale, shift = (np.ones(layer.geometry.shape[0]), None) if follower is None else self._affine(follower)
                end = out if follower is None else follower.output[0]
                operand = self._operand(name, V, scale)
                before, after = self.shapes[node.input[0]][1:], self.shapes[out][1:]
                place = LayerInput(self.value[node.input[0]], node.input[0] in self.once, before, after)
                self.value[end] = apply(self.g, self.K, layer.geometry, place, operand, shift)
                if self.K == 1 and place.shared:
                    self.once.add(end)
                self.skip.add(end)
            case "Affine":
                self._affine_alone(node)
            case "Choose":
                rows = [self._all_rows(i) for i in node.input]
                self.value[out] = self._chosen(rows, self.shapes[out][1:])
        return None

    def _operand(self, name: str, V: Mapping[str, str], scale: Array) -> Drawn:
        """Draws of a layer, made once even if the network calls the layer several times."""
        if name not in self.operands:
            layer, factors = self.layers[name], self.factors.layers[name]
            operand = self.operands[name] = draw(self.s, name, layer, factors, scale, V.get(name))
            if isinstance(operand, DenseDraws) or (isinstance(operand, BlockDraws) and layer.geometry.groups > 1):
                self.formed.append(name)
        return self.operands[name]

    def _affine_behind(self, value: str, name: str) -> onnx.NodeProto | None:
        """The folded BatchNorm that is the only reader of a layer's outputs, if it can be merged into the layer."""
        readers = self.readers.get(value, [])
        if len(readers) != 1 or readers[0].domain != OURS or readers[0].op_type != "Affine":
            return None
        by_channel = isinstance(self.layers[name].geometry, Conv) or len(self.shapes[value]) == 2
        once = self.calls[name] == 1 and len(self.affines[layer_of(readers[0])]) == 1
        return readers[0] if by_channel and once else None

    def _affine(self, node: onnx.NodeProto) -> tuple[Array, Array]:
        """Scale and shift of a folded BatchNorm."""
        (one,) = self.affines[layer_of(node)]
        return array(one.scale), array(one.shift)

    def _affine_alone(self, node: onnx.NodeProto) -> None:
        (value,), (out,) = node.input, node.output
        each, sizes = self.affines[layer_of(node)], self.shapes[value][1:]
        if len(each) == 1:
            scale, shift = (self.g.constant(by_channel(v, len(sizes))) for v in self._affine(node))
            self.value[out] = self.g.add(self.g.mul(self.value[value], scale), shift)
            self._follow(node, value in self.once)
            return
        g, member = self.g, self.s.member(len(each))
        rows = g.reshape(self._all_rows(value), (self.K, -1, *sizes))
        shape = (self.K, 1, sizes[0], *[1] * (len(sizes) - 1))
        scale, shift = (
            g.reshape(g.op("Gather", g.weights(np.stack([array(getattr(a, part)) for a in each])), member), shape)
            for part in ("scale", "shift")
        )
        self.value[out] = g.reshape(g.add(g.mul(rows, scale), shift), (-1, *sizes))

    def _chosen(self, rows: list[str], sizes: tuple[int, ...]) -> str:
        """For each draw, the rows of its member's copy."""
        g, member = self.g, self.s.member(len(rows))
        chosen = g.reshape(rows[0], (self.K, -1, *sizes))
        for i, copied in enumerate(rows[1:], 1):
            mine = g.reshape(g.op("Equal", member, g.constant(i)), (self.K, *[1] * (len(sizes) + 1)))
            chosen = g.op("Where", mine, g.reshape(copied, (self.K, -1, *sizes)), chosen)
        return g.reshape(chosen, (-1, *sizes))

    def _plain(self, node: onnx.NodeProto) -> None:
        if node.domain or any(
            a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute
        ):
            raise ExportError(
                f"the network uses {node.domain or 'ONNX'} {node.op_type}, which this export cannot fold."
            )
        given = [name for name in node.input if name]
        if all(name in self.fixed for name in given):
            self.fixed.update(node.output)
            once = False
        else:
            once = all(name in self.fixed or name in self.once for name in given)
        copied = copy_of(node)
        for i, name in enumerate(node.input):
            if name:
                copied.input[i] = self.value[name] if once or name in self.fixed else self._all_rows(name)
        for i, name in enumerate(node.output):
            if name:
                self.value[name] = copied.output[i] = self.g.name()
        self.g.nodes.append(copied)
        self._follow(node, once)

    def _follow(self, node: onnx.NodeProto, once: bool) -> None:
        if once:
            self.once.update(node.output)

    def _all_rows(self, name: str) -> str:
        """A value with K·B rows, repeated if all draws share it."""
        if name not in self.once or self.K == 1:
            return self.value[name]
        return self._tiled(self.value[name], len(self.shapes[name]))

    def _tiled(self, value: str, rank: int) -> str:
        return self.g.op("Tile", value, self.g.constant([self.K] + [1] * (rank - 1)))


def _model(writer: _Writer, inputs: list[onnx.ValueInfoProto], outputs: dict[str, int]) -> onnx.ModelProto:
    g = writer.g
    shapes: dict[str, list[str | int]] = {
        "probabilities": ["batch", "classes"],
        "prediction_set": ["batch", "classes"],
        "interval": ["batch", "values", 2],
    }
    values = ("mean", "epistemic_variance", "aleatoric_variance")
    shapes |= {name: ["batch", "values"] for name in values}
    infos = [helper.make_tensor_value_info(name, kind, shapes.get(name, ["batch"])) for name, kind in outputs.items()]
    graph = helper.make_graph(g.nodes, "dubito", inputs, infos, g.initializers)
    imports = [helper.make_opsetid("", OPSET)]
    if g.functions:
        imports.append(helper.make_opsetid(OURS, 1))
    return helper.make_model(
        graph, opset_imports=imports, ir_version=10, producer_name="dubito", functions=list(g.functions.values())
    )


def _facts(
    model: Model, writer: _Writer, rule: Rule, precision: NumberType, law: ExportedLaw, take: InputKind
) -> dict[str, Any]:
    """Metadata of the file, as JSON."""
    card, K = model.card, writer.K
    assert card.input is not None
    image = card.input.image
    fitting = None if image is None or image.fitting is None else image.fitting.model_dump(mode="json")
    provenance = card.provenance
    return {
        "format": 1 if fitting is None else 2,  # readers of format 1 would neither turn nor cut pictures
        "task": model.manifest.task.kind,
        "samples": K,
        "random": writer.factors.random,
        "precision": precision,
        "noise": law,
        "input": {
            "takes": take,
            "shape": list(card.input.shape),
            "mean": None if image is None else list(image.mean),
            "std": None if image is None else list(image.std),
            **({} if fitting is None else {"fitting": fitting}),
        },
        "labels": None if card.labels is None else list(card.labels),
        "columns": None if card.input.columns is None else list(card.input.columns),
        "targets": None if card.targets is None else list(card.targets),
        "temperature": model.temperature,
        "ood": None if rule.ood is None else dict(zip(("measure", "samples", "threshold"), rule.ood, strict=True)),
        "coverage": None if card.calibration is None else card.calibration.coverage,
        "quantile": rule.quantile,
        "quantiles": None if rule.by_class is None else list(rule.by_class),
        "sets": None if rule.sets is None else rule.sets.model_dump(mode="json"),
        "architecture": model.manifest.architecture.name,
        "methods": model.manifest.methods,
        "predictive": "sampling",  # also if the artifact's default is probit (subnetwork Laplace)
        "metrics": dict(card.metrics),
        "provenance": {
            "artifact_sha256": model.manifest.sha256,
            "data_hash": provenance.data_hash,
            "seed": provenance.seed,
            "versions": dict(provenance.versions),
        },
    }


def _check_apart(network: BayesianNetwork, factors: NetworkFactors, shape: tuple[int, ...]) -> None:
    """All draws of a graph share one pass."""
    ids = torch.arange(math.prod(shape)).remainder(2).reshape(1, *shape)  # there are two at least
    numbers = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    if network.keeps_apart(ids if takes_ids(network.net) else numbers, factors) is False:
        raise ExportError(
            "the network mixes rows of the batch, or gives a layer rows of its own, so its draws cannot share a graph. "
            "Leave those layers as they are (layers={'name': 'deterministic'}), or serve it, which draws one by one."
        )


def _checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, if it is valid ONNX and shape inference agrees."""
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(
            f"the network's graph is not valid ONNX: {first_line(error)}. Its layers may compute in several types of "
            "numbers, or with shapes that hang on the number of inputs."
        ) from None
    return model
