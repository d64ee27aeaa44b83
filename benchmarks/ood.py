"""OOD measures of an artifact on its own test data against data from elsewhere: entropy to distances of features.

    python -m benchmarks.ood FILE... --data-root DIR --outside svhn cifar100 mnist [--json FILE]

`--outside` takes names of data sets as `dubito evaluate --ood` does, or NAME=npz:PATH for arrays `x` and `y`. Of each
set the test part is used. Beside the measures of a calibrated model: energies averaged in three ways, distances to the
k-th nearest feature of the whole training part (k one in a thousand), to centres of clusters of it, and to a random
subset; as the mean over draws of the distance, and as the distance of the mean feature. `spoiled` is the mean over the
spoiled copies of held-out examples that calibration chooses by. Every artifact needs data that it was trained on.
"""

import argparse
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import keep_row, kept_rows, machine
from dubito.models.artifact.artifact import load
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.predictions.model import Model
from dubito.training.data.data import Examples, data_recipe, enter, part_of
from dubito.training.data.sources import read_data, read_for
from dubito.training.data.spoil import spoil, to_spoil
from dubito.training.evaluation.predicting import declared_by, draws_for
from dubito.training.feature_bank import FeatureReader, centres, find_layer, unit_features
from dubito.training.metrics import auroc
from dubito.training.seeds import stream

SAMPLES = 20  # K
REQUESTS = 20  # with draws of their own
ROWS = 1 << 12  # rows of features that are compared with a whole bank at a time
SIZES = (64, 256, 512, 1024)  # N of the compressed banks
SUBSET = 1024  # of the random one


@dataclass(frozen=True)
class Points:
    """A bank: points (E, N, d) of each member, and which neighbour counts."""

    points: Tensor
    k: int
    bytes: int

    def distances(self, z: Tensor, members: Tensor) -> Tensor:
        """Distances (K, B) of unit features, or means of such, (K, B, d), of K draws with these members."""
        nearest = z.new_empty(z.shape[:2])
        for m, points in enumerate(self.points):
            mine = (members % len(self.points) == m).to(z.device)
            some = z[mine].flatten(0, 1)
            if len(some):
                parts = [self._kth(rows, points, self.lengths[m]) for rows in some.split(ROWS)]
                nearest[mine] = torch.cat(parts).view(-1, z.shape[1])
        return nearest

    def _kth(self, rows: Tensor, points: Tensor, lengths: Tensor) -> Tensor:
        squares = torch.addmm(lengths, rows, points.T, alpha=-2)
        kth = squares.amin(-1) if self.k == 1 else squares.kthvalue(self.k).values
        return (kth + rows.square().sum(-1)).clamp(min=0).sqrt()

    @cached_property
    def lengths(self) -> Tensor:
        return self.points.square().sum(-1)  # (E, N)


@dataclass
class Scored:
    """Scores by measure, gathered request by request."""

    found: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, score: Tensor) -> None:
        self.found.setdefault(name, []).append(score.double().cpu())

    def whole(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self.found.items()}


@dataclass(frozen=True)
class Setting:
    model: Model
    reader: FeatureReader
    banks: dict[str, Points]
    K: int

    def scores(self, x: Tensor, seed: int) -> dict[str, Tensor]:
        declared, scored = declared_by(self.model), Scored()
        rows_at_once = max(1, (1 << 16) // max(1, self.K))
        for i in range(min(REQUESTS, len(x))):
            drawn_by = stream(seed, "ood", i)
            for some in x[i::REQUESTS].split(rows_at_once):
                logits, features = self.reader.read(enter(some.to(self.model.device), declared), self.K, drawn_by)
                self._add(scored, logits.double(), features, drawn_by)
        return scored.whole()

    def _add(self, scored: Scored, logits: Tensor, features: Tensor, seed: int) -> None:
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy = torch.special.entr(p.mean(0)).sum(-1)
        scored.add("entropy", entropy)
        scored.add("mutual information", (entropy - torch.special.entr(p).sum(-1).mean(0)).clamp(min=0))
        scored.add("max probability", 1 - p.mean(0).amax(-1))
        scored.add("energy", -logits.logsumexp(-1).mean(0))
        scored.add("energy, summed over draws", -(logits.logsumexp(-1).logsumexp(0) - math.log(len(logits))))
        scored.add("energy of the mean logits", -logits.mean(0).logsumexp(-1))
        z = F.normalize(features.float(), dim=-1)
        E = self.model.factors.members
        members = torch.zeros(len(z), dtype=torch.long)
        if E:
            members = torch.randperm(E, generator=torch.Generator().manual_seed(seed))[torch.arange(len(z)) % E]
        for name, bank in self.banks.items():
            scored.add(f"{name}, mean distance", bank.distances(z, members).mean(0))
            if len(bank.points) == 1:  # features of several members have no mean
                scored.add(f"{name}, mean feature", bank.distances(z.mean(0, keepdim=True), members[:1])[0])


def banks_of(reader: FeatureReader, train: Examples, most: int, seed: int) -> dict[str, Points]:
    whole = unit_features(reader, train, most, seed)  # (E, n, d)
    E, n, d = whole.shape
    banks = {"kNN, all": Points(whole, max(1, n // 1000), whole.numel() * 4)}
    for N in SIZES:
        points = torch.stack([centres(each, N, seed) for each in whole])
        stored = FeatureBank.of(points, "").to(whole.device)
        banks[f"kNN, {N} centres int8"] = Points(stored.reading().points, 1, points.numel() + 4 * E * N)
    banks["kNN, 256 centres float32"] = Points(
        torch.stack([centres(each, 256, seed) for each in whole]), 1, 256 * E * d * 4
    )
    if reader.factors.normals and E == 1:  # of each input, the features under one draw
        drawn_ = unit_features(reader, train, most, seed, samples=1)[0]
        banks["kNN, 512 centres of draws float32"] = Points(centres(drawn_, 512, seed)[None], 1, 512 * d * 4)
    banks[f"kNN, {SUBSET} at random"] = Points(whole[:, :SUBSET], max(1, SUBSET // 1000), SUBSET * E * d * 4)
    return banks


def one(file: Path, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = load(file).to(device)
    recipe = data_recipe(model.card)
    assert recipe is not None, f"{file} does not say what it was trained on"
    data = read_for(model.manifest, args.data or recipe.name, args.data_root)
    parts = {name: part_of(data, model.card, name)[1] for name in ("train", "calibration", "test")}
    layer = find_layer(model, enter(parts["test"].x[:1].to(device), declared_by(model)))
    assert layer is not None, "the network's outputs are not made by one linear layer"
    reader = FeatureReader(model, *layer)
    began = time.perf_counter()
    banks = banks_of(reader, parts["train"], args.train, args.seed)
    setting = Setting(model, reader, banks, draws_for(model, args.samples))
    rng = torch.Generator().manual_seed(args.seed)
    held = to_spoil(parts["calibration"].x, rng)
    clean = setting.scores(held, args.seed)
    spoiled = [setting.scores(x, args.seed) for x in spoil(held, rng)]
    by_kind = [{m: auroc(clean[m], s[m]) for m in clean} for s in spoiled]
    against = {"spoiled": {m: sum(kind[m] for kind in by_kind) / len(by_kind) for m in clean}}
    against |= {f"kind {i}": kind for i, kind in enumerate(by_kind, 1)}
    inside = setting.scores(parts["test"].x[: args.test], args.seed)
    for name, x in read_outside(args.outside, args.data_root).items():
        outside = setting.scores(x[: args.test], args.seed)
        against[name] = {m: auroc(inside[m], outside[m]) for m in inside}
    return {
        "file": file.name,
        "sha256": model.manifest.sha256[:12],
        "seed": args.seed,
        "samples": setting.K,
        "train": args.train,
        "test": args.test,
        "outside": args.outside,
        "layer": layer[0],
        "features": layer[1],
        "bytes": {name: bank.bytes for name, bank in banks.items()},
        "file_bytes": file.stat().st_size,
        "auroc": against,
        "seconds": time.perf_counter() - began,
        "machine": machine(),
    }


def read_outside(wanted: list[str], root: Path | None) -> dict[str, Tensor]:
    """The inputs of each set's test part, or of all of it, by NAME of NAME or NAME=SOURCE."""
    inputs = {}
    for one in wanted:
        name, _, source = one.partition("=")
        data = read_data(source or name, root)
        inputs[name] = (data.train if data.test is None else data.test).x
    return inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--data", help="what the artifacts were trained on, where it now has another name")
    parser.add_argument("--outside", nargs="+", default=["svhn", "cifar100", "mnist"], metavar="NAME[=npz:PATH]")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--train", type=int, default=50_000, help="training examples of the whole bank, at most")
    parser.add_argument("--test", type=int, default=10_000, help="examples of each test part, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, help="append a line for each artifact; those that it has are not run again"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = kept_rows(args.json)
    key = ("sha256", "seed", "samples", "train", "test", "outside")
    for file in args.files:
        wanted = (load(file).manifest.sha256[:12], args.seed, args.samples, args.train, args.test, args.outside)
        known = [row for row in rows if tuple(row[name] for name in key) in (wanted, (*wanted[:2], 1, *wanted[3:]))]
        row = known[0] if known else one(file, args, device)
        if not known:
            keep_row(args.json, row)
        show(row)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


def show(row: dict[str, Any]) -> None:
    title = f"{row['file']}: {row['file_bytes']:,} bytes, K = {row['samples']}, d = {row['features']} ({row['layer']})"
    table = Table("measure", *row["auroc"], "bytes of the bank", title=f"AUROC of {title}")
    for measure in row["auroc"]["spoiled"]:
        bank = measure.rpartition(", mean ")[0]
        size = f"{row['bytes'][bank]:,}" if bank in row["bytes"] else ""
        table.add_row(measure, *(f"{aurocs[measure]:.4f}" for aurocs in row["auroc"].values()), size)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
