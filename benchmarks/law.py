"""The factored law of the λ-noise against the exact law, end to end, on a trained artifact.

    python -m benchmarks.law ARTIFACT --data NAME --data-root DIR --ood mnist [--test 2000]

The layers whose noise the artifact has as factored get the exact law, and the factored one with R = 0, 4 and 16
directions, found on the artifact's own calibration data; everything else stays. Each law answers the same inputs with
K draws for each of several seeds, a seed's V's being the same for all laws; figures are means over the seeds, ± the
standard error of the mean difference to the exact law. Limits, for the default R: NLL and mean entropy within 2 % of
the exact law's, ECE within 0.3 points, AUROC within 0.03; each is met, missed or not decided, by two standard errors.
Exit code 1 where one is missed. K draws are few: from one seed to the next the mean entropy changes by several per
cent, so that many seeds are needed (on a GPU: --test 1000 --seeds 32).

`--layers` compares the laws layer by layer instead, without draws, on 64 test inputs that no direction was found on.
Outside its directions the factored law gives the inputs r and r' the covariance |r||r'| where the exact law has r · r':
never less. The table has that surplus for the sum over all places of a layer's input, as a share of the exact variance.
"""

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import machine
from dubito.models import load
from dubito.models.conversion.directions import set_directions
from dubito.models.network.layers import BayesianLayer
from dubito.models.network.network import NetworkFactors
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.inducing import Inducing, outside
from dubito.models.posteriors.inducing_factors import InducingFactors, LambdaLaw
from dubito.models.predictions.adaptive import answer_each
from dubito.models.predictions.answers import rule_for, scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Job, predict
from dubito.models.predictions.uncertainty import Classified
from dubito.training import metrics
from dubito.training.calibrate import PATCHES_FROM
from dubito.training.config import Calibrate
from dubito.training.data.data import enter, part_of
from dubito.training.data.sources import read_for

DIRECTIONS = (0, 4, 16)
BY_LAYER = (0, 1, 2, 4, 8, 16, 32, 64)
FRESH = 64  # inputs of `--layers`
USUAL = Calibrate().directions
LIMITS = {"NLL": 0.02, "entropy": 0.02, "ECE, points": 0.3, "AUROC": 0.03}
RELATIVE = ("NLL", "entropy")
Figures = dict[str, float]


@dataclass(frozen=True)
class Task:
    """Data for the model."""

    x: Tensor
    y: Tensor
    outside: Tensor
    K: int


def with_law(model: Model, noise: LambdaLaw, held: Tensor, R: int = 0) -> Model:
    """A copy whose factored layers have this law."""
    network = copy.deepcopy(model.network)
    for layer in network.layers.values():
        q = layer.posterior
        if isinstance(q, Inducing) and q.noise == "factored":
            q.noise = noise
    set_directions(network, held, R)
    return replace(model, network=network)


class Paired(Normals):
    """For each seed, the same draws of V for all laws, and different λ-noise."""

    def __init__(self, seed: int, factors: NetworkFactors, law: int) -> None:
        super().__init__(seed, factors.device)
        self.of_V, self.others = (torch.Generator(factors.device).manual_seed(s) for s in (seed, 1000 * seed + law + 1))
        self.factors = factors

    def rows(self, K: int, n: int) -> Tensor:
        parts: list[Tensor] = []
        for f in self.factors.layers.values():
            of_V = f.normals_of_V if isinstance(f, InducingFactors) else 0
            for rng, size in ((self.of_V, of_V), (self.others, f.normals - of_V)):
                parts.append(torch.empty(K, size, device=self.device))
                for row in parts[-1]:
                    row.normal_(generator=rng)
        return torch.cat(parts, 1)


def ask(model: Model, x: Tensor, K: int, seed: int, law: int) -> Classified:
    job = Job.of(model.network, model.factors, x, seed, temperature=model.temperature, most=K)
    job = replace(job, normals=Paired(seed, model.factors, law))
    summary, _ = answer_each(job, np.full(len(x), K), np.zeros(len(x)))
    assert isinstance(summary, Classified)
    return summary


def figures(model: Model, task: Task, seed: int, law: int) -> Figures:
    inside, outside = (ask(model, x, task.K, seed, law) for x in (task.x, task.outside))
    rule = rule_for(model.card.calibration, task.K)
    measure = rule.ood[0] if rule.ood is not None else "entropy"
    p = inside.probabilities.cpu()
    return {
        "NLL": metrics.nll(p, task.y),
        "entropy": float(inside.entropy.mean()),
        "mutual information": float(inside.mutual_information.mean()),
        "ECE, points": 100 * metrics.ece(p, task.y),
        "AUROC": metrics.auroc(scores(inside)[measure].cpu(), scores(outside)[measure].cpu()),
    }


def changes(rows: list[Figures], exact: list[Figures], name: str) -> tuple[float, float]:
    """Mean over seeds of the difference to the exact law, and its standard error: relative for NLL and entropies."""
    differences = [a[name] - b[name] for a, b in zip(rows, exact, strict=True)]
    scale = statistics.mean(row[name] for row in exact) if name in (*RELATIVE, "mutual information") else 1.0
    error = statistics.stdev(differences) / math.sqrt(len(rows)) if len(rows) > 1 else math.inf
    return statistics.mean(differences) / scale, error / scale


@torch.no_grad()
def surplus(model: Model, x: Tensor) -> dict[str, float]:
    """Of each factored layer: variance that the factored law adds to the sum over places, of the exact law's."""
    arrived: dict[str, Tensor] = {}

    def watch(name: str, layer: BayesianLayer) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            arrived[name] = layer.geometry.patches(inputs[0]).unflatten(0, (len(inputs[0]), -1)).double()

        return hook

    with ExitStack() as hooks:
        for name, layer in model.network.layers.items():
            if layer.q.takes_directions:
                hooks.enter_context(layer.register_forward_pre_hook(watch(name, layer)))
        predict(model.network, model.network.factors(), x, samples=0, max_rows=len(x))
    found = {}
    for name, patches in arrived.items():
        q = model.network.layers[name].posterior
        factors = model.network.factors().layers[name]
        assert isinstance(q, Inducing)
        assert isinstance(factors, InducingFactors)
        B = factors.matheron.B_c.double()
        left = patches - (patches @ B) @ B.T
        exact = left.sum(1).square().sum(-1).mean()
        if q.directions is not None:
            D = outside(B, q.directions.double().T)
            left = left - (left @ D) @ D.T
        found[name] = float((left.norm(dim=-1).sum(1).square() - left.sum(1).square().sum(-1)).mean() / exact)
    return found


def by_layer(model: Model, held: Tensor, x: Tensor) -> Table:
    rows = {R: surplus(with_law(model, "factored", held, R), x) for R in BY_LAYER}
    grid = Table("layer", *(f"R = {R}" for R in BY_LAYER), title="Surplus variance of the factored law")
    for name in rows[0]:
        grid.add_row(name, *(f"{max(0.0, rows[R][name]):.3f}" for R in BY_LAYER))
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--data", required=True, help="name of the data set that the artifact was trained on")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--ood", required=True, help="name of another one")
    parser.add_argument("--test", type=int, default=10_000, help="inputs of each set, at most")
    parser.add_argument("--samples", type=int, default=64, help="K")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--layers", action="store_true", help="compare the laws layer by layer, and stop")
    args = parser.parse_args()
    model = load(args.artifact)
    declared = model.card.input
    assert declared is not None, "the artifact does not say what its inputs are"
    data = read_for(model.manifest, args.data, args.data_root)
    _, test = part_of(data, model.card)
    _, held = part_of(data, model.card, "calibration")
    _, outside = part_of(read_for(model.manifest, args.ood, args.data_root, labelled=False), model.card)
    patches = enter(held.x[:PATCHES_FROM], declared)
    if args.layers:
        Console(width=160).print(by_layer(model, patches, enter(test.x[:FRESH], declared)))
        print(machine())
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, others = (enter(some.x[: args.test], declared) for some in (test, outside))
    task = Task(x, test.y[: args.test], others, args.samples)
    laws = {"exact": with_law(model, "exact", patches)}
    laws |= {f"factored, R = {R}": with_law(model, "factored", patches, R) for R in DIRECTIONS}
    laws = {name: one.to(device) for name, one in laws.items()}
    results: dict[str, list[Figures]] = {}
    for seed in range(args.seeds):
        for law, (name, one) in enumerate(laws.items()):
            results.setdefault(name, []).append(figures(one, task, seed, law))
            print(name, seed, results[name][-1], file=sys.stderr, flush=True)
    Console(width=160).print(table(results, args))
    print(machine(), torch.cuda.get_device_name() if device.type == "cuda" else "no GPU", sep=", ")
    verdicts = {
        name: verdict(*changes(results[f"factored, R = {USUAL}"], results["exact"], name), name) for name in LIMITS
    }
    print(f"R = {USUAL}: " + ", ".join(f"{name} {said}" for name, said in verdicts.items()))
    sys.exit("missed" in verdicts.values())


def verdict(change: float, error: float, name: str) -> str:
    if abs(change) + 2 * error <= LIMITS[name]:
        return "met"
    return "missed" if abs(change) - 2 * error > LIMITS[name] else "not decided"


def table(results: dict[str, list[Figures]], args: argparse.Namespace) -> Table:
    grid = Table(title=f"{args.artifact.name}, K = {args.samples}, {args.seeds} seeds, at most {args.test:,} inputs")
    grid.add_column("law of the λ-noise")
    for name in results["exact"][0]:
        grid.add_column(name)
    for law, rows in results.items():
        cells = []
        for name in rows[0]:
            cell = f"{statistics.mean(row[name] for row in rows):.4f}"
            if law != "exact":
                change, error = changes(rows, results["exact"], name)
                relative = name in (*RELATIVE, "mutual information")
                cell += f" ({change:+.2%} ± {error:.2%})" if relative else f" ({change:+.3f} ± {error:.3f})"
            cells.append(cell)
        grid.add_row(law, *cells)
    return grid


if __name__ == "__main__":
    main()
