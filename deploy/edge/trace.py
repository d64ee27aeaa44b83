"""Traces a network with torch's ONNX exporter; Bayesian layers become nodes of our own domain.

`Layer` is a Bayesian layer, `Affine` a scale and a shift per channel (a folded BatchNorm), `Choose` selects among the
copies of a plain layer that the members of an ensemble have. Rows are draws × inputs.
"""

import copy
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import OPSET, OURS
from dubito.models.errors import first_line
from dubito.models.network.geometry import Conv, Geometry, Linear
from dubito.models.network.layers import BayesianLayer, MemberLayer, Structure, layer_by_layer, takes_ids
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import ScaleShift


def affines_of(folded: BayesianNetwork) -> dict[str, list[ScaleShift]]:
    """Folded BatchNorms by name: one, or one per member."""
    affines: dict[str, list[ScaleShift]] = {}
    for name, module in folded.net.named_modules():
        if isinstance(module, MemberLayer):
            copies = [m for m in module.copies if isinstance(m, ScaleShift)]
            if len(copies) == len(module.copies):
                affines[name] = copies
        elif isinstance(module, ScaleShift) and not _inside(name, folded.net):
            affines[name] = [module]
    return affines


def refuse_copies(net: nn.Module) -> None:
    """Of layers that answer with several tensors."""
    for module in net.modules():
        if isinstance(module, MemberLayer) and isinstance(first := module.copies[0], nn.RNNBase):
            kind = type(first).__name__
            raise ExportError(f"an ensemble's copies of {kind} answer with several tensors, which is not exported.")


def trace(folded: BayesianNetwork, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The traced network, for inputs of `shape`; it depends on the sizes of the layers, not on their posteriors."""
    memo: dict[int, object] = {}
    affines = affines_of(folded)
    for name, module in folded.net.named_modules():
        if isinstance(module, BayesianLayer):
            memo[id(module)] = _LayerNode(name, module)
        elif name in affines:
            memo[id(module)] = _AffineNode(name)
        elif isinstance(module, MemberLayer):
            memo[id(module)] = _ChooseNode(copy.deepcopy(module.copies))
    twin = copy.deepcopy(folded.net, memo).eval()
    return by_torch(twin, shape)


def by_torch(
    net: nn.Module, shape: tuple[int, ...], weights: list[Tensor] | None = None, names: Sequence[str] = ()
) -> onnx.ModelProto:
    """Export a network of inputs, and optionally of weights with these names, with torch's exporter."""
    dtype = torch.int64 if takes_ids(net) else torch.float32
    example = torch.zeros(2, *shape, dtype=dtype)
    more = () if weights is None else (weights,)
    rows: tuple[Any, ...] = ({0: torch.export.Dim("rows")}, *([None] * len(some) for some in more))
    try:
        with layer_by_layer(Structure.of(net).attends), torch.no_grad():
            program = torch.onnx.export(
                net,
                (example, *more),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=rows,
                input_names=["x", *names],
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:  # torch raises many kinds, each a page long
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's own headlines say in which of its steps, not why
            cause = cause.__cause__
        said = first_line(cause)
        missing = "No ONNX function" in said
        advice = "may branch on values, or fix the number of rows"
        advice = "calls an operator that ONNX lacks: use another one" if missing else advice
        raise ExportError(
            f"torch cannot export this network for inputs of shape {shape}: {said}. Its forward method {advice}."
        ) from error
    assert program is not None
    traced = program.model_proto
    if traced.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value"):
        raise ExportError(
            "torch's exporter fixes the number of rows of this network, whose forward method must ask for it by "
            "x.shape[0], not by len(x)."
        )
    return traced


def _inside(name: str, net: nn.Module) -> bool:
    """Whether the module is part of a layer of which the members of an ensemble have copies."""
    above = name.rpartition(".copies.")[0]
    return bool(above) and isinstance(net.get_submodule(above), MemberLayer)


def _symbolic(kind: str, inputs: tuple[Tensor, ...], name: str, shape: tuple[Any, ...]) -> Tensor:
    node: Tensor = torch.onnx.ops.symbolic(
        f"{OURS}::{kind}", inputs, attrs={"name": name}, dtype=inputs[0].dtype, shape=shape, version=1
    )
    return node


class _LayerNode(BayesianLayer):
    def __init__(self, name: str, layer: BayesianLayer) -> None:
        super().__init__(layer.geometry, nn.Identity(), layer.entry)
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        return _symbolic("Layer", (input,), self.name, _shape_after(self.geometry, tuple(input.shape)))


class _AffineNode(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return _symbolic("Affine", (x,), self.name, tuple(x.shape))


class _ChooseNode(nn.Module):
    def __init__(self, copies: nn.ModuleList) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        copies = tuple(member(x) for member in self.copies)
        return _symbolic("Choose", copies, "", tuple(copies[0].shape))


def _shape_after(geometry: Geometry, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(geometry, Linear):
        return (*shape[:-1], geometry.outputs)
    return (shape[0], geometry.outputs, *sizes_after(geometry, shape[2:]))


def sizes_after(conv: Conv, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Spatial sizes after a convolution."""
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel, strict=True)]
    around = pads(conv)
    return tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in zip(sizes, around, reach, conv.stride, strict=True))


def pads(conv: Conv) -> list[tuple[int, int]]:
    """Padding before and after each axis."""
    if conv.padding == "valid":
        return [(0, 0)] * conv.dims
    if isinstance(conv.padding, str):  # same
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel, strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in conv.padding]
