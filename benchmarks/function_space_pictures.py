"""Function-space VI on pictures [Rudner21, table 1]: Fashion-MNIST against MNIST, CIFAR-10 against SVHN.

    python -m benchmarks.function_space_pictures --data-root DIR --keep FOLDER --sets fashion-mnist --seeds 0 1 2
    python -m benchmarks.function_space_pictures --data-root DIR --keep FOLDER --sets cifar10 \\
        --outside svhn=npz:svhn.npz --seeds 0 1 2

Follows the shipped recipes `fashion-mnist-function-space` and `cifar10-function-space`. `ffg-w` is the paper's
mean-field posterior, `ffg-u` inducing weights with a quarter of the plain network's parameters, `elbo` is `ffg-w` by
the ordinary ELBO. Measured as stored, with K = 20: accuracy, ECE, and AUROC against the test part of the other set by
entropy and by mutual information. Rows are kept in FOLDER, and the same command goes on where it was stopped; rows of
another `--set` are kept beside them, for tries. A GPU is needed.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import keep_row, kept_rows, machine, spread
from benchmarks.ood import read_outside
from dubito.models import load
from dubito.models.names import Measure
from dubito.models.numerics.parameters import count
from dubito.models.predictions.answers import scores
from dubito.training.config import read_recipe
from dubito.training.evaluation.evaluate import quality
from dubito.training.evaluation.predicting import ChosenPredictive
from dubito.training.metrics import auroc
from dubito.training.recipe import read_parts, train

SAMPLES = 20  # K
SETS = {"fashion-mnist": "mnist", "cifar10": "svhn"}  # and what it is told from
METHODS: dict[str, list[str]] = {
    "ffg-w": [],
    "ffg-u": ["posterior.method=ffg-u", "posterior.options={inducing=24, lam_max=0, sigma_max=10.0, spread=0.05}"],
    "elbo": ["fit.objective=elbo", "fit.kl=1.0", "context={}"],
}
BY: tuple[Measure, ...] = ("entropy", "mutual_information")
FIGURES = ("accuracy", "ece", "nll", *BY)

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    root: Path
    keep: Path
    changes: list[str]
    device: torch.device

    def measure(self, data: str, method: str, seed: int, outside: Tensor) -> Row:
        changes = [*METHODS[method], *self.changes, f"seed={seed}"]
        recipe = read_recipe(f"{data}-function-space", changes)
        tried = "".join(f"-{c}" for c in self.changes).translate(str.maketrans("/={}[], '\"", "_" * 10))
        out = self.keep / f"{data}-{method}-{seed}{tried}.safetensors"
        began = time.perf_counter()
        if not out.exists():
            train(recipe, out, data_root=self.root, device=self.device)
        seconds = time.perf_counter() - began
        model = load(out).to(self.device)
        test = read_parts(recipe, self.root).test
        predictive = ChosenPredictive.of(model, SAMPLES, None)
        inside, far = (predictive.predict(model, x, seed) for x in (test.x, outside))
        near, away = scores(inside), scores(far)
        return {
            "data": data,
            "method": method,
            "seed": seed,
            "set": self.changes,
            "parameters": count(model.network),
            "seconds": seconds,
            **quality(inside, test.y),
            **{name: auroc(near[name], away[name]) for name in BY},
            "aurocs": {name: auroc(values, away[name]) for name, values in near.items()},
            "doubt": {name: [float(one[name].mean()) for one in (near, away)] for name in BY},
            "machine": f"{machine()}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}",
        }


def table_of(rows: list[Row]) -> Table:
    columns = ("data", "method", "set", "seeds", "parameters", "accuracy", "ECE", "NLL")
    table = Table(*columns, "AUROC entropy", "AUROC MI", "seconds", title=f"K = {SAMPLES}, mean ± sd over seeds")
    keys = dict.fromkeys((r["data"], r["method"], tuple(r["set"])) for r in rows)
    for key in keys:
        mine = [r for r in rows if (r["data"], r["method"], tuple(r["set"])) == key]
        cells = [spread([r[name] for r in mine]) for name in FIGURES]
        seconds = sum(r["seconds"] for r in mine) / len(mine)
        parameters = f"{mine[0]['parameters']:,}"
        table.add_row(*key[:2], " ".join(key[2]), str(len(mine)), parameters, *cells, f"{seconds:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True, help="a folder for artifacts, checkpoints and figures")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--outside", nargs="*", default=[], metavar="NAME=SOURCE", help="where mnist or svhn is")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe for all")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(args.data_root, args.keep, args.set, device)
    given = {one.partition("=")[0]: one for one in args.outside}
    file = args.keep / "function-space.jsonl"
    rows = kept_rows(file)
    for data in args.sets:
        name = SETS[data]
        outside = read_outside([given.get(name, name)], args.data_root)[name]
        for seed in args.seeds:
            for method in args.methods:
                key = (data, method, seed, args.set)
                if all((r["data"], r["method"], r["seed"], r["set"]) != key for r in rows):
                    rows.append(bench.measure(data, method, seed, outside))
                    keep_row(file, rows[-1])
                    print({name: round(rows[-1][name], 4) for name in ("seed", *FIGURES, "seconds")}, flush=True)
    Console(width=200).print(table_of(rows))


if __name__ == "__main__":
    main()
