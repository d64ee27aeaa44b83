"""A prediction in words: per input, the fields that the command line and the REST reply share."""

from typing import Any

import torch
from torch import Tensor

from dubito.models.manifest import Calibration, Card, Measure, at_or_below
from dubito.models.prediction import Prediction
from dubito.models.uncertainty import Classified, Regressed


def answers(prediction: Prediction, card: Card) -> list[dict[str, Any]]:
    """One dictionary per input; what needs calibration is None where there is none."""
    summary = prediction.summary
    if isinstance(summary, Classified):
        return _classes(summary, prediction.samples, card)
    return _values(summary, prediction.samples, card)


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


def _classes(s: Classified, K: int, card: Card) -> list[dict[str, Any]]:
    quantile = None if card.calibration is None else at_or_below(card.calibration.quantiles, K)
    oods = _oods(s, K, card.calibration)
    rows = []
    for i, p in enumerate(s.probabilities.tolist()):
        leading = max(range(len(p)), key=p.__getitem__)
        fitting = None
        if quantile is not None:  # conformal: a class fits where 1 − p is within the quantile; none may fit
            fitting = [label_of(card, c) for c, share in enumerate(p) if 1 - share <= quantile[1]]
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


def _values(s: Regressed, K: int, card: Card) -> list[dict[str, Any]]:
    oods = _oods(s, K, card.calibration)
    quantile = None if card.calibration is None else at_or_below(card.calibration.quantiles, K)
    std = (s.epistemic_variance + s.aleatoric_variance).sqrt()
    rows = []
    for i, mean in enumerate(s.mean.tolist()):
        interval = None
        if quantile is not None:
            interval = [[m - quantile[1] * d, m + quantile[1] * d] for m, d in zip(mean, std[i].tolist(), strict=True)]
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


def _oods(summary: Classified | Regressed, K: int, calibration: Calibration | None) -> list[dict[str, Any] | None]:
    doubts = scores(summary)
    rule = None if calibration is None else threshold_for(calibration, K)
    if rule is None or rule[0] not in doubts:
        return [None] * len(next(iter(doubts.values())))
    measure, samples, threshold = rule
    return [
        {"flag": score > threshold, "score": score, "threshold": threshold, "measure": measure, "samples": samples}
        for score in doubts[measure].tolist()
    ]
