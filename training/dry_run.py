"""What a recipe would do, and how long: a few steps of each phase are timed, and nothing is written."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dubito.models.numerics.parameters import count
from dubito.training.config import Recipe
from dubito.training.estimate import in_all, time_phases
from dubito.training.recipe import begin


def describe_run(
    recipe: Recipe,
    *,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    labels: tuple[str, ...] | None = None,
) -> list[str]:
    """Lines: data, network, posterior, device; each phase with its time; the sum."""
    device = torch.device("cpu") if device is None else device
    start = begin(recipe, data_root, download, labels)
    recipe, parts, declared = start.recipe, start.parts, start.declared
    plain, posterior = start.networks()
    sizes = {name: len(getattr(parts, name)) for name in ("train", "validation", "calibration", "test")}
    shape = " × ".join(map(str, declared.shape))
    targets = f"{len(parts.labels)} classes" if parts.labels is not None else f"{parts.train.y.shape[1]} numbers"
    lines = [
        f"data: {recipe.data.name}, {shape} to {targets}: {', '.join(f'{n:,} {name}' for name, n in sizes.items())}",
        f"network: {recipe.network.architecture}{_options(recipe.network.arguments)}, {count(plain):,} parameters",
        f"posterior: {recipe.posterior.method}{_options(recipe.posterior.options)}, {count(posterior):,} parameters",
        *_objective(recipe),
        f"device: {'GPU' if device.type == 'cuda' else f'CPU, {torch.get_num_threads()} threads'}",
    ]
    phases = time_phases(recipe, parts, declared, plain, posterior, device, start.context)
    lines += [f"{p.name}: {f'{p.said}, ' if p.said else ''}{p.about}" for p in (*phases, in_all(phases))]
    return lines


def _objective(recipe: Recipe) -> list[str]:
    c = recipe.context
    if recipe.fit.objective == "elbo":
        return []
    return [
        f"objective: function-space, {c.points} context inputs ({c.inputs}) and {c.probes} probes a step, "
        f"prior variance {c.prior_variance:g}"
    ]


def _options(options: Mapping[str, object]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else ""
