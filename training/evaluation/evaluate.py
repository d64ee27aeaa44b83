"""Evaluation of a model on data: quality, OOD detection, calibration, shift, and figures by number of draws."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dubito.models.manifest import Calibration, Part, Predictive
from dubito.models.names import Measure
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.models.predictions.answers import Rule, auto_rule, columns_of, label_of, rule_for, scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified, Regressed, known_in
from dubito.models.terminal import bar, remark
from dubito.training import metrics
from dubito.training.data.data import DataError, Examples
from dubito.training.evaluation.predicting import (
    GRID,
    REQUESTS,
    ChosenPredictive,
    Summary,
    check_examples,
    check_inputs,
    declared_by,
    predict_auto,
    predict_grid,
)
from dubito.training.evaluation.shift import corrupt, families

SHIFTED = 2000  # most pictures that are shifted: there are up to 75 shifts
SIZES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)  # of prediction sets: the largest of each row of a table

Figures = dict[str, Any]  # ready for JSON


@dataclass(frozen=True)
class Evaluation:
    figures: Figures
    model: Model
    examples: Examples
    inside: Summary  # predictions of the examples
    outside: dict[str, tuple[Examples, Summary]]  # by name of the data set


def measure(
    model: Model, examples: Examples, *, samples: int = 20, seed: int = 0, method: Predictive | None = None
) -> dict[str, float]:
    """Finite figures: quality, and if calibrated, coverage and the rate of OOD flags.

    `method` is the predictive; None: the model's default.
    """
    check_examples(model, examples)
    predictive = ChosenPredictive.of(model, samples, method)
    summary = predictive.predict(model, examples.x, seed)
    return _quality(summary, examples.y, predictive.rule(model)) | _changed(model, summary, examples.x)


def evaluate(
    model: Model,
    examples: Examples,
    outside: Mapping[str, Examples] | None = None,
    *,
    shift: bool = False,
    samples: int = 20,
    seed: int = 0,
    method: Predictive | None = None,
    calibrated_on: int | None = None,
) -> Evaluation:
    """All figures, and the predictions for a report; `calibrated_on` is the number of calibration examples."""
    outside = outside or {}
    check_examples(model, examples)
    for name, others in outside.items():
        check_inputs(model, others, f"{name}: ")
    if shift:
        _check_pictures(model, examples)
    predictive, calibration = ChosenPredictive.of(model, samples, method), model.card.calibration
    K, rule = predictive.K, predictive.rule(model)
    grid = sorted({*GRID, K} - {0}) if model.factors.random else [1]
    pictures = some_of(examples, SHIFTED, seed)
    changes = [(f, s) for f, all_s in families(pictures.x.shape[1]).items() for s in all_s] if shift else []
    further = sum(map(len, outside.values())) + len(changes) * len(pictures)
    with bar("evaluating", max(grid) * len(examples) + max(1, K) * further) as advance:
        curve = predict_grid(model, examples.x, grid, seed, advance)
        inside = curve[K] if K else predictive.predict(model, examples.x, seed)
        answers = {name: predictive.predict(model, others.x, seed, advance) for name, others in outside.items()}
        shifted: dict[str, list[Figures]] = {}
        for family, severity in changes:
            summary = predictive.predict(model, corrupt(pictures.x, family, severity, seed), seed, advance)
            row = {"severity": severity, **_quality(summary, pictures.y, rule)}
            shifted.setdefault(family, []).append(row)
    figures = {
        "task": model.manifest.task.kind,
        "examples": len(examples),
        "samples": K,
        "seed": seed,
        "method": predictive.kind,
        "calibration": promises(calibration, calibrated_on),
        **_quality(inside, examples.y, rule, errors=True),
        **_changed(model, inside, examples.x),
        "curve": [
            {"samples": k, **_quality(s, examples.y, rule_for(calibration, k), errors=True)} for k, s in curve.items()
        ],
    }
    if parts := _by_part(model, inside, examples, predictive):
        figures["parts"] = parts
    settled = predict_auto(model, examples.x, seed)
    if settled is not None:
        figures["auto"] = _auto(*settled, examples.y, calibration)
    if isinstance(inside, Classified):
        if rule.quantile is not None:
            figures["sets"] = by_size(inside, examples.y, rule)
        figures["reliability"] = [vars(b) for b in metrics.reliability(inside.probabilities, examples.y)]
    if outside:
        against = {name: _detection(inside, others, rule) for name, others in answers.items()}
        first = next(iter(against.values()))
        figures |= {"measure": first["measure"], "auroc": first["auroc"], "aupr": first["aupr"], "ood": against}
    if shift:
        clean = measure(model, pictures, samples=samples, seed=seed, method=method)
        figures["shift"] = {"examples": len(pictures), "clean": clean, "families": shifted}
    return Evaluation(figures, model, examples, inside, {n: (outside[n], answers[n]) for n in outside})


def flags(summary: Summary, rule: Rule) -> Tensor | None:
    """OOD flag of each input, (N,); None if not calibrated."""
    if rule.ood is None or rule.ood[0] not in scores(summary):
        return None
    measure, _, threshold = rule.ood
    return scores(summary)[measure].double() > threshold


def default_measure(summary: Summary, rule: Rule) -> Measure:
    """The OOD measure of the calibration; the first one that the summary has, if not calibrated."""
    known = scores(summary)
    return rule.ood[0] if rule.ood is not None and rule.ood[0] in known else next(iter(known))


def _quality(summary: Summary, y: Tensor, rule: Rule, *, errors: bool = False) -> dict[str, float]:
    """Finite figures of quality and calibration; with `errors`, standard errors of the latter too."""
    figures = quality(summary, y)
    if isinstance(summary, Classified):
        figures |= {name: float(getattr(summary, name).mean()) for name in ("entropy", "mutual_information")}  # or NaN
    for name, values in _promised(summary, y, rule).items():
        figures[name] = float(values.double().mean())
        if errors:
            figures[f"{name}_se"] = metrics.standard_error(values, REQUESTS)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def quality(summary: Summary, y: Tensor, rows: Tensor | slice = slice(None)) -> dict[str, float]:
    """Quality of the predictions; with `rows`, of these rows, which may repeat."""
    y = y[rows]
    if isinstance(summary, Classified):
        p = summary.probabilities[rows]
        return {f.__name__: f(p, y) for f in (metrics.accuracy, metrics.nll, metrics.ece, metrics.brier)}
    mean, variance = summary.mean[rows], (summary.epistemic_variance + summary.aleatoric_variance)[rows]
    return {"rmse": metrics.rmse(mean, y), "nll": metrics.gaussian_nll(mean, variance, y)}


def _promised(summary: Summary, y: Tensor, rule: Rule) -> dict[str, Tensor]:
    """For each input: whether the set or interval holds the truth, its size, whether the input is flagged."""
    reached: dict[str, Tensor] = {}
    if rule.quantile is not None and isinstance(summary, Classified):
        fits = fitting(summary, rule)  # (N, C)
        reached = {"coverage": fits.gather(1, y[:, None])[:, 0], "set_size": fits.sum(-1)}
    elif rule.quantile is not None and isinstance(summary, Regressed):
        half = rule.quantile * (summary.epistemic_variance + summary.aleatoric_variance).double().sqrt()  # (N, D)
        inside = (y.double() - summary.mean.double()).abs() <= half
        reached = {"coverage": inside.all(-1), "width": 2 * half.mean(-1)}  # all outputs together, as calibrated
    flagged = flags(summary, rule)
    return reached if flagged is None else {**reached, "ood_rate": flagged}


def fitting(summary: Classified, rule: Rule) -> Tensor:
    """Prediction sets as a mask (N, C)."""
    return torch.from_numpy(columns_of(summary, [rule] * len(summary.probabilities))["prediction_set"])


def by_size(summary: Classified, y: Tensor, rule: Rule) -> list[Figures]:
    """Coverage by size of the prediction set; large sizes share a row."""
    fits = fitting(summary, rule)
    size, hit = fits.sum(-1), fits.gather(1, y[:, None])[:, 0].double()
    rows = []
    for low, high in pairwise((-1, *SIZES, fits.shape[1])):
        mine = (size > low) & (size <= high)
        if n := int(mine.sum()):
            sizes = {"from": low + 1, "to": high}
            rows.append({**sizes, "examples": n, "share": n / len(y), "coverage": float(hit[mine].mean())})
    return rows


def _by_part(model: Model, summary: Summary, examples: Examples, predictive: ChosenPredictive) -> list[Figures]:
    """Coverage and set size of each class or group, for a calibration by class or group."""
    calibration, rows = model.card.calibration, []
    named: list[tuple[str, Tensor, str | None, Part]]
    if calibration is not None and calibration.classes is not None:
        named = [(label_of(model.card, c), examples.y == c, None, p) for c, p in enumerate(calibration.classes)]
    elif calibration is not None and calibration.groups is not None and examples.group is not None:
        named = [(g, torch.from_numpy(examples.group == g), g, p) for g, p in calibration.groups.items()]
    else:
        if calibration is not None and calibration.groups is not None:
            remark("these data name no groups: the coverage by group is left out")
        return []
    for name, mine, group, part in named:
        if not mine.any():
            continue
        some = type(summary)(**{key: values[mine] for key, values in known_in(summary).items()})
        reached = _promised(some, examples.y[mine], predictive.rule(model, group))
        means = {key: float(values.double().mean()) for key, values in reached.items() if key != "ood_rate"}
        known = {"name": name, "examples": int(mine.sum()), "calibrated_on": part.examples, "promised": part.coverage}
        rows.append({**known, **means})
    return rows


def promises(calibration: Calibration | None, examples: int | None = None) -> Figures | None:
    """Settings of the calibration, for the figures; with its number of examples, standard errors of what it promises:
    its thresholds are quantiles of as many."""
    if calibration is None:
        return None
    figures = calibration.model_dump(include={"coverage", "false_positive_rate", "measure", "temperature", "sets"})
    if examples is not None:
        figures["examples"] = examples
        for name in ("coverage", "false_positive_rate"):
            figures[f"{name}_se"] = math.sqrt(figures[name] * (1 - figures[name]) / examples)
    per = "class" if calibration.classes is not None else "group" if calibration.groups is not None else None
    return figures if per is None else figures | {"per": per}


def _auto(summary: Summary, drawn_: Tensor, y: Tensor, calibration: Calibration | None) -> Figures:
    """Figures with `samples="auto"`, which has thresholds of its own."""
    mean = float(drawn_.double().mean())
    limits = {"tolerance": TOLERANCE, "max_samples": AT_MOST, "mean_samples": mean}
    return limits | _quality(summary, y, auto_rule(calibration, AT_MOST), errors=True)


def _detection(inside: Summary, outside: Summary, rule: Rule) -> Figures:
    """AUROC and AUPR of each measure, and the rate of OOD flags outside."""
    near, far = scores(inside), scores(outside)
    measures = {m: {"auroc": metrics.auroc(near[m], far[m]), "aupr": metrics.aupr(near[m], far[m])} for m in near}
    default = default_measure(inside, rule)
    figures: Figures = {"examples": len(far[default]), "measure": default, **measures[default], "measures": measures}
    flagged = flags(outside, rule)
    if flagged is not None:
        figures["ood_rate"] = float(flagged.double().mean())
        error = metrics.standard_error(flagged, REQUESTS)
        figures |= {"ood_rate_se": error} if math.isfinite(error) else {}
    return figures


def _changed(model: Model, summary: Summary, x: Tensor) -> dict[str, float]:
    """Share of inputs for which a linearised network predicts another class than the network itself."""
    if not model.manifest.closed_form or not isinstance(summary, Classified):
        return {}
    plain = predict_grid(model, x, [0], 0)[0]
    assert isinstance(plain, Classified)
    return {"changed": float((summary.probabilities.argmax(-1) != plain.probabilities.argmax(-1)).double().mean())}


def some_of(examples: Examples, most: int, seed: int) -> Examples:
    """As many examples, or all, drawn by the seed."""
    if len(examples) <= most:
        return examples
    return examples[torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:most]]


def _check_pictures(model: Model, examples: Examples) -> None:
    if declared_by(model).image is None or examples.x.dtype != torch.uint8 or examples.x.dim() != 4:
        raise DataError(
            f"--shift changes pictures; these examples are {examples.x.dtype} of shape {tuple(examples.x.shape[1:])}. "
            "Leave it out, or bring a model and data of pictures."
        )
