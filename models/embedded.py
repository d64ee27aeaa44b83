"""The model that comes with the package: handwritten digits of 8 × 8 pixels, made by `dubito train digits`."""

from importlib.resources import files
from pathlib import Path


def embedded() -> Path:
    """The file of the embedded artifact."""
    return Path(str(files("dubito.models").joinpath("digits.safetensors")))
