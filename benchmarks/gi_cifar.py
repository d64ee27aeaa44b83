"""CIFAR-10 by global inducing points [Ober21, section 3.4 and table 1]: 32 channels, no augmentation, no tempering.

    python -m benchmarks.gi_cifar --data-root DIR --keep FOLDER --pace
    python -m benchmarks.gi_cifar --data-root DIR --keep FOLDER --epochs 200 [--methods gi ffg-w fac-gi] [--seeds 0]
    python -m benchmarks.gi_cifar --keep FOLDER --plot gi_cifar.png

Follows the shipped recipe `cifar10-gi` on all 50,000 training pictures; no part is held out, for nothing is chosen by
one. `ffg-w` is factorised, `fac-gi` factorised below a global top layer, both with the same prior. After each epoch the
ELBO of an example (of that epoch's steps), and accuracy and log-likelihood on 2,500 test pictures (K = 8) are kept; at
the end those of all test pictures (K = 20). With `--set fit.pretrain_epochs=N` the posterior starts at a plain network
of N epochs. Checkpoints are kept in FOLDER: stopped by Ctrl-C or SIGTERM, the same command goes on. `--pace` times a
step of each method, without a CUDA graph and with one, and trains nothing. A GPU is needed.
"""

import argparse
import csv
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models import bayesianize
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import count
from dubito.training.config import Data, Recipe, read_recipe
from dubito.training.data.data import Parts, enter, input_of
from dubito.training.fit.fit import FitRun
from dubito.training.recipe import Phases, TrainingStopped, build_network, make_bayesian, read_parts, task_of

RECIPE = "cifar10-gi"
FACTORISED = "{prior='spatial-iw', sigma_max=10.0, spread=0.005}"
METHODS: dict[str, list[str]] = {
    "gi": [],
    "ffg-w": ["posterior.method=ffg-w", f"posterior.options={FACTORISED}", "fit.lr=2e-3"],
    "fac-gi": [
        "posterior.method=fac-gi",
        f"posterior.options={FACTORISED.replace('{', '{inducing=500, ')}",
        "fit.lr=2e-3",
    ],
}
WARMUP = 0.1  # share of the epochs in which the KL's weight rises to 1
CURVE = 2500  # test pictures after each epoch
SAMPLES = 20  # K at the end
PACED = 30  # steps
PAPER = {"gi": (-0.68, 0.8670, -0.40), "ffg-w": (-1.06, 0.8027, -0.58), "fac-gi": (-0.91, 0.8333, -0.49)}  # table 1
FIGURES = ("elbo", "test_accuracy", "test_log_likelihood")

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    root: Path
    keep: Path
    epochs: int
    changes: list[str]
    pictures: int | None  # of training and test part each; None: all
    device: torch.device

    def recipe(self, method: str, seed: int, *further: str) -> Recipe:
        length = [f"fit.epochs={self.epochs}", f"fit.warmup_epochs={round(WARMUP * self.epochs)}"]
        return read_recipe(RECIPE, [*length, *METHODS[method], *self.changes, f"seed={seed}", *further])

    def out(self, method: str, seed: int) -> Path:
        return self.keep / f"{method}-{seed}.safetensors"

    def begin(self, recipe: Recipe, out: Path) -> tuple[Phases, BayesianNetwork]:
        """Phases of the recipe on the whole training part, and its posterior at the start."""
        parts = self.parts(recipe)
        declared = input_of(parts.train, recipe.data)
        phases = Phases(recipe, parts, declared, out, self.device)
        torch.manual_seed(recipe.seed)
        net = build_network(recipe, parts, declared)
        start: Literal["network", "prior"] = "prior"
        if recipe.fit.pretrain_epochs:
            plain = bayesianize(net, "deterministic", task=task_of(parts, recipe))
            net, start = phases.fit(plain, recipe.pretraining, "plain").finish().cpu().net, "network"
            torch.manual_seed(recipe.seed)
        return phases, make_bayesian(net, recipe, parts, declared, start)

    def parts(self, recipe: Recipe) -> Parts:
        """All training pictures train; the curve's test pictures stand where validation would."""
        parts = divided(recipe.data.model_dump_json(), recipe.seed, self.root)
        train = (parts.train + parts.validation + parts.calibration)[: self.pictures]
        test = parts.test[: self.pictures]
        return replace(parts, train=train, validation=test[:CURVE], test=test)

    def measure(self, method: str, seed: int) -> Row:
        recipe = self.recipe(method, seed)
        phases, network = self.begin(recipe, self.out(method, seed))
        run = phases.fit(network, recipe.fit, "posterior")
        run.validation = phases.parts.test
        nll, accuracy, _ = run.validate(SAMPLES)
        last = run.log[-1]
        return {
            "method": method,
            "seed": seed,
            "set": self.changes,
            "pictures": len(phases.parts.train),
            "epochs": len(run.log),
            "parameters": count(run.network),
            "elbo": -last.loss,
            "test_accuracy": accuracy,
            "test_log_likelihood": -nll,
            "train_log_likelihood": -last.nll,
            "kl_of_an_example": last.loss - last.nll,
            "seconds": sum(e.seconds for e in run.log),
            "step_ms": 1000 * statistics.median(e.seconds for e in run.log) / len(run.batches),
            "machine": told(),
        }

    def pace(self, method: str, graph: bool) -> float:
        """Milliseconds of a step."""
        recipe = self.recipe(method, 0, f"fit.graph={str(graph).lower()}")
        phases, network = self.begin(recipe, self.out(method, 0))
        data = (phases.parts.train, phases.parts.validation, phases.declared)
        run = FitRun(network, *data, recipe.fit, recipe.seed, self.device)
        batches = [(enter(x, phases.declared), y, share) for x, y, share in islice(run.batches.epoch(0), 5)]
        for i in range(PACED):
            if i == PACED // 3:
                synchronise(self.device)
                began = time.perf_counter()
            run.take_step(*batches[i % len(batches)])
        synchronise(self.device)
        return 1000 * (time.perf_counter() - began) / (PACED - PACED // 3)


@cache
def divided(data: str, seed: int, root: Path) -> Parts:
    """The same for all methods."""
    recipe = read_recipe(RECIPE, [f"seed={seed}"])
    return read_parts(recipe.model_copy(update={"data": Data.model_validate_json(data)}), root)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def told() -> str:
    return f"{machine()}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}"


def curves(keep: Path) -> list[Row]:
    """A row for each epoch of each run in the folder, from the logs of the training code."""
    rows: list[Row] = []
    for log in sorted(keep.glob("*-[0-9].log.csv")):  # not the plain networks'
        method, _, seed = log.name.removesuffix(".log.csv").rpartition("-")
        with log.open() as file:
            for e in csv.DictReader(file):
                loss, nll, weight = (float(e[name]) for name in ("loss", "nll", "kl_weight"))
                rows.append(
                    {
                        "method": method,
                        "seed": int(seed),
                        "epoch": int(e["epoch"]) + 1,
                        # while the KL's weight rises, by its weight at the end of the epoch
                        "elbo": -(nll + (loss - nll) / weight) if weight > 0 else None,
                        "kl_weight": weight,
                        "test_accuracy": float(e["validation_accuracy"]),
                        "test_log_likelihood": -float(e["validation_nll"]),
                        "train_accuracy": float(e["accuracy"]),
                        "train_log_likelihood": -nll,
                        "seconds": float(e["seconds"]),
                    }
                )
    return rows


def write_curves(keep: Path) -> None:
    file = keep / "curves.jsonl"
    file.unlink(missing_ok=True)
    for row in curves(keep):
        keep_row(file, row)


def plot(rows: list[Row], out: Path) -> None:
    """Curves of the methods against epochs, and the paper's figures as dotted lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    lowest = {"elbo": -2.5, "test_accuracy": 0.3, "test_log_likelihood": -2.0}
    for place, (name, axes) in enumerate(zip(FIGURES, figure.subplots(1, 3), strict=True)):
        for i, method in enumerate(METHODS):
            for seed in sorted({r["seed"] for r in rows if r["method"] == method}):
                mine = [r for r in rows if (r["method"], r["seed"]) == (method, seed) and r[name] is not None]
                label = method if seed == min(r["seed"] for r in rows if r["method"] == method) else None
                axes.plot([r["epoch"] for r in mine], [r[name] for r in mine], color=f"C{i}", label=label)
            axes.axhline(PAPER[method][place], color=f"C{i}", linestyle=":")
        axes.set(title=name.replace("_", " "), xlabel="epoch")
        axes.set_ylim(bottom=lowest[name])
    axes.legend()
    figure.savefig(out, dpi=120)


def table_of(rows: list[Row]) -> Table:
    columns = ("method", "seed", "epochs", "parameters", *FIGURES, "paper", "step, ms", "minutes")
    table = Table(*columns, title=f"CIFAR-10, 32 channels, K = {SAMPLES}")
    for r in rows:
        figures = [f"{r[name]:.4f}" for name in FIGURES]
        paper = " / ".join(map(str, PAPER[r["method"]]))
        cells = [r["method"], str(r["seed"]), str(r["epochs"]), f"{r['parameters']:,}", *figures, paper]
        table.add_row(*cells, f"{r['step_ms']:.1f}", f"{r['seconds'] / 60:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--keep", type=Path, required=True, help="a folder for checkpoints, curves and figures")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pictures", type=int, help="train and test on so many, to try the command")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe for all")
    parser.add_argument("--pace", action="store_true", help="time a step of each method, and stop")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves that are kept, and stop")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    file = args.keep / "figures.jsonl"
    if args.plot is not None:
        plot(kept_rows(args.keep / "curves.jsonl"), args.plot)
        return
    if args.data_root is None:
        parser.error("--data-root is missing: the folder with CIFAR-10.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32: sums over half a million patches lose nothing by it
    bench = Bench(args.data_root, args.keep, args.epochs, args.set, args.pictures, device)
    if args.pace:
        for graph in (False, True):
            for method in args.methods:
                print(f"{method}, {'graph' if graph else 'no graph'}: {bench.pace(method, graph):.1f} ms", flush=True)
        return
    rows = kept_rows(file)
    try:
        for seed in args.seeds:
            for method in args.methods:
                wanted = (method, seed, args.set, args.epochs)
                if any((r["method"], r["seed"], r["set"], r["epochs"]) == wanted for r in rows):
                    continue
                rows.append(bench.measure(method, seed))
                keep_row(file, rows[-1])
    except TrainingStopped as stopped:
        print(stopped)
    finally:
        write_curves(args.keep)
    Console(width=160).print(table_of(rows))
    print(told())


if __name__ == "__main__":
    main()
