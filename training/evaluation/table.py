"""Tables of an evaluation for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dubito.models.report import clean

NAMES = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "max_probability": "max probability",
    "epistemic_variance": "epistemic variance",
    "energy": "energy",
    "knn": "kNN distance",
    "coverage": "coverage",
    "set_size": "set size",
    "width": "interval width",
    "ood_rate": "OOD flags",
    "changed": "classes changed",
}
SHIFT = ("accuracy", "rmse", "nll", "ece", "entropy", "mutual_information", "ood_rate")
CURVE = ("accuracy", "rmse", "nll", "ece", "coverage", "set_size", "width", "ood_rate")
PERCENT = {"accuracy", "ece", "coverage", "ood_rate", "changed"}
FEW = 1000  # calibration examples from which on the error of their thresholds is below a point
TableCells = tuple[list[str], list[list[str]]]  # headings, rows
PROMISES = {"coverage": "coverage", "ood_rate": "false_positive_rate"}  # figure -> key of the calibration


def number(name: str, value: float) -> str:
    return f"{value:.2%}" if name in PERCENT else f"{value:.4g}"


def with_error(name: str, row: Mapping[str, Any]) -> str:
    error = row.get(f"{name}_se")
    return number(name, row[name]) + ("" if error is None else f" ± {number(name, error)}")


def mean_by_severity(families: Mapping[str, list[dict[str, float]]]) -> list[dict[str, float]]:
    """Mean over the families at each severity."""
    rows = zip(*families.values(), strict=True)
    return [{name: sum(row[name] for row in group) / len(group) for name in group[0]} for group in rows]


def curve_with_auto(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the figures by K, the last one for `samples="auto"`."""
    rows = list(figures["curve"])
    if "auto" in figures:
        rows.append({**figures["auto"], "samples": f"auto, ø {figures['auto']['mean_samples']:.1f}"})
    return rows


def show(about: Mapping[str, str], figures: Mapping[str, Any]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    draws = f"K = {figures['samples']}, seed {figures['seed']}" if figures["samples"] else "posterior mean"
    draws = "closed form" if figures["method"] == "probit" else draws
    console.print(
        clean(f"{about['model']} on {about['data']}, {about['part']}: {figures['examples']:,} examples, {draws}")
    )
    console.print(_quality(figures))
    if "coverage_se" in figures:
        console.print("± one standard error of this measurement")
    calibration = figures["calibration"]
    if calibration is None:
        console.print("not calibrated: no OOD flags and no prediction sets")
    elif (said := error_of_promises(calibration)) is not None:
        console.print(said)
    if "sets" in figures:
        console.print(_filled(*by_size(figures), title="coverage by size of the set", box=SIMPLE))
    if "parts" in figures:
        console.print(_filled(*by_part(figures), title=f"coverage by {calibration['per']}", box=SIMPLE))
    if "plain" in figures:
        heads, cells = beside_plain(figures["plain"])
        title = "the plain network on its test part, as recorded in training"
        console.print(_filled(["measure", *heads], cells, title=title))
        console.print(figures["plain"]["verdict"])
    if "against" in figures:
        heads, title = ["measure", "this model", "the other", "difference"], f"against {figures['against']['model']}"
        console.print(_filled(heads, compared(figures["against"]), title=clean(title)))
        console.print(figures["against"]["verdict"])
    if "ood" in figures:
        console.print(_outside(figures))
    if "shift" in figures:
        families, n = figures["shift"]["families"], figures["shift"]["examples"]
        what = next(iter(families)) if len(families) == 1 else f"mean of {len(families)} corruptions"
        clear = {"severity": 0, **figures["shift"]["clean"]}
        rows = [clear, *mean_by_severity(families)]
        title = f"under shift: {what}, {n:,} pictures"
        console.print(_rows(rows, "severity", title, SHIFT))
    if len(figures["curve"]) > 1:
        console.print(_rows(curve_with_auto(figures), "samples", "as draws are added", CURVE))
    if "report" in about:
        console.print(clean(f"wrote {about['report']}"))


def error_of_promises(calibration: Mapping[str, Any]) -> str | None:
    """How far off thresholds from few examples may be; None of many, or where their number is not known."""
    if calibration.get("examples", FEW) >= FEW:
        return None
    coverage, flags = (f"{calibration[f'{key}_se']:.2%}" for key in PROMISES.values())
    return (
        f"calibrated on {calibration['examples']:,} examples: what is promised has a standard error of its own, "
        f"{coverage} (coverage) and {flags} (OOD flags)"
    )


def _quality(figures: Mapping[str, Any]) -> Table:
    calibration = figures["calibration"]
    table = Table("measure", "value")
    if calibration is not None:
        table.add_column("promised")
    for name, title in NAMES.items():
        if name in figures:
            promise = calibration[PROMISES[name]] if calibration is not None and name in PROMISES else None
            cells = [] if calibration is None else ["" if promise is None else f"{promise:.0%}"]
            table.add_row(title, with_error(name, figures), *cells)
    return table


def _filled(heads: Sequence[str], rows: Sequence[Sequence[str]], **more: Any) -> Table:
    table = Table(*heads, **more)
    for row in rows:
        table.add_row(*map(clean, row))
    return table


# headings and rows of the tables that the terminal and the page both show


def beside_plain(plain: Mapping[str, Any]) -> TableCells:
    """The plain network that the posterior started from, on the test part; its names have no heading."""
    tempered = plain["temperature"] is not None
    heads = ["plain network", *([f"with its temperature ({plain['temperature']:.3g})"] if tempered else [])]
    each = [plain["metrics"], *([plain["tempered"]] if tempered else [])]
    return heads, [[NAMES.get(n, n.upper()), *(number(n, m[n]) for m in each)] for n in plain["metrics"]]


def compared(comparison: Mapping[str, Any]) -> list[list[str]]:
    """This model and another, and their differences with standard errors."""
    rows = []
    for name, d in comparison["differences"].items():
        both = [number(name, comparison[whose][name]) for whose in ("mine", "other")]
        rows.append([NAMES.get(name, name.upper()), *both, f"{number(name, d['value'])} ± {number(name, d['se'])}"])
    return rows


def by_size(figures: Mapping[str, Any]) -> TableCells:
    """Coverage by size of the prediction set."""
    rows = []
    for row in figures["sets"]:
        size = str(row["from"]) if row["from"] == row["to"] else f"{row['from']} to {row['to']}"
        rows.append([size, f"{row['examples']:,}", f"{row['share']:.2%}", f"{row['coverage']:.2%}"])
    return ["set size", "examples", "share", "coverage"], rows


def by_part(figures: Mapping[str, Any]) -> TableCells:
    """Coverage by class or group."""
    size, rows = "set_size" if "set_size" in figures["parts"][0] else "width", []
    for row in figures["parts"]:
        promised = f"{row['promised']:.2%} from {row['calibrated_on']:,} examples"
        cells = [row["name"], f"{row['examples']:,}", f"{row['coverage']:.2%}", promised, f"{row[size]:.4g}"]
        rows.append(cells)
    return [figures["calibration"]["per"], "examples", "coverage", "promised", NAMES[size]], rows


def _outside(figures: Mapping[str, Any]) -> Table:
    table = Table(
        "outside",
        "examples",
        "measure",
        "AUROC",
        "AUPR",
        "OOD flags",
        title="telling outside from inside (* the default measure)",
    )
    for name, row in figures["ood"].items():
        for measure, area in row["measures"].items():
            default = measure == row["measure"]
            cells = [f"{area['auroc']:.4f}", f"{area['aupr']:.4f}"]
            flags = with_error("ood_rate", row) if default and "ood_rate" in row else ""
            heading = [clean(name), f"{row['examples']:,}"] if measure == next(iter(row["measures"])) else ["", ""]
            table.add_row(*heading, NAMES[measure] + (" *" if default else ""), *cells, flags)
    return table


def _rows(rows: list[dict[str, Any]], key: str, title: str, names: tuple[str, ...]) -> Table:
    names = tuple(name for name in names if any(name in row for row in rows))
    table = Table("K" if key == "samples" else key, *(NAMES[name] for name in names), title=title, box=SIMPLE)
    for row in rows:
        first = row[key] if isinstance(row[key], str) else f"{row[key]:g}"
        table.add_row(first, *(number(name, row[name]) if name in row else "" for name in names))
    return table
