"""On a trained network: one execution agrees with the paper's own rule, within 4 standard errors; the others with it.

The rule (`draw_by_rule`, eqs. 11-12, in float64) makes every layer's W, which torch's own layers then use; nothing of
ours is on that side but the rule itself. λ is set to what other trained networks have: the embedded one's is next to 0.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks._rule import draw_by_rule
from dubito.models import build, load
from dubito.models.conversion.directions import set_directions
from dubito.models.embedded import embedded
from dubito.models.network.geometry import Conv, Execution, apply
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.inducing_factors import LambdaLaw
from dubito.models.predictions.prediction import evaluating
from dubito.training.data.sources import read_data
from tests.examples import at_most

pytestmark = pytest.mark.draws
K, CHUNK = min(2048, at_most(512)), 512
FEW = 64  # draws by which the executions are compared with each other
LAM = 0.2
EXECUTIONS: tuple[Execution, ...] = ("loop", "batch", "unfold", "factored")


@pytest.fixture(scope="module")
def x() -> Tensor:
    """Digits laid over each other, so that the answers are not clear."""
    pixels = read_data("digits").train.x.float()
    image = load(embedded("digits")).card.input.image  # type: ignore[union-attr]
    assert image is not None
    mixed = (pixels[:1] + pixels[2:3]) / 2 / 255
    return (mixed - torch.tensor(image.mean).view(-1, 1, 1)) / torch.tensor(image.std).view(-1, 1, 1)


def trained(noise: LambdaLaw, lam: float) -> BayesianNetwork:
    network = load(embedded("digits")).network
    for layer in network.layers.values():
        q = layer.posterior
        assert isinstance(q, Inducing)
        q.noise = noise
        assert q.lam is not None
        if lam:
            q.lam.cap = 1.0
            q.lam.raw.data.fill_(math.log(lam / (1 - lam)))
        else:
            q.lam = None
    return network


def rules(q: Inducing, n: int, rng: torch.Generator) -> Tensor:
    """n draws of W by the paper's rule, V from q(V): (n, d_out, d_in). The jitter belongs to D²."""
    with torch.no_grad():
        Z_r, D_r, Z_c, D_c, m, s = (
            t.double()
            for t in (q.Z_r(), q.D_r(), q.Z_c(), q.D_c(), q.law.centre(), q.law.spread())  # type: ignore[union-attr]
        )
        D_r, D_c = ((D**2 + 1e-4 * (Z.square().sum(1) + D**2).mean()).sqrt() for Z, D in ((Z_r, D_r), (Z_c, D_c)))
        V = m + s * torch.randn(n, *m.shape, generator=rng, dtype=torch.float64)
        return draw_by_rule(Z_r, D_r, Z_c, D_c, V, q.scale(), q.sigma, rng).float()


def by_rule(network: BayesianNetwork, x: Tensor) -> Tensor:
    """Logits (K, B, C) of the plain network with the rule's weights in it."""
    plain = build("cnn", **load(embedded("digits")).manifest.architecture.arguments).eval()
    state = network.net.state_dict()
    shared = {name: state[name] for name in plain.state_dict() if name in state}  # BatchNorm
    rng, found = torch.Generator().manual_seed(1), []
    for _ in range(K // CHUNK):
        weights: dict[str, Tensor] = {}
        for name, layer in network.layers.items():
            W = rules(layer.posterior, CHUNK, rng)  # type: ignore[arg-type]
            own = plain.get_submodule(name)
            if own.bias is not None:
                W, weights[f"{name}.bias"] = W[..., :-1], W[..., -1]
            weights[f"{name}.weight"] = W.reshape(CHUNK, *own.get_parameter("weight").shape)
        found.append(vmap(lambda w: functional_call(plain, {**shared, **w}, (x,)))(weights))
    return torch.cat(found)


def by_plan(network: BayesianNetwork, x: Tensor) -> Tensor:
    """Logits (K, B, C) of layers that run in a batch. The other executions of the same draws give the same."""
    factors, rng = network.factors(), torch.Generator().manual_seed(2)
    found: list[Tensor] = []

    def run(execution: Execution, noise: Tensor) -> Tensor:
        plan: dict[nn.Module, Execution] = dict.fromkeys(network.layers.values(), execution)
        return network.go(x, replace(network.arrange(factors, Draws(len(noise), noise, 0), {}), plan=plan))

    for _ in range(K // CHUNK):
        noise = torch.randn(CHUNK, factors.normals, generator=rng)
        found.append(run("batch", noise))
    for execution in EXECUTIONS:
        equal(run(execution, noise[-FEW:]), found[-1][-FEW:])
    return torch.cat(found)


def equal(ours: Tensor, theirs: Tensor) -> None:
    """To rounding in float32, through six layers at most."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def agree(ours: Tensor, theirs: Tensor) -> None:
    """The means of (K, ...) statistics; one such comparison in a hundred thousand fails by chance."""
    a, b = ours.double(), theirs.double()
    error = ((a.var(0) + b.var(0)) / K).sqrt()
    off = (a.mean(0) - b.mean(0)).abs()
    limit = NormalDist().inv_cdf(1 - 0.5e-5 / off.numel())  # of all numbers together
    assert (off <= limit * error + 1e-6).all(), f"{float((off / (error + 1e-9)).max()):.1f} standard errors"


def statistics(logits: Tensor) -> Iterator[Tensor]:
    log_p = logits.double().log_softmax(-1)
    yield log_p.exp()
    yield -(log_p.exp() * log_p).sum(-1)
    yield logits.double()
    yield logits.double().square()


@pytest.mark.parametrize("lam", [pytest.param(0.0, marks=pytest.mark.slow), LAM])
def test_predictions_of_every_plan_are_those_of_the_papers_rule(x: Tensor, lam: float) -> None:
    network = trained("exact", lam)
    with evaluating(network), torch.inference_mode():
        theirs = list(statistics(by_rule(network, x)))
        for a, b in zip(statistics(by_plan(network, x)), theirs, strict=True):
            agree(a, b)


def test_every_layer_has_the_papers_marginals_under_the_factored_law(x: Tensor) -> None:
    """On what reaches each layer in the trained network, at every place, with the default number of directions."""
    network = trained("factored", LAM)
    set_directions(network, x, 4)
    factors, reached = network.factors(), dict[str, Tensor]()
    for name, layer in network.layers.items():
        layer.register_forward_pre_hook(_keep(name, reached))
    with evaluating(network), torch.inference_mode():
        network.run(x[:1], factors, Draws(1, None, 0), {})
        for name in ("3", "10", "15"):  # convolutions of few and of many channels, and a linear layer
            layer = network.layers[name]
            f, q, inputs = factors.layers[name], layer.posterior, reached[name]
            assert isinstance(q, Inducing)
            rng = torch.Generator().manual_seed(3)
            W = rules(q, K, rng)
            patches = _patches(layer.geometry, inputs)  # (places, d_in)
            theirs = torch.einsum("koi,pi->kop", W, patches)
            operand = f.draw(torch.randn(K, f.normals, generator=rng), None)
            out = apply(layer.geometry, inputs.repeat(K, *[1] * (inputs.dim() - 1)), operand, K, "factored")
            ours = out.flatten(2)[..., PLACES] if out.dim() == 4 else out[..., None]
            agree(ours, theirs)
            agree(ours.square(), theirs.square())
            few = operand.part(0, FEW)
            for execution in EXECUTIONS:
                equal(
                    apply(layer.geometry, inputs.repeat(FEW, *[1] * (inputs.dim() - 1)), few, FEW, execution), out[:FEW]
                )


PLACES = [0, 5]


def _keep(name: str, reached: dict[str, Tensor]) -> Any:
    def hook(layer: nn.Module, arguments: tuple[Tensor]) -> None:
        reached[name] = arguments[0].clone()

    return hook


def _patches(geometry: Any, inputs: Tensor) -> Tensor:
    """What the matrix meets at the places that are looked at, cut by torch; the bias meets a 1."""
    if isinstance(geometry, Conv):
        cut: Tensor = F.unfold(inputs, geometry.kernel, padding=geometry.padding)[0].T[PLACES]  # type: ignore[arg-type]
        return cut
    return torch.cat([inputs, torch.ones(1, 1)], 1)
