"""Calibration on held-out data: OOD thresholds by false positive rate, quantiles of prediction sets by coverage."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.models.conversion.directions import set_directions
from dubito.models.errors import DubitoError
from dubito.models.manifest import NEW_MEASURES, Auto, Calibration, Closed, Part, Predictive, Sets
from dubito.models.names import Measure
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.models.predictions.answers import label_of, scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.sets import class_scores
from dubito.models.predictions.uncertainty import Classified
from dubito.models.terminal import bar, remark
from dubito.training.config import Calibrate
from dubito.training.data.data import DataSet, Examples, enter, own_parts
from dubito.training.data.spoil import SPOILED, spoil, to_spoil
from dubito.training.evaluation.predicting import (
    GRID,
    ChosenPredictive,
    Summary,
    check_examples,
    declared_by,
    draws_for,
    predict_auto,
    predict_grid,
    predict_probit,
)
from dubito.training.feature_bank import make_bank
from dubito.training.metrics import placements
from dubito.training.seeds import stream
from dubito.training.temperature import fit_temperature

PATCHES_FROM = 128  # examples on which the directions of the factored law are found
KINDS = 6  # of inputs on which a measure is chosen: as they are, and five kinds of spoiled copies
CHOOSING = 20  # K with which a measure, a temperature or the constants of RAPS are chosen
CLEARLY = 2.0  # standard errors by which a new measure must be better
# inputs of one request share draws, so their errors are correlated: thresholds need many requests
CALIBRATION_REQUESTS = 100
FEWEST = 20  # fewest examples for a temperature or the constants of RAPS
WITHOUT_TEMPERATURE = ": no temperature (--no-temperature, in a recipe calibrate.temperature = false)."
MANY = 1000  # examples for thresholds: from here on they count for the temperature too
LAMBDAS, K_REGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), (2, 3, 5, 8)  # grid of the constants of RAPS
MOST_GROUPS = 1 << 12
REPEATED = 0.01  # share of examples that may be training inputs without a word
FOUND = 0.05  # share of the remembered training inputs that may be among so many examples without a word
OWN_DRAWS = 1 << 40  # added to the seed, so that an evaluation never uses the draws of the calibration


class CalibrationError(DubitoError):
    """Data or settings with which a model cannot be calibrated."""


def _trained_on(model: Model, examples: Examples) -> tuple[list[int], int]:
    """Which of the examples are among the training inputs that the artifact remembers, and how many it does; none where
    they are so few that they may be by chance, as rows of categories recur."""
    seen = set(model.card.provenance.train_sample)
    back = [i for i, f in enumerate(examples.fingerprints()) if f in seen] if seen else []
    return back if len(back) > min(REPEATED * len(examples), FOUND * len(seen)) else [], len(seen)


def check_held_out(model: Model, held: Examples) -> None:
    """Refuse data with inputs of the training part: thresholds set on them would be too tight."""
    back, remembered = _trained_on(model, held)
    if back:
        which = ", ".join(map(str, back[:5])) + (", …" if len(back) > 5 else "")
        raise CalibrationError(
            f"these {len(held)} examples overlap the training part: {len(back)} of them (examples {which}) are among "
            f"the {remembered} training inputs that the artifact remembers. Calibrate on data that it has not seen."
        )


def tell_training_inputs(model: Model, examples: Examples) -> None:
    """Say so where figures are measured on what the model was trained on."""
    back, remembered = _trained_on(model, examples)
    if back:
        remark(
            f"{len(back)} of {len(examples)} inputs are among the {remembered} training inputs that the artifact "
            "remembers: figures on such are too good. Measure on data that it has not seen"
        )


def calibrate(
    model: Model,
    held: Examples,
    settings: Calibrate | None = None,
    *,
    seed: int = 0,
    validation: Examples | None = None,
    train: Examples | None = None,
) -> Model:
    """A copy of the model with directions, thresholds and quantiles found on `held`.

    The constants of RAPS come from `validation`, since a quantile is valid only for scores that were fixed before;
    without it, from a part of `held` that is then not used for the rest. So does a temperature, unless `held` is large:
    then it comes from both (`for_temperature`). The feature bank is made of
    `train`, and kept if `knn` becomes the measure. The copy has no metrics, since the old ones were measured with other
    thresholds.
    """
    settings = Calibrate() if settings is None else settings
    held, validation = divided(held, validation, settings, model.manifest.task.kind, seed)
    model = Model(copy.deepcopy(model.network), model.manifest).with_card(calibration=None, metrics={}, plain=None)
    check_examples(model, held)
    set_directions(model.network, enter(held.x[:PATCHES_FROM], declared_by(model)), settings.directions, seed)
    model = Model(model.network, model.manifest)  # with new factors
    if settings.method == "probit" and not model.manifest.closed_form:
        raise CalibrationError("method is 'probit'; only a subnetwork-laplace model has a closed form. Leave it out.")
    seed += OWN_DRAWS
    T = 1.0
    if settings.temperature:
        assert validation is not None
        T = best_temperature(model, for_temperature(validation, held), seed)
        model = with_temperature(model, settings, T)
    sets = choose_sets(model, validation, settings, seed)
    parts = _parts_of(model, held, settings)
    model = try_bank(model, train, settings, seed)
    with bar("calibrating", CHOOSING * KINDS * min(len(held), SPOILED) + 2 * GRID[-1] * len(held)) as advance:
        measure, auroc = choose_measure(model, held, seed, given=settings.measure, advance=advance)
        measure_closed = measure
        if model.manifest.closed_form:
            measure_closed, _ = choose_measure(model, held, seed, "probit", given=settings.measure)
        if "knn" not in (measure, measure_closed):
            model = with_bank(model, None)
        sampled = predict_grid(model, held.x, list(GRID), seed, advance, requests=CALIBRATION_REQUESTS)
        settled = predict_auto(model, held.x, seed, advance, requests=CALIBRATION_REQUESTS)
    sampled |= predict_grid(model, held.x, [0], seed)
    limits = {K: _limits(sampled[K], held.y, settings, sets, parts) for K in sorted(sampled)}
    of_auto = None if settled is None else _limits(settled[0], held.y, settings, sets, parts)
    of_closed = None
    if model.manifest.closed_form:
        of_closed = _limits(predict_probit(model, held.x), held.y, settings, sets, parts)
    calibration = Calibration(
        false_positive_rate=settings.false_positive_rate,
        coverage=settings.coverage,
        measure=measure,
        thresholds={m: {K: limit.thresholds[m] for K, limit in limits.items()} for m in limits[0].thresholds},
        quantiles={K: limit.quantile for K, limit in limits.items()},
        auto=None if of_auto is None else Auto(tolerance=TOLERANCE, max_samples=AT_MOST, **_of_all(of_auto)),
        temperature=T,
        closed=None if of_closed is None else Closed(measure=measure_closed, **_of_all(of_closed)),
        method=settings.method or ("sampling" if of_closed is None else "probit"),
        sets=sets,
        auroc=auroc,
        **_of_parts(parts, settings, limits, of_auto, of_closed),
    )
    return model.with_card(calibration=calibration)


def divided(
    held: Examples, validation: Examples | None, settings: Calibrate, task: str, seed: int
) -> tuple[Examples, Examples | None]:
    """The examples for thresholds, and those for constants; raises where there are too few of either."""
    raps = settings.sets == "raps" and task == "classification"
    n = _for_constants(held, validation) if settings.temperature or raps else 0
    if n:
        order = torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))
        held, validation = held[order[n:].sort().values], held[order[:n].sort().values]
    check_enough(len(held), settings, n)
    _check_parts(held, settings, task)
    return held, validation


def _for_constants(held: Examples, validation: Examples | None) -> int:
    """How many of the examples a temperature or the constants of RAPS take, where the validation part has too few."""
    return 0 if validation is not None and len(validation) >= FEWEST else max(min(FEWEST, len(held)), len(held) // 5)


def calibrated_on(model: Model, data: DataSet) -> int | None:
    """Number of examples that the thresholds come from; None: not calibrated, or on other data than these."""
    card = model.card
    if (calibration := card.calibration) is None:
        return None
    if counted := calibration.classes or (*(calibration.groups or {}).values(),):
        return sum(part.examples for part in counted)
    parts = own_parts(data, card)
    if parts is None or not card.metrics:  # calibration on other data leaves a card without metrics
        return None
    constants = calibration.temperature != 1 or (calibration.sets is not None and calibration.sets.score == "raps")
    held = parts.calibration
    return len(held) - (_for_constants(held, parts.validation) if constants else 0)


# prediction sets


@dataclass(frozen=True)
class Limits:
    """Thresholds and quantiles for one number of draws."""

    thresholds: dict[Measure, float]  # of the OOD flags
    quantile: float  # of the conformal score
    of_parts: list[float]  # quantile of each class or group


def _limits(summary: Summary, y: Tensor, settings: Calibrate, sets: Sets | None, parts: Mapping[str, Tensor]) -> Limits:
    thresholds = {m: outer_quantile(values, 1 - settings.false_positive_rate) for m, values in scores(summary).items()}
    strange = strangeness(summary, y, sets)
    quantile = outer_quantile(strange, settings.coverage)
    return Limits(thresholds, quantile, [_own(strange[rows], settings.coverage, quantile) for rows in parts.values()])


def _own(strange: Tensor, coverage: float, of_all: float) -> float:
    """Quantile of one class or group: with too few examples the largest score, with none the quantile of all."""
    if len(strange) == 0:
        return of_all
    return outer_quantile(strange, min(coverage, promised(len(strange))))


def promised(n: int) -> float:
    """Largest coverage that n examples can guarantee, with their largest score as the quantile."""
    return n / (n + 1)


def _of_all(limits: Limits) -> dict[str, Any]:
    return {"thresholds": limits.thresholds, "quantile": limits.quantile}


def _of_parts(
    parts: Mapping[str, Tensor],
    settings: Calibrate,
    limits: Mapping[int, Limits],
    of_auto: Limits | None,
    of_closed: Limits | None,
) -> dict[str, Any]:
    """The entries `classes` or `groups` of a calibration."""
    if settings.per is None:
        return {}
    entries = {
        name: Part(
            examples=len(rows),
            coverage=min(settings.coverage, promised(len(rows))),
            quantiles={K: limit.of_parts[i] for K, limit in limits.items()},
            auto=None if of_auto is None else of_auto.of_parts[i],
            closed=None if of_closed is None else of_closed.of_parts[i],
        )
        for i, (name, rows) in enumerate(parts.items())
    }
    return {"classes": tuple(entries.values())} if settings.per == "class" else {"groups": entries}


def _parts_of(model: Model, held: Examples, settings: Calibrate) -> dict[str, Tensor]:
    """Rows of the examples of each class, in order, or of each group, by name."""
    if settings.per == "group":
        assert held.group is not None
        return {str(name): torch.from_numpy(np.flatnonzero(held.group == name)) for name in np.unique(held.group)}
    if settings.per is None:
        return {}
    answer = model.predict(enter(held.x[:1], declared_by(model)), 1, 0).summary
    assert isinstance(answer, Classified)
    return {label_of(model.card, c): (held.y == c).nonzero()[:, 0] for c in range(answer.probabilities.shape[1])}


def _check_parts(held: Examples, settings: Calibrate, task: str) -> None:
    """Refuse data that cannot be divided by class or group as `settings.per` says."""
    if settings.per == "class" and task == "regression":
        raise CalibrationError("per is 'class', but this model predicts numbers. Leave it out, or say 'group'.")
    if settings.per != "group":
        return
    if held.group is None:
        raise CalibrationError(
            "per is 'group', but these data name no groups: add an array `group` to an .npz file, or name a column of "
            "a table as data.group in training."
        )
    if (n := len(np.unique(held.group))) > MOST_GROUPS:
        raise CalibrationError(f"these data name {n:,} groups; expected {MOST_GROUPS:,} at most.")


def too_small(calibration: Calibration, labels: Sequence[str] | None) -> list[str]:
    """One sentence for each class or group that had too few examples for the coverage."""
    if calibration.classes is not None:
        named = [(f"class {labels[c] if labels else c}", part) for c, part in enumerate(calibration.classes)]
    else:
        named = [(f"group {name}", part) for name, part in (calibration.groups or {}).items()]
    needed = math.ceil(calibration.coverage / (1 - calibration.coverage) - 1e-9)
    said = []
    for name, part in named:
        if part.examples < needed:
            truth = f"{part.coverage:.0%}" if part.examples else "nothing of its own"
            said.append(
                f"{name} has {part.examples} calibration examples; {calibration.coverage:.0%} needs {needed}, so it is "
                f"promised {truth}"
            )
    return said


def choose_sets(model: Model, validation: Examples | None, settings: Calibrate, seed: int) -> Sets | None:
    """How classes are scored; for RAPS, with the constants that give the smallest sets on the validation part."""
    if model.manifest.task.kind == "regression":
        return None
    if settings.sets != "raps":
        return Sets(score=settings.sets)
    assert validation is not None
    check_examples(model, validation)
    summary = ChosenPredictive.of(model, CHOOSING, None).predict(model, validation.x, seed)
    assert isinstance(summary, Classified)
    p = summary.probabilities.numpy()
    share = min(settings.coverage, promised(len(p)))

    def size(sets: Sets) -> float:
        quantile = outer_quantile(strangeness(summary, validation.y, sets), share)
        return float((class_scores(p, sets) <= quantile).mean())

    tried = [Sets(score="raps", lam=lam, k_reg=k) for lam in LAMBDAS for k in K_REGS if k <= max(K_REGS[0], p.shape[1])]
    return min([Sets(score="raps"), *tried], key=size)  # of ties the first, which is APS


def check_enough(n: int, settings: Calibrate, apart: int = 0) -> None:
    """Refuse fewer examples than the coverage and false positive rate need; `apart` more are used for constants."""
    share = max(settings.coverage, 1 - settings.false_positive_rate)
    least = max(20, math.ceil(share / (1 - share) - 1e-9))
    if n < least:
        raise CalibrationError(
            f"{n + apart} examples are too few to calibrate on: a coverage of {settings.coverage} and false positives "
            f"at {settings.false_positive_rate} need at least {least}"
            + (f", beside {apart} for the temperature or the constants of RAPS" if apart else "")
            + ". Bring more examples (in a recipe, raise data.calibration), or ask for less"
            + (WITHOUT_TEMPERATURE if apart and n + apart >= least else ".")
        )


def with_temperature(model: Model, settings: Calibrate, T: float) -> Model:
    """The model with a calibration that holds only a temperature."""
    calibration = Calibration(
        false_positive_rate=settings.false_positive_rate,
        coverage=settings.coverage,
        measure="entropy",
        thresholds={"entropy": {0: 0}},
        quantiles={0: 0},
        temperature=T,
    )
    return model.with_card(calibration=calibration)


def outer_quantile(values: Tensor, share: float) -> float:
    """Conformal quantile: the smallest value that a further example stays within with probability ≥ share."""
    rank = math.ceil((len(values) + 1) * share - 1e-9)  # (n + 1)·0.9 may be rounded to just above a whole number
    return float(values.double().sort().values[rank - 1])


def strangeness(summary: Summary, y: Tensor, sets: Sets | None) -> Tensor:
    """Conformal score of the true class; for regression, the largest |y − mean|/std over the outputs."""
    if isinstance(summary, Classified):
        of_classes = torch.from_numpy(class_scores(summary.probabilities.numpy(), sets))
        return of_classes.gather(1, y[:, None])[:, 0]
    std = (summary.epistemic_variance + summary.aleatoric_variance).double().sqrt()
    return ((y.double() - summary.mean.double()).abs() / std).amax(-1)


def for_temperature(validation: Examples, held: Examples) -> Examples:
    """The examples that a temperature is fitted on: `validation`, and `held` if it has `MANY` examples.

    The error of T falls with their number. One of so many hardly moves T, so that thresholds found on `held` hold.
    """
    return validation if len(held) < MANY else validation + held


def best_temperature(model: Model, held: Examples, seed: int) -> float:
    """The most probable temperature on `held`."""
    if model.network.task.kind == "regression":
        raise CalibrationError("a temperature belongs to classification; regression learns its noise.")
    K = draws_for(model, CHOOSING)
    x = enter(held.x, declared_by(model))
    answers = []
    for i, (some, y) in enumerate(zip(x.split(1024), held.y.split(1024), strict=True)):
        outputs = model.predict(some, K, stream(seed, "temperature", i), keep_outputs=True).outputs
        assert outputs is not None
        answers.append((outputs.cpu(), y))
    return fit_temperature(answers)


def try_bank(model: Model, train: Examples | None, settings: Calibrate, seed: int) -> Model:
    """The model with a feature bank of `train`, if one can be made; without `train`, with its present bank."""
    if model.manifest.task.kind == "regression":
        if settings.measure not in (None, "epistemic_variance"):
            raise CalibrationError(f"measure is {settings.measure!r}; of numbers it is 'epistemic_variance', or none.")
        return model
    wanted = settings.measure in (None, "knn") and settings.bank > 0
    if not wanted or (train is None and model.network.feature_bank is None):
        if settings.measure == "knn":
            raise CalibrationError(
                "measure is 'knn', but there is no bank of training features, and none can be made: "
                + ("bank is 0." if not settings.bank else "calibrate on the data that the model was trained on.")
            )
        return with_bank(model, None)
    if train is None:
        return model
    bank = make_bank(model, train, settings.bank, seed)
    if bank is None:
        said = "the network's outputs are not made by one linear layer of at most 8,192 features, so it has no bank"
        if settings.measure == "knn":
            raise CalibrationError(f"measure is 'knn', but {said} to compare with. Leave it out.")
        remark(f"{said}: knn is not among the OOD measures.")
    return with_bank(model, bank)


def with_bank(model: Model, bank: FeatureBank | None) -> Model:
    """The model with another feature bank, or none; its network is changed in place."""
    if bank is None and model.network.feature_bank is None:
        return model
    model.network.set_feature_bank(bank)
    entry = None if bank is None else bank.entry
    return Model(model.network, model.manifest.model_copy(update={"feature_bank": entry}))


def choose_measure(
    model: Model,
    held: Examples,
    seed: int,
    predictive: Predictive = "sampling",
    *,
    given: Measure | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> tuple[Measure, dict[Measure, float]]:
    """The measure that best separates held-out examples from spoiled copies of them (or `given`), and all AUROCs.

    No OOD data are needed.

    The entropy is taken, which hangs least on K, unless another measure beats it by two standard errors: below that the
    order of measures is chance. Energy and feature distances, tried last, must beat the best of the others as clearly:
    they say nothing about the prediction itself, and a feature bank costs memory and time.
    """
    chosen = ChosenPredictive.of(model, CHOOSING, predictive)
    rng = torch.Generator().manual_seed(seed)
    x = to_spoil(held.x, rng)
    inside = scores(chosen.predict(model, x, seed, advance))
    if given is not None and given not in inside:
        raise CalibrationError(f"measure is {given!r}; this model has {', '.join(inside)}.")
    if not model.factors.random:
        inside.pop("mutual_information", None)  # zero without draws
    placed_by: dict[Measure, list[tuple[Tensor, Tensor]]] = {measure: [] for measure in inside}
    for spoiled in spoil(x, rng):
        outside = scores(chosen.predict(model, spoiled, seed, advance))
        for measure, pairs in placed_by.items():
            pairs.append(placements(inside[measure], outside[measure]))
    # (2, n): placements of inside and of outside examples, mean over the kinds of spoiling
    placed = {m: torch.stack([torch.stack(pair) for pair in pairs]).mean(0) for m, pairs in placed_by.items()}
    best, *others = sorted(placed, key=lambda m: (m in NEW_MEASURES, m != "entropy", -float(placed[m][0].mean())))
    for measure in others:
        gain = placed[measure] - placed[best]
        if float(gain[0].mean()) > CLEARLY * float((gain.var(1) / gain.shape[1]).sum().sqrt()):
            best = measure
    return best if given is None else given, {m: float(shares[0].mean()) for m, shares in placed.items()}
