"""Recipes: what `dubito train` is told, as TOML that is checked before anything starts. Unknown keys are mistakes."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dubito.models.errors import DubitoError

Share = Annotated[float, Field(gt=0, lt=1)]
OWN_DATA = ("folder", "npz", "csv")  # `dubito train npz:PATH` follows the recipe npz with that data


class RecipeError(DubitoError):
    """A recipe that cannot be followed."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Strict):
    """Where the examples come from, and how the training part is divided by the recipe's seed."""

    name: str  # digits, mnist, fashion-mnist, cifar10, cifar100, svhn, uci/NAME, folder:PATH, npz:PATH, csv:PATH
    split: NonNegativeInt = 0  # of uci/NAME: which of its published divisions
    target: str | None = None  # of csv:PATH: the column to predict; without one, the last
    size: tuple[PositiveInt, PositiveInt] | None = None  # of folder:PATH: height, width; without one, the first picture's
    validation: Share = 0.05
    calibration: Share = 0.1
    test: Share = 0.2  # of sets that come without a test part
    augment: tuple[dict[str, dict[str, JsonValue]], ...] = ()  # torchvision.transforms.v2: {RandomCrop = {size = 32}}


class Network(Strict):
    architecture: str
    arguments: dict[str, JsonValue] = {}  # sizes that the data tells (classes, inputs, channels …) may be left out
    weights: str | None = None  # a state dict (.safetensors) of the plain network to start from


class Posterior(Strict):
    method: str
    options: dict[str, JsonValue] = {}  # of `bayesianize`: inducing, lam_max, sigma_max, members, hierarchy …
    layers: dict[str, JsonValue] = {}  # options of some layers, by name or glob


class Fit(Strict):
    """Likelihood alone first, then the KL's weight rises linearly to `kl`, then the ELBO with it."""

    epochs: PositiveInt
    likelihood_epochs: NonNegativeInt = 0
    warmup_epochs: NonNegativeInt = 0
    batch: PositiveInt = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat = 1e-3
    momentum: NonNegativeFloat = 0.9  # of sgd
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    milestones: tuple[PositiveInt, ...] = ()  # of step: epochs after which the rate falls to a tenth
    samples: PositiveInt = 1  # draws per step
    kl: NonNegativeFloat = 1.0
    function_space: bool = False  # weight λ's term by min(1, N/d_in) [Ritter21, eq. 45]
    clip: PositiveFloat | None = None  # of the gradient's norm
    patience: PositiveInt | None = None  # epochs of ELBO without a better validation NLL before stopping at the best
    amp: bool = True  # bfloat16 autocast, on GPUs only
    compile: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "Fit":
        if self.likelihood_epochs + self.warmup_epochs > self.epochs:
            raise ValueError(
                f"likelihood_epochs + warmup_epochs is {self.likelihood_epochs + self.warmup_epochs}, "
                f"more than the {self.epochs} epochs"
            )
        if (self.schedule == "step") != bool(self.milestones):
            raise ValueError("milestones belong to the schedule 'step', which needs them")
        return self


class Calibrate(Strict):
    false_positive_rate: Share = 0.05
    coverage: Share = 0.9
    directions: NonNegativeInt = 4  # R of way 3
    temperature: bool = False


class Recipe(Strict):
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    task: Literal["classification", "regression"] = "classification"
    data: Data
    network: Network
    posterior: Posterior
    fit: Fit
    calibrate: Calibrate = Calibrate()
    precision: Literal["float32", "float16", "bfloat16", "int8"] = "float32"


def shipped() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in files("dubito.training").joinpath("recipes").iterdir())


def read_recipe(source: str, changes: list[str] | None = None) -> Recipe:
    """A shipped recipe by name, `npz:PATH` and the like, or a TOML file; `changes` are `key=value` with dotted keys."""
    table = _read(source)
    for change in changes or []:
        _set(table, change)
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        first, *rest = error.errors()
        more = f" ({len(rest)} more like this)" if rest else ""
        place = ".".join(map(str, first["loc"]))
        came = "" if first["type"] == "missing" else f" (it is {first['input']!r})"
        raise RecipeError(f"recipe {source}: {place}: {first['msg']}{came}{more}.") from None


def _read(source: str) -> dict[str, Any]:
    kind, colon, _ = source.partition(":")
    own = bool(colon) and kind in OWN_DATA
    name = kind if own else source
    if name in shipped():
        text = files("dubito.training").joinpath("recipes", f"{name}.toml").read_text()
    elif Path(source).suffix == ".toml":
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"cannot read {source}: {error}.") from None
    else:
        known = [*(n for n in shipped() if n not in OWN_DATA), *(f"{n}:PATH" for n in OWN_DATA)]
        raise RecipeError(f"no recipe {source!r}; there are: {', '.join(known)}, or give a .toml file of your own.")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{source} is no TOML: {error}.") from None
    if own:
        table["data"]["name"] = source
    return table


def _set(table: dict[str, Any], change: str) -> None:
    key, equals, value = change.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last:
        raise RecipeError(f"--set {change!r}; expected key=value, such as fit.epochs=20.")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {change!r}: {parent!r} is a value, not a table.")
    try:
        table[last] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = value.strip()  # a bare word is a string
