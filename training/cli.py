"""Commands that need data: train, prune, laplace, calibrate, evaluate."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dubito.models.cli import Artifact, AsJson, Method, Network, Samples, chosen_method, chosen_samples, permit_network
from dubito.models.extras import need
from dubito.models.names import LAPLACE, MEASURES, listed
from dubito.training.names import DATA, PARTS, recipes

if TYPE_CHECKING:
    import torch

    from dubito.models.predictions.model import Model

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
Seed = Annotated[int, typer.Option(help="Fixes the draws.", min=0, max=1 << 62)]
Default = Annotated[
    str | None,
    typer.Option(
        "--method", help=f"Default predictive of a {LAPLACE} model: probit (closed form, the default) or sampling."
    ),
]
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
            metavar="MODULE:FACTORY",
            help="Train a network of your own: the class or function that makes it, as in package.module:factory. It "
            "gets those of the arguments classes, outputs, inputs, channels and size that it takes, and "
            "network.arguments of the recipe. Its code runs.",
            show_default=False,
        ),
    ] = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Train a Bayesian network, calibrate and measure it on held-out data, and write one artifact.

    A run that was stopped (Ctrl-C, a crash) goes on from its checkpoint when the same command is given again. Try:

        dubito train digits

        dubito train fashion-mnist --data-root data --download --out fashion.safetensors

        dubito train csv:table.csv --set task=regression --set data.target=price
    """
    from dubito.training.config import read_recipe
    from dubito.training.recipe import train as follow

    permit_network(network)
    if network is not None:
        changes = [f"network.architecture={json.dumps(network)}", "network.arguments={}", *(changes or [])]
    chosen = read_recipe(recipe, changes)
    out = Path(f"{_stem(recipe)}.safetensors") if out is None else out
    with _stopping():
        trained = follow(
            chosen, _writable(out), data_root=data_root, download=download, device=chosen_device(device), fresh=fresh
        )
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
            _writable(out),
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
def laplace(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A deterministic artifact, or with --arch a state dict; both .safetensors."
        ),
    ],
    data: DataName,
    out: Out,
    size: Annotated[
        int | None,
        typer.Option(
            help="S: number of weights in the posterior; without it, 1,000, or all where there are fewer.", min=1
        ),
    ] = None,
    select: Annotated[
        str, typer.Option(help="How the weights are chosen: variance, random, magnitude or last-layer.")
    ] = "variance",
    prior_precision: Annotated[
        float | None,
        typer.Option(help="Prior precision of the weights; without it, the best of a grid on the validation part."),
    ] = None,
    method: Default = None,
    arch: Annotated[str | None, typer.Option(metavar="NAME", help="FILE is a state dict of this architecture.")] = None,
    task: Annotated[str, typer.Option(help="For a state dict: classification or regression.")] = "classification",
    target: Annotated[str | None, typer.Option(help="For a state dict with csv:PATH: the column to predict.")] = None,
    mean: Annotated[
        list[float] | None,
        typer.Option(
            help="For a state dict: the mean by which pixels in [0, 1] were normalised, once per channel; without it, "
            "that of the data."
        ),
    ] = None,
    std: Annotated[list[float] | None, typer.Option(help="The standard deviation that goes with --mean.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of the numbers in the artifact: float32, float16, bfloat16 or int8; without it, as in FILE."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="MODULE:FACTORY",
            help="What makes the network of FILE, a state dict or an artifact: a class or function of your own, as in "
            "package.module:factory. Its code runs.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Give a trained network a posterior over some of its weights (subnetwork Laplace), calibrate and measure it.

    The network's own weights stay as they are. Try:

        dubito laplace plain.safetensors --data digits --size 500 --out laplace.safetensors

        dubito laplace weights.safetensors --arch resnet18-cifar --data cifar10 --data-root DIR --out out.safetensors
    """
    from pydantic import ValidationError

    from dubito.models.artifact.artifact import is_artifact
    from dubito.models.errors import InputError
    from dubito.models.manifest import Image
    from dubito.training.config import Calibrate, Laplace
    from dubito.training.posthoc import from_artifact, from_weights

    _writable(out)
    permit_network(network)
    if network is not None and arch is None and not is_artifact(file):
        arch = network
    try:
        settings = Laplace(size=size, select=select, prior_precision=prior_precision)  # type: ignore[arg-type]
        image = None if mean is None and std is None else Image(mean=tuple(mean or ()), std=tuple(std or ()))
        common: dict[str, Any] = {
            "calibrate": Calibrate(method=chosen_method(method)),
            "seed": seed,
            "data_root": data_root,
            "download": download,
            "device": chosen_device(device),
        }
        if precision is not None:
            common["precision"] = chosen_precision(precision)
        if arch is None:
            for name, value in (("--target", target), ("--mean", mean), ("--std", std)):
                if value is not None:
                    raise InputError(f"{name} belongs to a state dict; say which network it is with --arch.")
            model = from_artifact(file, data, out, settings, **common)
        else:
            if task not in ("classification", "regression"):
                raise InputError(f"--task is {task!r}; expected classification or regression.")
            model = from_weights(file, arch, data, out, settings, task=task, target=target, image=image, **common)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"--{part} " for part in first["loc"]).replace("_", "-")
        raise InputError(f"{place}{first['msg'].removeprefix('Value error, ')}; it is {first['input']!r}.") from None
    _print_result(out, model, as_json)


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
    false_positive_rate: Annotated[float, typer.Option(help="Share of these inputs that are flagged as OOD.")] = 0.05,
    coverage: Annotated[
        float, typer.Option(help="Share of prediction sets (or intervals) that hold the true answer.")
    ] = 0.9,
    directions: Annotated[
        int, typer.Option(help="R: input directions of each factored layer that get their own noise.", min=0)
    ] = 4,
    temperature: Annotated[bool, typer.Option("--temperature", help="Also fit a temperature of the logits.")] = False,
    method: Default = None,
    sets: Annotated[
        str, typer.Option(help="How classes are scored for prediction sets: aps, raps or probability.")
    ] = "aps",
    per: Annotated[
        str | None,
        typer.Option(
            help="Keep the coverage for each class, or for each group: by the array `group` of an .npz file, or by the "
            "column of a table that data.group named in training.",
            metavar="class|group",
        ),
    ] = None,
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
    from pydantic import ValidationError

    from dubito.models.artifact.artifact import load, save
    from dubito.models.errors import InputError
    from dubito.training.calibrate import calibrate as calibrated
    from dubito.training.calibrate import check_held_out
    from dubito.training.config import Calibrate
    from dubito.training.data.data import part_of
    from dubito.training.data.sources import read_for
    from dubito.training.evaluation.evaluate import measure as measured

    try:
        settings = Calibrate(
            false_positive_rate=false_positive_rate,
            coverage=coverage,
            directions=directions,
            temperature=temperature,
            method=chosen_method(method),
            sets=sets,  # type: ignore[arg-type]
            per=per,  # type: ignore[arg-type]
            measure=measure,  # type: ignore[arg-type]
            bank=bank,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        known = {"sets": "aps, raps or probability", "per": "class or group", "measure": ", ".join(MEASURES)}
        expected = known.get(name, "a share between 0 and 1")
        raise InputError(f"--{name} is {first['input']}; expected {expected}.") from None
    permit_network(network)
    model = load(file)
    data_set = read_for(model.manifest, data, data_root, download=download)
    name, held = part_of(data_set, model.card, part, default="calibration")
    if name != "calibration":  # the calibration part never overlaps the training part
        check_held_out(model, held)
    _writable(out)
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


def _writable(out: Path) -> Path:
    """Check that the file can be written, before the work."""
    from dubito.models.errors import InputError

    if out.is_dir() or not out.resolve().parent.is_dir():
        raise InputError(f"--out is {out}; expected a file in a folder that exists.")
    if not os.access(out.resolve().parent, os.W_OK):
        raise InputError(f"--out is {out}; expected a file in a folder that you may write to.")
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
    from dubito.models.verdict import beside_plain, columns
    from dubito.training.calibrate import too_small
    from dubito.training.evaluation.evaluate import promises
    from dubito.training.terminal import remark

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
        print(
            f"calibrated: OOD by {calibration.measure} at {calibration.false_positive_rate:.0%} false positives, "
            f"prediction sets for {calibration.coverage:.0%} coverage{said_of_sets(calibration)}"
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
        Path | None, typer.Option(metavar="FILE", help="Another artifact, to be compared with on the same inputs.")
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
    from dubito.models.verdict import beside_plain
    from dubito.training.beside import compare
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
            f"{against} is a model of {rival.manifest.task.kind}, {file} one of {model.manifest.task.kind}; "
            "expected two models of one kind."
        )
    name, examples = part_of(read_for(model.manifest, data, data_root, download=download), model.card, part)
    if rival is not None:
        check_examples(rival, examples)
    outside = {}
    for other in ood or []:
        data_set = read_for(model.manifest, other, data_root, download=download, labelled=False)
        outside[other] = part_of(data_set, model.card)[1]
    if report is not None:
        need("train", "matplotlib")
        from dubito.training.evaluation.report import open_folder, write

        open_folder(report)  # fails before the work, not after it
    model = model.to(chosen_device(device))
    if predictive is None and samples is not None:  # --samples implies sampling
        predictive = "sampling"
    K = 20 if fixed is None else fixed
    evaluation = measure_all(model, examples, outside, shift=shift, samples=K, seed=seed, method=predictive)
    if model.card.plain is not None:
        plain = model.card.plain
        evaluation.figures["plain"] = plain.model_dump(mode="json") | {"verdict": beside_plain(plain)}
    if rival is not None:
        compared = compare(model, rival.to(model.device), examples, outside, samples=K, seed=seed)
        evaluation.figures["against"] = {"model": str(against), **compared}
    about = {"model": str(file), "data": data, "part": name}
    if report is not None:
        about["report"] = str(write(evaluation, about, report))
    if as_json:
        print(json.dumps(about | evaluation.figures))
    else:
        show(about, evaluation.figures)
