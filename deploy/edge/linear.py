"""The linearised predictive of a subnetwork Laplace model in a graph: f(x) + J_S(x) δ for K draws δ ~ N(0, H_S⁻¹).

The network runs once for all draws, with K tangents beside its activations. H_S is factorised at export: the file holds
the triangle L⁻¹, and δ = L⁻ᵀ ε is one product.
"""

import copy
import warnings

import numpy as np
import onnx
from torch import Tensor, nn
from torch.func import functional_call

from dubito.deploy.edge.draws import Sampler, array, triangle
from dubito.deploy.edge.tangent_rules import RULES
from dubito.deploy.edge.tangents import Forward, Moved
from dubito.deploy.edge.trace import by_torch
from dubito.models.network.jacobian import chosen_of
from dubito.models.network.linearised import LinearisedFactors
from dubito.models.network.network import NetworkFactors

NOISE = "subnetwork:eps"  # the name of ε in the graph
WEIGHT = "weight:"  # before a parameter's name among the inputs of a traced network


class _Open(nn.Module):
    """A network with its parameters as inputs, so that each is a value of its own in the traced graph."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.names = [name for name, _ in net.named_parameters()]

    def forward(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        outputs: Tensor = functional_call(self.net, dict(zip(self.names, weights, strict=True)), (x,))
        return outputs


def trace_open(net: nn.Module, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The traced network, with its parameters as inputs."""
    opened = _Open(copy.deepcopy(net)).eval()
    weights = [p.detach() for p in opened.net.parameters()]
    with warnings.catch_warnings():  # about the name of an axis, which is not used
        warnings.filterwarnings("ignore", message=".*dynamic axes will not be renamed")
        return by_torch(opened, shape, weights, [f"{WEIGHT}{name}" for name in opened.names])


def linear_samples(
    s: Sampler, traced: onnx.GraphProto, net: nn.Module, factors: NetworkFactors, x: str
) -> tuple[str, dict[str, str]]:
    """Outputs of the linearised network, (K, B, C), and the name in the graph of each traced value."""
    assert isinstance(factors, LinearisedFactors)
    g, chosen = s.graph, factors.subnetwork
    inverse = np.linalg.inv(array(chosen.L))
    eps = s.normals(chosen.normals, NOISE)
    moves = g.matmul(g.op("Transpose", triangle(g, np.tril(inverse))), g.op("Transpose", eps))  # (S, K)
    forward = Forward(g, s.K, traced)
    forward.value["x"] = x
    moved = chosen_of(net, chosen.index)
    for name, p in net.named_parameters():
        stored = array(p)
        forward.value[f"{WEIGHT}{name}"] = g.weights(stored)
        if name in moved:
            columns, local = moved[name]
            part = g.part(moves, 0, columns.start, columns.stop)
            forward.tangent[f"{WEIGHT}{name}"] = Moved(part, local.cpu().numpy().astype(np.int64), stored.shape)
    forward.run(RULES)
    (out,) = (o.name for o in traced.output)
    t = forward.of(out)
    return g.add(forward.value[out], forward.nothing(out) if t is None else t), forward.value
