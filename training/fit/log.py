"""Logs of a training run: a CSV file, TensorBoard, a progress bar."""

import csv
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from dubito.models.terminal import duration
from dubito.training.fit.checkpoint import write_whole
from dubito.training.fit.fit import Epoch, FitRun, Progress


def write_csv(log: list[Epoch], path: Path) -> None:
    """Write one line per epoch; the whole file each time, so that a resumed run has no line twice."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [f.name for f in fields(Epoch)])
    writer.writeheader()
    writer.writerows(vars(e) for e in log)
    write_whole(path, text.getvalue().encode())


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Epoch], None]]:
    """A function that writes an epoch's numbers to TensorBoard, if that is installed."""
    if find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def write(epoch: Epoch) -> None:
            for name, value in asdict(epoch).items():
                if value is not None and name != "epoch":
                    writer.add_scalar(name, value, epoch.epoch + 1)

        yield write


@contextmanager
def progress_bar(run: FitRun, title: str) -> Iterator[Callable[[Progress], None]]:
    """A progress bar over all steps, on stderr; if that is not a terminal, a line for each epoch."""
    console = Console(stderr=True)
    total = run.fit.epochs * len(run.batches)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    quiet = run.ranks.index > 0
    began, done = time.monotonic(), run.step
    with rich.progress.Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=run.step, text="")

        def show(p: Progress) -> None:
            text = f"epoch {p.epoch + 1}/{run.fit.epochs}  loss {p.loss:.4g}  NLL {p.nll:.4g}  KL {p.kl:.4g}"
            if p.accuracy is not None:
                text += f"  accuracy {p.accuracy:.2%}"
            bar.update(task, completed=p.epoch * p.steps + p.step, text=text)
            if p.step == p.steps and not quiet and not console.is_terminal:
                now = p.epoch * p.steps + p.step
                left = duration((time.monotonic() - began) / (now - done) * (total - now))
                console.print(
                    f"{title}: {text}{f'  {left} left' if now < total else ''}", highlight=False, soft_wrap=True
                )

        yield show
