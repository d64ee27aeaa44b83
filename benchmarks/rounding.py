"""What 8 bits for the products of every Bayesian layer would do to a trained classifier's answers.

    python -m benchmarks.rounding zoo:cifar10-ffg-u --data-root DIR --outside svhn cifar100

Inputs (one scale for each tensor) and matrices (one for each row) of every layer are rounded to float8 (e4m3), or to
bfloat16, and multiplied in float32: what a GPU's 8-bit products would give at best. The same draws for all. An 8-bit
execution would be worth having if it moved no figure further than the factored law may: NLL and mean entropy by 2 %,
ECE by 0.3 points, AUROC by 0.03.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from benchmarks.ood import read_outside
from dubito.models import load
from dubito.models.network import layers
from dubito.models.network.geometry import apply
from dubito.models.predictions.answers import scores
from dubito.training.data.data import part_of
from dubito.training.data.sources import read_for
from dubito.training.evaluation.evaluate import quality
from dubito.training.evaluation.predicting import ChosenPredictive
from dubito.training.metrics import auroc

SAMPLES = 20  # K
LARGEST = torch.finfo(torch.float8_e4m3fn).max
Round = Callable[[Tensor, tuple[int, ...]], Tensor]  # a tensor, and the axes that share a scale


def to_half(t: Tensor, _: tuple[int, ...]) -> Tensor:
    return t.bfloat16().to(t.dtype)


def to_eight_bits(t: Tensor, shared: tuple[int, ...]) -> Tensor:
    scale = t.abs().amax(shared, keepdim=True).clamp_min(1e-12) / LARGEST
    return (t / scale).to(torch.float8_e4m3fn).to(t.dtype) * scale


KINDS: dict[str, Round | None] = {"float32": None, "bfloat16": to_half, "float8": to_eight_bits}


@contextmanager
def rounding(by: Round | None) -> Iterator[None]:
    """Layers round what they multiply."""

    def rounded(geometry: Any, x: Tensor, operand: Any, *others: Any, **named: Any) -> Tensor:
        assert by is not None
        parts = {f.name: getattr(operand, f.name) for f in fields(operand)}
        changed = {name: by(t, (-1,)) for name, t in parts.items() if isinstance(t, Tensor)}
        return apply(geometry, by(x, tuple(range(x.dim()))), replace(operand, **changed), *others, **named)

    names = vars(layers)
    try:
        if by is not None:
            names["apply"] = rounded
        yield
    finally:
        names["apply"] = apply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact of a classifier of pictures, or zoo:NAME")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--data", default="cifar10", help="whose test part is used")
    parser.add_argument("--outside", nargs="*", default=["svhn", "cifar100"], metavar="NAME[=SOURCE]")
    parser.add_argument("--test", type=int, default=10_000, help="inputs of each set, at most")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(args.model).to(device)
    test = part_of(read_for(model.manifest, args.data, args.data_root), model.card)[1][: args.test]
    outside = {name: x[: args.test] for name, x in read_outside(args.outside, args.data_root).items()}
    table = Table("", "accuracy %", "NLL", "ECE %", "entropy", *(f"AUROC {name}" for name in outside))
    predictive = ChosenPredictive.of(model, SAMPLES, None)
    for name, by in track(KINDS.items(), "measuring", console=Console(stderr=True)):
        with rounding(by):
            inside, *far = (predictive.predict(model, x, 0) for x in (test.x, *outside.values()))
        found, near = quality(inside, test.y), scores(inside)["entropy"]
        aurocs = [auroc(near, scores(one)["entropy"]) for one in far]
        figures = (100 * found["accuracy"], found["nll"], 100 * found["ece"], float(near.mean()), *aurocs)
        table.add_row(name, *(f"{value:.4f}" for value in figures))
    Console(width=120).print(table)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


if __name__ == "__main__":
    main()
