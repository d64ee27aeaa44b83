"""Fashion-MNIST: accuracy, calibration, size, and OOD detection against MNIST, for each method.

    python -m benchmarks.fashion --data-root DIR [--download]

Follows the shipped recipe `fashion-mnist`, changed for the baselines as METHODS says, for three seeds each; the OOD
data is MNIST, told apart by each artifact's own default measure. Minutes on a GPU, many hours without one.
"""

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import keep_row, kept_rows, machine, spread
from dubito.models.numerics.parameters import count
from dubito.models.predictions.model import Model
from dubito.training.config import read_recipe
from dubito.training.data.data import DataSet, Examples, part_of
from dubito.training.data.sources import read_data
from dubito.training.evaluation.evaluate import evaluate
from dubito.training.recipe import train

PLAIN = [  # the recipe's plain network, for as long as the recipe trains it
    "tune=none",
    "fit.pretrain_epochs=0",
    "fit.epochs=60",
    "fit.likelihood_epochs=0",
    "fit.warmup_epochs=0",
    "fit.frozen_norm_epochs=0",
    "fit.optimiser=sgd",
    "fit.lr=0.05",
    "fit.weight_decay=5e-4",
    "fit.batch=128",
]
METHODS: dict[str, list[str]] = {
    "deterministic": ["posterior.method=deterministic", "posterior.options={}", *PLAIN],
    "ensemble-w": ["posterior.method=ensemble-w", "posterior.options={members=3}", "fit.samples=3", *PLAIN],
    "ffg-w": ["posterior.method=ffg-w", "posterior.options={}", "tune=none"],
    "ffg-u": [],
    "ensemble-u": [
        "posterior.method=ensemble-u",
        "posterior.options={inducing=32, members=4, lam_share=0.1}",
        "tune.trials=[{spread=0.3}, {spread=0.45}, {spread=0.6}]",
    ],
    "mc-dropout": ["posterior.method=mc-dropout", "posterior.options={}", "tune=none"],
    "subnetwork-laplace": ["posterior.method=subnetwork-laplace", "posterior.options={size=1000}", *PLAIN],
    "whvi": [],
    "function-space": [],
}
USUAL = ("deterministic", "ensemble-w", "ffg-w", "ffg-u", "ensemble-u")
OWN_RECIPES = {"whvi": "fashion-mnist-whvi", "function-space": "fashion-mnist-function-space"}
COLUMNS = (
    "accuracy",
    "ece",
    "nll",
    "auroc",
    "entropy",
    "mutual_information",
    "max_probability",
    "coverage",
    "ood_rate",
)
SAMPLES = 20


def one(method: str, seed: int, changes: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train, calibrate and measure one artifact."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = read_recipe(OWN_RECIPES.get(method, "fashion-mnist"), [*METHODS[method], *changes, f"seed={seed}"])
    fashion, mnist = (read_data(name, args.data_root, download=args.download) for name in ("fashion-mnist", "mnist"))
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder) if args.keep is None else args.keep
        out = keep / f"fashion-{method}-{seed}.safetensors"
        trained = train(recipe, out, data_root=args.data_root, device=device)
        assert trained is not None
        size = out.stat().st_size
    model = trained.model.to(device)
    return {
        "method": method,
        "seed": seed,
        "set": changes,
        "parameters": count(model.network),
        "bytes": size,
        **measured(model, fashion, outside_of(mnist), seed),
        "seconds": sum(e.seconds for e in trained.log),
    }


def outside_of(mnist: DataSet) -> Examples:
    assert mnist.test is not None
    return mnist.test


def measured(model: Model, data: DataSet, outside: Examples, seed: int) -> dict[str, Any]:
    """Figures on the model's test part; AUROC against data from outside, by the default measure and by each."""
    test = part_of(data, model.card)[1]
    figures = evaluate(model, test, {"outside": outside}, samples=SAMPLES, seed=seed).figures
    curve = {row["samples"]: {k: row[k] for k in ("coverage", "ood_rate")} for row in figures["curve"]}
    return {
        **{name: figures[name] for name in ("accuracy", "ece", "nll", "auroc", "measure", "coverage", "ood_rate")},
        **{measure: row["auroc"] for measure, row in figures["ood"]["outside"]["measures"].items()},
        "promises": curve | {"auto": figures.get("auto")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(USUAL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe for all")
    parser.add_argument("--json", type=Path, help="append each run as a line; runs that it holds are not run again")
    parser.add_argument("--keep", type=Path, help="a folder to leave the artifacts in")
    parser.add_argument("--jobs", type=int, default=1, help="trained side by side, each in a process of its own")
    args = parser.parse_args()
    rows = [row for row in kept_rows(args.json) if row.get("set", []) == args.set]
    known = {(row["method"], row["seed"]) for row in rows}
    wanted = [(method, seed) for seed in args.seeds for method in args.methods if (method, seed) not in known]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        tasks = [pool.submit(one, method, seed, args.set, args) for method, seed in wanted]
        for done in as_completed(tasks):
            rows.append(done.result())
            keep_row(args.json, rows[-1])
    table = Table(title=f"Fashion-MNIST, K = {SAMPLES}; AUROC against MNIST, by the default measure and by each")
    for name in ("method", "parameters", *(c.replace("_", " ") for c in COLUMNS), "default measure"):
        table.add_column(name)
    for method in args.methods:
        mine = [row for row in rows if row["method"] == method and row["seed"] in args.seeds]
        cells = [spread([row[name] for row in mine]) for name in COLUMNS]
        measures = sorted({str(row["measure"]) for row in mine})
        table.add_row(method, f"{mine[0]['parameters']:,}", *cells, ", ".join(measures))
    Console(width=200).print(table)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


if __name__ == "__main__":
    main()
