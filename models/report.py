"""What `dubito inspect` tells about an artifact."""

from typing import Any

import torch

from dubito.models.architectures import build
from dubito.models.inducing import Inducing
from dubito.models.model import Model
from dubito.models.parameters import count

WHAT = {
    "ffg-u": "factorised Gaussian over inducing weights",
    "fcg-u": "Gaussian with full covariance over inducing weights",
    "ensemble-u": "ensemble in the space of inducing weights",
    "hierarchical": "inducing weights drawn from global ones",
    "ffg-w": "factorised Gaussian over weights",
    "fcg-w": "Gaussian with full covariance over weights",
    "ensemble-w": "ensemble of weights",
    "mc-dropout": "dropout at prediction",
}


def report(model: Model, size: int) -> dict[str, Any]:
    network, manifest = model.network, model.manifest
    deterministic = None
    if manifest.architecture.name != "custom":
        with torch.device("meta"):
            deterministic = count(build(manifest.architecture.name, **manifest.architecture.arguments))
    layers = []
    for name, layer in network.layers.items():
        d_out, d_in = layer.geometry.shape
        row: dict[str, Any] = {
            "name": name,
            "method": layer.entry.method,
            "d_out": d_out,
            "d_in": d_in,
            "parameters": count(layer),
        }
        if isinstance(layer.posterior, Inducing):
            row |= {
                "M_out": len(layer.posterior.Z_r.value),
                "M_in": len(layer.posterior.Z_c.value),
                "lambda": layer.posterior.scale(),
                "noise": layer.posterior.noise,
                "directions": 0 if layer.posterior.directions is None else layer.posterior.directions.shape[1],
            }
        layers.append(row)
    card = model.card.model_dump(mode="json")
    return {
        "format": manifest.format,
        "architecture": manifest.architecture.model_dump(mode="json"),
        "task": manifest.task.kind,
        "parameters": count(network),
        "deterministic": deterministic,
        "bytes": size,
        "batchnorm": manifest.batchnorm,
        "layers": layers,
        "members": max(manifest.members.values(), default=0),
        "hierarchy": None if manifest.hierarchy is None else manifest.hierarchy.model_dump(mode="json"),
        **card,
        "sha256": manifest.sha256,
    }


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    arguments = ", ".join(f"{k}={v}" for k, v in found["architecture"]["arguments"].items())
    console.print(f"{found['architecture']['name']}({arguments}), {found['task']}, format {found['format']}")
    ratio = (
        f", {found['parameters'] / found['deterministic']:.1%} of the plain network's" if found["deterministic"] else ""
    )
    console.print(
        f"{found['parameters']:,} parameters{ratio}; {found['bytes']:,} bytes; BatchNorm {found['batchnorm']}"
    )
    methods = {row["method"] for row in found["layers"]}
    for method in sorted(methods):
        console.print(f"{method}: {WHAT[method]}")
    if not methods:
        console.print("deterministic: one set of weights, no uncertainty about them")
    if found["layers"]:
        _show_layers(console, Table(), found["layers"])
    if found["input"] is not None:
        kind = "a picture or a tensor" if found["input"]["image"] else "a tensor"
        console.print(f"input: {kind} of shape {tuple(found['input']['shape'])}")
    if found["labels"] is not None:
        console.print("labels: " + ", ".join(found["labels"]))
    calibration = found["calibration"]
    if calibration is None:
        console.print("not calibrated: no OOD flags and no prediction sets (dubito calibrate)")
    else:
        console.print(
            f"calibrated: OOD by {calibration['measure']} at {calibration['false_positive_rate']:.0%} false positives, "
            f"prediction sets for {calibration['coverage']:.0%} coverage"
        )
    for name, value in found["metrics"].items():
        console.print(f"{name}: {value:.4g}")
    console.print(f"SHA-256 {found['sha256']} (checked)")


def _show_layers(console: Any, table: Any, layers: list[dict[str, Any]]) -> None:
    for name in ("layer", "method", "W", "V", "λ", "noise", "parameters"):
        table.add_column(name, no_wrap=name == "layer")
    for row in layers:
        V = f"{row['M_out']} × {row['M_in']}" if "M_out" in row else ""
        noise = row.get("noise", "") + (f", R = {row['directions']}" if row.get("noise") == "factored" else "")
        lam = f"{row['lambda']:.2g}" if "lambda" in row else ""
        shape = f"{row['d_out']} × {row['d_in']}"
        table.add_row(row["name"], row["method"], shape, V, lam, noise, f"{row['parameters']:,}")
    console.print(table)
