"""CIFAR-10: FFG-U and Ensemble-U beside the plain network that they start from, and beside an ensemble of five.

    python -m benchmarks.cifar --data-root DIR --keep FOLDER [--architecture resnet50] [--seeds 0 1 2]
        [--outside svhn=npz:svhn.npz cifar100=npz:cifar100.npz] [--methods plain ffg-u ensemble-u ensemble-w]
        [--tune-once]

Follows the shipped recipe of the architecture. Each seed divides the training data anew; its plain network is trained
once and kept in FOLDER, and both posteriors start from it. Everything is kept there, checkpoints and figures too, so
the same command goes on where it was stopped. `ensemble-w` is the plain networks of five seeds together, by their
answers as they are, without a temperature: each held out other training data, so nothing is calibrated on them, and the
better of entropy and mutual information counts as theirs. With `--tune-once` the trials of the recipe are run for the
first seed only, on its training data, and the others take the options chosen there. `--outside` names data as
`dubito evaluate --ood` does, or NAME=npz:PATH; of each set the test part is used. K = 20. A GPU is needed: a quarter of
an hour a seed for a ResNet-50.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks._measure import keep_row, kept_rows, machine, spread
from benchmarks.ood import read_outside
from dubito.models import bayesianize, load
from dubito.models.names import Measure
from dubito.models.numerics.parameters import count
from dubito.models.predictions.answers import scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified, ClassTally
from dubito.training.config import Laplace, Recipe, read_recipe
from dubito.training.data.data import Parts, input_of
from dubito.training.evaluation.evaluate import default_measure, quality
from dubito.training.evaluation.predicting import ChosenPredictive, Summary
from dubito.training.metrics import aupr, auroc
from dubito.training.posthoc import from_artifact
from dubito.training.recipe import Phases, build_network, finish, read_parts, task_of, train
from dubito.training.weights import read_weights

RECIPES = {"resnet18": "cifar10", "resnet50": "cifar10-resnet50"}
SAMPLES = 20  # K
MEMBERS = 5  # of the ensemble of plain networks
WITHOUT_CALIBRATION: tuple[Measure, ...] = ("entropy", "mutual_information")  # the ensemble's
METHODS: dict[str, list[str]] = {
    "plain": [],
    "ffg-u": [],
    "ensemble-u": [
        "posterior.method=ensemble-u",
        # The widest of three trials that 2,000 validation pictures could not tell apart (RESULTS.md).
        "posterior.options={inducing=64, members=5, lam_share=0.2, spread=0.3}",
        "tune=none",
    ],
    "ensemble-w": [],
    "mc-dropout": ["posterior.method=mc-dropout", "posterior.options={}", "tune=none"],
    "ffg-w": ["posterior.method=ffg-w", "posterior.options={}", "tune=none"],
    "whvi": ["data.validation=0.04", "data.calibration=0.04"],
    "laplace-last-layer": [],
    "laplace-subnetwork": [],
    "function-space": ["data.validation=0.04"],
}
USUAL = ("plain", "ffg-u", "ensemble-u", "ensemble-w")
OWN_RECIPES = {  # which do not start from the plain network; function-space VI has a network of its own, no ResNet
    "whvi": "cifar10-whvi",
    "function-space": "cifar10-function-space",
}
LAPLACE = {
    "laplace-last-layer": Laplace(select="last-layer"),
    "laplace-subnetwork": Laplace(size=1000, select="variance"),
}
FIGURES = ("accuracy", "nll", "ece", "brier")

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    recipe: str
    root: Path
    keep: Path
    changes: list[str]
    outside: Mapping[str, Tensor]  # pictures, by name
    device: torch.device

    def read(self, seed: int, changes: list[str]) -> Recipe:
        return read_recipe(self.recipe, [*self.changes, *changes, f"seed={seed}"])

    def plain(self, seed: int) -> Path:
        """The weights of the plain network of this seed, trained if they are not there yet."""
        path = self.keep / f"weights-{seed}.safetensors"
        if not path.exists():
            recipe = self.read(seed, [])
            parts = read_parts(recipe, self.root)
            network = bayesianize(self.network(recipe, parts), "deterministic", task=task_of(parts, recipe))
            fitting = Phases(recipe, parts, input_of(parts.train), path, self.device)
            trained = fitting.fit(network, recipe.pretraining, "plain").finish().cpu()
            save_file({name: t.contiguous() for name, t in trained.net.state_dict().items()}, path)
            fitting.clean()
        return path

    def network(self, recipe: Recipe, parts: Parts) -> nn.Module:
        """The plain network, with the weights that the recipe names."""
        torch.manual_seed(recipe.seed)
        given = recipe.network.weights
        weights = None if given is None else read_weights(Path(given))
        return build_network(recipe, parts, input_of(parts.train), weights)

    def model(self, method: str, seed: int, chosen: Row | None) -> Model:
        """The artifact, made if it is not there yet; with options of the posterior that were chosen, or by trials."""
        out = self.keep / f"{method}-{seed}.safetensors"
        if out.exists():
            return load(out)
        if method in OWN_RECIPES:
            own = read_recipe(OWN_RECIPES[method], [*self.changes, *METHODS[method], f"seed={seed}"])
            return self.trained(own, out)
        if method in LAPLACE:
            self.model("plain", seed, None)
            plain = self.keep / f"plain-{seed}.safetensors"
            where: dict[str, Any] = {"data_root": self.root, "device": self.device}
            where["calibrate"] = self.read(seed, []).calibrate  # with a temperature, as the plain network has one
            return from_artifact(plain, "cifar10", out, LAPLACE[method], seed=seed, **where)
        start = [f"network.weights='{self.plain(seed)}'", "fit.pretrain_epochs=0"]
        if chosen is not None:
            options = ", ".join(f"{name}={json.dumps(value)}" for name, value in chosen.items())
            start += [f"posterior.options={{{options}}}", "tune=none"]
        recipe = self.read(seed, [*METHODS[method], *start])
        if method != "plain":
            return self.trained(recipe, out)
        parts = read_parts(recipe, self.root)
        network = bayesianize(self.network(recipe, parts), "deterministic", task=task_of(parts, recipe))
        return finish(network.to(self.device), recipe, parts, input_of(parts.train), out)

    def trained(self, recipe: Recipe, out: Path) -> Model:
        trained = train(recipe, out, data_root=self.root, device=self.device)
        assert trained is not None
        return trained.model

    def measure(self, method: str, seed: int, chosen: Row | None = None) -> Row:
        if method == "ensemble-w":
            return self.measure_ensemble(seed)
        started = time.perf_counter()
        model = self.model(method, seed, chosen).to(self.device)
        seconds = time.perf_counter() - started
        test = read_parts(self.read(seed, []), self.root).test
        predictive = ChosenPredictive.of(model, SAMPLES, None)
        inside = predictive.predict(model, test.x, seed)
        outside = {name: predictive.predict(model, x, seed) for name, x in self.outside.items()}
        near = scores(inside)
        plain = model.card.plain
        if method == "plain":
            answers = {"test": inside, **outside}
            logits = {name: logits_of(model, summary) for name, summary in answers.items()}
            save_file({**logits, "y": test.y}, self.answers(seed))
        return {
            "method": method,
            "seed": seed,
            "set": self.changes,
            "parameters": count(model.network),
            "bytes": (self.keep / f"{method}-{seed}.safetensors").stat().st_size,
            "seconds": seconds,
            **quality(inside, test.y),
            "mutual_information": float(near["mutual_information"].mean()) if "mutual_information" in near else 0.0,
            "temperature": model.temperature,
            "measure": default_measure(inside, predictive.rule(model)),
            "aurocs": {name: aurocs(near, scores(far)) for name, far in outside.items()},
            "auprs": {name: {m: aupr(near[m], scores(far)[m]) for m in near} for name, far in outside.items()},
            "options": (model.card.provenance.recipe or {}).get("posterior"),
            "plain": None if plain is None else plain.model_dump(mode="json"),
        }

    def answers(self, seed: int) -> Path:
        """The logits of this seed's plain network, but for a constant of each input."""
        return self.keep / f"answers-{seed}.safetensors"

    def measure_ensemble(self, first: int) -> Row:
        """Figures of an ensemble of five plain networks."""
        started, members = time.perf_counter(), range(first, first + MEMBERS)
        rows = [self.measure("plain", seed) for seed in members if not self.answers(seed).exists()]
        kept = [load_file(self.answers(seed)) for seed in members]
        summaries = {}
        for name in ("test", *self.outside):
            summaries[name] = together([answers[name] for answers in kept])
        inside = summaries.pop("test")
        near: dict[Measure, Tensor] = {measure: scores(inside)[measure] for measure in WITHOUT_CALIBRATION}
        parameters = rows[0]["parameters"] if rows else count(self.model("plain", first, None).network)
        return {
            "method": "ensemble-w",
            "seed": first,
            "set": self.changes,
            "parameters": MEMBERS * parameters,
            "seconds": time.perf_counter() - started,
            **quality(inside, kept[0]["y"]),
            "mutual_information": float(near["mutual_information"].mean()),
            "measure": None,
            "aurocs": {name: aurocs(near, scores(far)) for name, far in summaries.items()},
            "auprs": {name: {m: aupr(near[m], scores(far)[m]) for m in near} for name, far in summaries.items()},
        }


def logits_of(model: Model, summary: Summary) -> Tensor:
    """The logits of a plain network's answers before its temperature, but for a constant of each input."""
    return model.temperature * as_classes(summary).log()


def together(members: list[Tensor]) -> Classified:
    """The answers of an ensemble of plain networks, by the logits of each."""
    tally = ClassTally()
    tally.add(torch.stack(members))
    return tally.summary()


def as_classes(summary: Summary) -> Tensor:
    """Probabilities, none of them 0."""
    assert isinstance(summary, Classified)
    return summary.probabilities.clamp(min=torch.finfo(torch.float32).tiny)


def aurocs(near: Mapping[Measure, Tensor], far: Mapping[Measure, Tensor]) -> dict[str, float]:
    return {measure: auroc(values, far[measure]) for measure, values in near.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True, help="a folder for artifacts, checkpoints and figures")
    parser.add_argument("--architecture", choices=RECIPES, default="resnet50")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(USUAL))
    parser.add_argument("--outside", nargs="*", default=["svhn", "cifar100"], metavar="NAME[=SOURCE]")
    parser.add_argument("--tune-once", action="store_true", help="trials for the first seed only")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe for all")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outside = read_outside(args.outside, args.data_root)
    bench = Bench(RECIPES[args.architecture], args.data_root, args.keep, args.set, outside, device)
    rows = measured(args.keep / "figures.jsonl", bench, args.methods, args.seeds, args.tune_once)
    Console(width=180).print(table_of(rows, args.methods, list(outside), args.architecture))
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


def measured(path: Path, bench: Bench, methods: list[str], seeds: list[int], tune_once: bool) -> list[Row]:
    """Seed by seed, so that a run that is stopped leaves whole comparisons; one ensemble, from the first."""
    rows = kept_rows(path)
    for seed in seeds:
        for method in methods:
            known = any((r["method"], r["seed"], r["set"]) == (method, seed, bench.changes) for r in rows)
            if known or (method == "ensemble-w" and seed != seeds[0]):
                continue
            rows.append(bench.measure(method, seed, chosen_before(rows, method, bench.changes) if tune_once else None))
            keep_row(path, rows[-1])
    return [r for r in rows if r["method"] in methods and r["seed"] in seeds and r["set"] == bench.changes]


def chosen_before(rows: list[Row], method: str, changes: list[str]) -> Row | None:
    """The posterior's options of the first run that was kept; None before it."""
    for row in rows:
        if (row["method"], row["set"]) == (method, changes):
            options: Row = row["options"]["options"]
            return options
    return None


def table_of(rows: list[Row], methods: list[str], outside: list[str], title: str) -> Table:
    table = Table(title=f"CIFAR-10, {title}, K = {SAMPLES}: mean ± standard deviation over seeds")
    for name in ("method", "seeds", "parameters", *FIGURES, *(f"AUROC {name}" for name in outside), "measure"):
        table.add_column(name)
    for method in methods:
        mine = [r for r in rows if r["method"] == method]
        if not mine:
            continue
        cells = [spread([r[name] for r in mine]) for name in FIGURES]
        cells += [spread([default_auroc(r, name) for r in mine]) for name in outside]
        measures = ", ".join(sorted({r["measure"] or "the better of two" for r in mine}))
        table.add_row(method, str(len(mine)), f"{mine[0]['parameters']:,}", *cells, measures)
    tempered = [r["plain"]["tempered"] for r in rows if r["method"] == "ffg-u" and r.get("plain") is not None]
    if tempered:
        cells = [spread([r[name] for r in tempered]) for name in FIGURES]
        table.add_row("plain, with a temperature", str(len(tempered)), "", *cells)
    return table


def default_auroc(row: Row, name: str) -> float:
    by_measure: dict[str, float] = row["aurocs"][name]
    return max(by_measure.values()) if row["measure"] is None else by_measure[row["measure"]]


if __name__ == "__main__":
    main()
