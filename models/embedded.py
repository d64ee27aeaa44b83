"""The models that come with the package, small enough to be part of it.

`clothes` names the garment in a picture of 28 × 28 pixels: FFG-U on Fashion-MNIST (Xiao, Rasul, Vollgraf; MIT licence),
of three seeds the one whose NLL on the validation part gained most over its plain network's, saved in float16.
`digits` reads handwritten digits of 8 × 8 pixels and is quicker to load and to ask. `make embedded` says how both were
trained.
"""

from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

Name = Literal["clothes", "digits"]
NAMES: tuple[Name, ...] = get_args(Name)


def embedded(name: Name) -> Path:
    """The file of an embedded artifact."""
    return Path(str(files("dubito.models").joinpath(f"{name}.safetensors")))
