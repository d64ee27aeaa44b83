"""Curvature, choice of weights and prior precision against dense oracles, and laplace-torch where it is installed."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito.models import bayesianize
from dubito.models.manifest import Input, Regression
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.prediction import predict_closed
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.training.config import Laplace
from dubito.training.data.data import Examples
from dubito.training.laplace import (
    FittedLaplace,
    LaplaceError,
    best_precision,
    choose,
    closed_nll,
    curvature,
    describe,
    diagonal,
    least_curved,
    linearise,
)
from tests.models.test_jacobian import brute, mixed

INPUT = Input(shape=(2, 9, 9))


def pictures(n: int, seed: int = 0) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(n, 2, 9, 9, generator=rng), torch.randint(0, 3, (n,), generator=rng))


def network(regression: bool = False) -> BayesianNetwork:
    task = Regression(outputs=3) if regression else None
    made = bayesianize(mixed().float(), "deterministic", task=task).eval()
    if made.noise is not None:
        with torch.no_grad():
            made.noise.raw.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    return made


def dense(made: BayesianNetwork, x: Tensor) -> Tensor:
    """Σ Jᵀ Λ J over all weights, from autograd's Jacobian and the textbook Λ, in float64: (D, D)."""
    net = mixed()
    J, f = brute(net, x.double()), net(x.double()).detach()
    if made.noise is not None:
        Lam = torch.diag(made.noise().detach().double() ** -2).expand(len(x), 3, 3)
    else:
        p = f.softmax(-1)
        Lam = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("bcs,bcd,bdt->st", J, Lam, J)


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("batch", [3, 100])
def test_curvature_is_the_dense_one(regression: bool, batch: int) -> None:
    made, data = network(regression), pictures(10)
    G = dense(made, data.x)
    scale = float(G.abs().max())
    torch.testing.assert_close(diagonal(made, data, INPUT, batch), G.diag(), rtol=1e-4, atol=1e-6 * scale)
    index = torch.randperm(len(G), generator=torch.Generator().manual_seed(0))[:50].sort().values
    found = curvature(made, data, INPUT, index, batch)
    torch.testing.assert_close(found, G[index][:, index], rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize("regression", [False, True])
def test_with_all_weights_it_is_the_full_laplace(regression: bool) -> None:
    made, data, new = network(regression), pictures(10), pictures(4, 1)
    G = dense(made, data.x)
    D = len(G)
    fitted = linearise(made, data, data, INPUT, Laplace(size=D, prior_precision=2.0)).network
    assert isinstance(fitted.joint, Subnetwork)
    assert fitted.joint.index.tolist() == list(range(D))
    Sigma = torch.linalg.inv(G + 2 * torch.eye(D))
    J = brute(mixed(), new.x.double())
    variance = torch.einsum("bcs,st,bct->bc", J, Sigma, J)
    found = predict_closed(fitted, fitted.factors(), new.x).summary
    f = mixed()(new.x.double()).detach()
    if isinstance(found, Regressed):
        torch.testing.assert_close(found.epistemic_variance.double(), variance, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.mean.double(), f, rtol=1e-4, atol=1e-5)
    else:
        p = (f / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
        torch.testing.assert_close(found.probabilities.double(), p, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("regression", [False, True])
def test_it_is_laplace_torchs_full_subnetwork(regression: bool) -> None:
    """The peer's precision, variance and probit on the same indices; it cannot do the odd layers, so a plain CNN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch has deprecated
        laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed: the peer is not compared with")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 3)
    ).eval()
    task = Regression(outputs=3) if regression else None
    made, data, new = bayesianize(net, "deterministic", task=task).eval(), pictures(20), pictures(5, 1)
    settings = Laplace(size=40, prior_precision=3.0, select="random")
    fitted = linearise(made, data, data, INPUT, settings).network
    assert isinstance(fitted.joint, Subnetwork)
    y: Tensor = torch.randn(20, 3) if regression else data.y
    noise = float(made.noise()[0].detach()) if made.noise is not None else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = laplace.Laplace(
            net,
            "regression" if regression else "classification",
            subset_of_weights="subnetwork",
            hessian_structure="full",
            subnetwork_indices=fitted.joint.index.long(),
            prior_precision=3.0,
            sigma_noise=noise,
        )
        peer.fit(DataLoader(TensorDataset(data.x, y), batch_size=7))
        if regression:
            mean, covariance = peer(new.x, pred_type="glm")
        else:
            p = peer(new.x, pred_type="glm", link_approx="probit")
    L = fitted.joint.factors().L
    torch.testing.assert_close(L @ L.T, peer.posterior_precision.detach(), rtol=1e-3, atol=1e-3)
    found = predict_closed(fitted, fitted.factors(), new.x).summary
    if isinstance(found, Classified):
        torch.testing.assert_close(found.probabilities, p.detach(), rtol=1e-3, atol=1e-5)
    else:
        torch.testing.assert_close(found.mean, mean.detach(), rtol=1e-4, atol=1e-5)
        variances = covariance.detach().diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(found.epistemic_variance, variances, rtol=1e-3, atol=1e-6)


# the choice of weights


def test_each_way_of_choosing() -> None:
    made, data = network(), pictures(10)
    D = sum(p.numel() for p in made.net.parameters())
    least = diagonal(made, data, INPUT, 10)
    chosen = choose(made, data, INPUT, Laplace(size=20))
    others = torch.ones(D, dtype=torch.bool)
    others[chosen] = False
    assert float(least[chosen].max()) <= float(least[others & (least > 0)].min())  # the largest variances
    assert least_curved(torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0]), 4).tolist() == [2, 4, 1, 0]  # unreached ones last
    large = torch.cat([p.detach().abs().flatten() for p in made.net.parameters()])
    chosen = choose(made, data, INPUT, Laplace(size=20, select="magnitude"))
    assert sorted(chosen.tolist()) == sorted(large.topk(20).indices.tolist())
    one, other = (choose(made, data, INPUT, Laplace(size=20, select="random"), seed) for seed in (0, 1))
    assert one.tolist() != other.tolist()
    assert one.equal(choose(made, data, INPUT, Laplace(size=20, select="random"), 0))
    assert choose(made, data, INPUT, Laplace(select="last-layer")).tolist() == list(range(D - 15, D))
    for found in (one, chosen):
        assert (found.diff() > 0).all()
    with pytest.raises(LaplaceError, match="has 387 weights"):
        choose(made, data, INPUT, Laplace(size=D + 1))
    assert len(choose(made, data, INPUT, Laplace())) == D  # fewer than the usual size


def test_the_chosen_subnetwork_has_a_smaller_posterior_gap_than_a_random_one() -> None:
    """[Daxberger21, eq. 12], exactly, on a generalised linear model whose features differ in scale and correlate."""
    D, S, N = 60, 20, 200
    rng = torch.Generator().manual_seed(0)
    mix = torch.eye(D) + 0.1 * torch.randn(D, D, generator=rng)
    x = torch.randn(N, D, generator=rng) @ mix * torch.logspace(-1.5, 1, D)[torch.randperm(D, generator=rng)]
    made = bayesianize(nn.Linear(D, 1, bias=False), "deterministic", task=Regression()).eval()
    data, declared = Examples(x, torch.zeros(N, 1)), Input(shape=(D,))
    every = torch.arange(D)
    H_inv = torch.linalg.inv(curvature(made, data, declared, every, 50) + 0.1 * torch.eye(D))

    def gap(index: Tensor) -> float:
        m = torch.zeros(D).double()
        m[index] = 1
        masked = torch.outer(m, m) * H_inv
        eigenvalues, vectors = torch.linalg.eigh(H_inv)
        half = vectors * eigenvalues.sqrt() @ vectors.T
        cross = torch.linalg.eigvalsh(half @ masked @ half).clamp(min=0).sqrt().sum()  # trace of (H⁻¹ (M ⊙ H⁻¹))^½
        return float(((1 + m) * H_inv.diag()).sum() - 2 * cross)

    correlation = H_inv / torch.outer(H_inv.diag(), H_inv.diag()).sqrt()
    assert float((correlation - torch.eye(D)).abs().max()) > 0.3  # beyond what corollary 1.1 assumes
    assert gap(every) == pytest.approx(0, abs=1e-6 * float(H_inv.trace()))
    chosen = gap(choose(made, data, declared, Laplace(size=S)))
    by_chance = [gap(choose(made, data, declared, Laplace(size=S, select="random"), seed)) for seed in range(20)]
    assert chosen < min(by_chance)


# the prior's precision


def test_the_grid_finds_what_a_dense_search_finds() -> None:
    made, data, held = network(), pictures(30), pictures(40, 1)
    index = choose(made, data, INPUT, Laplace(size=60))
    H = curvature(made, data, INPUT, index, 10)
    before = H.clone()
    precision, scores = best_precision(made, held, INPUT, index, H, 16)
    assert torch.equal(H, before)
    assert len(scores) >= 9
    assert max(scores, key=scores.__getitem__) == precision
    J, f = brute(mixed(), held.x.double())[:, :, index], mixed()(held.x.double()).detach()

    def by_hand(lam: float) -> float:
        Sigma = torch.linalg.inv(H + lam * torch.eye(60))
        variance = torch.einsum("bcs,st,bct->bc", J, Sigma, J)
        log_p = (f / (1 + torch.pi / 8 * variance).sqrt()).log_softmax(-1)
        return float(log_p.gather(1, held.y[:, None]).mean())

    for lam, score in scores.items():
        assert score == pytest.approx(by_hand(lam), abs=1e-4)
    finest = [10 ** (n / 16) for n in range(-64, 65)]
    best = max(finest, key=by_hand)
    assert by_hand(precision) >= by_hand(best) - 1e-3


def test_scores_that_are_no_numbers_are_errors() -> None:
    made, data = network(), pictures(10)
    held = Examples(data.x.clone(), data.y)
    held.x[3] = torch.inf
    index = choose(made, data, INPUT, Laplace(size=5))
    H = curvature(made, data, INPUT, index, 10)
    with pytest.raises(LaplaceError, match="which is no number"):
        best_precision(made, held, INPUT, index, H, 10)
    with pytest.raises(LaplaceError, match="curvature is not finite"):
        curvature(made, held, INPUT, index, 10)
    with pytest.raises(LaplaceError, match="not positive definite"):
        linearise(made, data, data, INPUT, Laplace(size=300, prior_precision=1e-30))


def test_weights_that_move_no_output_are_said_to() -> None:
    """The same log-likelihood for the whole grid: what is behind a unit that is next to dead."""
    made, data = network(), pictures(10)
    fitted = linearise(made, data, data, INPUT, Laplace(size=5, prior_precision=1.0)).network
    flat = FittedLaplace(fitted, {0.1: -0.50001, 1.0: -0.5, 10.0: -0.50002})
    assert "the outputs hardly depend on these weights" in describe(flat)
    assert "hardly" not in describe(FittedLaplace(fitted, {0.1: -0.7, 1.0: -0.5}))


def test_regression_is_scored_in_the_targets_units() -> None:
    made = bayesianize(mixed().float(), "deterministic", task=Regression(outputs=3, shift=(5.0,), scale=(2.0,)))
    f, variance = torch.zeros(4, 3).double(), torch.full((4, 3), 0.5).double()
    assert made.noise is not None
    y = torch.full((4, 3), 6.0)
    spread = torch.distributions.Normal(5.0, float((4 * (0.5 + made.noise()[0].detach() ** 2)).sqrt()))
    assert closed_nll(made, f, variance, y) == pytest.approx(-3 * float(spread.log_prob(torch.tensor(6.0))), rel=1e-4)


def test_a_bayesian_network_is_refused() -> None:
    made = bayesianize(mixed().float(), "ffg-w", unsupported="leave")
    with pytest.raises(LaplaceError, match="Bayesian already"):
        linearise(made, pictures(4), pictures(4), INPUT)
