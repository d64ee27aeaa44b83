"""The commands of the papers' tables: recipes can be read, rows are kept, broken promises are seen."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import caps, cifar, fashion, promises, reproduce, uci
from dubito.models.zoo import named
from dubito.training.config import read_recipe


def test_every_method_of_a_table_has_a_recipe_that_can_be_read() -> None:
    for method, changes in cifar.METHODS.items():
        read_recipe(cifar.OWN_RECIPES.get(method, "cifar10"), changes)
    for method, changes in fashion.METHODS.items():
        read_recipe(fashion.OWN_RECIPES.get(method, "fashion-mnist"), changes)
    for method in reproduce.CLASSIFY:
        assert read_recipe("mnist", reproduce.changes_of(method)).posterior.method == method
    for regression in reproduce.REGRESS:
        assert read_recipe(uci.RECIPES.get(regression, "uci")).task == "regression"
    assert set(reproduce.PAPER) <= set(cifar.METHODS)
    assert {*caps.FIGURE_4, *caps.USUAL} == set(caps.TRIALS)


def test_a_broken_promise_is_seen() -> None:
    """400 examples: a coverage of 0.9 has a standard error of 0.015, false alarms of 0.05 one of 0.011.
    Calibrated on as many, the threshold has the same."""

    def row(coverage: float, alarms: float, calibrated: int = 10**6) -> dict[str, Any]:
        of_K = {"samples": 20, "coverage": coverage, "coverage_se": 0.001, "ood_rate": alarms, "ood_rate_se": 0.001}
        sizes = {"examples": 400, "calibrated_on": calibrated}
        return {"name": "m", **sizes, "coverage": 0.9, "false_positive_rate": 0.05, "by_K": [of_K]}

    assert promises.broken(row(0.9, 0.05)) == []
    assert promises.broken(row(0.99, 0.07)) == []  # more than promised, and within three standard errors
    assert promises.broken(row(0.84, 0.05)) == ["coverage 0.840 at K = 20"]
    assert promises.broken(row(0.84, 0.05, 400)) == []
    assert promises.broken(row(0.83, 0.05, 400)) == ["coverage 0.830 at K = 20"]
    assert promises.broken(row(0.9, 0.1)) == ["false alarms 0.100 at K = 20"]
    assert promises.broken(row(0.9, 0.01)) == ["false alarms 0.010 at K = 20"]


def test_promises_of_the_digits_are_those_of_their_test_part(few_here: None) -> None:
    row = promises.measured(named("digits"), None, 120, torch.device("cpu"))
    assert (row["examples"], row["coverage"], row["false_positive_rate"]) == (120, 0.9, 0.05)
    assert [of_K["samples"] for of_K in row["by_K"]] == [1, 4, 20]
    assert all(0.9 <= of_K["coverage"] <= 1 and 0 <= of_K["ood_rate"] < 0.2 for of_K in row["by_K"])
    promises.table_of([row])


def test_corruptions_are_averaged_over_their_kinds() -> None:
    families = {
        "noise": [{"severity": 1, "accuracy": 0.9, "ece": 0.1}, {"severity": 2, "accuracy": 0.7, "ece": 0.2}],
        "blur": [{"severity": 1, "accuracy": 0.8, "ece": 0.3}, {"severity": 2, "accuracy": 0.5, "ece": 0.4}],
    }
    found = reproduce.by_severity(families)
    assert found["severities"] == [1, 2]
    assert found["accuracy"] == pytest.approx([0.85, 0.6])
    assert found["ece"] == pytest.approx([0.2, 0.3])


def test_areas_by_measure_are_means_over_the_seeds_that_have_it() -> None:
    def row(seed: int, **areas: float) -> dict[str, Any]:
        return {
            "method": "ffg-u",
            "seed": seed,
            "aurocs": {"near": areas},
            "auprs": {"near": dict.fromkeys(areas, 0.25)},
        }

    table = reproduce.outside([row(0, entropy=0.8, knn=0.9), row(1, entropy=0.6), {"method": "plain", "seed": 0}])
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["ffg-u", "ffg-u"], ["entropy", "knn"], ["2", "1"], ["0.700, 0.250", "0.900, 0.250"]]


def test_charts_are_drawn_from_the_rows_that_were_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar").mkdir()
    usual = {"seed": 0, "set": [], "measure": "entropy", "aurocs": {"cifar100": {"entropy": 0.9}}}
    rows = [
        {"method": "plain", "parameters": 11_000_000, "bytes": 44_000_000, "accuracy": 0.95, "ece": 0.01, **usual},
        {"method": "ffg-u", "parameters": 2_500_000, "bytes": 10_000_000, "accuracy": 0.948, "ece": 0.006, **usual},
    ]
    (tmp_path / "cifar" / "figures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "times.jsonl").write_text(json.dumps({"method": "ffg-u", "device": "CPU", "ms": 4.0}) + "\n")
    monkeypatch.setattr(sys, "argv", ["reproduce", "charts", "--keep", str(tmp_path)])
    reproduce.main()
    assert {path.name for path in tmp_path.glob("*.png")} == {"accuracy.png", "ece.png", "auroc.png"}


def test_sets_of_classification_are_read_as_they_are_published(tmp_path: Path) -> None:
    (tmp_path / "letter-recognition.data").write_text("T,2,8\nI,5,12\n")
    (tmp_path / "magic04.data").write_text(",".join(["1.5"] * 10) + ",g\n" + ",".join(["2"] * 10) + ",h\n")
    line = ",".join(["4000.5"] * 14)
    (tmp_path / "eeg_eye_state.arff").write_text(f"@RELATION eeg\n@DATA\n{line},0\n{line},1\n")
    x, y = reproduce.letter(tmp_path)
    assert (x.tolist(), y.tolist()) == ([[2, 8], [5, 12]], ["T", "I"])
    x, y = reproduce.magic(tmp_path)
    assert (x.shape, y.tolist()) == ((2, 10), ["g", "h"])
    x, y = reproduce.eeg(tmp_path)
    assert (x.shape, y.tolist()) == ((2, 14), [0, 1])
    assert x.dtype == np.float64
