"""Gaussian processes by random features: the kernel of the features, each output's weights, the exact last layer.

The oracles are closed forms in numpy, with scipy's Hadamard matrix, and share no code with what they judge.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard
from scipy.stats import multivariate_normal
from torch import nn

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.export import export
from dubito.deploy.edge.export import save as save_onnx
from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.architectures import Fourier
from dubito.models.manifest import Card, Input, Regression
from dubito.models.network.network import as_matrix
from dubito.models.posteriors.blocks import Grid, weights
from dubito.models.posteriors.full_covariance import BlockCovariance
from dubito.models.posteriors.whvi import Whvi, nearest

Array = NDArray[Any]
SEED = 0
RNG = np.random.default_rng(SEED)
X = RNG.normal(size=(6, 3))


def H(D: int) -> Array:
    return np.asarray(hadamard(D) / math.sqrt(D))


def posterior(layer: nn.Module) -> Whvi:
    q = layer.get_submodule("posterior")
    assert isinstance(q, Whvi)
    return q


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_features_drawn_from_the_prior_have_the_inner_products_of_the_kernel(scale: float) -> None:
    """exp(−‖x − x'‖² σ²/2) with σ² = prior_scale²/d_in, to 5 standard errors of the draws, in any position of S."""
    torch.manual_seed(SEED)
    net = build("random-features", inputs=3, outputs=1, features=32)
    network = bayesianize(net, "whvi-gp", start="prior", prior_scale=scale).double()
    projection = posterior(network.layers["1"])
    projection.law = BlockCovariance(torch.zeros(8, 4, dtype=torch.double), 1.0)
    factors, K = projection.factors(), 20_000
    noise = torch.randn(K, factors.normals, dtype=torch.double)
    W = as_matrix(factors.draw(noise, None))
    features = Fourier()(torch.from_numpy(X) @ W.mT) / math.sqrt(2 * 32)
    gram = (features @ features.mT).numpy()
    squares = ((X[:, None] - X[None]) ** 2).sum(-1)
    expected = np.exp(-squares * scale**2 / 3 / 2)
    assert (np.abs(gram.mean(0) - expected) < 5 * gram.std(0) / math.sqrt(K) + 1e-9).all()
    assert expected.min() < 0.9


@pytest.mark.parametrize(("d_out", "d_in", "D"), [(3, 20, 4), (2, 16, 4), (5, 3, 4), (1, 20, 4), (4, 9, 2)])
def test_each_output_has_blocks_of_its_own(d_out: int, d_in: int, D: int) -> None:
    grid = Grid(d_out, d_in, D, fold=True)
    (a, b), (c, d) = grid.scales
    S_1 = grid.spread_rows(torch.from_numpy(RNG.normal(size=(a, b))))
    S_2 = grid.spread_columns(torch.from_numpy(RNG.normal(size=(c, d))))
    g = torch.from_numpy(RNG.normal(size=(3, grid.rows, 1, D)))
    each = math.ceil(d_in / D**2)
    assert grid.rows == d_out * each
    W = weights(grid, S_1, S_2, g).numpy()
    for k in range(3):
        for o in range(d_out):
            own = range(o * each, (o + 1) * each)
            squares = [np.diag(S_1[r, 0]) @ H(D) @ np.diag(g[k, r, 0]) @ H(D) @ np.diag(S_2[r, 0]) for r in own]
            row = np.concatenate([square.ravel() for square in squares])[:d_in]
            np.testing.assert_allclose(W[k, o], row, atol=1e-12)


def test_the_nearest_g_gives_back_weights_that_are_of_this_form() -> None:
    torch.manual_seed(SEED)
    network = bayesianize(nn.Linear(32, 3, bias=False), "whvi-column", D=4).double()
    q = posterior(network.layers[""])
    g = torch.randn(6, 4, dtype=torch.double)
    S_1, S_2 = q.grid.spread_rows(q.S_1), q.grid.spread_columns(q.S_2)
    W = weights(q.grid, S_1, S_2, g.view(1, 6, 1, 4))[0].detach()
    again = weights(q.grid, S_1, S_2, nearest(q, W).view(1, 6, 1, 4))[0].detach()
    torch.testing.assert_close(again, W)


def test_the_last_layer_takes_its_exact_posterior_and_the_bound_is_then_the_evidence() -> None:
    """f = Φ A g with fixed features: g given y is Gaussian, and with that q the ELBO is log N(y; 0, ΦA(ΦA)ᵀ + σ²I)."""
    torch.manual_seed(SEED)
    net = build("random-features", inputs=3, outputs=1, features=8)
    network = bayesianize(net, "whvi-gp", start="prior", task=Regression(), layers={"1": "deterministic"}).double()
    q, noise, N = posterior(network.layers["3"]), 0.4, 30
    x = RNG.normal(size=(N, 3))
    y = np.sin(x[:, 0]) + noise * RNG.normal(size=N)
    Omega = network.get_parameter("net.1.weight").detach().numpy()
    Phi = math.sqrt(2) * np.concatenate([np.cos(x @ Omega.T), np.sin(x @ Omega.T)], 1)
    D = 4
    S_1, S_2 = q.S_1.detach().numpy()[0], q.S_2.detach().numpy()[0]
    A = np.stack([(np.diag(S_1) @ np.outer(H(D)[:, k], H(D)[k]) @ np.diag(S_2)).ravel() for k in range(D)], 1)
    B = Phi @ A
    S = np.linalg.inv(np.eye(D) + B.T @ B / noise**2)
    m, root = S @ B.T @ y / noise**2, np.linalg.cholesky(S)
    q.law = law = BlockCovariance(torch.from_numpy(m)[None].clone(), 1.0)
    with torch.no_grad():
        law.spread.raw.copy_(torch.from_numpy(np.log(np.expm1(np.sqrt(np.diag(S)) - 1e-6)))[None])
        unit = root / np.diag(root)[:, None]
        law.below.copy_(torch.from_numpy(unit[np.tril_indices(D, -1)])[None])
    K = 4096
    f = network.sample(torch.from_numpy(x), K)[..., 0].detach().numpy()
    mean, covariance = B @ m, B @ S @ B.T
    assert (np.abs(f.mean(0) - mean) < 5 * f.std(0) / 64).all()
    products = np.einsum("ki,kj->kij", f - mean, f - mean)
    assert (np.abs(products.mean(0) - covariance) < 5 * products.std(0) / 64).all()
    fit = -(((f - y) / noise) ** 2).sum(1) / 2 - N * math.log(noise * math.sqrt(2 * math.pi))
    evidence = multivariate_normal(np.zeros(N), B @ B.T + noise**2 * np.eye(N)).logpdf(y)
    assert abs(fit.mean() - float(network.kl().detach()) - evidence) < 5 * fit.std() / 64


def test_sizes_are_those_of_the_paper() -> None:
    """[Rossi20, table 6]: of order √N numbers for each output, with N features: a square of side √(2N)."""
    network = bayesianize(build("random-features", inputs=16, outputs=26, features=512), "whvi-gp")
    (projection, last) = network.layers.values()
    assert (projection.entry.method, last.entry.method) == ("whvi", "whvi-column")
    assert sum(p.numel() for p in last.parameters()) == 26 * 4 * 32  # S_1, S_2, mean and spread of g


@pytest.mark.usefixtures("quick_exports")
def test_an_exported_process_answers_as_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    network = bayesianize(build("random-features", inputs=3, outputs=2, features=8), "whvi-gp", start="prior")
    save(network, tmp_path / "model", card=Card(input=Input(shape=(3,))))
    model = load(tmp_path / "model")
    save_onnx(export(model, samples=3), tmp_path / "graph.onnx")
    assert parity(tmp_path / "graph.onnx", model, X.astype(np.float32)).largest < 1e-4
