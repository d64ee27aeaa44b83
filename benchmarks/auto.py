"""`samples="auto"`: how close its answers are to those of K = 1024, and how many draws they took.

    python -m benchmarks.auto

The embedded model, and a network whose draws disagree more (mc-dropout, not trained), on the digits that the first was
tested with, on pairs of them laid over each other, and on noise.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from dubito.models import bayesianize, load
from dubito.models.embedded import embedded
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.training.data.data import enter, part_of
from dubito.training.data.sources import read_data

REFERENCE = 1024


@dataclass(frozen=True)
class Found:
    within: float  # share of inputs whose leading probability is within the tolerance of K = 1024
    mean: float  # draws
    most: int


def measure(model: Model, x: Tensor, tolerance: float, seed: int) -> Found:
    """Both answers from draws of their own; the class that leads in `auto` is looked up in the reference."""
    auto = model.predict(x, "auto", seed, tolerance=tolerance)
    whole = model.predict(x, REFERENCE, seed + 1)
    assert isinstance(auto.summary, Classified)
    assert isinstance(whole.summary, Classified)
    p, leading = auto.summary.probabilities.max(-1)
    settled = (p - whole.summary.probabilities.gather(1, leading[:, None])[:, 0]).abs() <= tolerance
    drawn = auto.settled.samples if auto.settled is not None else torch.full((len(x),), auto.samples)
    return Found(float(settled.float().mean()), float(drawn.float().mean()), int(drawn.max()))


def inputs(model: Model) -> dict[str, Tensor]:
    _, test = part_of(read_data("digits"), model.card)
    assert model.card.input is not None
    rng = torch.Generator().manual_seed(0)
    other = test.x[torch.randperm(len(test), generator=rng)]
    noise = torch.randint(0, 256, test.x.shape, generator=rng, dtype=torch.uint8)
    kinds = {"digits": test.x, "two digits in one": (test.x // 2 + other // 2), "noise": noise}
    return {name: enter(x, model.card.input) for name, x in kinds.items()}


def models() -> dict[str, Model]:
    """The embedded one; and one whose draws disagree more, so that it has more to settle."""
    model = load(embedded("digits"))
    torch.manual_seed(0)
    last = torch.nn.Linear(64, 10)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), last)
    with torch.no_grad():
        last.weight.mul_(8)  # sure of itself, each draw of another class
    wide = bayesianize(net, "mc-dropout")
    return {"embedded": model, "mc-dropout": Model(wide, model.manifest)}


def main() -> None:
    table = Table(title=f'samples="auto" beside K = {REFERENCE}')
    for column in ("model", "inputs", "tolerance", "within it", "mean K", "largest K"):
        table.add_column(column, justify="right")
    for name, model in models().items():
        for kind, x in inputs(model).items():
            for tolerance in (0.05, 0.02):
                result = measure(model, x, tolerance, seed=0)
                table.add_row(
                    name, kind, str(tolerance), f"{result.within:.1%}", f"{result.mean:.1f}", str(result.most)
                )
    console = Console(width=120)
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
