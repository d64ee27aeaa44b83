"""Recipes: what `dubito train` is told, as TOML that is checked before anything starts. Unknown keys are mistakes."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from dubito.models.errors import DubitoError
from dubito.models.manifest import Precision, Predictive, Selection, SetScore
from dubito.models.names import LAPLACE, Measure
from dubito.training.names import OWN_DATA, recipes, shipped

# strict: true, "20" and 20.0 are no whole numbers
Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, lt=1)]

WORDS = {"True": True, "False": False, "None": None, "none": None}  # read by `--set` too; TOML has no none
EXPECTED = {"model_type": "expected a table", "dict_type": "expected a table", "tuple_type": "expected a list"}
NO_KL = {  # what the plain network's training has none of
    "pretrain_epochs": 0,
    "likelihood_epochs": 0,
    "warmup_epochs": 0,
    "frozen_norm_epochs": 0,
    "kl": 0.0,
    "patience": None,
    "samples": 1,
}
Noise = Literal["constant", "input", "auto"]  # one σ per target; one per target and input; chosen by validation NLL
MOST_COMPLAINTS = 3  # at a time


class RecipeError(DubitoError):
    """A recipe that cannot be followed."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Strict):
    """Where the examples come from, and how the training part is divided by the recipe's seed."""

    name: str  # one of `sources.NAMES`: digits, mnist …, uci/NAME, uci-gap/NAME, folder:PATH, npz:PATH, csv:PATH
    split: Whole = 0  # of uci/NAME and uci-gap/NAME: which of the published divisions
    target: str | None = None  # of csv:PATH: the column to predict; without one, the last
    size: tuple[Count, Count] | None = None  # of folder:PATH: height, width; without one, the first picture's
    validation: Share = 0.05
    calibration: Share = 0.1
    test: Share = 0.2  # of sets that come without a test part
    augment: tuple[dict[str, dict[str, JsonValue]], ...] = ()  # torchvision.transforms.v2: {RandomCrop = {size = 32}}

    @model_validator(mode="after")
    def _consistent(self) -> "Data":
        if self.validation + self.calibration >= 1:
            raise ValueError(
                f"validation + calibration is {self.validation + self.calibration:g}; expected less than 1, "
                "for the rest is trained on"
            )
        for key, starts in (("split", ("uci/", "uci-gap/")), ("target", ("csv:",)), ("size", ("folder:",))):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and not self.name.startswith(starts):
                whose = " and ".join(f"{start}…" for start in starts)
                raise ValueError(f"{key} is {value!r}, which belongs to {whose} alone; the data is {self.name!r}")
        return self


class Network(Strict):
    architecture: str
    arguments: dict[str, JsonValue] = {}  # sizes that the data tells (classes, inputs, channels …) may be left out
    weights: str | None = None  # a state dict (.safetensors) of the plain network to start from


class Posterior(Strict):
    method: str
    options: dict[str, JsonValue] = {}  # of `bayesianize`: inducing, lam_max, members …; or those of `Laplace`
    layers: dict[str, JsonValue] = {}  # options of some layers, by name or glob


class Fit(Strict):
    """Likelihood alone first, then the KL's weight rises linearly to `kl`, then the ELBO with it."""

    epochs: Count
    pretrain_epochs: Whole = 0  # of the plain network first, whose weights the posterior then starts from
    noise_epochs: Whole = 0  # of noise that depends on the input: constant first, then as many while it comes in
    likelihood_epochs: Whole = 0
    warmup_epochs: Whole = 0
    batch: Count = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: Positive = 1e-3
    momentum: Annotated[NonNegative, Field(lt=1)] = 0.9  # of sgd
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    milestones: tuple[Count, ...] = ()  # of step: epochs after which the rate falls to a tenth
    samples: Count = 1  # draws per step
    kl: NonNegative = 1.0
    function_space: bool = False  # weight λ's term by min(1, N/d_in) [Ritter21, eq. 45]
    clip: Positive | None = None  # of the gradient's norm
    frozen_norm_epochs: Whole = 0  # the last ones, at most half: BatchNorm keeps its statistics, as in answers
    patience: Count | None = None  # epochs of ELBO without a better validation NLL before stopping at the best
    amp: bool = True  # bfloat16 autocast, on GPUs only
    compile: bool = False  # torch.compile
    graph: bool = True  # on GPUs, a step is captured once and replayed: small networks train many times faster

    @model_validator(mode="after")
    def _consistent(self) -> "Fit":
        if self.likelihood_epochs + self.warmup_epochs > self.epochs:
            raise ValueError(
                f"likelihood_epochs + warmup_epochs is {self.likelihood_epochs + self.warmup_epochs}, "
                f"but epochs only {self.epochs}; expected no more than that"
            )
        if self.optimiser == "adam" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError(f"momentum is {self.momentum}, which belongs to the optimiser sgd; it is adam")
        if (self.schedule == "step") != bool(self.milestones):
            raise ValueError(
                f"schedule is {self.schedule!r} and milestones {list(self.milestones)}; "
                "milestones belong to the schedule 'step', which needs them"
            )
        return self

    @property
    def frozen_from(self) -> int:
        """The epoch from which on BatchNorm keeps its statistics."""
        return self.epochs - min(self.frozen_norm_epochs, self.epochs // 2)


class Pretrain(Strict):
    """How the plain network is fitted first, where that differs from `fit`."""

    batch: Count | None = None
    optimiser: Literal["adam", "sgd"] | None = None
    lr: Positive | None = None
    momentum: Annotated[NonNegative, Field(lt=1)] | None = None
    weight_decay: NonNegative | None = None
    schedule: Literal["constant", "cosine", "step"] | None = None
    milestones: tuple[Count, ...] | None = None
    clip: Positive | None = None


class Tune(Strict):
    """Short runs with other options of the posterior, judged by the NLL of the validation part, before the real one."""

    trials: tuple[dict[str, JsonValue], ...]  # options of each, over `posterior.options`; the best are taken
    epochs: Count  # of each; the phases of `fit` are shortened alike

    @model_validator(mode="after")
    def _some(self) -> "Tune":
        if not self.trials:
            raise ValueError("trials is empty; expected at least one table of options, such as {sigma_max = 0.2}")
        return self


class Laplace(Strict):
    """`posterior.options` of the method subnetwork-laplace."""

    size: Count | None = None  # S weights; None: 1,000, or all where there are fewer. Not of last-layer
    select: Selection = "variance"
    prior_precision: Positive | None = None  # None: a grid on the validation part's log-likelihood
    batch: Count = 128  # examples at a time, at most

    @model_validator(mode="after")
    def _consistent(self) -> "Laplace":
        if self.select == "last-layer" and self.size is not None:
            raise ValueError(f"size is {self.size}, but select is 'last-layer', which has a size of its own")
        return self


class Calibrate(Strict):
    false_positive_rate: Share = 0.05
    coverage: Share = 0.9
    directions: Whole = 4  # R of way 3
    temperature: bool = False
    method: Predictive | None = None  # that answers by default; None: probit where there is a closed form
    sets: SetScore = "aps"  # of classification: how classes are scored
    per: Literal["class", "group"] | None = None  # a quantile for each class, or each group that the data names
    measure: Measure | None = None  # that OOD flags go by; None: chosen by spoiled copies of held-out examples
    bank: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] = 512  # points that `knn` may keep; 0: none is tried


class Recipe(Strict):
    seed: Annotated[Whole, Field(lt=1 << 31)] = 0
    task: Literal["classification", "regression"] = "classification"
    noise: Noise | None = None  # of regression's targets; None: auto where the network is trained here by a posterior
    data: Data
    network: Network
    posterior: Posterior
    fit: Fit
    pretrain: Pretrain = Pretrain()
    tune: Tune | None = None
    calibrate: Calibrate = Calibrate()
    precision: Precision = "float32"

    @property
    def pretraining(self) -> Fit:
        """How the plain network is fitted: `fit` with the changes of `pretrain`, without a KL."""
        changes = {"epochs": max(1, self.fit.pretrain_epochs), **NO_KL, **self.pretrain.model_dump(exclude_none=True)}
        return Fit.model_validate(self.fit.model_dump() | changes)

    def trial(self, options: dict[str, JsonValue]) -> "Recipe":
        """This recipe with other options of its posterior, as short as `tune` says."""
        assert self.tune is not None
        share = self.tune.epochs / self.fit.epochs
        phases = ("noise_epochs", "likelihood_epochs", "warmup_epochs", "frozen_norm_epochs")
        shorter = {name: int(getattr(self.fit, name) * share) for name in phases}
        fit = self.fit.model_copy(update={**shorter, "epochs": self.tune.epochs, "patience": None})
        return self.model_copy(update={"fit": fit, "posterior": self.with_options(options).posterior})

    def with_options(self, options: dict[str, JsonValue]) -> "Recipe":
        chosen = self.posterior.model_copy(update={"options": {**self.posterior.options, **options}})
        return self.model_copy(update={"posterior": chosen})

    @property
    def noise_kind(self) -> Noise:
        """`auto` trains a network whose noise depends on the input, and keeps that as far as validation favours it."""
        if self.noise is not None:
            return self.noise
        return "constant" if self.posterior.method == LAPLACE or self.network.weights is not None else "auto"

    @property
    def laplace(self) -> "Laplace | None":
        """How the trained network is made Bayesian afterwards, where that is the method."""
        return Laplace.model_validate(self.posterior.options) if self.posterior.method == LAPLACE else None

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.posterior.method == LAPLACE:
            if self.tune is not None:
                raise ValueError(f"tune belongs to methods that are fitted; {LAPLACE} has a grid of its own")
            if self.posterior.layers:
                raise ValueError(f"posterior.layers belongs to methods that work layer by layer; it is {LAPLACE}")
            try:
                Laplace.model_validate(self.posterior.options)
            except ValidationError as error:
                raise ValueError(f"posterior.options: {_first(error, Laplace)}") from None
            if self.noise_kind != "constant":
                raise ValueError(f"noise is {self.noise!r}, but {LAPLACE} knows constant noise only: leave it out")
        elif self.calibrate.method == "probit":
            raise ValueError(f"calibrate.method is 'probit', which belongs to {LAPLACE}")
        try:
            _ = self.pretraining
        except ValidationError as error:
            raise ValueError(f"pretrain: {_first(error, Pretrain)}") from None
        if self.task == "classification" and self.noise is not None:
            raise ValueError(f"noise is {self.noise!r}, which belongs to regression; the task is classification")
        if self.task == "regression" and self.calibrate.temperature:
            raise ValueError("calibrate.temperature is true; a temperature belongs to classification")
        if self.task == "regression" and self.calibrate.per == "class":
            raise ValueError("calibrate.per is 'class', which belongs to classification")
        return self


def _first(error: ValidationError, section: type[BaseModel]) -> str:
    found = error.errors()[0]
    place = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        return f"there is no {place}; there are: {', '.join(section.model_fields)}"
    if found["type"] == "value_error":
        return found["msg"].removeprefix("Value error, ")
    return f"{place} is {found['input']!r}; {found['msg'].replace('Input should be', 'expected')}"


def read_recipe(source: str, changes: list[str] | None = None) -> Recipe:
    """A shipped recipe by name, `npz:PATH` and the like, or a TOML file; `changes` are `key=value` with dotted keys."""
    table = _read(source)
    for change in changes or []:
        _set(table, change)
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # a misspelt key before its lack
        said = [_complaint(e["loc"], e["type"], e["msg"], e["input"]) for e in found[:MOST_COMPLAINTS]]
        more = f"; and {len(found) - len(said)} more" if len(found) > len(said) else ""
        raise RecipeError(
            f"recipe {source}: {'; '.join(said)}{more}. Change the recipe, or pass --set KEY=VALUE."
        ) from None


def _complaint(loc: tuple[int | str, ...], kind: str, message: str, came: object) -> str:
    place = ".".join(map(str, loc))
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        section = Recipe if len(loc) == 1 else Recipe.model_fields[str(loc[0])].annotation
        assert section is not None
        return f"there is no key {place}; there are: {', '.join(section.model_fields)}"
    if kind == "value_error":  # of our own validators, which say what came
        return (f"{place}: " if place else "") + message.removeprefix("Value error, ")
    return f"{place} is {came!r}; {EXPECTED.get(kind, message.replace('Input should be', 'expected'))}"


def _read(source: str) -> dict[str, Any]:
    kind, _, place = source.partition(":")
    own = kind in OWN_DATA
    name = kind if own else source
    if own and not place:
        raise RecipeError(f"recipe {source!r} names no data; expected {kind}:PATH.")
    if name in shipped():
        text = files("dubito.training").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
    elif Path(source).suffix == ".toml":
        try:
            text = Path(source).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise RecipeError(f"cannot read {source}: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise RecipeError(f"{source} is no text in UTF-8: {error.reason} at byte {error.start}.") from None
    else:
        raise RecipeError(f"no recipe {source!r}; there are: {', '.join(recipes())}, or give a .toml file of your own.")
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{source} is no TOML: {error}.") from None
    if own:
        table.setdefault("data", {})["name"] = source
    return table


def _set(table: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *parents, last = _keys(key)
    if not equals or not last or not text.strip():
        raise RecipeError(
            f"--set {change!r}; expected key=value, such as fit.epochs=20. A name with dots or other signs is quoted: "
            'posterior.layers."net.1".inducing=8.'
        )
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {change!r}: {parent!r} is {table!r}, not a table; expected a key that is there.")
    try:
        table[last] = _value(text.strip())
    except ValueError:
        raise RecipeError(
            f"--set {change!r}: {text.strip()!r} is no TOML; expected a number, true, false, a word, "
            '"words in quotes", [a, list] or {a = "table"}.'
        ) from None


def _keys(dotted: str) -> list[str]:
    """The parts of a key as TOML reads it; one empty part where it cannot."""
    try:
        found: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return [""]
    keys = []
    while isinstance(found, dict) and found:
        key, found = next(iter(found.items()))
        keys.append(key)
    return keys if found == 0 else [""]  # such as a comment


def _value(text: str) -> Any:
    """As TOML reads it; else as a bare word, unless that is a number (.5) or one of `WORDS`."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[0] in "[{\"'":
            raise
    else:
        if len(found) == 1:
            return found["value"]
    if text in WORDS:
        return WORDS[text]
    try:
        return float(text)
    except ValueError:
        return text
