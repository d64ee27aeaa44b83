"""What an artifact says of a Gaussian over some weights of an otherwise plain network [Daxberger21]."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dubito.models.fields import PositiveFinite, Size
from dubito.models.posteriors.entry import JointEntry

Selection = Literal["variance", "random", "magnitude", "last-layer"]


class SubnetworkEntry(JointEntry):
    closed_form: ClassVar[bool] = True
    method: Literal["subnetwork-laplace"] = "subnetwork-laplace"
    size: Size  # S
    select: Selection
    prior_precision: PositiveFinite
    examples: Annotated[int, Field(gt=0)]  # that the curvature was summed over

    def check(self, manifest: Any) -> None:
        """It is over the weights of a plain network, and its closed form knows one noise for all inputs."""
        if manifest.task.kind == "regression" and manifest.task.noise == "input":
            raise ValueError("a subnetwork knows constant noise only, but this task's noise depends on the input")
        if manifest.layers or manifest.members or manifest.hierarchy or manifest.batchnorm != "kept":
            raise ValueError("a subnetwork belongs to a plain network, without Bayesian layers or folded BatchNorm")
