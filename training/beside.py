"""Compares two models on the same inputs: figures of both, and their differences with standard errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.models import load, save
from dubito.models.errors import InputError
from dubito.models.manifest import Card, Difference, Plain, Precision
from dubito.models.names import Measure
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.answers import scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.models.terminal import bar
from dubito.models.verdict import verdict
from dubito.training import metrics
from dubito.training.calibrate import best_temperature, choose_measure, with_bank, with_temperature
from dubito.training.config import Calibrate
from dubito.training.data.data import Examples, Parts
from dubito.training.data.spoil import spoil, to_spoil
from dubito.training.evaluation.evaluate import default_measure, quality
from dubito.training.evaluation.predicting import ChosenPredictive, Summary
from dubito.training.feature_bank import make_bank
from dubito.training.fit.checkpoint import draft_of

RESAMPLED = 100  # bootstrap samples for the standard error of a difference
SAMPLES = 20  # K
REQUESTS = 4  # into which inputs from outside are divided: fewer are faster, and enough for a mean over inputs

QualityFigures = dict[str, float]


@dataclass(frozen=True)
class Answers:
    """One model's predictions of the examples, and its OOD scores of inputs from inside and outside."""

    inside: Summary
    doubts: list[tuple[Tensor, Tensor]]  # (inside, outside), by one measure


def answers_of(
    model: Model,
    examples: Examples,
    outside: Mapping[str, Tensor],
    seed: int,
    samples: int,
    measure: Measure | None = None,
) -> Answers:
    """Doubt is by `measure`; without one, by the model's default."""
    predictive = ChosenPredictive.of(model, samples, None)
    with bar("measuring", max(1, predictive.K) * (len(examples) + sum(map(len, outside.values())))) as advance:
        inside = predictive.predict(model, examples.x, seed, advance)
        measure = default_measure(inside, predictive.rule(model)) if measure is None else measure
        answers = [predictive.predict(model, x, seed, advance, requests=REQUESTS) for x in outside.values()]
    near, far = scores(inside)[measure], [scores(answer)[measure] for answer in answers]
    return Answers(inside, [(near, values) for values in far])


def spoiled(examples: Examples, seed: int) -> dict[str, Tensor]:
    """Spoiled copies of some examples, by kind: they keep the values and lose the structure."""
    rng = torch.Generator().manual_seed(seed)
    return {str(i): x for i, x in enumerate(spoil(to_spoil(examples.x, rng), rng))}


def figures_of(a: Answers, y: Tensor, rows: Tensor | None = None, others: list[Tensor] | None = None) -> QualityFigures:
    """Quality and AUROC as numbers; with `rows`, of these rows, which may repeat."""
    chosen = slice(None) if rows is None else rows
    figures = quality(a.inside, y, chosen)
    if a.doubts:
        which = others or [torch.arange(len(far)) for _, far in a.doubts]
        aurocs = [metrics.auroc(near[chosen], far[i]) for (near, far), i in zip(a.doubts, which, strict=True)]
        figures["auroc"] = sum(aurocs) / len(aurocs)  # mean over the data sets from outside
    return figures


def differences(mine: Answers, other: Answers, y: Tensor, seed: int) -> dict[str, Difference]:
    """Each figure of `mine` minus that of `other`, with standard errors by a paired bootstrap over the inputs."""
    rng = torch.Generator().manual_seed(seed)
    whole = _less(figures_of(mine, y), figures_of(other, y))
    resampled: list[QualityFigures] = []
    for _ in range(RESAMPLED):
        rows = torch.randint(len(y), (len(y),), generator=rng)
        others = [torch.randint(len(far), (len(far),), generator=rng) for _, far in mine.doubts]
        resampled.append(_less(figures_of(mine, y, rows, others), figures_of(other, y, rows, others)))
    errors = {name: float(torch.tensor([a[name] for a in resampled], dtype=torch.double).std()) for name in whole}
    return {name: Difference(value=value, se=errors[name]) for name, value in whole.items()}


def _less(mine: QualityFigures, other: QualityFigures) -> QualityFigures:
    return {name: mine[name] - other[name] for name in mine if name in other}


def check_alike(model: Model, other: Model, name: str) -> None:
    """Refuse to compare models that would take the same inputs or answers for different ones."""
    for (what, mine), theirs in zip(_names(model.card).items(), _names(other.card).values(), strict=True):
        if mine is not None and theirs is not None and mine != theirs:
            raise InputError(
                f"{name} has the {what} {', '.join(theirs[:8])}, the first model {', '.join(mine[:8])}; expected two "
                "models with the same ones in one order. Evaluate each alone."
            )


def _names(card: Card) -> dict[str, tuple[str, ...] | None]:
    columns = None if card.input is None else card.input.columns
    return {"columns": columns, "targets": card.targets, "labels": card.labels}


def compare(
    model: Model, other: Model, examples: Examples, outside: Mapping[str, Examples], *, samples: int, seed: int
) -> dict[str, Any]:
    """Figures of both models on the same inputs, their differences with standard errors, and a verdict in words.

    Without data from outside, the AUROC is against spoiled copies of the examples.
    """
    far = {name: others.x for name, others in outside.items()} or spoiled(examples, seed)
    mine, theirs = (answers_of(m, examples, far, seed, samples) for m in (model, other))
    changes = differences(mine, theirs, examples.y, seed)
    return {
        "mine": figures_of(mine, examples.y),
        "other": figures_of(theirs, examples.y),
        "differences": {name: d.model_dump() for name, d in changes.items()},
        "auroc_against": list(outside) or "spoiled copies of the examples",
        "verdict": verdict(changes, "the other model"),
    }


def beside_plain(
    model: Model, network: BayesianNetwork, parts: Parts, settings: Calibrate, out: Path, seed: int
) -> tuple[QualityFigures, Plain]:
    """The model's AUROC against spoiled test inputs, and the figures of the plain network on the same test data.

    The plain network has what the model has: a temperature, fitted on both held-out parts, and an OOD measure that was
    chosen for it on the calibration part, from as many, a feature bank of its own included.
    """
    test, outside = parts.test, spoiled(parts.test, seed)
    plain = as_stored(network, Card(input=model.card.input, labels=model.card.labels), out).to(model.device)
    mine = answers_of(model, test, outside, seed, SAMPLES)
    own = {name: value for name, value in figures_of(mine, test.y).items() if name == "auroc"}
    if not isinstance(mine.inside, Classified):
        theirs = answers_of(plain, test, outside, seed, SAMPLES)
        return own, Plain(metrics=figures_of(theirs, test.y), differences=differences(mine, theirs, test.y, seed))
    if settings.measure in (None, "knn") and settings.bank > 0:
        plain = with_bank(plain, make_bank(plain, parts.train, settings.bank, seed))
    T = best_temperature(plain, parts.validation + parts.calibration, seed)
    tempered = with_temperature(plain, Calibrate(), T)
    given = None if settings.measure == "mutual_information" else settings.measure  # a plain network has none
    measure, _ = choose_measure(tempered, parts.calibration, seed, given=given)
    theirs, rival = (answers_of(m, test, outside, seed, SAMPLES, measure) for m in (plain, tempered))
    return own, Plain(
        metrics=figures_of(theirs, test.y),
        temperature=T,
        tempered=figures_of(rival, test.y),
        measure=measure,
        differences=differences(mine, rival, test.y, seed),
    )


def as_stored(network: BayesianNetwork, card: Card, out: Path, precision: Precision = "float32") -> Model:
    """The network as a model, saved and loaded, so that what is measured is what would be stored."""
    draft = draft_of(out)
    try:
        save(network, draft, card=card, precision=precision)
        return load(draft)
    finally:
        draft.unlink(missing_ok=True)
