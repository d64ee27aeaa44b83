"""The manifest: what an artifact says about itself, as typed data. Unknown keys are mistakes."""

from collections.abc import Iterator
from math import prod
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dubito.models.fields import Members, PositiveFinite, Share, Size, Strict
from dubito.models.names import Measure, listed
from dubito.models.posteriors.dictionary import entry_classes, joint_entry_class
from dubito.models.posteriors.entry import Entry, JointEntry
from dubito.models.traced import Traced

# 2: a calibration with `sets`, `classes` or `groups`, which readers of format 1 do not know
# 3: a calibration with `auroc`, or thresholds of `energy` or `knn`; a bank of features
# 4: pictures with a `fitting`; a traced network
# 5: inducing inputs
# 6: a card with `zoo`
# 7: a plain network whose AUROC is not by entropy
FORMATS = (1, 2, 3, 4, 5, 6, 7)
LARGEST_INPUT = 1 << 26  # numbers
LARGEST_BANK = 1 << 26  # numbers
LARGEST_RESIZE = 1 << 12  # of a picture's shorter side

Names = Annotated[tuple[str, ...], Field(max_length=1 << 20)]
Precision = Literal["float32", "float16", "bfloat16", "int8"]
Predictive = Literal["probit", "sampling"]  # how a linearised network answers: in closed form, or by draws
SetScore = Literal["probability", "aps", "raps"]
Interpolation = Literal["bilinear", "bicubic"]


class Classification(Strict):
    kind: Literal["classification"] = "classification"


class Regression(Strict):
    """Targets were shifted and scaled for training; answers are in the targets' own units."""

    kind: Literal["regression"] = "regression"
    outputs: Size = 1  # D
    noise: Literal["constant", "input"] = "constant"  # one σ per target, or one per target and input
    shift: tuple[FiniteFloat, ...] = (0.0,)
    scale: tuple[PositiveFinite, ...] = (1.0,)

    @model_validator(mode="after")
    def _lengths(self) -> "Regression":
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            if len(values) not in (1, self.outputs):
                raise ValueError(f"{name} has {len(values)} entries; expected one, or one per output ({self.outputs})")
        return self

    @property
    def numbers(self) -> int:
        """Outputs of the network: D means, and D raw log-deviations where the noise depends on the input."""
        return 2 * self.outputs if self.noise == "input" else self.outputs


Task = Annotated[Classification | Regression, Field(discriminator="kind")]


def _read_entry(value: Any) -> Entry:
    """An entry by its kind, which any method of the dictionary may have."""
    if isinstance(value, Entry):
        return value
    kinds = entry_classes()
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise PydanticCustomError(
            "kind", "its kind is {kind}; expected {kinds}", {"kind": repr(kind), "kinds": listed([*kinds])}
        )
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as error:
        raise _in_one_line(error, kind) from None


def _read_joint(value: Any, info: ValidationInfo) -> JointEntry | None:
    """An entry by its key."""
    if value is None or isinstance(value, JointEntry):
        return value
    assert info.field_name is not None
    try:
        return joint_entry_class(info.field_name).model_validate(value)
    except ValidationError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: ValidationError, *within: str) -> PydanticCustomError:
    first = error.errors()[0]
    place = ".".join(map(str, (*within, *first["loc"])))
    return PydanticCustomError("entry", "{place}: {reason}", {"place": place, "reason": first["msg"]})


Layer = Annotated[SerializeAsAny[Entry], BeforeValidator(_read_entry)]
Joint = Annotated[SerializeAsAny[JointEntry] | None, BeforeValidator(_read_joint)]


class Hierarchy(Strict):
    """The global inducing weights above the layers' own [Ritter21, appendix H]."""

    d_out: Size
    d_in: Size
    layer: Layer

    @model_validator(mode="after")
    def _global(self) -> "Hierarchy":
        if self.layer.below in (None, self.layer.method):
            raise ValueError(f"a layer of method {self.layer.method} cannot draw the V's of others")
        return self


class FeatureBankEntry(Strict):
    """Points that stand for the training data's features: the inputs of the layer that makes the outputs."""

    layer: Annotated[str, Field(max_length=1000)]
    members: Members = 1  # each with points of its own
    points: Size  # N of each member
    features: Size  # d

    @model_validator(mode="after")
    def _bounded(self) -> "FeatureBankEntry":
        if self.members * self.points * self.features > LARGEST_BANK:
            raise ValueError(f"the bank has more than {LARGEST_BANK:,} numbers")
        return self


class Architecture(Strict):
    """`custom` names no builder: such a network is traced, or the caller brings it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: dict[str, JsonValue] = {}


class Fitting(Strict):
    """How a picture is turned and brought to the input's height and width."""

    resize: Size | None = None  # the shorter side becomes this long, and the middle is cut out; None: both are resized
    interpolation: Interpolation = "bilinear"  # both with antialiasing
    exif: bool = False  # turned as the file's EXIF orientation says

    def box(self, height: int, width: int, shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sides of the resized picture, and the top left corner of what is cut out of it (as torchvision does both)."""
        if self.resize is None:
            return (shape[1], shape[2]), (0, 0)
        sides = (max(self.resize, self.resize * height // width), max(self.resize, self.resize * width // height))
        return sides, (round((sides[0] - shape[1]) / 2), round((sides[1] - shape[2]) / 2))


class Image(Strict):
    """How a picture becomes an input: brought to its size, scaled to [0, 1], then (x − mean)/std per channel."""

    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFinite, ...]
    fitting: Fitting | None = None  # None: both sides are resized, bilinearly, and EXIF is not read

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What readers of formats 1 to 3 do not know is left out where it says nothing."""
        return {key: value for key, value in write(self).items() if key != "fitting" or value is not None}


class Input(Strict):
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)]  # of one input, without the batch axis
    image: Image | None = None  # None: tensors only
    columns: Names | None = None  # of a table: what each number is

    @model_validator(mode="after")
    def _fitting(self) -> "Input":
        if self.columns is not None and self.shape != (len(self.columns),):
            raise ValueError(f"{len(self.columns)} columns are named, but an input has shape {self.shape}")
        if prod(self.shape) > LARGEST_INPUT:
            raise ValueError(f"an input of shape {self.shape} has more than {LARGEST_INPUT:,} numbers")
        if self.image is not None:
            if len(self.shape) != 3:
                raise ValueError(f"an image input has shape (channels, height, width), not {self.shape}")
            if {len(self.image.mean), len(self.image.std)} != {self.shape[0]}:
                raise ValueError(f"mean and std need one entry per channel ({self.shape[0]})")
            resize = None if self.image.fitting is None else self.image.fitting.resize
            if resize is not None and not max(self.shape[1:]) <= resize <= LARGEST_RESIZE:
                raise ValueError(
                    f"pictures are resized to {resize}; expected {max(self.shape[1:])} to {LARGEST_RESIZE}"
                )
        return self


class Auto(Strict):
    """Thresholds and quantile for `samples="auto"` with this tolerance and limit."""

    tolerance: Share
    max_samples: Annotated[int, Field(gt=0)]
    thresholds: dict[Measure, FiniteFloat]
    quantile: FiniteFloat


class Closed(Strict):
    """Thresholds and quantile for the closed-form predictive, which takes no draws."""

    measure: Measure
    thresholds: dict[Measure, FiniteFloat]
    quantile: FiniteFloat

    @model_validator(mode="after")
    def _complete(self) -> "Closed":
        if self.measure not in self.thresholds:
            raise ValueError(f"the default measure {self.measure!r} of the closed form has no threshold")
        return self


class Sets(Strict):
    """The conformal score of a class: all are 0 for the most probable class, so that no set is empty.

    `probability`: 1 − p. `aps`: the summed probability of all classes before it in order of probability. `raps`: that
    plus lam · max(0, rank − k_reg).
    """

    score: SetScore = "aps"
    lam: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    k_reg: Annotated[int, Field(gt=0)] = 1

    @model_validator(mode="after")
    def _constants(self) -> "Sets":
        if self.score != "raps" and (self.lam, self.k_reg) != (0.0, 1):
            raise ValueError(f"lam is {self.lam} and k_reg {self.k_reg}; with {self.score} they are 0 and 1")
        return self


class Part(Strict):
    """Quantiles from the calibration examples of one class, or of one group, alone."""

    examples: NonNegativeInt
    coverage: Annotated[float, Field(ge=0, lt=1)]  # promised: less than asked for where there were too few examples
    quantiles: dict[NonNegativeInt, FiniteFloat]
    auto: FiniteFloat | None = None
    closed: FiniteFloat | None = None


NEW = ("sets", "classes", "groups")  # keys of a calibration since format 2
NEW_MEASURES = {"energy", "knn"}  # since format 3


class Calibration(Strict):
    """Chosen on held-out data for a grid of K: the grid point at or below the K really drawn is used.

    Each measure's score grows with doubt: entropy, mutual information, 1 − the maximum probability, the energy
    −log Σ exp(logits), the distance of features to the nearest of the feature bank (`knn`), and for regression the
    epistemic variance over the aleatoric one.
    """

    false_positive_rate: Share
    coverage: Share
    measure: Measure  # the default OOD measure
    thresholds: dict[Measure, dict[NonNegativeInt, FiniteFloat]]
    quantiles: dict[NonNegativeInt, FiniteFloat]  # of the conformal score; regression: of |y − mean|/std
    auto: Auto | None = None  # of `samples="auto"`
    temperature: PositiveFinite = 1.0
    closed: Closed | None = None  # of a linearised network's closed form
    method: Predictive = "sampling"  # how a request is answered that does not say
    sets: Sets | None = None  # None: the score is 1 − p for every class, and a set may be empty, as in format 1
    classes: tuple[Part, ...] | None = None  # where each class has quantiles of its own
    groups: dict[str, Part] | None = None  # of requests that name their group; others get the quantiles above
    auroc: dict[Measure, Annotated[float, Field(ge=0, le=1)]] | None = None  # against spoiled copies of held-out inputs

    @model_serializer(mode="wrap")
    def _as_format_1(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What readers of format 1 do not know is left out where it says nothing."""
        return {key: value for key, value in write(self).items() if key not in (*NEW, "auroc") or value is not None}

    @model_validator(mode="after")
    def _of_parts(self) -> "Calibration":
        if self.classes is not None and (self.sets is None or self.groups is not None):
            raise ValueError("classes have quantiles of their own, which needs `sets`, and no `groups` beside them")
        for part in (*(self.classes or ()), *(self.groups or {}).values()):
            same = part.quantiles.keys() == self.quantiles.keys()
            if not same or (part.auto is None, part.closed is None) != (self.auto is None, self.closed is None):
                raise ValueError("a class or a group has quantiles for other answers than all examples have")
        if self.sets is not None and min(self._all_quantiles(), default=0.0) < 0:
            raise ValueError("a quantile is below 0, the score of the most probable class: its sets would be empty")
        return self

    @model_validator(mode="after")
    def _complete(self) -> "Calibration":
        if self.method == "probit" and self.closed is None:
            raise ValueError("the default method is probit, which was not calibrated")
        if self.measure not in self.thresholds:
            raise ValueError(f"the default measure {self.measure!r} has no thresholds")
        if self.auto is not None and self.measure not in self.auto.thresholds:
            raise ValueError(f'the default measure {self.measure!r} has no threshold for samples="auto"')
        if not self.quantiles or not all(self.thresholds.values()):
            raise ValueError("every calibration needs at least one K")
        return self

    @property
    def measures(self) -> set[Measure]:
        """Measures that have thresholds."""
        others = [part.thresholds for part in (self.auto, self.closed) if part is not None]
        return set(self.thresholds).union(*others)

    def _all_quantiles(self) -> Iterator[float]:
        yield from self.quantiles.values()
        yield from (part.quantile for part in (self.auto, self.closed) if part is not None)
        for part in (*(self.classes or ()), *(self.groups or {}).values()):
            yield from (q for q in (*part.quantiles.values(), part.auto, part.closed) if q is not None)


class Provenance(Strict):
    recipe: dict[str, JsonValue] | None = None
    data_hash: str | None = None
    seed: int | None = None
    train_sample: Annotated[tuple[str, ...], Field(max_length=1 << 12)] = ()  # hashes of some training inputs
    versions: dict[str, str] = {}


class Difference(Strict):
    """A figure of this model less the same figure of another, on the same inputs."""

    value: FiniteFloat
    se: Annotated[FiniteFloat, Field(ge=0)]  # its standard error, inputs drawn again


class Plain(Strict):
    """What the plain network reaches on the same test data: the one that the posterior started from, or one that was
    trained by itself."""

    metrics: dict[str, FiniteFloat]  # as it is
    temperature: PositiveFinite | None = None  # fitted on the calibration part; None: regression
    tempered: dict[str, FiniteFloat] = {}  # with that temperature
    measure: Measure = "entropy"  # that its AUROC is by; since format 7 chosen as the model's own is
    differences: dict[str, Difference] = {}  # of this model from it, with the temperature where there is one

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What readers of formats 1 to 6 do not know is left out where it is what they take it for."""
        return {key: value for key, value in write(self).items() if key != "measure" or value != "entropy"}


class Zoo(Strict):
    """Of a published model: what its data are, how it was made, and when not to use it; curves on its test part."""

    title: str
    data: str  # with its authors
    licence: str  # of the data
    steps: Annotated[tuple[str, ...], Field(max_length=16)]  # commands that make the model
    made_on: str  # kind of device
    minutes: PositiveFinite | None = None  # of training on it; None: not timed
    measured_on: str  # kind of device of the figures
    limits: Annotated[tuple[str, ...], Field(max_length=16)]
    not_for: Annotated[tuple[str, ...], Field(max_length=16)]
    reliability: Annotated[tuple[tuple[FiniteFloat, FiniteFloat, FiniteFloat], ...], Field(max_length=64)]
    # confidence, accuracy and share of the examples; of a regression: level of an interval, coverage, 1
    risk: Annotated[tuple[tuple[FiniteFloat, FiniteFloat], ...], Field(max_length=64)]
    # share of the examples kept, the least doubtful first, and their error rate (of a regression: RMSE)
    rounding: dict[str, FiniteFloat] = {}  # each figure less that of the same model as it was trained
    examples: PositiveInt | None = None  # test inputs of the curves and of `rounding`; the figures are of the model as
    # it was trained then. None: all, and the figures are of the file


class Card(Strict):
    """What is known about a model beyond its tensors."""

    input: Input | None = None
    labels: Names | None = None
    targets: Names | None = None  # what is predicted: a name for each number, or one for the class
    calibration: Calibration | None = None  # None: not calibrated
    metrics: dict[str, FiniteFloat] = {}
    plain: Plain | None = None  # None: no plain network was trained or given
    provenance: Provenance = Provenance()
    zoo: Zoo | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What readers of formats 1 to 5 do not know is left out where it says nothing."""
        return {key: value for key, value in write(self).items() if key != "zoo" or value is not None}


Format = Literal[1, 2, 3, 4, 5, 6, 7]


def format_of(
    card: Card,
    bank: FeatureBankEntry | None = None,
    traced: Traced | None = None,
    joint: JointEntry | None = None,
) -> Format:
    """The oldest format whose readers understand the card, the bank, the network and the posterior over all of it."""
    if card.plain is not None and card.plain.measure != "entropy":
        return 7
    if card.zoo is not None:
        return 6
    if joint is not None and joint.since == 5:
        return 5
    if traced is not None:
        return 4
    calibration = card.calibration
    if card.input is not None and card.input.image is not None and card.input.image.fitting is not None:
        return 4
    newer = calibration is not None and (calibration.auroc is not None or calibration.measures & NEW_MEASURES)
    if bank is not None or newer:
        return 3
    return 1 if calibration is None or all(getattr(calibration, key) is None for key in NEW) else 2


class Manifest(Strict):
    format: Format
    architecture: Architecture
    traced: Traced | None = None  # the network itself, where no name stands for it
    task: Task
    layers: dict[str, Layer]  # by module name; layers not named here are deterministic
    members: dict[str, Members] = {}  # modules kept in one copy per ensemble member
    hierarchy: Hierarchy | None = None
    subnetwork: Joint = None
    inducing_inputs: Joint = None
    feature_bank: FeatureBankEntry | None = None
    batchnorm: Literal["kept", "folded"]
    precision: Precision = "float32"  # of the numbers in the file
    card: Card = Card()
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of this manifest without it, and of all tensors

    @property
    def joint(self) -> JointEntry | None:
        """The posterior over the network as a whole; None: each layer has its own, or none."""
        return self.inducing_inputs if self.subnetwork is None else self.subnetwork

    @property
    def closed_form(self) -> bool:
        """Outputs have a mean and a variance without draws."""
        return self.joint is not None and self.joint.closed_form

    @property
    def methods(self) -> list[str]:
        """Names of the methods of its layers, each once."""
        plain = "deterministic" if self.joint is None else self.joint.method
        return sorted({layer.method for layer in self.layers.values()}) or [plain]

    @model_validator(mode="after")
    def _formats(self) -> "Manifest":
        if self.format < (needed := format_of(self.card, self.feature_bank, self.traced, self.joint)):
            raise ValueError(f"the format is {self.format}, but it has keys of format {needed}")
        if self.feature_bank is not None and self.task.kind == "regression":
            raise ValueError("a bank of features belongs to classification")
        calibration = self.card.calibration
        if self.feature_bank is None and calibration is not None and "knn" in calibration.measures:
            raise ValueError("it has thresholds for knn, but no bank of features")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What readers of earlier formats do not know is left out where it says nothing."""
        newer = ("feature_bank", "traced", "inducing_inputs")
        return {key: value for key, value in write(self).items() if key not in newer or value is not None}

    @model_validator(mode="after")
    def _named(self) -> "Manifest":
        targets, wanted = self.card.targets, self.task.outputs if self.task.kind == "regression" else 1
        if targets is not None and len(targets) != wanted:
            raise ValueError(f"{len(targets)} targets are named, but {wanted} are predicted")
        return self

    @model_validator(mode="after")
    def _jointly(self) -> "Manifest":
        if self.subnetwork is not None and self.inducing_inputs is not None:
            raise ValueError("a subnetwork and inducing inputs do not go together")
        if self.joint is not None:
            self.joint.check(self)
        in_sequence = self.joint is not None and self.joint.in_sequence
        if not in_sequence and any(layer.in_sequence for layer in self.layers.values()):
            raise ValueError("layers that are drawn in sequence need inducing inputs")
        closed = self.card.calibration is not None and self.card.calibration.closed is not None
        if closed and not self.closed_form:
            raise ValueError("a closed form was calibrated, but the network has none")
        return self

    @model_validator(mode="after")
    def _hierarchical(self) -> "Manifest":
        shapes = [e.from_above for e in self.layers.values() if e.from_above is not None]
        if self.hierarchy is None:
            if shapes:
                raise ValueError("a hierarchical layer needs a hierarchy to draw its V")
        elif {M_out for M_out, _ in shapes} != {self.hierarchy.d_out} or (
            sum(M_in for _, M_in in shapes) != self.hierarchy.d_in
        ):
            raise ValueError("the hierarchy does not fit the inducing weights of the layers below it")
        return self


def at_or_below(table: dict[int, float], K: int) -> tuple[int, float] | None:
    """The grid point for K draws and its value; None where the grid starts above K."""
    below = [k for k in table if k <= K]
    return (max(below), table[max(below)]) if below else None
