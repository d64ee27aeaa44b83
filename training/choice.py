"""Defaults for one's own data: network, picture size, epochs and batch, by the time that they take on this machine.

Time is work, counted in multiply-adds, over the device's speed, plus a cost of each step. A few timed steps say how
fast the device is; the choice rounds that to a power of four of the typical speed, so that equal machines choose alike.
"""

import glob
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import JsonValue
from torch.utils.flop_counter import FlopCounterMode

from dubito.models import build
from dubito.models.conversion.architectures import OURS, input_of, sizes_of
from dubito.models.conversion.named import arguments_for, network_of
from dubito.models.manifest import Architecture
from dubito.models.remote.cache import fetched
from dubito.models.terminal import duration, remark
from dubito.training.calibrate import FEWEST
from dubito.training.config import Recipe, RecipeError, left_out, read_recipe
from dubito.training.data.sources import count_pictures, own_place, read_data
from dubito.training.fit.checkpoint import write_whole
from dubito.training.fit.fit import VALIDATION_SAMPLES
from dubito.training.fit.ranks import Ranks
from dubito.training.inputs import as_made_for, channels_in
from dubito.training.names import OWN_DATA
from dubito.training.recipe import answer_of
from dubito.training.weights import read_weights

MINUTES, QUICK, FROM_WEIGHTS = 10.0, 1.0, 30.0  # at the rounded speed; the machine may be half as fast
SPEED = {"cpu": 1e10, "cuda": 2e12}  # typical multiply-adds a second: of a core, of a GPU
STEP = {"cpu": 4e-3, "cuda": 1e-3}  # seconds of a step beside them
BACKWARD, POSTERIOR = 3.0, 1.3  # cost of a training step over a pass, and of a posterior's over the plain network's
PASSES = 220, 140  # draws in calibration and measurement, of each calibration and each test example …
MOST_PASSED = 1000  # … but at most so many examples of each
STEPS = 400, 2000  # of the plain network: fewest with which it is better than chance, and enough for any
EPOCHS = (240, 180, 120, 90, 60, 48, 36, 30, 24, 18, 12, 6)  # of the plain network
ENOUGH = 30  # of them, where there are many batches
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)  # of a table's epochs
PHASES = ("epochs", "pretrain_epochs", "noise_epochs", "likelihood_epochs", "warmup_epochs", "patience")
NO_PHASES = ("fit.likelihood_epochs=0", "fit.warmup_epochs=0")
BATCH = 32, 128  # for pictures, by their number
MOST_HELD = 0.35  # share of few examples that may be held out to calibrate on
SMALLEST = 8  # side of a picture that a CNN takes


@dataclass(frozen=True)
class Facts:
    """The data, as far as the choice goes by it."""

    examples: int  # without a test part of its own
    tested: int  # examples of that
    shape: tuple[int, ...]  # of an example
    outputs: int
    pictures: bool = False
    resized: bool = False  # whether the pictures' size may be chosen

    def __str__(self) -> str:
        kind = f"pictures of {self.shape[1]} × {self.shape[2]}" if self.pictures else "rows"
        return f"{self.examples + self.tested:,} {kind}"


@dataclass(frozen=True)
class Machine:
    kind: str  # cpu or cuda
    cores: int = 1
    slowness: float = 1.0  # measured time over the typical one

    @property
    def rounded(self) -> float:
        """The slowness that the choice goes by."""
        return 4.0 ** round(math.log(self.slowness, 4))

    def __str__(self) -> str:
        return "GPU" if self.kind == "cuda" else f"CPU with {self.cores} core{'s' * (self.cores > 1)}"


@dataclass(frozen=True)
class Request:
    """What the user asked for: the changes win over the choice."""

    source: str
    changes: tuple[str, ...] = ()
    quick: bool = False
    like: str | None = None  # a shipped recipe to follow, if not that of the data's kind

    def recipe(self, chosen: Sequence[str] = NO_PHASES) -> Recipe:
        """The recipe with a choice; without one, before its phases are fitted to the epochs that are given."""
        return read_recipe(self.source, [*chosen, *self.changes], like=self.like)

    def sets(self, key: str) -> bool:
        """Whether a change is of this key, of a part of it, or of the whole table that it is in."""
        changed = [f"{change.partition('=')[0].strip()}." for change in self.changes]
        return any(f"{key}.".startswith(c) or c.startswith(f"{key}.") for c in changed)


@dataclass(frozen=True)
class Rung:
    """A network of the ladder, and the longer side of its pictures."""

    architecture: str
    arguments: Mapping[str, JsonValue]
    side: int
    sgd: bool = False  # trains the plain network, instead of adam, by which a small CNN learns faster on few pictures

    def size(self, facts: Facts) -> list[int]:
        """Height and width: the data's own, made smaller where that is allowed."""
        shrink = min(1.0, self.side / max(facts.shape[1:])) if facts.resized else 1.0
        return [max(SMALLEST, round(shrink * side)) for side in facts.shape[1:]]


LADDER = (  # by their cost
    Rung("cnn", {"width": 16, "hidden": 64}, 32),
    Rung("cnn", {"width": 16, "hidden": 64}, 64),
    Rung("cnn", {"width": 32, "hidden": 128}, 64),
    Rung("cnn", {"width": 64, "hidden": 256}, 64),
    Rung("resnet18-cifar", {}, 64, sgd=True),
)


def choose(request: Request, facts: Facts, machine: Machine) -> list[str]:
    """Changes of the recipe, in the form of `--set`, to be made before the user's own.

    For pictures: the largest network of the ladder that has enough steps in the time, and as many epochs as fit.
    """
    minutes = QUICK if request.quick else FROM_WEIGHTS if request.recipe().network.weights else MINUTES
    chosen: list[str] = []
    held = _enough_to_calibrate(request, facts)
    for values in _candidates(request, facts):
        chosen = [f"{key}={as_toml(value)}" for key, value in (values | held).items()]
        if seconds(request.recipe(chosen), facts, machine) * machine.rounded <= 60 * minutes:
            break
    return chosen


def _enough_to_calibrate(request: Request, facts: Facts) -> dict[str, Any]:
    """Of few examples a larger share is held out to calibrate on, as long as most are left to train on."""
    recipe = request.recipe()
    data, rest = recipe.data, _not_tested(recipe, facts)
    share = math.ceil(100 * (FEWEST + 1) / max(1.0, rest)) / 100
    if request.sets("data.calibration") or data.calibration * rest >= FEWEST + 1 or share > MOST_HELD:
        return {}
    return {"data.calibration": share, "calibrate.temperature": False}  # which would take examples from that part


def _candidates(request: Request, facts: Facts) -> Iterator[dict[str, Any]]:
    """Values by dotted key, the costliest first: networks and epochs for pictures, fewer epochs for tables."""
    recipe = request.recipe()
    if not facts.pictures:
        shipped = read_recipe(request.source).fit
        phases = {p: n for p in PHASES if (n := getattr(shipped, p))}
        shares = (recipe.fit.epochs / shipped.epochs,) if request.sets("fit.epochs") else SHARES
        yield from ({f"fit.{p}": max(1, int(n * share)) for p, n in phases.items()} for share in shares)
        return
    own = request.sets("network.architecture") or request.sets("network.arguments")
    fits = [r for r in LADDER if facts.shape[0] == 3 or "channels" in sizes_of(r.architecture)]
    ladder = [Rung(recipe.network.architecture, recipe.network.arguments, 64)] if own else fits
    n = _training(recipe, facts)
    batch = 2 ** round(math.log2(min(max(n / 40, BATCH[0]), BATCH[1])))
    least, most = (steps * batch / n for steps in STEPS)  # epochs
    for rung in reversed(ladder):
        fewest = (0 if own else min(least, EPOCHS[0])) if rung is ladder[0] else least
        for E in EPOCHS:
            if fewest <= E <= max(most, ENOUGH, fewest):
                yield _values(request, recipe, facts, rung, E, batch)


def _values(request: Request, recipe: Recipe, facts: Facts, rung: Rung, E: int, batch: int) -> dict[str, Any]:
    """E epochs of the plain network, half as many of the posterior, and of all trials together about as many again."""
    height, width = rung.size(facts)
    epochs = recipe.fit.epochs if request.sets("fit.epochs") else E // 2
    values: dict[str, Any] = {
        "network.architecture": rung.architecture,
        "network.arguments": dict(rung.arguments),
        "fit.batch": batch,
        "fit.pretrain_epochs": 0 if recipe.network.weights else E,
        "fit.epochs": epochs,
        "fit.likelihood_epochs": epochs // 15,
        "fit.warmup_epochs": epochs // 4,
        "fit.frozen_norm_epochs": epochs // 2,
        "tune.epochs": max(1, epochs // 3),
    }
    if rung.sgd:
        values |= {"pretrain.optimiser": "sgd", "pretrain.lr": 0.05, "pretrain.weight_decay": 5e-4}
    if facts.examples * (1 - recipe.data.test) * recipe.data.validation < FEWEST:
        values["calibrate.temperature"] = False  # which would take examples from the calibration part
    if recipe.data.name.startswith("folder:") and (
        recipe.network.weights is None or as_made_for(recipe.data, recipe.network) == recipe.data
    ):  # else training takes size and crop from the network's package
        values["data.size"] = [height, width]
    crop = {"size": [height, width], "padding": max(1, min(height, width) // 8)}
    flips = [] if request.like else list(recipe.data.augment)  # of arrays it is not known that they are photographs
    values["data.augment"] = [{"RandomCrop": crop}, *flips]
    if request.quick or recipe.tune is None or request.sets("posterior.method"):  # trials are of one method's options
        del values["tune.epochs"]
        values |= {} if recipe.tune is None else {"tune": None}
    return values


def as_toml(value: Any) -> str:
    """A value in the form of `--set`."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {as_toml(v)}' for key, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return "none" if value is None else json.dumps(value)


# time


def seconds(recipe: Recipe, facts: Facts, machine: Machine) -> float:
    """Time that a recipe takes at the typical speed of such a machine."""
    n, fit = _training(recipe, facts), recipe.fit
    trials = 0 if recipe.tune is None else len(recipe.tune.trials) * recipe.tune.epochs
    plain, posterior = fit.pretrain_epochs, (fit.epochs + trials) * fit.samples
    steps = plain * math.ceil(n / recipe.pretraining.batch) + posterior * math.ceil(n / fit.batch)
    held = facts.examples * recipe.data.calibration, facts.tested or facts.examples * recipe.data.test
    passes = sum(each * min(count, MOST_PASSED) for each, count in zip(PASSES, held, strict=True))
    passes += facts.examples * recipe.data.validation * VALIDATION_SAMPLES * (posterior / fit.samples)
    work = n * BACKWARD * (plain + POSTERIOR * posterior) + passes
    macs = multiply_adds(recipe.network.architecture, json.dumps(recipe.network.arguments), _input(recipe, facts))
    return steps * STEP[machine.kind] + work * macs / (SPEED[machine.kind] * machine.cores)


def _training(recipe: Recipe, facts: Facts) -> float:
    """Examples to train on."""
    return _not_tested(recipe, facts) * (1 - recipe.data.validation - recipe.data.calibration)


def _not_tested(recipe: Recipe, facts: Facts) -> float:
    """Examples outside the test part."""
    return facts.examples * (1 if facts.tested else 1 - recipe.data.test)


def _input(recipe: Recipe, facts: Facts) -> tuple[tuple[int, ...], int]:
    """Shape of the network's input, and number of its outputs."""
    return (facts.shape[0], *recipe.data.size) if recipe.data.size is not None else facts.shape, facts.outputs


@lru_cache(maxsize=64)
def multiply_adds(architecture: str, arguments: str, entering: tuple[tuple[int, ...], int]) -> int:
    """Multiply-adds of one example's pass; `arguments` are JSON."""
    shape, outputs = entering
    sizes: dict[str, JsonValue] = {"classes": outputs, "outputs": outputs, "inputs": math.prod(shape)}
    if len(shape) == 3:
        sizes |= {"channels": shape[0], "size": list(shape[1:])}
    with torch.device("meta" if architecture in OURS or architecture.startswith("torchvision/") else "cpu"):
        net = network_of(architecture, **arguments_for(architecture, sizes) | json.loads(arguments))
        with FlopCounterMode(display=False) as counter:
            answer_of(net, architecture, shape)
    return int(counter.get_total_flops()) // 2


def timed(device: torch.device, steps: int = 8) -> Machine:
    """The machine, with the time of the fastest of some steps of a small CNN over the typical time."""
    cuda = device.type == "cuda"
    width, side, batch = (64, 64, 256) if cuda else (16, 32, 32)
    net = build("cnn", channels=3, size=side, width=width, hidden=64).to(device)
    x, y = torch.zeros(batch, 3, side, side, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    threads, fastest = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)  # other work on the machine disturbs several threads more than one
    try:
        for _ in range(steps):
            start = time.perf_counter()
            F.cross_entropy(net(x), y).backward()
            if cuda:
                torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    macs = multiply_adds("cnn", json.dumps({"width": width, "hidden": 64}), ((3, side, side), 10))
    typical = STEP[device.type] + batch * BACKWARD * macs / SPEED[device.type]
    return Machine(device.type, 1 if cuda else threads, *Ranks.here().of_first([fastest / typical], device))


# from the data to the recipe


def look(request: Request, root: Path | None, download: bool) -> Facts:
    """Number and shape of the examples: of pictures in a folder by their headers, of others by reading them."""
    recipe = request.recipe()
    d, regression = recipe.data, recipe.task == "regression"
    if d.name.startswith("folder:"):
        examples, tested, size, classes = count_pictures(fetched(own_place("folder", d.name.partition(":")[2])))
        resized = d.size is None and recipe.network.weights is None
        height, width = d.size or _made_for(recipe) or size
        return Facts(examples, tested, (d.channels or 3, height, width), classes, pictures=True, resized=resized)
    data = read_data(d.name, root, download=download, regression=regression, target=d.target, group=d.group)
    outputs = data.train.y.shape[1] if data.labels is None else len(data.labels)
    shape = tuple(data.train.x.shape[1:])
    tested = 0 if data.test is None else len(data.test)
    pictures = data.train.x.dtype == torch.uint8 and min(shape[1:]) >= SMALLEST
    return Facts(len(data.train), tested, shape, outputs, pictures=pictures)


def _as_weights_have_it(request: Request) -> Request:
    """With a folder's pictures in grey or colour, as given weights take them."""
    weights = request.recipe().network.weights
    if weights is None or not request.source.startswith("folder:") or request.sets("data.channels"):
        return request
    channels = channels_in(read_weights(fetched(weights)))
    return request if channels is None else replace(request, changes=(*request.changes, f"data.channels={channels}"))


def _made_for(recipe: Recipe) -> tuple[int, int] | None:
    """Height and width of the pictures of a network whose weights are given, where its name or arguments tell."""
    if recipe.network.weights is None:
        return None
    known = input_of(Architecture(name=recipe.network.architecture, arguments=recipe.network.arguments))
    of_network = None if known is None or len(known.shape) != 3 else (known.shape[1], known.shape[2])
    return as_made_for(recipe.data, recipe.network).size or of_network


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    said: str  # the choice in one line; empty if nothing was chosen
    file: Path  # keeps the choice for a resumed run
    content: str = ""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the choice in its file for as long as there are checkpoints to go on from."""
        first = Ranks.here().index == 0
        if self.content and first:
            write_whole(self.file, self.content.encode())
        try:
            yield
        finally:
            stem = glob.escape(self.file.name.removesuffix(".choice.json"))
            if first and not any(self.file.parent.glob(f"{stem}.*.checkpoint.safetensors")):
                self.file.unlink(missing_ok=True)


def plan(
    request: Request,
    out: Path,
    device: torch.device,
    *,
    data_root: Path | None = None,
    download: bool = False,
    fresh: bool = False,
) -> Plan:
    """The recipe to follow: for one's own data with a choice, for others as it is.

    A choice that an unfinished run has left beside `out` is kept, if data and request are the same.
    """
    file = out.with_name(f"{out.stem}.choice.json")
    if request.source.partition(":")[0] not in OWN_DATA:
        if request.quick:
            raise RecipeError(f"--quick belongs to {', '.join(f'{k}:PATH' for k in OWN_DATA)}; set fit.epochs instead.")
        recipe = request.recipe(())
        _tell_left_out(request)
        return Plan(request.recipe(["fit.pretrain_epochs=0"]) if recipe.network.weights else recipe, "", file)
    if request.recipe().network.weights is not None and not request.sets("network.architecture"):
        raise RecipeError("weights came without their network: name it, such as --network torchvision/resnet18.")
    request = _as_weights_have_it(request)
    facts = look(request, data_root, download)
    if facts.pictures and request.recipe().task == "classification" and not request.source.startswith("folder:"):
        request = replace(request, like="folder")
    _tell_left_out(request)
    machine = timed(device)
    key = {"request": asdict(request), "facts": asdict(facts), "device": device.type}
    chosen = None if fresh else _kept(file, key)
    chosen = choose(request, facts, machine) if chosen is None else chosen
    recipe = request.recipe(chosen)
    said = f"{facts}, {machine}: {_words(recipe)}."
    if machine.kind == "cpu" and facts.pictures:
        gpu = Machine("cuda")
        better = request.recipe(choose(request, facts, gpu))
        same = _words(better) == _words(recipe)
        more = "only be faster" if same else f"train {_words(better)}"
        said += f" A GPU would {more}, in about {duration(seconds(better, facts, gpu))}."
    return Plan(recipe, said, file, json.dumps({**key, "chosen": chosen}))


def _tell_left_out(request: Request) -> None:
    if said := left_out(request.source, request.changes, like=request.like):
        remark(said)


def _words(recipe: Recipe) -> str:
    """Network and epochs of a recipe."""
    wide, size, fit = recipe.network.arguments.get("width"), recipe.data.size, recipe.fit
    name = recipe.network.architecture + (f" of width {wide}" if wide else "")
    name += f" at {size[0]} × {size[1]}" if size is not None else ""
    plain = f"{fit.pretrain_epochs} epochs, then " if fit.pretrain_epochs else ""
    return f"{name}, {plain}{fit.epochs} of the posterior" if plain else f"{name}, {fit.epochs} epochs"


def _kept(file: Path, key: Mapping[str, object]) -> list[str] | None:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = json.loads(json.dumps(key))
    same = isinstance(stored, dict) and all(stored.get(name) == value for name, value in ours.items())
    return list(stored["chosen"]) if same else None
