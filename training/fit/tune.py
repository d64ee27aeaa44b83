"""Chooses the posterior's options: a short trial run with each, compared on the validation part."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from dubito.models.terminal import remark
from dubito.training.config import Recipe
from dubito.training.fit.checkpoint import write_whole
from dubito.training.fit.fit import FitRun

SAMPLES = 20  # K of the comparison

FitTrial = Callable[[nn.Module, Recipe, str], FitRun]  # the plain network, the trial's recipe, its name


def tune(recipe: Recipe, net: nn.Module, fit: FitTrial, path: Path, origin: str, *, first: bool) -> Recipe:
    """The recipe with the options whose trial has the lowest validation NLL, as the model would answer.

    If the recipe fits a temperature, each trial is judged with its own: a trial that is too sure of itself may be the
    best one after it.
    The file `path` holds the results so far, for a stopped run; it is used for the same recipe and data only.
    """
    assert recipe.tune is not None
    tempered = recipe.task == "classification" and recipe.calibrate.temperature
    key = {"recipe": recipe.model_dump(mode="json"), "origin": origin, "tempered": tempered}
    known = _known(path, key)
    for i, options in enumerate(recipe.tune.trials[len(known) :], len(known)):
        run = fit(net, recipe.trial(options), f"trial-{i + 1}")
        nll, accuracy, _ = run.validated(SAMPLES, tempered=tempered)
        known.append(nll)
        if first:
            write_whole(path, json.dumps({**key, "nll": known}).encode())
            shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
            of_T = " with a temperature" if tempered else ""
            count = len(recipe.tune.trials)
            remark(f"trial {i + 1} of {count}, {_words(options)}: validation NLL {nll:.4f}{of_T}{shown}")
    best = min(range(len(known)), key=known.__getitem__)
    chosen = recipe.tune.trials[best]
    if first:
        remark(f"chosen: {_words(chosen)}")
    return recipe.with_options(chosen)


def _known(path: Path, key: Mapping[str, object]) -> list[float]:
    """NLLs of the trials that are done."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    same = isinstance(stored, dict) and all(stored.get(name) == value for name, value in key.items())
    return list(stored["nll"]) if same else []


def _words(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
