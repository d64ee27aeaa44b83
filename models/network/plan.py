"""How each layer computes its K draws: dense weights one by one, all in one call, or never formed.

By counting here; the service measures.
"""

import math
from types import MappingProxyType

from dubito.models.network.geometry import Execution, Linear
from dubito.models.network.network import NetworkFactors, Plan

SMALL = 16 * 16  # places of a picture, up to which a CPU runs one grouped convolution in less time than K small ones


def cheapest(factors: NetworkFactors, places: float = math.inf) -> Plan:
    """The execution with the fewest multiplications, layer by layer; plans never change what is computed.

    `places` is the size of the pictures, where a CPU computes: K convolutions of small ones go as one with K groups.
    """
    plan: dict[str, Execution] = {}
    for name, layer in factors.structure.layers.items():
        dense: Execution = "batch" if isinstance(layer.geometry, Linear) or places <= SMALL else "loop"
        plan[name] = "factored" if factors.layers[name].factored_is_cheaper(layer.geometry.groups) else dense
    return MappingProxyType(plan)
