"""Thresholds and quantiles on held-out data: flags then fire, and prediction sets cover, as often as was chosen."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dubito.models.adaptive import AT_MOST, TOLERANCE
from dubito.models.answers import scores
from dubito.models.directions import set_directions
from dubito.models.errors import DubitoError
from dubito.models.manifest import Auto, Calibration, Closed, Measure, Predictive
from dubito.models.model import Model
from dubito.models.uncertainty import Classified
from dubito.training.config import Calibrate
from dubito.training.data import Examples, enter
from dubito.training.evaluate import GRID, Summary, Way, ask, ask_closed, ask_settled, check, declared_by, drawn
from dubito.training.metrics import auroc
from dubito.training.seeds import stream

PATCHES_FROM = 128  # examples that the directions of way 3 are found on
SPOILED = 1000  # examples that the measure is chosen on
CHOOSING = 20  # K of that choice
ASKED = 100  # requests: inputs that share draws err together, so few requests give thresholds that hold for few draws
OWN_DRAWS = 1 << 40  # added to the seed, so that no evaluation meets the draws that calibration used


class CalibrationError(DubitoError):
    """Data that a model cannot be calibrated on."""


def check_held_out(model: Model, held: Examples) -> None:
    """Refuse data that holds inputs which the model was trained on: thresholds set on them would be too tight."""
    seen = set(model.card.provenance.train_sample)
    back = [i for i, f in enumerate(held.fingerprints()) if f in seen] if seen else []
    if back:
        which = ", ".join(map(str, back[:5])) + (", …" if len(back) > 5 else "")
        raise CalibrationError(
            f"these {len(held)} examples overlap the training part: {len(back)} of them (examples {which}) are among "
            f"the {len(seen)} training inputs that the artifact remembers. Calibrate on data that it has not seen."
        )


def calibrate(model: Model, held: Examples, settings: Calibrate | None = None, *, seed: int = 0) -> Model:
    """A copy of the model with directions, thresholds, quantiles and temperature found on `held`.

    What was measured before was measured under others: the copy has no metrics.
    """
    settings = Calibrate() if settings is None else settings
    check_enough(len(held), settings)
    model = Model(copy.deepcopy(model.network), model.manifest).with_card(calibration=None, metrics={}, plain=None)
    check(model, held)
    set_directions(model.network, enter(held.x[:PATCHES_FROM], declared_by(model)), settings.directions, seed)
    model = Model(model.network, model.manifest)  # its factors are computed anew
    if settings.method == "probit" and model.manifest.subnetwork is None:
        raise CalibrationError("method is 'probit'; only a subnetwork-laplace model has a closed form. Leave it out.")
    seed += OWN_DRAWS
    T = 1.0
    if settings.temperature:
        T = best_temperature(model, held, seed)
        model = with_temperature(model, settings, T)
    drawn_for = ask(model, held.x, list(GRID), seed, requests=ASKED) | ask(model, held.x, [0], seed)
    limits = {K: _limits(summary, held.y, settings) for K, summary in sorted(drawn_for.items())}
    settled = ask_settled(model, held.x, seed, requests=ASKED)
    auto = None
    if settled is not None:
        thresholds, quantile = _limits(settled[0], held.y, settings)
        auto = Auto(tolerance=TOLERANCE, max_samples=AT_MOST, thresholds=thresholds, quantile=quantile)
    closed = None
    if model.manifest.subnetwork is not None:
        thresholds, quantile = _limits(ask_closed(model, held.x), held.y, settings)
        measure = choose_measure(model, held, seed, "probit")
        closed = Closed(measure=measure, thresholds=thresholds, quantile=quantile)
    found = Calibration(
        false_positive_rate=settings.false_positive_rate,
        coverage=settings.coverage,
        measure=choose_measure(model, held, seed),
        thresholds={m: {K: found[m] for K, (found, _) in limits.items()} for m in limits[0][0]},
        quantiles={K: quantile for K, (_, quantile) in limits.items()},
        auto=auto,
        temperature=T,
        closed=closed,
        method=settings.method or ("sampling" if closed is None else "probit"),
    )
    return model.with_card(calibration=found)


def _limits(summary: Summary, y: Tensor, settings: Calibrate) -> tuple[dict[Measure, float], float]:
    """The threshold of each measure, and the quantile of the conformal score."""
    thresholds = {m: outer_quantile(values, 1 - settings.false_positive_rate) for m, values in scores(summary).items()}
    return thresholds, outer_quantile(strangeness(summary, y), settings.coverage)


def check_enough(n: int, settings: Calibrate) -> None:
    """n + 1 examples in order must leave one beyond the share asked for."""
    share = max(settings.coverage, 1 - settings.false_positive_rate)
    least = max(20, math.ceil(share / (1 - share) - 1e-9))
    if n < least:
        raise CalibrationError(
            f"{n} examples are too few to calibrate on: a coverage of {settings.coverage} and false positives at "
            f"{settings.false_positive_rate} need at least {least}. Bring more examples (in a recipe, raise "
            "data.calibration), or ask for less."
        )


def with_temperature(model: Model, settings: Calibrate, T: float) -> Model:
    """The model with a temperature alone, under which the rest is found."""
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
    """The smallest of the values that one more example of the same kind stays within with probability ≥ share."""
    rank = math.ceil((len(values) + 1) * share - 1e-9)  # (n + 1)·0.9 may come out a hair above a whole number
    return float(values.double().sort().values[rank - 1])


def strangeness(summary: Summary, y: Tensor) -> Tensor:
    """The conformal score of the true answer: 1 − p_y, or the largest |y − mean|/std over the outputs."""
    if isinstance(summary, Classified):
        return 1 - summary.probabilities.double().gather(1, y[:, None])[:, 0]
    std = (summary.epistemic_variance + summary.aleatoric_variance).double().sqrt()
    return ((y.double() - summary.mean.double()).abs() / std).amax(-1)


def best_temperature(model: Model, held: Examples, seed: int) -> float:
    """The T that minimises the NLL of the mean over draws of softmax(logits/T): golden section on log T."""
    if model.network.task.kind == "regression":
        raise CalibrationError("a temperature belongs to classification; regression learns its noise.")
    K = drawn(model, CHOOSING)
    x = enter(held.x, declared_by(model))
    pieces: list[tuple[Tensor, Tensor]] = []
    for i, (some, y) in enumerate(zip(x.split(1024), held.y.split(1024), strict=True)):
        outputs = model.predict(some, K, stream(seed, "temperature", i), keep_outputs=True).outputs
        assert outputs is not None
        pieces.append((outputs.cpu(), y))

    def loss(log_T: float) -> float:
        total = 0.0
        for outputs, y in pieces:
            log_p = (outputs / math.exp(log_T)).log_softmax(-1).gather(2, y.expand(len(outputs), -1)[..., None])
            total -= float((log_p[..., 0].logsumexp(0) - math.log(len(outputs))).double().sum())
        return total

    low, high, golden = math.log(0.1), math.log(10), (math.sqrt(5) - 1) / 2
    for _ in range(25):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return math.exp((low + high) / 2)


def choose_measure(model: Model, held: Examples, seed: int, method: Predictive = "sampling") -> Measure:
    """The measure that best tells held-out examples from spoiled copies of them: no OOD data are needed."""
    rng = torch.Generator().manual_seed(seed)
    x = held.x[torch.randperm(len(held), generator=rng)[:SPOILED]]
    way = Way.of(model, CHOOSING, method)
    inside = scores(way.ask(model, x, seed))
    total = dict.fromkeys(inside, 0.0)
    if not model.factors.random:
        total.pop("mutual_information", None)  # one function agrees with itself
    for spoiled in spoil(x, rng):
        outside = scores(way.ask(model, spoiled, seed))
        for measure in total:
            total[measure] += auroc(inside[measure], outside[measure])
    return max(total, key=total.__getitem__)


def spoil(x: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
    """Inputs (N, …) that keep the data's values and lose its structure, each in a way of its own.

    All numbers of an input in another order (the same for all); half of them, or half of the picture's quarters, from
    another input; and noise over the range of the values.
    """
    n, other = x[0].numel(), x[torch.randperm(len(x), generator=rng)]
    yield x.flatten(1)[:, torch.randperm(n, generator=rng)].view_as(x)
    yield torch.where(torch.rand(x.shape, generator=rng) < 0.5, x, other)
    if x.dim() == 4:
        h, w = x.shape[2] // 2, x.shape[3] // 2
        mixed = x.clone()
        mixed[:, :, :h, w:], mixed[:, :, h:, :w] = other[:, :, :h, w:], other[:, :, h:, :w]
        yield mixed.roll((h, w), (2, 3))
    low, high = x.flatten(1).double().aminmax(dim=0)
    noise = low + (high - low) * torch.rand(len(x), n, generator=rng, dtype=torch.float64)
    yield (noise.round() if not x.is_floating_point() else noise).to(x.dtype).view_as(x)
