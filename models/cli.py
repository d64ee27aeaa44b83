"""Commands that need a model and nothing else: count, inspect, predict, push, zoo."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dubito.models.names import ARCHITECTURES, LAPLACE, METHODS, listed

if TYPE_CHECKING:
    from torch import Tensor

    from dubito.models.manifest import Input, Predictive
    from dubito.models.predictions.model import Model

app = typer.Typer(rich_markup_mode=None)


def _number_or_auto(text: str) -> str:
    if text != "auto" and not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{text!r}; expected a whole number, 0 or more, or auto.")
    return text


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
Samples = Annotated[
    str | None,
    typer.Option(
        metavar="K",
        parser=_number_or_auto,
        help="Number of posterior draws; 0: the posterior mean; auto: as many as each answer needs to settle.",
        show_default="20",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"For a {LAPLACE} model: probit (closed form) or sampling (K draws). Without it, the model's own default; "
        "with --samples, sampling."
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="MODULE:FACTORY",
        help="For an artifact whose network cannot be written as data: the class or function that makes it, as in "
        "package.module:factory. Its code runs.",
    ),
]
TABLES = (".csv", ".tsv", ".parquet", ".pq", ".npz")  # which `dubito predict` does not read
ADDRESSES = "s3://, gs://, az://, https://, hf://"
Artifact = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help=f"An artifact (.safetensors), the address of one ({ADDRESSES}), or zoo:NAME of the list `dubito zoo`.",
    ),
]


def permit_network(name: str | None) -> None:
    """Let this code build networks; it may stand in the current folder."""
    if name is not None:
        import sys

        from dubito.models.conversion.architectures import permit

        if "" not in sys.path:
            sys.path.insert(0, "")
        permit(name)


def chosen_method(name: str | None) -> "Predictive | None":
    from dubito.models.errors import InputError

    match name:
        case None | "probit" | "sampling":
            return name
    raise InputError(f"--method is {name!r}; expected probit or sampling.")


def chosen_samples(text: str | None) -> 'int | Literal["auto"] | None':
    match text:
        case None | "auto":
            return text
    return int(text)


@app.command()
def count(
    architecture: Annotated[
        str,
        typer.Argument(metavar="ARCH", help=f"{', '.join(ARCHITECTURES)}, torchvision/NAME, or the name of a plug-in."),
    ],
    method: Annotated[str, typer.Option(help=f"{listed([*METHODS, LAPLACE])}.")],
    inducing: Annotated[int, typer.Option(help="M: each layer's inducing weights are M x M.", min=1)] = 64,
    head: Annotated[int | None, typer.Option(help="M_out of the last layer, where it differs from M.", min=1)] = None,
    members: Annotated[int, typer.Option(help="Number of ensemble members.", min=1)] = 5,
    size: Annotated[int, typer.Option(help=f"S: number of weights that {LAPLACE} has a posterior over.", min=1)] = 1000,
    keep: Annotated[
        float, typer.Option(help="Share of the Z entries (or of FFG-W's weights) that pruning keeps.")
    ] = 1.0,
    classes: Annotated[int | None, typer.Option(help="Number of classes of the network.", min=1)] = None,
    leave: Annotated[bool, typer.Option(help="Keep layers that cannot be converted as they are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the parameters that a Bayesian network would store, beside the plain network's.

    The network is built and counted, not estimated. Try:

        dubito count resnet50-cifar --method ffg-u --inducing 64

        dubito count resnet50-cifar --method ffg-u --keep 0.5
    """
    from contextlib import nullcontext

    import torch

    from dubito.models.conversion.architectures import build, on_meta
    from dubito.models.conversion.conversion import bayesianize
    from dubito.models.conversion.start import CONVERTIBLE
    from dubito.models.errors import ConversionError
    from dubito.models.network.joint import JOINT
    from dubito.models.numerics.parameters import count as count_parameters
    from dubito.models.pruning import count_pruned

    # it is counted, not filled
    with torch.device("meta") if on_meta(architecture) else nullcontext():
        net = build(architecture, **({} if classes is None else {"classes": classes}))
        last = [name for name, module in net.named_modules() if isinstance(module, CONVERTIBLE)][-1]
        joint = None if method in METHODS else JOINT.get(method)
        if joint is not None and size > (D := count_parameters(net)):
            raise ConversionError(
                f"size is {size:,}, but {architecture} has {D:,} weights; expected no more than those."
            )
        try:
            network = bayesianize(
                net,
                method if joint is None else "deterministic",
                inducing=inducing,
                members=members,
                start="prior",
                unsupported="leave" if leave else "error",
                layers=None if head is None else {last: {"M_out": head}},
            )
        except ConversionError as error:
            raise ConversionError(str(error).replace('unsupported="leave"', "--leave")) from None
    if joint is not None:
        network.set_joint(joint.sized(size))
    parameters = count_parameters(network) if keep == 1.0 else count_pruned(network, keep)
    deterministic = count_parameters(net)
    result = {
        "architecture": architecture,
        "method": method,
        "parameters": parameters,
        "deterministic": deterministic,
        "ratio": parameters / deterministic,
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(f"{architecture} as {method}: {parameters:,} parameters")
        print(f"{architecture} as it is: {deterministic:,} parameters")
        print(f"ratio: {parameters / deterministic:.2%}")


@app.command()
def inspect(file: Artifact, network: Network = None, as_json: AsJson = False) -> None:
    """Check an artifact and show its layers, sizes, calibration, metrics and provenance.

    Try: dubito inspect model.safetensors
    """
    from dubito.models.artifact.artifact import examine, rebuild
    from dubito.models.remote.cache import local_copy
    from dubito.models.report import report, show

    permit_network(network)
    with local_copy(file) as copy:
        manifest, tensors = examine(copy)
        unknown = manifest.traced is None and manifest.architecture.name == "custom" and network is None
        built = None if unknown else rebuild(copy, manifest, tensors).network
        contents = report(manifest, built, copy.stat().st_size, tensors)
    if as_json:
        print(json.dumps(contents))
    else:
        show(contents, manifest.layers)


@app.command()
def predict(
    file: Artifact,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Image files, or .npy files: uint8 pixels, or numbers in the model's own input space. Or addresses of "
            "them.",
        ),
    ],
    samples: Samples = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the draws; without one they are fresh.", min=0)] = None,
    method: Method = None,
    group: Annotated[
        str | None, typer.Option(help="Of a model calibrated by group: the group that all inputs belong to.")
    ] = None,
    network: Network = None,
    as_json: AsJson = False,
) -> None:
    """Predict, and say how far each answer can be trusted.

    Entropy measures all uncertainty, mutual information the part that more training data would remove (both in nats).

    Try: dubito predict model.safetensors digit.png --samples 20 --seed 0
    """
    import torch

    from dubito.models.artifact.artifact import load
    from dubito.models.predictions.answers import answers, check_group

    way = chosen_method(method)
    permit_network(network)
    model = load(file)
    check_group(model.card.calibration, group)
    named = [row for where in inputs for row in _read(where, model)]
    prediction = model.predict(torch.stack([x for _, x in named]), chosen_samples(samples), seed, method=way)
    answer_rows = answers(prediction, model.card, group)
    rows = [{"input": name, **row} for (name, _), row in zip(named, answer_rows, strict=True)]
    if as_json:
        settings = {"samples": prediction.samples, "seed": prediction.seed, "method": prediction.method}
        print(json.dumps({"predictions": rows, **settings}))
    else:
        _table(rows, prediction.samples, prediction.seed, prediction.method)


@app.command()
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An artifact (.safetensors).")],
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where to: s3://, gs:// or az:// with a path that ends in .safetensors, or in / for the file's own "
            "name; or hf://OWNER/NAME, which gets a model card too.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace another file, and another model card.")] = False,
    license: Annotated[
        str, typer.Option(metavar="ID", help="Of the model card: the licence by the hub's name, such as apache-2.0.")
    ] = "unknown",
    as_json: AsJson = False,
) -> None:
    """Upload an artifact with its hash beside it, and read back what was written.

    Credentials come from the environment, as each store's own tools read them. Try:

        dubito push digits.safetensors s3://models/digits/2/model.safetensors

        dubito push digits.safetensors hf://owner/digits --license apache-2.0
    """
    from dubito.models.push import push as pushed

    result = pushed(file, url, force=force, license=license)
    if as_json:
        print(json.dumps({"address": result.address, "sha256": result.sha256, "bytes": result.bytes}))
        return
    for line in result.said:
        print(line)
    print(f"Next: dubito serve {result.address}")


zoo = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.add_typer(zoo, name="zoo")


@zoo.callback()
def list_zoo(context: typer.Context, as_json: AsJson = False) -> None:
    """List the trained models that come with dubito, and larger ones that can be fetched.

    zoo:NAME stands for the file in every command that takes a model, such as `dubito serve`.

    Try: dubito zoo --json
    """
    if context.invoked_subcommand is not None:
        return
    from dubito.models.zoo import listed

    if as_json:
        print(json.dumps({"models": [one.model_dump(mode="json") for one in listed()]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("name", "data", "method", "network", "bytes", "parameters", "accuracy", "NLL", "ECE"):
        table.add_column(title, no_wrap=title == "name", justify="left" if title in FIRST else "right")
    for one in listed():
        found = one.metrics
        first = f"{found['accuracy']:.2%}" if "accuracy" in found else f"RMSE {found['rmse']:.3g}"
        size = f"{one.bytes:,}" + ("" if one.shipped else " (zoo get)")
        parameters = f"{one.parameters:,} ({one.parameters / one.deterministic:.0%})"
        figures = [first, f"{found['nll']:.3f}", f"{found['ece']:.2%}" if "ece" in found else ""]
        table.add_row(one.name, one.data, one.method, one.architecture, size, parameters, *figures)
    wide = max(WIDTH, Console().width)
    Console(highlight=False, markup=False, width=wide).print(table)
    here = [one for one in listed() if one.shipped]
    total = sum(one.bytes for one in here)
    print(f"{len(here)} come with dubito: {total:,} bytes. In brackets: share of the plain network's parameters.")
    print(f"Next: dubito serve zoo:{here[0].name}")


FIRST = ("name", "data", "method", "network")  # columns of words
WIDTH = 130  # that a row needs


@zoo.command("verify")
def verify_zoo(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Models of the zoo; without any, all that come with dubito."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check files of the zoo: the SHA-256 of the list, and all that loading checks.

    Try: dubito zoo verify clothes
    """
    from dubito.models.zoo import listed
    from dubito.models.zoo_files import verify

    chosen = names or [one.name for one in listed() if one.shipped]
    paths = {name: verify(name) for name in chosen}
    if as_json:
        print(json.dumps({"verified": {name: str(path) for name, path in paths.items()}}))
        return
    for name, path in paths.items():
        print(f"{name}: {path.stat().st_size:,} bytes, as listed")


@zoo.command("get")
def get_zoo(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models of the zoo.")],
    release: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help=f"Address of the folder that holds them ({ADDRESSES}); without it, that of the variable DUBITO_ZOO.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also copy them into this folder, as NAME.safetensors.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch models of the zoo into the cache, each verified by its SHA-256; those that come with dubito are there.

    Try: dubito zoo get clothes --out models
    """
    import shutil

    from dubito.models.errors import InputError
    from dubito.models.zoo import named
    from dubito.models.zoo_files import verify

    if out is not None and not out.is_dir():
        raise InputError(f"--out is {out}; expected a folder that exists.")
    for name in names:
        named(name)  # before the first download
    paths = {}
    for name in names:
        path = verify(name, release)
        paths[name] = path if out is None else Path(shutil.copyfile(path, out / f"{name}.safetensors"))
    if as_json:
        print(json.dumps({"files": {name: str(path) for name, path in paths.items()}}))
        return
    for name, path in paths.items():
        print(f"{name}: {path}")
    print(f"Next: dubito serve zoo:{names[0]}")


def _read(where: str, model: "Model") -> list[tuple[str, "Tensor"]]:
    """The inputs that one file holds, by name."""
    from dubito.models.remote.address import place_of
    from dubito.models.remote.cache import local_copy

    with local_copy(where) as path:
        return _inputs(path, str(place_of(where)), model)


def _inputs(path: Path, name: str, model: "Model") -> list[tuple[str, "Tensor"]]:
    import numpy as np
    import torch

    from dubito.models.errors import InputError
    from dubito.models.images import pictures_in, prepare, prepare_array

    declared = model.card.input
    if declared is None:
        raise InputError("this artifact does not say what its inputs look like; save it with a card that does.")
    if path.suffix.lower() in TABLES:
        raise InputError(
            f"{path} holds rows; expected a picture, or a .npy file with inputs of shape {declared.shape}. For a table "
            "or an .npz: dubito score."
        )
    if path.suffix.lower() != ".npy":
        return [(name, prepare(torch.from_numpy(_pixels(path, declared)), declared))]
    array = _numbers(path)
    pictures = array.dtype == np.uint8 and declared.image is not None
    if pictures:
        try:
            batch, single = pictures_in(array, declared)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    else:
        single = array.ndim == len(declared.shape)
        batch = array[None] if single else array
    if batch.ndim < 2 or len(batch) == 0:
        raise InputError(
            f"{path} has shape {array.shape}; expected inputs of shape {declared.shape}, or a batch of them."
        )
    names = [name] if single else [f"{name}[{i}]" for i in range(len(batch))]
    if pictures:
        return list(zip(names, prepare_array(batch, declared), strict=True))
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which has an error of its own
        rows = torch.from_numpy(np.array(batch, dtype=np.float32))
    if tuple(rows.shape[1:]) != declared.shape:
        raise InputError(f"{path} has shape {array.shape}; expected {declared.shape}, or a batch of them.")
    return list(zip(names, rows, strict=True))


def _numbers(path: Path) -> Any:
    """The array of a .npy file, mapped: a header may claim any size, but not more than the file has."""
    import numpy as np

    from dubito.models.errors import InputError

    try:
        with np.errstate(over="ignore"):
            array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy raises many kinds, all of them about the file
        raise InputError(f"cannot read {path} as .npy: {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{path} holds {array.dtype}; expected numbers.")
    return array


def _pixels(path: Path, declared: "Input") -> Any:
    from dubito.models.errors import InputError
    from dubito.models.images import read_pixels

    try:
        return read_pixels(path, None if declared.image is None else declared.image.fitting)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise InputError(f"cannot read {path}: {error}.") from None


def _table(rows: list[dict[str, Any]], samples: int, seed: int, method: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from dubito.models.report import clean

    classes, calibrated = "label" in rows[0], rows[0]["ood"] is not None
    each = "samples" in rows[0]  # with auto, inputs differ in their draws
    title = f"K = {'auto' if each else samples}, seed {seed}" if samples else "posterior mean"
    table = Table(title="closed form" if method == "probit" else title)
    names = ["label", "probability", "entropy", "mutual information"]
    if not classes:
        names = [clean(", ".join(rows[0].get("targets", ["mean"]))), "std from weights", "std from noise"]
    if each:
        names = ["K", *names]
    if calibrated:
        names += ["prediction set" if classes else "interval", "OOD"]
    table.add_column("input", overflow="fold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        if classes:
            measures = (row[key] for key in ("max_probability", "entropy", "mutual_information"))
            cells = [clean(row["label"]), *("not known" if v is None else f"{v:.4f}" for v in measures)]
        else:
            spreads = ([v**0.5 for v in row[f"{kind}_variance"]] for kind in ("epistemic", "aleatoric"))
            cells = [_several(row["mean"]), *map(_several, spreads)]
        if calibrated:
            if classes:
                fitting = ", ".join(row["prediction_set"] or []) or "none fits"
            else:
                fitting = _several(*row["interval"] or [])
            cells += [clean(fitting), "yes" if row["ood"]["flag"] else "no"]
        table.add_row(row["input"], *([str(row["samples"])] if each else []), *cells)
    console = Console(markup=False, emoji=False)  # labels and paths are not markup
    console.print(table)
    if not calibrated:
        console.print("not calibrated: no OOD flags and no prediction sets")


def _several(*groups: list[float]) -> str:
    return "; ".join(", ".join(f"{v:.4g}" for v in values) for values in groups)
