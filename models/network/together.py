"""Layers of one class are drawn by few products: layer by layer, launching kernels would take longer than they run."""

from dataclasses import replace
from types import MappingProxyType

from dubito.models.network.network import NetworkFactors
from dubito.models.posteriors.protocol import Group


def gather(factors: NetworkFactors) -> NetworkFactors:
    """The same factors, those that can be drawn together side by side in memory."""
    groups, layers = list[Group](), dict(factors.layers)
    classes = {name: type(layer.entry) for name, layer in factors.structure.layers.items()}
    for entry in dict.fromkeys(classes.values()):
        own = {name: f for name, f in factors.layers.items() if classes[name] is entry}
        of_class, changed = entry.gather(own, factors.places)
        groups += of_class
        layers |= changed
    return replace(factors, layers=MappingProxyType(layers), groups=tuple(groups))
