"""Training by a recipe: data, network, fit, calibration, measurement, artifact."""

import copy
import inspect
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.models import bayesianize, load, save
from dubito.models.artifact.trial import SHARES, is_shares
from dubito.models.conversion.architectures import Standardise
from dubito.models.conversion.named import arguments_for, network_of
from dubito.models.errors import DubitoError
from dubito.models.manifest import Card, Classification, Input, Provenance, Regression, Task
from dubito.models.network.layers import takes_ids
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import Positive
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import evaluating
from dubito.models.remote.cache import fetched
from dubito.models.terminal import duration, remark
from dubito.training.beside import as_stored, beside_plain
from dubito.training.calibrate import REPEATED, calibrate, divided
from dubito.training.config import Fit, Recipe, RecipeError
from dubito.training.data.augment import augmentation
from dubito.training.data.data import DataSet, Examples, Parts, divide, enter, input_of
from dubito.training.data.sources import is_integer, numbered, read_data
from dubito.training.estimate import in_all, time_phases
from dubito.training.evaluation.evaluate import measure
from dubito.training.fit.checkpoint import draft_of, resume, save_checkpoint, writes_alone
from dubito.training.fit.fit import Epoch, FitError, FitRun
from dubito.training.fit.function_space import OF_TRAINING, FunctionSpace, check_gaussian
from dubito.training.fit.log import progress_bar, tensorboard, write_csv
from dubito.training.fit.ranks import Ranks
from dubito.training.fit.remarks import remarks
from dubito.training.fit.stop import stoppable
from dubito.training.fit.target_noise import describe_noise, fit_noise
from dubito.training.fit.tune import tune
from dubito.training.inputs import as_weights_take
from dubito.training.laplace import check_size, describe, linearise
from dubito.training.plain import look_first
from dubito.training.weights import Weights, fill, fitting_names, read_weights

MANY_CLASSES = 20  # whole numbers of which there are more, of few examples each, may be no classes
FEW_KINDS = 0.3  # share of inputs that differ, below which they repeat by nature, as a few categories do
FEW_PAIRS = 5  # equal training inputs that say nothing of new ones
REMEMBERED = 1024  # training inputs whose hashes are stored in the artifact, to recognise them
BETWEEN = 60.0  # seconds between checkpoints inside an epoch
MOST_NUMBERS = 1 << 23  # of the training examples among which inducing points are chosen
SHORT = 1.0  # seconds: shorter epochs share a checkpoint
SHARE = 0.05  # of the time that checkpoints after an epoch may take: large ones are shared by several epochs


class TrainingStopped(DubitoError):
    """Training was stopped by a signal, and left a checkpoint."""


@dataclass(frozen=True)
class TrainedModel:
    model: Model
    log: list[Epoch]


@dataclass(frozen=True)
class Beginning:
    """Where the training begins: the data in their parts, and the plain network, untrained or with given weights."""

    recipe: Recipe  # with the pictures as given weights take them
    parts: Parts
    declared: Input
    net: nn.Module
    context: Tensor | None  # inputs of another data set, for function-space VI

    @property
    def task(self) -> Task:
        return task_of(self.parts, self.recipe)

    def networks(self) -> tuple[BayesianNetwork, BayesianNetwork]:
        """Copies of the plain network and of the posterior."""
        trained = self.recipe.fit.pretrain_epochs or self.recipe.network.weights
        posterior = make_bayesian(self.net, self.recipe, self.parts, self.declared, "network" if trained else "prior")
        return bayesianize(self.net, "deterministic", task=self.task), posterior


def begin(recipe: Recipe, data_root: Path | None, download: bool, labels: tuple[str, ...] | None = None) -> Beginning:
    """Read the data and build the network. `labels` name the outputs of given weights; else their file may."""
    weights = None
    if recipe.network.weights is not None:
        weights = read_weights(fetched(recipe.network.weights)).renamed(recipe.network.rename)
        recipe = recipe.model_copy(update={"data": as_weights_take(recipe.data, recipe.network, weights)})
        labels = labels or weights.labels
    with Ranks.here().in_turn():
        parts = read_parts(recipe, data_root, download, labels)
        context = read_context(recipe, parts.train, data_root, download)
    declared = input_of(parts.train, recipe.data)
    torch.manual_seed(recipe.seed)
    return Beginning(recipe, parts, declared, build_network(recipe, parts, declared, weights), context)


@writes_alone
def train(
    recipe: Recipe,
    out: Path,
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    labels: tuple[str, ...] | None = None,
    fresh: bool = False,
    force: bool = False,
    estimate: bool = False,
) -> TrainedModel | None:
    """Fit, calibrate on the calibration part, measure on the test part, save; None on ranks other than the first.

    Checkpoints are written beside `out`; the next call with the same recipe resumes from them. Weights to start from
    must do better than a guess on these data, or `force` must be set; `labels` name their outputs in order. With
    `estimate`, a run that begins says how long it will take.
    """
    device = torch.device("cpu") if device is None else device
    start = begin(recipe, data_root, download, labels)
    recipe, parts, declared, net, task = start.recipe, start.parts, start.declared, start.net, start.task
    phases = Phases(recipe, parts, declared, out, device, fresh, context=start.context)
    _check_posteriors(net, recipe, parts, declared)
    plain: BayesianNetwork | None = None
    if recipe.network.weights is not None:
        plain = bayesianize(net, "deterministic", task=task)
        look_first(plain.net.to(device), parts, declared, task, force=force)
        set_noise(plain.cpu(), parts.validation, declared)
    if estimate and Ranks.here().count == 1 and not phases.begun:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            timed = time_phases(recipe, parts, declared, *start.networks(), device, start.context)
        remark(f"{in_all(timed).about}: {', '.join(f'{p.name} {duration(p.seconds)}' for p in timed)}")
    trained_noise: dict[str, Tensor] | None = None  # target noise after the plain network's training
    if recipe.fit.pretrain_epochs:
        plain = phases.fit(bayesianize(net, "deterministic", task=task), recipe.pretraining, "plain").finish().cpu()
        net = plain.net
        if plain.noise is not None:
            trained_noise = {name: t.clone() for name, t in plain.noise.state_dict().items()}
            fit_noise(plain, parts.validation, declared, choose=recipe.noise_kind == "auto", seed=recipe.seed)
    begins: Literal["network", "prior"] = "prior" if plain is None else "network"

    def fit_posterior(net: nn.Module, changed: Recipe, phase: str) -> FitRun:
        torch.manual_seed(recipe.seed)
        network, fit = make_bayesian(net, changed, parts, declared, begins), changed.fit
        if trained_noise is not None and network.noise is not None:
            network.noise.load_state_dict(trained_noise)
            fit = fit.model_copy(update={"noise_epochs": 0})
        return phases.fit(network, fit, phase)

    if recipe.tune is not None:
        first = Ranks.here().index == 0
        if fresh and first:
            phases.trials.unlink(missing_ok=True)
        recipe = tune(recipe, net, fit_posterior, phases.trials, parts.hash, first=first)
        phases = replace(phases, recipe=recipe)
    run = fit_posterior(net, recipe, "posterior")
    if run.ranks.index > 0:
        return None
    network = run.finish()
    settle_noise(network, recipe, parts, declared)
    if recipe.laplace is not None:  # so far it is the plain network
        plain = network
        fitted = linearise(network, parts.train, parts.validation, declared, recipe.laplace, recipe.seed)
        remark(describe(fitted))
        network = fitted.network
    for sentence in remarks(network, run.log):
        remark(sentence)
    trained = TrainedModel(finish(network, recipe, parts, declared, out, plain=plain), run.log)
    phases.clean()
    return trained


def settle_noise(network: BayesianNetwork, recipe: Recipe, parts: Parts, declared: Input) -> None:
    """Fit the target noise of a regression on the validation part; a Laplace approximation keeps the trained one."""
    if network.noise is not None and recipe.laplace is None:
        choose = recipe.noise_kind == "auto"
        remark(describe_noise(fit_noise(network, parts.validation, declared, choose=choose, seed=recipe.seed)))


def read_parts(
    recipe: Recipe, root: Path | None, download: bool = False, labels: tuple[str, ...] | None = None
) -> Parts:
    """The data set, divided; its classes are numbered as `labels` has them, if those are known."""
    return parts_of(read_whole(recipe, root, download, labels), recipe)


def read_whole(
    recipe: Recipe, root: Path | None, download: bool = False, labels: tuple[str, ...] | None = None
) -> DataSet:
    """The data set of a recipe, if it suits the task."""
    d, regression = recipe.data, recipe.task == "regression"
    data = read_data(
        d.name,
        root,
        download=download,
        regression=regression,
        target=d.target,
        group=d.group,
        size=d.size,
        channels=d.channels,
        fitting=d.fitting,
        split=d.split,
    )
    if regression != (data.labels is None):
        kind = "numbers" if data.labels is None else "classes"
        raise RecipeError(f"the targets of {d.name} are {kind}, but the recipe's task is {recipe.task}: set task.")
    if data.labels is not None and len(data.labels) < 2:
        raise RecipeError(f"{d.name} has one class only ({data.labels[0]!r}); expected two or more to tell apart.")
    return data if labels is None else numbered(data, d.name, labels)


def parts_of(data: DataSet, recipe: Recipe) -> Parts:
    """Divided by the recipe's shares, with enough to calibrate on."""
    d = recipe.data
    parts = divide(data, d.validation, d.calibration, d.test, recipe.seed)
    held = (parts.calibration, parts.validation)
    divided(*held, recipe.calibrate, recipe.task, recipe.seed)  # raises before the work if calibration would fail
    if recipe.task == "regression":
        _check_units(parts.train.y, d.name)
    _tell_repeated(parts, d.name)
    _tell_numbers(parts, d.name)
    return parts


def _tell_numbers(parts: Parts, name: str) -> None:
    """Say so where classes look like numbers that are to be predicted."""
    labels, examples = parts.labels or (), sum(map(len, (parts.train, parts.validation, parts.calibration)))
    if len(labels) > max(MANY_CLASSES, examples / 5) and all(map(is_integer, labels)):
        remark(f"{name}: {len(labels)} whole numbers are taken for classes; to predict numbers: --set task=regression")


def _tell_repeated(parts: Parts, name: str) -> None:
    """Say so where inputs of the parts that measure stand in the training part, too."""
    inputs = parts.train.fingerprints()
    if len(set(inputs)) <= FEW_KINDS * len(inputs):
        return  # they repeat by their nature
    seen = {(x, y.tobytes()) for x, y in zip(inputs, parts.train.y.numpy(), strict=True)}
    counted = []
    for part, measured in (("test", parts.test), ("calibration", parts.calibration)):
        both = zip(measured.fingerprints(), measured.y.numpy(), strict=True)
        if (back := sum((x, y.tobytes()) in seen for x, y in both)) > REPEATED * len(measured):
            counted.append(f"{back} of {len(measured)} of the {part} part")
    if counted:
        remark(
            f"{name}: examples are in the training part, too ({', '.join(counted)}): figures and promises would be too "
            "good for new ones. Leave repeated rows out"
        )


def read_context(recipe: Recipe, train: Examples, root: Path | None, download: bool = False) -> Tensor | None:
    """Context inputs of another data set, which must be like those of the training part; None: they are made of it."""
    name, d = recipe.context.inputs, recipe.data
    if recipe.fit.objective != "function-space" or name in OF_TRAINING:
        return None
    try:
        sizes: dict[str, Any] = {"size": d.size, "channels": d.channels, "fitting": d.fitting}
        x = read_data(name, root, download=download, **sizes).train.x
    except DubitoError as error:
        of_training = ", ".join(OF_TRAINING)
        raise RecipeError(f"context.inputs is {name!r}; expected {of_training} or a data set: {error}") from None
    if x.shape[1:] != train.x.shape[1:] or x.dtype != train.x.dtype:
        came, wanted = (f"{tuple(t.shape[1:])} in {str(t.dtype).removeprefix('torch.')}" for t in (x, train.x))
        raise RecipeError(
            f"context.inputs is {name!r}, whose inputs are {came}; those of {d.name} are {wanted}. Use other data, or "
            "bring both to one form by data.size and data.channels."
        )
    return x


def _check_units(y: Tensor, name: str) -> None:
    """Refuse targets without a variance, or with one that float32 cannot hold."""
    for column, spread in enumerate(y.double().std(0, unbiased=False).tolist()):
        if spread == 0:
            raise RecipeError(f"the targets of {name} are all {y[0, column]:g}; expected numbers that differ.")
        if not 1e-15 < spread < 1e15:
            raise RecipeError(
                f"the targets of {name} have a standard deviation of {spread:.3g}; "
                "expected one between 1e-15 and 1e15. Give them in other units."
            )


def task_of(parts: Parts, recipe: Recipe | None = None) -> Task:
    """The task of the data; without a recipe, the noise of a regression is constant."""
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


@torch.no_grad()
def set_noise(network: BayesianNetwork, validation: Examples, declared: Input) -> None:
    """Set the target noise of a trained regression network to its RMSE on the validation part, per output."""
    if network.noise is None:
        return
    assert isinstance(network.task, Regression)
    shift, scale = torch.tensor(network.task.shift), torch.tensor(network.task.scale)
    with evaluating(network):
        f: Tensor = torch.cat([network.net(enter(x, declared)) for x in validation.x.split(1024)])
    error: Tensor = (f - (validation.y - shift) / scale).square().mean(0).sqrt()
    network.noise = Positive(error, 1e-4)


def build_network(recipe: Recipe, parts: Parts, declared: Input, weights: Weights | None = None) -> nn.Module:
    """The plain network; sizes that the recipe does not give follow from the data."""
    task = task_of(parts, recipe)
    outputs = task.numbers if isinstance(task, Regression) else len(parts.labels or ())
    sizes: dict[str, Any] = {"classes": outputs, "outputs": outputs, "inputs": parts.train.x[0].numel()}
    if len(declared.shape) == 3:
        sizes |= {"channels": declared.shape[0], "size": list(declared.shape[1:])}
    name = recipe.network.architecture
    net = network_of(name, **arguments_for(name, sizes) | recipe.network.arguments)
    for module in net.modules():
        if isinstance(module, Standardise):
            x = enter(parts.train.x, declared).flatten(1).double()
            scale = x.std(0, unbiased=False)
            module.shift.copy_(x.mean(0))
            module.scale.copy_(torch.where(scale > 0, scale, 1.0))
    if weights is not None:
        weights = fitting_names(weights, list(net.state_dict()))
        for said in weights.remarks:
            remark(said)
        fill(net, weights, name)
    _check_sizes(net, name, declared.shape, outputs, parts.labels is not None)
    return net


def _check_sizes(net: nn.Module, name: str, shape: tuple[int, ...], outputs: int, classes: bool) -> None:
    """Check that the network takes one input of this shape, and has one output per class or target."""
    answer = answer_of(net, name, shape)
    came = tuple(answer.shape)
    if len(came) > 2:
        raise RecipeError(
            f"network.architecture: {name} answers with {came[1:]} numbers, as for each pixel or token; expected "
            f"{outputs} for an input."
        )
    if came != (1, outputs):
        raise RecipeError(f"network.arguments: {name} answers with {came[1:]} numbers; the data has {outputs}.")
    if classes and outputs > 1 and not answer.is_meta and is_shares(answer):
        raise RecipeError(f"network.architecture: {name}'s {SHARES}")


def answer_of(net: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor:
    """The network's answer to one input of this shape; a RecipeError where it takes none such."""
    needed = [p for p in inspect.signature(net.forward).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(needed) > 1:
        names = ", ".join(p.name for p in needed)
        raise RecipeError(f"network.architecture: {name} takes {len(needed)} inputs ({names}); expected one.")
    try:
        with evaluating(net), torch.no_grad():
            answer = net(torch.zeros(1, *shape))
            if takes_ids(net):
                net(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))  # as a server tries it out
    except Exception as error:  # any error of a network that was built for other inputs
        if takes_ids(net):
            raise RecipeError(
                f"network.architecture: {name} takes token ids, as its embedding shows; expected numbers or pictures."
            ) from None
        said = " ".join(str(error).split()).rstrip(".")
        change = "--input-size and data.channels (1 or 3) change the pictures." if len(shape) == 3 else ""
        raise RecipeError(
            f"network.architecture: {name} cannot take inputs of shape {shape}: {said}. {change}".rstrip()
        ) from None
    if not isinstance(answer, Tensor):
        raise RecipeError(f"network.architecture: {name} answers with a {type(answer).__name__}; expected one tensor.")
    return answer


def _check_posteriors(net: nn.Module, recipe: Recipe, parts: Parts, declared: Input) -> None:
    """Refuse options of the posterior that are not valid, before the work; uses the meta device."""
    blank = copy.deepcopy(net).to("meta")
    for options in ({}, *(recipe.tune.trials if recipe.tune is not None else ())):
        network = make_bayesian(blank, recipe.with_options(options), parts, declared, "prior")
        if recipe.fit.objective == "function-space":
            check_gaussian(network)


def make_bayesian(
    net: nn.Module, recipe: Recipe, parts: Parts, declared: Input, start: Literal["network", "prior"]
) -> BayesianNetwork:
    if recipe.laplace is not None:
        check_size(net, recipe.laplace)  # fails before the work, not after it
        return bayesianize(net, "deterministic", task=task_of(parts, recipe))
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.posterior.options.items()}
    layers: Any = recipe.posterior.layers or None
    try:
        return bayesianize(
            net,
            recipe.posterior.method,
            start=start,
            layers=layers,
            task=(task := task_of(parts, recipe)),
            examples=some_examples(parts.train, declared, task, recipe.seed),
            **options,
        )
    except TypeError as error:
        raise RecipeError(f"posterior.options: {error}.") from None


def some_examples(train: Examples, declared: Input, task: Task, seed: int) -> tuple[Tensor, Tensor]:
    """Training examples that inducing points may start at, their targets in the network's units."""
    n = max(1, MOST_NUMBERS // train.x[0].numel())
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:n]
    x, y = enter(train.x[order], declared), train.y[order]
    if isinstance(task, Regression):
        y = (y - torch.tensor(task.shift)) / torch.tensor(task.scale)
    return x, y


@dataclass(frozen=True)
class Phases:
    """Fits the phases of a recipe (plain network, trials, posterior), with checkpoints beside the artifact."""

    recipe: Recipe
    parts: Parts
    declared: Input
    out: Path
    device: torch.device
    fresh: bool = False
    start: str = ""  # identifies the initial network, if the recipe does not
    context: Tensor | None = None  # inputs of another data set, for function-space VI

    def checkpoint(self, phase: str) -> Path:
        return self.out.with_name(f"{self.out.stem}.{phase}.checkpoint.safetensors")

    @property
    def trials(self) -> Path:
        """File with the results of the trials of `tune` so far."""
        return self.out.with_name(f"{self.out.stem}.trials.json")

    def names(self) -> list[str]:
        """The phases in their order."""
        trials = () if self.recipe.tune is None else range(1, len(self.recipe.tune.trials) + 1)
        return ["plain"] * (self.recipe.fit.pretrain_epochs > 0) + [f"trial-{i}" for i in trials] + ["posterior"]

    @property
    def begun(self) -> bool:
        """Whether an earlier run has left a checkpoint that this one goes on from."""
        return not self.fresh and any(self.checkpoint(name).exists() for name in self.names())

    def clean(self) -> None:
        """Delete the checkpoints, and drafts left by a killed process."""
        for path in (*map(self.checkpoint, self.names()), self.checkpoint("plain"), self.trials):
            for file in (path, draft_of(path)):
                file.unlink(missing_ok=True)

    def fit(self, network: BayesianNetwork, fit: Fit, phase: str) -> FitRun:
        """Fit to the end; a signal stops it after a step, with a checkpoint."""
        parts, path, origin = self.parts, self.checkpoint(phase), f"{self.parts.hash} {self.start}"
        augment = augmentation(self.recipe.data, parts.train)
        functions = None
        if fit.objective == "function-space":
            settings, start = self.recipe.context, network.to(self.device)
            functions = FunctionSpace.of(settings, start, parts.train, self.declared, self.context)
            some = parts.train.x[: max(fit.batch, settings.points)].to(self.device)
            if (said := functions.out_of_reach(start, some, self.recipe.seed)) is not None:
                remark(said)
        data = (parts.train, parts.validation, self.declared)
        run = FitRun(network, *data, fit, self.recipe.seed, self.device, augment, functions)
        first = run.ranks.index == 0
        if self.fresh:
            if first:
                path.unlink(missing_ok=True)
        elif path.exists():
            resume(run, self.recipe, path, origin=origin)
        if not run.ranks.same(run.step, self.device):
            raise FitError(f"not all processes find the same {path}; expected --out in a folder that all can read.")
        saved, took = time.monotonic(), 0.0

        def checkpoint() -> None:
            nonlocal saved, took
            began = time.monotonic()
            save_checkpoint(run, self.recipe, path, origin=origin)
            saved = time.monotonic()
            took = saved - began

        def pause() -> bool:
            if first and time.monotonic() - saved > BETWEEN:
                checkpoint()
            return stop()

        name = self.out.stem if phase == "posterior" else f"{self.out.stem}.{phase}"
        board = tensorboard(self.out.with_name(f"{name}.tensorboard")) if first else nullcontext(lambda _: None)
        names = self.names()
        title = f"{phase} ({names.index(phase) + 1} of {len(names)})" if phase in names[:-1] else phase
        with stoppable() as stop, progress_bar(run, title) as show, board as note:
            while not run.done:
                ended = run.epoch(show, pause)
                stopped = run.ranks.any(stop(), self.device)
                if first and ended:  # before the checkpoint: a resumed epoch is written again
                    note(run.log[-1])
                if first and (stopped or run.done or time.monotonic() - saved > max(SHORT, took / SHARE)):
                    write_csv(run.log, self.out.with_name(f"{name}.log.csv"))  # table.csv may be the data
                    checkpoint()
                if stopped:
                    same = "The same command without --fresh" if self.fresh else "The same command"
                    raise TrainingStopped(
                        f"stopped after step {run.step} of {fit.epochs * len(run.batches)} ({phase}); "
                        f"{path} holds it. {same} goes on from there."
                    )
        return run


def finish(
    network: BayesianNetwork,
    recipe: Recipe,
    parts: Parts,
    declared: Input,
    out: Path,
    origin: Provenance | None = None,
    plain: BayesianNetwork | None = None,
) -> Model:
    """Save a draft, load it, calibrate and measure it as stored, and write `out` with the results.

    The plain network that it started from is measured on the same data, if there is one.
    """
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
    model = as_stored(network, card, out, recipe.precision).to(device)
    others = {"validation": parts.validation, "train": parts.train}
    model = calibrate(model, parts.calibration, recipe.calibrate, seed=recipe.seed, **others)
    model = model.with_card(metrics=measure(model, parts.test, seed=recipe.seed))
    if plain is not None and model.factors.random:
        own, beside = beside_plain(model, plain, parts, recipe.calibrate, out, recipe.seed)
        model = model.with_card(metrics={**model.card.metrics, **own}, plain=beside)
    save(model, out)
    return load(out)


def _sample(train: Examples, seed: int) -> list[str]:
    """Hashes of some inputs that occur once in the training part, by which they are recognised; repeated ones may occur
    elsewhere too. None where new inputs coincide with such by nature, as rows of few categories do: by the estimate of
    Good and Turing as often as 2 N_2 / N, where N_2 inputs of N occur twice."""
    hashes = train.fingerprints()
    often = Counter(hashes)
    twice = sum(n == 2 for n in often.values())
    if twice >= FEW_PAIRS and 2 * twice > REPEATED * len(hashes):
        return []
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted([hashes[i] for i in order if often[hashes[i]] == 1][:REMEMBERED])
