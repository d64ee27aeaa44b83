"""Global and local inducing points: against Bayesian linear regression, dense Gaussians and explicit patches.

The oracles are computed in numpy and scipy, in float64, and share no code with what they judge.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, predict, save
from dubito.models.conversion.start import geometry_of
from dubito.models.errors import ArtifactError, ConversionError
from dubito.models.manifest import Card, Input, Regression
from dubito.models.network.network import BayesianNetwork, Draws, as_matrix
from dubito.models.network.regression_sums import regression_sums
from dubito.models.network.sequence import InducingInputs
from dubito.models.numerics.gamma import NORMALS, gamma
from dubito.models.posteriors.inducing_points import GlobalPoints
from dubito.models.posteriors.regression import kl_of, regress
from dubito.models.posteriors.weight_priors import (
    FrozenPrior,
    InverseWishart,
    Precision,
    ScaleLaw,
    ScalePrior,
    SpatialPrior,
    WeightPrior,
)
from dubito.models.posteriors.weight_space import WeightSpace

Array = NDArray[Any]
SEED = 0


def rng(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=torch.double)


def linear(*sizes: int, bias: bool = False) -> nn.Sequential:
    """A deep linear network in float64."""
    layers = [nn.Linear(i, o, bias=bias) for i, o in pairwise(sizes)]
    return nn.Sequential(*layers).double()


def points_of(network: BayesianNetwork) -> list[GlobalPoints]:
    posteriors = [layer.posterior for layer in network.layers.values()]
    return [q for q in posteriors if isinstance(q, GlobalPoints)]


class TestRegression:
    """U_0 = X, V = Y and Λ = the precision of the noise: the exact posterior [Ober21, eq. 8]."""

    X, Y, noise = drawn(30, 3).numpy(), drawn(30, 2, seed=1).numpy(), 0.3

    def network(self) -> BayesianNetwork:
        torch.manual_seed(SEED)
        examples = (torch.tensor(self.X), torch.tensor(self.Y))
        task = Regression(outputs=2)
        network = bayesianize(linear(3, 2, bias=True), "gi", inducing=30, examples=examples, task=task).double()
        (q,), joint = points_of(network), network.joint
        assert isinstance(joint, InducingInputs)
        with torch.no_grad():
            joint.U_0.copy_(examples[0])
            q.V.copy_(examples[1][:, None])
            q.log_lam.fill_(-2 * np.log(self.noise))
        return network

    def exact(self) -> tuple[Array, Array]:
        """Mean (d_in, d_out) and covariance (d_in, d_in) of the weights and the bias, prior N(0, 1/4)."""
        Phi = np.concatenate([self.X, np.ones((30, 1))], 1)
        Sigma = np.linalg.inv(4 * np.eye(4) + Phi.T @ Phi / self.noise**2)
        return Sigma @ Phi.T @ self.Y / self.noise**2, Sigma

    def test_draws_have_the_mean_and_covariance_of_the_exact_posterior(self) -> None:
        network, N = self.network(), 5000
        mean, Sigma = self.exact()
        factors = network.factors()
        at_mean, draws = Draws(1, None, 0), Draws(N, torch.randn(N, factors.normals, generator=rng()), 0)
        (W_bar,) = factors.stock(network, at_mean).values()
        (operand,) = factors.stock(network, draws).values()
        np.testing.assert_allclose(as_matrix(W_bar)[0].detach().numpy().T, mean, rtol=1e-9)
        W = as_matrix(operand).detach().numpy().reshape(N, -1) - mean.T.ravel()
        covariance = np.kron(np.eye(2), Sigma)
        v = covariance.diagonal()
        assert (np.abs(W.mean(0)) < 5 * np.sqrt(v / N)).all()  # 5 standard errors
        assert (np.abs(W.T @ W / N - covariance) < 5 * np.sqrt((np.outer(v, v) + covariance**2) / N)).all()

    def test_the_elbo_of_one_layer_is_the_log_evidence_of_every_draw(self) -> None:
        """log P(Y given W) + log P(W) − log Q(W) does not depend on W where Q is the posterior."""
        network = self.network()
        outputs, ratio = network.sample_with_ratio(torch.tensor(self.X), 1)
        likelihood = scipy.stats.norm.logpdf(self.Y, outputs[0].detach().numpy(), self.noise).sum()
        Phi = np.concatenate([self.X, np.ones((30, 1))], 1)
        law = scipy.stats.multivariate_normal(np.zeros(30), Phi @ Phi.T / 4 + self.noise**2 * np.eye(30))
        evidence = sum(law.logpdf(y) for y in self.Y.T)
        assert likelihood - float(ratio.detach()) == pytest.approx(evidence, rel=1e-6)  # the ratio is in float32

    def test_the_closed_form_kl_is_the_mean_of_log_ratios(self) -> None:
        Phi, V = drawn(1, 20, 4), drawn(20, 3, seed=1)
        G, h = 0.7 * Phi.mT @ Phi, 0.7 * Phi.mT @ V
        B = drawn(4, 4, seed=2)
        for P in (
            Precision(torch.tensor([2.5]).double()),
            Precision(torch.ones(1).double(), (L := B @ B.mT + 1)[None]),
        ):
            P = P if P.L is None else Precision(P.tau, P.L, torch.linalg.slogdet(L)[1][None])
            _, ratios = regress(G, h, P, drawn(5000, 12))
            error = float(ratios.std()) / 5000**0.5
            assert float(kl_of(G, h, P)) == pytest.approx(float(ratios.mean()), abs=5 * error)

    def test_log_ratios_are_those_of_the_dense_gaussians(self) -> None:
        """log Q − log P once more by scipy, with a prior over the taps of a kernel and a bias."""
        d_in, d_out, K = 7, 2, 3  # two channels of three taps, and the bias
        Phi, V, B = drawn(K, 9, d_in), drawn(9, d_out, seed=1), drawn(3, 3, seed=2)
        L, tau = B @ B.mT + 0.5 * torch.eye(3), torch.tensor([1.7], dtype=torch.double)
        P = Precision(tau, L[None], torch.linalg.slogdet(L)[1][None])
        W, ratios = regress(Phi.mT @ Phi, Phi.mT @ V, P, drawn(K, d_in * d_out, seed=3))
        prior = np.zeros((7, 7))
        prior[:3, :3] = prior[3:6, 3:6] = 1.7 * L.numpy()
        prior[6, 6] = 1.7
        for k in range(K):
            features = Phi[k].numpy()
            Sigma = np.linalg.inv(prior + features.T @ features)
            mean = Sigma @ features.T @ V.numpy()
            for_units = [
                scipy.stats.multivariate_normal(mean[:, i], Sigma).logpdf(W[k, i].numpy())
                - scipy.stats.multivariate_normal(np.zeros(d_in), np.linalg.inv(prior)).logpdf(W[k, i].numpy())
                for i in range(d_out)
            ]
            assert float(ratios[k]) == pytest.approx(sum(for_units), rel=1e-9)


def test_the_density_of_two_layers_is_that_of_the_joint_law_by_brute_force() -> None:
    """Q(W_1) Q(W_2 given W_1) of a linear network, with U_1 = U_0 W_1 recomputed for every draw in numpy."""
    torch.manual_seed(SEED)
    network = bayesianize(linear(3, 4, 2), "gi", inducing=5, examples=(drawn(5, 3), None)).double()
    first, second = points_of(network)
    with torch.no_grad():
        for i, q in enumerate((first, second)):
            q.V.copy_(drawn(*q.V.shape, seed=3 + i))
            q.log_lam.copy_(drawn(5, seed=5 + i))
    assert network.joint is not None
    U = network.joint.inputs
    assert U is not None
    state = [(q.V[:, 0].detach().numpy(), q.log_lam.exp().detach().numpy()) for q in (first, second)]
    for k in range(3):
        torch.manual_seed(k)
        outputs, ratio = network.sample_with_ratio(torch.eye(3, dtype=torch.double), 1)
        torch.manual_seed(k)
        eps = torch.randn(1, 3 * 4 + 4 * 2).double().numpy()[0]  # sorted by shape: the second layer's first
        shapes = [(2, 4), (4, 3)]
        assert [layer.geometry.shape for layer in network._by_shape()] == shapes
        normals = {(2, 4): eps[:8].reshape(2, 4), (4, 3): eps[8:].reshape(4, 3)}
        features, expected, product = U.detach().numpy(), 0.0, np.eye(3)
        for (V, lam), (d_out, d_in) in zip(state, ((4, 3), (2, 4)), strict=True):
            A = d_in * np.eye(d_in) + features.T @ np.diag(lam) @ features
            mean, root = np.linalg.solve(A, features.T @ np.diag(lam) @ V), np.linalg.cholesky(A)
            W = mean + np.linalg.solve(root.T, normals[d_out, d_in].T)
            Sigma = np.linalg.inv(A)
            for i in range(d_out):
                expected += scipy.stats.multivariate_normal(mean[:, i], Sigma).logpdf(W[:, i])
                expected -= scipy.stats.norm.logpdf(W[:, i], 0, d_in**-0.5).sum()
            features, product = features @ W, product @ W
        assert float(ratio.detach()) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(outputs[0].detach().numpy(), product, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
    K=st.integers(1, 2),
)
def test_sums_over_patches_are_those_of_explicit_patches(
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    bias: bool,
    K: int,
) -> None:
    """Against `F.unfold`, for random geometry."""
    M, side = 3, (7, 6)
    conv = nn.Conv2d(channels, 4, kernel, stride, padding, dilation, bias=bias).double()
    x, lam = drawn(K, M, channels, *side), drawn(M, seed=1).exp()
    maps = conv(x.flatten(0, 1)).detach()
    V = drawn(M, maps[0, 0].numel(), 4, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, V, lam)]
    G, h = regression_sums(geometry_of(conv), *leaves)
    patches = F.unfold(x.flatten(0, 1), kernel, dilation, padding, stride).mT  # (K·M, places, d_in)
    if bias:
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], -1)
    Phi = patches.unflatten(0, (K, M)).flatten(1, 2).numpy()
    weights = lam.repeat_interleave(V.shape[1]).numpy()
    for k in range(K):
        np.testing.assert_allclose(G[k].detach(), Phi[k].T @ (weights[:, None] * Phi[k]), rtol=1e-9, atol=1e-12)
        expected = Phi[k].T @ (weights[:, None] * V.flatten(0, 1).numpy())
        np.testing.assert_allclose(h[k].detach(), expected, rtol=1e-9, atol=1e-12)
    # gradients of ⟨A, G⟩ + ⟨B, h⟩: by Λ Φ (A + Aᵀ) + Λ V Bᵀ at the patches, which F.fold adds up, by Λ Φ B, and by λ
    A, B = drawn(*G.shape, seed=3).numpy(), drawn(*h.shape, seed=4).numpy()
    ((torch.tensor(A) * G).sum() + (torch.tensor(B) * h).sum()).backward()
    flat = V.flatten(0, 1).numpy()
    of_V = sum(weights[:, None] * Phi[k] @ B[k] for k in range(K))
    of_lam = sum((Phi[k] @ A[k] * Phi[k]).sum(1) + (Phi[k] @ B[k] * flat).sum(1) for k in range(K))
    of_Phi = [weights[:, None] * (Phi[k] @ (A[k] + A[k].T) + flat @ B[k].T) for k in range(K)]
    columns = torch.tensor(np.stack(of_Phi)[..., : patches.shape[-1] - bias]).unflatten(1, (M, -1)).flatten(0, 1)
    of_x = F.fold(columns.mT, side, kernel, dilation, padding, stride)
    expected_gradients = (of_x.view_as(x), torch.tensor(of_V).view_as(V), torch.tensor(of_lam).view(M, -1).sum(1))
    for leaf, gradient in zip(leaves, expected_gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-9)


def test_large_features_that_are_nearly_equal_give_the_density_of_float64() -> None:
    """Of a top layer behind pooling: in float32, rounding of G would outweigh the precision of the prior."""
    M, d_in = 500, 33
    x = 1e4 * (1 + 1e-4 * drawn(1, M, d_in - 1))
    V, lam = drawn(M, 1, 3, seed=1), drawn(M, seed=2).exp()
    P = Precision(torch.tensor([33.0], dtype=torch.double))
    x = x.float()  # what arrives is exact in float32
    G, h = regression_sums(geometry_of(nn.Linear(d_in - 1, 3)), x, V.float(), lam.float())
    _, ratio = regress(G, h, P, noise := drawn(1, 3 * d_in, seed=3))
    Phi = np.concatenate([x[0].double().numpy(), np.ones((M, 1))], 1)
    weighted = Phi.T * lam.float().double().numpy()
    A, b = 33 * np.eye(d_in) + weighted @ Phi, weighted @ V.float().double().numpy()[:, 0]
    root = np.linalg.cholesky(A)
    eps = noise.view(3, d_in).numpy().T
    W = np.linalg.solve(root.T, np.linalg.solve(root, b) + eps[0:d_in])
    log_Q = 3 * np.log(root.diagonal()).sum() - (eps**2).sum() / 2
    log_P = 3 * d_in * np.log(33) / 2 - 33 * (W**2).sum() / 2
    assert float(ratio) == pytest.approx(log_Q - log_P, rel=1e-4)


def test_sums_in_parts_have_the_same_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    x, V, lam = drawn(2, 5, 2, 6, 6), drawn(5, 36, 3, seed=1), drawn(5, seed=2).exp()
    results = []
    for at_once in (1 << 25, 1 << 12):
        monkeypatch.setattr("dubito.models.network.regression_sums.PATCHES", at_once)
        leaves = [t.clone().requires_grad_() for t in (x, V, lam)]
        G, h = regression_sums(geometry_of(conv), *leaves)
        (G.sin().sum() + h.cos().sum()).backward()
        results.append([G.detach(), h.detach(), *(t.grad for t in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class TestPriors:
    def test_gamma_variables_have_the_distribution_and_the_gradient_of_gamma(self) -> None:
        N = 5000
        for a in (1.0, 2.5, 40.0):
            shape = torch.tensor(a, dtype=torch.double, requires_grad=True)
            x = gamma(drawn(N, NORMALS), shape)
            assert scipy.stats.kstest(x.detach().numpy(), scipy.stats.gamma(a).cdf).pvalue > 1e-4
            (slope,) = torch.autograd.grad(x.log().sum() / N, shape)
            each = (x.detach() - 0).log()
            error = float(each.std()) / N**0.5
            assert float(slope) == pytest.approx(scipy.special.polygamma(1, a), rel=0.05 + error)  # of E log x = ψ(a)

    def test_the_kl_of_a_scale_is_that_of_gamma_distributions(self) -> None:
        prior = ScalePrior(torch.zeros(())).double()
        with torch.no_grad():
            prior.alpha.fill_(np.log(3.0))
            prior.beta.fill_(np.log(1.5))
        q, p = scipy.stats.gamma(5, scale=1 / 3.5), scipy.stats.gamma(2, scale=1 / 2)
        expected = scipy.integrate.quad(lambda s: q.pdf(s) * (q.logpdf(s) - p.logpdf(s)), 1e-9, 40)[0]
        assert float(prior.kl(torch.zeros((), dtype=torch.double)).detach()) == pytest.approx(expected, rel=1e-6)
        tau = prior.freeze(0.5, torch.zeros((), dtype=torch.double)).draw(drawn(5000, NORMALS)).tau
        assert scipy.stats.kstest(tau.detach().numpy() / 4, q.cdf).pvalue > 1e-4  # τ = s/σ²

    def spatial(self) -> tuple[SpatialPrior, scipy.stats.invwishart]:
        taps, d_in = 3, 6
        prior = SpatialPrior(taps, d_in, torch.zeros((), dtype=torch.double)).double()
        with torch.no_grad():
            prior.B.copy_(drawn(taps, taps))
            prior.nu.fill_(np.log(2.5))
        B = prior.B.detach().numpy()
        return prior, scipy.stats.invwishart(d_in + 1 + 2.5, (d_in + 1) * np.eye(taps) + B @ B.T)

    def test_draws_of_an_inverse_wishart_have_its_moments(self) -> None:
        prior, q = self.spatial()
        N, frozen = 5000, prior.freeze(1.0, torch.zeros((), dtype=torch.double))
        P = frozen.draw(drawn(N, frozen.normals))
        assert P.L is not None
        assert P.log_det_L is not None
        L = P.L.detach().numpy()
        deviations = L.reshape(N, -1).std(0) / N**0.5
        assert (np.abs(L.mean(0) - q.mean()).ravel() < 5 * deviations).all()
        np.testing.assert_allclose(np.linalg.slogdet(L)[1], P.log_det_L.detach().numpy(), rtol=1e-9)
        inverse = np.linalg.inv(L)  # Wishart: its variances too
        wishart = scipy.stats.wishart(q.df, np.linalg.inv(q.scale))
        assert (np.abs(inverse.mean(0) - wishart.mean()) < 5 * inverse.std(0) / N**0.5).all()
        squares = (inverse - wishart.mean()) ** 2
        assert (np.abs(squares.mean(0) - wishart.var()) < 5 * squares.std(0) / N**0.5).all()

    def test_the_kl_of_an_inverse_wishart_is_the_mean_of_log_ratios(self) -> None:
        prior, q = self.spatial()
        p = scipy.stats.invwishart(7, 7 * np.eye(3))
        samples = np.moveaxis(q.rvs(5000, random_state=SEED), 0, -1)
        ratios = q.logpdf(samples) - p.logpdf(samples)
        kl = float(prior.kl(torch.zeros((), dtype=torch.double)).detach())
        assert kl == pytest.approx(ratios.mean(), abs=5 * ratios.std() / 5000**0.5)

    @pytest.mark.parametrize("kind", ["neal", "scale", "spatial-iw"])
    def test_the_kl_of_a_factorised_posterior_integrates_the_scale_out(self, kind: str) -> None:
        """Against the mean of log q(W) − log p(W given the scale) over draws of both, by scipy."""
        torch.manual_seed(SEED)
        net = nn.Sequential(nn.Conv1d(2, 2, 3)).double()  # d_in = 7: two channels of three taps, and the bias
        network = bayesianize(net, "ffg-w", prior=kind, sigma_max=2.0).double()
        (layer,) = network.layers.values()
        q = layer.posterior
        assert isinstance(q, WeightSpace)
        with torch.no_grad():
            for p in q.parameters():
                p.add_(0.5 * torch.randn(p.shape))
            if isinstance(q.prior, ScalePrior):
                q.prior.alpha.fill_(-1.0)  # a wide q(s), where E log s is far from log E s
        N, law = 4000, q.law.freeze()
        mean, std = law.centre.detach().numpy(), law.spread.detach().numpy()  # type: ignore[attr-defined]
        rng = np.random.default_rng(SEED)
        W = mean + std * rng.standard_normal((N, *mean.shape))
        log_q = scipy.stats.norm.logpdf(W, mean, std).sum((1, 2))
        scale, sigma = q.prior.freeze(q.sigma, law.centre.detach()), q.sigma  # type: ignore[attr-defined]
        log_p = scipy.stats.norm.logpdf(W, 0, sigma).sum((1, 2))
        if isinstance(scale, ScaleLaw):
            s = rng.gamma(float(scale.shape.detach()), 1 / float(scale.rate.detach()), N)
            log_p = scipy.stats.norm.logpdf(W, 0, sigma / np.sqrt(s)[:, None, None]).sum((1, 2))
        if isinstance(scale, InverseWishart):
            T = scale.T.detach().numpy()
            L = scipy.stats.invwishart(float(scale.nu.detach()), T @ T.T).rvs(N, random_state=SEED)
            blocks = W[:, :, :6].reshape(N, 4, 3)
            squares = np.einsum("nbi,nij,nbj->n", blocks, L, blocks) / sigma**2
            log_det = 4 * (np.linalg.slogdet(L)[1] - 6 * np.log(sigma))
            log_p = (log_det - squares - 12 * np.log(2 * np.pi)) / 2 + scipy.stats.norm.logpdf(W[..., 6], 0, sigma).sum(
                1
            )
        ratios = log_q - log_p
        kl = float((q.kl() - q.prior.kl(law.centre)).detach())  # type: ignore[attr-defined]
        assert kl == pytest.approx(ratios.mean(), abs=5 * ratios.std() / N**0.5)

    def test_fixed_priors_have_their_precisions_and_no_kl(self) -> None:
        frozen: FrozenPrior = WeightPrior().freeze(0.25, torch.zeros(()))
        assert float(frozen.draw(None).tau) == 16
        assert float(WeightPrior().kl(torch.zeros(()))) == 0

    @pytest.mark.parametrize(("prior", "sigma"), [("neal", 0.5), ("standard", 1.0), ("scale", 0.5)])
    def test_options_set_the_scale_of_the_prior(self, prior: str, sigma: float) -> None:
        network = bayesianize(linear(4, 2), "gi", inducing=3, examples=(drawn(5, 4), None), prior=prior)
        assert network.priors == [sigma]


class TestConditioning:
    """20 points of 64 ReLU features in float32, λ from 1 to 10⁸: G is up to 10⁹ times the prior's precision."""

    Phi = drawn(20, 64).relu().float() + 0.5

    def exact(self, lam: float) -> float:
        """log det(P + G) by the matrix of the points, which is not singular: P = 64 I."""
        Phi = self.Phi.double().numpy()
        return float(np.linalg.slogdet(np.eye(20) + lam / 64 * Phi @ Phi.T)[1] + 64 * np.log(64))

    @pytest.mark.parametrize("lam", [1.0, 1e4, 1e8])
    def test_densities_are_right_however_sure_the_points_are(self, lam: float) -> None:
        geometry, V = geometry_of(nn.Linear(64, 3, bias=False)), drawn(20, 1, 3).float()
        G, h = regression_sums(geometry, self.Phi[None], V, torch.full((20,), lam))
        W, ratio = regress(G, h, P := Precision(torch.tensor([64.0]).double()), None)
        log_Q = float(ratio - P.energy(W) / 2 + 3 / 2 * P.log_det(64))
        assert log_Q == pytest.approx(3 / 2 * self.exact(lam), abs=1e-4)

    def test_float32_fails_there_and_a_relative_jitter_is_wrong_by_nats(self) -> None:
        """Why the sums are made in float64: were float32 or a jitter enough, they could be cheaper."""
        eye = torch.eye(64)
        for lam, fails in ((1e4, False), (1e8, True)):
            A = lam * self.Phi.mT @ self.Phi + 64 * eye
            assert (torch.linalg.cholesky_ex(A).info.item() > 0) == fails
            with_jitter = torch.linalg.slogdet((A + 1e-4 * A.diagonal().mean() * eye).double())[1]
            assert abs(float(with_jitter) - self.exact(lam)) > 5


class Residual(nn.Module):
    """A strided convolution, a residual block and pooling, as in [Ober21, section 3.4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.inner = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.avg_pool2d(x + F.relu(self.inner(x)), 2)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def convolutional(**options: Any) -> BayesianNetwork:
    torch.manual_seed(SEED)
    examples = (torch.randn(9, 2, 8, 8), torch.randint(4, (9,)))
    return bayesianize(Residual(), "gi", inducing=6, examples=examples, **options)


def keep(found: dict[str, Tensor], name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    found[name] = inputs[0]


def test_a_residual_network_is_drawn_by_what_arrives_at_each_layer() -> None:
    """The weights of a draw, put into the plain network, once more by explicit patches of what U_0 becomes there."""
    network = convolutional().double()
    assert network.joint is not None
    U_0 = network.joint.inputs
    assert U_0 is not None
    factors = network.factors()
    noise = torch.randn(2, factors.normals, generator=rng(3))
    stock = factors.stock(network, Draws(2, noise, 0))
    weights = {name: as_matrix(stock[layer]).detach() for name, layer in network.layers.items()}
    for k in range(2):
        plain, arriving = Residual().double(), dict[str, Tensor]()
        for name, W in weights.items():
            module = plain.get_submodule(name)
            bias = getattr(module, "bias", None) is not None
            assert isinstance(module, nn.Linear | nn.Conv2d)
            module.weight.data = W[k, :, : W.shape[2] - bias].reshape(module.weight.shape)
            if module.bias is not None:
                module.bias.data = W[k, :, -1]
            module.register_forward_pre_hook(partial(keep, arriving, name))
        plain(U_0.detach())
        for name, layer in network.layers.items():
            q, (d_out, d_in) = layer.posterior, layer.geometry.shape
            assert isinstance(q, GlobalPoints)
            x = arriving[name].detach()
            stride = 2 if name == "stem" else 1
            rows = x[:, None] if name == "head" else F.unfold(x, 3, padding=1, stride=stride).mT
            if name != "inner":
                rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
            Phi = rows.flatten(0, 1).numpy()
            lam = q.log_lam.exp().detach().repeat_interleave(rows.shape[1]).numpy()
            A = d_in * np.eye(d_in) + Phi.T @ (lam[:, None] * Phi)
            mean = np.linalg.solve(A, Phi.T @ (lam[:, None] * q.V.detach().flatten(0, 1).numpy()))
            eps = noise[k, factors.places[name] :][: d_out * d_in].double().view(d_out, d_in).numpy()
            expected = mean + np.linalg.solve(np.linalg.cholesky(A).T, eps.T)
            np.testing.assert_allclose(weights[name][k].numpy(), expected.T, rtol=1e-6, atol=1e-9)


def test_predictions_are_those_of_the_plain_network_with_the_weights_of_the_stock() -> None:
    network, x = convolutional(), torch.randn(3, 2, 8, 8, generator=rng(1))
    factors = network.factors()
    outputs = predict(network, factors, x, 6, 5, keep_outputs=True).outputs
    fewer = predict(network, factors, x, 6, 5, keep_outputs=True, max_rows=4).outputs
    assert outputs is not None
    assert fewer is not None
    torch.testing.assert_close(outputs, fewer, rtol=1e-4, atol=1e-5)
    assert outputs.std(0).min() > 0


@pytest.mark.parametrize("prior", ["neal", "scale", "spatial-iw"])
@pytest.mark.parametrize("method", ["gi", "li", "fac-gi"])
def test_an_artifact_keeps_points_and_priors(method: str, prior: str, tmp_path: Any) -> None:
    torch.manual_seed(SEED)
    net, examples = build("mlp", inputs=5, hidden=[6], outputs=3), (torch.randn(9, 5), torch.randint(3, (9,)))
    network = bayesianize(net, method, inducing=7, examples=examples, prior=prior)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    manifest = save(network, tmp_path / "model", card=Card(input=Input(shape=(5,))))
    assert manifest.format == (1 if method == "li" else 5)
    model, x = load(tmp_path / "model"), torch.randn(4, 5)
    ours, theirs = (predict(n, n.factors(), x, 5, 1, keep_outputs=True) for n in (network, model.network))
    assert ours.outputs is not None
    assert theirs.outputs is not None
    assert torch.equal(ours.outputs, theirs.outputs)
    again = save(model, tmp_path / "again")
    assert again.sha256 == manifest.sha256


def test_every_part_has_a_gradient() -> None:
    for prior in ("scale", "spatial-iw"):
        network = convolutional(prior=prior)
        outputs, ratio = network.sample_with_ratio(torch.randn(3, 2, 8, 8), 2)
        (outputs.square().sum() + ratio + network.kl()).backward()
        for name, p in network.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.abs().max() > 0, name


def test_points_start_at_examples_and_pseudo_outputs_at_what_the_network_makes_of_them() -> None:
    torch.manual_seed(SEED)
    X, y = torch.randn(20, 5), torch.arange(20) % 3
    net = build("mlp", inputs=5, hidden=[6], outputs=3)
    network = bayesianize(net, "gi", inducing=7, examples=(X, y), start="prior")
    assert network.joint is not None
    U_0 = network.joint.inputs
    assert U_0 is not None
    order = [int((u == X).all(1).nonzero()) for u in U_0]
    first, last = points_of(network)
    torch.testing.assert_close(first.V[:, 0], net.get_submodule("1")(X[order]))
    torch.testing.assert_close(last.V[:, 0], F.one_hot(y[order], 3).float())
    assert first.log_lam.unique().tolist() == [-4]
    assert last.log_lam.unique().tolist() == [0]


def test_a_trained_network_is_kept() -> None:
    """From a network, V is what it gives and is sure of it: the mean answers like it where the examples are."""
    torch.manual_seed(SEED)
    X = torch.randn(40, 5)
    net = build("mlp", inputs=5, hidden=[16], outputs=3)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    for method in ("gi", "li"):
        network = bayesianize(net, method, inducing=40, examples=(X, None))
        mean = predict(network, network.factors(), X, 0, keep_outputs=True).outputs
        assert mean is not None
        plain = net(X).detach()
        assert float((mean[0] - plain).square().mean()) < 0.02 * float(plain.var(0).mean()), method


class TestRefusals:
    def test_batchnorm(self) -> None:
        with pytest.raises(ConversionError, match="BatchNorm, which would mix them"):
            bayesianize(build("cnn"), "gi")

    def test_grouped_convolutions(self) -> None:
        net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2))
        with pytest.raises(ConversionError, match=r"layer '0': gi regresses .* 2 groups\. Give it another method"):
            bayesianize(net, "gi", inducing=3, examples=(torch.randn(3, 4, 4, 4), None))

    @pytest.mark.parametrize("method", ["gi", "dgp"])
    def test_networks_that_mix_rows(self, method: str) -> None:
        """Their inducing inputs would be other examples of the batch."""

        class Stacked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

            def forward(self, x: Tensor) -> Tensor:
                one, other = self.a(torch.cat([x, x.flip(-1)])).relu().chunk(2)
                return self.b(one - other)  # type: ignore[no-any-return]

        class TimeFirst(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x.transpose(0, 1)).relu()[-1])  # type: ignore[no-any-return]

        for net, x in (
            (Stacked(), torch.randn(9, 4)),
            (TimeFirst(), torch.randn(9, 8, 4)),
            (TimeFirst(), torch.randn(9, 7, 4)),
        ):
            with pytest.raises(ConversionError, match="mixes rows of"):
                bayesianize(net, method, inducing=4, examples=(x, None))

    def test_inputs_that_are_not_known(self) -> None:
        with pytest.raises(ConversionError, match="gi and dgp need inputs to start from: give examples="):
            bayesianize(nn.Sequential(nn.Linear(2, 2)), "gi")

    def test_examples_that_do_not_fit(self) -> None:
        net = build("mlp", inputs=5, hidden=[6], outputs=3)
        for examples, said in (
            ((torch.randn(4, 6), None), "fails on inputs of shape"),
            ((torch.randn(4, 5), torch.tensor([0, 1, 2, 3])), "no classes from 0 to 2"),
            ((torch.randn(4, 5), torch.zeros(3)), "as many targets"),
        ):
            with pytest.raises(ConversionError, match=said):
                bayesianize(net, "gi", inducing=1, examples=examples)  # whichever of them it starts at

    def test_a_layer_that_is_used_twice(self) -> None:
        layer = nn.Linear(3, 3)
        with pytest.raises(ConversionError, match="is used 2 times in a pass"):
            bayesianize(nn.Sequential(layer, nn.ReLU(), layer), "gi", inducing=3, examples=(torch.randn(4, 3), None))

    def test_numbers_of_points_that_differ(self) -> None:
        net = build("mlp", inputs=5, hidden=[6], outputs=3)
        with pytest.raises(ConversionError, match=r"one number of them; they have \[3, 64\]"):
            bayesianize(net, "gi", layers={"1": {"inducing": 3}})
        with pytest.raises(ConversionError, match="expected one number with gi"):
            bayesianize(net, "gi", inducing=(3, 4))

    def test_a_method_of_a_network_for_a_layer(self) -> None:
        net = build("mlp", inputs=5, hidden=[6], outputs=3)
        with pytest.raises(ConversionError, match="no method 'fac-gi' of a layer: it is one of a network"):
            bayesianize(net, "ffg-w", layers={"1": "fac-gi"})

    def test_a_prior_that_would_be_learned_for_random_layers(self) -> None:
        net = build("mlp", inputs=5, hidden=[6], outputs=3)
        with pytest.raises(ConversionError, match="whose scale is learned"):
            bayesianize(net, "rand-gi", prior="scale")

    def test_a_file_whose_points_do_not_fit_its_network(self, tmp_path: Any) -> None:
        network = convolutional()
        with torch.no_grad():
            q = points_of(network)[0]
            q.V = nn.Parameter(q.V[:, :5].clone())
            layer = network.layers["stem"]
            layer.entry = layer.entry.model_copy(update={"places": 5})
        with pytest.raises(ArtifactError, match="pseudo-outputs"):
            save(network, tmp_path / "model", card=Card(input=Input(shape=(2, 8, 8))))


def test_composed_methods_are_those_of_their_layers() -> None:
    net = build("mlp", inputs=5, hidden=[6, 6], outputs=3)
    for method, below in (("fac-gi", "ffg-w"), ("rand-gi", "prior")):
        network = bayesianize(net, method, inducing=4)
        assert [layer.entry.method for layer in network.layers.values()] == [below, below, "gi"]
