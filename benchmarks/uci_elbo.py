"""ELBOs and test log-likelihoods on UCI sets [Ober21, figure 3]: networks and deep Gaussian processes.

    python -m benchmarks.uci_elbo --data-root DIR --methods gi ffg-w --splits 20 --jobs 2 --keep FILE
    python -m benchmarks.uci_elbo --data-root DIR --methods dgp dsvi gpytorch --layers 2 5 --jobs 2 --keep FILE
    python -m benchmarks.uci_elbo --data-root DIR --sets boston --methods dgp dsvi gpytorch --layers 2 5 --pace

`gi` is global inducing points, `li` local ones, `ffg-w` factorised, `fac-gi` factorised below a global top layer: all
over a network of so many hidden layers of 50 ReLU units, with the prior named. `dgp` is a deep GP with global inducing
points, `dsvi` one with local ones, `gpytorch` GPyTorch's with the same layers, points and steps, if it is installed.

Each run trains on the whole training part of a division by as many steps of Adam, with inputs and targets standardised,
and measures the ELBO of an example and the test log-likelihood (of the mean density of 100 draws), both in the targets'
own units. Rows of FILE are not measured again; `--seconds` starts no further run after that time, and the next call
goes on. `--pace` measures the seconds of an epoch alone: CPU time of few steps, all methods in turn, the least of three
rounds.
"""

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models import bayesianize, build
from dubito.models.manifest import Regression
from dubito.models.numerics.parameters import Positive
from dubito.training.data.sources import read_data

SETS = ("yacht", "boston", "energy", "concrete", "wine")  # the five smallest
NETWORKS = ("gi", "li", "fac-gi", "ffg-w")
PROCESSES = ("dgp", "dsvi", "gpytorch")
PRIORS = ("standard", "scale", "neal")
HIDDEN = 50  # units of a layer
BATCH, LR, CLIP = 512, 5e-2, 10.0
NOISE = 0.3  # standard deviation of the standardised targets at the start
DRAWS, AT_ONCE = 100, 10
PACED = 15  # steps
FIGURES = ("elbo", "log_likelihood", "rmse", "seconds_an_epoch")


@dataclass(frozen=True)
class Run:
    data: str
    split: int
    method: str
    layers: int
    points: int
    steps: int
    seed: int
    prior: str  # of a network's weights; "" for a process

    @property
    def name(self) -> str:
        parts = (self.data, self.split, self.method, self.layers, self.points, self.steps, self.seed, self.prior)
        return "-".join(str(part) for part in parts if part != "")

    @property
    def column(self) -> str:
        return f"{self.method} {self.prior}".strip()


@dataclass(frozen=True)
class Division:
    """Standardised inputs and targets of the training part, inputs and targets of the test part."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor  # in their own units
    shift: Tensor
    scale: Tensor

    @classmethod
    def read(cls, name: str, split: int, root: Path) -> "Division":
        data = read_data(f"uci/{name}", root, split=split, regression=True)
        assert data.test is not None  # which every division has
        x, y = data.train.x.double(), data.train.y.double()
        spread = x.std(0, unbiased=False)
        spread = torch.where(spread > 0, spread, 1.0)
        shift, scale = y.mean(0), y.std(0, unbiased=False)
        x_test = (data.test.x.double() - x.mean(0)) / spread
        x = (x - x.mean(0)) / spread
        return cls(x.float(), ((y - shift) / scale).float(), x_test.float(), data.test.y.double(), shift, scale)


def log_density(outputs: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """(K, B)."""
    return (-((outputs - y) / noise).square() / 2 - noise.log() - math.log(2 * math.pi) / 2).sum(-1)


def descend(parameters: list[nn.Parameter], step: Callable[[Tensor], Tensor], N: int, steps: int) -> float:
    """Adam with a rate that falls by a cosine; `step` gives the loss of some examples. Returns seconds an epoch."""
    optimiser = torch.optim.Adam(parameters, LR, fused=True)
    began = time.process_time()
    for i in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * i / steps)) / 2
        loss = step(torch.randperm(N)[:BATCH])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimiser.step()
    return (time.process_time() - began) / steps * math.ceil(N / BATCH)


def ours(run: Run, d: Division) -> dict[str, float]:
    inputs = d.x.shape[1]
    options: dict[str, Any] = {} if run.method == "ffg-w" else {"inducing": run.points}
    if run.method in NETWORKS:
        net = build("mlp", inputs=inputs, outputs=1, hidden=[HIDDEN] * run.layers)
        options["prior"] = run.prior
        if run.method in ("ffg-w", "fac-gi"):
            options["sigma_max"] = 10.0
    else:
        net = build("deep-gp", inputs=inputs, outputs=1, layers=run.layers)
    network = bayesianize(net, run.method, start="prior", examples=(d.x, d.y), task=Regression(), **options)
    network.noise = noise = Positive(torch.tensor([NOISE]), 1e-4)
    N = len(d.x)

    def loss(some: Tensor) -> Tensor:
        outputs, ratio = network.sample_with_ratio(d.x[some], 1)
        return (network.kl() + ratio) / N - log_density(outputs, d.y[some], noise()).mean()

    seconds = descend(list(network.parameters()), loss, N, run.steps)
    with torch.no_grad():
        bounds = []
        for _ in range(DRAWS // AT_ONCE):
            outputs, ratio = network.sample_with_ratio(d.x, AT_ONCE)
            bounds.append(float(log_density(outputs, d.y, noise()).mean() - (network.kl() + ratio) / N))
        outputs = network.sample(d.x_test, DRAWS)
        return {**figures(statistics.mean(bounds), outputs, noise(), d), "seconds_an_epoch": seconds}


def figures(bound: float, outputs: Tensor, noise: Tensor, d: Division) -> dict[str, float]:
    """In the targets' own units, of draws (K, B, 1) in standardised ones."""
    outputs, noise = outputs.double() * d.scale + d.shift, noise.double() * d.scale
    density = log_density(outputs, d.y_test, noise).logsumexp(0) - math.log(len(outputs))
    return {
        "elbo": bound - float(d.scale.log().sum()),
        "log_likelihood": float(density.mean()),
        "rmse": float((outputs.mean(0) - d.y_test).square().mean().sqrt()),
    }


def measure(run: Run, root: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    d = Division.read(run.data, run.split, root)
    torch.manual_seed(run.seed)
    if run.method == "gpytorch":
        from benchmarks._uci_elbo_gpytorch import theirs

        return theirs(run.layers, run.points, run.steps, d)
    return ours(run, d)


def pace(runs: list[Run], root: Path) -> dict[str, float]:
    """Milliseconds of CPU time for an epoch, by method and number of layers."""
    rounds = [
        {f"{run.column}, {run.layers} layers": measure(replace(run, steps=PACED), root) for run in runs}
        for _ in range(3)
    ]
    return {key: 1000 * min(one[key]["seconds_an_epoch"] for one in rounds) for key in rounds[0]}


def shown(rows: dict[str, dict[str, float]], runs: list[Run], console: Console) -> None:
    for layers in sorted({run.layers for run in runs}):
        for figure in FIGURES:
            columns = list(dict.fromkeys(run.column for run in runs))
            table = Table("set", "divisions", *columns, title=f"{layers} layers: {figure.replace('_', ' ')}")
            for name in dict.fromkeys(run.data for run in runs):
                cells, counts = [], []
                for column in columns:
                    keys = [r.name for r in runs if (r.data, r.layers, r.column) == (name, layers, column)]
                    values = [rows[key][figure] for key in keys if key in rows]
                    counts.append(len(values))
                    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
                    cells.append(f"{statistics.mean(values):.3f} ± {error:.3f}" if values else "")
                table.add_row(name, " ".join(map(str, dict.fromkeys(counts))), *cells)
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=[*NETWORKS, *PROCESSES], required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--priors", nargs="+", choices=PRIORS, default=["scale"], help="of networks")
    parser.add_argument("--splits", type=int, default=5, help="the first so many divisions of each set")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further run after so many")
    parser.add_argument("--pace", action="store_true", help="seconds of an epoch alone, on the first division")
    parser.add_argument("--keep", type=Path, help="a file for the figures of each run, which are not measured again")
    args = parser.parse_args()
    if "gpytorch" in args.methods and importlib.util.find_spec("gpytorch") is None:
        parser.error("gpytorch is not installed: pip install gpytorch, or leave it out of --methods.")
    runs = [
        Run(name, split, method, layers, args.points, args.steps, args.seed, prior)
        for split in range(args.splits)
        for layers in args.layers
        for name in args.sets
        for method in args.methods
        for prior in (args.priors if method in NETWORKS else [""])
    ]
    if args.pace:
        first = [run for run in runs if run.split == 0 and run.data == args.sets[0]]
        for name, milliseconds in pace(first, args.data_root).items():
            print(f"{name}: {milliseconds:.1f} ms")
        return
    rows: dict[str, Any] = {row["run"]: row["figures"] for row in kept_rows(args.keep)}
    left, ends = [run for run in runs if run.name not in rows], time.monotonic() + args.seconds
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        while left and time.monotonic() < ends:
            some, left = left[: args.jobs], left[args.jobs :]
            for run, found in zip(some, pool.map(measure, some, [args.data_root] * len(some)), strict=True):
                rows[run.name] = found
                keep_row(args.keep, {"run": run.name, "figures": found})
    console = Console()
    shown(rows, runs, console)
    console.print(f"{len(left)} runs left; {machine()}")


if __name__ == "__main__":
    main()
