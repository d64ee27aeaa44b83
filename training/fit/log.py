"""What a run leaves behind about itself, and what it shows while it goes: a CSV file, TensorBoard, a progress bar."""

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dubito.training.fit.checkpoint import write_whole
from dubito.training.fit.fit import Epoch, Run, Told


def write_csv(log: list[Epoch], path: Path) -> None:
    """One line for each epoch; written anew each time, so that a resumed run has no line twice."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [f.name for f in fields(Epoch)])
    writer.writeheader()
    writer.writerows(vars(e) for e in log)
    write_whole(path, text.getvalue().encode())


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Epoch], None]]:
    """Takes each epoch's numbers, where TensorBoard is installed."""
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
def progress(run: Run, title: str) -> Iterator[Callable[[Told], None]]:
    """A bar over all steps of the run, on stderr; where that is no terminal, a line for each epoch."""
    console = Console(stderr=True)
    total = run.fit.epochs * len(run.batches)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    quiet = run.ranks.index > 0
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=run.step, said="")

        def tell(told: Told) -> None:
            said = (
                f"epoch {told.epoch + 1}/{run.fit.epochs}  loss {told.loss:.4g}  NLL {told.nll:.4g}  KL {told.kl:.4g}"
            )
            if told.accuracy is not None:
                said += f"  accuracy {told.accuracy:.2%}"
            bar.update(task, completed=told.epoch * told.steps + told.step, said=said)
            if told.step == told.steps and not quiet and not console.is_terminal:
                console.print(f"{title}: {said}", highlight=False)

        yield tell
