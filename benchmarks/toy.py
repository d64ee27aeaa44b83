"""The 1-D regression of [Ritter21, section 4.1]: two clusters of inputs, and what each posterior says between them.

    python -m benchmarks.toy --out toy.png

Targets are cos(4x + 0.8) with noise of standard deviation 0.1, which every network is told. One hidden layer of 50 tanh
units, prior standard deviation 4/√d_in, U 25 × 2 and 1 × 25, no caps that bind. The paper takes 20,000 steps of 32
draws at a rate of 1e-3; here a tenth of the steps, 4 draws and a higher rate that falls, which take two minutes.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from dubito.models import bayesianize, build
from dubito.models.manifest import Regression
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.uncertainty import Regressed
from dubito.training.config import Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitRun

METHODS = {"ffg-w": "FFG-W", "ffg-u": "FFG-U", "fcg-u": "FCG-U", "ensemble-u": "Ensemble-U"}
CLUSTERS = ((-1.0, -0.7), (0.5, 1.0))
EACH = 50  # examples of a cluster
NOISE = 0.1  # where the noise of a network starts, too
ROUNDS = 10  # epochs of a run: each looks at the data steps/ROUNDS times
K = 512  # draws of the answer


@dataclass(frozen=True)
class Answer:
    x: Tensor  # (G,)
    mean: Tensor  # (G,)
    epistemic: Tensor  # (G,)  standard deviation
    total: Tensor  # (G,)  with the noise of the targets

    @property
    def between(self) -> float:
        """Mean epistemic standard deviation between the clusters."""
        (_, left), (right, _) = CLUSTERS
        return float(self.epistemic[(self.x > left) & (self.x < right)].mean())

    @property
    def near(self) -> float:
        """Mean epistemic standard deviation at the clusters."""
        return float(self.epistemic[self._seen].mean())

    @property
    def rmse(self) -> float:
        """RMSE of the mean against the noiseless function, at the clusters."""
        return float((self.mean - truth(self.x))[self._seen].square().mean().sqrt())

    @property
    def _seen(self) -> Tensor:
        return torch.stack([(self.x >= low) & (self.x <= high) for low, high in CLUSTERS]).any(0)


def truth(x: Tensor) -> Tensor:
    return torch.cos(4 * x + 0.8)


def examples(seed: int) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    x = torch.cat([low + (high - low) * torch.rand(EACH, 1, generator=rng) for low, high in CLUSTERS])
    return Examples(x, truth(x) + NOISE * torch.randn(x.shape, generator=rng))


def answer(method: str, steps: int, *, seed: int = 0, tell: Callable[[], None] = lambda: None) -> Answer:
    """Train one method, then predict along the axis; `tell` is called after each step."""
    data = examples(seed)
    torch.manual_seed(seed)
    network = bayesianize(
        build("mlp", inputs=1, outputs=1, hidden=[50], activation="tanh"),
        method,
        start="prior",
        layers={"1": {"inducing": (25, 2)}, "3": {"inducing": (1, 25)}},  # of W 50 × 2 and 1 × 51, biases included
        prior_scale=4.0,
        lam_max=1.0,  # the prior's own: beyond it λ has nothing to gain
        sigma_max=10.0,
        members=8,
        noise="exact",
        task=Regression(),
    )
    assert network.noise is not None
    network.noise.requires_grad_(False)
    often = max(1, steps // ROUNDS)  # validation ends an epoch, which so holds the data, and the KL, many times
    train = Examples(data.x.repeat(often, 1), data.y.repeat(often, 1))
    fit = Fit(epochs=ROUNDS, batch=len(data), samples=4, lr=2e-2, kl=float(often))
    run = FitRun(network, train, data, input_of(data), fit, seed, torch.device("cpu"))
    while not run.done:
        run.epoch(lambda _: tell())
    trained, x = run.finish(), torch.linspace(-1.5, 1.5, 151)
    summary = predict(trained, trained.factors(), x[:, None], K, seed).summary
    assert isinstance(summary, Regressed)
    epistemic, aleatoric = summary.epistemic_variance[:, 0], summary.aleatoric_variance[:, 0]
    return Answer(x, summary.mean[:, 0], epistemic.sqrt(), (epistemic + aleatoric).sqrt())


def draw(answers: Mapping[str, Answer], data: Examples, out: Path) -> None:
    """One panel a method on the same axes: darker where the draws agree, the noise of the targets around them."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(answers), sharex=True, sharey=True))
    for axes, (method, result) in zip(panels, answers.items(), strict=True):
        for width in (3, 2, 1):
            low, high = result.mean - width * result.epistemic, result.mean + width * result.epistemic
            label = "±1, 2, 3 std of the draws" if width == 1 else None
            axes.fill_between(result.x, low, high, color="#2f81c7", alpha=0.22, linewidth=0, label=label)
        for sign in (-3, 3):
            label = "±3 std with the noise" if sign == 3 else None
            edge = result.mean + sign * result.total
            axes.plot(result.x, edge, color="#2f81c7", linewidth=0.8, linestyle=":", label=label)
        axes.plot(result.x, truth(result.x), color="black", linewidth=1, linestyle="--", label="cos(4x + 0.8)")
        axes.plot(result.x, result.mean, color="#174a78", linewidth=1.5, label="mean")
        axes.scatter(data.x, data.y, s=5, color="#d1495b", linewidth=0, zorder=3, label="data")
        axes.set(title=METHODS[method], xlabel="x", xlim=(-1.5, 1.5), ylim=(-2.5, 2.5), xticks=(-1, 0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("toy.png"), help="where the picture goes")
    parser.add_argument("--steps", type=int, default=2000, help="of each method")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the networks")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are not worth a second
    answers: dict[str, Answer] = {}
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("training", total=args.steps * len(METHODS))
        for method, name in METHODS.items():
            progress.update(task, description=name)
            answers[method] = answer(method, args.steps, seed=args.seed, tell=lambda: progress.advance(task))
    draw(answers, examples(args.seed), args.out)
    table = Table(title="standard deviations are of the draws, without the noise of the targets")
    for column in ("", "RMSE near the data", "std near the data", "std between the clusters"):
        table.add_column(column, justify="right" if column else "left")
    for method, a in answers.items():
        table.add_row(METHODS[method], f"{a.rmse:.3f}", f"{a.near:.3f}", f"{a.between:.3f}")
    console.print(table)
    console.print(f"{args.steps} steps each; wrote {args.out}. {machine()}")


if __name__ == "__main__":
    main()
