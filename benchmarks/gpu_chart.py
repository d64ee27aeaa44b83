"""Rows of `benchmarks.gpu_predict --json FILE` as a chart: each time as a share of the ensemble's.

python -m benchmarks.gpu_chart FILE docs/gpu.png [--batches 1 64 500]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RIVALS = {"one pass": "one plain network", "ours, 0": "dubito, λ = 0", "ours, +": "dubito, λ > 0"}
COLOURS = {"one pass": "#b8bec7", "ours, 0": "#1f6f5c", "ours, +": "#7fb8a6"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--network", default="resnet50-cifar")
    parser.add_argument("--inducing", type=int, default=64, help="M")
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 500], help="B")
    args = parser.parse_args()
    cells = [json.loads(line) for line in args.file.read_text().splitlines()]
    wanted = (args.network, args.inducing, args.samples)
    rows = {cell["B"]: cell for cell in cells if (cell["network"], cell["M"], cell["K"]) == wanted}
    if missing := [B for B in args.batches if B not in rows]:
        raise SystemExit(f"{args.file} has no cell for {wanted} and batches of {missing}; measure these first.")
    figure, axes = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    for group, B in enumerate(args.batches):
        best = rows[B]["best ensemble"]
        for offset, (rival, name) in enumerate(RIVALS.items()):
            ms = rows[B]["ms"][rival]
            y = group + 0.27 * (offset - 1)
            axes.barh(y, ms / best, height=0.24, color=COLOURS[rival], label=name if group == 0 else None)
            axes.text(ms / best + 0.01, y, f"{ms:.2g} ms" if ms < 1 else f"{ms:.1f} ms", va="center", fontsize=8)
    axes.axvline(1, color="#444", linewidth=1)
    axes.set_xlim(0, 1.1)
    each = [f"{B} image{'s' if B > 1 else ''}\nensemble {rows[B]['best ensemble']:.3g} ms" for B in args.batches]
    axes.set_yticks(range(len(args.batches)), each, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"time, of an ensemble of {args.samples} compiled networks = 1", fontsize=9)
    axes.legend(fontsize=8, loc="upper right", bbox_to_anchor=(0.9, 1.02), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
