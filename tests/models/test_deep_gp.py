"""Deep Gaussian processes against dense Gaussians, Gaussian process regression and Monte Carlo, all in numpy float64.

The oracles write the kernel, its inverses and densities down anew, and share no code with what they judge.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, predict, save
from dubito.models.errors import ConversionError
from dubito.models.manifest import Card, Input, Regression
from dubito.models.network.geometry import Linear
from dubito.models.network.network import Arrival, BayesianNetwork
from dubito.models.posteriors.deep_gp import GlobalProcess, GlobalProcessLayer, LocalProcess
from dubito.models.posteriors.full_covariance import BlockCovariance
from dubito.models.posteriors.functions import JITTER, Functions
from dubito.models.posteriors.protocol import InSequence
from tests.examples import at_most

Array = NDArray[Any]
SEED = 0
NOISE = 0.3  # standard deviation of the targets
RNG = np.random.default_rng(SEED)
X, NEW = RNG.normal(size=(12, 2)), RNG.normal(size=(5, 2))
Y = np.sin(2 * X[:, :1]) + X[:, 1:] + NOISE * RNG.normal(size=(12, 1))
LENGTH, VARIANCE = np.array([0.8, 1.7]), 1.4  # far apart, so that swapping them shows


def kernel(a: Array, b: Array, length: Array = LENGTH, variance: float = VARIANCE) -> Array:
    squares = (((a[:, None] - b[None]) / length) ** 2).sum(-1)
    return np.asarray(variance * np.exp(-squares / 2))


def at_points(Z: Array, length: Array = LENGTH, variance: float = VARIANCE) -> Array:
    return kernel(Z, Z, length, variance) + JITTER * variance * np.eye(len(Z))


def network_of(method: str, layers: int = 1, points: Array = X) -> BayesianNetwork:
    """In float64, with inducing inputs at these points and the kernel above in every layer."""
    torch.manual_seed(SEED)
    examples = (torch.from_numpy(X), torch.from_numpy(Y))
    net = build("deep-gp", inputs=2, outputs=1, layers=layers).double()
    network = bayesianize(net, method, start="prior", inducing=len(points), examples=examples, task=Regression())
    with torch.no_grad():
        if network.joint is not None:
            network.get_parameter("inducing_inputs.U_0").copy_(torch.from_numpy(points))
        for layer in network.layers.values():
            layer.get_parameter("posterior.log_length").copy_(torch.from_numpy(LENGTH).log())
            layer.get_parameter("posterior.log_variance").fill_(math.log(VARIANCE))
    return network


def only(network: BayesianNetwork) -> GlobalProcess | LocalProcess:
    (layer,) = network.layers.values()
    assert isinstance(layer.q, GlobalProcess | LocalProcess)
    return layer.q


def exact(points: Array = X) -> BayesianNetwork:
    """Points at the data, their targets as pseudo-outputs, the noise's precision as Λ."""
    network = network_of("dgp", points=points)
    q = only(network)
    assert isinstance(q, GlobalProcess)
    with torch.no_grad():
        q.V.copy_(torch.from_numpy(Y)[:, None])
        q.log_lam.fill_(-2 * math.log(NOISE))
    return network


def arbitrary(points: Array = X) -> tuple[GlobalProcess, Array, Array]:
    """A layer with a full Λ, which is returned with V."""
    network = network_of("dgp", points=points)
    q, rng = only(network), torch.Generator().manual_seed(SEED)
    assert isinstance(q, GlobalProcess)
    with torch.no_grad():
        for p in (q.V, q.log_lam, q.below):
            p.copy_(torch.randn(p.shape, generator=rng, dtype=p.dtype))
    n = len(q.log_lam)
    unit = np.eye(n)
    unit[np.tril_indices(n, -1)] = q.below.detach().numpy()
    R = np.exp(q.log_lam.detach().numpy() / 2)[:, None] * unit
    return q, q.V.detach().numpy()[:, 0], R @ R.T


def drawn(q: GlobalProcess, points: Array, K: int, seed: int = SEED) -> tuple[Functions, Tensor]:
    f = q.factors()
    assert isinstance(f, InSequence)
    inputs = torch.from_numpy(points).expand(K, *points.shape)
    noise = torch.randn(K, f.normals, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    functions, ratio = f.draw_given(Arrival(Linear(points.shape[1], 1, bias=False), inputs), noise)
    assert isinstance(functions, Functions)
    return functions, ratio


def close(samples: Array, mean: Array, covariance: Array) -> None:
    """Mean and covariance of draws (N, n), to 5 standard errors, which the draws themselves give."""
    N = len(samples)
    centred = samples - mean
    assert (np.abs(centred.mean(0)) < 5 * centred.std(0) / N**0.5 + 1e-9).all()
    products = np.einsum("ni,nj->nij", centred, centred)
    assert (np.abs(products.mean(0) - covariance) < 5 * products.std(0) / N**0.5 + 1e-9).all()


class TestOneLayerIsGaussianProcessRegression:
    K = at_points(X)
    both = np.linalg.inv(K + NOISE**2 * np.eye(12))

    def test_draws_at_the_data_have_the_posterior_of_regression(self) -> None:
        q = only(exact())
        assert isinstance(q, GlobalProcess)
        u = drawn(q, X, 20_000)[0].at_points()[..., 0].detach().numpy()
        close(u, (self.K @ self.both @ Y)[:, 0], self.K - self.K @ self.both @ self.K)

    @pytest.mark.parametrize("form", ["served", "trained"])
    def test_draws_at_new_inputs_have_the_predictive_distribution(self, form: str) -> None:
        network, new = exact(), torch.from_numpy(NEW)
        if form == "served":
            out = predict(network, network.factors(), new, 4096, SEED, keep_outputs=True).outputs
            assert out is not None
        else:
            torch.manual_seed(SEED)
            out = network.sample(new, 4096).detach()
        cross = kernel(NEW, X)
        mean = (cross @ self.both @ Y)[:, 0]
        variance = VARIANCE - np.einsum("ij,jk,ik->i", cross, self.both, cross)
        f = out[..., 0].double().numpy() - mean
        assert (np.abs(f.mean(0)) < 5 * f.std(0) / 64).all()
        assert (np.abs((f**2).mean(0) - variance) < 5 * (f**2).std(0) / 64).all()

    def test_the_bound_is_the_log_evidence_for_every_draw(self) -> None:
        """But for the jitter: outputs at the data are u with a noise of 1e-3 of the process, here up to 0.02 nats."""
        network = exact()
        evidence = multivariate_normal(np.zeros(12), self.K + NOISE**2 * np.eye(12)).logpdf(Y[:, 0])
        for seed in range(5):
            torch.manual_seed(seed)
            out, ratio = network.sample_with_ratio(torch.from_numpy(X), 1)
            residuals = (out[0].detach().numpy() - Y) / NOISE
            fit = -(residuals**2).sum() / 2 - 12 * math.log(NOISE * math.sqrt(2 * math.pi))
            assert fit - float(ratio.detach()) == pytest.approx(evidence, abs=0.1)

    def test_the_mean_is_that_of_regression(self) -> None:
        network = exact()
        out = predict(network, network.factors(), torch.from_numpy(NEW), 0, keep_outputs=True).outputs
        assert out is not None
        np.testing.assert_allclose(out[0, :, 0], (kernel(NEW, X) @ self.both @ Y)[:, 0], atol=1e-5)


class TestLawOfOutputsAtThePoints:
    def test_draws_have_the_mean_and_covariance_of_equation_22_with_a_full_precision_matrix(self) -> None:
        q, V, Lam = arbitrary()
        Sigma = np.linalg.inv(np.linalg.inv(at_points(X)) + Lam)
        u = drawn(q, X, 20_000)[0].at_points()[..., 0].detach().numpy()
        close(u, (Sigma @ Lam @ V)[:, 0], Sigma)

    def test_log_q_less_log_p_is_that_of_the_dense_gaussians(self) -> None:
        q, V, Lam = arbitrary()
        Sigma = np.linalg.inv(np.linalg.inv(at_points(X)) + Lam)
        functions, ratio = drawn(q, X, 6)
        u = functions.at_points()[..., 0].detach().numpy()
        log_Q = multivariate_normal((Sigma @ Lam @ V)[:, 0], Sigma).logpdf(u)
        log_P = multivariate_normal(np.zeros(12), at_points(X)).logpdf(u)
        np.testing.assert_allclose(ratio.detach().numpy(), log_Q - log_P, rtol=1e-6, atol=1e-6)

    def test_outputs_given_u_have_the_conditional_of_the_process(self) -> None:
        functions, _ = drawn(arbitrary()[0], X, 2)
        x = torch.from_numpy(NEW).expand(2, *NEW.shape)
        u, A = functions.at_points()[..., 0].detach().numpy(), kernel(NEW, X) @ np.linalg.inv(at_points(X))
        std = np.sqrt(VARIANCE - np.einsum("ij,ij->i", A, kernel(NEW, X)))
        e = functions.e
        assert e is not None
        np.testing.assert_allclose(functions(x)[..., 0].detach().numpy(), u @ A.T + std * e.numpy(), rtol=1e-7)


def by_hand(method: str, network: BayesianNetwork, x: Array, N: int) -> Array:
    """Draws of a two-layer network at each x (N, n), each input with normals of its own: numpy alone."""
    rng = np.random.default_rng(SEED + 1)
    first, last = (layer.q for layer in network.layers.values())
    out = np.empty((N, len(x)))
    U_0 = X if method == "dgp" else None
    frozen = {q: q.law.freeze() for q in (first, last) if isinstance(q, LocalProcess)}
    for k in range(N):
        Z, h = U_0, x
        for q, width in ((first, 2), (last, 1)):
            if isinstance(q, GlobalProcess):
                assert Z is not None
                K, V, Lam = at_points(Z), q.V.detach().numpy()[:, 0], np.diag(np.exp(q.log_lam.detach().numpy()))
                Sigma = K - K @ np.linalg.inv(K + np.linalg.inv(Lam)) @ K
                root = np.linalg.cholesky(Sigma + 1e-12 * np.eye(len(K)))
                u = Sigma @ Lam @ V + root @ rng.normal(size=(len(K), width))
            else:
                assert isinstance(q, LocalProcess)
                Z = q.Z.detach().numpy()
                K = at_points(Z)
                f = frozen[q]
                w = f.centre.detach().numpy() + np.einsum(
                    "oij,oj->oi", f.root.detach().numpy(), rng.normal(size=f.centre.shape)
                )
                u = np.linalg.cholesky(K) @ w.T
            A = kernel(h, Z) @ np.linalg.inv(K)
            std = np.sqrt(np.maximum(VARIANCE - np.einsum("ij,ij->i", A, kernel(h, Z)), 0))
            f_h = A @ u + std[:, None] * rng.normal(size=(len(h), width))
            h = h + f_h if width == 2 else f_h  # the skip connection
            Z = Z + u if width == 2 else Z
        out[k] = h[:, 0]
    return out


N = at_most(1024)  # draws of both layers


@cache
def two_layers(method: str) -> tuple[BayesianNetwork, Array]:
    """A network with parameters at random, and its outputs at `NEW` by hand."""
    network = network_of(method, layers=2)
    rng = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for layer in network.layers.values():
            for name in ("V", "Z", "law.centre.value", "law.below"):
                p = dict(layer.q.named_parameters()).get(name)
                if p is not None:
                    p.copy_(0.7 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
            if isinstance(layer.q, GlobalProcess):
                layer.q.log_lam.copy_(torch.linspace(-2, 2, 12))
    return network, by_hand(method, network, NEW, N)


@pytest.mark.draws
@pytest.mark.parametrize("form", ["served", "trained"])
@pytest.mark.parametrize("method", ["dgp", "dsvi"])
def test_two_layers_have_the_moments_of_brute_force(method: str, form: str) -> None:
    """Mean and variance at each input, to 5 standard errors of both; served draws share what u leaves open."""
    network, theirs = two_layers(method)
    x = torch.from_numpy(NEW)
    if form == "served":
        out = predict(network, network.factors(), x, N, SEED, keep_outputs=True).outputs
        assert out is not None
    else:
        torch.manual_seed(SEED)
        out = network.sample(x, N).detach()
    ours = out[..., 0].double().numpy()
    for a, b in ((ours, theirs), ((ours - theirs.mean(0)) ** 2, (theirs - theirs.mean(0)) ** 2)):
        error = np.sqrt((a.var(0) + b.var(0)) / N)
        assert (np.abs(a.mean(0) - b.mean(0)) < 5 * error).all()
    assert theirs.std(0).min() > 0.1


class TestLocalPoints:
    Z = X[:5] + 0.1

    def optimal(self) -> BayesianNetwork:
        """The best q for a Gaussian likelihood [Titsias09]: w ~ N(σ⁻²S A y, S), S = (I + σ⁻²A Aᵀ)⁻¹, A = L⁻¹k(Z, X)."""
        network = network_of("dsvi", points=self.Z)
        q = only(network)
        assert isinstance(q, LocalProcess)
        A = np.linalg.solve(np.linalg.cholesky(at_points(self.Z)), kernel(self.Z, X))
        S = np.linalg.inv(np.eye(5) + A @ A.T / NOISE**2)
        root = np.linalg.cholesky(S)
        with torch.no_grad():
            q.Z.copy_(torch.from_numpy(self.Z))
            q.law = BlockCovariance(torch.from_numpy((S @ A @ Y / NOISE**2).T.copy()), 1.0)
            std = np.sqrt(np.diag(S))
            q.law.spread.raw.copy_(torch.from_numpy(np.log(np.expm1(std - 1e-6))))
            unit = root / np.diag(root)[:, None]
            q.law.below.copy_(torch.from_numpy(unit[np.tril_indices(5, -1)]))
        self.A, self.S = A, S
        return network

    def test_the_bound_is_that_of_the_sparse_process_in_closed_form(self) -> None:
        """log N(y; 0, Q + σ²I) − tr(K − Q)/2σ² [Titsias09], to 5 standard errors of the draws."""
        network = self.optimal()
        Q = self.A.T @ self.A
        bound = multivariate_normal(np.zeros(12), Q + NOISE**2 * np.eye(12)).logpdf(Y[:, 0])
        bound -= (12 * VARIANCE - np.trace(Q)) / (2 * NOISE**2)
        torch.manual_seed(SEED)
        out = network.sample(torch.from_numpy(X), 4096).detach().numpy()
        fit = -(((out - Y) / NOISE) ** 2).sum((1, 2)) / 2 - 12 * math.log(NOISE * math.sqrt(2 * math.pi))
        assert abs(fit.mean() - float(network.kl().detach()) - bound) < 5 * fit.std() / 64

    def test_the_kl_is_that_of_the_dense_gaussians_of_u(self) -> None:
        network = self.optimal()
        K, L = at_points(self.Z), np.linalg.cholesky(at_points(self.Z))
        m, S = L @ (self.S @ self.A @ Y / NOISE**2)[:, 0], L @ self.S @ L.T
        inverse = np.linalg.inv(K)
        log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
        kl = (m @ inverse @ m + np.trace(inverse @ S) - 5 + log_dets) / 2
        assert float(network.kl().detach()) == pytest.approx(kl, rel=1e-6)


class TestConditioning:
    def test_points_that_coincide_and_long_length_scales_give_the_density_of_extended_precision(self) -> None:
        """Every point twice, and length scales 300 times as long: k(Z, Z) is singular but for the jitter."""
        Z = np.concatenate([X, X])
        q, V, Lam = arbitrary(Z)
        length = 300 * LENGTH
        with torch.no_grad():
            q.log_length.copy_(torch.from_numpy(length).log())
        functions, ratio = drawn(q, Z, 3)
        K = at_points(Z, length)
        B = np.linalg.inv(Lam) + K  # well conditioned, so that this form of log Q − log P needs no inverse of K
        v, u = V[:, 0], functions.at_points()[..., 0].detach().numpy()
        # log P(u | v) − log P(u) = log N(v; u, Λ⁻¹) − log N(v; 0, K + Λ⁻¹)
        expected = multivariate_normal(v, np.linalg.inv(Lam)).logpdf(u) - multivariate_normal(np.zeros(24), B).logpdf(v)
        np.testing.assert_allclose(ratio.detach().numpy(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("scale", [1e-4, 1e4])
    def test_the_jitter_is_relative(self, scale: float) -> None:
        """With process and V scaled alike and Λ by the inverse square, u is scaled, and its density ratio is not."""
        q, _, _ = arbitrary()
        before, ratio = drawn(q, X, 3)
        with torch.no_grad():
            q.log_variance.add_(2 * math.log(scale))
            q.V.mul_(scale)
            q.log_lam.sub_(2 * math.log(scale))
        after, same = drawn(q, X, 3)
        torch.testing.assert_close(after.at_points() / scale, before.at_points(), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(same, ratio, rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize("method", ["dgp", "dsvi"])
    def test_five_layers_in_float32_with_coinciding_points_have_finite_gradients(self, method: str) -> None:
        torch.manual_seed(SEED)
        x = torch.randn(20, 3).repeat(3, 1)
        y = x[:, :1].sin()
        network = bayesianize(
            build("deep-gp", inputs=3, outputs=1, layers=5),
            method,
            start="prior",
            inducing=60,
            examples=(x, y),
            task=Regression(),
        )
        out, ratio = network.sample_with_ratio(x, 2)
        ((out - y).square().sum() + network.kl() + ratio).backward()
        for name, p in network.named_parameters():
            assert p.grad is None or p.grad.isfinite().all(), name
        assert out.isfinite().all()


class TestServing:
    @pytest.mark.parametrize("method", ["dgp", "dsvi"])
    def test_a_draw_is_one_function_whatever_the_batch(self, method: str) -> None:
        network, x = network_of(method, layers=3).float(), torch.from_numpy(NEW).float()
        factors = network.factors()
        together, alone = (predict(network, factors, rows, 8, 1, keep_outputs=True).outputs for rows in (x, x[2:3]))
        assert together is not None
        assert alone is not None
        torch.testing.assert_close(together[:, 2:3], alone)
        assert together.std(0).min() > 1e-3

    @pytest.mark.parametrize("method", ["dgp", "dsvi"])
    def test_a_file_gives_the_same_answers(self, method: str, tmp_path: Path) -> None:
        network, x = network_of(method, layers=2).float(), torch.from_numpy(NEW).float()
        save(network, tmp_path / "m", card=Card(input=Input(shape=(2,))))
        ours = predict(network, network.factors(), x, 8, 1, keep_outputs=True).outputs
        theirs = load(tmp_path / "m").predict(x, 8, 1, keep_outputs=True).outputs
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


class TestStart:
    def test_hidden_layers_start_near_the_identity_and_the_last_at_the_targets(self) -> None:
        torch.manual_seed(SEED)
        x, y = torch.from_numpy(X).float(), torch.from_numpy(Y).float()
        net = build("deep-gp", inputs=2, outputs=1, layers=3)
        network = bayesianize(net, "dgp", start="prior", inducing=12, examples=(x, y), task=Regression())
        out = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
        assert out is not None
        assert np.corrcoef(out[0, :, 0], Y[:, 0])[0, 1] > 0.9
        first, _, last = (layer.q for layer in network.layers.values())
        assert isinstance(first, GlobalProcess)
        assert isinstance(last, GlobalProcess)
        assert not first.V.any()
        assert set(last.V.detach().flatten().tolist()) == set(y[:, 0].tolist())

    @pytest.mark.parametrize("method", ["dgp", "dsvi"])
    def test_from_a_trained_network_the_mean_is_near_its_outputs(self, method: str) -> None:
        torch.manual_seed(SEED)
        x = torch.randn(200, 3)
        net = build("mlp", inputs=3, hidden=[8], outputs=2, activation="tanh")
        network = bayesianize(net, method, inducing=100, examples=(x, None))
        out = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
        assert out is not None
        error = (out[0] - net(x).detach()).square().mean() / net(x).detach().var(0).mean()
        assert float(error) < 0.1

    def test_convolutions_stay_as_they_are_unless_they_are_named(self) -> None:
        x = torch.rand(8, 1, 28, 28)
        network = bayesianize(build("lenet"), "dgp", inducing=4, examples=(x, None))
        assert list(network.layers) == ["7", "9", "11"]
        with pytest.raises(ConversionError, match="layer '0': dgp makes linear layers Gaussian processes"):
            bayesianize(build("lenet"), "dgp", inducing=4, examples=(x, None), layers={"0": "dgp"})

    def test_more_points_than_can_be_factorised_are_refused(self) -> None:
        with pytest.raises(ConversionError, match="inducing is 20,000; expected at most 16,384 points with dgp"):
            bayesianize(build("deep-gp", inputs=2, outputs=1), "dgp", inducing=20_000)
        with pytest.raises(ConversionError, match="meets 2,000 rows of each input: with 10 inducing inputs"):
            bayesianize(nn.Linear(2, 1), "dgp", inducing=10, examples=(torch.randn(20, 2000, 2), None))
        with pytest.raises(ValueError, match="more than 16,384 inducing points"):
            GlobalProcessLayer(points=1 << 10, places=1 << 10, sigma=1.0)

    def test_one_number_of_points(self) -> None:
        with pytest.raises(ConversionError, match="expected one number with dsvi"):
            bayesianize(build("deep-gp", inputs=2, outputs=1), "dsvi", inducing=(3, 4))
