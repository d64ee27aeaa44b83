"""What a Bayesian network is: posteriors, layers, conversion, artifacts and predictions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dubito.models.architectures import build as build
    from dubito.models.artifact import load as load
    from dubito.models.artifact import save as save
    from dubito.models.conversion import bayesianize as bayesianize
    from dubito.models.conversion import ensemble as ensemble
    from dubito.models.prediction import predict as predict

_HOMES = {
    "bayesianize": "conversion",
    "build": "architectures",
    "ensemble": "conversion",
    "load": "artifact",
    "predict": "prediction",
    "save": "artifact",
}

__all__ = ["bayesianize", "build", "ensemble", "load", "predict", "save"]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: `dubito --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
