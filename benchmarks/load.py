"""From a file to a model that can answer: loading a `resnet50-cifar` artifact and computing its factors on a CPU."""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine, take_turns
from dubito.models import bayesianize, build, load, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    network = bayesianize(build("resnet50-cifar"), "ffg-u", inducing=64, start="prior")
    table = Table(title="resnet50-cifar, ffg-u, M = 64")
    for column in ("stored as", "MB", "load, s", "factors, s", "both, s"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("float32", "float16", "int8"):
            path = Path(folder) / f"{precision}.safetensors"
            save(network, path, precision=precision)
            loaded = load(path)
            times = take_turns({"load": partial(load, path), "factors": loaded.network.factors}, args.rounds)
            row = (times["load"], times["factors"], sum(times.values()))
            table.add_row(precision, f"{path.stat().st_size / 1e6:.2f}", *(f"{t:.2f}" for t in row))
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
