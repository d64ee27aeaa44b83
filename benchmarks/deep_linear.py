"""ELBOs of deep linear networks [Ober21, section 3.2]: what a posterior loses with depth and width.

    python -m benchmarks.deep_linear --widths 5 50 --depths 1 2 4 6 10 --out deep_linear.png

1,000 examples with 5 standard normal features, targets by a weight vector of variance 1/5 and noise of variance 0.1,
which every network is told. A network of depth L has L weight matrices, no biases and Neal's prior. No ELBO can exceed
the log evidence of its own network, which is dashed; at depth 1 that is the process that made the data. What lies
between the two is the posterior's fault, and none of it is the model's.
"""

import argparse
import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models import bayesianize
from dubito.models.manifest import Regression
from dubito.models.numerics.parameters import Positive
from dubito.training.config import Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitError, FitRun

METHODS = {"ffg-w": "factorised", "li": "local", "fac-gi": "fac → gi", "rand-gi": "rand → gi", "gi": "global"}
N, FEATURES, VARIANCE = 1000, 5, 0.1
POINTS = 50
ROUNDS = 10  # epochs of a run: each looks at the data steps/ROUNDS times
DRAWS, AT_ONCE = 100, 10  # of the ELBO
LOWEST = -2.0  # of the picture: other methods fall far below
SCALES = 20_000  # draws of the evidence
HALVED = 4  # rates that are tried
Run = tuple[str, int, int, int, int, float, int]  # method, width, depth, seed, steps, lr, draws in a step


def examples(seed: int) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(N, FEATURES, generator=rng), torch.randn(FEATURES, 1, generator=rng) / FEATURES**0.5
    return Examples(x, x @ w + VARIANCE**0.5 * torch.randn(N, 1, generator=rng))


def evidence(data: Examples, width: int, depth: int) -> float:
    """Log evidence of an example under a network, but for the error of SCALES draws.

    A normal matrix turns a vector of length r into a normal vector of variance r²/width, whatever its direction. So the
    product of all weights is a normal vector times the lengths of L − 1 others. Given s, the product of their squares,
    the targets are N(0, s X Xᵀ/5 + 0.1 I), and the evidence is the mean of that over s.
    """
    x, y = data.x.double(), data.y[:, 0].double()
    values, vectors = torch.linalg.eigh(x.T @ x / FEATURES)
    along = (x @ vectors / (FEATURES * values).sqrt()).T @ y  # of y, in the plane of the features
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randn(depth - 1, SCALES, width, generator=rng, dtype=torch.float64).square().mean(-1)
    variances = lengths.prod(0)[:, None] * values + VARIANCE
    inside = along.square() / variances + variances.log()
    outside = (y @ y - along @ along) / VARIANCE + (len(y) - FEATURES) * math.log(VARIANCE)
    logs = -(inside.sum(-1) + outside + len(y) * math.log(2 * math.pi)) / 2
    return (float(logs.logsumexp(0)) - math.log(SCALES)) / len(y)


def elbo(run: Run) -> float:
    """Of an example, after training; at half the rate, and half of that, where the loss did not stay finite."""
    *others, lr, draws = run
    for halved in range(HALVED):
        try:
            return _elbo((*others, lr / 2**halved, draws))
        except FitError:
            print(f"{run}: not finite at a rate of {lr / 2**halved:g}", flush=True)
    return math.nan


def _elbo(run: Run) -> float:
    method, width, depth, seed, steps, lr, draws = run
    torch.set_num_threads(1)
    data = examples(seed)
    torch.manual_seed(seed)
    sizes = [FEATURES, *[width] * (depth - 1), 1]
    net = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes)))
    network = bayesianize(
        net, method, start="prior", inducing=POINTS, sigma_max=10.0, task=Regression(), examples=(data.x, data.y)
    )
    network.noise = Positive(torch.tensor([VARIANCE**0.5]), 1e-4)
    network.noise.requires_grad_(False)
    often = max(1, steps // ROUNDS)  # validation ends an epoch, which so holds the data, and the KL, many times
    train = Examples(data.x.repeat(often, 1), data.y.repeat(often, 1))
    fit = Fit(epochs=ROUNDS, batch=N, samples=draws, lr=lr, kl=float(often), warmup_epochs=ROUNDS // 5, clip=100.0)
    fitted = FitRun(network, train, Examples(data.x[:10], data.y[:10]), input_of(data), fit, seed, torch.device("cpu"))
    while not fitted.done:
        fitted.epoch()
    trained = fitted.finish()
    with torch.no_grad():
        drawn = [_bound(trained.sample_with_ratio(data.x, AT_ONCE), data.y) for _ in range(DRAWS // AT_ONCE)]
        return (sum(drawn) / len(drawn) - float(trained.kl())) / N


def _bound(sampled: tuple[Tensor, Tensor], y: Tensor) -> float:
    outputs, ratio = sampled
    squares = float((outputs - y).square().sum((1, 2)).mean()) / VARIANCE
    return -squares / 2 - N * math.log(2 * math.pi * VARIANCE) / 2 - float(ratio)


def draw(found: Mapping[tuple[str, int, int], float], truth: Mapping[tuple[int, int], float], out: Path) -> None:
    """The bounds by method, width and depth, and the evidence by width and depth."""
    widths = sorted({width for _, width, _ in found})
    figure = Figure(figsize=(3.6 * len(widths), 3), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(widths), sharey=True, squeeze=False)[0])
    for axes, width in zip(panels, widths, strict=True):
        for i, (method, name) in enumerate(METHODS.items()):  # each has its colour, whether or not the others are there
            if depths := sorted(d for m, w, d in found if (m, w) == (method, width)):
                bounds = [found[method, width, d] for d in depths]
                axes.plot(depths, bounds, color=f"C{i}", marker="o", markersize=3, label=name)
        depths = sorted(d for w, d in truth if w == width)
        line = [truth[width, d] for d in depths]
        axes.plot(depths, line, color="black", linestyle="--", linewidth=1, label="evidence")
        axes.set_ylim(bottom=LOWEST, top=0)
        axes.set(title=f"width {width}", xlabel="depth")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ELBO per example")
    panels[0].legend(frameon=False, fontsize=7)
    figure.savefig(out, dpi=100)


def bounds(args: argparse.Namespace) -> dict[tuple[str, int, int], float]:
    """By method, width and depth; widest and deepest first, since they take longest."""
    grid = [(m, w, d) for w in args.widths for d in args.depths for m in args.methods]
    how = [args.seed, args.steps, args.lr, args.draws]
    kept = {(*row["run"],): row["elbo"] for row in kept_rows(args.keep) if row["how"] == how}
    found = {one: kept[one] for one in grid if one in kept}
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(elbo, (*one, *how)): one for one in reversed(grid) if one not in kept}
        for done in as_completed(runs):
            found[runs[done]] = done.result()
            keep_row(args.keep, {"run": runs[done], "how": how, "elbo": done.result()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("deep_linear.png"), help="where the picture goes")
    parser.add_argument("--widths", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 6, 10])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument("--lr", type=float, default=3e-2, help="at the start; it falls by a cosine")
    parser.add_argument("--draws", type=int, default=8, help="in a step; with few, narrow networks find worse optima")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="append each run as a line; runs that it holds are not run again")
    args = parser.parse_args()
    found = bounds(args)
    data, console = examples(args.seed), Console()
    truth = {(w, d): evidence(data, w, d) for w in args.widths for d in args.depths}
    for width in args.widths:
        table = Table(f"width {width}", *(f"depth {d}" for d in args.depths))
        for method in args.methods:
            table.add_row(METHODS[method], *(f"{found[method, width, d]:.3f}" for d in args.depths))
        table.add_row("evidence", *(f"{truth[width, d]:.4f}" for d in args.depths))
        console.print(table)
    console.print(machine())
    draw(found, truth, args.out)


if __name__ == "__main__":
    main()
