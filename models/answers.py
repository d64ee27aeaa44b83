"""A prediction in words: per input, the fields that the command line and the REST reply share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.models.manifest import Calibration, Card, Measure, at_or_below
from dubito.models.prediction import Prediction
from dubito.models.uncertainty import Classified, Regressed


def answers(prediction: Prediction, card: Card) -> list[dict[str, Any]]:
    """One dictionary per input; what needs calibration is None where there is none."""
    summary, settled = prediction.summary, prediction.settled
    rules = rules_of(prediction, card.calibration)
    rows = _classes(summary, rules, card) if isinstance(summary, Classified) else _values(summary, rules)
    if settled is not None:
        rows = [row | {"samples": K} for row, K in zip(rows, settled.samples.tolist(), strict=True)]
    return rows


@dataclass(frozen=True)
class Rule:
    """What decides about one input: each is None where it was not calibrated."""

    ood: tuple[Measure, int, float] | None  # scores of the measure above the threshold are flagged; for K draws
    quantile: float | None  # conformal scores within it fit


def rules_of(prediction: Prediction, calibration: Calibration | None) -> list[Rule]:
    """By the draws that each input got."""
    settled = prediction.settled
    n = len(next(iter(scores(prediction.summary).values())))
    if settled is None:
        return [rule_for(calibration, prediction.samples)] * n
    auto = None if calibration is None else calibration.auto
    drawn: list[int] = settled.samples.tolist()
    if auto is None or (auto.tolerance, auto.max_samples) != (settled.tolerance, settled.max_samples):
        return [rule_for(calibration, K) for K in drawn]
    return [auto_rule(calibration, K) for K in drawn]


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


def label_of(card: Card, index: int) -> str:
    """The class's name, or its number where the card names none."""
    return card.labels[index] if card.labels is not None and index < len(card.labels) else str(index)


def scores(summary: Classified | Regressed) -> dict[Measure, Tensor]:
    """Per input, by measure: each grows with doubt."""
    if isinstance(summary, Classified):
        return {
            "entropy": summary.entropy,
            "mutual_information": summary.mutual_information,
            "max_probability": 1 - summary.max_probability,
        }
    noise = summary.aleatoric_variance.clamp(min=torch.finfo(torch.float32).tiny)
    return {"epistemic_variance": (summary.epistemic_variance / noise).mean(-1)}


def threshold_for(calibration: Calibration, K: int) -> tuple[Measure, int, float] | None:
    """The measure that decides for K draws, the grid point used and its threshold; scores above it are flagged."""
    measure = calibration.measure
    if K <= 1 and measure == "mutual_information":
        measure = "entropy"  # one function agrees with itself
    chosen = at_or_below(calibration.thresholds.get(measure, {}), K)
    return None if chosen is None else (measure, *chosen)


def _classes(s: Classified, rules: list[Rule], card: Card) -> list[dict[str, Any]]:
    oods, fit = oods_of(s, rules), fits(s, rules).tolist()
    rows = []
    for i, p in enumerate(s.probabilities.tolist()):
        leading = max(range(len(p)), key=p.__getitem__)
        fitting = None
        if rules[i].quantile is not None:
            fitting = [label_of(card, c) for c, one in enumerate(fit[i]) if one]
        rows.append(
            {
                "label": label_of(card, leading),
                "class": leading,
                "probabilities": p,
                "max_probability": p[leading],
                "entropy": float(s.entropy[i]),
                "expected_entropy": float(s.expected_entropy[i]),
                "mutual_information": float(s.mutual_information[i]),
                "prediction_set": fitting,
                "ood": oods[i],
            }
        )
    return rows


def fits(s: Classified, rules: list[Rule]) -> Tensor:
    """(B, C): conformal, a class fits where 1 − p is within the quantile; none may fit, and none does without one."""
    return 1 - s.probabilities.cpu().double() <= _quantiles(rules)[:, None]


def intervals(s: Regressed, rules: list[Rule]) -> Tensor:
    """(B, D, 2): the mean, less and plus as many standard deviations as the quantile says."""
    std = (s.epistemic_variance + s.aleatoric_variance).cpu().double().sqrt()
    mean, reach = s.mean.cpu().double(), _quantiles(rules)[:, None] * std
    return torch.stack([mean - reach, mean + reach], -1)


def _quantiles(rules: list[Rule]) -> Tensor:
    """(B,): NaN where there is none."""
    found = [float("nan") if rule.quantile is None else rule.quantile for rule in rules]
    return torch.tensor(found, dtype=torch.float64)


def _values(s: Regressed, rules: list[Rule]) -> list[dict[str, Any]]:
    oods, within = oods_of(s, rules), intervals(s, rules).tolist()
    rows = []
    for i, mean in enumerate(s.mean.tolist()):
        interval = None if rules[i].quantile is None else within[i]
        rows.append(
            {
                "mean": mean,
                "epistemic_variance": s.epistemic_variance[i].tolist(),
                "aleatoric_variance": s.aleatoric_variance[i].tolist(),
                "interval": interval,
                "ood": oods[i],
            }
        )
    return rows


def oods_of(summary: Classified | Regressed, rules: list[Rule]) -> list[dict[str, Any] | None]:
    """Per input; None where its measure was not calibrated."""
    doubts = {measure: values.tolist() for measure, values in scores(summary).items()}
    found: list[dict[str, Any] | None] = []
    for i, rule in enumerate(rules):
        if rule.ood is None or rule.ood[0] not in doubts:
            found.append(None)
            continue
        measure, samples, threshold = rule.ood
        score = doubts[measure][i]
        found.append(
            {"flag": score > threshold, "score": score, "threshold": threshold, "measure": measure, "samples": samples}
        )
    return found
