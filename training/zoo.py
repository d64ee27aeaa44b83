"""The zoo's models: made by their steps in zoo.toml, stored in few bytes, measured as stored, with a card."""

import shlex
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from dubito.models import load, save
from dubito.models.fields import Strict
from dubito.models.manifest import Card, Plain, Precision, Zoo
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.models.terminal import remark
from dubito.models.zoo import ZooError
from dubito.training import metrics
from dubito.training.beside import SAMPLES, answers_of, as_stored, beside_plain, figures_of, spoiled
from dubito.training.calibrate import calibrate
from dubito.training.compact import compact
from dubito.training.config import Recipe, read_recipe
from dubito.training.data.data import DataError, Examples, Parts
from dubito.training.evaluation.evaluate import measure, some_of
from dubito.training.evaluation.predicting import ChosenPredictive, Summary
from dubito.training.prune import prune, recipe_of
from dubito.training.recipe import read_parts, train

POINTS = 20  # of a curve
ROUNDED = ("accuracy", "rmse", "nll", "ece", "coverage", "ood_rate")  # figures that are compared before and after
OF_COMPACT = {"steps": 1000, "lr": 3e-2}  # the command's own


class About(Strict):
    """What is said of a data set."""

    title: str
    licence: str


class Steps(Strict):
    """How a model is made, and what is said of it."""

    title: str
    recipe: str
    set: tuple[str, ...] = ()
    plain: tuple[str, ...] | None = None  # what is set besides, for a plain network to compare a posterior that starts
    # from none with
    prune: dict[str, float] | None = None
    compact: dict[str, int] | None = None
    precision: Precision = "float32"
    limits: tuple[str, ...]
    not_for: tuple[str, ...]

    def commands(self) -> tuple[str, ...]:
        """The commands before the model is stored."""
        root = "" if self.recipe == "digits" else " --data-root DIR"
        sets = "".join(f" --set {shlex.quote(change)}" for change in self.set)
        lines, last = [f"dubito train {self.recipe}{sets}{root} --out trained.safetensors"], "trained"
        for step, done, options in (("prune", "pruned", self.prune), ("compact", "compacted", self.compact)):
            if options is not None:
                words = "".join(f" --{key} {value:g}" for key, value in options.items())
                lines.append(f"dubito {step} {last}.safetensors{words}{root} --out {done}.safetensors")
                last = done
        if self.plain is not None:
            sets += "".join(f" --set {shlex.quote(change)}" for change in self.plain)
            lines.append(f"dubito train {self.recipe}{sets}{root} --out plain.safetensors")
        return tuple(lines)


class Kept(Strict):
    """The file zoo.toml."""

    data: dict[str, About]
    models: dict[str, Steps]


@dataclass(frozen=True)
class Where:
    """Where data come from, and where the work is done."""

    data_root: Path | None = None
    download: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)

    @property
    def kind(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"


def kept() -> Kept:
    return Kept.model_validate(tomllib.loads(files("dubito.training").joinpath("zoo.toml").read_text()))


def steps_of(name: str) -> Steps:
    steps = kept().models
    if name not in steps:
        raise ZooError(f"{name[:50]} is not in the zoo; there are: {', '.join(steps)}.")
    return steps[name]


def about(data: str) -> About:
    """What is said of the data set of this name in a recipe."""
    known = kept().data
    if data not in known:
        raise ZooError(f"zoo.toml says nothing of the data {data}; expected a title and a licence under [data].")
    return known[data]


def make(name: str, out: Path, where: Where, *, fresh: bool = False) -> Model | None:
    """Train, prune or distil, and pack; None on ranks other than the first.

    The files between are kept beside `out` until it is written: after an interruption the same call goes on.
    """
    steps, began = steps_of(name), time.monotonic()
    options: dict[str, Any] = vars(where)
    chain: list[tuple[str, Callable[[Path, Path], object]]] = [
        ("trained", lambda _, to: train(read_recipe(steps.recipe, [*steps.set]), to, **options, fresh=fresh))
    ]
    if steps.prune is not None:
        pruning: dict[str, Any] = steps.prune
        chain.append(("pruned", lambda last, to: prune(last, to, **pruning, **options, fresh=fresh)))
    if steps.compact is not None:
        distilling: dict[str, Any] = OF_COMPACT | steps.compact
        chain.append(("compacted", lambda last, to: compact(last, to, **distilling, **options)))
    files = [out.with_name(f"{out.stem}.{step}.safetensors") for step, _ in chain]
    for i, (step, run) in enumerate(chain):
        if fresh or not files[i].exists():
            remark(f"{name}: {step}")
            if run(files[max(0, i - 1)], files[i]) is None:
                return None
    minutes, plain = (time.monotonic() - began) / 60, None
    if steps.plain is not None:
        plain = out.with_name(f"{out.stem}.plain.safetensors")
        if fresh or not plain.exists():
            remark(f"{name}: its plain network")
            if train(read_recipe(steps.recipe, [*steps.set, *steps.plain]), plain, **options, fresh=fresh) is None:
                return None
    packed = pack(name, files[-1], out, where, minutes=minutes, made_on=where.kind, beside=files[0], plain=plain)
    for file in [*files, *([] if plain is None else [plain])]:
        file.unlink()
    return packed


def pack(
    name: str,
    file: str | Path,
    out: Path,
    where: Where,
    *,
    minutes: float,
    made_on: str,
    beside: str | Path | None = None,
    plain: str | Path | None = None,
    examples: int | None = None,
) -> Model:
    """Store a trained model in the zoo's precision, calibrate and measure it as stored, and write its card.

    `beside` is the model that it was pruned or distilled from, whose plain network stands beside this one too; `plain`
    is a plain network that was trained by itself, for a posterior that starts from none. With `examples`, the model
    keeps its calibration and figures, and only that many test inputs are predicted: for the curves, and for what
    rounding changes. See `reword` for a file that is packed already.
    """
    steps, model = steps_of(name), load(file).to(where.device)
    recipe, card = recipe_of(model), model.card
    parts = _parts(file, recipe, card, where)
    column = card.plain
    if column is None and beside is not None:
        column = _plain_of(load(beside), model)
    seed, test, measured_on, rounding = recipe.seed, parts.test, made_on.partition(",")[0], {}
    if examples is not None and examples < len(test):
        test = some_of(test, examples, seed)
    else:
        examples = None
    if steps.precision != model.manifest.precision:
        before = measure(model, test, seed=seed)
        if examples is None:
            model = _stored(model, steps.precision, parts, out)
            after = model.card.metrics
            column, measured_on = None if column is None else _compared(column, after), where.kind
        else:
            model = as_stored(model.network, card, out, steps.precision).to(where.device)
            after = measure(model, test, seed=seed)
        rounding = {key: after[key] - before[key] for key in ROUNDED if key in before}
    if plain is not None:
        column = beside_plain(model, load(plain).network, parts, recipe.calibrate, out, seed)[1]
    said, provenance = about(recipe.data.name), card.provenance
    if recipe.network.weights is not None:  # only the file's name: the folder is that of another machine
        bare = recipe.network.model_copy(update={"weights": Path(recipe.network.weights).name})
        stored = {**(provenance.recipe or {}), "network": bare.model_dump(mode="json")}
        provenance = provenance.model_copy(update={"recipe": stored})
    zoo = Zoo(
        title=steps.title,
        data=said.title,
        licence=said.licence,
        steps=steps.commands(),
        made_on=made_on,
        minutes=minutes,
        measured_on=measured_on,
        limits=steps.limits,
        not_for=steps.not_for,
        **_curves(ChosenPredictive.of(model, SAMPLES, None).predict(model, test.x, seed), test.y),
        rounding=rounding,
        examples=examples,
    )
    save(model.with_card(plain=column, provenance=provenance, zoo=zoo), out)
    return load(out)


def _parts(file: str | Path, recipe: Recipe, card: Card, where: Where) -> Parts:
    parts = read_parts(recipe, where.data_root, where.download)
    if parts.hash != card.provenance.data_hash:
        raise DataError(f"{recipe.data.name} is not what {file} was trained on: its hash is {parts.hash[:12]}….")
    return parts


def compare(name: str, file: str | Path, plain: str | Path, out: Path, where: Where) -> Model:
    """A packed model, measured again beside a plain network that was trained by itself; with the words of zoo.toml."""
    model, said = _packed(name, file)
    model = model.to(where.device)
    card, recipe = model.card, recipe_of(model)
    parts = _parts(file, recipe, card, where)
    own, column = beside_plain(model, load(plain).network, parts, recipe.calibrate, out, recipe.seed)
    found = measure(model, parts.test, seed=recipe.seed) | own
    zoo = said.model_copy(update={"measured_on": where.kind})
    save(model.with_card(metrics=found, plain=column, zoo=zoo), out)
    return load(out)


def remeasure(name: str, file: str | Path, out: Path, where: Where) -> Model:
    """A packed model with the figures and curves that it has as it is stored, on this device; its calibration stays.
    With the words of zoo.toml.

    A model whose figures were those before it was rounded has them in `rounding` from now on, as what they changed by.
    """
    model, said = _packed(name, file)
    model = model.to(where.device)
    card, recipe = model.card, recipe_of(model)
    test = _parts(file, recipe, card, where).test
    found, summary = _figures(model, test, recipe.seed)
    rounding, column = said.rounding, card.plain
    if said.examples is not None:
        rounding = {key: found[key] - card.metrics[key] for key in ROUNDED if key in found and key in card.metrics}
    update: dict[str, Any] = {"measured_on": where.kind, "rounding": rounding, "examples": None}
    zoo = said.model_copy(update=update | _curves(summary, test.y))
    column = None if column is None else _compared(column, found)
    save(model.with_card(metrics=found, plain=column, zoo=zoo), out)
    return load(out)


def reword(name: str, file: str | Path, out: Path) -> Model:
    """A packed model with the words that zoo.toml has now; its figures and curves stay as they are."""
    model, zoo = _packed(name, file)
    save(model.with_card(zoo=zoo), out)
    return load(out)


def _packed(name: str, file: str | Path) -> tuple[Model, Zoo]:
    """A model that is packed already, and its place in the zoo with the words that zoo.toml has now."""
    steps, model = steps_of(name), load(file)
    if (zoo := model.card.zoo) is None or model.manifest.precision != steps.precision:
        raise ZooError(
            f"{file} is not packed in {steps.precision}; expected a file of the zoo, or --minutes of training."
        )
    said = about(recipe_of(model).data.name)
    words: dict[str, Any] = {"title": steps.title, "steps": steps.commands(), "data": said.title}
    words |= {"licence": said.licence, "limits": steps.limits, "not_for": steps.not_for}
    return model, zoo.model_copy(update=words)


def _stored(model: Model, precision: Precision, parts: Parts, out: Path) -> Model:
    """The model in this precision, calibrated and measured anew: thresholds fit the weights as they are stored."""
    recipe = recipe_of(model)
    model.network.set_feature_bank(None)  # that of the stored weights is another
    card = model.card.model_copy(update={"calibration": None, "metrics": {}, "plain": None})
    stored = as_stored(model.network, card, out, precision).to(model.device)
    others = {"validation": parts.validation, "train": parts.train}
    stored = calibrate(stored, parts.calibration, recipe.calibrate, seed=recipe.seed, **others)
    return stored.with_card(metrics=_figures(stored, parts.test, recipe.seed)[0])


def _figures(model: Model, test: Examples, seed: int) -> tuple[dict[str, float], Summary]:
    """Those of the test part with the AUROC against spoiled copies of it, and the predictions."""
    answers = answers_of(model, test, spoiled(test, seed), seed, SAMPLES)
    return measure(model, test, seed=seed) | {"auroc": figures_of(answers, test.y)["auroc"]}, answers.inside


def _plain_of(origin: Model, model: Model) -> Plain | None:
    """The plain column of the model that this one was made from; their differences were not measured."""
    mine, other = model.card.provenance, origin.card.provenance
    if (mine.data_hash, mine.seed) != (other.data_hash, other.seed):
        raise ZooError("the two models were trained on other data or other parts of them; expected the same.")
    return None if origin.card.plain is None else origin.card.plain.model_copy(update={"differences": {}})


def _compared(plain: Plain, after: dict[str, float]) -> Plain:
    """With the differences of the figures as stored; their standard errors are those measured in training, or what
    rounding changed, where that is more."""
    rival, changed = plain.tempered or plain.metrics, {}
    for key, was in plain.differences.items():
        value = after[key] - rival[key]
        changed[key] = was.model_copy(update={"value": value, "se": max(was.se, abs(value - was.value))})
    return plain.model_copy(update={"differences": changed})


def _curves(summary: Summary, y: Tensor) -> dict[str, Any]:
    return {"reliability": tuple(reliability(summary, y)), "risk": tuple(risk(summary, y))}


def reliability(summary: Summary, y: Tensor) -> list[tuple[float, float, float]]:
    """Confidence, accuracy and share of each bin; of a regression: level of a Gaussian interval, coverage, 1."""
    if isinstance(summary, Classified):
        bins = metrics.reliability(summary.probabilities, y)
        return [(_short(b.confidence), _short(b.accuracy), _short(b.share)) for b in bins if b.share]
    strange = (y.double() - summary.mean.double()).abs() / _deviation(summary)  # (N, D)
    levels = [(i + 1) / POINTS for i in range(POINTS - 1)]
    halves = [NormalDist().inv_cdf((1 + level) / 2) for level in levels]
    return [(lv, _short(float((strange <= h).double().mean())), 1.0) for lv, h in zip(levels, halves, strict=True)]


def risk(summary: Summary, y: Tensor) -> list[tuple[float, float]]:
    """Share kept, and the error rate of what is kept (of a regression: RMSE); the least doubtful are kept."""
    if isinstance(summary, Classified):
        confidence, leading = summary.probabilities.max(-1)
        losses, doubt = (leading != y).double(), 1 - confidence
    else:
        losses, doubt = (y.double() - summary.mean.double()).square().mean(-1), _deviation(summary).mean(-1)
    _, of_rest = metrics.rejection(losses, doubt)  # mean loss of what is left after i rejections
    n = len(y)
    kept = [max(1, round(n * (i + 1) / POINTS)) for i in range(POINTS)]
    values = [float(of_rest[n - k]) for k in kept]
    roots = values if isinstance(summary, Classified) else [value**0.5 for value in values]
    return [(_short(k / n), _short(v)) for k, v in zip(kept, roots, strict=True)]


def _deviation(summary: Any) -> Tensor:
    total: Tensor = (summary.epistemic_variance + summary.aleatoric_variance).double().sqrt()
    return total


def _short(value: float) -> float:
    return float(f"{value:.4g}")
