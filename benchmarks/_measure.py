"""What every benchmark needs: medians over rounds in which the rivals take turns, and a line about the machine."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import reside
from dubito.service.engine.engine import Engine, PredictRequest
from dubito.service.engine.pass_cache import PassCache
from dubito.service.engine.plans import PlanCache

PLAN_SECONDS = 60.0  # of a server's start, for the plans of one model


def take_turns(rivals: Mapping[str, Callable[[], object]], rounds: int, settle: int = 0) -> dict[str, float]:
    """Median seconds of each; all run once unmeasured, then in turn, so that noise on the machine affects all.

    `settle`: unmeasured runs before each measured one, for rivals whose threads go on spinning after their turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(rivals))
        for turn in range(rounds + 1):
            for name, run in rivals.items():
                for _ in range(settle):
                    run()
                start = time.perf_counter()
                run()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
                progress.advance(task)
    return {name: statistics.median(values) for name, values in seconds.items()}


def kept_rows(file: Path | None) -> list[dict[str, Any]]:
    """Rows that earlier runs have written to a file, one per line."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []


def keep_row(file: Path | None, row: dict[str, Any]) -> None:
    """Append a row to the file, if there is one."""
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def machine() -> str:
    """Date, hardware, versions and commit: what a figure in RESULTS.md must say."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    state = (commit.stdout.strip() or "no commit") + (" and uncommitted changes" if dirty.stdout.strip() else "")
    threads = f"{torch.get_num_threads()} threads"
    return f"{date.today()}, {platform.machine()}, {threads}, torch {torch.__version__}, commit {state}"


def answering(model: Model, x: Tensor, K: int, *, compiled: bool = True) -> Callable[[], object]:
    """Answers of a server's engine to one request without a seed, on a GPU if there is one.

    `compiled`: passes by onnxruntime where these are faster, on a CPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    with TemporaryDirectory() as folder:
        passes = PassCache(Path(folder)) if compiled and not on_gpu else None
        plans = PlanCache(None, device) if on_gpu else None
        resident = reside(model, device, torch.bfloat16 if on_gpu else torch.float32)
        engine = Engine(resident, (len(x),), plans, PLAN_SECONDS, pass_cache=passes)
        engine.warm(K, nullcontext())
    request = PredictRequest(x.numpy(), K, None, K, 0.05, closed=model.method == "probit")
    return lambda: engine.answer([request])
