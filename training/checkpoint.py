"""A training run on disk: tensors as safetensors, all else as JSON in their metadata; written whole or not at all."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dubito.training.config import Recipe
from dubito.training.fit import FitError, Run, State

KEY = "checkpoint"


def save_checkpoint(run: Run, recipe: Recipe, path: Path) -> None:
    state = run.state()
    known = {**state.known, "recipe": recipe.model_dump(mode="json")}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({k: v.cpu().contiguous() for k, v in state.tensors.items()}, part, {KEY: json.dumps(known)})
        os.replace(part, path)
    except OSError as error:
        raise FitError(f"cannot write the checkpoint {path}: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)


def resume(run: Run, recipe: Recipe, path: Path) -> None:
    """Go on where a checkpoint of the same recipe stopped."""
    try:
        with safe_open(path, framework="pt") as file:
            known = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise FitError(f"{path} is no checkpoint that can be read ({error}). Start anew with --fresh.") from None
    if known.pop("recipe") != recipe.model_dump(mode="json"):
        raise FitError(
            f"{path} was left by another recipe. Train with the settings that it was made with to go on, "
            "or start anew with --fresh."
        )
    try:
        run.restore(State(tensors, known))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise FitError(f"{path} does not fit this network ({first}). Start anew with --fresh.") from None
