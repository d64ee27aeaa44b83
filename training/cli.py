"""Commands that need data: train, prune, calibrate, evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from dubito.models.cli import Artifact, AsJson

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
