"""Promises of the zoo: coverage of prediction sets and rate of false alarms on test data, by number of draws.

    python -m benchmarks.promises --data-root DIR [NAME ...] [--json FILE] [--examples 2000]

For every model of `dubito zoo` (or those named) whose data are in DIR: the test part, which neither training nor
calibration has seen, is predicted with each K of the calibration's grid, divided into requests with draws of their own.
Standard errors come from the means of the requests; whether a promise is broken is said by these and by the error of
the calibration, which had a part of its own. Promised are the coverage and the rate of false alarms that the
calibration names; where the most probable class alone is right more often than the promised coverage, sets hold more
than promised. `--examples` takes so many of the test part, at random. Rows in the file are not measured again.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models import load
from dubito.models.zoo import Listed, listed
from dubito.training.data.data import DataError, part_of
from dubito.training.data.sources import read_for
from dubito.training.evaluation.evaluate import evaluate

CLEAR = 3.0  # standard errors beyond which a promise counts as broken
KEPT = ("coverage", "coverage_se", "ood_rate", "ood_rate_se")

Row = dict[str, Any]


def measured(one: Listed, root: Path | None, examples: int | None, device: torch.device) -> Row:
    """Coverage and false alarms of a model for each K, with standard errors; K = 0 is the closed form."""
    model = load(f"zoo:{one.name}").to(device)
    data = read_for(model.manifest, one.data, root)
    test = part_of(data, model.card)[1]
    if examples is not None and examples < len(test):
        test = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:examples]]
    calibration = model.card.calibration
    assert calibration is not None  # every model of the zoo has one
    figures = evaluate(model, test, seed=1).figures  # other draws than those of the card
    by_K = [{"samples": row["samples"], **{key: row[key] for key in KEPT if key in row}} for row in figures["curve"]]
    if figures["method"] == "probit":
        by_K.insert(0, {"samples": 0, **{key: figures[key] for key in KEPT if key in figures}})
    return {
        "name": one.name,
        "sha256": one.sha256,
        "examples": len(test),
        "calibrated_on": len(part_of(data, model.card, "calibration")[1]),
        "coverage": calibration.coverage,
        "false_positive_rate": calibration.false_positive_rate,
        "accuracy": figures.get("accuracy"),
        "by_K": by_K,
    }


def broken(row: Row) -> list[str]:
    """Promises that a model does not keep: coverage below, or false alarms away from what was promised."""
    said = []
    for of_K in row["by_K"]:
        below = row["coverage"] - of_K["coverage"] > CLEAR * spread_of(of_K["coverage_se"], row["coverage"], row)
        away = abs(of_K["ood_rate"] - row["false_positive_rate"])
        if below:
            said.append(f"coverage {of_K['coverage']:.3f} at K = {of_K['samples']}")
        if away > CLEAR * spread_of(of_K["ood_rate_se"], row["false_positive_rate"], row):
            said.append(f"false alarms {of_K['ood_rate']:.3f} at K = {of_K['samples']}")
    return said


def spread_of(measured: float, share: float, row: Row) -> float:
    """The larger of the measured standard error and that of a share of as many examples, and calibration's own beside:
    its threshold is a quantile of as many examples as it had."""
    variance = share * (1 - share)
    return math.hypot(max(measured, math.sqrt(variance / row["examples"])), math.sqrt(variance / row["calibrated_on"]))


def table_of(rows: list[Row]) -> Table:
    grid = sorted({of_K["samples"] for row in rows for of_K in row["by_K"]})
    table = Table("model", "examples", "promised", *(f"K = {K}" for K in grid), title="Coverage %, then false alarms %")
    for row in rows:
        by_K = {of_K["samples"]: of_K for of_K in row["by_K"]}
        for key, promised in (("coverage", row["coverage"]), ("ood_rate", row["false_positive_rate"])):
            cells = [f"{100 * by_K[K][key]:.1f} ± {100 * by_K[K][f'{key}_se']:.1f}" if K in by_K else "" for K in grid]
            first = (row["name"], f"{row['examples']:,}") if key == "coverage" else ("", "")
            table.add_row(*first, f"{100 * promised:.0f}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of the zoo; without any, all")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--examples", type=int, help="of each test part, at most")
    parser.add_argument("--json", type=Path, help="append each model as a line; those that it holds are not run again")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows_of_now = [row for row in kept_rows(args.json) if "calibrated_on" in row]  # older ones are measured again
    known = {(row["name"], row["sha256"]): row for row in rows_of_now}
    rows = []
    for one in listed():
        if args.names and one.name not in args.names:
            continue
        if (one.name, one.sha256) not in known:
            try:
                known[one.name, one.sha256] = measured(one, args.data_root, args.examples, device)
            except DataError as error:
                print(f"{one.name} is left out: {error}")
                continue
            keep_row(args.json, known[one.name, one.sha256])
        rows.append(known[one.name, one.sha256])
    Console(width=200).print(table_of(rows))
    for row in rows:
        print(f"{row['name']}: {'; '.join(broken(row)) or 'both promises kept'}")
    print(machine())


if __name__ == "__main__":
    main()
