"""Bytes on disk of a `resnet50-cifar` artifact (FFG-U, M = 64) beside the plain network's float32 state."""

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save as serialise

from benchmarks._measure import machine
from dubito.models import bayesianize, build, save
from dubito.models.conversion.directions import set_directions
from dubito.models.manifest import Precision
from dubito.models.pruning import prune


def main() -> None:
    torch.manual_seed(0)
    net = build("resnet50-cifar")
    plain = len(serialise(net.state_dict()))
    network = bayesianize(net, "ffg-u", inducing=64, start="prior")
    table = Table(title=f"share of the plain network's {plain / 1e6:.2f} MB")
    for column in ("", "float32", "float16", "int8"):
        table.add_column(column, justify="left" if not column else "right")
    precisions: tuple[Precision, ...] = ("float32", "float16", "int8")

    def row(name: str) -> None:
        for fold in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                path, shares = Path(folder) / "model.safetensors", []
                for precision in precisions:
                    save(network, path, precision=precision, batchnorm="fold" if fold else "keep")
                    shares.append(f"{path.stat().st_size / plain:.2%}")
            table.add_row(name + (", BatchNorm folded" if fold else ""), *shares)

    row("as it is")
    set_directions(network, torch.randn(8, 3, 32, 32), 4)
    row("R = 4 directions")
    set_directions(network, torch.randn(8, 3, 32, 32), 0)
    prune(network, 0.5)
    row("half of Z pruned")
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
