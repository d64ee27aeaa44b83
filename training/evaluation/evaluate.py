"""What a model is worth on data: its answers, its doubt inside and outside, under shift, and as draws are added."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dubito.models.errors import DubitoError
from dubito.models.manifest import Calibration, Input, Part, Predictive
from dubito.models.names import Measure
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.models.predictions.answers import Rule, auto_rule, closed_rule, columns_of, label_of, rule_for, scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import tally_for
from dubito.models.predictions.uncertainty import Classified, ClassTally, Regressed, known_in
from dubito.training import metrics
from dubito.training.data.data import DataError, Examples, enter
from dubito.training.evaluation.shift import corrupt, families
from dubito.training.seeds import stream
from dubito.training.terminal import bar

REQUESTS = 20  # with draws of their own, as calibration's promises are about a request's fresh draws
GRID = (1, 2, 4, 8, 16, 20, 32, 64)  # K of the curve
SHIFTED = 2000  # pictures, at most, that are shifted: there are up to 75 shifts
SIZES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)  # of prediction sets: the largest of each row of a table
OUTPUTS = 1 << 16  # rows of outputs held at a time

Summary = Classified | Regressed
Figures = dict[str, Any]  # ready for JSON: numbers, names, and lists and dictionaries of them


@dataclass(frozen=True)
class Evaluation:
    figures: Figures
    model: Model
    examples: Examples
    inside: Summary  # the answers to the examples
    outside: dict[str, tuple[Examples, Summary]]  # by name of the data set


def measure(
    model: Model, examples: Examples, *, samples: int = 20, seed: int = 0, method: Predictive | None = None
) -> dict[str, float]:
    """The plain numbers, each finite: quality, and where calibrated, coverage and the rate of OOD flags.

    Without a `method`, of the one that the model answers by.
    """
    check(model, examples)
    way = Way.of(model, samples, method)
    found = way.ask(model, examples.x, seed)
    return _quality(found, examples.y, way.rule(model)) | _changed(model, found, examples.x)


def evaluate(
    model: Model,
    examples: Examples,
    outside: Mapping[str, Examples] | None = None,
    *,
    shift: bool = False,
    samples: int = 20,
    seed: int = 0,
    method: Predictive | None = None,
) -> Evaluation:
    """Everything there is to measure; the answers come along for a report."""
    outside = outside or {}
    check(model, examples)
    for name, others in outside.items():
        _check_inputs(model, others, f"{name}: ")
    if shift:
        _check_pictures(model, examples)
    way, calibration = Way.of(model, samples, method), model.card.calibration
    K, rule = way.K, way.rule(model)
    grid = sorted({*GRID, K} - {0}) if model.factors.random else [1]
    pictures = _some(examples, SHIFTED, seed)
    changes = [(f, s) for f, all_s in families(pictures.x.shape[1]).items() for s in all_s] if shift else []
    asked = sum(map(len, outside.values())) + len(changes) * len(pictures)
    with bar("evaluating", max(grid) * len(examples) + max(1, K) * asked) as advance:
        curve = ask(model, examples.x, grid, seed, advance)
        inside = curve[K] if K else way.ask(model, examples.x, seed)
        answers = {name: way.ask(model, others.x, seed, advance) for name, others in outside.items()}
        shifted: dict[str, list[Figures]] = {}
        for family, severity in changes:
            found = way.ask(model, corrupt(pictures.x, family, severity, seed), seed, advance)
            row = {"severity": severity, **_quality(found, pictures.y, rule)}
            shifted.setdefault(family, []).append(row)
    figures = {
        "task": model.manifest.task.kind,
        "examples": len(examples),
        "samples": K,
        "seed": seed,
        "method": way.method,
        "calibration": promises(calibration),
        **_quality(inside, examples.y, rule, errors=True),
        **_changed(model, inside, examples.x),
        "curve": [
            {"samples": k, **_quality(s, examples.y, rule_for(calibration, k), errors=True)} for k, s in curve.items()
        ],
    }
    if parts := _by_part(model, inside, examples, way):
        figures["parts"] = parts
    settled = ask_settled(model, examples.x, seed)
    if settled is not None:
        figures["auto"] = _auto(*settled, examples.y, calibration)
    if isinstance(inside, Classified):
        if rule.quantile is not None:
            figures["sets"] = by_size(inside, examples.y, rule)
        figures["reliability"] = [vars(b) for b in metrics.reliability(inside.probabilities, examples.y)]
    if outside:
        against = {name: _detection(inside, others, rule) for name, others in answers.items()}
        first = next(iter(against.values()))  # of several, the one that was named first
        figures |= {"measure": first["measure"], "auroc": first["auroc"], "aupr": first["aupr"], "ood": against}
    if shift:
        clean = measure(model, pictures, samples=samples, seed=seed, method=method)
        figures["shift"] = {"examples": len(pictures), "clean": clean, "families": shifted}
    return Evaluation(figures, model, examples, inside, {n: (outside[n], answers[n]) for n in outside})


def flags(summary: Summary, rule: Rule) -> Tensor | None:
    """(N,) whether each input is flagged as from outside; None where that was not calibrated."""
    if rule.ood is None or rule.ood[0] not in scores(summary):
        return None
    measure, _, threshold = rule.ood
    return scores(summary)[measure].double() > threshold


def default_measure(summary: Summary, rule: Rule) -> Measure:
    known = scores(summary)
    return rule.ood[0] if rule.ood is not None and rule.ood[0] in known else next(iter(known))


def _quality(summary: Summary, y: Tensor, rule: Rule, *, errors: bool = False) -> dict[str, float]:
    """With `errors`, the standard errors of what calibration promises too."""
    found = quality(summary, y)
    if isinstance(summary, Classified):
        found |= {name: float(getattr(summary, name).mean()) for name in ("entropy", "mutual_information")}  # or NaN
    for name, values in _promised(summary, y, rule).items():
        found[name] = float(values.double().mean())
        if errors:
            found[f"{name}_se"] = metrics.standard_error(values, REQUESTS)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def quality(summary: Summary, y: Tensor, rows: Tensor | slice = slice(None)) -> dict[str, float]:
    """How good the answers are; of some rows only, as often as these are named, where they are given."""
    y = y[rows]
    if isinstance(summary, Classified):
        p = summary.probabilities[rows]
        return {f.__name__: f(p, y) for f in (metrics.accuracy, metrics.nll, metrics.ece, metrics.brier)}
    mean, variance = summary.mean[rows], (summary.epistemic_variance + summary.aleatoric_variance)[rows]
    return {"rmse": metrics.rmse(mean, y), "nll": metrics.gaussian_nll(mean, variance, y)}


def _promised(summary: Summary, y: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Of each input: is the truth in the set (or interval), how large is that, is the input flagged?"""
    found: dict[str, Tensor] = {}
    if rule.quantile is not None and isinstance(summary, Classified):
        fits = fitting(summary, rule)  # (N, C)
        found = {"coverage": fits.gather(1, y[:, None])[:, 0], "set_size": fits.sum(-1)}
    elif rule.quantile is not None and isinstance(summary, Regressed):
        half = rule.quantile * (summary.epistemic_variance + summary.aleatoric_variance).double().sqrt()  # (N, D)
        inside = (y.double() - summary.mean.double()).abs() <= half
        found = {"coverage": inside.all(-1), "width": 2 * half.mean(-1)}  # all outputs at once, as calibrated
    flagged = flags(summary, rule)
    return found if flagged is None else {**found, "ood_rate": flagged}


def fitting(summary: Classified, rule: Rule) -> Tensor:
    """(N, C): the classes in the prediction set of each input."""
    return torch.from_numpy(columns_of(summary, [rule] * len(summary.probabilities))["prediction_set"])


def by_size(summary: Classified, y: Tensor, rule: Rule) -> list[Figures]:
    """Coverage of the sets of each size; large sizes share a row."""
    fits = fitting(summary, rule)
    size, hit = fits.sum(-1), fits.gather(1, y[:, None])[:, 0].double()
    rows = []
    for low, high in pairwise((-1, *SIZES, fits.shape[1])):
        mine = (size > low) & (size <= high)
        if n := int(mine.sum()):
            sizes = {"from": low + 1, "to": high}
            rows.append({**sizes, "examples": n, "share": n / len(y), "coverage": float(hit[mine].mean())})
    return rows


def _by_part(model: Model, summary: Summary, examples: Examples, way: "Way") -> list[Figures]:
    """Of a calibration by class or by group: what each was promised, and what it got."""
    calibration, rows = model.card.calibration, []
    named: list[tuple[str, Tensor, str | None, Part]]
    if calibration is not None and calibration.classes is not None:
        named = [(label_of(model.card, c), examples.y == c, None, p) for c, p in enumerate(calibration.classes)]
    elif calibration is not None and calibration.groups is not None and examples.group is not None:
        named = [(g, torch.from_numpy(examples.group == g), g, p) for g, p in calibration.groups.items()]
    else:
        return []
    for name, mine, group, part in named:
        if not mine.any():
            continue
        some = type(summary)(**{key: values[mine] for key, values in known_in(summary).items()})
        found = _promised(some, examples.y[mine], way.rule(model, group))
        means = {key: float(values.double().mean()) for key, values in found.items() if key != "ood_rate"}
        known = {"name": name, "examples": int(mine.sum()), "calibrated_on": part.examples, "promised": part.coverage}
        rows.append({**known, **means})
    return rows


def promises(calibration: Calibration | None) -> Figures | None:
    if calibration is None:
        return None
    found = calibration.model_dump(include={"coverage", "false_positive_rate", "measure", "temperature", "sets"})
    per = "class" if calibration.classes is not None else "group" if calibration.groups is not None else None
    return found if per is None else found | {"per": per}


def _auto(summary: Summary, drawn_: Tensor, y: Tensor, calibration: Calibration | None) -> Figures:
    """The same with `samples="auto"`, whose thresholds are of their own."""
    mean = float(drawn_.double().mean())
    limits = {"tolerance": TOLERANCE, "max_samples": AT_MOST, "mean_samples": mean}
    return limits | _quality(summary, y, auto_rule(calibration, AT_MOST), errors=True)


def _detection(inside: Summary, outside: Summary, rule: Rule) -> Figures:
    """How well each measure tells the outside from the inside, and how often the flags fire there."""
    near, far = scores(inside), scores(outside)
    measures = {m: {"auroc": metrics.auroc(near[m], far[m]), "aupr": metrics.aupr(near[m], far[m])} for m in near}
    default = default_measure(inside, rule)
    found: Figures = {"examples": len(far[default]), "measure": default, **measures[default], "measures": measures}
    flagged = flags(outside, rule)
    if flagged is not None:
        found["ood_rate"] = float(flagged.double().mean())
        error = metrics.standard_error(flagged, REQUESTS)
        found |= {"ood_rate_se": error} if math.isfinite(error) else {}
    return found


def _changed(model: Model, found: Summary, x: Tensor) -> dict[str, float]:
    """The share of inputs that a linearised network names another class for than the network itself does."""
    if not model.manifest.closed_form or not isinstance(found, Classified):
        return {}
    plain = ask(model, x, [0], 0)[0]
    assert isinstance(plain, Classified)
    return {"changed": float((found.probabilities.argmax(-1) != plain.probabilities.argmax(-1)).double().mean())}


# asking


@dataclass(frozen=True)
class Way:
    """How a model is asked: by K draws, or in closed form, for which K is 0."""

    method: Predictive
    K: int

    @classmethod
    def of(cls, model: Model, samples: int, method: Predictive | None) -> "Way":
        method = model.method if method is None else method
        return cls(method, 0 if method == "probit" else drawn(model, samples))

    def rule(self, model: Model, group: str | None = None) -> Rule:
        calibration = model.card.calibration
        return closed_rule(calibration, group) if self.method == "probit" else rule_for(calibration, self.K, group)

    def ask(
        self,
        model: Model,
        x: Tensor,
        seed: int,
        advance: Callable[[int], None] = lambda rows: None,
        *,
        requests: int = REQUESTS,
    ) -> Summary:
        if self.method == "sampling":
            return ask(model, x, [self.K], seed, advance, requests=requests)[self.K]
        return ask_closed(model, x, advance)


def ask_closed(model: Model, x: Tensor, advance: Callable[[int], None] = lambda rows: None) -> Summary:
    """The answers in closed form."""
    found = []
    for piece in x.split(1024):
        found.append(model.predict(enter(piece, declared_by(model)), method="probit").summary)
        advance(len(piece))
    return _joined(found, torch.arange(len(x)))


def ask(
    model: Model,
    x: Tensor,
    grid: list[int],
    seed: int,
    advance: Callable[[int], None] = lambda rows: None,
    *,
    requests: int = REQUESTS,
) -> dict[int, Summary]:
    """The answers for each K of a rising grid, as so many requests would get them; K draws are the first of more."""
    rows = _shared_out(len(x), requests)
    found: dict[int, list[Summary]] = {K: [] for K in grid}
    for i, request in enumerate(rows):
        for piece in request.split(max(1, OUTPUTS // max(1, *grid))):
            for K, summary in _nested(
                model, enter(x[piece], declared_by(model)), grid, stream(seed, "request", i)
            ).items():
                found[K].append(summary)
            advance(len(piece) * max(1, *grid))
    order = torch.cat(rows).argsort()
    return {K: _joined(parts, order) for K, parts in found.items()}


def ask_settled(model: Model, x: Tensor, seed: int, *, requests: int = REQUESTS) -> tuple[Summary, Tensor] | None:
    """The answers with `samples="auto"`, and the draws (N,) that each took; None where draws are never needed."""
    rows = _shared_out(len(x), requests)
    found: list[Summary] = []
    drawn_: list[Tensor] = []
    for i, request in enumerate(rows):
        for piece in request.split(OUTPUTS // AT_MOST):
            prediction = model.predict(enter(x[piece], declared_by(model)), "auto", stream(seed, "request", i))
            if prediction.settled is None:
                return None
            found.append(prediction.summary)
            drawn_.append(prediction.settled.samples)
    order = torch.cat(rows).argsort()
    return _joined(found, order), torch.cat(drawn_)[order]


def _shared_out(n: int, requests: int) -> list[Tensor]:
    """The rows of each request: row i belongs to request i mod `requests`, so that sorted data are mixed."""
    return [torch.arange(i, n, requests) for i in range(min(requests, n))]


def _nested(model: Model, x: Tensor, grid: list[int], seed: int) -> dict[int, Summary]:
    if len(grid) == 1:
        return {grid[0]: model.predict(x, grid[0], seed).summary}
    drawn_ = model.predict(x, grid[-1], seed, keep_outputs=True)
    assert drawn_.outputs is not None
    tally, found = tally_for(model.network), {}
    for low, high in pairwise([0, *grid]):
        if drawn_.read is not None and isinstance(tally, ClassTally):
            tally.add(drawn_.outputs[low:high], drawn_.read[low:high, :, 0])
        else:
            tally.add(drawn_.outputs[low:high])
        found[high] = tally.summary()
    return found


def _joined(parts: list[Summary], order: Tensor) -> Summary:
    kind = type(parts[0])
    return kind(**{name: torch.cat([vars(part)[name] for part in parts]).cpu()[order] for name in known_in(parts[0])})


def drawn(model: Model, samples: int) -> int:
    return samples if model.factors.random else 1


def _some(examples: Examples, most: int, seed: int) -> Examples:
    if len(examples) <= most:
        return examples
    return examples[torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:most]]


# checking


def declared_by(model: Model) -> Input:
    if model.card.input is None:
        raise DataError("this artifact does not say what its inputs look like; save it with a card that does.")
    return model.card.input


def check(model: Model, examples: Examples) -> None:
    _check_inputs(model, examples)
    task, y = model.manifest.task, examples.y
    if task.kind == "regression":
        if y.dim() != 2 or y.shape[1] != task.outputs:
            raise DataError(f"targets have shape {tuple(y.shape)}; this model predicts {task.outputs} numbers each.")
        return
    if y.dim() != 1 or y.is_floating_point():
        raise DataError(f"targets came as {y.dtype} of shape {tuple(y.shape)}; this model predicts classes (N,).")
    answer = model.predict(enter(examples.x[:1], declared_by(model)), 1, 0).summary
    classes = answer.probabilities.shape[1] if isinstance(answer, Classified) else 0
    if not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(
            f"classes run from {int(y.min())} to {int(y.max())}; this model knows 0 to {classes - 1}. "
            "Bring data with the model's classes; as data from outside (--ood), their labels do not matter."
        )


def _check_inputs(model: Model, examples: Examples, prefix: str = "") -> None:
    if len(examples) == 0:
        raise DataError(f"{prefix}there are no examples; expected at least one.")
    try:
        enter(examples.x[:1], declared_by(model))
    except DubitoError as error:
        raise DataError(f"{prefix}{error}") from None


def _check_pictures(model: Model, examples: Examples) -> None:
    if declared_by(model).image is None or examples.x.dtype != torch.uint8 or examples.x.dim() != 4:
        raise DataError(
            f"--shift changes pictures; these examples are {examples.x.dtype} of shape {tuple(examples.x.shape[1:])}. "
            "Leave it out, or bring a model and data of pictures."
        )
