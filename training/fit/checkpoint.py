"""Checkpoints: what `FitRun.state` holds, and what identifies a run (recipe, data, initial network, batches).

Tensors are stored as safetensors, the rest as JSON in their metadata; files are written atomically.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dubito.models.disk import alone, write_by
from dubito.models.errors import first_line
from dubito.training.config import Recipe
from dubito.training.fit.fit import FitError, FitRun, FitState
from dubito.training.fit.ranks import Ranks

KEY = "checkpoint"
First = TypeVar("First")
Result = TypeVar("Result")
Rest = ParamSpec("Rest")


def save_checkpoint(run: FitRun, recipe: Recipe, path: Path, *, origin: str = "") -> None:
    """Write a checkpoint; `origin` identifies data and initial network, which a resumed run must share."""
    state = run.state()
    known = {**state.known, "made_by": _identity(run, recipe, origin)}
    content = save({k: v.cpu().contiguous() for k, v in state.tensors.items()}, {KEY: json.dumps(known)})
    write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a process that dies leaves the old file."""
    try:
        write_by(draft_of(path), path, content, mode="wb")
    except OSError as error:
        raise FitError(f"cannot write {path}: {error.strerror}.") from None


def draft_of(path: Path) -> Path:
    """Temporary name under which a file is written; the next writer overwrites what a killed one left."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def training_alone(out: Path) -> Iterator[None]:
    """One process at a time trains to a file: they would share their checkpoints."""
    with ExitStack() as stack:
        if Ranks.here().index == 0:
            try:
                free = stack.enter_context(alone(out.with_name(f".{out.stem}.lock")))
            except OSError as error:
                raise FitError(f"cannot write {out}: {error.strerror}.") from None
            if not free:
                raise FitError(f"another process trains {out}; wait for its end, or give another --out.")
        yield


def writes_alone(
    work: Callable[Concatenate[First, Path, Rest], Result],
) -> Callable[Concatenate[First, Path, Rest], Result]:
    """Of a function that trains to a file."""

    @wraps(work)
    def alone_there(first: First, out: Path, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        with training_alone(out):
            return work(first, out, *args, **kwargs)

    return alone_there


def resume(run: FitRun, recipe: Recipe, path: Path, *, origin: str = "") -> None:
    """Restore a run from a checkpoint of the same recipe."""
    try:
        with safe_open(path, framework="pt") as file:
            known = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
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
        run.restore(FitState(tensors, known))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise FitError(f"{path} does not fit this network ({first_line(error)}). Start anew with --fresh.") from None


def _identity(run: FitRun, recipe: Recipe, origin: str) -> dict[str, Any]:
    steps = {"batches per epoch": len(run.batches)}  # depends on the number of processes too
    return {"recipe": recipe.model_dump(mode="json"), "data or start": origin, **steps}
