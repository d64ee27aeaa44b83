"""A prediction in words: per input, the fields that the command line and the REST reply share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.manifest import Calibration, Card, Measure, at_or_below
from dubito.models.prediction import Prediction
from dubito.models.uncertainty import Classified, Regressed, on_host

Columns = dict[str, NDArray[Any]]  # by name, one row per input


def answers(prediction: Prediction, card: Card) -> list[dict[str, Any]]:
    """One dictionary per input; what needs calibration is None where there is none."""
    rules = Rulebook(card.calibration).of(prediction)
    settled = prediction.settled
    return rows_of(
        columns_of(prediction.summary, rules), rules, card, None if settled is None else settled.samples.tolist()
    )


@dataclass(frozen=True)
class Rule:
    """What decides about one input: each is None where it was not calibrated."""

    ood: tuple[Measure, int, float] | None  # scores of the measure above the threshold are flagged; for K draws
    quantile: float | None  # conformal scores within it fit


class Rulebook:
    """A calibration's rules, each looked up once."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self._known: dict[tuple[int, bool], Rule] = {}

    def of(self, prediction: Prediction) -> list[Rule]:
        """By the draws that each input got."""
        settled = prediction.settled
        if prediction.method == "probit":
            return [closed_rule(self.calibration)] * len(next(iter(vars(prediction.summary).values())))
        if settled is None:
            return [self.rule(prediction.samples)] * len(next(iter(vars(prediction.summary).values())))
        return [self.rule(K, settled.tolerance, settled.max_samples) for K in settled.samples.tolist()]

    def rule(self, K: int, tolerance: float | None = None, max_samples: int | None = None) -> Rule:
        """For K draws; with a tolerance and a limit, for K draws after which `auto` with them had settled."""
        auto = None if self.calibration is None else self.calibration.auto
        settled = auto is not None and (auto.tolerance, auto.max_samples) == (tolerance, max_samples)
        if (K, settled) not in self._known:
            made = auto_rule(self.calibration, K) if settled else rule_for(self.calibration, K)
            self._known[K, settled] = made
        return self._known[K, settled]


def rule_for(calibration: Calibration | None, K: int) -> Rule:
    """For K draws."""
    if calibration is None:
        return Rule(None, None)
    quantile = at_or_below(calibration.quantiles, K)
    return Rule(threshold_for(calibration, K), None if quantile is None else quantile[1])


def auto_rule(calibration: Calibration | None, K: int) -> Rule:
    """For K draws after which an answer had settled, as far as that was calibrated."""
    if calibration is None or calibration.auto is None:
        return Rule(None, None)
    measure, auto = calibration.measure, calibration.auto
    return Rule((measure, K, auto.thresholds[measure]), auto.quantile)


def closed_rule(calibration: Calibration | None) -> Rule:
    """For the closed form of a linearised network."""
    if calibration is None or calibration.closed is None:
        return Rule(None, None)
    closed = calibration.closed
    return Rule((closed.measure, 0, closed.thresholds[closed.measure]), closed.quantile)


def label_of(card: Card, index: int) -> str:
    """The class's name, or its number where the card names none."""
    return card.labels[index] if card.labels is not None and index < len(card.labels) else str(index)


def scores(summary: Classified | Regressed) -> dict[Measure, Tensor]:
    """Per input, by measure: each grows with doubt."""
    return {measure: torch.from_numpy(values) for measure, values in _doubts(_on_host(summary)).items()}


def _on_host(summary: Classified | Regressed) -> Columns:
    return {name: on_host(tensor) for name, tensor in vars(summary).items()}


def _doubts(columns: Columns) -> dict[Measure, NDArray[np.float32]]:
    if "probabilities" not in columns:
        noise = np.maximum(columns["aleatoric_variance"], np.finfo(np.float32).tiny)
        return {"epistemic_variance": (columns["epistemic_variance"] / noise).mean(-1)}
    known: dict[Measure, NDArray[np.float32]] = {"entropy": columns["entropy"]}
    if not np.isnan(columns["mutual_information"]).all():  # a closed form does not know it
        known["mutual_information"] = columns["mutual_information"]
    return known | {"max_probability": 1 - columns["probabilities"].max(-1)}


def threshold_for(calibration: Calibration, K: int) -> tuple[Measure, int, float] | None:
    """The measure that decides for K draws, the grid point used and its threshold; scores above it are flagged."""
    measure = calibration.measure
    if K <= 1 and measure == "mutual_information":
        measure = "entropy"  # one function agrees with itself
    chosen = at_or_below(calibration.thresholds.get(measure, {}), K)
    return None if chosen is None else (measure, *chosen)


def columns_of(summary: Classified | Regressed, rules: Sequence[Rule]) -> Columns:
    """All that is known of each input, on the host; what its rules decide is there where any of them decides it."""
    found = _on_host(summary)
    quantiles = [rule.quantile for rule in rules]
    calibrated = any(quantile is not None for quantile in quantiles)
    within = np.array([np.nan if quantile is None else quantile for quantile in quantiles]) if calibrated else None
    if isinstance(summary, Classified):
        p = found["probabilities"]
        found |= {"class": p.argmax(-1), "max_probability": p.max(-1)}
        if within is not None:  # conformal: a class fits where 1 − p is within the quantile; none may fit
            found["prediction_set"] = 1 - p.astype(np.float64) <= within[:, None]
    elif within is not None:
        std = np.sqrt((found["epistemic_variance"] + found["aleatoric_variance"]).astype(np.float64))
        mean, reach = found["mean"].astype(np.float64), within[:, None] * std
        found["interval"] = np.stack([mean - reach, mean + reach], -1)
    if any(rule.ood is not None for rule in rules):
        found |= _oods(found, rules)
    return found


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
        "max_probability": lists["max_probability"][i],
        "entropy": lists["entropy"][i],
        "expected_entropy": _known(lists["expected_entropy"][i]),
        "mutual_information": _known(lists["mutual_information"][i]),
        "prediction_set": fitting,
        "ood": _ood(lists, i, rule),
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _value(lists: dict[str, list[Any]], i: int, rule: Rule, card: Card) -> dict[str, Any]:
    names = {} if card.targets is None else {"targets": list(card.targets)}
    return {
        **names,
        "mean": lists["mean"][i],
        "epistemic_variance": lists["epistemic_variance"][i],
        "aleatoric_variance": lists["aleatoric_variance"][i],
        "interval": None if rule.quantile is None else lists["interval"][i],
        "ood": _ood(lists, i, rule),
    }


def _ood(lists: dict[str, list[Any]], i: int, rule: Rule) -> dict[str, Any] | None:
    if rule.ood is None or math.isnan(lists["ood_score"][i]):
        return None
    measure, samples, threshold = rule.ood
    score = lists["ood_score"][i]
    return {"flag": lists["ood"][i], "score": score, "threshold": threshold, "measure": measure, "samples": samples}
