"""What a recipe would do, and how long: a few steps of each phase are timed, and nothing is written."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dubito.models import bayesianize
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import count
from dubito.models.predictions.prediction import predict
from dubito.training import beside
from dubito.training.calibrate import CALIBRATION_REQUESTS, CHOOSING
from dubito.training.config import Recipe
from dubito.training.data.augment import augmentation
from dubito.training.data.data import Parts, enter, input_of
from dubito.training.data.spoil import SPOILED
from dubito.training.evaluation.predicting import GRID, REQUESTS
from dubito.training.fit.fit import FitRun
from dubito.training.fit.function_space import FunctionSpace
from dubito.training.inputs import as_made_for
from dubito.training.recipe import build_network, make_bayesian, read_context, read_parts, task_of
from dubito.training.terminal import duration

STEPS = 3  # timed in each phase, after as many that are not
ON_GPU = 12  # before a step is a graph there
AUTO = 32  # draws of `samples="auto"`, about
ROWS = 32  # of a timed prediction


def describe_run(
    recipe: Recipe, *, data_root: Path | None = None, download: bool = False, device: torch.device | None = None
) -> list[str]:
    """Lines: data, network, posterior, device; each phase with its time; the sum."""
    device = torch.device("cpu") if device is None else device
    if recipe.network.weights is not None:
        recipe = recipe.model_copy(update={"data": as_made_for(recipe.data, recipe.network)})
    parts = read_parts(recipe, data_root, download)
    context = read_context(recipe, parts.train, data_root, download)
    declared, task = input_of(parts.train, recipe.data), task_of(parts, recipe)
    net = build_network(recipe, parts, declared)
    plain = bayesianize(net, "deterministic", task=task)
    start = "network" if recipe.fit.pretrain_epochs or recipe.network.weights else "prior"
    posterior = make_bayesian(net, recipe, parts, start)  # type: ignore[arg-type]
    sizes = {name: len(getattr(parts, name)) for name in ("train", "validation", "calibration", "test")}
    shape = " × ".join(map(str, declared.shape))
    targets = f"{len(parts.labels)} classes" if parts.labels is not None else f"{parts.train.y.shape[1]} numbers"
    lines = [
        f"data: {recipe.data.name}, {shape} to {targets}: {', '.join(f'{n:,} {name}' for name, n in sizes.items())}",
        f"network: {recipe.network.architecture}{_options(recipe.network.arguments)}, {count(net):,} parameters",
        f"posterior: {recipe.posterior.method}{_options(recipe.posterior.options)}, {count(posterior):,} parameters",
        *_objective(recipe),
        f"device: {'GPU' if device.type == 'cuda' else f'CPU, {torch.get_num_threads()} threads'}",
    ]
    phases = []
    if recipe.fit.pretrain_epochs:
        phases.append(("plain network", 1, plain, recipe.pretraining))
    if recipe.tune is not None:
        shorter = recipe.trial({}).fit
        phases.append((f"{len(recipe.tune.trials)} trials", len(recipe.tune.trials), posterior, shorter))
    phases.append(("posterior" if recipe.laplace is None else "plain network", 1, posterior, recipe.fit))
    augment, total = augmentation(recipe.data, parts.train), 0.0
    for name, times, network, fit in phases:
        functions = None
        if fit.objective == "function-space":
            functions = FunctionSpace.of(recipe.context, network.to(device), parts.train, declared, context)
        data = (parts.train, parts.validation, declared)
        run = FitRun(network, *data, fit, recipe.seed, device, augment, functions)
        each = times * fit.epochs * (_step(run) * len(run.batches) + _time(run.validate))
        total += each
        lines.append(
            f"{name}: {fit.epochs} epochs{' each' if times > 1 else ''} of {len(run.batches)} steps with {fit.batch} "
            f"examples, about {duration(each)}"
        )
    rest = _held_out(posterior.eval(), parts, enter(parts.test.x[:ROWS].to(device), declared))
    lines.append(f"calibration and measurement: about {duration(rest)}")
    lines.append(f"in all: about {duration(total + rest)}")
    return lines


def _objective(recipe: Recipe) -> list[str]:
    c = recipe.context
    if recipe.fit.objective == "elbo":
        return []
    return [
        f"objective: function-space, {c.points} context inputs ({c.inputs}) and {c.probes} probes a step, "
        f"prior variance {c.prior_variance:g}"
    ]


def _options(options: Mapping[str, object]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else ""


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _step(run: FitRun) -> float:
    """Mean time of a step, with its batch."""
    before = ON_GPU if run.device.type == "cuda" else STEPS

    def take(steps: int) -> None:
        for i in range(steps):
            x, y, share = next(run.batches.epoch(i))
            run.take_step(enter(x, run.declared), y, share, run.context(x, i, 0))

    take(before)
    return _time(lambda: take(STEPS)) / STEPS


def _held_out(network: BayesianNetwork, parts: Parts, x: Tensor) -> float:
    """Time of calibration and measurement: each request draws weights, and each input is passed through each draw."""
    factors = network.factors()
    predict(network, factors, x[:1], CHOOSING, 0)
    one = _time(lambda: predict(network, factors, x[:1], CHOOSING, 0))
    many = _time(lambda: predict(network, factors, x, CHOOSING, 0))
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
