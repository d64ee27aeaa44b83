"""Recipes: the options of `dubito train` as TOML, checked before anything starts. Unknown keys are errors."""

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from dubito.models.conversion.options import options_of
from dubito.models.errors import DubitoError
from dubito.models.manifest import Fitting, Interpolation, Precision, Predictive, SetScore
from dubito.models.names import LAPLACE, METHODS, Measure
from dubito.models.posteriors.subnetwork import Selection
from dubito.training.names import OWN_DATA, TORCHVISION, recipes, shipped

# strict: true, "20" and 20.0 are not whole numbers
Natural = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, gt=0, lt=1)]

WORDS = {"True": True, "False": False, "None": None, "none": None}  # values of `--set` beside TOML's
EXPECTED = {"model_type": "expected a table", "dict_type": "expected a table", "tuple_type": "expected a list"}
NO_KL = {  # options of `fit` that do not apply to the plain network
    "objective": "elbo",
    "pretrain_epochs": 0,
    "likelihood_epochs": 0,
    "warmup_epochs": 0,
    "frozen_norm_epochs": 0,
    "kl": 0.0,
    "patience": None,
    "samples": 1,
}
TargetNoise = Literal["constant", "input", "auto"]  # σ per target; per target and input; by the validation NLL
Normalisation = Literal["data", "imagenet", "unit", "symmetric", "bytes"]
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]] | None] = {
    "data": None,  # mean and standard deviation of the training part
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.0,), (1.0,)),  # values from 0 to 1
    "symmetric": ((0.5,), (0.5,)),  # from -1 to 1
    "bytes": ((0.0,), (1 / 255,)),  # from 0 to 255
}
PICTURES = ("folder:", "npz:", "digits", *TORCHVISION)
TRIALS = {("tune",), ("tune", "trials")}  # keys of the whole list
MOST_COMPLAINTS = 3  # shown at a time
FEWEST_PROBES = 3  # of a variance whose logarithm has a gradient with a finite variance


class RecipeError(DubitoError):
    """A recipe that is not valid."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    """Where the examples come from, and how the training part is divided by the recipe's seed."""

    name: str  # one of `sources.NAMES`: digits, mnist …, uci/NAME, uci-gap/NAME, folder:PATH, npz:PATH, csv:PATH
    split: Natural = 0  # of uci/NAME and uci-gap/NAME: which of the published divisions
    target: str | None = None  # of csv:PATH: the column to predict; without one, the last
    group: str | None = None  # of csv:PATH: a column of groups (`calibrate.per`), which is no input
    size: tuple[Count, Count] | None = None  # of pictures: height, width; without one, the (first) picture's own
    crop: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None  # cut the middle out, this share of each side
    interpolation: Interpolation = "bilinear"
    channels: Literal[1, 3] | None = None  # grey or colour; None: as the data has them, folder:PATH in colour
    exif: bool = True  # of folder:PATH: pictures are turned as their EXIF orientation says
    normalise: Normalisation | tuple[tuple[float, ...], tuple[float, ...]] = "data"  # or mean and std per channel
    validation: Fraction = 0.05
    calibration: Fraction = 0.1
    test: Fraction = 0.2  # of sets that come without a test part
    augment: tuple[dict[str, dict[str, JsonValue]], ...] = ()  # torchvision.transforms.v2: {RandomCrop = {size = 32}}

    @model_validator(mode="after")
    def _consistent(self) -> "Data":
        if self.validation + self.calibration >= 1:
            raise ValueError(
                f"validation + calibration is {self.validation + self.calibration:g}; expected less than 1, "
                "for the rest is trained on"
            )
        belong = {
            "split": ("uci/", "uci-gap/"),
            "target": ("csv:",),
            "group": ("csv:",),
            "exif": ("folder:",),
        } | dict.fromkeys(("size", "crop", "interpolation", "channels", "normalise"), PICTURES)
        for key, starts in belong.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and not self.name.startswith(starts):
                whose = "pictures" if starts is PICTURES else " and ".join(f"{start}…" for start in starts)
                raise ValueError(f"{key} is {value!r}, which belongs to {whose} alone; the data is {self.name!r}")
        if self.crop is not None and self.size is None:
            raise ValueError(f"crop is {self.crop}, which needs a size: that of what is cut out")
        return self

    @property
    def fitting(self) -> Fitting | None:
        """How pictures are brought to `size`; None: they are taken as the data has them."""
        folder = self.name.startswith("folder:")
        if not folder and self.size is None and self.channels is None:
            return None
        resize = None
        if self.crop is not None and self.size is not None:
            resize = int(max(self.size) / self.crop + 1e-6)  # timm rounds down; torchvision's are whole numbers
        return Fitting(resize=resize, interpolation=self.interpolation, exif=folder and self.exif)

    @property
    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation per channel; None: those of the training part."""
        return NORMALISATIONS[self.normalise] if isinstance(self.normalise, str) else self.normalise


class Network(Section):
    architecture: str
    arguments: dict[str, JsonValue] = {}  # sizes that follow from the data (classes, inputs, channels …) are optional
    weights: str | None = None  # a state dict (.safetensors, .pth, .pt, .ckpt) of the plain network to start from
    rename: tuple[str, ...] = ()  # names in that file: OLD=NEW, as fc.1=fc


class PosteriorOptions(Section):
    method: str
    options: dict[str, JsonValue] = {}  # of `bayesianize`: inducing, lam_max, members …; or those of `Laplace`
    layers: dict[str, JsonValue] = {}  # options of some layers, by name or glob


class Fit(Section):
    """Likelihood alone first, then the KL's weight rises linearly to `kl`, then the ELBO with it."""

    epochs: Count
    objective: Literal["elbo", "function-space"] = "elbo"  # KL of the weights, or of the functions at `context` inputs
    pretrain_epochs: Natural = 0  # of the plain network first, whose weights the posterior then starts from
    noise_epochs: Natural = 0  # of target noise that depends on the input: constant, then as many while its gain rises
    likelihood_epochs: Natural = 0
    warmup_epochs: Natural = 0
    batch: Count = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: PositiveNumber = 1e-3
    momentum: Annotated[NonNegative, Field(lt=1)] = 0.9  # of sgd
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    milestones: tuple[Count, ...] = ()  # of step: epochs after which the rate falls to a tenth
    samples: Count = 1  # draws per step
    kl: NonNegative = 1.0
    function_space: bool = False  # weight λ's term by min(1, N/d_in) [Ritter21, eq. 45]
    clip: PositiveNumber | None = None  # of the gradient's norm
    frozen_norm_epochs: Natural = 0  # the last ones, at most half: BatchNorm keeps its statistics, as in predictions
    patience: Count | None = None  # epochs of ELBO without a better validation NLL before stopping at the best
    amp: bool = True  # bfloat16 autocast, on GPUs only
    compile: bool = False  # torch.compile
    graph: bool = True  # on GPUs, a step is a CUDA graph: small networks train many times faster

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
        """First epoch in which BatchNorm keeps its statistics."""
        return self.epochs - min(self.frozen_norm_epochs, self.epochs // 2)


class Pretrain(Section):
    """Options of fitting the plain network first, where they differ from `fit`."""

    batch: Count | None = None
    optimiser: Literal["adam", "sgd"] | None = None
    lr: PositiveNumber | None = None
    momentum: Annotated[NonNegative, Field(lt=1)] | None = None
    weight_decay: NonNegative | None = None
    schedule: Literal["constant", "cosine", "step"] | None = None
    milestones: tuple[Count, ...] | None = None
    clip: PositiveNumber | None = None


class Tune(Section):
    """Short trial runs with other options of the posterior; the lowest validation NLL decides."""

    trials: tuple[dict[str, JsonValue], ...]  # options of each, over `posterior.options`; the best are taken
    epochs: Count  # of each; the phases of `fit` are shortened in proportion

    @model_validator(mode="after")
    def _some(self) -> "Tune":
        if not self.trials:
            raise ValueError("trials is empty; expected at least one table of options, such as {sigma_max = 0.2}")
        return self


class Laplace(Section):
    """`posterior.options` of the method subnetwork-laplace."""

    size: Count | None = None  # S weights; None: 1,000, or all where there are fewer, or the last layer's
    select: Selection | None = None  # None: last-layer of a network with more than a million weights, else variance
    prior_precision: PositiveNumber | None = None  # None: a grid on the validation part's log-likelihood
    batch: Count = 128  # examples at a time, at most


class Context(Section):
    """Where functions are compared with their prior, for `fit.objective` function-space."""

    inputs: str = "uniform"  # over the range of the data; spoiled or augmented training inputs; or a data set's name
    margin: NonNegative = 0.5  # of uniform inputs that are no pictures: share of the range that is added on both sides
    points: Count = 32  # inputs in a step
    covariance: Literal["diagonal", "full"] = "diagonal"  # full: between all inputs of a step, for each output
    probes: Annotated[int, Field(strict=True, ge=FEWEST_PROBES)] = 4  # draws of the linearised network in a step
    prior_variance: PositiveNumber = 100.0  # of every output
    prior_mean: Literal["zero", "start"] = "zero"  # start: the network as it was before the fit

    @model_validator(mode="after")
    def _consistent(self) -> "Context":
        if self.covariance == "full" and self.probes < self.points + 2:
            raise ValueError(
                f"probes is {self.probes} and points {self.points}; a full covariance needs two probes more than points"
            )
        if self.inputs != "uniform" and self.margin != type(self).model_fields["margin"].default:
            raise ValueError(f"margin is {self.margin:g}, which belongs to inputs = 'uniform'; it is {self.inputs!r}")
        return self


class Calibrate(Section):
    false_positive_rate: Fraction = 0.05
    coverage: Fraction = 0.9
    directions: Natural = 4  # R of the factored law
    temperature: bool = False
    method: Predictive | None = None  # default predictive; None: probit where there is a closed form
    sets: SetScore = "aps"  # score of classes, for classification
    per: Literal["class", "group"] | None = None  # a quantile for each class, or for each group named in the data
    measure: Measure | None = None  # of the OOD flags; None: chosen with spoiled copies of held-out examples
    bank: Annotated[int, Field(strict=True, ge=0, le=1 << 16)] = 512  # points of the feature bank for `knn`; 0: none


class Recipe(Section):
    seed: Annotated[Natural, Field(lt=1 << 31)] = 0
    task: Literal["classification", "regression"] = "classification"
    noise: TargetNoise | None = None  # of a regression; None: auto where the network is trained here by a posterior
    data: Data
    network: Network
    posterior: PosteriorOptions
    fit: Fit
    context: Context = Context()
    pretrain: Pretrain = Pretrain()
    tune: Tune | None = None
    calibrate: Calibrate = Calibrate()
    precision: Precision = "float32"

    @property
    def pretraining(self) -> Fit:
        """Options for the plain network: `fit` with the changes of `pretrain`, without a KL."""
        changes = {"epochs": max(1, self.fit.pretrain_epochs), **NO_KL, **self.pretrain.model_dump(exclude_none=True)}
        return Fit.model_validate(self.fit.model_dump() | changes)

    def trial(self, options: dict[str, JsonValue]) -> "Recipe":
        """This recipe with other options of its posterior, shortened to `tune.epochs`."""
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
    def noise_kind(self) -> TargetNoise:
        """Kind of target noise. `auto`: depends on the input, with a gain chosen on validation data."""
        if self.noise is not None:
            return self.noise
        return "constant" if self.posterior.method == LAPLACE or self.network.weights is not None else "auto"

    @property
    def laplace(self) -> "Laplace | None":
        """Options of subnetwork Laplace, if that is the method."""
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
        if self.fit.objective == "elbo" and self.context != Context():
            raise ValueError("context belongs to fit.objective 'function-space'; it is 'elbo'")
        if self.fit.objective == "function-space":
            if self.posterior.method == LAPLACE:
                raise ValueError(
                    f"fit.objective is 'function-space', but {LAPLACE} is not fitted by variation: use elbo"
                )
            if self.fit.function_space:
                raise ValueError("fit.function_space weighs a KL of weights; fit.objective 'function-space' has none")
            if self.context.inputs == "augmented" and self.context.points > self.fit.batch:
                raise ValueError(
                    f"context.points is {self.context.points} and fit.batch {self.fit.batch}; augmented inputs are "
                    "those of the batch: expected no more points than that"
                )
        if self.task == "classification" and self.noise is not None:
            raise ValueError(f"noise is {self.noise!r}, which belongs to regression; the task is classification")
        if self.task == "regression" and self.calibrate.temperature:
            raise ValueError("calibrate.temperature is true; a temperature belongs to classification")
        if self.task == "regression" and self.calibrate.per == "class":
            raise ValueError("calibrate.per is 'class', which belongs to classification")
        return self


def _first(error: ValidationError, section: type[BaseModel]) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no {place}; there are: {', '.join(section.model_fields)}"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    return f"{place} is {first['input']!r}; {first['msg'].replace('Input should be', 'expected')}"


def read_recipe(source: str, changes: list[str] | None = None, *, like: str | None = None) -> Recipe:
    """Read a shipped recipe by name, `npz:PATH` and the like, or a TOML file; `changes` are `dotted.key=value`.

    `like` names the shipped recipe for one's own data; without it, that of its kind.
    """
    table = _read(source, like)
    _forget_arguments(table, changes or [])
    _forget_options(table, changes or [])
    for change in changes or []:
        _set(table, change)
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # misspelt keys first
        said = [_complaint(e["loc"], e["type"], e["msg"], e["input"]) for e in errors[:MOST_COMPLAINTS]]
        more = f"; and {len(errors) - len(said)} more" if len(errors) > len(said) else ""
        raise RecipeError(
            f"recipe {source}: {'; '.join(said)}{more}. Change the recipe, or pass --set KEY=VALUE."
        ) from None
    if idle := _idle_options(recipe):
        raise RecipeError(f"recipe {source}: {idle}. Change the recipe, or pass --set KEY=VALUE.")
    return recipe


def left_out(source: str, changes: Sequence[str], *, like: str | None = None) -> str:
    """What `read_recipe` leaves out of a recipe whose method is changed, in words; empty if nothing."""
    gone = _forget_options(_read(source, like), changes)
    return f"left out of the recipe, for they belong to another method: {', '.join(gone)}" if gone else ""


def _idle_options(recipe: Recipe) -> str:
    """A complaint about an option that no method of the recipe takes; empty if there is none."""
    layers = recipe.posterior.layers
    methods = list(dict.fromkeys([recipe.posterior.method, *_methods_of(layers)]))
    if not {*methods} <= {*METHODS}:
        return ""  # Laplace's are checked; what is no method is refused where the network is made
    known = options_of(*methods)
    places: dict[str, JsonValue] = {"posterior.options": recipe.posterior.options}
    places |= {f"posterior.layers.{name}": options for name, options in layers.items()}
    places |= {f"tune.trials.{i}": options for i, options in enumerate(recipe.tune.trials if recipe.tune else ())}
    for place, options in places.items():
        others = ("method", "M_out", "M_in") if place.startswith("posterior.layers.") else ("unsupported",)
        for name in options if isinstance(options, dict) else ():
            if name not in (*known, *others):
                of = " and ".join(methods)
                there_are = f"; there are: {', '.join(known)}" if known else ", which has none"
                return f"{place}: {name!r} is no option of {of}{there_are}"
    return ""


def _methods_of(layers: object) -> list[str]:
    """Methods that `posterior.layers` names."""
    values = layers.values() if isinstance(layers, dict) else ()
    named = [value.get("method") if isinstance(value, dict) else value for value in values]
    return [method for method in named if isinstance(method, str)]


def _complaint(loc: tuple[int | str, ...], kind: str, message: str, came: object) -> str:
    place = ".".join(map(str, loc))
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        section = Recipe if len(loc) == 1 else Recipe.model_fields[str(loc[0])].annotation
        assert section is not None
        return f"there is no key {place}; there are: {', '.join(section.model_fields)}"
    if kind == "value_error":  # from our own validators, whose message is complete
        return (f"{place}: " if place else "") + message.removeprefix("Value error, ")
    return f"{place} is {came!r}; {EXPECTED.get(kind, message.replace('Input should be', 'expected'))}"


def _read(source: str, like: str | None) -> dict[str, Any]:
    kind, _, place = source.partition(":")
    own = kind in OWN_DATA
    name = (like or kind) if own else source
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


def _forget_arguments(table: dict[str, Any], changes: list[str]) -> None:
    """Those of the recipe's network are none of another network's."""
    network: Any = table.get("network")
    for change in changes:
        key, _, text = change.partition("=")
        named = isinstance(network, dict) and _keys(key) == ["network", "architecture"]
        if named and text.strip().strip("\"'") != network.get("architecture"):
            network.pop("arguments", None)


def _forget_options(table: dict[str, Any], changes: Sequence[str]) -> list[str]:
    """Options of the recipe's own method, and trials of them, are none of a method that does not take them.

    Returns what was left out, in words.
    """
    parts = [change.partition("=") for change in changes]
    changed = {tuple(_keys(key)): text.strip().strip("\"'") for key, _, text in parts}
    posterior: Any = table.get("posterior")
    tune: Any = table.get("tune")
    method = changed.get(("posterior", "method"))
    if method is None or not isinstance(posterior, dict) or method == posterior.get("method"):
        return []
    layers = _methods_of(posterior.get("layers"))
    known = {*Laplace.model_fields} if method == LAPLACE else {*options_of(method, *layers)}
    options = posterior.get("options")
    trials = tune.get("trials") if isinstance(tune, dict) else None
    gone: list[str] = []
    if isinstance(options, dict) and ("posterior", "options") not in changed:
        gone += [f"{name} {options.pop(name)}" for name in [*options] if name not in known]
    if isinstance(trials, list) and all(isinstance(t, dict) for t in trials) and not changed.keys() & TRIALS:
        kept = [{name: value for name, value in trial.items() if name in known} for trial in trials]
        if any(kept):
            tune["trials"] = [trial for trial in kept if trial]
            gone += [f"{name} of the trials" for name in dict.fromkeys(n for t in trials for n in t if n not in known)]
        else:
            del table["tune"]
            gone.append("the trials")
    return gone


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
    """The parts of a dotted key as TOML reads it; one empty part if it is not valid."""
    try:
        table: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return [""]
    keys = []
    while isinstance(table, dict) and table:
        key, table = next(iter(table.items()))
        keys.append(key)
    return keys if table == 0 else [""]  # such as a comment


def _value(text: str) -> Any:
    """A value as TOML reads it; else one of `WORDS`, a number such as .5, or a bare word."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[0] in "[{\"'":
            raise
    else:
        if len(table) == 1:
            return table["value"]
    if text in WORDS:
        return WORDS[text]
    try:
        return float(text)
    except ValueError:
        return text
