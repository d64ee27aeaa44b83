"""Commands that need data: train, prune, calibrate, evaluate."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dubito.models.cli import Artifact, AsJson

if TYPE_CHECKING:
    import torch

app = typer.Typer(rich_markup_mode=None)

DataName = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="D",
        help="digits, mnist, fashion-mnist, cifar10, cifar100, svhn, uci/NAME, folder:PATH, npz:PATH or csv:PATH.",
        show_default=False,
    ),
]
DataRoot = Annotated[
    Path | None, typer.Option(help="The folder that holds the data sets of torchvision and UCI.", show_default=False)
]
Download = Annotated[bool, typer.Option("--download", help="Fetch a torchvision data set that is not there yet.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The artifact to write.", show_default=False)]


def chosen_device(name: str) -> "torch.device":
    import torch

    from dubito.models.errors import InputError

    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is {name!r}; expected auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no GPU that torch can use here; leave --device out, or say cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@app.command()
def evaluate(
    file: Artifact,
    data: DataName,
    part: Annotated[
        str | None,
        typer.Option(
            help="train, validation, calibration, test or all. Without it: test where there is one, else all.",
            show_default=False,
        ),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(metavar="D", help="Data from outside, to be told apart; may be given again.", show_default=False),
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also on rotated (grey) or corrupted (colour) pictures.")
    ] = False,
    samples: Annotated[int, typer.Option(help="Posterior draws K; 0 answers with the posterior mean.", min=0)] = 20,
    seed: Annotated[int, typer.Option(help="Fixes the draws.", min=0)] = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write DIR/index.html, one page with plots.", show_default=False)
    ] = None,
    data_root: DataRoot = None,
    download: Download = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a model on data that it was not trained on: how good its answers are, and how good its doubt.

    The model's own data set is divided as in training, and its test part used. Try:

        dubito evaluate model.safetensors --data digits

        dubito evaluate model.safetensors --data fashion-mnist --ood mnist --shift --data-root data --report report
    """
    from dubito.models.artifact import load
    from dubito.training.data import part_of, read_for
    from dubito.training.evaluate import evaluate as measure_all
    from dubito.training.table import show

    model = load(file)
    name, examples = part_of(read_for(model.manifest, data, data_root, download=download), model.card, part)
    outside = {}
    for other in ood or []:
        found = read_for(model.manifest, other, data_root, download=download, labelled=False)
        outside[other] = part_of(found, model.card)[1]
    if report is not None:
        from dubito.training.report import open_folder, write

        open_folder(report)  # before the work, not after it
    model = model.to(chosen_device(device))
    evaluation = measure_all(model, examples, outside, shift=shift, samples=samples, seed=seed)
    about = {"model": str(file), "data": data, "part": name}
    if report is not None:
        about["report"] = str(write(evaluation, about, report))
    if as_json:
        print(json.dumps(about | evaluation.figures))
    else:
        show(about, evaluation.figures)
