"""Compares an exported file with its artifact: outputs with the same normals, size, latency, quality on data."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from dubito.deploy.edge.data import LabelledData
from dubito.deploy.edge.errors import OnnxError
from dubito.deploy.edge.inducing import with_law
from dubito.deploy.edge.linear import NOISE
from dubito.deploy.edge.runtime import ROWS, EdgeError, EdgeModel, facts_of
from dubito.deploy.edge.writers import HIERARCHY, normals_in_order
from dubito.models.errors import InputError
from dubito.models.images import prepare_array
from dubito.models.network.layers import takes_ids
from dubito.models.network.network import Draws
from dubito.models.predictions.answers import columns_of, rule_for
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Job, add_up, evaluating, tally_for

INPUTS, SEED, ROUNDS = 4, 7, 9
BINS = 15  # of the calibration error


@dataclass(frozen=True)
class OutputDifference:
    largest: float  # over all outputs, in the outputs' own units
    by_output: dict[str, float]


def check(path: Path, model: Model, artifact_bytes: int, data: LabelledData | None = None) -> dict[str, Any]:
    """The report of `dubito check-onnx`."""
    try:
        return _checked(path, model, artifact_bytes, data)
    except EdgeError as error:  # the runtime file cannot import our error classes
        raise OnnxError(str(error)) from None


def _checked(path: Path, model: Model, artifact_bytes: int, data: LabelledData | None) -> dict[str, Any]:
    edge = EdgeModel(path)
    stated = edge.facts.get("provenance", {}).get("artifact_sha256")
    if stated != model.manifest.sha256:
        raise OnnxError(
            f"{path} was exported from another artifact: it names SHA-256 {str(stated)[:12]}…, and the file given has "
            f"{model.manifest.sha256[:12]}…. Export that file again, or check against the one it came from."
        )
    pixels = _inputs(model, edge, data)
    difference = parity(path, model, pixels)
    size = path.stat().st_size
    report: dict[str, Any] = {
        "file": str(path),
        "precision": edge.facts["precision"],
        "activations": edge.facts.get("activations", "float32"),
        "samples": edge.samples,
        "bytes": size,
        "artifact_bytes": artifact_bytes,
        "max_difference": difference.largest,
        "differences": difference.by_output,
        "latency_ms": {str(B): _latency(edge, np.resize(pixels, (B, *pixels.shape[1:]))) for B in (1, 8)},
    }
    if data is not None:
        report["data"] = quality(edge, model, data)
    return report


def _inputs(model: Model, edge: EdgeModel, data: LabelledData | None) -> NDArray[Any]:
    """A few inputs for the graph: from the data, else random pixels or normals."""
    declared, image = edge.facts["input"], edge.facts["input"]["takes"] == "image"
    if data is not None:
        return data.graph_inputs(model, image)[:INPUTS]
    rng = np.random.default_rng(SEED)
    if image:
        height, width = declared["shape"][1:]
        return rng.integers(0, 256, (INPUTS, height, width, declared["shape"][0]), dtype=np.uint8)
    if takes_ids(model.network):
        return rng.integers(0, 2, (INPUTS, *declared["shape"]))  # there are two at least
    return rng.standard_normal((INPUTS, *declared["shape"])).astype(np.float32)


def _tensors(model: Model, x: NDArray[Any]) -> Tensor:
    """Inputs of the graph as inputs of the torch model."""
    if x.dtype != np.uint8:
        return torch.from_numpy(x)
    assert model.card.input is not None
    return prepare_array(x, model.card.input)


def parity(path: Path, model: Model, x: NDArray[Any]) -> OutputDifference:
    """Largest differences between graph and torch when torch gets the normals that the graph drew."""
    graph = onnx.load(path)
    facts = facts_of(path, {p.key: p.value for p in graph.metadata_props})
    network = with_law(model.network, facts["noise"])
    factors, K = network.factors(), facts["samples"]
    drawn = [name for node in graph.graph.node for name in node.output if ":" in name]
    for name in drawn:
        kind = TensorProto.DOUBLE if name == "member:keys" else TensorProto.FLOAT
        graph.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x}
    if facts["random"]:
        feed["seed"] = np.array(SEED, np.int64)
    names = [output.name for output in session.get_outputs()]
    outputs_of: dict[str, NDArray[Any]] = dict(zip(names, session.run(None, feed), strict=True))
    draws = Draws(K, None, 0)
    if facts["random"]:
        parts = {HIERARCHY: factors.hierarchy} if factors.hierarchy is not None else {}
        noise = [normals_in_order(f, K, name, outputs_of) for name, f in {**parts, **factors.layers}.items()]
        if network.joint is not None:
            noise.append(torch.from_numpy(outputs_of[NOISE]))
        keys = torch.from_numpy(outputs_of["member:keys"]) if "member:keys" in outputs_of else None
        draws = Draws(K, torch.cat(noise, 1), 0, keys=keys)
    with evaluating(network), torch.inference_mode():
        job = Job.of(network, factors, _tensors(model, x), 0, plan={}, max_rows=ROWS, temperature=model.temperature)
        tally = tally_for(network)
        add_up(tally, job.outputs(draws), factors.read)
        summary = tally.summary()
    rule = rule_for(model.card.calibration, K if facts["random"] else 1, facts.get("group"))
    expected = columns_of(summary, [rule] * len(x))
    return _difference(outputs_of, expected)


def _difference(outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> OutputDifference:
    by_output = {
        name: float(np.abs(outputs[name].astype(np.float64) - expected[name].astype(np.float64)).max())
        for name in expected
        if name in outputs and outputs[name].dtype != np.bool_
    }
    return OutputDifference(max(by_output.values()), by_output)


def _latency(edge: EdgeModel, x: NDArray[Any]) -> float:
    """Median milliseconds of a batch."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        edge.predict(x, SEED)
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times[1:]), 3)


def quality(edge: EdgeModel, model: Model, data: LabelledData) -> dict[str, Any]:
    """Quality of the file and of the artifact on labelled data, each with its own draws, and how often they agree."""
    ours = edge.predict(data.graph_inputs(model, edge.facts["input"]["takes"] == "image"), SEED)
    prediction = model.predict(data.tensors(model), edge.samples, SEED)
    if "probabilities" in ours and data.y.max() >= (known := ours["probabilities"].shape[1]):
        raise InputError(
            f"classes run from {int(data.y.min())} to {int(data.y.max())}; this model knows 0 to {known - 1}. "
            "Bring data with the model's classes."
        )
    rule = rule_for(model.card.calibration, prediction.samples, edge.facts.get("group"))
    theirs = columns_of(prediction.summary, [rule] * len(data.y))
    report: dict[str, Any] = {"inputs": len(data.y)}
    for name, columns in (("onnx", ours), ("artifact", theirs)):
        if "probabilities" in columns:
            p = columns["probabilities"]
            report[name] = {"accuracy": float((p.argmax(1) == data.y).mean()), "ece": _ece(p, data.y)}
        else:
            error = columns["mean"] - data.y.reshape(columns["mean"].shape)
            report[name] = {"rmse": float(np.sqrt((error**2).mean()))}
    if "probabilities" in ours:
        report["class_agreement"] = float((ours["probabilities"].argmax(1) == theirs["probabilities"].argmax(1)).mean())
    if "prediction_set" in ours and "prediction_set" in theirs:
        report["set_agreement"] = float((ours["prediction_set"] == theirs["prediction_set"]).all(1).mean())
        for name, columns in (("onnx", ours), ("artifact", theirs)):
            fits = columns["prediction_set"]
            report[name] |= {
                "coverage": float((fits & (np.arange(fits.shape[1]) == data.y[:, None])).any(1).mean()),
                "set_size": float(fits.sum(1).mean()),
            }
    if "ood" in ours and "ood" in theirs:
        report["ood_agreement"] = float((ours["ood"] == theirs["ood"]).mean())
    return report


def _ece(p: NDArray[Any], y: NDArray[Any]) -> float:
    """Expected calibration error."""
    sure, right = p.max(1), p.argmax(1) == y
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(sure[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())]
    return float(sum(gaps))
