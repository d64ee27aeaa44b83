"""UCI regression sets over their standard divisions, each trained by the recipe `uci`, beside published numbers.

    python -m benchmarks.uci --data-root DIR --sets boston concrete energy yacht --jobs 2
    python -m benchmarks.uci --data-root DIR --method whvi --jobs 2

The second follows the recipe `uci-whvi`, for as many steps in every set (as the paper does, with 50,000 of them), and
stands beside published networks of the same size.

DIR holds UCI/standard/NAME/data/ with data.txt and the index files of the literature. RMSE and negative log-likelihood
(of a Gaussian with the mean and variance of 20 draws) are of the test part, in the targets' own units. Of the training
part, 15 % are held out for validation and calibration, as for any artifact.
"""

import argparse
import io
import json
import math
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks._measure import machine
from dubito.models.names import METHODS
from dubito.training.config import read_recipe
from dubito.training.recipe import read_parts, train
from dubito.training.sources import read_data

FIGURES = ("rmse", "nll")
STEPS = 5000  # of WHVI
RIVALS = ("MCD", "MFG", "WHVI")
PUBLISHED: dict[str, dict[str, tuple[str, ...]]] = {  # [Rossi20, supplement, table 2], in the order of RIVALS
    "rmse": {
        "boston": ("3.40 (0.66)", "3.04 (0.64)", "2.56 (0.15)"),
        "concrete": ("4.60 (0.53)", "5.24 (0.53)", "5.01 (0.25)"),
        "energy": ("1.18 (0.03)", "1.52 (0.09)", "1.20 (0.07)"),
        "kin8nm": ("0.09 (0.00)", "0.10 (0.00)", "0.12 (0.01)"),
        "naval": ("0.00 (0.00)", "0.01 (0.00)", "0.01 (0.00)"),
        "power": ("4.20 (0.12)", "4.23 (0.13)", "4.11 (0.12)"),
        "protein": ("4.35 (0.04)", "4.74 (0.05)", "4.64 (0.07)"),
        "yacht": ("1.72 (0.32)", "1.78 (0.45)", "0.96 (0.20)"),
    },
    "nll": {
        "boston": ("5.04 (1.76)", "3.19 (0.89)", "2.55 (0.15)"),
        "concrete": ("2.96 (0.23)", "3.03 (0.15)", "2.95 (0.06)"),
        "energy": ("3.00 (0.07)", "3.49 (0.11)", "3.01 (0.12)"),
        "kin8nm": ("-1.09 (0.04)", "-1.01 (0.04)", "-0.78 (0.10)"),
        "naval": ("-9.93 (0.01)", "-6.48 (0.02)", "-6.25 (0.01)"),
        "power": ("2.76 (0.03)", "2.77 (0.03)", "2.74 (0.03)"),
        "protein": ("2.80 (0.01)", "2.89 (0.01)", "2.86 (0.01)"),
        "yacht": ("2.73 (0.74)", "2.02 (0.46)", "1.28 (0.22)"),
    },
}

OF_128 = {  # the same paper's WHVI with two hidden layers of 128, tables 7 and 8, mean ± standard deviation
    "rmse": {
        "boston": "3.14 ± 0.71",
        "concrete": "4.70 ± 0.72",
        "energy": "0.58 ± 0.07 (two outputs)",
        "kin8nm": "0.08 ± 0.00",
        "naval": "0.01 ± 0.00",
        "power": "4.00 ± 0.12",
        "protein": "4.36 ± 0.11",
        "yacht": "0.69 ± 0.16",
    },
    "nll": {
        "boston": "4.33 ± 1.80",
        "concrete": "3.17 ± 0.37",
        "energy": "2.00 ± 0.60 (two outputs)",
        "kin8nm": "-1.19 ± 0.04",
        "naval": "-6.25 ± 0.01",
        "power": "2.71 ± 0.03",
        "protein": "2.79 ± 0.01",
        "yacht": "1.80 ± 1.01",
    },
}


def splits_of(name: str, root: Path) -> int:
    read_data(f"uci/{name}", root)  # or a clear error
    return len(list((root / "UCI" / "standard" / name / "data").glob("index_train_*.txt")))


def measure(name: str, split: int, method: str, root: Path) -> dict[str, float]:
    """What `dubito train uci` (or `uci-whvi`) writes into the artifact of this division."""
    torch.set_num_threads(1)
    recipe = "uci-whvi" if method == "whvi" else "uci"
    changes = [f"data.name=uci/{name}", f"data.split={split}", f"posterior.method={method}"]
    if method == "whvi":
        told = read_recipe(recipe, changes)
        parts = read_parts(told, root)
        epochs = round(STEPS / math.ceil(len(parts.train) / told.fit.batch))
        for phase in ("epochs", "likelihood_epochs", "warmup_epochs"):  # as long as the recipe has them, in proportion
            changes.append(f"fit.{phase}={round(epochs * getattr(told.fit, phase) / told.fit.epochs)}")
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # its line for each epoch
        trained = train(read_recipe(recipe, changes), Path(folder) / "model.safetensors", data_root=root)
    assert trained is not None
    return {key: trained.model.card.metrics[key] for key in FIGURES}


def measure_all(
    counts: dict[str, int], method: str, root: Path, jobs: int, keep: Path | None
) -> dict[str, list[dict[str, float]]]:
    """Each set's divisions, in order."""
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in counts}
    if keep is not None and keep.exists():
        for row in map(json.loads, keep.read_text().splitlines()):
            if row["method"] == method and row["split"] < counts.get(row["set"], 0):
                found[row["set"]][row["split"]] = row["figures"]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: more threads than cores would wait for each other
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        asked = {
            pool.submit(measure, name, split, method, root): (name, split)
            for name, n in counts.items()
            for split in range(n)
            if split not in found[name]
        }
        task = progress.add_task("training", total=len(asked))
        for done in as_completed(asked):
            name, split = asked[done]
            found[name][split] = done.result()
            if keep is not None:
                line = {"method": method, "set": name, "split": split, "figures": found[name][split]}
                with keep.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            progress.advance(task)
    return {name: [rows[split] for split in sorted(rows)] for name, rows in found.items()}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean over divisions and its standard error; NaN for one division."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["boston", "concrete", "energy", "yacht"])
    parser.add_argument("--splits", type=int, help="the first so many of each set; without it, all")
    parser.add_argument("--method", default="ffg-u", choices=METHODS)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--json", action="store_true", help="every division's figures instead of a table")
    parser.add_argument("--keep", type=Path, help="a file for each division's figures, where those of last time count")
    args = parser.parse_args()
    counts = {name: splits_of(name, args.data_root) for name in args.sets}
    if args.splits is not None:
        counts = {name: min(n, args.splits) for name, n in counts.items()}
    found = measure_all(counts, args.method, args.data_root, args.jobs, args.keep)
    if args.json:
        print(json.dumps({"method": args.method, "machine": machine(), "sets": found}))
        return
    console = Console()
    for figure in FIGURES:
        whvi = args.method == "whvi"
        rivals = ("WHVI, two layers of 128",) if whvi else RIVALS
        where = "tables 7 and 8" if whvi else "table 2"
        table = Table(title=f"{figure.upper()}; published: Rossi et al. 2020, supplement, {where}")
        for column in ("set", "divisions", f"{args.method}, mean ± standard error", *rivals):
            table.add_column(column, justify="left" if column == "set" else "right")
        for name, rows in found.items():
            mean, error = mean_and_error([row[figure] for row in rows])
            published = PUBLISHED[figure].get(name, ("",) * len(RIVALS))
            if whvi:
                published = (OF_128[figure].get(name, ""),)
            table.add_row(name, str(len(rows)), f"{mean:.3f} ± {error:.3f}", *published)
        console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
