"""Prediction sets by each rule, over random divisions of held-out data: coverage, size, and coverage by size.

The embedded digits (K = 20), and plain networks that are trained here in seconds on a CPU: LeNet on Fashion-MNIST
(three epochs of 12,000 pictures) and an MLP on UCI's letter recognition (26 letters, ten epochs of 5,100 examples).
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from dubito.models import bayesianize, load, save
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Sets
from dubito.models.predictions.model import Model
from dubito.models.predictions.sets import Probabilities, Scores, class_scores
from dubito.models.predictions.uncertainty import Classified
from dubito.training.calibrate import choose_sets, outer_quantile
from dubito.training.config import Calibrate, Data, Fit, Network, PosteriorOptions, Recipe
from dubito.training.data.data import Parts, divide, input_of
from dubito.training.data.sources import read_data
from dubito.training.evaluation.predicting import draws_for, predict_grid
from dubito.training.fit.fit import FitRun
from dubito.training.recipe import build_network, task_of

HELD = 1000  # calibration examples, or half of what there is
TRAINED_ON, MOST = 12_000, 8_000  # training examples, and held-out ones, at most
COVERAGES = {"digits": (0.9, 0.99), "fashion-mnist": (0.9, 0.95, 0.99), "letter": (0.9, 0.95, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["digits"], help=f"some of: {', '.join(COVERAGES)}")
    parser.add_argument(
        "--data-root", type=Path, help="with FashionMNIST/ and UCI/classification/letter-recognition.data"
    )
    parser.add_argument("--divisions", type=int, default=200)
    args = parser.parse_args()
    console = Console(width=150)
    for name in args.names:
        model, parts = made(name, args.data_root)
        held = [parts.calibration, parts.test]
        x, y = (torch.cat(some)[:MOST] for some in ([part.x for part in held], [part.y for part in held]))
        K = draws_for(model, 20)
        summary = predict_grid(model, x, [K], 0)[K]
        assert isinstance(summary, Classified)
        p = summary.probabilities.numpy()
        right = float((p.argmax(1) == y.numpy()).mean())
        title = f"{name}: {len(y):,} held-out examples, {p.shape[1]} classes, accuracy {right:.1%}"
        columns = ("asked", "rule", "coverage", "mean size", "empty", "size 1", "size 2", "size 3+", "hardest fifth")
        table = Table(*columns, title=title)
        for coverage in COVERAGES[name]:
            raps = choose_sets(model, parts.validation, Calibrate(coverage=coverage, sets="raps"), 0)
            assert raps is not None
            for rule, scores in rules(p, raps):
                table.add_row(f"{coverage:.0%}", rule, *figures(p, y.numpy(), scores, coverage, args.divisions))
        console.print(table)
    console.print(machine())


def rules(p: Probabilities, raps: Sets) -> Iterator[tuple[str, Scores]]:
    yield "1 − p, as in format 1", class_scores(p, None)
    yield "1 − p", class_scores(p, Sets(score="probability"))
    yield "APS", class_scores(p, Sets())
    yield f"RAPS, λ {raps.lam:g}, k {raps.k_reg}", class_scores(p, raps)
    yield "APS up to and with y, first added", class_scores(p, Sets()) + p


def figures(p: Probabilities, y: NDArray[np.int64], scores: Scores, coverage: float, divisions: int) -> list[str]:
    """Means over divisions; the standard error is that of the mean coverage over them."""
    rng, rows = np.random.default_rng(0), np.arange(len(y))
    held = min(HELD, len(y) // 2)
    added = (scores[rows, p.argmax(1)] > 0).all() and (
        scores != class_scores(p, None)
    ).any()  # the first class is not within by itself
    sizes_hits, per_division = np.zeros((4, 2)), []
    for _ in range(divisions):
        order = rng.permutation(len(y))
        one, rest = order[:held], order[held:]
        fits = scores[rest] <= outer_quantile(torch.from_numpy(scores[one, y[one]]), coverage)
        if added:
            fits[np.arange(len(rest)), p[rest].argmax(1)] = True
        hit, size = fits[np.arange(len(rest)), y[rest]], fits.sum(1)
        hardest = p[rest].max(1).argsort()[: len(rest) // 5]
        per_division.append((hit.mean(), size.mean(), (size == 0).mean(), hit[hardest].mean()))
        for n in range(1, 4):
            mine = size == n if n < 3 else size >= 3
            sizes_hits[n] += mine.sum(), hit[mine].sum()
    means, error = np.mean(per_division, 0), np.std(per_division, 0)[0] / np.sqrt(divisions)
    by_size = [f"{hits / n:.1%}" if n >= 10 * divisions else "" for n, hits in sizes_hits[1:]]  # of ten a division
    return [f"{means[0]:.2%} ± {error:.2%}", f"{means[1]:.3f}", f"{means[2]:.1%}", *by_size, f"{means[3]:.1%}"]


def made(name: str, root: Path | None) -> tuple[Model, Parts]:
    if name == "digits":
        return load(embedded("digits")), divide(read_data("digits"), 0.05, 0.2, 0.2, 0)
    assert root is not None, "--data-root says where the data lies"
    with tempfile.TemporaryDirectory() as folder:
        if name == "fashion-mnist":
            fit = Fit(epochs=3, batch=128, lr=2e-3)
            return fitted(Data(name=name, validation=0.03), Network(architecture="lenet"), fit, root, Path(folder))
        table = Path(folder) / "letter.csv"
        letters = (root / "UCI" / "classification" / "letter-recognition.data").read_text()
        table.write_text(f"letter,{','.join(f'x{i}' for i in range(16))}\n{letters}")
        network = Network(architecture="mlp", arguments={"hidden": [128, 128], "standardise": True})
        data = Data(name=f"csv:{table}", target="letter", test=0.7)
        return fitted(data, network, Fit(epochs=10, batch=64, lr=2e-3), root, Path(folder))


def fitted(data: Data, network: Network, fit: Fit, root: Path, folder: Path) -> tuple[Model, Parts]:
    recipe = Recipe(data=data, network=network, posterior=PosteriorOptions(method="deterministic"), fit=fit)
    source = read_data(data.name, root, target=data.target)
    parts = divide(source, data.validation, data.calibration, data.test, 0)
    declared = input_of(parts.train)
    torch.manual_seed(0)
    net = build_network(recipe, parts, declared)
    plain = bayesianize(net, "deterministic", task=task_of(parts))
    run = FitRun(plain, parts.train[:TRAINED_ON], parts.validation, declared, fit, 0, torch.device("cpu"))
    began = time.perf_counter()
    while not run.done:
        run.epoch()
    print(f"{data.name.partition(':')[0]}: trained in {time.perf_counter() - began:.0f} s")
    path = folder / "model.safetensors"
    save(run.finish(), path, card=Card(input=declared, labels=parts.labels))
    return load(path), parts


if __name__ == "__main__":
    main()
