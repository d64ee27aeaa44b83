"""The zoo: trained models in one list, those that come with the package and larger ones at a release address.

`zoo/` beside this file holds the shipped artifacts and `index.json`, which `make zoo` writes from them. Wherever a
command takes a model, `zoo:NAME` is the one of that name.
"""

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveInt, TypeAdapter

from dubito.models.errors import DubitoError
from dubito.models.fields import Strict

PREFIX = "zoo:"
VARIABLE = "DUBITO_ZOO"  # address of the folder with the larger artifacts
MOST_BYTES = 12_000_000  # of all shipped artifacts together


class ZooError(DubitoError):
    """A name that is not in the zoo, or an artifact of it that is not at hand."""


class Listed(Strict):
    """What the list says of a model; the artifact itself says more."""

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]*$")]
    title: str
    task: Literal["classification", "regression"]
    architecture: str
    method: str
    data: str  # by its name in a recipe
    precision: str
    bytes: PositiveInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of the file
    parameters: PositiveInt
    deterministic: PositiveInt  # parameters of the plain network
    metrics: dict[str, FiniteFloat]
    plain: dict[str, FiniteFloat] | None  # figures of the plain network, with its temperature if it has one
    shipped: bool  # it comes with the package


INDEX = TypeAdapter(tuple[Listed, ...])


def folder() -> Path:
    """Where the shipped artifacts are."""
    return Path(str(files("dubito.models").joinpath("zoo")))


@cache
def listed() -> tuple[Listed, ...]:
    """All models of the zoo, in the order of the list."""
    return INDEX.validate_json((folder() / "index.json").read_bytes())


def named(name: str) -> Listed:
    for one in listed():
        if one.name == name:
            return one
    raise ZooError(f"{PREFIX}{name[:50]} is not in the zoo; there are: {', '.join(one.name for one in listed())}.")


def shipped(name: str) -> Path:
    """The file of a model that comes with the package."""
    return folder() / f"{name}.safetensors"


def place(name: str, release: str | None = None) -> Path | str:
    """The file of a model, or its address with its hash. `release` is the address of the folder with larger ones;
    without it, the variable DUBITO_ZOO says."""
    one = named(name)
    if one.shipped and release is None:
        return shipped(name)
    if not (where := release or os.environ.get(VARIABLE, "")):
        raise ZooError(
            f"{PREFIX}{name} does not come with the package ({one.bytes / 1e6:.1f} MB); expected the address of the "
            f"release in the variable {VARIABLE}, such as https://HOST/PATH. Or make it: dubito zoo train {name}."
        )
    return f"{where.rstrip('/')}/{name}.safetensors#sha256={one.sha256}"
