"""Small networks and models that tests share. None seeds torch: a test that needs fixed weights calls manual_seed."""

from pathlib import Path
from typing import Any

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
