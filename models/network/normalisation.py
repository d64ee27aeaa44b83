"""BatchNorm for serving: one scale and one shift per channel instead of four numbers and a square root."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dubito.models.network.network import BayesianNetwork

# and no subclasses, which may do more than normalise
FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ScaleShift(nn.Module):
    """y = scale x + shift per channel: a BatchNorm whose statistics no longer change."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, axis: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)
        self.shift = nn.Parameter(shift)
        self.axis = axis  # of the channels

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return torch.addcmul(self.shift.view(shape), x, self.scale.view(shape))


def fold_batchnorm(network: BayesianNetwork) -> BayesianNetwork:
    """A copy of the network with every BatchNorm as a scale and a shift; same answers, no more training."""
    return copy.deepcopy(network, folds(network))


def folds(network: BayesianNetwork) -> dict[int, object]:
    """For `deepcopy`: what replaces each BatchNorm in the copy; empty where a posterior is over its weights."""
    memo: dict[int, object] = {}
    if network.joint is not None and network.joint.over_weights:
        return memo
    read: frozenset[str] = getattr(network.net, "tensors_read", frozenset())  # past the modules that hold them
    for name, module in network.net.named_modules():
        if isinstance(module, FOLDABLE) and type(module) in FOLDABLE and module.running_mean is not None:
            if any(f"{name}.{tensor}" in read for tensor in (*module._parameters, *module._buffers)):
                continue
            memo[id(module)] = folded(module)
    return memo


@torch.no_grad()
def folded(norm: _BatchNorm) -> ScaleShift:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    # in float64: the square root of a small variance loses half its digits
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.affine:
        shift = shift + norm.bias.double()
    dtype = norm.running_mean.dtype
    return ScaleShift(scale.to(dtype), shift.to(dtype))
