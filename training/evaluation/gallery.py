"""Examples for a report: inputs from most to least certain, and from outside, each with its prediction."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor

from dubito.models.predictions.answers import label_of, rule_for, scores
from dubito.models.predictions.uncertainty import Classified
from dubito.training.data.data import Examples
from dubito.training.evaluation.evaluate import Evaluation, default_measure, flags
from dubito.training.evaluation.markup import section, table, text
from dubito.training.evaluation.predicting import Summary
from dubito.training.evaluation.table import NAMES

SHOWN = 8  # examples of each kind
VALUES = 8  # of a vector in a table
DOUBT = "Entropy is all doubt, mutual information (MI) the part that more training data would remove, both in nats."


@dataclass(frozen=True)
class ExampleGroup:
    title: str
    examples: Examples
    summary: Summary
    rows: list[int]
    outside: bool


def examples(e: Evaluation) -> str:
    rule = rule_for(e.model.card.calibration, e.figures["samples"])
    measure = default_measure(e.inside, rule)
    order = scores(e.inside)[measure].argsort(stable=True).tolist()
    n = len(order)
    middle = [order[round(i * (n - 1) / (SHOWN + 1))] for i in range(1, SHOWN + 1)]
    parts = [("Most certain", order[:SHOWN]), ("In between", middle), ("Least certain", order[-SHOWN:])]
    if n < 3 * SHOWN:
        parts = [("From most to least certain", order)]
    groups = [ExampleGroup(title, e.examples, e.inside, rows, False) for title, rows in parts]
    for name, (examples, summary) in e.outside.items():
        far = scores(summary)[measure].argsort(stable=True, descending=True).tolist()
        flagged = flags(summary, rule)
        if flagged is None:
            groups.append(ExampleGroup(f"{name}: the most doubtful", examples, summary, far[:SHOWN], True))
            continue
        caught, missed = ([i for i in far if bool(flagged[i]) == wanted] for wanted in (True, False))
        groups.append(ExampleGroup(f"{name}: rightly flagged", examples, summary, _spread(caught), True))
        groups.append(ExampleGroup(f"{name}: not flagged", examples, summary, missed[::-1][:SHOWN], True))
    return section(
        "Examples",
        f"Ordered by {NAMES[measure]}. {DOUBT if isinstance(e.inside, Classified) else ''}",
        *(f"<h3>{text(g.title)}</h3>\n{_group(e, g)}" for g in groups if g.rows),
    )


def _spread(rows: list[int]) -> list[int]:
    """At most `SHOWN` rows, evenly spaced from first to last."""
    if len(rows) <= SHOWN:
        return rows
    return [rows[round(i * (len(rows) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def _group(e: Evaluation, g: ExampleGroup) -> str:
    if g.examples.x.dtype != torch.uint8 or g.examples.x.dim() != 4:
        return _vectors(e, g)
    figures = []
    for i in g.rows:
        words = _words(e, g, i)
        lines = [f"<b>{text(words['predicted'])}</b>", *(text(f"{k}: {v}") for k, v in words["doubt"].items())]
        if words["true"] is not None:
            lines.insert(1, f'<span class="{words["mark"]}">true: {text(words["true"])}</span>')
        alt = f"Predicted {words['predicted']}" + ("" if words["true"] is None else f", true {words['true']}")
        image = f'<img src="{_png(g.examples.x[i])}" alt="{text(alt)}">'
        figures.append(f"<figure>{image}<figcaption>{'<br>'.join(lines)}</figcaption></figure>")
    return f'<div class="examples">\n{"".join(figures)}\n</div>'


def _vectors(e: Evaluation, g: ExampleGroup) -> str:
    rows = []
    for i in g.rows:
        values = g.examples.x[i].flatten()
        start = ", ".join(f"{v:.4g}" for v in values[:VALUES].tolist()) + (", …" if len(values) > VALUES else "")
        words = _words(e, g, i)
        truth = [] if g.outside else [words["true"]]
        rows.append([start, words["predicted"], *truth, *words["doubt"].values()])
    heads = ["input", "predicted", *([] if g.outside else ["true"]), *_words(e, g, g.rows[0])["doubt"]]
    return table(heads, rows)


def _words(e: Evaluation, g: ExampleGroup, i: int) -> dict[str, Any]:
    """One prediction in words; labels of data from outside are not shown."""
    card, s = e.model.card, g.summary
    if isinstance(s, Classified):
        p, leading = s.probabilities[i].max(-1)
        truth = None if g.outside else int(g.examples.y[i])
        return {
            "predicted": f"{label_of(card, int(leading))}, {float(p):.0%}",
            "true": None if truth is None else label_of(card, truth),
            "mark": "good" if truth == int(leading) else "bad",
            "doubt": {
                "entropy": f"{float(s.entropy[i]):.2g}",
                **({} if s.mutual_information[i].isnan() else {"MI": f"{float(s.mutual_information[i]):.2g}"}),
            },
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
    """A (C, H, W) picture as a data: URL; the first channel, if there are not three."""
    pixels = x.permute(1, 2, 0).numpy() if len(x) == 3 else x[0].numpy()
    file = io.BytesIO()
    Picture.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
