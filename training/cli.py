"""Commands that need data: train, prune, laplace, calibrate, evaluate, zoo train, zoo pack."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dubito.models.cli import (
    ADDRESSES,
    Artifact,
    AsJson,
    Method,
    Network,
    Samples,
    chosen_method,
    chosen_samples,
    permit_network,
    zoo,
)
from dubito.models.extras import need
from dubito.models.names import ARCHITECTURES, LAPLACE, MEASURES, listed
from dubito.training.names import DATA, PARTS, recipes

if TYPE_CHECKING:
    import torch

    from dubito.models.predictions.model import Model
    from dubito.training.config import Calibrate

app = typer.Typer(rich_markup_mode=None)

DataName = Annotated[str, typer.Option("--data", metavar="D", help=f"{listed(DATA)}.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder with the data sets of torchvision and UCI.")]
Download = Annotated[
    bool, typer.Option("--download", help="Download a torchvision data set that is not in --data-root.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Ignore an earlier run's checkpoint and start from the beginning.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Go on with a plain network that is no better than a guess on these data.")
]
Seed = Annotated[int, typer.Option(help="Fixes the draws.", min=0, max=1 << 62)]
Default = Annotated[
    str | None,
    typer.Option(
        "--method", help=f"Default predictive of a {LAPLACE} model: probit (closed form, the default) or sampling."
    ),
]
# of `laplace` and `calibrate`
FalsePositiveRate = Annotated[float, typer.Option(help="Share of the calibration inputs that are flagged as OOD.")]
Coverage = Annotated[float, typer.Option(help="Share of prediction sets (or intervals) that hold the true answer.")]
SetScore = Annotated[str, typer.Option(help="How classes are scored for prediction sets: aps, raps or probability.")]
Per = Annotated[
    str | None,
    typer.Option(
        help="Keep the coverage for each class, or for each group: by the array `group` of an .npz file, or by the "
        "column of a table that data.group named in training.",
        metavar="class|group",
    ),
]
# a trained network, and its inputs: of `train` and `laplace`
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="OLD=NEW", help="Names in the weights: fc.1=fc; may be repeated."),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Names of the network's classes in the order of its outputs, one a line, or JSON; without it, those "
        "that the weights' file states, or else the data's.",
    ),
]
InputSize = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Height and width of the network's pictures: 224, or 224x320. Without it: of weights what torchvision or "
        "timm say of the network, else the data's own, which `train` may make smaller.",
    ),
]
Crop = Annotated[
    float | None,
    typer.Option(
        help="Share of a picture's shorter side that is cut out of its middle, 0.875 for example; without it, both "
        "sides are resized.",
    ),
]
Interpolation = Annotated[str | None, typer.Option(help="How pictures are resized: bilinear or bicubic.")]
Normalise = Annotated[
    str | None,
    typer.Option(
        help="Of the pixels: imagenet, unit (0 to 1), symmetric (-1 to 1), bytes (0 to 255) or data (by its own "
        "mean and standard deviation).",
    ),
]
Mean = Annotated[
    list[float] | None,
    typer.Option(
        help="Instead of --normalise: the mean by which pixels in [0, 1] were normalised, once per channel.",
    ),
]
Std = Annotated[list[float] | None, typer.Option(help="The standard deviation that goes with --mean.")]
Exif = Annotated[bool, typer.Option(help="Turn the pictures of a folder as their EXIF orientation says, or not.")]
Target = Annotated[str | None, typer.Option(help="With csv:PATH: the column to predict; without it, the last.")]
MOST_PIXELS = 1 << 13  # of a side of a picture
MOST_SAID = 5  # classes or groups with too few examples that are named
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The artifact to write.")]


def chosen_device(name: str) -> "torch.device":
    import torch

    from dubito.models.errors import InputError
    from dubito.training.fit.ranks import Ranks

    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is {name!r}; expected auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no GPU that torch can use here; leave --device out, or say cpu.")
    return torch.device("cpu") if name == "cpu" else Ranks.device()


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=f"A recipe that comes with dubito ({', '.join(recipes())}; PATH is your own data), or a .toml file.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key of the recipe: --set fit.epochs=20; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The artifact to write; without it, NAME.safetensors here, after the recipe or your data.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            help=f"Another network than the recipe's: torchvision/NAME, timm/NAME, {listed(ARCHITECTURES)}, or one of "
            "your own by the class or function that makes it, as in package.module:factory. Its code runs. It gets "
            "those of the arguments classes, outputs, inputs, channels and size that it takes, and network.arguments "
            "of the recipe.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Weights (.safetensors, .pth, .pt, .ckpt) of a trained network that the posterior starts from; the "
            f"plain network is not trained then. A path or an address ({ADDRESSES}).",
        ),
    ] = None,
    rename: Rename = None,
    labels: Labels = None,
    input_size: InputSize = None,
    crop: Crop = None,
    interpolation: Interpolation = None,
    normalise: Normalise = None,
    mean: Mean = None,
    std: Std = None,
    exif: Exif = True,
    target: Target = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    fresh: Fresh = False,
    force: Force = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first answer in two minutes: a small network, few epochs, no trials.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done and how long it would take, by a few timed steps."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a Bayesian network, calibrate and measure it on held-out data, and write one artifact.

    A run that was stopped (Ctrl-C, a crash) goes on from its checkpoint when the same command is given again. Try:

        dubito train digits

        dubito train fashion-mnist --data-root data --download --out fashion.safetensors

        dubito train folder:pictures --quick

        dubito train csv:table.csv --set task=regression --target price

        dubito train folder:pictures --network torchvision/resnet18 --weights resnet18.pth
    """
    from dubito.models.disk import check_not_read
    from dubito.models.errors import InputError
    from dubito.models.remote.cache import fetched
    from dubito.models.terminal import remark
    from dubito.training.choice import Request, as_toml, plan
    from dubito.training.fit.checkpoint import training_alone
    from dubito.training.recipe import train as follow
    from dubito.training.weights import read_labels

    out = _writable(Path(f"{_stem(recipe)}.safetensors") if out is None else out, recipe, weights, labels)
    permit_network(network if network is not None and ":" in network else None)
    for option, value in {"--rename": rename, "--labels": labels}.items():
        if value is not None and weights is None:
            raise InputError(f"{option} belongs to the weights of a trained network; give them by --weights FILE.")
    given: dict[str, Any] = {} if network is None else {"network.architecture": network, "network.arguments": {}}
    inputs = chosen_inputs(input_size, crop, interpolation, normalise, mean, std, exif=exif, target=target)
    given |= {f"data.{key}": value for key, value in inputs.items()}
    wanted = [*(f"{key}={as_toml(value)}" for key, value in given.items()), *(changes or ())]
    wanted += [] if weights is None else [f"network.weights={as_toml(str(fetched(weights)))}"]
    wanted += [] if rename is None else [f"network.rename={as_toml(rename)}"]
    where: dict[str, Any] = {"data_root": data_root, "download": download, "device": chosen_device(device)}
    chosen = plan(Request(recipe, tuple(wanted), quick), out, **where, fresh=fresh)
    where["labels"] = None if labels is None else read_labels(labels)
    if chosen.said:
        remark(chosen.said)
    if dry_run:
        from dubito.training.dry_run import describe_run

        print("\n".join(describe_run(chosen.recipe, **where)))
        return
    check_not_read(out, chosen.recipe.data.name, chosen.recipe.context.inputs)
    with _stopping(), training_alone(out), chosen.kept():
        trained = follow(chosen.recipe, out, **where, fresh=fresh, force=force, estimate=bool(chosen.said))
    if trained is not None:
        _print_result(out, trained.model, as_json)


@app.command()
def prune(
    file: Artifact,
    keep: Annotated[float, typer.Option(help="Share of the Z entries (or of FFG-W's weights) to keep.")],
    out: Out,
    epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning with the masks fixed.", min=0)] = 10,
    lr: Annotated[
        float, typer.Option(help="Adam's learning rate in fine-tuning; it falls to zero along a cosine.")
    ] = 1e-3,
    network: Network = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Set the smallest Z entries to zero, fine-tune the rest on the model's own data, calibrate, and store it sparse.

    Try: dubito prune digits.safetensors --keep 0.5 --out half.safetensors
    """
    from dubito.training.prune import prune as pruned

    permit_network(network)
    with _stopping():
        model = pruned(
            file,
            _writable(out, file),
            keep,
            epochs=epochs,
            lr=lr,
            data_root=data_root,
            download=download,
            device=chosen_device(device),
            fresh=fresh,
        )
    if model is not None:
        _print_result(out, model, as_json)


@app.command()
def compact(
    file: Artifact,
    out: Out,
    members: Annotated[int, typer.Option(help="Draws to distil, each to one member.", min=2, max=1024)] = 16,
    inducing: Annotated[int, typer.Option(help="M: side of the inducing weights of each layer.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Steps in which members learn their draws' functions.", min=0)] = 1000,
    lr: Annotated[float, typer.Option(help="Adam's learning rate at the start; it falls to zero.")] = 3e-2,
    network: Network = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Distil draws of a large posterior (gi, ffg-w) to a small ensemble of inducing weights, and calibrate it.

    Try: dubito compact gi.safetensors --members 16 --inducing 16 --out small.safetensors
    """
    from dubito.training.compact import compact as compacted

    permit_network(network)
    model = compacted(
        file,
        _writable(out, file),
        members=members,
        inducing=inducing,
        steps=steps,
        lr=lr,
        data_root=data_root,
        download=download,
        device=chosen_device(device),
    )
    _print_result(out, model, as_json)


@app.command()
def laplace(
    net: Annotated[
        str,
        typer.Argument(
            metavar="NET",
            help="A deterministic artifact; weights (.safetensors, .pth, .pt, .ckpt) with --network; or the name of a "
            "network with --weights.",
        ),
    ],
    data: DataName,
    out: Out,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            "--arch",
            metavar="NAME",
            help="NET holds the weights of this network: torchvision/NAME, timm/NAME, package.module:function, "
            f"{listed(ARCHITECTURES)}.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"NET is a network's name, and these its weights ({ADDRESSES} too)."),
    ] = None,
    rename: Rename = None,
    labels: Labels = None,
    input_size: InputSize = None,
    crop: Crop = None,
    interpolation: Interpolation = None,
    normalise: Normalise = None,
    mean: Mean = None,
    std: Std = None,
    exif: Exif = True,
    task: Annotated[str, typer.Option(help="Of weights: classification or regression.")] = "classification",
    target: Target = None,
    size: Annotated[
        int | None,
        typer.Option(
            help="S: number of weights in the posterior; without it, 1,000, or all where there are fewer; of a last "
            "layer all up to 2,000.",
            min=1,
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="How the weights are chosen: variance, random, magnitude or last-layer. Without it: last-layer in a "
            "network of more than a million weights, where others take a backward pass for each class; else variance.",
        ),
    ] = None,
    prior_precision: Annotated[
        float | None,
        typer.Option(help="Prior precision of the weights; without it, the best of a grid on the validation part."),
    ] = None,
    method: Default = None,
    temperature: Annotated[
        bool, typer.Option(help="Also fit a temperature of the logits, or not; of classification.")
    ] = True,
    false_positive_rate: FalsePositiveRate = 0.05,
    coverage: Coverage = 0.9,
    sets: SetScore = "aps",
    per: Per = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of the numbers in the artifact: float32, float16, bfloat16 or int8; without it, as in NET.",
        ),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Give a trained network a posterior over some of its weights (subnetwork Laplace), calibrate and measure it.

    The network's own weights stay as they are. First its plain accuracy on the data is printed. Try:

        dubito laplace plain.safetensors --data digits --size 500 --out laplace.safetensors

        dubito laplace resnet18.pth --network torchvision/resnet18 --data folder:pictures --out model.safetensors

        dubito laplace mine.nets:small --weights best.ckpt --data folder:pictures --input-size 64 --out out.safetensors
    """
    from pydantic import ValidationError

    from dubito.models.artifact.artifact import is_artifact
    from dubito.models.errors import InputError
    from dubito.models.remote.cache import fetched
    from dubito.training import config
    from dubito.training.config import Data, Laplace
    from dubito.training.posthoc import from_artifact, from_weights
    from dubito.training.weights import read_labels

    _writable(out, weights, labels, data)
    file, name = (fetched(net), network) if weights is None else (fetched(weights), net)
    if weights is not None and network is not None:
        raise InputError(f"--network is {network} and NET {net}; with --weights, NET alone names the network.")
    permit_network(name if name is not None and ":" in name else None)
    if weights is None and network is not None and is_artifact(file):
        name = None
    elif name is None and not file.exists():
        what = "names a network, whose weights are missing: --weights FILE" if _is_name(net) else "is no file"
        raise InputError(f"NET is {net}, which {what}.")
    inputs = chosen_inputs(input_size, crop, interpolation, normalise, mean, std, exif=exif, target=target)
    try:
        settings = Laplace(size=size, select=select, prior_precision=prior_precision)  # type: ignore[arg-type]
        fit_temperature = temperature and task == "classification"
        common: dict[str, Any] = {
            "calibrate": chosen_calibration(
                false_positive_rate=false_positive_rate,
                coverage=coverage,
                temperature=fit_temperature,
                method=chosen_method(method),
                sets=sets,
                per=per,
            ),
            "seed": seed,
            "data_root": data_root,
            "download": download,
            "device": chosen_device(device),
            "force": force,
        }
        if precision is not None:
            common["precision"] = chosen_precision(precision)
        if name is None:
            for option, value in {"--labels": labels, "--rename": rename, "--target": target}.items():
                if value:
                    raise InputError(f"{option} belongs to weights; say which network they are of with --network.")
            model = from_artifact(file, data, out, settings, pictures=inputs, **common)
        else:
            if task not in ("classification", "regression"):
                raise InputError(f"--task is {task!r}; expected classification or regression.")
            pictures = Data.model_validate({"name": data, **inputs})
            named = config.Network(architecture=name, rename=tuple(rename or ()))
            known = None if labels is None else read_labels(labels)
            model = from_weights(file, named, pictures, out, settings, task=task, labels=known, **common)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # from our own validators, whose message is complete
            raise InputError(f"{first['msg'].removeprefix('Value error, ')}.") from None
        place = "".join(f"--{part} " for part in first["loc"][:1]).replace("_", "-")
        raise InputError(f"{place}is {first['input']!r}: {first['msg']}.") from None
    _print_result(out, model, as_json)


def chosen_calibration(**values: Any) -> "Calibrate":
    from pydantic import ValidationError

    from dubito.models.errors import InputError
    from dubito.training.config import Calibrate

    try:
        return Calibrate(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        known = {"sets": "aps, raps or probability", "per": "class or group", "measure": ", ".join(MEASURES)}
        expected = known.get(name, "a share between 0 and 1")
        raise InputError(f"--{name} is {first['input']}; expected {expected}.") from None


def _is_name(net: str) -> bool:
    return net in ARCHITECTURES or ":" in net or net.startswith(("torchvision/", "timm/"))


OPTIONS = {"size": "--input-size", "exif": "--no-exif"}  # of keys in [data] that are called otherwise there


def chosen_inputs(
    input_size: str | None,
    crop: float | None,
    interpolation: str | None,
    normalise: str | None,
    mean: list[float] | None,
    std: list[float] | None,
    *,
    exif: bool,
    target: str | None,
) -> dict[str, Any]:
    """Keys of a recipe's [data] that these options give; what they leave open is not among them."""
    from typing import get_args

    from dubito.models import manifest
    from dubito.models.errors import InputError
    from dubito.training.config import NORMALISATIONS

    if crop is not None and not 0 < crop <= 1:
        raise InputError(f"--crop is {crop:g}; expected a share above 0, up to 1, such as 0.875.")
    for option, value, known in (
        ("--interpolation", interpolation, get_args(manifest.Interpolation)),
        ("--normalise", normalise, tuple(NORMALISATIONS)),
    ):
        if value is not None and value not in known:
            raise InputError(f"{option} is {value!r}; expected {listed(known)}.")
    if (mean is None) != (std is None) or (mean is not None and normalise is not None):
        came = "--normalise with --mean or --std" if normalise is not None else "--mean or --std alone"
        raise InputError(f"{came} came; expected --normalise NAME, or both of --mean and --std, once per channel.")
    if std is not None and not all(0 < value < float("inf") for value in std):
        raise InputError(f"--std is {', '.join(f'{value:g}' for value in std)}; expected numbers above 0.")
    given = {
        "size": None if input_size is None else list(chosen_size(input_size)),
        "crop": crop,
        "interpolation": interpolation,
        "normalise": normalise if mean is None else [mean, std],
        "exif": None if exif else False,
        "target": target,
    }
    return {key: value for key, value in given.items() if value is not None}


def chosen_size(text: str) -> tuple[int, int]:
    from dubito.models.errors import InputError

    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and 0 < int(side) <= MOST_PIXELS for side in sides):
        expected = f"expected a number of pixels up to {MOST_PIXELS:,}, such as 224, or 224x320"
        raise InputError(f"--input-size is {text}; {expected}.")
    return int(sides[0]), int(sides[-1])


def chosen_precision(name: str) -> str:
    from typing import get_args

    from dubito.models.errors import InputError
    from dubito.models.manifest import Precision

    if name not in get_args(Precision):
        raise InputError(f"--precision is {name!r}; expected one of {', '.join(get_args(Precision))}.")
    return name


@app.command()
def calibrate(
    file: Artifact,
    data: DataName,
    out: Out,
    part: Annotated[
        str | None,
        typer.Option(
            help=f"{listed([*PARTS, 'all'])}. Without it: the calibration part of the model's own data, all of any "
            "other."
        ),
    ] = None,
    false_positive_rate: FalsePositiveRate = 0.05,
    coverage: Coverage = 0.9,
    directions: Annotated[
        int, typer.Option(help="R: input directions of each factored layer that get their own noise.", min=0)
    ] = 4,
    temperature: Annotated[bool, typer.Option("--temperature", help="Also fit a temperature of the logits.")] = False,
    method: Default = None,
    sets: SetScore = "aps",
    per: Per = None,
    measure: Annotated[
        str | None,
        typer.Option(
            help=f"What OOD flags go by: {listed(MEASURES)}. Without it: what best tells these inputs from spoiled "
            "copies."
        ),
    ] = None,
    bank: Annotated[
        int,
        typer.Option(
            help="Points that stand for the training data's features; kept where knn is the measure. 0: none.",
            min=0,
            max=1 << 16,
        ),
    ] = 512,
    network: Network = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Set OOD thresholds and prediction sets on data that the model has not seen, and write an artifact with them.

    Try: dubito calibrate digits.safetensors --data digits --coverage 0.95 --out digits95.safetensors
    """
    from dubito.models.artifact.artifact import load, save
    from dubito.training.calibrate import calibrate as calibrated
    from dubito.training.calibrate import check_held_out
    from dubito.training.data.data import part_of
    from dubito.training.data.sources import read_for
    from dubito.training.evaluation.evaluate import measure as measured

    settings = chosen_calibration(
        false_positive_rate=false_positive_rate,
        coverage=coverage,
        directions=directions,
        temperature=temperature,
        method=chosen_method(method),
        sets=sets,
        per=per,
        measure=measure,
        bank=bank,
    )
    permit_network(network)
    model = load(file)
    data_set = read_for(model.manifest, data, data_root, download=download, grouped=per == "group")
    name, held = part_of(data_set, model.card, part, default="calibration")
    if name != "calibration":  # the calibration part never overlaps the training part
        check_held_out(model, held)
    _writable(out, data)
    own = name == "calibration"  # of the model's own data: its other parts can be used too
    others = {key: part_of(data_set, model.card, key)[1] if own else None for key in ("validation", "train")}
    model = calibrated(model.to(chosen_device(device)), held, settings, seed=seed, **others)
    if own:  # measure the new thresholds on its test part
        model = model.with_card(metrics=measured(model, part_of(data_set, model.card, "test")[1], seed=seed))
    save(model, out)
    _print_result(out, model, as_json)


def _stem(recipe: str) -> str:
    """Name of the artifact: that of the recipe, or of the file or folder of one's own data."""
    return Path(recipe.partition(":")[2] or recipe).stem or "model"


def _writable(out: Path, *read: str | Path | None) -> Path:
    """Check that the file can be written, before the work, and is none of those that are read."""
    from dubito.models.disk import check_not_read
    from dubito.models.errors import InputError

    if out.is_dir() or not out.resolve().parent.is_dir():
        raise InputError(f"--out is {out}; expected a file in a folder that exists.")
    if not os.access(out.resolve().parent, os.W_OK):
        raise InputError(f"--out is {out}; expected a file in a folder that you may write to.")
    check_not_read(out, *read)
    return out


@contextmanager
def _stopping() -> Iterator[None]:
    """Print why training was stopped, and exit with code 130."""
    from dubito.training.recipe import TrainingStopped

    try:
        yield
    except TrainingStopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from None


def _print_result(out: Path, model: "Model", as_json: bool) -> None:
    from dubito.models.numerics.parameters import count
    from dubito.models.report import said_of_sets
    from dubito.models.terminal import remark
    from dubito.models.verdict import beside_plain, columns
    from dubito.training.calibrate import too_small
    from dubito.training.evaluation.evaluate import promises

    calibration = model.card.calibration
    if calibration is not None and (few := too_small(calibration, model.card.labels)):
        more = f"; and {len(few) - MOST_SAID} more" if len(few) > MOST_SAID else ""
        remark(f"warning: {'; '.join(few[:MOST_SAID])}{more}. Bring more calibration examples, or ask for less.")
    figures: dict[str, Any] = {
        **model.card.metrics,
        "parameters": count(model.network),
        "bytes": out.stat().st_size,
        "calibration": promises(calibration),
    }
    plain = model.card.plain
    if as_json:
        if plain is not None:
            figures |= {"plain": plain.model_dump(mode="json"), "verdict": beside_plain(plain)}
        print(json.dumps({"model": str(out), **figures}))
        return
    print(f"wrote {out}: {figures['parameters']:,} parameters, {figures['bytes']:,} bytes")
    for line in columns(model.card.metrics, plain):
        print(line)
    if calibration is not None:
        closed = calibration.closed if calibration.method == "probit" else None
        measure = calibration.measure if closed is None else closed.measure
        print(
            f"calibrated: OOD by {measure} at {calibration.false_positive_rate:.0%} false positives, "
            f"prediction sets for {calibration.coverage:.0%} coverage{said_of_sets(calibration)}"
            + (f", temperature {calibration.temperature:.3g}" if calibration.temperature != 1 else "")
        )
        if (
            calibration.sets is not None
            and set(calibration.quantiles.values()) == {0.0}
            and calibration.classes is None
        ):
            print(
                f"every prediction set is the most probable class alone: it is right more often than "
                f"{calibration.coverage:.0%} of the time. A higher --coverage gives larger sets where there is doubt."
            )
    print(f"Next: dubito inspect {out}")


@app.command()
def evaluate(
    file: Artifact,
    data: DataName,
    part: Annotated[
        str | None,
        typer.Option(help=f"{listed([*PARTS, 'all'])}. Without it: the test part where there is one, else all."),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="D", help="Out-of-distribution data (as for --data) for AUROC and ROC curves; may be repeated."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="Another artifact, to be compared with on the same inputs.")
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also measure on rotated (grey) or corrupted (colour) pictures.")
    ] = False,
    samples: Samples = None,
    method: Method = None,
    seed: Seed = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write DIR/index.html, one page with plots.")
    ] = None,
    network: Network = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a model on data that it was not trained on: the quality of its answers and of its uncertainty.

    The model's own data set is divided as in training, and its test part used. Try:

        dubito evaluate model.safetensors --data digits

        dubito evaluate model.safetensors --data fashion-mnist --ood mnist --shift --data-root data --report report
    """
    from dubito.models.artifact.artifact import load
    from dubito.models.errors import InputError
    from dubito.models.remote.address import place_of
    from dubito.models.verdict import beside_plain
    from dubito.training.beside import check_alike, compare
    from dubito.training.calibrate import calibrated_on, tell_training_inputs
    from dubito.training.data.data import part_of
    from dubito.training.data.sources import read_for
    from dubito.training.evaluation.evaluate import evaluate as measure_all
    from dubito.training.evaluation.predicting import check_examples
    from dubito.training.evaluation.table import show

    predictive = chosen_method(method)
    if predictive == "probit" and samples is not None:
        raise InputError("--method is probit, which takes no draws; leave --samples out.")
    permit_network(network)
    if (fixed := chosen_samples(samples)) == "auto":
        raise InputError("--samples is auto; expected a number: the figures of auto are in the table beside it anyway.")
    model = load(file)
    rival = None if against is None else load(against)
    if rival is not None and rival.manifest.task.kind != model.manifest.task.kind:
        raise InputError(
            f"{place_of(str(against))} is a model of {rival.manifest.task.kind}, {place_of(file)} one of "
            f"{model.manifest.task.kind}; expected two models of one kind."
        )
    data_set = read_for(model.manifest, data, data_root, download=download)
    name, examples = part_of(data_set, model.card, part)
    if name not in ("test", "calibration", "validation"):
        tell_training_inputs(model, examples)
    if rival is not None:
        check_alike(model, rival, str(place_of(str(against))))
        check_examples(rival, examples)
    outside = {}
    for other in ood or []:
        of_other = read_for(model.manifest, other, data_root, download=download, labelled=False)
        outside[other] = part_of(of_other, model.card)[1]
    if report is not None:
        need("train", "matplotlib")
        from dubito.training.evaluation.report import open_folder, write

        open_folder(report)  # fails before the work, not after it
    model = model.to(chosen_device(device))
    if predictive is None and samples is not None:  # --samples implies sampling
        predictive = "sampling"
    K = 20 if fixed is None else fixed
    how: dict[str, Any] = {"samples": K, "seed": seed, "method": predictive}
    n = calibrated_on(model, data_set)
    evaluation = measure_all(model, examples, outside, shift=shift, **how, calibrated_on=n)
    if model.card.plain is not None:
        plain = model.card.plain
        evaluation.figures["plain"] = plain.model_dump(mode="json") | {"verdict": beside_plain(plain)}
    if rival is not None:
        compared = compare(model, rival.to(model.device), examples, outside, samples=K, seed=seed)
        evaluation.figures["against"] = {"model": str(place_of(str(against))), **compared}
    about = {"model": str(place_of(file)), "data": data, "part": name}
    if report is not None:
        about["report"] = str(write(evaluation, about, report))
    if as_json:
        print(json.dumps(about | evaluation.figures))
    else:
        show(about, evaluation.figures)


@zoo.command("train")
def train_zoo(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the zoo.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The artifact; without it, NAME.safetensors here.")
    ] = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Make a model of the zoo again by its recipe and seed, with its card. After a stop the same command goes on.

    The same kind of device gives the same figures, another one other draws. Try:

        dubito zoo train digits

        dubito zoo train clothes --data-root data --download
    """
    from dubito.training.zoo import Where, make, steps_of

    steps_of(name)  # before the work
    out = _writable(Path(f"{name}.safetensors") if out is None else out)
    with _stopping():
        model = make(name, out, Where(data_root, download, chosen_device(device)), fresh=fresh)
    if model is not None:
        _print_result(out, model, as_json)


@zoo.command("pack")
def pack_zoo(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the zoo.")],
    file: Artifact,
    out: Out,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Duration of the training, in minutes. Without it, FILE must be of the zoo already, and only the "
            "words of its card are renewed.",
            min=0.001,
        ),
    ] = None,
    made_on: Annotated[str, typer.Option(help="Kind of device that it was trained on.")] = "CPU",
    beside: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The model that it was pruned or distilled from, for the plain network."),
    ] = None,
    plain: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A plain network that was trained by itself, to compare with. Without --minutes, FILE is measured "
            "again beside it.",
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="Keep calibration and figures as they are, and predict this many test inputs only: for the curves, "
            "and for what rounding changes.",
            min=1,
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Measure FILE, which is of the zoo already, as it is stored; with new curves."),
    ] = False,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Store a trained model as the zoo does: in its precision, calibrated and measured as stored, with its card.

    Try: dubito zoo pack digits digits.safetensors --minutes 0.5 --out packed.safetensors
    """
    from dubito.models.errors import InputError
    from dubito.training.zoo import Where, compare, pack, remeasure, reword

    where = Where(data_root, download, chosen_device(device))
    if again and (minutes is not None or plain is not None or examples is not None):
        raise InputError("--again measures a packed FILE by itself; leave --minutes, --plain and --examples out.")
    if minutes is None:
        out = _writable(out)
        if again:
            model = remeasure(name, file, out, where)
        else:
            model = reword(name, file, out) if plain is None else compare(name, file, plain, out, where)
        _print_result(out, model, as_json)
        return
    told: dict[str, Any] = {"minutes": minutes, "made_on": made_on, "beside": beside, "plain": plain}
    told["examples"] = examples
    model = pack(name, file, _writable(out), where, **told)
    _print_result(out, model, as_json)
