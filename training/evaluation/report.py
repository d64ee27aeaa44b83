"""An evaluation as one self-contained HTML page: no scripts, no fonts, no network."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

from dubito import __version__
from dubito.models.disk import replace_by_draft
from dubito.models.errors import DubitoError
from dubito.models.predictions.answers import rule_for, scores
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.models.report import clean
from dubito.training import metrics
from dubito.training.evaluation import gallery, plots
from dubito.training.evaluation.evaluate import Evaluation
from dubito.training.evaluation.markup import STYLE, pictures, section, table, text
from dubito.training.evaluation.plots import Panel
from dubito.training.evaluation.table import (
    CURVE,
    NAMES,
    PERCENT,
    PROMISES,
    SHIFT,
    beside_plain,
    by_part,
    by_size,
    compared,
    curve_with_auto,
    error_of_promises,
    mean_by_severity,
    number,
    with_error,
)
from dubito.training.metrics import Bin

DOTS = 400  # examples in a scatter plot
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of nominal intervals


class ReportError(DubitoError):
    """A report that cannot be written."""


def open_folder(folder: Path) -> None:
    """Create the folder, and check that it can be written to, before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "it may not be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ReportError(f"cannot write a report to {folder}: {reason}. Name a folder to write to.")


def write(evaluation: Evaluation, about: Mapping[str, str], folder: Path) -> Path:
    """Write index.html into the folder; `about` names the model, the data and the part."""
    open_folder(folder)
    path = folder / "index.html"
    try:
        replace_by_draft(path, page(evaluation, about).encode())
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}.") from None
    return path


def page(e: Evaluation, about: Mapping[str, str]) -> str:
    sections = [_confidence(e) if isinstance(e.inside, Classified) else _predictions(e)]
    sections += [_beside(e), _outside(e), _promised(e), _draws(e), _shift(e), gallery.examples(e), _numbers(e, about)]
    name = Path(about["model"]).name
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(name)} on {text(about['data'])}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            _heading(e, about, name),
            *filter(None, sections),
            f"<footer>Made by dubito {text(__version__)}.</footer>\n</main>\n</body>\n</html>\n",
        ]
    )


# heading


def _heading(e: Evaluation, about: Mapping[str, str], name: str) -> str:
    f, manifest = e.figures, e.model.manifest
    draws = f"K = {f['samples']} draws, seed {f['seed']}" if f["samples"] else "the posterior mean"
    draws = "in closed form" if f["method"] == "probit" else draws
    said = [
        f"{manifest.architecture.name}, {', '.join(manifest.methods)}",
        f"{about['data']}, {'all of it' if about['part'] == 'all' else about['part'] + ' part'}",
        f"{f['examples']:,} examples",
        draws,
    ]
    calibrated = "Not calibrated: it answers without OOD flags and without prediction sets."
    if f["calibration"] is not None:
        c = f["calibration"]
        kind = "sets" if isinstance(e.inside, Classified) else "intervals"
        calibrated = (
            f"Calibrated to flag {c['false_positive_rate']:.0%} of ordinary inputs as out of distribution (by "
            f"{NAMES[c['measure']]}), and for prediction {kind} that hold the truth {c['coverage']:.0%} of the time."
        )
    intro = f"<h1>{text(name)}</h1>\n<p>{text(' · '.join(said))}</p>\n<p class='soft'>{text(calibrated)}</p>"
    return f"<header>\n{intro}\n{_cards(e)}\n</header>"


def _cards(e: Evaluation) -> str:
    f = e.figures
    hidden = {"entropy", "mutual_information"}
    cards = []
    for name in (n for n in NAMES if n in f and n not in hidden):
        notes = [f"± {number(name, f[f'{name}_se'])}"] if f"{name}_se" in f else []
        if f["calibration"] is not None and name in PROMISES:
            notes.append(f"promised {f['calibration'][PROMISES[name]]:.0%}")
        cards.append((NAMES[name], number(name, f[name]), ", ".join(notes)))
    for name, row in f.get("ood", {}).items():
        cards.append((f"AUROC, {name}", f"{row['auroc']:.3f}", f"by {NAMES[row['measure']]}"))
    rows = (f"<div><dt>{text(t)}</dt><dd>{text(v)}<small>{text(n)}</small></dd></div>" for t, v, n in cards)
    return f'<dl class="cards">\n{"".join(rows)}\n</dl>'


# sections: each is empty where it does not apply


def _beside(e: Evaluation) -> str:
    """Comparison with the plain network, as recorded in training, and with another model."""
    plain, against = e.figures.get("plain"), e.figures.get("against")
    parts = []
    if plain is not None:
        heads, rows = beside_plain(plain)
        parts.append(f"<p>{text(plain['verdict'])}</p>\n{table(['', *heads], rows)}")
    if against is not None:
        heads = ["", "this model", Path(against["model"]).name, "difference"]
        parts.append(f"<p>{text(against['verdict'])}</p>\n{table(heads, compared(against))}")
    explanation = (
        "The plain network that this posterior started from, on its own test part, as recorded in training; and the "
        "model that it was to be compared with, on the inputs of this page."
    )
    return section("Beside others", explanation, *parts) if parts else ""


def _confidence(e: Evaluation) -> str:
    assert isinstance(e.inside, Classified)
    f = e.figures
    bins = [Bin(**row) for row in f["reliability"]]
    right = e.inside.probabilities.argmax(-1) == e.examples.y
    curves = {}
    for measure, score in scores(e.inside).items():
        rejected, kept = metrics.rejection(right, score)
        curves[NAMES[measure]] = (rejected.tolist(), kept.tolist())
    rejection = Panel("Rejection", "share rejected", "accuracy of the rest", curves, percent="xy")
    figures = [
        (
            plots.reliability(bins),
            f"Accuracy over confidence in {len(bins)} bins; expected calibration error {f['ece']:.2%}.",
        ),
        (plots.draw(rejection), f"Accuracy of the kept examples, from {f['accuracy']:.2%} with none rejected."),
    ]
    return section(
        "Confidence",
        "On the dotted line a confidence of 80 % is right 8 times in 10; below it the model is too sure of itself. "
        "Fainter bars stand for fewer examples. If doubt is worth something, accuracy rises as the most doubtful "
        "examples are rejected.",
        pictures(figures),
    )


def _predictions(e: Evaluation) -> str:
    assert isinstance(e.inside, Regressed)
    s, y = e.inside, e.examples.y
    std, error = (s.epistemic_variance + s.aleatoric_variance).sqrt(), (y - s.mean).abs()
    calibration, what = e.model.card.calibration, "two standard deviations"
    half = 2 * std
    quantile = rule_for(calibration, e.figures["samples"]).quantile
    if calibration is not None and quantile is not None:
        half, what = quantile * std, f"intervals for {calibration.coverage:.0%}"
    dots = torch.linspace(0, len(y) - 1, min(DOTS, len(y))).long()
    figures = []
    for d in range(min(4, y.shape[1])):
        which = f", output {d + 1}" if y.shape[1] > 1 else ""
        true, mean, halves, stds, errors = (t[dots, d].tolist() for t in (y, s.mean, half, std, error))
        figures += [
            (
                plots.against_truth(f"Predicted and true{which}", true, mean, halves),
                f"Predicted over true values with {what}{which}; RMSE {e.figures['rmse']:.4g}.",
            ),
            (
                plots.error_by_spread(f"Error and doubt{which}", stds, errors, _groups(std[:, d], error[:, d])),
                f"Absolute error over the predicted standard deviation{which}.",
            ),
        ]
    reached = [float((error <= NormalDist().inv_cdf((1 + level) / 2) * std).double().mean()) for level in LEVELS]
    lines = {"coverage": (LEVELS, reached)}
    nominal = Panel("Coverage of Gaussian intervals", "nominal", "reached", lines, unit=True)
    figures.append((plots.draw(nominal), "Share of the targets inside Gaussian intervals over their nominal coverage."))
    return section(
        "Predictions",
        "Errors should be about as large as the standard deviation predicted for them, and intervals should hold as "
        "many targets as they say: above the dotted line they are too wide, below it too narrow.",
        pictures(figures),
    )


def _groups(std: Tensor, error: Tensor) -> tuple[list[float], list[float]]:
    """Root mean squares of both, in groups of equal size by standard deviation."""
    order = std.argsort()
    chunks = order.chunk(min(10, len(order)))
    sides = ([float(t[c].double().square().mean().sqrt()) for c in chunks] for t in (std, error))
    return next(sides), next(sides)


def _outside(e: Evaluation) -> str:
    if not e.outside:
        return ""
    near = scores(e.inside)
    figures, rows = [], []
    for name, (_, summary) in e.outside.items():
        row, far = e.figures["ood"][name], scores(summary)
        lines = {}
        for measure, area in row["measures"].items():
            false, true = metrics.roc(near[measure], far[measure])
            lines[f"{NAMES[measure]}: {area['auroc']:.3f}"] = (false.tolist(), true.tolist())
        panel = Panel(f"ROC: {_short(name)}", "flagged inside", "flagged outside", lines, unit=True)
        figures.append((plots.draw(panel), f"ROC against {name}; area {row['auroc']:.3f} by {NAMES[row['measure']]}."))
        rate = with_error("ood_rate", row) if "ood_rate" in row else "not calibrated"
        for measure, area in row["measures"].items():
            flagged = rate if measure == row["measure"] else ""
            cells = [name, f"{row['examples']:,}", NAMES[measure], f"{area['auroc']:.4f}", f"{area['aupr']:.4f}"]
            rows.append([*cells, flagged])
    return section(
        "Outside",
        "Data from elsewhere, which the model should doubt. The area under the curve is the chance that an example "
        "from outside is doubted more than one from inside; half is guessing.",
        pictures(figures),
        table(["outside", "examples", "measure", "AUROC", "AUPR", "flagged"], rows),
    )


def _promised(e: Evaluation) -> str:
    curve, calibration = e.figures["curve"], e.figures["calibration"]
    names = [n for n in ("coverage", "ood_rate", "set_size", "width") if any(n in row for row in curve)]
    if not names:
        return ""
    promises = {name: calibration[key] for name, key in PROMISES.items()}
    titles = {
        "coverage": "Coverage",
        "ood_rate": "Ordinary inputs flagged",
        "set_size": "Mean set size",
        "width": "Mean interval width",
    }
    figures = []
    for name in names:
        promise = f", promised {promises[name]:.0%}" if name in promises else ""
        alt = f"{titles[name]} over the number of draws{promise}."
        figures.append((plots.draw(_over_draws(curve, name, titles[name], promises.get(name))), alt))
    own = error_of_promises(calibration)
    return section(
        "Promises of the calibration",
        "What was promised on held-out data, and what came of it here, for each number of draws K. The band is two "
        "standard errors of this measurement wide on either side; the calibration's own error comes on top"
        + (f" ({own})." if own is not None else "."),
        pictures(figures),
        *(table(*cells(e.figures)) for key, cells in (("sets", by_size), ("parts", by_part)) if key in e.figures),
    )


def _draws(e: Evaluation) -> str:
    curve = e.figures["curve"]
    if len(curve) == 1:
        return ""
    quality = [n for n in ("accuracy", "rmse", "nll", "ece") if n in curve[0]]
    figures = [
        (plots.draw(_over_draws(curve, n, _title(n))), f"{_title(n)} over the number of draws.") for n in quality
    ]
    names = [n for n in CURVE if n in curve[-1]]
    rows = [
        [str(row["samples"]), *(with_error(n, row) if n in row else "" for n in names)]
        for row in curve_with_auto(e.figures)
    ]
    return section(
        "More draws",
        "Each answer averages K draws from the posterior: more cost more time, and help up to a point. With K = auto "
        "each input gets as many as its answer needs to settle.",
        pictures(figures),
        table(["K", *(NAMES[n] for n in names)], rows),
    )


def _over_draws(curve: Sequence[Mapping[str, float]], name: str, title: str, promised: float | None = None) -> Panel:
    rows = [row for row in curve if name in row]
    line = ([row["samples"] for row in rows], [row[name] for row in rows])
    errors = {NAMES[name]: [2 * row.get(f"{name}_se", 0.0) for row in rows]}
    percent = "y" if name in PERCENT else ""
    lines = {NAMES[name]: line}
    return Panel(title, "draws K", NAMES[name], lines, errors, promised=promised, percent=percent, doubling=True)


def _shift(e: Evaluation) -> str:
    if "shift" not in e.figures:
        return ""
    shift = e.figures["shift"]
    families, clean_row = shift["families"], {"severity": 0.0, **shift["clean"]}
    several = len(families) > 1
    curves = [[clean_row, *rows] for rows in families.values()]
    mean = [clean_row, *mean_by_severity(families)]
    names = [name for name in SHIFT if name in clean_row]
    figures = []
    for name in names:
        lines, faint = {"mean": _by_severity(mean, name)}, [_by_severity(c, name) for c in curves] if several else []
        percent = "y" if name in PERCENT else ""
        panel = Panel(
            _title(name), "severity" if several else "degrees", NAMES[name], lines, faint=faint, percent=percent
        )
        figures.append((plots.draw(panel), f"{_title(name)} as the pictures are changed more and more."))
    what = f"{len(families)} corruptions at five severities (grey), and their mean" if several else "rotation"
    rows = [[k, *(number(names[0], row[names[0]]) for row in c)] for k, c in zip(families, curves, strict=True)]
    return section(
        "Shift",
        f"{shift['examples']:,} of the pictures under {what}. As they get harder to tell, doubt should rise.",
        pictures(figures),
        table([NAMES[names[0]], *(f"{row['severity']:g}" for row in mean)], rows),
    )


def _by_severity(rows: Sequence[Mapping[str, float]], name: str) -> plots.Line:
    return [row["severity"] for row in rows], [row[name] for row in rows]


def _title(name: str) -> str:
    return NAMES[name][0].upper() + NAMES[name][1:]


def _short(name: str) -> str:
    """A name shortened for the title of a plot: the end of a long path."""
    name = clean(name)
    return name if len(name) <= 36 else "…" + name[-35:]


def _numbers(e: Evaluation, about: Mapping[str, str]) -> str:
    numbers = text(json.dumps({**about, **e.figures}, indent=1))
    return f"<h2>All numbers</h2>\n<details><summary>As JSON</summary>\n<pre>{numbers}</pre>\n</details>"
