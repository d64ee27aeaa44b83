"""How each layer computes its K samples: dense weights one by one, all in one call, or never formed.

By counting here; the service measures.
"""

import math
from collections.abc import Callable
from types import MappingProxyType

from dubito.models.network.geometry import How, Linear
from dubito.models.network.network import NetworkFactors, Plan
from dubito.models.posteriors.inducing import InducingFactors
from dubito.models.posteriors.whvi import WhviFactors

Planner = Callable[[int, int], Plan]  # for B inputs and K samples


def factored_is_cheaper(d_out: int, d_in: int, r: int, groups: int = 1) -> bool:
    """Multiplications per input: through r shared filters (for each group), or by the weights themselves."""
    return r * (d_out + d_in * groups) < d_out * d_in


SMALL = 16 * 16  # places of a picture, up to which a CPU runs one grouped convolution in less time than K small ones


def cheapest(factors: NetworkFactors, places: float = math.inf) -> Plan:
    """The execution with the fewest multiplications, layer by layer; plans never change what is computed.

    `places` is the size of the pictures, where a CPU computes: K convolutions of small ones go as one with K groups.

    WHVI's weights are never formed, but for grouped convolutions, where a block of W meets several groups' inputs.
    """
    plan: dict[str, How] = {}
    for name, layer in factors.structure.layers.items():
        f = factors.layers[name]
        dense: How = "batch" if isinstance(layer.geometry, Linear) or places <= SMALL else "loop"
        plan[name] = dense
        if isinstance(f, WhviFactors) and layer.geometry.groups == 1:
            plan[name] = "factored"
        if isinstance(f, InducingFactors):
            d_out, d_in = f.shape
            remainder = f.lam > 0 and f.noise == "factored" and not f.spans  # needs the shared filters in any case
            if remainder or factored_is_cheaper(d_out, d_in, f.B.shape[1], layer.geometry.groups):
                plan[name] = "factored"
    return MappingProxyType(plan)
