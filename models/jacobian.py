"""The public name of what reads a subnetwork: its code is in `network/jacobian.py`."""

from dubito.models.network.jacobian import chosen_of

__all__ = ["chosen_of"]
