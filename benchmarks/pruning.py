"""Pruned Z: what half and a quarter of it cost in accuracy and in doubt, for artifacts of `benchmarks.fashion` and of
`benchmarks.cifar`.

    python -m benchmarks.fashion --data-root DIR --methods ffg-u --keep FOLDER
    python -m benchmarks.pruning FOLDER --data-root DIR [--json FILE]

Prunes and fine-tunes each `fashion-ffg-u-SEED.safetensors` (or `ffg-u-SEED.safetensors`, of CIFAR-10) in FOLDER as
`dubito prune` does, and measures it as `benchmarks.fashion` does: K = 20, AUROC against the test part of `--outside`.
Wanted: at half of Z accuracy within 0.5 points and AUROC within 0.02 of the artifact as it is; at a quarter within 1
point and 0.03. A minute a run on a GPU.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import keep_row, kept_rows, machine
from benchmarks.fashion import measured
from dubito.models import load
from dubito.training.data.data import data_recipe, part_of
from dubito.training.data.sources import read_data, read_for
from dubito.training.prune import prune

COLUMNS = ("accuracy", "ece", "nll", "auroc", "measure", "entropy", "mutual_information", "energy")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the artifacts; the pruned ones are left there too")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="shares of Z; 1: as it is")
    parser.add_argument("--outside", default="mnist", help="data as of `dubito evaluate --ood`")
    parser.add_argument("--json", type=Path, help="append each run as a line; runs that it holds are not run again")
    args = parser.parse_args()
    files = sorted(f for name in ("fashion-ffg-u", "ffg-u") for f in args.folder.glob(f"{name}-[0-9]*.safetensors"))
    if not files:
        parser.error(
            f"{args.folder} has no fashion-ffg-u-SEED.safetensors and no ffg-u-SEED.safetensors; benchmarks.fashion "
            "and benchmarks.cifar leave them in the folder of --keep"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = kept_rows(args.json)
    rows = [row for row in rows if row.get("outside", "mnist") == args.outside]
    known = {(row["file"], row["keep"]) for row in rows}
    for file in files:
        for share in args.keep:
            if (file.name, share) not in known:
                rows.append(one(file, share, args, device))
                keep_row(args.json, rows[-1])
    table = Table("artifact", "kept", "bytes", *(name.replace("_", " ") for name in COLUMNS), title="Pruned Z, K = 20")
    for row in sorted(rows, key=lambda row: (row["file"], -row["keep"])):
        figures = [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        table.add_row(row["file"], f"{row['keep']:g}", f"{row['bytes']:,}", *figures)
    Console(width=180).print(table)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


def one(file: Path, share: float, args: argparse.Namespace, device: torch.device) -> Row:
    """Figures of the artifact, pruned to this share of Z."""
    out = file if share == 1 else file.with_name(f"pruned-{share:g}-{file.name}")
    pruned = load(out) if out.exists() else prune(file, out, share, data_root=args.data_root, device=device)
    assert pruned is not None  # one process
    own = data_recipe(pruned.card)
    assert own is not None  # `train` always writes one
    data = read_data(own.name, args.data_root)
    outside = part_of(read_for(pruned.manifest, args.outside, args.data_root, labelled=False), pruned.card)[1]
    row = {"file": file.name, "keep": share, "outside": args.outside, "bytes": out.stat().st_size}
    return row | measured(pruned.to(device), data, outside, seed=0)


if __name__ == "__main__":
    main()
