"""Small networks and models that tests share. None seeds torch: a test that needs fixed weights calls manual_seed."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.models import bayesianize, build, load, save
from dubito.models.manifest import Card
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.model import Model


def mlp(*sizes: int, **arguments: Any) -> nn.Module:
    """An MLP: number of inputs, of units of each hidden layer, of outputs."""
    return build("mlp", inputs=sizes[0], hidden=[*sizes[1:-1]], outputs=sizes[-1], **arguments)


def bayesian_mlp(sizes: tuple[int, ...], method: str, **options: Any) -> BayesianNetwork:
    """An MLP of these sizes, converted by a method."""
    return bayesianize(mlp(*sizes), method, **options)


def stored(network: BayesianNetwork, path: Path, **card: Any) -> Model:
    """The network as a model: saved with a card, and loaded."""
    save(network, path, card=Card(**card))
    return load(path)


def mixed() -> nn.Module:
    """All that a kernel may compute between layers, in the forms in which networks have it."""
    from torchvision.models.convnext import CNBlock, LayerNorm2d
    from torchvision.ops import Conv2dNormActivation, Permute

    alone, normed = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.LayerNorm(8)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.MaxPool2d(2),
        CNBlock(8, 0.7, 0.0),
        LayerNorm2d(8),
        nn.Sequential(alone, Permute([0, 2, 3, 1]), normed, Permute([0, 3, 1, 2])),
        Conv2dNormActivation(8, 8, 5, 2, groups=8, activation_layer=nn.SiLU),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def bottlenecks() -> nn.Module:
    """torchvision's bottlenecks, narrow: one with a convolution beside it, one without."""
    from torchvision.models.resnet import Bottleneck

    beside = nn.Sequential(nn.Conv2d(8, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        Bottleneck(8, 8, 2, beside),
        Bottleneck(32, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def spoiled(net: nn.Module) -> nn.Module:
    """BatchNorms and other norms that do something."""
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias)
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean = torch.randn_like(m.bias)
            m.running_var = torch.rand_like(m.bias) + 0.5
    return net.eval()
