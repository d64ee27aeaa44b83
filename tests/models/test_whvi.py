"""Walsh–Hadamard VI against brute force: dense matrices from scipy, explicit covariances, autograd's Jacobians."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models import bayesianize, build, load, predict, save
from dubito.models.conversion.options import Overrides
from dubito.models.errors import ConversionError
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.posteriors.blocks import Blocks, Grid, side, weights
from dubito.models.posteriors.flows import KL_DRAWS, Planar
from dubito.models.posteriors.full_covariance import BlockCovariance
from dubito.models.posteriors.mean_field import MeanField
from dubito.models.posteriors.protocol import Dense
from dubito.models.posteriors.whvi import Whvi, WhviFactors, nearest
from dubito.models.pruning import prune
from tests.small_models import mlp

run = CliRunner().invoke


def H(D: int) -> Tensor:
    return torch.from_numpy(hadamard(D)).double() / math.sqrt(D)


def assembled(grid: Grid, S_1: Tensor, S_2: Tensor, g: Tensor) -> Tensor:
    """W (d_out, d_in) of one g by dense products, block by block."""
    D = grid.D
    blocks = [
        [torch.diag(S_1[r, c]) @ H(D) @ torch.diag(g[r, c]) @ H(D) @ torch.diag(S_2[r, c]) for c in range(grid.columns)]
        for r in range(grid.rows)
    ]
    if grid.folded:
        return torch.cat([b[0].flatten() for b in blocks])[: grid.d_out * grid.d_in].view(grid.d_out, grid.d_in)
    return torch.cat([torch.cat(row, 1) for row in blocks])[: grid.d_out, : grid.d_in]


def stirred(network: BayesianNetwork) -> BayesianNetwork:
    """Parameters in general position: no two scales equal, covariances that are no multiple of the identity."""
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("spread.raw"):
                p.normal_(0, 0.7)
            elif ".posterior." in name and p.requires_grad:
                p.add_(torch.randn_like(p) * 0.4)
    return network


def posterior_of(network: BayesianNetwork, name: str = "") -> Whvi:
    q = network.layers[name].posterior
    assert isinstance(q, Whvi)
    return q


def factors_of(network: BayesianNetwork, name: str = "") -> WhviFactors:
    f = network.factors().layers[name]
    assert isinstance(f, WhviFactors)
    return f


# d_out, d_in of the weights -> D, rows, columns of blocks
SHAPES = {
    (4, 4): (4, 1, 1),
    (10, 3): (4, 3, 1),
    (3, 10): (4, 1, 3),
    (6, 5): (8, 1, 1),
    (1, 11): (4, 1, 1),
    (9, 1): (4, 1, 1),
    (1, 1): (1, 1, 1),
    (128, 13): (16, 8, 1),
    (64, 576): (64, 1, 9),
}


@pytest.mark.parametrize(("shape", "blocks"), SHAPES.items())
def test_the_blocks_cover_any_shape(shape: tuple[int, int], blocks: tuple[int, int, int]) -> None:
    grid = Grid(*shape, side(*shape))
    assert (grid.D, grid.rows, grid.columns) == blocks


@pytest.mark.parametrize("D", [None, 2, 8])
@pytest.mark.parametrize("shape", [s for s in SHAPES if max(s) < 20])
def test_weights_are_those_of_the_dense_product(shape: tuple[int, int], D: int | None) -> None:
    """And so is what they do to inputs, without being formed."""
    torch.manual_seed(0)
    grid = Grid(*shape, D or side(*shape))
    (a, b), (c, d) = grid.scales
    S_1, S_2 = grid.spread_rows(torch.randn(a, b)).double(), grid.spread_columns(torch.randn(c, d)).double()
    g = torch.randn(3, grid.rows, grid.columns, grid.D, dtype=torch.float64)
    bias = torch.randn(3, shape[0], dtype=torch.float64)
    expected = torch.stack([assembled(grid, S_1, S_2, one) for one in g])
    torch.testing.assert_close(weights(grid, S_1, S_2, g), expected)
    operand = Blocks(grid, S_1, S_2, g, bias)
    torch.testing.assert_close(operand.dense(), torch.cat([expected, bias[..., None]], 2))
    if not grid.folded:
        x = torch.randn(3, 5, shape[1], dtype=torch.float64)
        torch.testing.assert_close(operand.apply(x), x @ expected.mT + bias[:, None])


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear, square": (nn.Linear(8, 8), (8,)),
    "linear, tall": (nn.Linear(3, 11), (3,)),
    "linear, wide, several axes": (nn.Linear(11, 3, bias=False), (2, 11)),
    "linear, one output": (nn.Linear(11, 1), (11,)),
    "linear, one input": (nn.Linear(1, 7), (1,)),
    "convolution": (nn.Conv2d(3, 5, 3, padding=1), (3, 6, 5)),
    "convolution, strided, dilated": (nn.Conv2d(2, 9, (3, 2), (2, 1), (2, 1), (2, 1), bias=False), (2, 9, 7)),
    "convolution, reflected": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 8)),
    "convolution, same": (nn.Conv2d(3, 4, 4, padding="same"), (3, 5, 6)),
    "convolution, grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "convolution, depthwise": (nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
    "convolution, 3D": (nn.Conv3d(2, 3, (2, 1, 3), padding=(1, 0, 1)), (2, 3, 4, 5)),
    "convolution, one output": (nn.Conv2d(3, 1, 3), (3, 5, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("how", "B"), [("factored", 4), ("factored", 100), ("loop", 4), ("batch", 4)])
@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_torchs_own_with_the_drawn_weights(case: str, how: Any, B: int) -> None:
    """W is formed for many inputs of blocks as small as these, and not for few."""
    torch.manual_seed(0)
    layer, shape = LAYERS[case]
    network = stirred(bayesianize(layer, "whvi", layers={"": "whvi"}))  # named, since a depthwise one would stay plain
    factors, K = network.factors(), 3
    f = factors_of(network)
    noise = torch.randn(K, factors.normals)
    out = network.run(x := torch.randn(B, *shape), factors, Draws(K, noise, 0), {"": how})
    g = f.q_g.draw(noise[:, : f.q_g.normals], None).view(K, *f.S_1.shape)
    for k in range(K):
        W = assembled(f.grid, f.S_1.double(), f.S_2.double(), g[k].double()).float()
        drawn = {"weight": W.view_as(layer.weight)}  # type: ignore[arg-type]
        if f.q_b is not None:
            drawn["bias"] = f.q_b.draw(noise[k : k + 1, f.q_g.normals :], None)[0]
        expected = torch.func.functional_call(layer, drawn, x)
        torch.testing.assert_close(out[k], expected, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.abs().max())))
    assert (out[0] - out[1]).abs().max() > 1e-3


def structure(grid: Grid, S_1: Tensor, S_2: Tensor) -> Tensor:
    """A of vec(W) = A g [appendix B, eq. 5], columns stacked, for one square block."""
    h = H(grid.D)
    return torch.cat([torch.diag(S_1[0, 0]) @ h @ torch.diag(S_2[0, 0, i] * h[:, i]) for i in range(grid.D)])


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_induced_mean_and_covariance_of_W(covariance: str) -> None:
    """Appendix A: the dense Gaussian N(A μ, A Σ Aᵀ), and the row and column covariances by its roots T_1 and T_2."""
    torch.manual_seed(2)
    N, D = 100_000, 4
    network = stirred(bayesianize(nn.Linear(D, D, bias=False), "whvi", covariance=covariance))
    f = factors_of(network)
    operand = f.draw(torch.randn(N, f.normals), None)
    assert isinstance(operand, Blocks)
    W = operand.dense().double()
    S_1, S_2, mu = f.S_1.double(), f.S_2.double(), f.q_g.mean(None)[0, 0].double()
    q = f.q_g
    root = (torch.diag(q.spread[0]) if covariance == "diagonal" else q.root[0]).double()  # type: ignore[attr-defined]
    A = structure(f.grid, S_1, S_2)
    mean, C = A @ mu, A @ root @ root.T @ A.T
    stacked = W.mT.flatten(1)
    v = C.diagonal()
    assert ((stacked.mean(0) - mean).abs() < 5 * (v / N).sqrt()).all()
    assert ((stacked.T.cov() - C).abs() < 5 * ((v[:, None] * v + C**2) / N).sqrt()).all()
    M = mean.view(D, D).T
    for left, right, of in ((S_1, S_2, W - M), (S_2, S_1, (W - M).mT)):
        T = torch.einsum("ij,ik->ijk", root, H(D) @ torch.diag(right[0, 0])).flatten(1)
        U = torch.diag(left[0, 0]) @ H(D) @ T  # U^½ = S_1 H T_2, and V^½ likewise up to its trace
        found = of @ of.mT
        assert ((found.mean(0) - U @ U.T).abs() < 5 * found.std(0) / math.sqrt(N)).all()


def test_the_geometry_of_appendix_B() -> None:
    """vec(W) = L Q g with Q's columns orthonormal and L diagonal."""
    for D in (2, 8, 32):
        grid, one = Grid(D, D, D), torch.ones(1, 1, D, dtype=torch.float64)
        units = torch.eye(D, dtype=torch.float64).view(D, 1, 1, D)
        Q = weights(grid, one, one, units).mT.flatten(1).T  # (D², D)
        torch.testing.assert_close(Q.T @ Q, torch.eye(D, dtype=torch.float64))
        S_1, S_2 = torch.randn(1, 1, D).double(), torch.randn(1, 1, D).double()
        L = torch.kron(S_2[0, 0], S_1[0, 0])
        torch.testing.assert_close(weights(grid, S_1, S_2, units).mT.flatten(1).T, L[:, None] * Q)


@pytest.mark.parametrize(("layer", "scale"), [(nn.Linear(60, 100), 1.0), (nn.Linear(900, 1), 2.0)])
def test_the_prior_of_W_has_the_variance_asked_for(layer: nn.Linear, scale: float) -> None:
    """g ~ N(0, I) through the scales of the start: prior_scale²/d_in for each weight."""
    torch.manual_seed(0)
    N = 4000
    f = factors_of(bayesianize(layer, "whvi", start="prior", prior_scale=scale))
    W = weights(f.grid, f.S_1, f.S_2, torch.randn(N, *f.S_1.shape))
    variance = scale**2 / (layer.in_features + 1)
    assert (W.var(0) / variance - 1).abs().max() < 6 * math.sqrt(2 / N)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_kl_is_torchs(covariance: str) -> None:
    torch.manual_seed(0)
    q = posterior_of(stirred(bayesianize(nn.Linear(11, 3), "whvi", covariance=covariance)))
    f = q.factors()
    assert isinstance(f, WhviFactors)
    expected = torch.zeros(())
    for block, mu in enumerate(f.q_g.mean(None)[0]):
        if covariance == "diagonal":
            law: Any = MultivariateNormal(mu, scale_tril=torch.diag(f.q_g.spread[block]))  # type: ignore[attr-defined]
        else:
            law = MultivariateNormal(mu, scale_tril=f.q_g.root[block])  # type: ignore[attr-defined]
        expected = expected + kl_divergence(law, MultivariateNormal(torch.zeros(4), torch.eye(4)))
    bias = Normal(f.q_b.centre, f.q_b.spread)  # type: ignore[union-attr]
    expected = expected + kl_divergence(bias, Normal(torch.zeros(3), 1 / math.sqrt(12))).sum()
    torch.testing.assert_close(q.kl().detach(), expected, rtol=1e-4, atol=1e-4)


def test_the_kl_of_a_network_is_the_sum_of_its_layers() -> None:
    net = mlp(6, 8, 8, 1)
    network = stirred(bayesianize(net, "whvi", layers={"1": {"covariance": "full"}, "5": "ffg-w"}))
    torch.testing.assert_close(network.kl(), torch.stack([layer.q.kl() for layer in network.layers.values()]).sum())


def flowing(base: nn.Module, flows: int = 3) -> Planar:
    planar = Planar(base, flows, torch.zeros(2, 3))
    with torch.no_grad():
        for p in (planar.u, planar.w, planar.b):
            p.normal_(0, 1.5)
    return planar


def test_a_flow_changes_densities_by_its_jacobian() -> None:
    torch.manual_seed(0)
    q = flowing(MeanField(torch.randn(2, 3), 0.5, None)).freeze().to(dtype=torch.float64)
    assert ((q.u * q.w).sum(-1) > -1).all(), "not invertible"
    z = torch.randn(5, 2, 3, dtype=torch.float64)
    bent, log_det = q.bend(z)
    for one, to, found in zip(z, bent, log_det, strict=True):
        expected = one
        for u, w, b in zip(q.u, q.w, q.b, strict=True):
            expected = torch.stack(
                [v + a * torch.tanh(c @ v + d) for v, a, c, d in zip(expected, u, w, b, strict=True)]
            )
        torch.testing.assert_close(to, expected)
        jacobian: Any = torch.autograd.functional.jacobian(lambda v: q.bend(v[None])[0][0], one)
        torch.testing.assert_close(found, torch.linalg.slogdet(jacobian.view(6, 6)).logabsdet)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_kl_of_a_flow(covariance: str) -> None:
    """That of the base, and the mean of log p(z) − log p(f(z)) − log |det ∂f/∂z| over the draws, by autograd."""
    torch.manual_seed(1)
    centre = torch.randn(2, 3)
    base = BlockCovariance(centre, 0.6) if covariance == "full" else MeanField(centre, 0.6, None)
    if isinstance(base, BlockCovariance):
        base.below.data.normal_()
    planar, p = flowing(base, 2), MultivariateNormal(torch.zeros(3), torch.eye(3))
    q = planar.freeze()
    roots = q.q_0.root if covariance == "full" else torch.diag_embed(q.q_0.spread)  # type: ignore[attr-defined]
    torch.manual_seed(2)
    found = planar.kl(1.0)
    torch.manual_seed(2)
    z = centre + (roots @ torch.randn(KL_DRAWS, 2, 3, 1)).squeeze(-1)
    jacobians = torch.vmap(torch.func.jacrev(lambda v: q.bend(v[None])[0][0]))(z).view(-1, 6, 6)
    change = (p.log_prob(z) - p.log_prob(q.bend(z)[0])).sum(-1) - torch.linalg.slogdet(jacobians).logabsdet
    expected = kl_divergence(MultivariateNormal(centre, scale_tril=roots), p).sum() + change.mean()
    assert change.mean().abs() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_flows_start_as_if_they_were_not_there() -> None:
    torch.manual_seed(0)
    base = MeanField(torch.randn(2, 8), 0.3, None)
    planar = Planar(base, 4, torch.zeros(2, 8))
    noise = torch.randn(5, 16)
    torch.testing.assert_close(planar.freeze().draw(noise, None), base.freeze().draw(noise, None), rtol=0, atol=1e-6)
    torch.testing.assert_close(planar.kl(1.0), base.kl(1.0), rtol=1e-5, atol=1e-4)


def test_the_mean_of_a_flow_is_that_of_its_draws() -> None:
    torch.manual_seed(3)
    q = flowing(MeanField(torch.randn(2, 3), 0.8, None)).freeze()
    N = 200_000
    with torch.no_grad():
        drawn, mean = q.draw(torch.randn(N, 6), None), q.mean(None)
    few = drawn.std(0) / math.sqrt(1024)
    assert ((drawn.mean(0) - mean[0]).abs() < 5 * (few + drawn.std(0) / math.sqrt(N))).all()
    flow_of_mean = q.bend(q.q_0.mean(None))[0][0]
    assert ((flow_of_mean - drawn.mean(0)).abs() > 10 * drawn.std(0) / math.sqrt(N)).any()  # another thing


@pytest.mark.parametrize("shape", [(8, 8), (10, 3), (3, 10), (6, 5), (1, 12), (8, 1)])
def test_a_start_from_a_network_is_the_least_squares_fit(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    q = posterior_of(bayesianize(layer, "whvi", start="prior"))
    with torch.no_grad():
        q.S_1.normal_()
        q.S_2.normal_()
    S_1, S_2 = q.grid.spread_rows(q.S_1).double(), q.grid.spread_columns(q.S_2).double()
    n = q.grid.rows * q.grid.columns * q.grid.D
    units = torch.eye(n, dtype=torch.float64).view(n, *S_1.shape)
    A = torch.stack([assembled(q.grid, S_1, S_2, g).flatten() for g in units], 1).detach()
    W = layer.weight.detach().double()
    g = nearest(q, W)
    best = torch.linalg.lstsq(A, W.flatten()[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(A @ g.flatten(), A @ best, rtol=1e-6, atol=1e-8)
    inside = (A @ torch.randn(n, dtype=torch.float64)).view(shape)
    torch.testing.assert_close(A @ nearest(q, inside).flatten(), inside.flatten(), rtol=1e-6, atol=1e-8)


def test_a_start_from_a_network_keeps_the_size_of_its_weights_and_its_bias() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20, 70)
    f = factors_of(bayesianize(layer, "whvi", start="network"))
    operand = f.mean(None)
    assert isinstance(operand, Blocks)
    W = operand.dense()[0]
    torch.testing.assert_close(W[:, -1], layer.bias.detach())
    torch.testing.assert_close(W[:, :-1].norm(), layer.weight.detach().norm())
    nn.init.zeros_(layer.weight)
    assert factors_of(bayesianize(layer, "whvi", start="network")).S_1.isfinite().all()


class Largest(TorchDispatchMode):
    """The largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor):
                self.numel = max(self.numel, made.numel())
        return out


@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Linear(1024, 1024), torch.randn(2, 1024)), (nn.Conv2d(64, 128, 3, padding=1), torch.randn(2, 64, 2, 2))],
)
def test_W_is_not_formed_for_few_inputs(layer: nn.Module, x: Tensor) -> None:
    """Neither to answer nor to train: no tensor comes near the size of the weights."""
    network = bayesianize(layer, "whvi", start="prior")
    factors = network.factors()
    n = layer.weight.numel()  # type: ignore[operator]
    with Largest() as seen:
        network.go(x, network.arrange(factors, Draws(2, torch.randn(2, factors.normals), 0), {"": "factored"}))
        (network(x).square().mean() + network.kl()).backward()
    assert 0 < seen.numel < n / 4
    plan: Any = {"": "loop"}
    with Largest() as seen:  # the check sees a W that is formed
        network.go(x, network.arrange(factors, Draws(1, torch.randn(1, factors.normals), 0), plan))
    assert seen.numel >= n


MIXED: Overrides = {
    "0": {"method": "ffg-u", "inducing": 4},
    "3": {"D": 32},
    "7": {"covariance": "full"},
    "9": {"flows": 1},
    "11": {"method": "ensemble-w", "members": 2},
}


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_methods_mixed_by_layer_round_trip(tmp_path: Path, precision: Any) -> None:
    """FFG-U first, blocks of two kinds, flows, an ensemble last: saved, loaded, the same answers."""
    torch.manual_seed(0)
    net = build("lenet")
    network = stirred(bayesianize(net, "whvi", layers=MIXED))
    x = torch.randn(3, 1, 28, 28)
    path = tmp_path / "mixed.safetensors"
    save(network, path, precision=precision)
    model = load(path)
    before = predict(network, network.factors(), x, 6, 1, keep_outputs=True).outputs
    after = model.predict(x, 6, 1, keep_outputs=True).outputs
    assert before is not None
    assert after is not None
    if precision == "float32":
        assert torch.equal(before, after)
    else:
        assert (before - after).abs().max() < 0.15 * before.std()
    assert model.predict(x, 0).samples == 0
    again = tmp_path / "again.safetensors"
    save(model, again)
    assert again.read_bytes() == path.read_bytes()
    kinds = {name: layer.entry.method for name, layer in model.network.layers.items()}
    assert kinds == {"0": "ffg-u", "3": "whvi", "7": "whvi", "9": "whvi", "11": "ensemble-w"}


def test_what_an_export_needs_is_at_hand() -> None:
    """μ, S_1, S_2 and Σ^½ as plain tensors give the draws, with scipy's H and nothing of ours."""
    torch.manual_seed(0)
    f = factors_of(stirred(bayesianize(nn.Linear(16, 16), "whvi", covariance="full")))
    noise = torch.randn(2, f.normals)
    operand = f.draw(noise, None)
    assert isinstance(operand, Blocks)
    mu, root = f.q_g.centre[0], f.q_g.root[0]  # type: ignore[attr-defined]
    for W, eps in zip(operand.dense(), noise, strict=True):
        g = mu + root @ eps[:16]
        expected = f.S_1[0, 0, :, None] * (H(16).float() @ torch.diag(g) @ H(16).float()) * f.S_2[0, 0]
        torch.testing.assert_close(W[:, :-1], expected, rtol=1e-4, atol=1e-5)


def test_a_folded_layer_is_formed_and_no_other() -> None:
    kinds = {d: type(factors_of(bayesianize(nn.Linear(*d), "whvi")).mean(None)) for d in ((9, 1), (1, 9), (9, 9))}
    assert kinds == {(9, 1): Dense, (1, 9): Dense, (9, 9): Blocks}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"D": 48}, "D is 48; expected a power of two"),
        ({"D": 256}, "layer '': D = 256 for weights of 20 × 31: expected at most 32"),
        ({"covariance": "block"}, "covariance is 'block'; expected diagonal or full"),
        ({"covariance": "full", "covariance_limit": 16}, "Smaller blocks (option D) fit"),
        ({"flows": -1}, "flows is -1; expected a whole number from 0 to 64"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(said)):
        bayesianize(nn.Linear(30, 20), "whvi", **options)


def test_pruning_is_refused_where_there_is_nothing_else_to_prune() -> None:
    with pytest.raises(ConversionError, match="whvi layers have no Z"):
        prune(bayesianize(nn.Linear(30, 20), "whvi"), 0.5)


def test_count_and_inspect(tmp_path: Path) -> None:
    told = json.loads(run(app, ["count", "mlp", "--method", "whvi", "--json"]).stdout)
    # 400 × 784: 1 × 2 blocks of 512, S_1 800, S_2 784, g 2048, bias 800; 400 × 400: 400 + 400 + 1024 + 800; the head
    # of 10 × 400: 25 blocks of 16, S_1 250, S_2 400, g 800, bias 20
    assert told["parameters"] == 4432 + 2624 + 1470
    path = tmp_path / "a.safetensors"
    save(bayesianize(build("lenet"), "whvi", layers={"9": {"covariance": "full", "flows": 2}}), path)
    rows = {row["name"]: row for row in json.loads(run(app, ["inspect", str(path), "--json"]).stdout)["layers"]}
    about = ("method", "D", "blocks", "covariance", "flows")
    assert [rows["7"][key] for key in about] == ["whvi", 128, 4, "diagonal", 0]
    assert [rows["9"][key] for key in about] == ["whvi", 128, 1, "full", 2]
    assert (rows["7"]["bytes"], rows["7"]["deterministic_bytes"]) == (4 * rows["7"]["parameters"], 4 * 120 * 401)
    shown = run(app, ["inspect", str(path)], env={"COLUMNS": "160"}).stdout
    assert f"({rows['7']['bytes'] / rows['7']['deterministic_bytes']:.1%})" in shown
    assert "whvi: Walsh–Hadamard" in shown
    assert "4 × 128" in shown
    assert "full Σ, 2 flows" in shown
