"""Modules of `torch.nn` by name and arguments: read off a network, and built again."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from dubito.models.errors import ArtifactError, first_line
from dubito.models.network.normalisation import ScaleShift
from dubito.models.traced import TorchModule
from dubito.models.tracing.arguments import encode, short, sizes
from dubito.models.tracing.operators import MODULES, MOST_LAYERS, RECURRENT, RECURRENT_ARGUMENTS

NOT_SIZES = ("device", "dtype")
UNSET = object()


@cache
def parameters_of(kind: str) -> Mapping[str, Any]:
    """The arguments that such a module takes, and their defaults."""
    if kind == "ScaleShift":
        return {"features": UNSET}
    if kind in RECURRENT:
        further: dict[str, dict[str, Any]] = {"RNN": {"nonlinearity": "tanh"}, "LSTM": {"proj_size": 0}, "GRU": {}}
        defaults = (UNSET, UNSET, 1, True, False, 0.0, False)
        return dict(zip(RECURRENT_ARGUMENTS, defaults, strict=True)) | further[kind]
    signature = inspect.signature(MODULES[kind].__init__)
    return {
        name: UNSET if p.default is p.empty else p.default
        for name, p in list(signature.parameters.items())[1:]
        if name not in NOT_SIZES
        and not name.startswith("_")
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def describe(module: nn.Module) -> TorchModule | None:
    """None for a module that is not of the list, or that a constructor would not give back as it is."""
    kind = type(module).__name__
    return _described(kind, module) if MODULES.get(kind) is type(module) else None


def describe_base(module: nn.Module) -> TorchModule | None:
    """The module of the list that this one extends, with the same sizes and tensors; None where it extends none."""
    base = next((cls for cls in type(module).__mro__ if MODULES.get(cls.__name__) is cls), None)
    return None if base is None else _described(base.__name__, module)


def _described(kind: str, module: nn.Module) -> TorchModule | None:
    try:
        entry = TorchModule(kind=kind, arguments=_arguments(kind, module))
        with torch.device("meta"):
            again = construct(entry)
    except (AttributeError, TypeError, ValueError, ArtifactError):
        return None
    return entry if _alike(module, again) else None


def _alike(one: nn.Module, other: nn.Module) -> bool:
    shapes = [{n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (one, other)]
    kept = {n for n, _ in one.named_buffers()} <= one.state_dict().keys()
    same = repr(one) == repr(other) or type(one) is not type(other)
    return same and shapes[0] == shapes[1] and kept


def _arguments(kind: str, module: nn.Module) -> dict[str, JsonValue]:
    arguments: dict[str, JsonValue] = {}
    for name, default in parameters_of(kind).items():
        value = _argument(kind, name, module)
        if value is not UNSET and (default is UNSET or type(value) is not type(default) or value != default):
            arguments[name] = value.model_dump() if isinstance(value, TorchModule) else encode(value, lambda _: None)
    return arguments


def _argument(kind: str, name: str, module: Any) -> Any:
    match kind, name:
        case "MultiheadAttention", "bias":
            return module.in_proj_bias is not None
        case "MultiheadAttention", "add_bias_kv":
            return module.bias_k is not None
        case "TransformerEncoderLayer", _:
            return _of_encoder_layer(name, module)
        case "TransformerEncoder", "encoder_layer":
            return _nested(module.layers[0])
        case "TransformerEncoder", "norm":
            return None if module.norm is None else _nested(module.norm)
        case "TransformerEncoder", "mask_check":
            return module.mask_check
        case "ScaleShift", "features":
            return len(module.scale)
        case "PReLU", "init":
            return UNSET  # where its weight starts
    value = getattr(module, name, UNSET)
    if name == "bias" and (value is None or isinstance(value, Tensor)):
        return value is not None
    if name in ("size", "scale_factor") and isinstance(value, list):
        return tuple(value)
    return value


def _nested(module: nn.Module) -> TorchModule:
    if (entry := describe(module)) is None:
        raise TypeError(type(module).__name__)
    return entry


def _of_encoder_layer(name: str, layer: Any) -> Any:
    attention = layer.self_attn
    match name:
        case "d_model":
            return attention.embed_dim
        case "nhead":
            return attention.num_heads
        case "dim_feedforward":
            return layer.linear1.out_features
        case "dropout":
            return layer.dropout.p
        case "activation":
            known = {torch.nn.functional.relu: "relu", torch.nn.functional.gelu: "gelu"}
            return known[layer.activation] if layer.activation in known else _refuse(layer.activation)
        case "layer_norm_eps":
            return layer.norm1.eps
        case "batch_first":
            return attention.batch_first
        case "norm_first":
            return layer.norm_first
        case "bias":
            return layer.linear1.bias is not None
    return _refuse(name)


def _refuse(value: object) -> Any:
    raise TypeError(str(value))


def construct(entry: TorchModule, depth: int = 2) -> nn.Module:
    """Call it where tensors have no storage: sizes are those that the entry claims."""
    kind = entry.kind
    if kind not in MODULES:
        raise ArtifactError(f"its network has a module {short(kind)}, which is not on the list of torch.nn.")
    known, arguments = parameters_of(kind), dict[str, Any]()
    for name, value in entry.arguments.items():
        if name not in known:
            raise ArtifactError(f"its network has {kind} with {short(name)}; expected {', '.join(known)}.")
        if kind == "TransformerEncoder" and isinstance(value, dict) and name in ("encoder_layer", "norm") and depth:
            arguments[name] = construct(TorchModule.model_validate(value), depth - 1)
        else:
            arguments[name] = sizes(value)
        if name == "num_layers" and not (isinstance(value, int) and 0 < value <= MOST_LAYERS):
            raise ArtifactError(f"its network has {kind} of {short(value)} layers; expected 1 to {MOST_LAYERS}.")
    try:
        if kind == "ScaleShift":
            return ScaleShift(torch.empty(arguments["features"]), torch.empty(arguments["features"]))
        return MODULES[kind](**arguments)
    except Exception as error:  # of many kinds, all of them about the arguments
        raise ArtifactError(f"its network has {kind} with {short(entry.arguments)}: {first_line(error)}.") from None
