"""Replies as columns of a Parquet file: the fields that `rows_of` gives for each input, without a dictionary each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dubito.models.manifest import Card
from dubito.models.predictions.answers import CERTAINTIES, Columns, Rule, label_of

OOD = pa.struct(
    [
        ("flag", pa.bool_()),
        ("score", pa.float32()),
        ("threshold", pa.float64()),
        ("measure", pa.string()),
        ("samples", pa.int64()),
    ]
)
NUMBERS = pa.list_(pa.float32())


def schema_of(card: Card, classes: bool, files: bool, errors: bool) -> pa.Schema:
    """The columns: the row's number, with `files` its file, a reply's fields, with `errors` what is wrong with it."""
    fields = [("row", pa.int64())] + ([("file", pa.string())] if files else [])
    if classes:
        fields += [("label", pa.string()), ("class", pa.int64()), ("probabilities", NUMBERS)]
        fields += [(name, pa.float32()) for name in CERTAINTIES]
        fields += [("prediction_set", pa.list_(pa.string()))]
    else:
        fields += [] if card.targets is None else [("targets", pa.list_(pa.string()))]
        fields += [(name, NUMBERS) for name in ("mean", "epistemic_variance", "aleatoric_variance")]
        fields += [("interval", pa.list_(pa.list_(pa.float64())))]
    fields += [("ood", OOD), ("samples", pa.int64())]
    return pa.schema(fields + ([("error", pa.string())] if errors else []))


def reply_columns(columns: Columns, rules: Sequence[Rule], card: Card, bad: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """The fields of a reply by name, one value per input; null for bad ones."""
    none = bad | np.array([rule.quantile is None for rule in rules])
    known = (_classes if "probabilities" in columns else _values)(columns, card, none)
    known |= {"ood": _oods(columns, rules, bad), "samples": pa.array(columns["samples"], pa.int64())}
    if not bad.any():
        return known
    rows = pa.array(np.where(bad, -1, np.arange(len(bad))), mask=bad)
    return {name: array.take(rows) for name, array in known.items()}


def _classes(columns: Columns, card: Card, none: NDArray[np.bool_]) -> dict[str, pa.Array]:
    width = columns["probabilities"].shape[1]
    labels = pa.array([label_of(card, c) for c in range(width)], pa.string())
    known = {
        "label": labels.take(pa.array(columns["class"])),
        "class": pa.array(columns["class"], pa.int64()),
        "probabilities": lists(columns["probabilities"].astype(np.float32, copy=False)),
    }
    known |= {name: pa.array(columns[name], pa.float32(), mask=np.isnan(columns[name])) for name in CERTAINTIES}
    if "prediction_set" in columns:
        fits = columns["prediction_set"] & ~none[:, None]
        ends = np.concatenate([[0], fits.sum(1).cumsum()]).astype(np.int32)
        names = labels.take(pa.array(np.nonzero(fits)[1]))
        known["prediction_set"] = pa.ListArray.from_arrays(pa.array(ends), names, mask=pa.array(none))
    else:
        known["prediction_set"] = pa.nulls(len(none), pa.list_(pa.string()))
    return known


def _values(columns: Columns, card: Card, none: NDArray[np.bool_]) -> dict[str, pa.Array]:
    known = {} if card.targets is None else {"targets": pa.array([list(card.targets)] * len(none))}
    for name in ("mean", "epistemic_variance", "aleatoric_variance"):
        known[name] = lists(columns[name].astype(np.float32, copy=False))
    if "interval" in columns:
        pairs = lists(columns["interval"].reshape(-1, 2))
        ends = np.arange(len(none) + 1, dtype=np.int32) * columns["interval"].shape[1]
        known["interval"] = pa.ListArray.from_arrays(pa.array(ends), pairs, mask=pa.array(none))
    else:
        known["interval"] = pa.nulls(len(none), pa.list_(pa.list_(pa.float64())))
    return known


def lists(array: NDArray[Any]) -> pa.ListArray:
    """(B, n) -> B lists of n numbers."""
    ends = np.arange(len(array) + 1, dtype=np.int32) * array.shape[1]
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.ascontiguousarray(array).reshape(-1)))


def _oods(columns: Columns, rules: Sequence[Rule], bad: NDArray[np.bool_]) -> pa.Array:
    if "ood" not in columns:
        return pa.nulls(len(rules), OOD)
    none = bad | np.isnan(columns["ood_score"]) | np.array([rule.ood is None for rule in rules])
    measures, samples, thresholds = zip(*(("", 0, 0.0) if r.ood is None else r.ood for r in rules), strict=True)
    parts: dict[str, pa.Array] = {
        "flag": pa.array(columns["ood"], pa.bool_()),
        "score": pa.array(columns["ood_score"], pa.float32()),
        "threshold": pa.array(thresholds, pa.float64()),
        "measure": pa.array(measures, pa.string()),
        "samples": pa.array(samples, pa.int64()),
    }
    return pa.StructArray.from_arrays([parts[one.name] for one in OOD], fields=list(OOD), mask=pa.array(none))
