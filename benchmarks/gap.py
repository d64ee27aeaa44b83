"""The 1-D regression with a gap of [Ober21, section 3.1]: what each posterior says between the data, beside HMC.

    python -m benchmarks.gap --out gap.png

Targets are x³ with noise of standard deviation 3, at 40 inputs from −4 to −2 and from 2 to 4, both normalised; every
network is told the noise. Two hidden layers of 50 ReLU units, Neal's prior, 100 inducing points. The reference,
`gap_hmc.json`, comes from `_gap_hmc.py`.
"""

import argparse
import json
import math
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from dubito.models import bayesianize, build
from dubito.models.manifest import Regression
from dubito.models.numerics.parameters import Positive
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.uncertainty import Regressed
from dubito.training.config import Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitRun

HMC = "hmc"
METHODS = {"gi": "global inducing", "li": "local inducing", "ffg-w": "factorised", HMC: "HMC"}
SURE = "li"  # starts sure of what the plain network gives: its ELBO is 60 nats higher after 2,000 steps
ROUNDS = 20  # epochs of a run: each looks at the data steps/ROUNDS times
DRAWS = 1000
ELBO_DRAWS = 200


@dataclass(frozen=True)
class Answer:
    mean: Tensor  # (G,)
    std: Tensor  # (G,)  of the draws, without the noise of the targets
    elbo: float | None  # of all examples, in nats

    def over(self, places: Tensor) -> float:
        """Mean standard deviation at these places of the grid."""
        return float(self.std[places].mean())


@dataclass(frozen=True)
class Task:
    """Data of one seed, and what HMC says of it."""

    x: Tensor  # (N, 1)
    y: Tensor  # (N, 1)
    noise: float
    grid: Tensor  # (G,)
    hmc: Answer

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> "Task":
        x, y, grid, mean, std = (torch.tensor(known[name]) for name in ("x", "y", "grid", "mean", "std"))
        return cls(x[:, None], y[:, None], known["noise"], grid, Answer(mean, std, None))

    @property
    def gap(self) -> Tensor:
        """Places of the grid between the data, without a tenth at each end."""
        left, right = float(self.x[self.x < 0].max()), float(self.x[self.x > 0].min())
        edge = 0.1 * (right - left)
        return (self.grid > left + edge) & (self.grid < right - edge)

    @property
    def near(self) -> Tensor:
        """Places of the grid at the data."""
        return ((self.grid - self.x).abs() < 0.05).any(0)


def tasks() -> dict[int, Task]:
    known = json.loads(Path(__file__).with_name("gap_hmc.json").read_text())
    return {int(seed): Task.of(one) for seed, one in known.items()}


def answer(method: str, task: Task, steps: int, seed: int, *, lr: float = 3e-2) -> Answer:
    """Train one method, then predict along the axis."""
    torch.manual_seed(seed)
    network = bayesianize(
        build("mlp", inputs=1, outputs=1, hidden=[50, 50]),
        method,
        inducing=100,
        sigma_max=10.0,
        task=Regression(),
        examples=(task.x, task.y),
        start="network" if method == SURE else "prior",
    )
    network.noise = Positive(torch.tensor([task.noise]), 1e-4)
    network.noise.requires_grad_(False)
    often = max(1, steps // ROUNDS)  # validation ends an epoch, which so holds the data, and the KL, many times
    data = Examples(task.x, task.y)
    train = Examples(task.x.repeat(often, 1), task.y.repeat(often, 1))
    fit = Fit(epochs=ROUNDS, batch=len(data), samples=2, lr=lr, kl=float(often), warmup_epochs=ROUNDS // 4)
    run = FitRun(network, train, data, input_of(data), fit, seed, torch.device("cpu"))
    while not run.done:
        run.epoch()
    trained = run.finish()
    summary = predict(trained, trained.factors(), task.grid[:, None], DRAWS, seed).summary
    assert isinstance(summary, Regressed)
    with torch.no_grad():
        outputs, ratio = trained.sample_with_ratio(task.x, ELBO_DRAWS)
        squared = ((outputs - task.y) / task.noise).square().sum((1, 2)).mean()
        likelihood = -float(squared) / 2 - len(data) * math.log(task.noise * math.sqrt(2 * math.pi))
        elbo = likelihood - float(ratio) - float(trained.kl())
    return Answer(summary.mean[:, 0], summary.epistemic_variance[:, 0].sqrt(), elbo)


def draw(answers: Mapping[str, Answer], task: Task, out: Path) -> None:
    """One panel a method on the same axes."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(answers), sharex=True, sharey=True))
    for axes, (method, result) in zip(panels, answers.items(), strict=True):
        for width in (2, 1):
            low, high = result.mean - width * result.std, result.mean + width * result.std
            axes.fill_between(task.grid, low, high, color="#2f81c7", alpha=0.3, linewidth=0)
        axes.plot(task.grid, result.mean, color="#174a78", linewidth=1.5)
        axes.scatter(task.x, task.y, s=6, color="#d1495b", linewidth=0, zorder=3)
        axes.set(title=METHODS[method], xlabel="x", xlim=(-2, 2), ylim=(-3.5, 3.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=100)


def _one(given: tuple[str, int, int, float]) -> Answer:
    method, seed, steps, lr = given
    torch.set_num_threads(1)  # matrices this small are not worth a second
    return answer(method, tasks()[seed], steps, seed, lr=lr)


def show(known: Mapping[int, Task], answers: Mapping[tuple[str, int], Answer]) -> None:
    """For each seed: standard deviation in the gap, as a share of HMC's, and near the data; the ELBO."""
    table = Table("method", *(f"seed {seed}: gap, ÷ HMC, near, ELBO" for seed in known))
    for method, name in METHODS.items():
        cells = []
        for seed, task in known.items():
            own = answers[method, seed]
            std, elbo = own.over(task.gap), "" if own.elbo is None else f", {own.elbo:.1f}"
            cells.append(f"{std:.3f}, {std / task.hmc.over(task.gap):.2f}, {own.over(task.near):.3f}{elbo}")
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gap.png"), help="where the picture goes, of the first seed")
    parser.add_argument("--steps", type=int, default=6000, help="of each method")
    parser.add_argument("--lr", type=float, default=3e-2, help="at the start; it falls by a cosine")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the data and the networks")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    known = {seed: task for seed, task in tasks().items() if seed in args.seeds}
    trained = [method for method in METHODS if method != HMC]
    runs = [(method, seed, args.steps, args.lr) for seed in known for method in trained]
    with ProcessPoolExecutor(args.jobs) as pool:
        answers = dict(zip([(m, s) for m, s, *_ in runs], pool.map(_one, runs), strict=True))
    answers |= {(HMC, seed): task.hmc for seed, task in known.items()}
    show(known, answers)
    first = args.seeds[0]
    draw({m: answers[m, first] for m in METHODS}, known[first], args.out)


if __name__ == "__main__":
    main()
