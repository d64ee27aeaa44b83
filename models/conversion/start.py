"""What a posterior starts from: the sizes and the weights of a torch layer."""

import copy
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.network.geometry import Conv, Geometry, Linear
from dubito.models.posteriors.entry import Origin

Start = Literal["network", "prior"]

CONVERTIBLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def geometry_of(module: nn.Module) -> Geometry:
    if isinstance(module, nn.Linear):
        return Linear(module.in_features, module.out_features, module.bias is not None)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
    return Conv(
        module.in_channels,
        module.out_channels,
        tuple(module.kernel_size),
        tuple(module.stride),
        padding,
        tuple(module.dilation),
        module.groups,
        module.bias is not None,
        module.padding_mode,
    )


def weight_of(module: nn.Module) -> Tensor:
    """W (d_out, d_in) of a Linear or Conv layer, its bias as the last column."""
    assert isinstance(module, CONVERTIBLE)
    W = module.weight.detach().flatten(1)
    if module.bias is None:
        return W
    if W.is_meta:  # joined or drawn without storage, torch would load its compiler, which takes seconds
        return W.new_empty(len(W), W.shape[1] + 1)
    return torch.cat([W, module.bias.detach()[:, None]], 1)


def origin_of(module: nn.Module, start: Start, spread: float | None) -> Origin:
    W = weight_of(module)
    if not W.is_meta and not W.isfinite().all():
        raise ConversionError("its weights hold NaN or infinity.")
    return Origin(geometry_of(module), W, start == "network", spread, partial(_afresh, module))


def _afresh(module: nn.Module) -> Tensor:
    again = copy.deepcopy(module)
    again.reset_parameters()  # type: ignore[operator]  # Linear and Conv layers all have it
    return weight_of(again)
