"""CIFAR-10: what the caps of the noise and frozen BatchNorm statistics do to a posterior, on held-out training data.

    python -m benchmarks.caps --data-root DIR [--architecture resnet18-cifar] [--seed 0] [--json FILE]

One plain network by the recipe `cifar10`, then a posterior from it for each trial; figures are of a tenth of the
training data, which no training step sees, so that settings can be chosen by them. Ten minutes on a GPU.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models import bayesianize
from dubito.models.network.network import BayesianNetwork
from dubito.training import metrics
from dubito.training.config import Fit, Recipe, read_recipe
from dubito.training.data.augment import augmentation
from dubito.training.data.data import Parts, divide, enter, input_of
from dubito.training.data.sources import read_data
from dubito.training.fit.fit import FitRun
from dubito.training.recipe import build_network, task_of

HELD, CALIBRATION = 0.1, 0.04  # shares of the training data: judged by, and for the temperature
SAMPLES = 20  # K
ROWS = 1000  # inputs at a time
COLUMNS = ("accuracy", "nll", "nll_tempered", "ece", "mutual_information", "temperature", "seconds")


@dataclass(frozen=True)
class Trial:
    method: str
    options: dict[str, Any]
    fit: dict[str, Any] = field(default_factory=dict)  # over the recipe's


def trial(method: str, frozen: int = 15, **options: Any) -> Trial:
    return Trial(method, {"inducing": 64, "lam_share": 0.1, **options}, {"frozen_norm_epochs": frozen})


TRIALS = {
    "FFG-U, σ_max 0.2": trial("ffg-u", sigma_max=0.2, spread=0.1),
    "FFG-U, σ_max 0.3": trial("ffg-u", sigma_max=0.3, spread=0.15),
    "FFG-U, σ_max 0.4": trial("ffg-u", sigma_max=0.4, spread=0.2),
    "FFG-U, σ_max 0.3, BatchNorm not frozen": trial("ffg-u", 0, sigma_max=0.3, spread=0.15),
    "Ensemble-U, spread 0.3": trial("ensemble-u", members=5, spread=0.3),
    "Ensemble-U, spread 0.5": trial("ensemble-u", members=5, spread=0.5),
}
USUAL = tuple(TRIALS)
FIGURE_4 = {  # [Ritter21]: λ_max, σ_max and M, each about the same middle
    **{
        f"λ_max {lam:g}": Trial(
            "ffg-u", {"inducing": 64, "lam_max": lam, "sigma_max": 0.2, "spread": 0.1}, {"frozen_norm_epochs": 15}
        )
        for lam in (0.01, 0.03, 0.1, 0.3)
    },
    **{f"σ_max {sigma:g}": trial("ffg-u", sigma_max=sigma, spread=sigma / 2) for sigma in (0.05, 0.1, 0.2, 0.4)},
    **{f"M {M}": trial("ffg-u", inducing=M, sigma_max=0.2, spread=0.1) for M in (16, 32, 64, 128)},
}
TRIALS |= FIGURE_4


@dataclass(frozen=True)
class Setting:
    recipe: Recipe
    parts: Parts
    device: torch.device

    def fit(self, network: BayesianNetwork, fit: Fit) -> BayesianNetwork:
        declared, augment = input_of(self.parts.train), augmentation(self.recipe.data, self.parts.train)
        few = self.parts.validation[:ROWS]  # for the log alone
        run = FitRun(network, self.parts.train, few, declared, fit, self.recipe.seed, self.device, augment)
        while not run.done:
            run.epoch()
        return run.finish()

    @torch.no_grad()
    def logits(self, network: BayesianNetwork, x: Tensor, K: int) -> Tensor:
        torch.manual_seed(0)
        declared = input_of(self.parts.train)
        parts = [network.eval().sample(enter(some.to(self.device), declared), K).float() for some in x.split(ROWS)]
        return torch.cat(parts, 1).cpu()

    def measure(self, network: BayesianNetwork, K: int) -> dict[str, float]:
        calibrating, held = (
            self.logits(network, part.x, K) for part in (self.parts.calibration, self.parts.validation)
        )
        T = best_temperature(calibrating, self.parts.calibration.y)
        p, y = held.softmax(-1), self.parts.validation.y
        mean = p.mean(0)
        entropies = [-(q * q.clamp(min=1e-30).log()).sum(-1) for q in (mean, p)]
        return {
            "accuracy": metrics.accuracy(mean, y),
            "nll": metrics.nll(mean, y),
            "nll_tempered": metrics.nll((held / T).softmax(-1).mean(0), y),
            "ece": metrics.ece(mean, y),
            "mutual_information": float((entropies[0] - entropies[1].mean(0)).mean()),
            "temperature": T,
        }


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """By a fine grid: 0.5 to 3 in steps of 1 %."""
    grid = [0.5 * 1.01**i for i in range(181)]
    return min(grid, key=lambda T: metrics.nll((logits / T).softmax(-1).mean(0), y))


def rows(setting: Setting, chosen: list[str]) -> Any:
    recipe, parts = setting.recipe, setting.parts
    torch.manual_seed(recipe.seed)
    net = build_network(recipe, parts, input_of(parts.train))
    started = time.perf_counter()
    plain = setting.fit(bayesianize(net, "deterministic", task=task_of(parts)), recipe.pretraining)
    yield {"trial": "plain", **setting.measure(plain, 1), "seconds": time.perf_counter() - started}
    trained: nn.Module = plain.net.cpu()
    for name in chosen:
        started = time.perf_counter()
        torch.manual_seed(recipe.seed)
        network = bayesianize(trained, TRIALS[name].method, task=task_of(parts), **TRIALS[name].options)
        network = setting.fit(network, recipe.fit.model_copy(update=TRIALS[name].fit))
        yield {"trial": name, **setting.measure(network, SAMPLES), "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--architecture", default="resnet18-cifar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(USUAL))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--figure-4", action="store_true", help="instead: λ_max, σ_max and M, each in four steps")
    parser.add_argument("--json", type=Path, help="append each row as a line; trials that it holds are not run again")
    args = parser.parse_args()
    changes = [f"network.architecture={args.architecture}", f"seed={args.seed}", *args.set]
    recipe = read_recipe("cifar10", changes)
    parts = divide(read_data("cifar10", args.data_root), HELD, CALIBRATION, recipe.data.test, recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("trial", *COLUMNS, title=f"{args.architecture}, held-out training data, K = {SAMPLES}")
    chosen = list(FIGURE_4) if args.figure_4 else args.trials
    known = {r["trial"]: r for r in kept_rows(args.json) if r["set"] == changes}
    same = {name: next(n for n in chosen if TRIALS[n] == TRIALS[name]) for name in chosen}  # under its first name
    if missing := [name for name in chosen if same[name] == name and name not in known]:
        for row in rows(Setting(recipe, parts, device), missing):
            known[row["trial"]] = row
            keep_row(args.json, {**row, "seed": args.seed, "set": changes})
    for name in ("plain", *chosen):
        table.add_row(name, *(f"{known[same.get(name, name)][column]:.4f}" for column in COLUMNS))
    Console(width=160).print(table)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


if __name__ == "__main__":
    main()
