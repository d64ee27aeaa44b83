"""How long the phases of a recipe will take: a few steps of each are timed, on copies of the networks."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.models.manifest import Input
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.prediction import predict
from dubito.models.terminal import duration
from dubito.training import beside
from dubito.training.calibrate import CALIBRATION_REQUESTS, CHOOSING
from dubito.training.config import Fit, Recipe
from dubito.training.data.augment import augmentation
from dubito.training.data.data import Parts, enter
from dubito.training.data.spoil import SPOILED
from dubito.training.evaluation.predicting import GRID, REQUESTS
from dubito.training.fit.fit import FitRun
from dubito.training.fit.function_space import FunctionSpace

WARM_UP = {"cpu": 3, "cuda": 12}  # steps that are not timed: on a GPU, a step is a graph only after some
TIMES, ENOUGH = 9, 3.0  # calls that are timed, or fewer once they have taken so many seconds
AUTO = 32  # draws of `samples="auto"`, about
ROWS = 32  # of a timed prediction


@dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    said: str = ""  # epochs, steps and batch
    most: bool = False  # it may stop before

    @property
    def about(self) -> str:
        return f"{'at most' if self.most else 'about'} {duration(self.seconds)}"


def time_phases(
    recipe: Recipe,
    parts: Parts,
    declared: Input,
    plain: BayesianNetwork,
    posterior: BayesianNetwork,
    device: torch.device,
    context: Tensor | None = None,
) -> list[Phase]:
    """Every phase of a training, with calibration and measurement; changes both networks and torch's generators."""
    fits: list[tuple[str, int, BayesianNetwork, Fit]] = []
    if recipe.fit.pretrain_epochs:
        fits.append(("plain network", 1, plain, recipe.pretraining))
    if recipe.tune is not None:
        trials = len(recipe.tune.trials)
        fits.append((f"{trials} trials", trials, posterior, recipe.trial({}).fit))
    fits.append(("posterior" if recipe.laplace is None else "plain network", 1, posterior, recipe.fit))
    augment, phases = augmentation(recipe.data, parts.train), []
    for name, times, network, fit in fits:
        functions = None
        if fit.objective == "function-space":
            functions = FunctionSpace.of(recipe.context, network.to(device), parts.train, declared, context)
        data = (parts.train, parts.validation, declared)
        run = FitRun(network, *data, fit, recipe.seed, device, augment, functions)
        seconds = times * fit.epochs * (_step(run) * len(run.batches) + _timed(run.validate))
        each = " each" if times > 1 else ""
        said = f"{fit.epochs} epochs{each} of {len(run.batches)} steps with {fit.batch} examples"
        phases.append(Phase(name, seconds, said, fit.patience is not None))
    x = enter(parts.test.x[:ROWS].to(device), declared)
    return [*phases, Phase("calibration and measurement", _held_out(posterior.eval(), parts, x))]


def in_all(phases: Sequence[Phase]) -> Phase:
    return Phase("in all", sum(p.seconds for p in phases), most=any(p.most for p in phases))


def _timed(work: Callable[[], object]) -> float:
    """Median time of some calls: other work on the machine disturbs single ones."""
    times: list[float] = []
    while len(times) < TIMES and sum(times) < ENOUGH:
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _step(run: FitRun) -> float:
    """Time of a step, with its batch."""
    epochs = itertools.count()

    def take() -> None:
        x, y, share = next(run.batches.epoch(next(epochs)))
        run.take_step(enter(x, run.declared), y, share, run.context(x, 0, 0))

    for _ in range(WARM_UP[run.device.type]):
        take()
    return _timed(take)


def _held_out(network: BayesianNetwork, parts: Parts, x: Tensor) -> float:
    """Time of calibration and measurement: each request draws weights, and each input is passed through each draw."""
    factors = network.factors()
    one = _timed(lambda: predict(network, factors, x[:1], CHOOSING, 0))
    many = _timed(lambda: predict(network, factors, x, CHOOSING, 0))
    of_row = max(0.0, many - one) / max(1, len(x) - 1) / CHOOSING
    of_draw = max(0.0, one / CHOOSING - of_row)
    kinds = 5 if x.dim() == 4 else 4  # of spoiled inputs
    cal, test = len(parts.calibration), len(parts.test)
    asked = [  # requests, inputs, draws
        (CALIBRATION_REQUESTS, cal, GRID[-1] + AUTO),
        (REQUESTS, min(cal, SPOILED), CHOOSING * (1 + kinds)),
        (REQUESTS, test, 2 * beside.SAMPLES),
        (beside.REQUESTS, min(test, SPOILED), beside.SAMPLES * kinds),
    ]
    return sum(draws * (min(requests, n) * of_draw + n * of_row) for requests, n, draws in asked)
