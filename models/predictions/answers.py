"""A prediction in words: per input, the fields that the command line and the REST reply share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import ArtifactError, InputError
from dubito.models.manifest import Calibration, Card, Part, Sets, at_or_below
from dubito.models.names import Measure
from dubito.models.predictions.prediction import Prediction
from dubito.models.predictions.sets import fitting
from dubito.models.predictions.uncertainty import Classified, Regressed, known_in, on_host

CERTAINTIES = ("max_probability", "entropy", "expected_entropy", "mutual_information")  # NaN: not known
Columns = dict[str, NDArray[Any]]  # by name, one row per input


def answers(prediction: Prediction, card: Card, group: str | None = None) -> list[dict[str, Any]]:
    """One dictionary per input; what needs calibration is None where there is none.

    `group` is one of the calibration's: its own quantile then decides about sets and intervals.
    """
    rules = Rulebook(card.calibration).of(prediction, group)
    settled = prediction.settled
    return rows_of(
        columns_of(prediction.summary, rules), rules, card, None if settled is None else settled.samples.tolist()
    )


@dataclass(frozen=True)
class Rule:
    """Threshold and quantile that are applied to one input; None where they were not calibrated."""

    ood: tuple[Measure, int, float] | None  # scores of the measure above the threshold are flagged; for K draws
    quantile: float | None  # conformal scores within it fit
    sets: Sets | None = None  # how classes are scored
    by_class: tuple[float, ...] | None = None  # the quantile of each class, where they differ


class Rulebook:
    """A calibration's rules, each looked up once."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self._known: dict[tuple[int, bool, str | None], Rule] = {}

    def of(self, prediction: Prediction, group: str | None = None) -> list[Rule]:
        """The rule of each input, by its number of draws."""
        settled = prediction.settled
        if prediction.method == "probit":
            return [closed_rule(self.calibration, group)] * len(next(iter(vars(prediction.summary).values())))
        if settled is None:
            return [self.rule(prediction.samples, group=group)] * len(next(iter(vars(prediction.summary).values())))
        return [self.rule(K, settled.tolerance, settled.max_samples, group) for K in settled.samples.tolist()]

    def rule(
        self, K: int, tolerance: float | None = None, max_samples: int | None = None, group: str | None = None
    ) -> Rule:
        """For K draws; with a tolerance and a limit, for K draws after which `auto` with them had settled."""
        auto = None if self.calibration is None else self.calibration.auto
        settled = auto is not None and (auto.tolerance, auto.max_samples) == (tolerance, max_samples)
        if (K, settled, group) not in self._known:
            make = auto_rule if settled else rule_for
            self._known[K, settled, group] = make(self.calibration, K, group)
        return self._known[K, settled, group]


def rule_for(calibration: Calibration | None, K: int, group: str | None = None) -> Rule:
    """For K draws."""
    check_group(calibration, group)
    if calibration is None:
        return Rule(None, None)
    ood = threshold_for(calibration, K)
    chosen = at_or_below(calibration.quantiles, K)
    if chosen is None:
        return Rule(ood, None, calibration.sets)
    grid_point, quantile = chosen
    return _rule(calibration, ood, quantile, lambda part: part.quantiles[grid_point], group)


def auto_rule(calibration: Calibration | None, K: int, group: str | None = None) -> Rule:
    """For K draws after which an answer had settled, as far as that was calibrated."""
    check_group(calibration, group)
    if calibration is None or calibration.auto is None:
        return Rule(None, None)
    measure, auto = calibration.measure, calibration.auto
    ood = (measure, K, auto.thresholds[measure])
    return _rule(calibration, ood, auto.quantile, lambda part: part.auto, group)


def closed_rule(calibration: Calibration | None, group: str | None = None) -> Rule:
    """For the closed form of a linearised network."""
    check_group(calibration, group)
    if calibration is None or calibration.closed is None:
        return Rule(None, None)
    closed = calibration.closed
    ood = (closed.measure, 0, closed.thresholds[closed.measure])
    return _rule(calibration, ood, closed.quantile, lambda part: part.closed, group)


def _rule(
    calibration: Calibration,
    ood: tuple[Measure, int, float] | None,
    quantile: float,
    of: Callable[[Part], float | None],
    group: str | None,
) -> Rule:
    """`of` gives the quantile of a class or a group alone; the manifest has one wherever it has `quantile`."""
    if group is not None and calibration.groups is not None:
        return Rule(ood, of(calibration.groups[group]), calibration.sets)
    by_class = None
    if calibration.classes is not None:
        by_class = tuple(own for part in calibration.classes if (own := of(part)) is not None)
    return Rule(ood, quantile, calibration.sets, by_class)


def check_group(calibration: Calibration | None, group: str | None) -> None:
    if group is None:
        return
    known = calibration.groups if calibration is not None else None
    if known is None:
        raise InputError(f"group is {group[:40]!r}, but this model was not calibrated by group; leave it out.")
    if group not in known:
        some = ", ".join(list(known)[:10]) + (", …" if len(known) > 10 else "")
        raise InputError(f"group is {group[:40]!r}; this model was calibrated for: {some}.")


def label_of(card: Card, index: int) -> str:
    """The class's name, or its number where the card names none."""
    return card.labels[index] if card.labels is not None and index < len(card.labels) else str(index)


def scores(summary: Classified | Regressed) -> dict[Measure, Tensor]:
    """Per input, by measure: each grows with doubt."""
    return {measure: torch.from_numpy(values) for measure, values in _doubts(_on_host(summary)).items()}


def _on_host(summary: Classified | Regressed) -> Columns:
    return {name: on_host(tensor) for name, tensor in known_in(summary).items()}


def _doubts(columns: Columns) -> dict[Measure, NDArray[np.float32]]:
    if "probabilities" not in columns:
        noise = np.maximum(columns["aleatoric_variance"], np.finfo(np.float32).tiny)
        return {"epistemic_variance": (columns["epistemic_variance"] / noise).mean(-1)}
    known: dict[Measure, NDArray[np.float32]] = {"entropy": columns["entropy"]}
    if not np.isnan(columns["mutual_information"]).all():  # a closed form does not know it
        known["mutual_information"] = columns["mutual_information"]
    known["max_probability"] = 1 - columns["probabilities"].max(-1)
    if "energy" in columns:
        known["energy"] = columns["energy"]
    if "distance" in columns:
        known["knn"] = columns["distance"]
    return known


def threshold_for(calibration: Calibration, K: int) -> tuple[Measure, int, float] | None:
    """The measure that decides for K draws, the grid point used and its threshold; scores above it are flagged."""
    measure = calibration.measure
    if K <= 1 and measure == "mutual_information":
        measure = "entropy"  # one function agrees with itself
    chosen = at_or_below(calibration.thresholds.get(measure, {}), K)
    return None if chosen is None else (measure, *chosen)


def columns_of(summary: Classified | Regressed, rules: Sequence[Rule]) -> Columns:
    """The answers for all inputs as columns on the host; a set, interval or OOD column is there if any rule has one."""
    columns = _on_host(summary)
    quantiles = [rule.quantile for rule in rules]
    calibrated = any(quantile is not None for quantile in quantiles)
    within = np.array([np.nan if quantile is None else quantile for quantile in quantiles]) if calibrated else None
    if isinstance(summary, Classified):
        p = columns["probabilities"]
        columns |= {"class": p.argmax(-1), "max_probability": p.max(-1)}
        if within is not None:  # a class fits where its conformal score is within the quantile
            columns["prediction_set"] = fitting(p, rules[0].sets, _limits(rules, within, p.shape[1]))
    elif within is not None:
        std = np.sqrt((columns["epistemic_variance"] + columns["aleatoric_variance"]).astype(np.float64))
        mean, reach = columns["mean"].astype(np.float64), within[:, None] * std
        columns["interval"] = np.stack([mean - reach, mean + reach], -1)
    if any(rule.ood is not None for rule in rules):
        columns |= _oods(columns, rules)
    return columns


def joined_columns(parts: Sequence[Columns]) -> Columns:
    """The columns of parts of one request, one below the other; NaN or False where no rule of a part gives a column."""
    known = {name: column for part in parts for name, column in part.items()}

    def column(part: Columns, name: str) -> NDArray[Any]:
        if name in part:
            return part[name]
        rows, like = len(next(iter(part.values()))), known[name]
        return np.full((rows, *like.shape[1:]), np.nan if like.dtype.kind == "f" else False, like.dtype)

    return {name: np.concatenate([column(part, name) for part in parts]) for name in known}


def _limits(rules: Sequence[Rule], within: NDArray[np.float64], C: int) -> NDArray[np.float64]:
    """Of each input (B, 1), or of each class of it (B, C)."""
    if all(rule.by_class is None for rule in rules):
        return within[:, None]
    rows = [(q,) * C if rule.by_class is None else rule.by_class for q, rule in zip(within, rules, strict=True)]
    if {len(row) for row in rows} != {C}:
        raise ArtifactError(f"this model tells {C} classes apart, but its calibration knows another number of them.")
    return np.array(rows)


def _oods(columns: Columns, rules: Sequence[Rule]) -> Columns:
    """Score, threshold and flag of each input, by its own measure; NaN and False where it has none."""
    doubts = _doubts(columns)
    score = np.full(len(rules), np.nan)
    for measure in {rule.ood[0] for rule in rules if rule.ood is not None} & set(doubts):
        mine = np.array([rule.ood is not None and rule.ood[0] == measure for rule in rules])
        score[mine] = doubts[measure][mine]
    threshold = np.array([np.nan if rule.ood is None else rule.ood[2] for rule in rules])
    flags = score > threshold
    return {"ood": flags, "ood_score": score.astype(np.float32), "ood_threshold": threshold.astype(np.float32)}


def rows_of(
    columns: Columns, rules: Sequence[Rule], card: Card, drawn: list[int] | None = None
) -> list[dict[str, Any]]:
    """Columns as one dictionary per input; `drawn` tells how many draws each took, where they differ."""
    lists = {name: column.tolist() for name, column in columns.items()}
    make = _class if "probabilities" in lists else _value
    rows = [make(lists, i, rule, card) for i, rule in enumerate(rules)]
    if drawn is not None:
        rows = [row | {"samples": K} for row, K in zip(rows, drawn, strict=True)]
    return rows


def _class(lists: dict[str, list[Any]], i: int, rule: Rule, card: Card) -> dict[str, Any]:
    fitting = None
    if rule.quantile is not None:
        fitting = [label_of(card, c) for c, fits in enumerate(lists["prediction_set"][i]) if fits]
    return {
        "label": label_of(card, lists["class"][i]),
        "class": lists["class"][i],
        "probabilities": lists["probabilities"][i],
        **{name: None if math.isnan(value := lists[name][i]) else value for name in CERTAINTIES},
        "prediction_set": fitting,
        "ood": _ood(lists, i, rule),
    }


def _value(lists: dict[str, list[Any]], i: int, rule: Rule, card: Card) -> dict[str, Any]:
    names = {} if card.targets is None else {"targets": list(card.targets)}
    return {
        **names,
        **{name: lists[name][i] for name in ("mean", "epistemic_variance", "aleatoric_variance")},
        "interval": None if rule.quantile is None else lists["interval"][i],
        "ood": _ood(lists, i, rule),
    }


def _ood(lists: dict[str, list[Any]], i: int, rule: Rule) -> dict[str, Any] | None:
    if rule.ood is None or math.isnan(lists["ood_score"][i]):
        return None
    measure, samples, threshold = rule.ood
    score = lists["ood_score"][i]
    return {"flag": lists["ood"][i], "score": score, "threshold": threshold, "measure": measure, "samples": samples}
