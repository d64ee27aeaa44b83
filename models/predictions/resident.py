"""A model as a server keeps it: the factors in the type it computes in, and no trained parameters beside them.

Z, D and q(V) of a Bayesian layer are of no use once its factors exist, and as large as they are. BatchNorm is folded.
"""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import folds
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import never_train


def reside(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """A copy for answers alone; `model` is left as it is. Activations run in `dtype`, draws in float32 or better."""
    network = _without_posteriors(model.network)
    network.to(device)
    network.net.to(dtype=dtype)  # and not the noise of a regression's targets
    never_train(network)
    return Model(network, model.manifest, model.network.factors().resident(network.net, device, dtype))


def _without_posteriors(network: BayesianNetwork) -> BayesianNetwork:
    above = [] if network.hierarchy is None else [network.hierarchy]
    memo: dict[int, object] = {id(layer.posterior): nn.Module() for layer in [*network.layers.values(), *above]}
    memo |= folds(network)
    memo |= {id(part): None for part in (network.joint, network.feature_bank) if part is not None}
    return copy.deepcopy(network, memo)


def bytes_of(value: object, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in a value, each storage counted once."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        yield from (t for v in value.values() for t in tensors_in(v))
    elif isinstance(value, list | tuple):
        yield from (t for v in value for t in tensors_in(v))
    elif hasattr(value, "__dataclass_fields__"):
        yield from (t for v in vars(value).values() for t in tensors_in(v))
