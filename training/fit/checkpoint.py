"""A training run on disk: tensors as safetensors, all else as JSON in their metadata; written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dubito.models.artifact.artifact import write_by
from dubito.training.config import Recipe
from dubito.training.fit.fit import FitError, Run, State

KEY = "checkpoint"


def save_checkpoint(run: Run, recipe: Recipe, path: Path, *, origin: str = "") -> None:
    """`origin` says what else the run must have in common with one that goes on from here: data, a start."""
    state = run.state()
    known = {**state.known, "made_by": _identity(run, recipe, origin)}
    content = save({k: v.cpu().contiguous() for k, v in state.tensors.items()}, {KEY: json.dumps(known)})
    write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """All of it under this name, or what was there before, whenever the process dies."""
    try:
        write_by(draft_of(path), path, content, mode="wb")
    except OSError as error:
        raise FitError(f"cannot write {path}: {error.strerror}.") from None


def draft_of(path: Path) -> Path:
    """Where a file is written before it gets its name; the next writer replaces what a killed one left."""
    return path.with_name(f".{path.name}.part")


def resume(run: Run, recipe: Recipe, path: Path, *, origin: str = "") -> None:
    """Go on where a checkpoint of the same recipe stopped."""
    try:
        with safe_open(path, framework="pt") as file:
            known = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        theirs = known.pop("made_by")
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise FitError(f"{path} is no checkpoint that can be read ({said}). Start anew with --fresh.") from None
    ours = _identity(run, recipe, origin)
    if theirs != ours:
        changed = [key for key in ours if not isinstance(theirs, dict) or theirs.get(key) != ours[key]]
        raise FitError(
            f"{path} was left by another run: its {' and '.join(changed)} differs. Train with what it was made with to "
            "go on, or start anew with --fresh."
        )
    try:
        run.restore(State(tensors, known))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise FitError(f"{path} does not fit this network ({first}). Start anew with --fresh.") from None


def _identity(run: Run, recipe: Recipe, origin: str) -> dict[str, Any]:
    steps = {"batches per epoch": len(run.batches)}  # which hang on the number of processes, too
    return {"recipe": recipe.model_dump(mode="json"), "data or start": origin, **steps}
