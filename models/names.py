"""Names of methods and architectures. Nothing heavy is imported, so that `--help` can list them at once."""

from collections.abc import Sequence
from typing import Literal, get_args

from dubito.models.posteriors.dictionary import COMPOSED, POSTERIORS

METHODS = (*POSTERIORS, *COMPOSED, "deterministic")  # of `bayesianize`
LAPLACE = "subnetwork-laplace"  # of a whole network that is trained already
Measure = Literal["entropy", "mutual_information", "max_probability", "epistemic_variance", "energy", "knn"]
MEASURES: tuple[Measure, ...] = get_args(Measure)  # that OOD flags can go by
ARCHITECTURES = (
    *("mlp", "lenet", "cnn", "convnet", "resnet8"),
    *("resnet18-cifar", "resnet50-cifar", "deep-gp", "random-features"),
)


def some(names: Sequence[str]) -> str:
    """The first four, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def listed(names: Sequence[str]) -> str:
    """a, b or c."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
