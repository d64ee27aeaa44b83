"""An evaluation as one HTML page that needs nothing else: no scripts, no fonts, no network."""

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor

from dubito import __version__
from dubito.models.answers import label_of, scores
from dubito.models.errors import DubitoError
from dubito.models.manifest import at_or_below
from dubito.models.report import clean
from dubito.models.uncertainty import Classified, Regressed
from dubito.training import metrics, plots
from dubito.training.data import Examples
from dubito.training.evaluate import Evaluation, Summary, default_measure, flags
from dubito.training.metrics import Bin
from dubito.training.plots import Panel
from dubito.training.table import NAMES, PERCENT, PROMISES, mean_by_severity, number, with_error

SHOWN = 8  # examples of each kind
DOTS = 400  # examples in a scatter plot
VALUES = 8  # of a vector in a table
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of nominal intervals

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --card: #f6f8fa; --line: #d1d9e0;
  --good: #1a7f37; --bad: #c4343f; --accent: #2f81c7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --card: #161b22;
  --line: #30363d; --good: #3fb950; --bad: #f2727c; --accent: #58a6e8 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; -webkit-text-size-adjust: 100% }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1rem 4rem }
h1 { font-size: clamp(1.5rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .4rem; padding-top: 1.2rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem }
p { margin: 0 0 .8rem; max-width: 46rem }
.soft, figcaption, dd small { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem }
dt { font-size: .85rem; color: var(--soft) }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.35 }
dd small { display: block; font-size: .78rem; font-weight: 400 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: 1rem }
.plots figure { margin: 0 } .plots img { display: block; width: 100%; max-width: 30rem; height: auto }
.table { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem .35rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft) }
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .75rem }
.examples figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  overflow: hidden }
.examples img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: #000;
  image-rendering: pixelated }
figcaption { font-size: .78rem; line-height: 1.4; padding: .5rem .6rem; overflow-wrap: anywhere }
figcaption b { color: var(--ink) } .good { color: var(--good) } .bad { color: var(--bad) }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem;
  font-size: .8rem }
footer { margin-top: 3rem; font-size: .85rem; color: var(--soft) }
@media print { body { font-size: 12px } h2 { break-after: avoid } figure { break-inside: avoid } }
"""


class ReportError(DubitoError):
    """A report that cannot be written."""


def open_folder(folder: Path) -> None:
    """Made, and writable: better to know before the work than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    except OSError as error:
        raise ReportError(f"cannot write a report to {folder}: {error.strerror}. Name a folder to write to.") from None


def write(evaluation: Evaluation, about: Mapping[str, str], folder: Path) -> Path:
    """Writes index.html into the folder; `about` names the model, the data and the part."""
    open_folder(folder)
    path = folder / "index.html"
    try:
        path.write_text(page(evaluation, about), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}.") from None
    return path


def page(e: Evaluation, about: Mapping[str, str]) -> str:
    sections = [_classes(e) if isinstance(e.inside, Classified) else _values(e)]
    sections += [_outside(e), _promised(e), _draws(e), _shift(e), _examples(e), _numbers(e, about)]
    name = Path(about["model"]).name
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(name)} on {_text(about['data'])}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            _heading(e, about, name),
            *(section for section in sections if section),
            f"<footer>Made by dubito {_text(__version__)}.</footer>\n</main>\n</body>\n</html>\n",
        ]
    )


# what stands at the top


def _heading(e: Evaluation, about: Mapping[str, str], name: str) -> str:
    f, manifest = e.figures, e.model.manifest
    methods = ", ".join(sorted({layer.method for layer in manifest.layers.values()})) or "deterministic"
    draws = f"K = {f['samples']} draws, seed {f['seed']}" if f["samples"] else "the posterior mean"
    said = [
        f"{manifest.architecture.name}, {methods}",
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
    intro = f"<h1>{_text(name)}</h1>\n<p>{_text(' · '.join(said))}</p>\n<p class='soft'>{_text(calibrated)}</p>"
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
    rows = (f"<div><dt>{_text(t)}</dt><dd>{_text(v)}<small>{_text(n)}</small></dd></div>" for t, v, n in cards)
    return f'<dl class="cards">\n{"".join(rows)}\n</dl>'


# sections: each is empty where it does not apply


def _classes(e: Evaluation) -> str:
    assert isinstance(e.inside, Classified)
    f = e.figures
    bins = [Bin(**row) for row in f["reliability"]]
    right = e.inside.probabilities.argmax(-1) == e.examples.y
    curves = {}
    for measure, score in scores(e.inside).items():
        rejected, kept = metrics.rejection(right, score)
        curves[NAMES[measure]] = (rejected.tolist(), kept.tolist())
    rejection = Panel("Rejection", "share rejected", "accuracy of the rest", curves, x_percent=True, y_percent=True)
    figures = [
        (
            plots.reliability(bins),
            f"Accuracy over confidence in {len(bins)} bins; expected calibration error {f['ece']:.2%}.",
        ),
        (plots.draw(rejection), f"Accuracy of the kept examples, from {f['accuracy']:.2%} with none rejected."),
    ]
    return _section(
        "Confidence",
        "On the dotted line a confidence of 80 % is right 8 times in 10; below it the model is too sure of itself. "
        "Fainter bars stand for fewer examples. If doubt is worth something, accuracy rises as the most doubtful "
        "examples are rejected.",
        _plots(figures),
    )


def _values(e: Evaluation) -> str:
    assert isinstance(e.inside, Regressed)
    s, y = e.inside, e.examples.y
    std, error = (s.epistemic_variance + s.aleatoric_variance).sqrt(), (y - s.mean).abs()
    calibration, quantile, what = e.model.card.calibration, None, "two standard deviations"
    if calibration is not None:
        quantile = at_or_below(calibration.quantiles, e.figures["samples"])
        what = f"intervals for {calibration.coverage:.0%}"
    half = (2.0 if quantile is None else quantile[1]) * std
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
    nominal = Panel(
        "Coverage of Gaussian intervals",
        "nominal",
        "reached",
        {"coverage": (LEVELS, reached)},
        diagonal=True,
        unit=True,
        x_percent=True,
        y_percent=True,
    )
    figures.append((plots.draw(nominal), "Share of the targets inside Gaussian intervals over their nominal coverage."))
    return _section(
        "Predictions",
        "Errors should be about as large as the standard deviation predicted for them, and intervals should hold as "
        "many targets as they say: above the dotted line they are too wide, below it too narrow.",
        _plots(figures),
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
        for measure, found in row["measures"].items():
            false, true = metrics.roc(near[measure], far[measure])
            lines[f"{NAMES[measure]}: {found['auroc']:.3f}"] = (false.tolist(), true.tolist())
        panel = Panel(
            f"ROC: {clean(name)}",
            "flagged inside",
            "flagged outside",
            lines,
            diagonal=True,
            unit=True,
            x_percent=True,
            y_percent=True,
        )
        figures.append((plots.draw(panel), f"ROC against {name}; area {row['auroc']:.3f} by {NAMES[row['measure']]}."))
        rate = with_error("ood_rate", row) if "ood_rate" in row else "not calibrated"
        for measure, found in row["measures"].items():
            flagged = rate if measure == row["measure"] else ""
            cells = [name, f"{row['examples']:,}", NAMES[measure], f"{found['auroc']:.4f}", f"{found['aupr']:.4f}"]
            rows.append([*cells, flagged])
    return _section(
        "Outside",
        "Data from elsewhere, which the model should doubt. The area under the curve is the chance that an example "
        "from outside is doubted more than one from inside; half is guessing.",
        _plots(figures),
        _table(["outside", "examples", "measure", "AUROC", "AUPR", "flagged"], rows),
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
        text = f"{titles[name]} over the number of draws"
        text += f", promised {promises[name]:.0%}." if name in promises else "."
        figures.append((plots.draw(_over_draws(curve, name, titles[name], promises.get(name))), text))
    return _section(
        "Promises of the calibration",
        "What was promised on held-out data, and what came of it here, for each number of draws K. The band is two "
        "standard errors of this measurement wide on either side; the calibration's own error comes on top.",
        _plots(figures),
    )


def _draws(e: Evaluation) -> str:
    curve = e.figures["curve"]
    if len(curve) == 1:
        return ""
    names = [n for n in ("accuracy", "rmse", "nll", "ece", "brier") if n in curve[0]]
    figures = [(plots.draw(_over_draws(curve, n, NAMES[n])), f"{NAMES[n]} over the number of draws.") for n in names]
    keys = ["samples", *names, *(n for n in ("coverage", "set_size", "width", "ood_rate") if n in curve[-1])]
    rows = [[with_error(k, row) if k in row else "" for k in keys] for row in curve]
    return _section(
        "More draws",
        "Each answer averages K draws from the posterior: more cost more time, and help up to a point.",
        _plots(figures),
        _table(["K", *(NAMES[k] for k in keys[1:])], rows),
    )


def _over_draws(curve: Sequence[Mapping[str, float]], name: str, title: str, promised: float | None = None) -> Panel:
    rows = [row for row in curve if name in row]
    line = ([row["samples"] for row in rows], [row[name] for row in rows])
    errors = {name: [2 * row.get(f"{name}_se", 0.0) for row in rows]} if f"{name}_se" in rows[0] else {}
    return Panel(
        title,
        "draws K",
        NAMES[name],
        {name: line},
        errors,
        promised=promised,
        y_percent=name in PERCENT,
        doubling=True,
    )


def _shift(e: Evaluation) -> str:
    if "shift" not in e.figures:
        return ""
    shift = e.figures["shift"]
    families, clear = shift["families"], {"severity": 0.0, **shift["clean"]}
    several = len(families) > 1
    mean = [clear, *mean_by_severity(families)]
    figures = []
    for name in (n for n in ("accuracy", "nll", "ece", "entropy", "mutual_information", "ood_rate") if n in clear):

        def line(rows: Iterable[Mapping[str, float]], name: str = name) -> plots.Line:
            pairs = [(row["severity"], row[name]) for row in rows]
            return [x for x, _ in pairs], [y for _, y in pairs]

        faint = [line([clear, *rows]) for rows in families.values()] if several else []
        panel = Panel(
            NAMES[name],
            "severity" if several else "degrees",
            NAMES[name],
            {"mean": line(mean)},
            faint=faint,
            y_percent=name in PERCENT,
        )
        figures.append((plots.draw(panel), f"{NAMES[name]} as the pictures are changed more and more."))
    what = (
        f"{len(families)} kinds of corruption at five severities: grey lines, and their mean" if several else "rotation"
    )
    rows = [[k, *(number("accuracy", row["accuracy"]) for row in family)] for k, family in families.items()]
    heads = ["accuracy", *(f"{row['severity']:g}" for row in next(iter(families.values())))]
    return _section(
        "Shift",
        f"{shift['examples']:,} of the pictures under {what}. As accuracy falls, doubt should rise.",
        _plots(figures),
        _table(heads, rows),
    )


# examples


@dataclass(frozen=True)
class Group:
    title: str
    examples: Examples
    summary: Summary
    rows: list[int]
    outside: bool


def _examples(e: Evaluation) -> str:
    K, calibration = e.figures["samples"], e.model.card.calibration
    measure = default_measure(e.inside, K, calibration)
    order = scores(e.inside)[measure].argsort(stable=True).tolist()
    n = len(order)
    middle = [order[round(i * (n - 1) / (SHOWN + 1))] for i in range(1, SHOWN + 1)]
    parts = [("Most certain", order[:SHOWN]), ("In between", middle), ("Least certain", order[-SHOWN:])]
    if n < 3 * SHOWN:
        parts = [("From most to least certain", order)]
    groups = [Group(title, e.examples, e.inside, rows, False) for title, rows in parts]
    for name, (examples, summary) in e.outside.items():
        far = scores(summary)[measure].argsort(stable=True, descending=True).tolist()
        flagged = flags(summary, K, calibration)
        if flagged is None:
            groups.append(Group(f"{name}: the most doubtful", examples, summary, far[:SHOWN], True))
            continue
        caught, missed = ([i for i in far if bool(flagged[i]) == wanted] for wanted in (True, False))
        groups.append(Group(f"{name}: rightly flagged", examples, summary, _spread(caught), True))
        groups.append(Group(f"{name}: not flagged", examples, summary, missed[::-1][:SHOWN], True))
    return _section(
        "Examples",
        f"Ordered by {NAMES[measure]}.",
        *(f"<h3>{_text(g.title)}</h3>\n{_group(e, g)}" for g in groups if g.rows),
    )


def _spread(rows: list[int]) -> list[int]:
    """Some of them, evenly from first to last."""
    if len(rows) <= SHOWN:
        return rows
    return [rows[round(i * (len(rows) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def _group(e: Evaluation, g: Group) -> str:
    if g.examples.x.dtype != torch.uint8 or g.examples.x.dim() != 4:
        return _vectors(e, g)
    figures = []
    for i in g.rows:
        told = _told(e, g, i)
        lines = [f"<b>{_text(told['predicted'])}</b>", *(_text(f"{k}: {v}") for k, v in told["doubt"].items())]
        if told["true"] is not None:
            lines.insert(1, f'<span class="{told["mark"]}">true: {_text(told["true"])}</span>')
        alt = f"Predicted {told['predicted']}" + ("" if told["true"] is None else f", true {told['true']}")
        image = f'<img src="{_png(g.examples.x[i])}" alt="{_text(alt)}">'
        figures.append(f"<figure>{image}<figcaption>{'<br>'.join(lines)}</figcaption></figure>")
    return f'<div class="examples">\n{"".join(figures)}\n</div>'


def _vectors(e: Evaluation, g: Group) -> str:
    rows = []
    for i in g.rows:
        values = g.examples.x[i].flatten()
        text = ", ".join(f"{v:.4g}" for v in values[:VALUES].tolist()) + (", …" if len(values) > VALUES else "")
        told = _told(e, g, i)
        truth = [] if g.outside else [told["true"]]
        rows.append([text, told["predicted"], *truth, *told["doubt"].values()])
    heads = ["input", "predicted", *([] if g.outside else ["true"]), *_told(e, g, g.rows[0])["doubt"]]
    return _table(heads, rows)


def _told(e: Evaluation, g: Group, i: int) -> dict[str, Any]:
    """One answer in words; the labels of data from outside mean nothing here."""
    card, s = e.model.card, g.summary
    if isinstance(s, Classified):
        p, leading = s.probabilities[i].max(-1)
        truth = None if g.outside else int(g.examples.y[i])
        return {
            "predicted": f"{label_of(card, int(leading))}, {float(p):.0%}",
            "true": None if truth is None else label_of(card, truth),
            "mark": "good" if truth == int(leading) else "bad",
            "doubt": {"entropy": f"{float(s.entropy[i]):.3g}", "mutual inf.": f"{float(s.mutual_information[i]):.3g}"},
        }
    std = (s.epistemic_variance[i] + s.aleatoric_variance[i]).sqrt()
    pairs = zip(s.mean[i].tolist(), std.tolist(), strict=True)
    epistemic = ", ".join(f"{v:.4g}" for v in s.epistemic_variance[i].sqrt().tolist())
    return {
        "predicted": ", ".join(f"{m:.4g} ± {d:.2g}" for m, d in pairs),
        "true": None if g.outside else ", ".join(f"{v:.4g}" for v in g.examples.y[i].tolist()),
        "mark": "soft",
        "doubt": {"std from weights": epistemic},
    }


def _png(x: Tensor) -> str:
    """A (C, H, W) picture as a data: address; of odd numbers of channels, the first."""
    pixels = x.permute(1, 2, 0).numpy() if len(x) == 3 else x[0].numpy()
    file = io.BytesIO()
    Picture.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _numbers(e: Evaluation, about: Mapping[str, str]) -> str:
    text = json.dumps({**about, **e.figures}, indent=1)
    return f"<h2>All numbers</h2>\n<details><summary>As JSON</summary>\n<pre>{_text(text)}</pre>\n</details>"


# pieces of HTML


def _text(text: str) -> str:
    """Names come from files and folders: nothing in them is markup."""
    return escape("\n".join(clean(line) for line in text.split("\n")))


def _section(title: str, explanation: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{_text(title)}</h2>\n<p>{_text(explanation)}</p>\n{body}\n</section>"


def _plots(figures: Iterable[tuple[str, str]]) -> str:
    images = (f'<figure><img src="{source}" alt="{_text(alt)}"></figure>' for source, alt in figures)
    return f'<div class="plots">\n{"".join(images)}\n</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_text(h)}</th>' for h in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="table"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
