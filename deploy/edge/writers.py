"""K draws of a layer inside a graph: one writer for each kind of posterior, or a refusal.

The same formulas as in `dubito.models`, with the same (K, normals) standard normals: with equal normals, graph and
torch give equal outputs.
"""

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.deploy.edge.draws import DenseDraws, Drawn, FactoredDraws, MaskedDraws, Sampler, array, law_draws, scaled
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array
from dubito.deploy.edge.inducing import as_eps, write_inducing
from dubito.deploy.edge.whvi import write_whvi
from dubito.models.network.layers import BayesianLayer
from dubito.models.posteriors.dropout import DropoutFactors
from dubito.models.posteriors.protocol import Factors
from dubito.models.posteriors.weight_space import WeightFactors, WeightSpace

HIERARCHY = "hierarchy"  # name of the hierarchy among the layers


def write_weights(s: Sampler, name: str, q: WeightSpace, f: WeightFactors, scale: Array) -> Drawn:
    W = law_draws(s, f.q_W, q.law, s.normals(f.normals, f"{name}:W"))
    return DenseDraws(scaled(s.graph, W, scale))


def write_dropout(s: Sampler, name: str, q: Any, f: DropoutFactors, scale: Array) -> Drawn:
    g = s.graph
    below = g.op("Less", s.normals(f.normals, f"{name}:z"), g.constant(NormalDist().inv_cdf(1 - f.rate)))
    kept = g.mul(g.op("Cast", below, to=1), g.constant(1 / (1 - f.rate)))
    return MaskedDraws(scaled(g, g.weights(array(f.W)), scale), kept)


WRITERS: Mapping[str, Callable[..., Drawn]] = {  # by the kind of a manifest entry
    "inducing": write_inducing,
    "weights": write_weights,
    "dropout": write_dropout,
    "whvi": write_whvi,
}


def refuse(layers: Mapping[str, BayesianLayer]) -> None:
    """Layers that no writer knows, before anything is traced."""
    for name, layer in layers.items():
        if layer.entry.kind not in WRITERS:
            instead = f" {layer.entry.not_exported}" if layer.entry.not_exported else ""
            raise ExportError(f"layer {name!r}: {layer.entry.method} layers cannot be exported.{instead}")


def draw(s: Sampler, name: str, layer: BayesianLayer, factors: Factors, scale: Array, V: str | None = None) -> Drawn:
    """K draws of a layer, its outputs scaled by `scale` (d_out,); V, if a hierarchy has drawn it."""
    from_above = {} if V is None else {"V": V}
    return WRITERS[layer.entry.kind](s, name, layer.posterior, factors, scale, **from_above)


def V_of_all(s: Sampler, above: BayesianLayer, factors: Factors) -> str:
    """V of all layers, drawn by a hierarchy: (K, M_out, Σ M_in)."""
    match drawn := draw(s, HIERARCHY, above, factors, np.ones(above.geometry.shape[0])):
        case DenseDraws():
            return drawn.W
        case FactoredDraws():
            assert drawn.e is None  # a hierarchy has the exact law
            return s.graph.matmul(drawn.G(s.graph), drawn.B_T)
    raise ExportError("a hierarchy draws inducing weights only.")


def normals_in_order(f: Factors, K: int, name: str, drawn: Mapping[str, Array]) -> Tensor:
    """The graph's normals of a layer in torch's order, (K, normals); zeros for a layer that the graph does not call."""
    kinds = {key.removeprefix(f"{name}:"): value for key, value in drawn.items() if key.startswith(f"{name}:")}
    if not kinds:
        return torch.zeros(K, f.normals)
    if "eta" in kinds:
        kinds["eta"] = as_eps(f, kinds["eta"], K)  # type: ignore[arg-type]  # which inducing weights alone draw
    return torch.from_numpy(np.concatenate(list(kinds.values()), 1))
