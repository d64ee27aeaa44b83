"""The papers' tables on real data, one command each: our rows over seeds beside the published ones.

    python -m benchmarks.reproduce cifar --data-root DIR --keep FOLDER      table 1: CIFAR-10, ResNet-18, every method
    python -m benchmarks.reproduce pruning --data-root DIR --keep FOLDER    table 2: pruned Z of table 1's artifacts
    python -m benchmarks.reproduce ablation --data-root DIR --keep FOLDER   table 3: λ_max, σ_max and M
    python -m benchmarks.reproduce fashion --data-root DIR --keep FOLDER    table 4: Fashion-MNIST against MNIST, and
                                                                            rotated MNIST, every method
    python -m benchmarks.reproduce uci --data-root DIR --keep FOLDER        table 5: UCI regression and classification
    python -m benchmarks.reproduce regression --keep FOLDER                 the kept rows of its first half
    python -m benchmarks.reproduce classification --data-root DIR --keep FOLDER   the second half of table 5 alone
    python -m benchmarks.reproduce promises --data-root DIR --keep FOLDER   table 6: the zoo's coverage and false alarms
    python -m benchmarks.reproduce charts --keep FOLDER                     three charts of the rows of table 1

Each runs the benchmark of its name (`benchmarks.cifar` and so on), which keeps finished runs in FOLDER: the same
command goes on where it was stopped. `--outside` names the data from outside of tables 1 and 2, near ones first, as
`dubito evaluate --ood` does, or NAME=npz:PATH. Tables 1 to 4 need a GPU; the others take hours (5) and minutes (6) on a
CPU. `--seeds` are those of all tables but UCI regression, whose divisions are published.
"""

import argparse
import io
import os
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import cifar, fashion, uci
from benchmarks._measure import answering, keep_row, kept_rows, machine, spread, take_turns
from dubito.models import load
from dubito.models.artifact.artifact import is_artifact
from dubito.models.predictions.model import Model
from dubito.training.config import read_recipe
from dubito.training.data.data import Examples, part_of
from dubito.training.data.sources import read_data
from dubito.training.evaluation.evaluate import SHIFTED, evaluate, quality, some_of
from dubito.training.evaluation.predicting import ChosenPredictive, declared_by, draws_for
from dubito.training.evaluation.shift import corrupt, families
from dubito.training.recipe import train

# Accuracy and ECE in %: [Ritter21, first version on arXiv], ResNet-18
PAPER = {
    "plain": (93.02, 5.23),
    "ensemble-w": (94.94, 1.25),
    "ffg-w": (93.22, 0.55),
    "ffg-u": (91.52, 1.31),
    "ensemble-u": (92.20, 0.80),
}
REGRESS = (None, "ffg-u", "ensemble-u", "ffg-w", "mc-dropout", "whvi", "gi", "dgp", "dsvi", "whvi-gp")  # None: ensemble
CLASSIFY = ("deterministic", "ensemble-w", "ffg-w", "ffg-u", "ensemble-u", "mc-dropout")
TURNED = (*CLASSIFY, "subnetwork-laplace", *fashion.OWN_RECIPES)
NAMES = {  # in charts
    "plain": "plain, with its temperature",
    "ffg-u": "FFG-U",
    "ensemble-u": "Ensemble-U",
    "ensemble-w": "five plain networks",
    "mc-dropout": "MC dropout",
    "ffg-w": "FFG-W",
    "whvi": "Walsh–Hadamard VI",
    "laplace-last-layer": "last-layer Laplace",
    "laplace-subnetwork": "subnetwork Laplace",
    "function-space": "function-space VI,\na smaller network",
}
SIDES = {  # of a point that its name stands on, where the usual one is taken
    **{(chart, NAMES[m]): ("right", "bottom") for chart in ("accuracy", "auroc") for m in ("ensemble-u", "ensemble-w")},
    ("ece", NAMES["plain"]): ("right", "bottom"),
    ("ece", NAMES["ensemble-u"]): ("right", "top"),
    ("ece", NAMES["ffg-u"]): ("right", "top"),
}
TIMED = 20  # requests
SAMPLES = 20  # K

Row = dict[str, Any]


def run(module: str, *words: object) -> None:
    """A benchmark in a process of its own; what it prints is shown."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        sys.exit(f"benchmarks.{module} ended with code {code}; the same command goes on where it was stopped")


# table 1


def table_1(args: argparse.Namespace) -> None:
    folder = args.keep / "cifar"
    words = [
        "--architecture",
        "resnet18",
        "--methods",
        *cifar.METHODS,
        "--seeds",
        *args.seeds,
        "--outside",
        *args.outside,
    ]
    run("cifar", "--data-root", args.data_root, "--keep", folder, *words)
    rows = kept_rows(folder / "figures.jsonl")
    table = Table(title=f"CIFAR-10, ResNet-18, K = {SAMPLES}: accuracy and ECE in %, ours beside the paper's")
    heads = ("method", "accuracy", "paper", "ECE", "paper", "NLL", "Brier", "bytes", "ms a request")
    for head in heads:
        table.add_column(head)
    shown = times(folder, args.keep / "times.jsonl")
    for method in cifar.METHODS:
        mine = [r for r in rows if r["method"] == method and r["seed"] in args.seeds]
        if mine:
            paper = PAPER.get(method, ("", ""))
            cells = [spread([100 * r["accuracy"] for r in mine]), str(paper[0]), spread([100 * r["ece"] for r in mine])]
            cells += [str(paper[1]), spread([r["nll"] for r in mine]), spread([r["brier"] for r in mine])]
            size = f"{mine[0]['bytes']:,}" if "bytes" in mine[0] else ""
            table.add_row(method, *cells, size, f"{shown[method]:.1f}" if method in shown else "")
    Console(width=180).print(table)
    Console(width=180).print(outside([row for row in rows if row["seed"] in args.seeds]))
    shifts(folder, args)
    print(machine())


def outside(rows: list[Row]) -> Table:
    """AUROC and AUPR of the sets from outside by each measure, means over the seeds that have it."""
    names = list(next((row["aurocs"] for row in rows if "auprs" in row), {}))
    table = Table("method", "measure", "seeds", *names, title="Data from outside: AUROC, AUPR")
    for method in cifar.METHODS:
        mine = [row for row in rows if row["method"] == method and "auprs" in row]
        for measure in dict.fromkeys(measure for row in mine for measure in row["aurocs"][names[0]]):
            those = [row for row in mine if measure in row["aurocs"][names[0]]]
            pairs = (
                [statistics.mean(r[kind][n][measure] for r in those) for kind in ("aurocs", "auprs")] for n in names
            )
            table.add_row(method, measure, str(len(those)), *(f"{a:.3f}, {b:.3f}" for a, b in pairs))
    return table


def times(folder: Path, keep: Path) -> dict[str, float]:
    """Median milliseconds of a request for one input with K draws in a server's engine on this device, by method: the
    first seed's file. The methods take turns."""
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    known = {row["method"]: row["ms"] for row in kept_rows(keep) if row["device"] == kind}
    asked = {}
    for method in cifar.METHODS:
        path = next(iter(sorted(folder.glob(f"{method}-[0-9]*.safetensors"))), None)
        if method not in known and path is not None and is_artifact(path):
            model = load(path)
            asked[method] = answering(model, torch.randn(1, *declared_by(model).shape), draws_for(model, SAMPLES))
    for method, seconds in take_turns(asked, TIMED).items():
        known[method] = 1000 * seconds
        keep_row(keep, {"method": method, "device": kind, "ms": known[method]})
    return known


def shifts(folder: Path, args: argparse.Namespace) -> None:
    """Accuracy and ECE on corrupted test pictures by severity, mean over the kinds; the first seed's files."""
    keep, device = args.keep / "shift.jsonl", torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known, seed = {row["method"]: row for row in kept_rows(keep)}, args.seeds[0]
    for method in cifar.METHODS:
        members = range(seed, seed + cifar.MEMBERS) if method == "ensemble-w" else [seed]
        paths = [folder / f"{method.replace('ensemble-w', 'plain')}-{s}.safetensors" for s in members]
        if method in known or not all(path.exists() for path in paths):
            continue
        models = [load(path).to(device) for path in paths]
        test = part_of(read_data("cifar10", args.data_root), models[0].card)[1]
        if method == "ensemble-w":
            kinds = shifted_ensemble(models, some_of(test, SHIFTED, seed), seed)
        else:
            kinds = evaluate(models[0], test, shift=True, seed=seed).figures["shift"]["families"]
        known[method] = {"method": method, **by_severity(kinds)}
        keep_row(keep, known[method])
    if known:
        severities = next(iter(known.values()))["severities"]
        table = Table("method", *(f"severity {s:g}" for s in severities), title="Corrupted pictures: accuracy %, ECE %")
        for method, row in known.items():
            pairs = zip(row["accuracy"], row["ece"], strict=True)
            table.add_row(method, *(f"{100 * a:.1f}, {100 * e:.1f}" for a, e in pairs))
        Console(width=180).print(table)


def shifted_ensemble(models: list[Model], pictures: Examples, seed: int) -> dict[str, list[Row]]:
    """Figures of plain networks together, by their answers as they are, on the corrupted pictures of the others."""
    rows: dict[str, list[Row]] = {}
    for family, severities in families(pictures.x.shape[1]).items():
        for severity in severities:
            x = corrupt(pictures.x, family, severity, seed)
            answers = [(model, ChosenPredictive.of(model, SAMPLES, None).predict(model, x, seed)) for model in models]
            summary = cifar.together([cifar.logits_of(*answer) for answer in answers])
            rows.setdefault(family, []).append({"severity": severity, **quality(summary, pictures.y)})
    return rows


def by_severity(families: dict[str, list[Row]]) -> Row:
    """Mean over the kinds of corruption, which all have as many severities."""
    severities = sorted({row["severity"] for rows in families.values() for row in rows})
    means = {}
    for key in ("accuracy", "ece"):
        means[key] = [
            statistics.mean(r[key] for rows in families.values() for r in rows if r["severity"] == s)
            for s in severities
        ]
    return {"severities": severities, **means}


# tables 2 and 3


def table_2(args: argparse.Namespace) -> None:
    words = ["--keep", 1, 0.75, 0.5, 0.25, "--json", args.keep / "pruning.jsonl"]
    for name in args.outside:
        source = name.partition("=")[2] or name
        run("pruning", args.keep / "cifar", "--data-root", args.data_root, "--outside", source, *words)


def table_3(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        words = ["--seed", seed, "--figure-4", "--json", args.keep / f"ablation-{seed}.jsonl"]
        run("caps", "--data-root", args.data_root, *words)


# table 4


def table_4(args: argparse.Namespace) -> None:
    folder = args.keep / "fashion"
    folder.mkdir(exist_ok=True)
    words = ["--methods", *fashion.METHODS, "--seeds", *args.seeds, "--json", args.keep / "fashion.jsonl"]
    run("fashion", "--data-root", args.data_root, "--keep", folder, *words)
    rows = [rotated(method, seed, args) for method in TURNED for seed in args.seeds]
    angles = rows[0]["severities"]
    table = Table("method", *(f"{a:g}°" for a in angles), title="MNIST turned: NLL, mean ± deviation over seeds")
    for method in TURNED:
        mine = [row["nll"] for row in rows if row["method"] == method]
        table.add_row(method, *(spread(list(values)) for values in zip(*mine, strict=True)))
    Console(width=180).print(table)
    print(machine())


def rotated(method: str, seed: int, args: argparse.Namespace) -> Row:
    """MNIST by its recipe with this method, or by the method's own; figures on turned test pictures."""
    keep = args.keep / "rotated.jsonl"
    for row in kept_rows(keep):
        if (row["method"], row["seed"]) == (method, seed):
            return row
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if method in fashion.OWN_RECIPES:
        recipe = read_recipe(fashion.OWN_RECIPES[method], ["data.name=mnist", f"seed={seed}"])
    else:
        recipe = read_recipe("mnist", [*changes_of(method), f"seed={seed}"])
    out = args.keep / f"mnist-{method}-{seed}.safetensors"
    trained = train(recipe, out, data_root=args.data_root, device=device)
    assert trained is not None
    model = trained.model.to(device)
    test = part_of(read_data("mnist", args.data_root), model.card)[1]
    turned = evaluate(model, test, shift=True, seed=seed).figures["shift"]["families"]["rotation"]
    figures = {key: [r[key] for r in turned] for key in ("accuracy", "nll", "ece")}
    row = {"method": method, "seed": seed, "severities": [r["severity"] for r in turned], **figures}
    keep_row(keep, row)
    return row


def changes_of(method: str) -> list[str]:
    """Another method than a recipe's own, with the options that it needs."""
    given = {"ffg-u": None, "ensemble-u": "{inducing=32, members=4}", "ensemble-w": "{members=3}"}
    given["subnetwork-laplace"] = "{size=1000}"
    options = given.get(method, "{}")
    return [f"posterior.method={method}", *([] if options is None else [f"posterior.options={options}"])]


# table 5


def table_5(args: argparse.Namespace) -> None:
    few = [] if args.splits is None else ["--splits", args.splits]
    for gap, method in product(("", "-gap"), REGRESS):
        named = [*(["--gap"] if gap else []), *([] if method is None else ["--method", method])]
        keep = args.keep / f"uci{gap}.jsonl"
        run("uci", "--data-root", args.data_root, "--jobs", args.jobs, "--keep", keep, *few, *named)
    regression(args)
    classification(args)


def regression(args: argparse.Namespace) -> None:
    """Every method beside the published figures, of the rows that are kept."""
    for gap, figure in product(("", "-gap"), uci.FIGURES):
        rows = kept_rows(args.keep / f"uci{gap}.jsonl")
        title = f"UCI regression{' with a gap' * bool(gap)}: {figure.upper()}, mean ± standard error (divisions)"
        rivals = () if gap else uci.RIVALS
        table = Table("set", title=title)
        for head in (*(method or "ensemble" for method in REGRESS), *rivals):
            table.add_column(head, no_wrap=True)
        for name in uci.SETS:
            of_set = [row for row in rows if row["set"] == f"uci{gap}/{name}"]
            values = [[row["figures"][figure] for row in of_set if row["method"] == method] for method in REGRESS]
            published = [f"{uci.PUBLISHED[figure][name][i]:.2f}" for i in range(len(rivals))]
            table.add_row(name, *map(_with_error, values), *published)
        Console(width=260).print(table)


def _with_error(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f} (1)" if values else ""
    mean, error = uci.mean_and_error(values)
    return f"{mean:.3f} ± {error:.3f} ({len(values)})"


def classification(args: argparse.Namespace) -> None:
    for name in SETS:
        if not (arrays := args.keep / f"{name}.npz").exists():
            x, y = SETS[name](args.data_root / "UCI" / "classification")
            np.savez(arrays, x=x.astype(np.float32), y=np.unique(y, return_inverse=True)[1])
    keep = args.keep / "classification.jsonl"
    known = {(row["set"], row["method"], row["seed"]) for row in kept_rows(keep)}
    missing = [one for one in product(SETS, CLASSIFY, args.seeds) if one not in known]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: more threads than cores would wait for each other
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(classified, name, method, seed, args.keep) for name, method, seed in missing]
        for done in track(as_completed(futures), "training", total=len(futures), console=Console(stderr=True)):
            keep_row(keep, done.result())
    rows = [row for row in kept_rows(keep) if row["seed"] in args.seeds]
    table = Table("set", "method", "accuracy", "NLL", "ECE", title="UCI classification, mean ± deviation over seeds")
    for name in SETS:
        for method in CLASSIFY:
            mine = [row for row in rows if (row["set"], row["method"]) == (name, method)]
            table.add_row(name, method, *(spread([row[key] for row in mine]) for key in ("accuracy", "nll", "ece")))
    Console(width=140).print(table)
    print(machine())


Arrays = tuple[NDArray[np.float64], NDArray[Any]]


def letter(folder: Path) -> Arrays:
    rows = np.loadtxt(folder / "letter-recognition.data", delimiter=",", dtype=str)
    return rows[:, 1:].astype(float), rows[:, 0]


def magic(folder: Path) -> Arrays:
    rows = np.loadtxt(folder / "magic04.data", delimiter=",", dtype=str)
    return rows[:, :10].astype(float), rows[:, 10]


def eeg(folder: Path) -> Arrays:
    lines = (folder / "eeg_eye_state.arff").read_text().split()
    rows = np.array([line.split(",") for line in lines if line.count(",") == 14], float)
    return rows[:, :14], rows[:, 14].astype(int)


SETS = {"letter": letter, "magic": magic, "eeg": eeg}


def classified(name: str, method: str, seed: int, folder: Path) -> Row:
    """A perceptron on a set without a published division: the seed divides it. Every method gets a temperature."""
    torch.set_num_threads(1)
    network = ["network.architecture=mlp", "network.arguments={hidden=[128, 128], standardise=true}"]
    given = [*network, *changes_of(method), "calibrate.temperature=true", f"seed={seed}"]
    recipe = read_recipe(f"npz:{folder / name}.npz", given)
    with redirect_stderr(io.StringIO()):  # its line for each epoch
        trained = train(recipe, folder / f"{name}-{method}-{seed}.safetensors")
    assert trained is not None
    found = trained.model.card.metrics
    row = {"set": name, "method": method, "seed": seed, **{key: found[key] for key in ("accuracy", "nll", "ece")}}
    return row | {"temperature": trained.model.temperature}


# table 6 and the charts


def table_6(args: argparse.Namespace) -> None:
    some = [] if args.examples is None else ["--examples", args.examples]
    run("promises", "--data-root", args.data_root, "--json", args.keep / "promises.jsonl", *some)


def charts(args: argparse.Namespace) -> None:
    """Accuracy against bytes, ECE against milliseconds, AUROC against parameters: ours and the baselines."""
    from matplotlib.figure import Figure

    rows = kept_rows(args.keep / "cifar" / "figures.jsonl")
    ms = {row["method"]: row["ms"] for row in kept_rows(args.keep / "times.jsonl")}
    points: dict[str, dict[str, tuple[float, float]]] = {"accuracy": {}, "ece": {}, "auroc": {}}
    for method in cifar.METHODS:
        mine = [row for row in rows if row["method"] == method]
        if not mine:
            continue
        size = mine[0].get("bytes", 4 * mine[0]["parameters"])
        points["accuracy"][method] = size / 1e6, 100 * statistics.mean(r["accuracy"] for r in mine)
        near = next(iter(mine[0]["aurocs"]))
        auroc = statistics.mean(cifar.default_auroc(r, near) for r in mine)
        points["auroc"][method] = mine[0]["parameters"] / 1e6, auroc
        if method in ms:
            points["ece"][method] = ms[method], 100 * statistics.mean(r["ece"] for r in mine)
    words = {
        "accuracy": ("megabytes of the file", "accuracy, %"),
        "ece": ("milliseconds a request, one input, K = 20", "ECE, %"),
        "auroc": ("million parameters", "AUROC, near data from outside"),
    }
    for key, (x_label, y_label) in words.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, (x, y) in _apart(points[key]).items():
            axes.plot(x, y, "o", color="#2f81c7" if label.endswith("-U") else "#8d939b")
            across, up = SIDES.get((key, label), ("left", "top" if "\n" in label else "bottom"))
            offset = (5 if across == "left" else -5, 2 if up == "bottom" else -3)
            how: dict[str, Any] = {"ha": across, "va": up, "fontsize": 8}
            axes.annotate(label, (x, y), xytext=offset, textcoords="offset points", **how)
        axes.margins(x=0.25, y=0.1)
        axes.set(xscale="log", xlabel=x_label, ylabel=y_label, title="CIFAR-10, ResNet-18")
        axes.grid(alpha=0.2)
        out = args.keep / f"{key}.png"
        figure.savefig(out, dpi=120)
        print(f"wrote {out}: {len(points[key])} methods")


def _apart(points: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Points by what they are called; those that would lie on each other have one name together."""
    groups: list[list[str]] = []
    side = max((y for _, y in points.values()), default=1.0) - min((y for _, y in points.values()), default=0.0)
    for method, (x, y) in points.items():
        near = (g for g in groups if abs(points[g[0]][0] / x - 1) < 0.1 and abs(points[g[0]][1] - y) < 0.02 * side)
        if (group := next(near, None)) is None:
            groups.append([method])
        else:
            group.append(method)
    return {"\n".join(NAMES.get(m, m) for m in group): points[group[0]] for group in groups}


TABLES = {
    "cifar": table_1,
    "pruning": table_2,
    "ablation": table_3,
    "fashion": table_4,
    "uci": table_5,
    "regression": regression,
    "classification": classification,
    "promises": table_6,
    "charts": charts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--keep", type=Path, required=True, help="a folder for artifacts, checkpoints and figures")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--outside", nargs="+", default=["cifar100", "svhn", "mnist"], metavar="NAME[=SOURCE]")
    parser.add_argument("--examples", type=int, help="of table 6: test inputs of each model, at most")
    parser.add_argument("--jobs", type=int, default=2, help="of table 5: processes")
    parser.add_argument("--splits", type=int, help="of table 5: the first so many divisions of each regression set")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.data_root is None and args.table not in ("charts", "regression"):
        parser.error("--data-root is missing: the folder with the data sets of torchvision and UCI")
    TABLES[args.table](args)


if __name__ == "__main__":
    main()
