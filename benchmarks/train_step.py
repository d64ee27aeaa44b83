"""A training step of an inducing ResNet-50 beside the deterministic one's: the same loop, the same compile settings.

    python -m benchmarks.train_step

On a GPU: CIFAR ResNet-50, M = 64, batch 512, bfloat16, Adam, random pictures. Without one, a small ResNet-18 stands in,
which shows that the command runs and nothing else.
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine, take_turns
from dubito.models import bayesianize, build
from dubito.training.config import Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitRun

STEPS = 20  # of one measurement


KINDS = {  # how a step is run
    "eager": {"graph": False, "compile": False},
    "CUDA graph": {"graph": True, "compile": False},
    "compiled, CUDA graph": {"graph": True, "compile": True},
}


def steps(
    method: str, architecture: str, batch: int, kind: str, device: torch.device, **options: object
) -> Callable[[], None]:
    """A function that takes STEPS steps and waits for the device."""
    torch.manual_seed(0)
    n = batch * STEPS
    train = Examples(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (n,)))
    network = bayesianize(build(architecture), method, start="prior", **options)  # type: ignore[arg-type]
    fit = Fit(epochs=1000, batch=batch, schedule="constant", **KINDS[kind])  # type: ignore[arg-type]
    run = FitRun(network, train, train[:64], input_of(train), fit, 0, device)
    batches = [(x.float() / 255, y, share) for x, y, share in run.batches.epoch(0)]

    def take() -> None:
        for x, y, share in batches:
            run.take_step(x, y, share)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="how steps are run")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    architecture, batch, M = ("resnet50-cifar", 512, 64) if gpu else ("resnet18-cifar", 4, 16)
    table = Table(title=f"{architecture}, batch {batch}, M = {M}")
    for column in ("", "deterministic, ms", "FFG-U, ms", "ratio"):
        table.add_column(column)
    for kind in args.kinds if gpu else ["eager"]:
        rivals = {m: steps(m, architecture, batch, kind, device, inducing=M) for m in ("deterministic", "ffg-u")}
        ms = {m: 1000 * s / STEPS for m, s in take_turns(rivals, args.rounds).items()}
        plain, ours = ms["deterministic"], ms["ffg-u"]
        table.add_row(kind, f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.2f}")
    Console().print(table)
    print(machine(), f"{args.rounds} rounds", torch.cuda.get_device_name() if gpu else "no GPU", sep=", ")


if __name__ == "__main__":
    main()
