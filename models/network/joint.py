"""The kinds of posterior over a network as a whole, by method."""

from dubito.models.names import LAPLACE
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import JointPosterior
from dubito.models.network.sequence import InducingInputs

JOINT: dict[str, type[JointPosterior]] = {LAPLACE: Subnetwork, "gi": InducingInputs}
