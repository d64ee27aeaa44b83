"""Rotated MNIST: does a posterior over a small subnetwork know more than the network at its most likely weights?

    python -m benchmarks.rotated_mnist --data-root DIR [--download]

One LeNet is trained for each seed, on part of MNIST; all that follows is about that network. Subnetwork Laplace (the
largest variances, random weights, the last layer) and diagonal Laplace over all weights, each in closed form about the
same logits, each with the prior precision that its own grid finds on the validation part. Log-likelihood of the test
part, turned.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine
from dubito.models.jacobian import Linearised
from dubito.models.model import Model
from dubito.models.network import BayesianNetwork
from dubito.models.prediction import evaluating, predict_closed
from dubito.models.uncertainty import Classified
from dubito.training.config import Laplace, read_recipe
from dubito.training.data import Examples, Parts, enter, input_of
from dubito.training.laplace import COARSE, FINE, closed_nll, diagonal, linearise
from dubito.training.metrics import accuracy, nll
from dubito.training.recipe import read_parts, train
from dubito.training.shift import ANGLES, corrupt
from dubito.training.sources import read_data

PLAIN = ["posterior.method=deterministic", "posterior.options={}", "data.augment=[]", "data.validation=0.05"]
FITTED = ["fit.pretrain_epochs=0", "fit.likelihood_epochs=0", "fit.warmup_epochs=0"]
Answer = Callable[[Tensor], Tensor]  # inputs in the network's space -> probabilities


def answers(network: BayesianNetwork, parts: Parts, size: int, seed: int) -> tuple[dict[str, Answer], dict[str, float]]:
    """Each way to answer, and the prior precision that it was given."""
    declared = input_of(parts.train)
    found: dict[str, Answer] = {"MAP": lambda x: network.net(x).softmax(-1)}
    precisions: dict[str, float] = {}
    ways = {
        f"S = {size:,}, variance": Laplace(size=size),
        f"S = {size:,}, random": Laplace(size=size, select="random"),
        "last layer": Laplace(select="last-layer"),
    }
    for name, settings in ways.items():
        made = linearise(network, parts.train, parts.validation, declared, settings, seed).network
        assert made.subnetwork is not None
        precisions[name] = made.subnetwork.entry.prior_precision
        found[name] = closed(made)
    found["diagonal, all weights"], precisions["diagonal, all weights"] = diagonal_laplace(network, parts)
    return found, precisions


def closed(made: BayesianNetwork) -> Answer:
    factors = made.factors()

    def answer(x: Tensor) -> Tensor:
        summary = predict_closed(made, factors, x).summary
        assert isinstance(summary, Classified)
        return summary.probabilities

    return answer


def diagonal_laplace(network: BayesianNetwork, parts: Parts) -> tuple[Answer, float]:
    """A variance for each weight, none between them; linearised and in closed form like the others."""
    declared = input_of(parts.train)
    h = diagonal(network, parts.train, declared, 128)
    every = torch.arange(len(h))
    held = Examples(parts.validation.x[:500], parts.validation.y[:500])

    def moments(x: Tensor, precisions: list[float]) -> tuple[Tensor, list[Tensor]]:
        weights = torch.stack([1 / (h + p) for p in precisions], 1).float()  # (D, n)
        outputs, variances = [], []
        for block in x.split(64):
            there = Linearised(network.net, block, every)
            outputs.append(there.outputs)
            variances.append(torch.stack([J.square() @ weights for J in there.rows()], 1))  # (b, C, n)
        return torch.cat(outputs), list(torch.cat(variances).unbind(-1))

    def scores(precisions: list[float]) -> dict[float, float]:
        f, variances = moments(enter(held.x, declared), precisions)
        return {p: -closed_nll(network, f, v, held.y) for p, v in zip(precisions, variances, strict=True)}

    found = scores(list(COARSE))
    best = max(found, key=found.__getitem__)
    found |= scores([best * 10 ** (n / FINE) for n in range(-FINE + 1, FINE) if n])
    best = max(found, key=found.__getitem__)

    def answer(x: Tensor) -> Tensor:
        f, (v,) = moments(x, [best])
        return (f / (1 + torch.pi / 8 * v).sqrt()).softmax(-1)

    return answer, best


def measure(model: Model, parts: Parts, size: int, seed: int) -> dict[str, dict[str, list[float]]]:
    network, declared = model.network, input_of(parts.train)
    test = parts.test
    with evaluating(network):
        ways, precisions = answers(network, parts, size, seed)
        rows: dict[str, dict[str, list[float]]] = {}
        for angle in (0, *ANGLES):
            x = test.x if angle == 0 else corrupt(test.x, "rotation", angle)
            for name, answer in ways.items():
                p = torch.cat([answer(some).detach() for some in enter(x, declared).split(250)])
                row = rows.setdefault(name, {"log-likelihood": [], "accuracy": [], "precision": []})
                row["log-likelihood"].append(-nll(p, test.y))
                row["accuracy"].append(accuracy(p, test.y))
        for name, precision in precisions.items():
            rows[name]["precision"] = [precision]
    return rows


def some(path: Path, args: argparse.Namespace) -> None:
    """The first examples of MNIST's training part, and of its test part."""
    data = read_data("mnist", args.data_root, download=args.download)
    assert data.test is not None
    parts = {"": (data.train, args.examples), "_test": (data.test, args.pictures)}
    arrays = {f"{key}{name}": getattr(e, key)[:n].numpy() for name, (e, n) in parts.items() for key in ("x", "y")}
    np.savez(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--examples", type=int, default=10_000, help="of the training part")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=1000, help="S")
    parser.add_argument("--pictures", type=int, default=1000, help="of the test part")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            some(Path(folder) / "mnist.npz", args)
            changes = [f'data.name="npz:{folder}/mnist.npz"', f"fit.epochs={args.epochs}", f"seed={seed}"]
            recipe = read_recipe("mnist", [*PLAIN, *FITTED, *changes])
            done = train(recipe, Path(folder) / "lenet.safetensors")
            assert done is not None
            found.append(measure(done.model, read_parts(recipe, None), args.size, seed))
        if args.json:
            print(json.dumps({"seed": seed, "rows": found[-1]}), flush=True)
    table = Table("way", "prior precision", *map(str, (0, *ANGLES)), title=f"log-likelihood by angle; {machine()}")
    for name in found[0]:
        columns = zip(*(rows[name]["log-likelihood"] for rows in found), strict=True)
        precisions = ", ".join(f"{p:.3g}" for rows in found for p in rows[name]["precision"])
        table.add_row(name, precisions, *(f"{sum(values) / len(values):.3f}" for values in columns))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
