"""Outputs of a graph: the summary of K draws, OOD flags and prediction sets of the calibration."""

import numpy as np
from onnx import TensorProto

from dubito.deploy.edge.draws import array
from dubito.deploy.edge.graph import Graph
from dubito.models.manifest import Sets
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.answers import Rule
from dubito.models.predictions.sets import penalties
from dubito.models.predictions.uncertainty import LOG_RANGE

TINY = float(np.finfo(np.float32).tiny)


def classified(
    g: Graph, logits: str, C: int, temperature: float, rule: Rule, distance: str | None = None
) -> dict[str, int]:
    """Outputs by name, with their types, from logits (K, B, C) and distances (B,) of features to the bank."""
    if temperature != 1:
        logits = g.op("Div", logits, g.constant(temperature))
    log_p = g.op("LogSoftmax", logits, axis=-1)
    each = g.op("Exp", log_p)
    p = g.op("ReduceMean", each, g.constant([0]), keepdims=0, out="probabilities")
    g.op("ReduceMean", _entropy(g, each, log_p), g.constant([0]), keepdims=0, out="expected_entropy")
    total = _entropy(g, p, g.op("Log", g.op("Max", p, g.constant(TINY))))
    g.op("Identity", total, out="entropy")
    g.op("Relu", g.op("Sub", total, "expected_entropy"), out="mutual_information")
    names = ("probabilities", "entropy", "expected_entropy", "mutual_information")
    outputs: dict[str, int] = dict.fromkeys(names, TensorProto.FLOAT)
    if rule.ood is not None:
        measure, _, threshold = rule.ood
        score: str = measure
        if measure == "max_probability":
            score = g.op("Sub", g.constant(1.0), g.op("ReduceMax", p, g.constant([-1]), keepdims=0))
        elif measure == "energy":
            each = g.op("ReduceLogSumExp", logits, g.constant([-1]), keepdims=0)
            score = g.op("Neg", g.op("ReduceMean", each, g.constant([0]), keepdims=0))
        elif measure == "knn":
            assert distance is not None
            score = distance
        outputs |= _ood(g, score, threshold)
    if rule.quantile is not None:
        outputs |= prediction_sets(g, p, C, rule)
    return outputs


def prediction_sets(g: Graph, p: str, C: int, rule: Rule) -> dict[str, int]:
    limits = np.array(rule.quantile if rule.by_class is None else rule.by_class, np.float64)
    g.op("LessOrEqual", _class_scores(g, p, C, rule.sets), g.constant(limits, np.float64), out="prediction_set")
    return {"prediction_set": TensorProto.BOOL}


def _class_scores(g: Graph, p: str, C: int, sets: Sets | None) -> str:
    """Scores of classes (B, C) in float64, as by `dubito.models.predictions.sets.class_scores`."""
    off = g.op("Sub", g.constant(1, np.float64), g.op("Cast", p, to=TensorProto.DOUBLE))
    if sets is None:
        return off
    # ties keep their order, as in a stable sort
    values, order = g.ops("TopK", p, g.constant([C]), outputs=[g.name(), g.name()], axis=-1)
    if sets.score == "probability":
        is_first = g.op("Equal", g.constant(np.arange(C)), g.part(order, 1, 0, 1))
        return g.op("Where", is_first, g.constant(0, np.float64), off)
    wide = g.op("Cast", values, to=TensorProto.DOUBLE)
    before = g.op("CumSum", wide, g.constant(1), exclusive=1)
    if sets.lam:
        before = g.add(before, g.constant(penalties(sets, C), np.float64))
    return g.op("ScatterElements", off, order, before, axis=1)  # back to the order of classes


def _entropy(g: Graph, p: str, log_p: str) -> str:
    return g.op("Neg", g.op("ReduceSum", g.mul(p, log_p), g.constant([-1]), keepdims=0))


def _ood(g: Graph, score: str, threshold: float) -> dict[str, int]:
    g.op("Identity", score, out="ood_score")
    wide = g.op("Cast", score, to=TensorProto.DOUBLE)
    g.op("Greater", wide, g.constant(threshold, np.float64), out="ood")
    return {"ood_score": TensorProto.FLOAT, "ood": TensorProto.BOOL}


def regressed(g: Graph, means: str, network: BayesianNetwork, rule: Rule) -> dict[str, int]:
    """Outputs by name, with their types, in the targets' own units.

    From means (K, B, D) in the network's units, and D raw log-deviations if the target noise depends on the input.
    """
    assert network.task.kind == "regression"
    assert network.noise is not None
    D = network.task.outputs
    shift, scale = (np.array(v, np.float64) for v in (network.task.shift, network.task.scale))
    noise = np.broadcast_to((array(network.noise()) * scale) ** 2, (D,))
    raw = None
    if network.gain is not None:
        raw, means = g.part(means, 2, D, 2 * D), g.part(means, 2, 0, D)
    centre = g.op("ReduceMean", means, g.constant([0]), keepdims=0)
    spread = g.op("ReduceMean", g.op("Mul", *[g.op("Sub", means, centre)] * 2), g.constant([0]), keepdims=0)
    g.add(g.mul(centre, g.constant(scale)), g.constant(shift))
    g.nodes[-1].output[0] = "mean"
    g.op("Mul", spread, g.constant(scale**2), out="epistemic_variance")
    if raw is None or network.gain is None:
        g.op("Expand", g.constant(noise), g.op("Shape", "mean"), out="aleatoric_variance")
    else:
        bent = g.op("Tanh", g.mul(raw, g.constant(1 / LOG_RANGE)))
        ratio = g.op("Exp", g.mul(bent, g.constant(2 * LOG_RANGE * array(network.gain))))
        mean_ratio = g.op("ReduceMean", ratio, g.constant([0]), keepdims=0)
        g.op("Mul", mean_ratio, g.constant(noise), out="aleatoric_variance")
    names = ("mean", "epistemic_variance", "aleatoric_variance")
    outputs: dict[str, int] = dict.fromkeys(names, TensorProto.FLOAT)
    if rule.ood is not None:
        share = g.op("Div", "epistemic_variance", g.op("Max", "aleatoric_variance", g.constant(TINY)))
        outputs |= _ood(g, g.op("ReduceMean", share, g.constant([-1]), keepdims=0), rule.ood[2])
    if rule.quantile is not None:
        std = g.op("Sqrt", g.add("epistemic_variance", "aleatoric_variance"))
        reach = g.mul(std, g.constant(rule.quantile))
        sides = [g.op("Unsqueeze", g.op(kind, "mean", reach), g.constant([-1])) for kind in ("Sub", "Add")]
        g.op("Concat", *sides, axis=-1, out="interval")
        outputs["interval"] = TensorProto.FLOAT
    return outputs
