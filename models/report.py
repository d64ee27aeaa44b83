"""What `dubito inspect` tells about an artifact."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dubito.models.artifact.described import bare_by
from dubito.models.manifest import Calibration, Manifest, Plain
from dubito.models.network.joint import JOINT
from dubito.models.network.layers import BayesianLayer
from dubito.models.network.network import BayesianNetwork, as_matrix
from dubito.models.numerics.parameters import count
from dubito.models.posteriors.entry import Entry
from dubito.models.verdict import columns

SCORED = {
    "probability": "by 1 − probability",
    "aps": "APS: by the probability of all likelier classes",
    "raps": "RAPS: by the probability of all likelier classes and by rank",
}
NOISE = {"constant": "the same for every input", "input": "depends on the input"}

NOISE_DRAWS = 8  # of a layer's weights, to measure their noise


@torch.no_grad()
def noise_share(layer: BayesianLayer) -> float | None:
    """Norm of the noise in the layer's weights over the norm of their mean, by a few draws.

    None for dropout, whose noise is not in the weights, and for layers whose V a hierarchy draws.
    """
    if not layer.q.noise_in_W:
        return None
    q = layer.q.trainable()
    K = q.members or NOISE_DRAWS
    if K == 1 or (q.normals == 0 and not q.members):
        return 0.0
    device, rng = next(layer.parameters()).device, torch.Generator().manual_seed(0)
    total, squares = torch.zeros((), dtype=torch.double), 0.0
    for k in range(K):  # one at a time: a draw of a wide layer takes megabytes
        normals = torch.randn(1, q.normals, generator=rng).to(device, q.dtype)
        member = torch.tensor([k], device=device) if q.members else None
        W = as_matrix(q.draw(normals, member))[0].double().cpu()
        total, squares = total + W, squares + float(W.square().sum())
    mean = float(total.square().sum()) / K**2  # squared norm of the mean over draws
    noise = max(0.0, squares / K - mean)  # exact for an ensemble's members; else the mean holds 1/K of the noise
    if not q.members:
        noise *= K / (K - 1)
        mean = max(mean - noise / K, 1e-12 * squares)
    return math.sqrt(noise / mean) if mean > 0 else 0.0


def report(
    manifest: Manifest, network: BayesianNetwork | None, size: int, stored: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """`network` is None for an artifact of a network that has no name here: what its manifest says must do.

    With the tensors as they are stored, each layer has its bytes beside those of the plain layer in float32, and the
    share of noise in its weights.
    """
    deterministic = None
    if network is not None:
        with torch.device("meta"):
            deterministic = count(bare_by(manifest))
    layers = []
    for name, entry in manifest.layers.items():
        row: dict[str, Any] = {"name": name, "method": entry.method, **entry.row()}
        if network is not None:
            layer = network.layers[name]
            row["d_out"], row["d_in"] = layer.geometry.shape
            row["parameters"] = count(layer)
            row["deterministic_bytes"] = 4 * row["d_out"] * row["d_in"]
            row |= layer.q.row()
            if stored is not None:  # only for people who look: it takes seconds for a large network
                row["noise_share"] = noise_share(layer)
        if stored is not None:
            row["bytes"] = sum(t.nbytes for key, t in stored.items() if key.startswith(f"net.{name}."))
        layers.append(row)
    above, joint = manifest.hierarchy, manifest.joint
    entries = [*manifest.layers.values(), *([] if above is None else [above.layer])]
    return {
        "format": manifest.format,
        "architecture": manifest.architecture.model_dump(mode="json"),
        "traced": None if manifest.traced is None else len(manifest.traced.calls),
        "task": manifest.task.kind,
        "noise": _noise(manifest, network),
        "parameters": None if network is None else count(network),
        "deterministic": deterministic,
        "bytes": size,
        "batchnorm": manifest.batchnorm,
        "precision": manifest.precision,
        "layers": layers,
        "members": max([0, *manifest.members.values(), *(entry.ensemble for entry in entries)]),
        "hierarchy": None if above is None else above.model_dump(mode="json"),
        **{
            kind.key: kind.facts(joint, network) if joint is not None and joint.method == method else None
            for method, kind in JOINT.items()
        },
        "feature_bank": _feature_bank(manifest),
        **manifest.card.model_dump(mode="json"),
        "sha256": manifest.sha256,
    }


def _noise(manifest: Manifest, network: BayesianNetwork | None) -> str | None:
    """Of a regression's targets; a gain of 0 leaves it constant."""
    if manifest.task.kind == "classification":
        return None
    still = network is not None and network.gain is not None and not network.gain.any()
    return "constant" if still else manifest.task.noise


def _feature_bank(manifest: Manifest) -> dict[str, Any] | None:
    bank = manifest.feature_bank
    if bank is None:
        return None
    points = bank.members * bank.points
    return {
        **bank.model_dump(mode="json"),
        "bytes": points * (bank.features + (4 if manifest.precision == "float32" else 2)),
    }


def clean(text: str) -> str:
    """A file may hold anything, a terminal's own commands included."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def said_of_sets(calibration: Calibration) -> str:
    """How classes are scored and for whom the coverage is kept, to be added to a sentence."""
    sets, said = calibration.sets, ""
    if sets is not None:
        constants = f", λ = {sets.lam:g} beyond rank {sets.k_reg}" if sets.lam else ""
        said = f" ({SCORED[sets.score]}{constants})"
    if calibration.classes is not None:
        said += ", class by class"
    if calibration.groups is not None:
        said += ", by group: " + ", ".join(calibration.groups)
    return said


def show(contents: dict[str, Any], entries: Mapping[str, Entry]) -> None:
    """Print a report of an artifact with these layers."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)

    def say(text: str) -> None:
        console.print(clean(text))

    arguments = ", ".join(f"{k}={v}" for k, v in contents["architecture"]["arguments"].items())
    traced = "" if contents["traced"] is None else f", a network of its own with {contents['traced']:,} calls"
    say(f"{contents['architecture']['name']}({arguments}){traced}, {contents['task']}, format {contents['format']}")
    size = f"{contents['bytes']:,} bytes in {contents['precision']}; BatchNorm {contents['batchnorm']}"
    if contents["parameters"] is None:
        say(f"{size}; it says nothing of its network: give the factory that makes it with --network MODULE:FACTORY")
    else:
        ratio = contents["parameters"] / contents["deterministic"]
        say(f"{contents['parameters']:,} parameters, {ratio:.1%} of the plain network's; {size}")
    methods = {entry.method: entry.what[entry.method] for entry in entries.values()}
    for method, what in sorted(methods.items()):
        say(f"{method}: {what}")
    joint = [kind for kind in JOINT.values() if contents[kind.key] is not None]
    for line in (line for kind in joint for line in kind.lines(contents[kind.key], contents["calibration"])):
        say(line)
    if not methods and not joint:
        say("deterministic: one set of weights, no uncertainty about them")
    if _by_functions(contents["provenance"]["recipe"]):
        say("trained by function-space VI: the KL between functions at context inputs, not between weights")
    if contents["layers"]:
        _show_layers(console, Table(), contents["layers"], entries)
    if contents["input"] is not None:
        kind = "a picture or a tensor" if contents["input"]["image"] else "a tensor"
        say(f"input: {kind} of shape {tuple(contents['input']['shape'])}")
        if contents["input"]["columns"] is not None:
            say("columns: " + ", ".join(contents["input"]["columns"]))
    if contents["targets"] is not None:
        say("predicts: " + ", ".join(contents["targets"]))
    if contents["noise"] is not None:
        say(f"noise of the targets: {NOISE[contents['noise']]}")
    if contents["labels"] is not None:
        say("labels: " + ", ".join(contents["labels"]))
    calibration = contents["calibration"]
    if calibration is None:
        say("not calibrated: no OOD flags and no prediction sets")
    else:
        say(
            f"calibrated: OOD by {calibration['measure']} at {calibration['false_positive_rate']:.0%} false positives, "
            f"prediction sets for {calibration['coverage']:.0%} coverage"
            + said_of_sets(Calibration.model_validate(calibration))
        )
        if calibration.get("auroc"):
            each = ", ".join(f"{measure} {value:.3f}" for measure, value in calibration["auroc"].items())
            say(f"AUROC of held-out inputs against spoiled copies of them: {each}")
    if (bank := contents["feature_bank"]) is not None:
        each = f", for each of {bank['members']} members" if bank["members"] > 1 else ""
        say(
            f"bank: {bank['points']:,} points that stand for the {bank['features']:,} training features before layer "
            f"{bank['layer']}{each}; {bank['bytes']:,} bytes"
        )
    for line in columns(
        contents["metrics"], None if contents["plain"] is None else Plain.model_validate(contents["plain"])
    ):
        say(line)
    if (zoo := contents.get("zoo")) is not None:
        say(f"of the zoo: {zoo['title']}. Data: {zoo['data']}; licence: {zoo['licence']}")
        took = "" if zoo["minutes"] is None else f" in {zoo['minutes']:.2g} minutes"
        say(f"trained{took} on {zoo['made_on']}; figures measured on {zoo['measured_on']}")
        for kind in ("limits", "not_for"):
            say(f"{kind.replace('_', ' ')}: {' '.join(zoo[kind])}")
    say(f"SHA-256 {contents['sha256']} (checked)")


def _by_functions(recipe: Any) -> bool:
    """Whether a recipe, which a file may hold in any form, trained by the KL between functions."""
    fit = recipe.get("fit") if isinstance(recipe, dict) else None
    return isinstance(fit, dict) and fit.get("objective") == "function-space"


def _show_layers(console: Any, table: Any, layers: list[dict[str, Any]], entries: Mapping[str, Entry]) -> None:
    for name in ("layer", "method", "W", "V or g", "λ", "law of λ", "noise in W", "parameters", "bytes"):
        table.add_column(name, no_wrap=name == "layer", overflow="ellipsis" if name == "layer" else "fold")
    for row in layers:
        V, law = entries[row["name"]].cells(row)
        lam = f"{row['lambda']:.2g}" if "lambda" in row else ""
        shape = f"{row['d_out']} × {row['d_in']}" if "d_out" in row else ""
        parameters = f"{row['parameters']:,}" if "parameters" in row else ""
        size = f"{row['bytes']:,}" if "bytes" in row else ""
        if size and "deterministic_bytes" in row:
            size += f" ({row['bytes'] / row['deterministic_bytes']:.1%})"
        share = f"{row['noise_share']:.1%}" if row.get("noise_share") is not None else ""
        table.add_row(clean(row["name"]), row["method"], shape, V, lam, law, share, parameters, size)
    console.print(table)
