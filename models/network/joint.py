"""The kinds of posterior over a network as a whole, by their key in manifests."""

from dubito.models.network.linearised import Subnetwork

JOINT = {kind.key: kind for kind in (Subnetwork,)}
