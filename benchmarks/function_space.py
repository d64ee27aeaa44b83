"""Function-space VI on two toys: how much a network doubts away from the data, as a multiple of its doubt on them.

    python -m benchmarks.function_space --out function_space.png --seeds 0 1 2

`line` is a regression in one dimension like Snelson's set, with a gap; `moons` is the two moons. Two hidden layers of
100 ReLU units, as in [Rudner21, appendix 3]. `objective` elbo trains the same posterior by the ordinary ELBO.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from dubito.models import bayesianize, build
from dubito.models.conversion.architectures import Standardise
from dubito.models.manifest import Classification, Regression
from dubito.models.network.network import BayesianNetwork
from dubito.training.config import Context, Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitRun
from dubito.training.fit.function_space import FunctionSpace

Toy = Literal["line", "moons"]
TOYS: tuple[Toy, ...] = ("line", "moons")
METHODS: dict[str, dict[str, Any]] = {  # without caps that bind, and narrow at the start
    "ffg-w": {"sigma_max": 10.0, "spread": 0.02},
    "ffg-u": {"inducing": 50, "lam_max": 0, "sigma_max": 10.0, "spread": 0.2},  # in units of the prior
    "whvi": {"spread": 0.05},
}
RATES = {"ffg-u": 2e-2, "whvi": 2e-2}  # others: 5e-3
N = 200
NOISE = 0.1  # of the line's targets
ROUNDS = 10  # epochs of a run, each of many steps
K = 256  # draws of the answer
AWAY = 0.3  # of the moons: from this distance to the nearest example, in a frame of 1.5 around them


@dataclass(frozen=True)
class Doubt:
    """Mean over inputs of the standard deviation over draws: of the function, for classes of the probability."""

    on: float
    away: float
    between: float | None  # in the gap of the line
    right: float  # RMSE to the noiseless function, or accuracy, on the data
    network: BayesianNetwork

    @property
    def ratio(self) -> float:
        return self.away / self.on


def truth(x: Tensor) -> Tensor:
    return torch.sin(1.5 * x) + 0.3 * torch.cos(3 * x)


def examples(toy: Toy, seed: int) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    half = torch.arange(N)[:, None] % 2 == 0
    u = torch.rand(N, 1, generator=rng)
    if toy == "line":
        x = torch.where(half, -4 + 2 * u, 1 + 3 * u)
        return Examples(x, truth(x) + NOISE * torch.randn(N, 1, generator=rng))
    angle = math.pi * u
    upper, lower = torch.cat([angle.cos(), angle.sin()], 1), torch.cat([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return Examples(torch.where(half, upper, lower) + 0.1 * torch.randn(N, 2, generator=rng), 1 - half[:, 0].long())


def train(
    toy: Toy,
    method: str,
    steps: int,
    *,
    seed: int = 0,
    objective: Literal["elbo", "function-space"] = "function-space",
    hidden: int = 100,
    lr: float | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Doubt:
    """Train one network on a toy, and measure its doubt; `tell` is called after each step."""
    data = examples(toy, seed)
    torch.manual_seed(seed)
    net = build("mlp", inputs=data.x.shape[1], outputs=1 if toy == "line" else 2, hidden=[hidden] * 2, standardise=True)
    for module in net.modules():
        if isinstance(module, Standardise):
            module.shift.copy_(data.x.mean(0))
            module.scale.copy_(data.x.std(0))
    task = Regression() if toy == "line" else Classification()
    network = bayesianize(net, method, start="prior", task=task, **METHODS[method])
    often = max(1, steps // ROUNDS)  # an epoch holds the data, and the KL, many times
    many = Examples(data.x.repeat(often, 1), data.y.repeat(often, *[1] * (data.y.dim() - 1)))
    fit = Fit(epochs=ROUNDS, batch=N, samples=4, lr=lr or RATES.get(method, 5e-3), kl=float(often), objective=objective)
    functions = None
    if objective == "function-space":
        context = Context(points=40, probes=4, prior_variance=10.0, margin=1.0)
        functions = FunctionSpace.of(context, network, data, input_of(data))
    run = FitRun(network, many, data, input_of(data), fit, seed, torch.device("cpu"), functions=functions)
    while not run.done:
        run.epoch(lambda _: tell())
    return measured(toy, run.finish(), data)


@torch.no_grad()
def measured(toy: Toy, network: BayesianNetwork, data: Examples) -> Doubt:
    torch.manual_seed(0)

    def answer(x: Tensor) -> Tensor:
        outputs = network.sample(x, K)
        return outputs[..., 0] if toy == "line" else outputs.softmax(-1)[..., 1]

    def doubt(x: Tensor) -> float:
        return float(answer(x).std(0).mean())

    if toy == "line":
        on = torch.cat([torch.linspace(-4, -2, 40), torch.linspace(1, 4, 60)])[:, None]
        away = torch.cat([torch.linspace(-7, -5.5, 40), torch.linspace(5.5, 7, 40)])[:, None]
        rmse = float((answer(on).mean(0) - truth(on[:, 0])).square().mean().sqrt())
        return Doubt(doubt(on), doubt(away), doubt(torch.linspace(-1.2, 0.2, 40)[:, None]), rmse, network)
    low, high = data.x.amin(0) - 1.5, data.x.amax(0) + 1.5
    frame = low + (high - low) * torch.rand(1000, 2)
    far = frame[torch.cdist(frame, data.x).amin(1) > AWAY]
    right = float(((answer(data.x).mean(0) > 0.5).long() == data.y).float().mean())
    return Doubt(doubt(data.x), doubt(far), None, right, network)


def draw(found: Mapping[tuple[Toy, str], Doubt], seed: int, out: Path) -> None:
    """One row a toy, one panel a method: mean and two standard deviations of the draws; or the std of p(class)."""
    methods = list(dict.fromkeys(method for _, method in found))
    figure = Figure(figsize=(3.6 * len(methods), 5.6), layout="constrained", dpi=70)
    panels = figure.subplots(len(TOYS), len(methods), squeeze=False)
    for (toy, method), result in found.items():
        axes: Axes = panels[TOYS.index(toy)][methods.index(method)]
        data = examples(toy, seed)
        axes.set_title(f"{method}: {result.ratio:.0f} times", fontsize=9)
        torch.manual_seed(0)
        with torch.no_grad():
            if toy == "line":
                x = torch.linspace(-7, 7, 141)
                drawn = result.network.sample(x[:, None], K)[..., 0]
                mean, std = drawn.mean(0), drawn.std(0)
                axes.fill_between(x, mean - 2 * std, mean + 2 * std, color="#2f81c7", alpha=0.3, linewidth=0)
                axes.plot(x, drawn[:10].T, color="#2f81c7", linewidth=0.4)
                axes.plot(x, mean, color="black", linewidth=1)
                axes.plot(data.x[:, 0], data.y[:, 0], ".", color="#c0392b", markersize=2)
                axes.set_ylim(-4, 4)
            else:
                a, b = torch.linspace(-2.5, 3.5, 61), torch.linspace(-2.2, 2.7, 51)
                grid = torch.cartesian_prod(a, b)
                std = result.network.sample(grid, K).softmax(-1)[..., 1].std(0)
                axes.pcolormesh(a, b, std.view(61, 51).T, cmap="viridis", vmin=0, vmax=0.5)
                axes.scatter(data.x[:, 0], data.x[:, 1], c=data.y, cmap="coolwarm", s=3)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a PNG of the first seed")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--objective", choices=["elbo", "function-space"], default="function-space")
    args = parser.parse_args()
    table = Table("toy", "method", "on the data", "away", "in the gap", "away/on", "RMSE or accuracy", title=machine())
    pictures: dict[tuple[Toy, str], Doubt] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = args.steps // ROUNDS * ROUNDS
        task = progress.add_task("training", total=len(TOYS) * len(args.methods) * len(args.seeds) * steps)
        for toy in TOYS:
            for method in args.methods:
                found = [
                    train(
                        toy, method, args.steps, seed=s, objective=args.objective, tell=lambda: progress.advance(task)
                    )
                    for s in args.seeds
                ]
                pictures[toy, method] = found[0]
                gap = [d.between for d in found if d.between is not None]
                columns = [[d.on for d in found], [d.away for d in found], gap]
                columns += [[d.ratio for d in found], [d.right for d in found]]
                table.add_row(toy, method, *map(_each, columns))
    Console(width=140).print(table)
    if args.out is not None:
        draw(pictures, args.seeds[0], args.out)


def _each(values: list[float]) -> str:
    each = ", ".join(f"{v:.3g}" for v in values)
    return each if len(values) < 2 else f"{each} (median {statistics.median(values):.3g})"


if __name__ == "__main__":
    main()
