"""The models of the zoo that `dubito serve` serves without a path.

`clothes` names the garment in a picture of 28 × 28 pixels: FFG-U on Fashion-MNIST (Xiao, Rasul, Vollgraf; MIT licence),
of three seeds the one whose NLL on the validation part gained most over its plain network's, saved in float16.
`digits` reads handwritten digits of 8 × 8 pixels and is quicker to load and to ask. Both are in the list of
`dubito zoo`, and `dubito zoo train NAME` makes them again.
"""

from pathlib import Path
from typing import Literal, get_args

from dubito.models.zoo import shipped

Name = Literal["clothes", "digits"]
NAMES: tuple[Name, ...] = get_args(Name)


def embedded(name: Name) -> Path:
    """The file of an embedded artifact."""
    return shipped(name)
