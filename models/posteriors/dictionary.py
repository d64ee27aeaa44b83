"""Every method that gives a layer a posterior. A new one is its file and one line here.

The entries are strings, imported when they are asked for: `dubito --help` lists the methods without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dubito.models.posteriors.entry import Entry, JointEntry

POSTERIORS = {  # method -> the file and the class of its manifest entry
    "ffg-u": "dubito.models.posteriors.inducing:InducingLayer",
    "fcg-u": "dubito.models.posteriors.inducing:InducingLayer",
    "ensemble-u": "dubito.models.posteriors.inducing:InducingLayer",
    "ffg-w": "dubito.models.posteriors.weight_space:WeightLayer",
    "fcg-w": "dubito.models.posteriors.weight_space:WeightLayer",
    "ensemble-w": "dubito.models.posteriors.weight_space:WeightLayer",
    "mc-dropout": "dubito.models.posteriors.dropout:DropoutLayer",
    "whvi": "dubito.models.posteriors.whvi:WhviLayer",
    "whvi-column": "dubito.models.posteriors.whvi:WhviLayer",
    "gi": "dubito.models.posteriors.inducing_points:GlobalLayer",
    "li": "dubito.models.posteriors.inducing_points:LocalLayer",
    "prior": "dubito.models.posteriors.inducing_points:PriorLayer",
    "dgp": "dubito.models.posteriors.deep_gp:GlobalProcessLayer",
    "dsvi": "dubito.models.posteriors.deep_gp:LocalProcessLayer",
}
JOINT_ENTRIES = {  # key of a manifest -> the same of a posterior over a network as a whole
    "subnetwork": "dubito.models.posteriors.subnetwork:SubnetworkEntry",
    "inducing_inputs": "dubito.models.posteriors.inducing_points:InducingInputsEntry",
}
COMPOSED = {  # method of a network -> those of its layers: of all below the last, and of the last
    "fac-gi": ("ffg-w", "gi"),
    "rand-gi": ("prior", "gi"),
    "whvi-gp": ("whvi", "whvi-column"),
}


def entry_class(method: str) -> "type[Entry]":
    entry: type[Entry] = _imported(POSTERIORS[method])
    return entry


def joint_entry_class(key: str) -> "type[JointEntry]":
    entry: type[JointEntry] = _imported(JOINT_ENTRIES[key])
    return entry


def _imported(place: str) -> Any:
    file, name = place.split(":")
    return getattr(import_module(file), name)


def entry_classes() -> "dict[str, type[Entry]]":
    """The classes of all methods, by the kind that a manifest calls them."""
    return {(entry := entry_class(method)).model_fields["kind"].default: entry for method in POSTERIORS}
