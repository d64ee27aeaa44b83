"""`dubito score` beside the engine alone: rows per second of full batches back to back, and with reading and writing.

Both sides run in one process on the same rows with the same engine, seed and batches, and take turns. The engine's side
gets its batches from memory and drops the answers; the other reads a file, writes parts with fsync and assembles them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from dubito.models import bayesianize, build, save
from dubito.models.manifest import Card, Input
from dubito.service.engine.device import devices_of
from dubito.service.scoring.parts import ScoringJob
from dubito.service.scoring.score import Scorer, Scoring, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256, help="units of each of the two hidden layers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    (device,) = devices_of([args.device], "--device")
    table = Table(title=machine())
    for name in ("input", "engine alone, rows/s", "dubito score, rows/s", "ratio", "least and most"):
        table.add_column(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        net = build("mlp", inputs=64, hidden=[args.hidden, args.hidden], outputs=10)
        save(bayesianize(net, "ffg-u", inducing=32), root / "m.safetensors", card=Card(input=Input(shape=(64,))))
        x = np.random.default_rng(0).normal(size=(args.rows, 64)).astype(np.float32)
        np.save(root / "x.npy", x)
        columns = pa.table({f"c{i}": x[:, i] for i in range(64)})
        pq.write_table(columns, root / "x.parquet", row_group_size=10_000)
        for kind in ("npy", "parquet"):
            asked = Scoring(root / "m.safetensors", str(root / f"x.{kind}"), root / "o", args.samples, batch=args.batch)
            scorer = Scorer(asked, device)
            with scorer.folder.alone():
                job = scorer.prepare()
                alone, whole = [], []
                for i in range(args.rounds + 1):
                    sides = (alone_seconds(scorer, job, x), whole_seconds(scorer, job))
                    if i:  # the first round warms
                        alone.append(args.rows / sides[0])
                        whole.append(args.rows / sides[1])
            ratios = sorted(w / a for a, w in zip(alone, whole, strict=True))
            a, w = statistics.median(alone), statistics.median(whole)
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            table.add_row(kind, f"{a:,.0f}", f"{w:,.0f}", f"{statistics.median(ratios):.3f}", spread)
            scorer.folder.clear()
            title = f"batch {job.batch}, parts of {job.part} rows, K = {args.samples}, {device}"
    table.caption = f"{args.rows:,} rows, {args.rounds} rounds, {title}"
    Console().print(table)


def alone_seconds(scorer: Scorer, job: ScoringJob, x: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> float:
    began = time.perf_counter()
    for _ in results(scorer.engine, (scorer.request(a, x[a : a + job.batch]) for a in range(0, len(x), job.batch))):
        pass
    return time.perf_counter() - began


def whole_seconds(scorer: Scorer, job: ScoringJob) -> float:
    """From the first row read to the output in its place."""
    folder = scorer.folder
    began = time.perf_counter()
    scorer.score(range(job.parts), job, lambda rows: None)
    folder.assemble(job, scorer.about())
    seconds = time.perf_counter() - began
    folder.path.mkdir(exist_ok=True)
    folder.begin(job)
    return seconds


if __name__ == "__main__":
    main()
