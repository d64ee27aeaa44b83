"""Pruned Z: what half and a quarter of it cost in accuracy and in doubt, for artifacts of `benchmarks.fashion`.

    python -m benchmarks.fashion --data-root DIR --methods ffg-u --keep FOLDER
    python -m benchmarks.pruning FOLDER --data-root DIR [--json FILE]

Prunes and fine-tunes each `fashion-ffg-u-SEED.safetensors` in FOLDER as `dubito prune` does, and measures it as
`benchmarks.fashion` does: K = 20, AUROC against MNIST's test part. Wanted: at half of Z accuracy within 0.5 points and
AUROC within 0.02 of the artifact as it is; at a quarter within 1 point and 0.03. A minute a run on a GPU.
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
from dubito.training.data.sources import read_data
from dubito.training.prune import prune

COLUMNS = ("accuracy", "ece", "nll", "auroc", "measure", "entropy", "mutual_information", "energy")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the artifacts; the pruned ones are left there too")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="shares of Z; 1: as it is")
    parser.add_argument("--json", type=Path, help="append each run as a line; runs that it holds are not run again")
    args = parser.parse_args()
    files = sorted(args.folder.glob("fashion-ffg-u-[0-9]*.safetensors"))
    if not files:
        parser.error(
            f"{args.folder} has no fashion-ffg-u-SEED.safetensors; benchmarks.fashion --keep leaves them there"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = kept_rows(args.json)
    known = {(row["file"], row["keep"]) for row in rows}
    for file in files:
        for share in args.keep:
            if (file.name, share) not in known:
                rows.append(one(file, share, args.data_root, device))
                keep_row(args.json, rows[-1])
    table = Table("artifact", "kept", "bytes", *(name.replace("_", " ") for name in COLUMNS), title="Pruned Z, K = 20")
    for row in sorted(rows, key=lambda row: (row["file"], -row["keep"])):
        figures = [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        table.add_row(row["file"], f"{row['keep']:g}", f"{row['bytes']:,}", *figures)
    Console(width=180).print(table)
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")


def one(file: Path, share: float, root: Path, device: torch.device) -> Row:
    """Figures of the artifact, pruned to this share of Z."""
    out = file if share == 1 else file.with_name(f"pruned-{share:g}-{file.name}")
    pruned = load(file) if share == 1 else prune(file, out, share, data_root=root, device=device)
    assert pruned is not None  # one process
    fashion, mnist = (read_data(name, root) for name in ("fashion-mnist", "mnist"))
    row = {"file": file.name, "keep": share, "bytes": out.stat().st_size}
    return row | measured(pruned.to(device), fashion, mnist, seed=0)


if __name__ == "__main__":
    main()
