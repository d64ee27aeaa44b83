"""Pruning: sets the smallest entries of Z to zero, fine-tunes the rest with fixed masks, calibrates and measures."""

import math
from pathlib import Path

import torch
from pydantic import ValidationError

from dubito.models.artifact.artifact import load
from dubito.models.predictions.model import Model
from dubito.models.pruning import prune as prune_network
from dubito.training.config import Calibrate, Recipe, RecipeError
from dubito.training.data.data import DataError
from dubito.training.fit.checkpoint import writes_alone
from dubito.training.fit.ranks import Ranks
from dubito.training.recipe import Phases, finish, read_parts, settle_noise


@writes_alone
def prune(
    file: str | Path,
    out: Path,
    keep: float,
    *,
    epochs: int = 10,
    lr: float = 1e-3,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    fresh: bool = False,
) -> Model | None:
    """Prune an artifact that `train` made; None on ranks other than the first."""
    device = torch.device("cpu") if device is None else device
    if not 0 < lr < math.inf:
        raise RecipeError(f"lr is {lr}; expected a rate above 0.")
    model = load(file)
    recipe = recipe_of(model)
    model.network.set_feature_bank(None)  # pruning changes the features
    prune_network(model.network, keep)
    with Ranks.here().in_turn():
        parts = read_parts(recipe, data_root, download)
    if parts.hash != model.card.provenance.data_hash:
        raise DataError(
            f"{recipe.data.name} is not what it was when the model was trained: its hash is {parts.hash[:12]}…, the "
            f"artifact says {str(model.card.provenance.data_hash)[:12]}…. Parts divided from it might overlap the old."
        )
    declared = model.card.input
    assert declared is not None  # `train` always writes one
    network = model.network.to(device)
    if epochs:
        none = ("pretrain_epochs", "noise_epochs", "likelihood_epochs", "warmup_epochs")
        of_tuning = {"epochs": epochs, **dict.fromkeys(none, 0), "lr": lr}
        fit = recipe.fit.model_copy(update={**of_tuning, "optimiser": "adam", "schedule": "cosine", "milestones": ()})
        tuned = recipe.model_copy(update={"fit": fit})
        phases = Phases(tuned, parts, declared, out, device, fresh, start=f"{model.manifest.sha256} {keep}")
        run = phases.fit(network, fit, "posterior")
        if run.ranks.index > 0:
            return None
        network = run.finish()
    elif Ranks.here().index > 0:
        return None
    settle_noise(network, recipe, parts, declared)
    pruned = finish(network, recipe, parts, declared, out, model.card.provenance)
    if epochs:
        phases.clean()
    return pruned


def recipe_of(model: Model) -> Recipe:
    """The recipe of the model, with its present calibration and precision."""
    stored = model.card.provenance.recipe
    if stored is None:
        raise RecipeError(
            "this artifact does not say what it was trained by, so there is no data to fine-tune it on. In Python, "
            "dubito.models.pruning.prune prunes any network, and dubito.training.fit.fit.FitRun trains it."
        )
    try:
        recipe = Recipe.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecipeError(f"the recipe inside this artifact cannot be followed: {place}: {first['msg']}.") from None
    present: dict[str, object] = {"precision": model.manifest.precision}
    if (promised := model.card.calibration) is not None:
        present["calibrate"] = Calibrate(
            false_positive_rate=promised.false_positive_rate,
            coverage=promised.coverage,
            directions=max((e.row().get("directions", 0) for e in model.manifest.layers.values()), default=0),
            temperature=promised.temperature != 1,
            method=None if promised.closed is None else promised.method,
            sets="aps" if promised.sets is None else promised.sets.score,
            per="class" if promised.classes is not None else "group" if promised.groups is not None else None,
            measure=recipe.calibrate.measure,
            bank=recipe.calibrate.bank,
        )
    return recipe.model_copy(update=present)
