"""Rotated MNIST: does a posterior over a small subnetwork know more than the network at its most likely weights?

    python -m benchmarks.rotated_mnist --data-root DIR [--download] [--net lenet]

One network is trained for each seed, on part of MNIST; all that follows is about that network. Subnetwork Laplace (the
largest variances, random weights, the last layer) and diagonal Laplace over all weights, each in closed form about the
same logits, each with the prior precision that its own grid finds on the validation part. Log-likelihood of the test
part, turned. Wanted, as in figure 4 of the paper: from 60° to 180° the largest variances are better than the network as
it is and than diagonal Laplace.

The network is a small ResNet with BatchNorm, trained by SGD with a little weight decay, as the paper's. Plain ReLU
networks have units that hardly any training input reaches: `--net lenet` shows what becomes of the largest variances.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import machine
from dubito.models import bayesianize, build
from dubito.models.network.jacobian import Linearised
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.subnetwork import Selection
from dubito.models.predictions.prediction import evaluating, predict_closed
from dubito.models.predictions.uncertainty import Classified
from dubito.models.terminal import remark
from dubito.training.config import Fit, Laplace
from dubito.training.data.data import DataSet, Parts, divide, enter, input_of
from dubito.training.data.sources import read_data
from dubito.training.evaluation.shift import corrupt
from dubito.training.fit.fit import FitRun
from dubito.training.laplace import COARSE, FINE, closed_nll, diagonal, linearise
from dubito.training.metrics import accuracy, nll

ANGLES = (0, 30, 60, 90, 120, 150, 180)
SELECTIONS: tuple[Selection, ...] = ("variance", "random", "last-layer")
HELD = 500  # validation images, which choose every prior precision
Answer = Callable[[Tensor], Tensor]  # inputs in the network's space -> probabilities


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.conv2, self.norm2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.past: nn.Module = nn.Identity()
        if stride > 1:
            self.past = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        out: Tensor = (inner + self.past(x)).relu()
        return out


def resnet(width: int) -> nn.Module:
    stem = [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def trained(args: argparse.Namespace, parts: Parts, seed: int) -> BayesianNetwork:
    torch.manual_seed(seed)
    net = resnet(args.width) if args.net == "resnet" else build("lenet")
    fit = Fit(epochs=args.epochs, batch=128, optimiser="sgd", lr=0.1, weight_decay=1e-4)
    if args.net == "lenet":
        fit = Fit(epochs=args.epochs, batch=256, lr=2e-3)
    device = torch.device(args.device)
    network = bayesianize(net, "deterministic")
    run = FitRun(network, parts.train, parts.validation, input_of(parts.train), fit, seed, device)
    while not run.done:
        run.epoch()
    last = run.log[-1]
    remark(f"{sum(p.numel() for p in net.parameters()):,} weights, validation accuracy {last.validation_accuracy:.2%}")
    return run.finish()


def answers(
    network: BayesianNetwork, parts: Parts, size: int, selections: Sequence[Selection], seed: int
) -> tuple[dict[str, Answer], dict[str, float]]:
    """Predictive functions by name, and their prior precisions."""
    declared = input_of(parts.train)
    functions: dict[str, Answer] = {"MAP": lambda x: network.net(x).softmax(-1)}
    precisions: dict[str, float] = {}
    for select in selections:
        settings = Laplace(size=None if select == "last-layer" else size, select=select)
        name = "last layer" if select == "last-layer" else f"S = {size:,}, {select}"
        linearised = linearise(network, parts.train, parts.validation, declared, settings, seed).network
        assert isinstance(linearised.joint, Subnetwork)
        precisions[name] = linearised.joint.entry.prior_precision
        functions[name] = closed(linearised)
    functions["diagonal, all weights"], precisions["diagonal, all weights"] = diagonal_laplace(network, parts)
    return functions, precisions


def closed(linearised: BayesianNetwork) -> Answer:
    factors = linearised.factors()

    def answer(x: Tensor) -> Tensor:
        summary = predict_closed(linearised, factors, x).summary
        assert isinstance(summary, Classified)
        return summary.probabilities

    return answer


def diagonal_laplace(network: BayesianNetwork, parts: Parts) -> tuple[Answer, float]:
    """Diagonal Laplace over all weights, linearised and in closed form like the others."""
    declared = input_of(parts.train)
    h = diagonal(network, parts.train, declared, 128)
    every, held = torch.arange(len(h), device=h.device), parts.validation

    def moments(x: Tensor, precisions: list[float]) -> tuple[Tensor, list[Tensor]]:
        weights = torch.stack([1 / (h + p) for p in precisions], 1).float()  # (D, n)
        outputs, variances = [], []
        for block in x.split(64):
            there = Linearised(network.net, block, every)
            outputs.append(there.outputs)
            variances.append(torch.stack([J.square() @ weights for J in there.rows()], 1))  # (b, C, n)
        return torch.cat(outputs), list(torch.cat(variances).unbind(-1))

    def scores(precisions: list[float]) -> dict[float, float]:
        f, variances = moments(enter(held.x.to(h.device), declared), precisions)
        return {p: -closed_nll(network, f, v, held.y) for p, v in zip(precisions, variances, strict=True)}

    scores_by = scores(list(COARSE))
    best = max(scores_by, key=scores_by.__getitem__)
    scores_by |= scores([best * 10 ** (n / FINE) for n in range(-FINE + 1, FINE) if n])
    best = max(scores_by, key=scores_by.__getitem__)

    def answer(x: Tensor) -> Tensor:
        f, (v,) = moments(x, [best])
        return (f / (1 + torch.pi / 8 * v).sqrt()).softmax(-1)

    return answer, best


def measure(
    network: BayesianNetwork, parts: Parts, args: argparse.Namespace, seed: int
) -> dict[str, dict[str, list[float]]]:
    declared, test = input_of(parts.train), parts.test
    device = next(network.parameters()).device
    with evaluating(network):
        ways, precisions = answers(network, parts, args.size, args.select, seed)
        rows: dict[str, dict[str, list[float]]] = {}
        for angle in args.angles:
            x = enter(test.x if angle == 0 else corrupt(test.x, "rotation", angle), declared).to(device)
            for name, answer in ways.items():
                p = torch.cat([answer(some).detach().cpu() for some in x.split(250)])
                row = rows.setdefault(name, {"log-likelihood": [], "accuracy": [], "precision": []})
                row["log-likelihood"].append(-nll(p, test.y))
                row["accuracy"].append(accuracy(p, test.y))
        for name, precision in precisions.items():
            rows[name]["precision"] = [precision]
    return rows


def some(args: argparse.Namespace) -> DataSet:
    """The first examples of MNIST's training part, and of its test part."""
    data = read_data("mnist", args.data_root, download=args.download)
    assert data.test is not None
    few = [torch.arange(min(len(e), n)) for e, n in ((data.train, args.examples), (data.test, args.pictures))]
    return replace(data, train=data.train[few[0]], test=data.test[few[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--net", choices=["resnet", "lenet"], default="resnet")
    parser.add_argument("--width", type=int, default=8, help="channels of the ResNet's first stage")
    parser.add_argument("--examples", type=int, default=5_000, help="of the training part")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=2000, help="S")
    parser.add_argument("--pictures", type=int, default=1000, help="of the test part")
    parser.add_argument(
        "--select", nargs="+", choices=get_args(Selection), default=["variance", "random", "last-layer"]
    )
    parser.add_argument("--angles", type=int, nargs="+", default=list(ANGLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data, results = some(args), []
    for seed in args.seeds:
        parts = divide(data, HELD / len(data.train), 1 / len(data.train), 0.1, seed)
        results.append(measure(trained(args, parts, seed), parts, args, seed))
        if args.json:
            print(json.dumps({"seed": seed, "rows": results[-1]}), flush=True)
    table = Table("way", "prior precision", *map(str, args.angles), title=f"log-likelihood by angle; {machine()}")
    for name in results[0]:
        columns = zip(*(rows[name]["log-likelihood"] for rows in results), strict=True)
        precisions = ", ".join(f"{p:.3g}" for rows in results for p in rows[name]["precision"])
        table.add_row(name, precisions, *(f"{sum(values) / len(values):.3f}" for values in columns))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
