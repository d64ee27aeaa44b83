"""A recipe followed from start to end: data, network, fit, calibration, and the measured quality in the artifact."""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.architectures import Standardise, sizes_of
from dubito.models.errors import DubitoError
from dubito.models.manifest import Card, Classification, Input, Provenance, Regression, Task
from dubito.models.model import Model
from dubito.models.network import BayesianNetwork
from dubito.models.prediction import evaluating
from dubito.training.augment import augmentation
from dubito.training.calibrate import calibrate, check_enough
from dubito.training.checkpoint import draft_of, resume, save_checkpoint
from dubito.training.config import Fit, Recipe, RecipeError
from dubito.training.data import Examples, Parts, divide, enter, input_of
from dubito.training.evaluate import measure
from dubito.training.fit import Epoch, FitError, Run
from dubito.training.laplace import check_size, linearise, said
from dubito.training.log import progress, remark, tensorboard, write_csv
from dubito.training.noise import fit_noise
from dubito.training.noise import said as noise_said
from dubito.training.ranks import Ranks
from dubito.training.remarks import remarks
from dubito.training.sources import read_data
from dubito.training.stop import stoppable

REMEMBERED = 1024  # training inputs whose hashes stay in the artifact, to know them again
BETWEEN = 60.0  # seconds between checkpoints inside an epoch
SHORT = 1.0  # seconds: epochs that take less share a checkpoint


class Stopped(DubitoError):
    """Training was asked to stop, and left a checkpoint."""


@dataclass(frozen=True)
class Trained:
    model: Model
    log: list[Epoch]


def train(
    recipe: Recipe,
    out: Path,
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    fresh: bool = False,
) -> Trained | None:
    """Fit, calibrate on the calibration part, measure on the test part, save; None on ranks other than the first.

    Checkpoints stand beside `out` until it is written, and are taken up by the next call with the same recipe.
    """
    device = torch.device("cpu") if device is None else device
    with Ranks.here().in_turn():
        parts = read_parts(recipe, data_root, download)
    declared = input_of(parts.train)
    fitting = Fitting(recipe, parts, declared, out, device, fresh)
    torch.manual_seed(recipe.seed)
    net = build_network(recipe, parts, declared)
    noise = None  # of the targets, as the plain network left it
    start: Literal["network", "prior"] = "prior" if recipe.network.weights is None else "network"
    if recipe.fit.pretrain_epochs:
        plain = bayesianize(net, "deterministic", task=task_of(parts, recipe))
        before = fitting.fit(plain, recipe.pretraining, "plain").finish()
        net, noise, start = before.net.cpu(), before.noise, "network"
    torch.manual_seed(recipe.seed)
    network, fit = make_bayesian(net, recipe, parts, start), recipe.fit
    if noise is not None and network.noise is not None:
        network.noise.load_state_dict(noise.state_dict())
        fit = fit.model_copy(update={"noise_epochs": 0})
    run = fitting.fit(network, fit, "posterior")
    if run.ranks.index > 0:
        return None
    network = run.finish()
    settle_noise(network, recipe, parts, declared)
    if recipe.laplace is not None:  # so far it is the plain network at its most likely weights
        fitted = linearise(network, parts.train, parts.validation, declared, recipe.laplace, recipe.seed)
        remark(said(fitted))
        network = fitted.network
    for sentence in remarks(network, run.log):
        remark(sentence)
    trained = Trained(finish(network, recipe, parts, declared, out), run.log)
    fitting.clean()
    return trained


def settle_noise(network: BayesianNetwork, recipe: Recipe, parts: Parts, declared: Input) -> None:
    """Of a regression's targets, on the validation part; a Laplace approximation takes it as training left it."""
    if network.noise is not None and recipe.laplace is None:
        choose = recipe.noise_kind == "auto"
        remark(noise_said(fit_noise(network, parts.validation, declared, choose=choose, seed=recipe.seed)))


def read_parts(recipe: Recipe, root: Path | None, download: bool = False) -> Parts:
    d, regression = recipe.data, recipe.task == "regression"
    data = read_data(
        d.name, root, download=download, regression=regression, target=d.target, size=d.size, split=d.split
    )
    if regression != (data.labels is None):
        kind = "numbers" if data.labels is None else "classes"
        raise RecipeError(f"the targets of {d.name} are {kind}, but the recipe's task is {recipe.task}: set task.")
    if data.labels is not None and len(data.labels) < 2:
        raise RecipeError(f"{d.name} has one class only ({data.labels[0]!r}); expected two or more to tell apart.")
    parts = divide(data, d.validation, d.calibration, d.test, recipe.seed)
    check_enough(len(parts.calibration), recipe.calibrate)  # before the work, not after it
    if regression:
        _check_units(parts.train.y, d.name)
    return parts


def _check_units(y: Tensor, name: str) -> None:
    """Variances are in the targets' units squared, and in float32."""
    for spread in y.double().std(0, unbiased=False).tolist():
        if spread > 0 and not 1e-15 < spread < 1e15:
            raise RecipeError(
                f"the targets of {name} have a standard deviation of {spread:.3g}; "
                "expected one between 1e-15 and 1e15. Give them in other units."
            )


def task_of(parts: Parts, recipe: Recipe | None = None) -> Task:
    """Without a recipe, a regression's noise is constant."""
    if parts.labels is not None:
        return Classification()
    y = parts.train.y.double()
    scale = y.std(0, unbiased=False)
    return Regression(
        outputs=y.shape[1],
        noise="constant" if recipe is None or recipe.noise_kind == "constant" else "input",
        shift=tuple(y.mean(0).tolist()),
        scale=tuple(torch.where(scale > 0, scale, 1.0).tolist()),
    )


def build_network(recipe: Recipe, parts: Parts, declared: Input) -> nn.Module:
    """The plain network; what the data tells of its sizes need not stand in the recipe."""
    task = task_of(parts, recipe)
    outputs = task.numbers if isinstance(task, Regression) else len(parts.labels or ())
    told: dict[str, Any] = {"classes": outputs, "outputs": outputs, "inputs": parts.train.x[0].numel()}
    if len(declared.shape) == 3:
        told |= {"channels": declared.shape[0], "size": list(declared.shape[1:])}
    taken = sizes_of(recipe.network.architecture)
    arguments = {k: v for k, v in told.items() if k in taken} | recipe.network.arguments
    net = build(recipe.network.architecture, **arguments)
    for module in net.modules():
        if isinstance(module, Standardise):
            x = enter(parts.train.x, declared).flatten(1).double()
            scale = x.std(0, unbiased=False)
            module.shift.copy_(x.mean(0))
            module.scale.copy_(torch.where(scale > 0, scale, 1.0))
    if recipe.network.weights is not None:
        _load_weights(net, recipe.network.weights)
    _check_sizes(net, recipe.network.architecture, declared.shape, outputs)
    return net


def _check_sizes(net: nn.Module, name: str, shape: tuple[int, ...], outputs: int) -> None:
    """One blank input must go in, and one number for each class or target come out."""
    try:
        with evaluating(net), torch.no_grad():
            came = tuple(net(torch.zeros(1, *shape)).shape)
    except Exception as error:  # whatever a network comes up with that was made for other inputs
        said = " ".join(str(error).split())
        raise RecipeError(f"network.architecture: {name} cannot take inputs of shape {shape}: {said}.") from None
    if came != (1, outputs):
        raise RecipeError(f"network.arguments: {name} answers with {came[1:]} numbers; the data has {outputs}.")


def _load_weights(net: nn.Module, path: str) -> None:
    try:
        net.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        first = " ".join(str(error).split())[:300]
        raise RecipeError(f"network.weights: {path} cannot be loaded into the network: {first}.") from None


def make_bayesian(net: nn.Module, recipe: Recipe, parts: Parts, start: Literal["network", "prior"]) -> BayesianNetwork:
    if recipe.laplace is not None:
        check_size(net, recipe.laplace)  # before the work, not after it
        return bayesianize(net, "deterministic", task=task_of(parts, recipe))
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.posterior.options.items()}
    layers: Any = recipe.posterior.layers or None
    try:
        return bayesianize(
            net, recipe.posterior.method, start=start, layers=layers, task=task_of(parts, recipe), **options
        )
    except TypeError as error:
        raise RecipeError(f"posterior.options: {error}.") from None


@dataclass(frozen=True)
class Fitting:
    """Where the phases of a recipe are fitted, and what they leave beside the artifact on the way."""

    recipe: Recipe
    parts: Parts
    declared: Input
    out: Path
    device: torch.device
    fresh: bool = False
    start: str = ""  # what the networks come from, where the recipe does not say it

    def checkpoint(self, phase: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{phase}.checkpoint.safetensors")

    def clean(self) -> None:
        """Away with the checkpoints, and with what a killed process left of one."""
        for phase in ("plain", "posterior"):
            path = self.checkpoint(phase)
            for file in (path, draft_of(path)):
                file.unlink(missing_ok=True)

    def fit(self, network: BayesianNetwork, fit: Fit, phase: Literal["plain", "posterior"]) -> Run:
        """To the end, or until somebody asks to stop: then the checkpoint holds every step that was done."""
        parts, path, origin = self.parts, self.checkpoint(phase), f"{self.parts.hash} {self.start}"
        augment = augmentation(self.recipe.data, parts.train)
        run = Run(network, parts.train, parts.validation, self.declared, fit, self.recipe.seed, self.device, augment)
        first = run.ranks.index == 0
        if self.fresh:
            if first:
                path.unlink(missing_ok=True)
        elif path.exists():
            resume(run, self.recipe, path, origin=origin)
        if not run.ranks.same(run.step, self.device):
            raise FitError(f"not all processes find the same {path}; expected --out in a folder that all can read.")
        saved = time.monotonic()

        def pause() -> bool:
            nonlocal saved
            if first and time.monotonic() - saved > BETWEEN:
                save_checkpoint(run, self.recipe, path, origin=origin)
                saved = time.monotonic()
            return stop()

        name = self.out.stem if phase == "posterior" else f"{self.out.stem}.{phase}"
        board = tensorboard(self.out.with_name(f"{name}.tensorboard")) if first else nullcontext(lambda _: None)
        with stoppable() as stop, progress(run, phase) as tell, board as note:
            while not run.done:
                ended = run.epoch(tell, pause)
                asked = run.ranks.any(stop(), self.device)
                if first and ended:  # before the checkpoint: an epoch that is taken up again is written again
                    note(run.log[-1])
                if first and (asked or run.done or time.monotonic() - saved > SHORT):
                    write_csv(run.log, self.out.with_name(f"{name}.log.csv"))  # table.csv may be the data
                    save_checkpoint(run, self.recipe, path, origin=origin)
                    saved = time.monotonic()
                if asked:
                    same = "The same command without --fresh" if self.fresh else "The same command"
                    raise Stopped(
                        f"stopped after step {run.step} of {fit.epochs * len(run.batches)} ({phase}); "
                        f"{path} holds it. {same} goes on from there."
                    )
        return run


def finish(
    network: BayesianNetwork, recipe: Recipe, parts: Parts, declared: Input, out: Path, origin: Provenance | None = None
) -> Model:
    """Saved beside `out`, read back, calibrated and measured as it is stored; `out` then has what was found inside."""
    device = next(network.parameters()).device
    if origin is None:
        origin = Provenance(
            recipe=recipe.model_dump(mode="json"),
            data_hash=parts.hash,
            seed=recipe.seed,
            train_sample=tuple(_sample(parts.train, recipe.seed)),
        )
    named = declared.model_copy(update={"columns": parts.columns})
    card = Card(input=named, labels=parts.labels, targets=parts.targets, provenance=origin)
    draft = draft_of(out)
    try:
        save(network, draft, card=card, precision=recipe.precision)
        model = load(draft).to(device)
    finally:
        draft.unlink(missing_ok=True)
    model = calibrate(model, parts.calibration, recipe.calibrate, seed=recipe.seed)
    model = model.with_card(metrics=measure(model, parts.test, seed=recipe.seed))
    save(model, out)
    return load(out)


def _sample(train: Examples, seed: int) -> list[str]:
    """Hashes of some inputs that occur once: those that occur again may well be met elsewhere too."""
    found = train.fingerprints()
    often = Counter(found)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted([found[i] for i in order if often[found[i]] == 1][:REMEMBERED])
