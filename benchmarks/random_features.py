"""UCI classification sets by random Fourier features and Walsh–Hadamard VI (whvi-gp), beside [Rossi20, table 9].

    python -m benchmarks.random_features --data-root DIR --jobs 2 --keep FILE

DIR holds UCI/classification/ with eeg_eye_state.arff, magic04.data and letter-recognition.data. Of each division a
tenth of the rows, chosen at random, are the test part; the rest goes to the recipe `uci-whvi-gp` with the changes
below, which holds out 15 % of it for validation and calibration. Error rate and mean negative log-likelihood are those
that `dubito train` writes into the artifact. Rows of FILE are not measured again; `--seconds` starts no further run
after that time.
"""

import argparse
import io
import math
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.training.config import read_recipe
from dubito.training.recipe import train

FILES = {"eeg": "eeg_eye_state.arff", "magic": "magic04.data", "letter": "letter-recognition.data"}
QUANTILES = (0.001, 0.999)  # of the training rows: a few values of EEG are 100 times the others, and are clipped there
CHANGES = [
    "task=classification",
    "noise=none",
    "fit.epochs=30",
    "fit.warmup_epochs=4",
    "fit.batch=128",
]
# [Rossi20, supplement, table 9]: WHVI, two hidden layers of 512, mean ± standard deviation
PUBLISHED = {
    "eeg": {"error": "0.17 ± 0.01", "nll": "0.52 ± 0.37"},
    "magic": {"error": "0.13 ± 0.01", "nll": "0.31 ± 0.01"},
    "letter": {"error": "0.40 ± 0.01", "nll": "0.97 ± 0.01"},
}


def rows_of(name: str, root: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Features, and classes as numbers."""
    lines = (root / "UCI" / "classification" / FILES[name]).read_text().splitlines()
    cells = [line.split(",") for line in lines if line.strip() and not line.startswith("@")]
    at = 0 if name == "letter" else -1
    labels = sorted({row[at] for row in cells})
    x = [[float(v) for v in (row[1:] if name == "letter" else row[:-1])] for row in cells]
    return np.array(x, np.float32), np.array([labels.index(row[at]) for row in cells])


def measure(name: str, split: int, features: int, root: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    x, y = rows_of(name, root)
    order = np.random.default_rng(split).permutation(len(x))
    test, rest = order[: len(x) // 10], order[len(x) // 10 :]
    if name == "eeg":
        x = np.clip(x, *np.quantile(x[rest], QUANTILES, axis=0)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        np.savez(Path(folder) / "data.npz", x=x[rest], y=y[rest], x_test=x[test], y_test=y[test])
        changes = [
            *CHANGES,
            f"data.name=npz:{folder}/data.npz",
            f"network.arguments={{features={features}, standardise=true}}",
            f"seed={split}",
        ]
        began = time.perf_counter()
        trained = train(read_recipe("uci-whvi-gp", changes), Path(folder) / "model.safetensors")
    assert trained is not None
    metrics = trained.model.card.metrics
    parameters = sum(p.numel() for p in trained.model.network.parameters())
    figures = {"error": 1 - metrics["accuracy"], "nll": metrics["nll"], "ece": metrics["ece"]}
    return {**figures, "parameters": parameters, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=FILES, default=[*FILES])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further run after so many")
    parser.add_argument("--keep", type=Path, help="a file for the figures of each run, which are not measured again")
    args = parser.parse_args()
    rows: dict[str, Any] = {row["run"]: row["figures"] for row in kept_rows(args.keep)}
    runs = {f"{name}-{i}-{args.features}": (name, i) for i in range(args.splits) for name in args.sets}
    left, ends = [run for run in runs if run not in rows], time.monotonic() + args.seconds
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        while left and time.monotonic() < ends:
            some, left = left[: args.jobs], left[args.jobs :]
            for run, found in [(run, pool.submit(measure, *runs[run], args.features, args.data_root)) for run in some]:
                rows[run] = found.result()
                keep_row(args.keep, {"run": run, "figures": rows[run]})
    table = Table("set", "divisions", "error", "published", "NLL", "published", "ECE", "parameters", "seconds")
    for name in args.sets:
        found_ = [rows[run] for run, (of, _) in runs.items() if of == name and run in rows]
        if not found_:
            continue

        def said(key: str, found: list[dict[str, float]] = found_) -> str:
            values = [row[key] for row in found]
            return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else math.nan:.3f}"

        published = PUBLISHED[name]
        sizes = [f"{found_[0]['parameters']:,}", f"{statistics.mean(row['seconds'] for row in found_):.0f}"]
        cells = [said("error"), published["error"], said("nll"), published["nll"], said("ece"), *sizes]
        table.add_row(name, str(len(found_)), *cells)
    console = Console()
    console.print(table)
    console.print(f"mean ± standard deviation over divisions; {len(left)} runs left; {machine()}")


if __name__ == "__main__":
    main()
