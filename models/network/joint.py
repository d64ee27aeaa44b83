"""The kinds of posterior over a network as a whole, by method."""

from dubito.models.names import LAPLACE
from dubito.models.network.linearised import Subnetwork

JOINT = {LAPLACE: Subnetwork}
