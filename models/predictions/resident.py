"""A model as a server keeps it: the factors in the type it computes in, and no trained parameters beside them.

Z, D and q(V) of a Bayesian layer are of no use once its factors exist, and as large as they are. BatchNorm is folded.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dubito.models.network.layers import Structure
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import folds
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import never_train


def reside(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """A copy for answers alone; `model` is left as it is. Activations run in `dtype`, draws in float32 or better."""
    made = model.network.factors()
    network = _without_posteriors(model.network)
    network.to(device)
    network.net.to(dtype=dtype)  # and not the noise of a regression's targets
    never_train(network)
    factors = replace(
        made,
        layers=MappingProxyType({name: f.narrow(dtype).to(device) for name, f in made.layers.items()}),
        hierarchy=None if made.hierarchy is None else made.hierarchy.to(device),
        structure=Structure.of(network.net),
        subnetwork=None if made.subnetwork is None else made.subnetwork.to(device),
        read=None if made.read is None else made.read.to(device),
        device=device,
        dtype=dtype,
    )
    return Model(network, model.manifest, factors)


def _without_posteriors(network: BayesianNetwork) -> BayesianNetwork:
    above = [] if network.hierarchy is None else [network.hierarchy]
    memo: dict[int, object] = {id(layer.posterior): nn.Module() for layer in [*network.layers.values(), *above]}
    if network.subnetwork is None:
        memo |= folds(network)
    else:  # its factors know it, and which weights it is over is counted among them as they are
        memo[id(network.subnetwork)] = None
    if network.feature_bank is not None:  # its points are among the factors
        memo[id(network.feature_bank)] = None
    return copy.deepcopy(network, memo)


def bytes_of(value: object, seen: set[int] | None = None) -> int:
    """Of all tensors in a value, each storage once."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        yield from (t for v in value.values() for t in _tensors(v))
    elif isinstance(value, list | tuple):
        yield from (t for v in value for t in _tensors(v))
    elif hasattr(value, "__dataclass_fields__"):
        yield from (t for v in vars(value).values() for t in _tensors(v))
