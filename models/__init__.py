"""What a Bayesian network is: posteriors, layers, conversion, artifacts and predictions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dubito.models.artifact.artifact import load as load
    from dubito.models.artifact.artifact import save as save
    from dubito.models.conversion.architectures import build as build
    from dubito.models.conversion.conversion import bayesianize as bayesianize
    from dubito.models.conversion.conversion import ensemble as ensemble
    from dubito.models.predictions.prediction import predict as predict

_HOMES = {
    "bayesianize": "conversion.conversion",
    "build": "conversion.architectures",
    "ensemble": "conversion.conversion",
    "load": "artifact.artifact",
    "predict": "predictions.prediction",
    "save": "artifact.artifact",
}

__all__ = ["bayesianize", "build", "ensemble", "load", "predict", "save"]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: `dubito --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
