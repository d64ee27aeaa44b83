"""Distillation: draws of a posterior, whatever its size, as the members of a small Ensemble-U.

Each member is fitted to one set of weights: first by least squares in the space of weights, with projections that all
members share, then so that it computes the same function, on training inputs and on training inputs with noise.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dubito.models.artifact.artifact import load
from dubito.models.artifact.described import bare_by
from dubito.models.conversion.conversion import bayesianize
from dubito.models.errors import ConversionError
from dubito.models.network.network import BayesianNetwork, Draws, as_matrix
from dubito.models.numerics.normals import Normals
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import evaluating
from dubito.models.terminal import remark
from dubito.training.data.data import enter
from dubito.training.prune import recipe_of
from dubito.training.recipe import finish, read_parts
from dubito.training.seeds import sow, stream

BATCH = 64
NOISE = 1.0  # of the inputs of every second batch row, in standard deviations of the inputs


@dataclass(frozen=True)
class Teacher:
    """The first draws of a seed, as functions."""

    model: Model
    draws: Draws  # with their weights
    weights: dict[str, Tensor]  # (K, d_out, d_in) by layer

    @classmethod
    def of(cls, model: Model, K: int, seed: int) -> "Teacher":
        network, factors = model.network, model.factors
        for name, layer in network.layers.items():
            if layer.entry.of_functions:
                raise ConversionError(
                    f"layer {name!r} of method {layer.entry.method} draws functions, and there are no weights to "
                    "distil. Serve the model as it is, or train gi on the same data and distil that."
                )
        with evaluating(network), torch.inference_mode():
            stock = factors.stock(network, Draws(K, Normals(seed, model.device).rows(K, factors.normals), seed))
            if not stock or factors.members:
                raise ConversionError(
                    "this model has no random weights to distil: it is deterministic, or an ensemble."
                )
            weights = {name: as_matrix(stock[layer]).clone() for name, layer in network.layers.items()}
        return cls(model, Draws(K, None, seed, stock=stock), weights)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, ...) -> (K, B, C)."""
        network, factors = self.model.network, self.model.factors
        with evaluating(network), torch.inference_mode():
            outputs = factors.outputs(network, x, self.draws, lambda B, K: {}, len(x))
        read = factors.read
        return (outputs if read is None else outputs[..., : -read.columns]).clone()


def distil(
    model: Model, x: Tensor, *, members: int, inducing: int, steps: int, lr: float, seed: int = 0
) -> tuple[BayesianNetwork, float]:
    """An Ensemble-U of the model's draws by inputs x (N, ...), and the share of the outputs' variance it misses."""
    teacher = Teacher.of(model, members, seed)
    network = student(model, members, inducing)
    for name, layer in network.layers.items():
        layer.q.distil(teacher.weights[name])
    optimiser = torch.optim.Adam(p for p in network.parameters() if p.requires_grad)
    spread, scale = x.std(0), None
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - step / steps)
        sow(stream(seed, "distil", step), x.device)
        batch = x[torch.randint(len(x), (min(BATCH, len(x)),), device=x.device)]
        batch[::2] += NOISE * spread * torch.randn_like(batch[::2])
        target = teacher(batch)
        scale = target.var((0, 1)).mean() if scale is None else scale
        outputs, _ = network.sample_with_ratio(batch, members, in_turn=True)
        loss = (outputs - target).square().mean() / scale
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    network.eval()
    return network, missed(teacher, network, x[:1024])


@torch.no_grad()
def missed(teacher: Teacher, network: BayesianNetwork, x: Tensor) -> float:
    """Squared difference of each member from its draw, over the variance of all draws' outputs."""
    target, (outputs, _) = teacher(x), network.sample_with_ratio(x, teacher.draws.K, in_turn=True)
    return float((outputs - target).square().mean() / target.var((0, 1)).mean())


def student(model: Model, members: int, inducing: int) -> BayesianNetwork:
    """An Ensemble-U of the same network, with what is not random as it is; biases and noise of the model too."""
    plain: nn.Module = bare_by(model.manifest)
    plain.load_state_dict(model.network.net.state_dict(), strict=False)  # of modules without a posterior
    sizes: dict[str, object] = {name: {"inducing": inducing} for name in model.manifest.layers}
    others = {name: "deterministic" for name, m in plain.named_modules() if name not in sizes and _matrix(m)}
    network = bayesianize(
        plain,
        "ensemble-u",
        start="prior",
        members=members,
        lam_max=0.0,
        unsupported="leave",
        task=model.network.task,
        layers={**sizes, **others},  # type: ignore[dict-item]
    )
    if model.network.noise is not None and network.noise is not None:
        network.noise.load_state_dict(model.network.noise.state_dict())
        network.noise.requires_grad_(False)
        network.gain = None if model.network.gain is None else model.network.gain.clone()
    return network.to(model.device)


def _matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def compact(
    file: str | Path,
    out: Path,
    *,
    members: int,
    inducing: int,
    steps: int,
    lr: float,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
) -> Model:
    """Distil an artifact that `train` made on its own training data, calibrate and measure the result, and write it."""
    device = torch.device("cpu") if device is None else device
    model = load(file).to(device)
    recipe = recipe_of(model)
    model.network.set_feature_bank(None)  # that of the student is another
    parts = read_parts(recipe, data_root, download)
    declared = model.card.input
    assert declared is not None  # `train` always writes one
    x = enter(parts.train.x, declared).to(device)
    network, share = distil(model, x, members=members, inducing=inducing, steps=steps, lr=lr, seed=recipe.seed)
    remark(f"distilled {members} draws: the members miss {share:.2%} of the variance of their outputs")
    return finish(network, recipe, parts, declared, out, model.card.provenance)
