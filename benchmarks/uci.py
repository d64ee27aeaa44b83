"""UCI regression sets over their published divisions, each trained by a shipped recipe, beside published numbers.

    python -m benchmarks.uci --data-root DIR --jobs 2 --keep FILE
    python -m benchmarks.uci --data-root DIR --gap --plain --jobs 2 --keep FILE
    python -m benchmarks.uci --data-root DIR --method whvi --sets boston concrete energy yacht --jobs 2

The first follows the recipe `uci-ensemble` over the standard divisions; the second over those whose test part is the
middle third of one feature, with the plain network beside. The third follows `uci-whvi`, and stands beside published
networks of the same size; `--method ffg-u` follows `uci`. With the first two recipes every set gets as many steps (the
WHVI paper does the same, with 50,000 of them), but at least `LEAST` epochs.

DIR holds UCI/standard/NAME/data/ with data.txt and the index files of the literature, and UCI/gap/NAME/data/ with
further index files. RMSE and negative log-likelihood (of a Gaussian with the mean and variance of 20 draws) are of the
test part, in the targets' own units. Of the training part, 15 % are held out for validation and calibration, as for any
artifact. The plain network is the same recipe with one set of weights: its noise is fitted in the same way.
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

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models.names import METHODS
from dubito.training.config import read_recipe
from dubito.training.data.sources import UCI, read_data, splits_in
from dubito.training.recipe import read_parts, train

FIGURES = ("rmse", "nll")
SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
LARGE = 5000  # rows of a training part: beyond it a batch has BATCH rows
BATCH = 128
STEPS = {"uci-ensemble": 3000, "uci-whvi": 5000}
LEAST = 40  # epochs of `uci-ensemble`
PLAIN = "deterministic"
RECIPES = {  # others: uci
    None: "uci-ensemble",
    PLAIN: "uci-ensemble",
    "ensemble-w": "uci-ensemble",
    "whvi": "uci-whvi",
    "gi": "uci-gi",
    "dgp": "uci-dgp",
    "dsvi": "uci-dsvi",
    "whvi-gp": "uci-whvi-gp",
}
# Deep ensembles (DE): [Lakshminarayanan17, table 1]. MC dropout (MCD′): the grid search of 2018 in the repository
# DropoutUncertaintyExps, since the first paper's tuning had met test parts. Both over the same divisions as ours.
RIVALS = ("MCD′", "DE")
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {  # in the order of RIVALS
    "rmse": {
        "boston": (2.90, 3.28),
        "concrete": (4.82, 6.03),
        "energy": (0.54, 2.09),
        "kin8nm": (0.08, 0.09),
        "naval": (0.00, 0.00),
        "power": (4.01, 4.11),
        "protein": (4.27, 4.71),
        "wine": (0.62, 0.64),
        "yacht": (0.67, 1.58),
    },
    "nll": {
        "boston": (2.40, 2.41),
        "concrete": (2.93, 3.06),
        "energy": (1.21, 1.38),
        "kin8nm": (-1.14, -1.20),
        "naval": (-4.45, -5.63),
        "power": (2.80, 2.79),
        "protein": (2.87, 2.83),
        "wine": (0.93, 0.94),
        "yacht": (1.25, 1.18),
    },
}

OF_128 = {  # [Rossi20, supplement, tables 7 and 8]: WHVI with two hidden layers of 128, mean ± standard deviation
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


def splits_of(data: str, root: Path) -> int:
    read_data(data, root)  # or a clear error
    kind, _, name = data.partition("/")
    return splits_in(root / "UCI" / UCI[kind] / name / "data")


def changes_for(data: str, split: int, method: str | None, root: Path) -> tuple[str, list[str]]:
    """The recipe of this division and the changes to it: the method, and epochs by the size of the set."""
    recipe = RECIPES.get(method, "uci")
    changes = [f"data.name={data}", f"data.split={split}"]
    if method == PLAIN:
        changes += [f"posterior.method={method}", "posterior.options={}", "fit.samples=1"]
    elif recipe not in STEPS:
        return recipe, [*changes, *([f"posterior.method={method}"] if recipe == "uci" else [])]
    given = read_recipe(recipe, changes)
    rows, batch, least = len(read_parts(given, root).train), given.fit.batch, 1
    if recipe == "uci-ensemble":
        least = LEAST
        batch = BATCH if rows > LARGE else batch
        changes.append(f"fit.batch={batch}")
    epochs = max(least, round(STEPS[recipe] / math.ceil(rows / batch)))
    for phase in ("epochs", "likelihood_epochs", "warmup_epochs", "noise_epochs"):  # in the recipe's own proportions
        changes.append(f"fit.{phase}={round(epochs * getattr(given.fit, phase) / given.fit.epochs)}")
    if given.fit.patience is not None:
        changes.append(f"fit.patience={max(1, round(epochs * given.fit.patience / given.fit.epochs))}")
    return recipe, changes


def measure(data: str, split: int, method: str | None, root: Path) -> dict[str, float]:
    """Figures that `dubito train` writes into the artifact of this division; method None: the recipe's own."""
    torch.set_num_threads(1)
    recipe, changes = changes_for(data, split, method, root)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # its line for each epoch
        trained = train(read_recipe(recipe, changes), Path(folder) / "model.safetensors", data_root=root)
    assert trained is not None
    return {key: trained.model.card.metrics[key] for key in FIGURES}


def measure_all(
    counts: dict[str, int], methods: list[str | None], root: Path, jobs: int, keep: Path | None
) -> dict[str | None, dict[str, list[dict[str, float]]]]:
    """Figures by method, set and division; None is the recipe's own method."""
    figures: dict[str | None, dict[str, dict[int, dict[str, float]]]]
    figures = {method: {data: {} for data in counts} for method in methods}
    for row in kept_rows(keep):
        if row["method"] in figures and row["split"] < counts.get(row["set"], 0):
            figures[row["method"]][row["set"]][row["split"]] = row["figures"]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: more threads than cores would wait for each other
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        futures = {
            pool.submit(measure, data, split, method, root): (data, split, method)
            for data, n in counts.items()
            for split in range(n)
            for method in methods
            if split not in figures[method][data]
        }
        task = progress.add_task("training", total=len(futures))
        for done in as_completed(futures):
            data, split, method = futures[done]
            figures[method][data][split] = done.result()
            keep_row(keep, {"method": method, "set": data, "split": split, "figures": figures[method][data][split]})
            progress.advance(task)
    return {
        method: {data: [rows[split] for split in sorted(rows)] for data, rows in sets.items()}
        for method, sets in figures.items()
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean over divisions and its standard error; NaN for one division."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--splits", type=int, help="the first so many of each set; without it, all")
    parser.add_argument(
        "--gap", action="store_true", help="the divisions with a gap in one feature, not the standard ones"
    )
    parser.add_argument("--method", choices=METHODS, help="another than the ensemble")
    parser.add_argument("--plain", action="store_true", help="the plain network beside it")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--json", action="store_true", help="every division's figures instead of a table")
    parser.add_argument("--keep", type=Path, help="a file for each division's figures, where those of last time count")
    args = parser.parse_args()
    kind = "uci-gap" if args.gap else "uci"
    counts = {f"{kind}/{name}": splits_of(f"{kind}/{name}", args.data_root) for name in args.sets}
    if args.splits is not None:
        counts = {data: min(n, args.splits) for data, n in counts.items()}
    methods = [args.method, *([PLAIN] if args.plain and args.method != PLAIN else [])]
    figures = measure_all(counts, methods, args.data_root, args.jobs, args.keep)
    named = {method or read_recipe("uci-ensemble").posterior.method: sets for method, sets in figures.items()}
    if args.json:
        print(json.dumps({"machine": machine(), "methods": named}))
        return
    console = Console()
    for figure in FIGURES:
        console.print(table_of(figure, named, {} if args.gap else published_for(args.method, figure)))
    if not args.gap and args.method != "whvi":
        console.print(counted(next(iter(named.values()))))
    console.print(machine())


def published_for(method: str | None, figure: str) -> dict[str, dict[str, str]]:
    """Published figures by rival and set."""
    if method == "whvi":
        return {"WHVI, two layers of 128 (Rossi et al. 2020)": OF_128[figure]}
    rows = PUBLISHED[figure].items()
    return {rival: {name: f"{values[i]:.2f}" for name, values in rows} for i, rival in enumerate(RIVALS)}


def table_of(
    figure: str, results: dict[str, dict[str, list[dict[str, float]]]], published: dict[str, dict[str, str]]
) -> Table:
    table = Table(title=f"{figure.upper()}, mean ± standard error")
    for column in ("set", "divisions", *results, *published):
        table.add_column(column, justify="left" if column == "set" else "right")
    first = next(iter(results.values()))
    for data in first:
        name = data.partition("/")[2]
        cells = []
        for sets in results.values():
            mean, error = mean_and_error([row[figure] for row in sets[data]])
            cells.append(f"{mean:.3f} ± {error:.3f}")
        table.add_row(data, str(len(first[data])), *cells, *(rows.get(name, "") for rows in published.values()))
    return table


def counted(results: dict[str, list[dict[str, float]]]) -> str:
    """Number of sets whose NLL is no worse than the published one, to its two decimals."""
    means = {data.partition("/")[2]: mean_and_error([r["nll"] for r in rows])[0] for data, rows in results.items()}
    said = []
    for i, rival in enumerate(RIVALS):
        better = [name for name, mean in means.items() if round(mean, 2) <= PUBLISHED["nll"][name][i]]
        said.append(f"than {rival}'s on {len(better)} of {len(means)} ({', '.join(better)})")
    return f"NLL no worse {'; '.join(said)}"


if __name__ == "__main__":
    main()
