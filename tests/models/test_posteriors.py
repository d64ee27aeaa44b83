"""Posteriors: KL, draws and gradients, against closed forms, dense Gaussians and finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from dubito.models import bayesianize, ensemble
from dubito.models.conversion.options import Overrides
from dubito.models.network.geometry import Conv, Geometry, Linear, apply
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.numerics.parameters import Positive, together
from dubito.models.posteriors.dropout import Dropout
from dubito.models.posteriors.full_covariance import FullCovariance
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.mean_field import FrozenMeanField, MeanField
from dubito.models.posteriors.mixture import Mixture
from dubito.models.posteriors.protocol import Dense, Distribution, Dropped, Factored, Factors, Posterior
from dubito.models.predictions.prediction import predict
from tests.examples import at_most

SEED = 0
pytestmark = pytest.mark.draws
N = at_most(40_000)


def generator(at: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + at)


def normal(*shape: int, at: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(at), dtype=torch.float64)


def close(found: Tensor, expected: Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-9, atol=1e-11)


def assert_law(draws: Tensor, mean: Tensor, C: Tensor) -> None:
    """Mean and full covariance of draws (N, n), to 5 standard errors of a Gaussian sample."""
    v, n = C.diagonal(), len(draws)
    assert ((draws.mean(0) - mean).abs() < 5 * (v / n).sqrt() + 1e-12).all()
    assert ((draws.T.cov() - C).abs() < 5 * ((v[:, None] * v + C**2) / n).sqrt() + 1e-12).all()


def mean_field(sigma_max: float | None = 0.9) -> MeanField:
    return MeanField(normal(3, 2), 0.1 + 0.7 * torch.rand(3, 2, generator=generator(1)).double(), sigma_max)


def full_covariance(sigma_max: float | None = 0.9) -> FullCovariance:
    made = FullCovariance(normal(3, 2), 0.1, sigma_max)
    made.spread = Positive(0.1 + 0.7 * torch.rand(6, generator=generator(1)).double(), 1e-6, sigma_max)
    with torch.no_grad():
        made.below.copy_(normal(15, at=2))
    return made


def law_of(law: MeanField | FullCovariance) -> MultivariateNormal:
    """The same Gaussian over the flattened tensor, by torch, from the draws at unit noise."""
    q = law.freeze()
    zero, slopes = q.draw(torch.zeros(1, 6).double(), None), q.draw(torch.eye(6).double(), None)
    J = (slopes - zero).flatten(1)
    return MultivariateNormal(zero.flatten().detach(), (J.T @ J).detach())


each_law = pytest.mark.parametrize("law", [mean_field(), full_covariance()], ids=["mean field", "full covariance"])

# laws: KL and draws


def test_kl_of_a_mean_field_is_torchs() -> None:
    law = mean_field()
    q = Normal(law.centre(), law.spread())
    for prior in (1.0, 0.3):
        close(law.kl(prior), kl_divergence(q, Normal(torch.zeros(3, 2).double(), prior)).sum())


@each_law
@pytest.mark.parametrize("prior", [1.0, 0.3])
def test_kl_is_that_of_the_dense_gaussian(law: MeanField | FullCovariance, prior: float) -> None:
    q = law_of(law)
    m, S = q.mean, q.covariance_matrix
    by_formula = (S.trace() / prior**2 + m @ m / prior**2 - 6 + 12 * math.log(prior) - torch.logdet(S)) / 2
    close(law.kl(prior), by_formula)
    close(
        law.kl(prior), kl_divergence(q, MultivariateNormal(torch.zeros(6).double(), prior**2 * torch.eye(6).double()))
    )


@each_law
def test_kl_is_the_mean_log_ratio_of_its_own_draws(law: MeanField | FullCovariance) -> None:
    draws = law.freeze().draw(normal(N, 6, at=3), None).flatten(1).detach()
    ratio = law_of(law).log_prob(draws) - Normal(0.0, 0.3).log_prob(draws).sum(1)
    assert abs(ratio.mean() - law.kl(0.3)) < 5 * ratio.std() / N**0.5


@each_law
def test_draws_of_a_law_have_the_covariance_it_claims(law: MeanField | FullCovariance) -> None:
    q = law.freeze()
    C = torch.diag(q.spread.flatten() ** 2) if isinstance(q, FrozenMeanField) else q.root @ q.root.T
    C = C.detach()
    assert_law(q.draw(normal(N, 6, at=4), None).flatten(1).detach(), law.centre().flatten().detach(), C)
    close(C.diagonal().sqrt(), law.spread().flatten().detach())  # spread is each entry's own standard deviation
    assert (C.diagonal().sqrt() < 0.9).all()
    close(q.mean(None)[0], law.centre())


def test_the_root_of_a_full_covariance_is_a_cholesky_factor() -> None:
    root = full_covariance().freeze().root.detach()
    close(root, torch.linalg.cholesky(root @ root.T))
    correlation = root / root.norm(dim=1, keepdim=True)
    assert ((correlation @ correlation.T).tril(-1).abs().max() > 0.5).item()  # or the test sees no correlations


def test_the_cap_bounds_every_standard_deviation() -> None:
    """Even where the optimiser pushes everything as far as it will go."""
    for law in (mean_field(0.25), full_covariance(0.25)):
        with torch.no_grad():
            law.spread.raw.add_(100)
            if isinstance(law, FullCovariance):
                law.below.mul_(50)
        std = law_of(law).covariance_matrix.diagonal().sqrt()
        assert (std <= 0.25 + 1e-12).all()
        assert (std > 0.249).all()


# positive numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positive_starts_where_it_was_told(dtype: torch.dtype) -> None:
    shares = torch.tensor([0.002, 0.01, 0.3, 0.9, 0.998], dtype=dtype)
    for cap in (0.03, 0.1, 3.0):
        torch.testing.assert_close(Positive(cap * shares, 1e-6, cap)().detach(), cap * shares, rtol=1e-5, atol=0)
    free = torch.tensor([1e-5, 1e-3, 0.03, 1.0, 30.0, 1e4], dtype=dtype)
    torch.testing.assert_close(Positive(free, 1e-6)().detach(), free, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("start", "cap"), [(1e-4, 0.1), (1e-4, 1.0), (1e-3, 5.0)])
def test_a_small_start_below_a_large_cap_comes_back(start: float, cap: float) -> None:
    """W_STD below sigma_max, λ below a large lam_max: inside the bounds, so nothing should pull it."""
    assert Positive(torch.tensor(start), 1e-6, cap)().item() == pytest.approx(start, rel=1e-3)


@pytest.mark.parametrize("cap", [None, 0.1])
def test_positive_stays_within_its_bounds(cap: float | None) -> None:
    part = Positive(torch.full((5,), 0.05), 1e-3, cap)
    with torch.no_grad():
        part.raw.copy_(torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4]))
    assert (part() >= 1e-3).all()
    if cap is not None:
        assert (part() <= cap).all()


@pytest.mark.parametrize("cap", [None, 0.1])
def test_positive_moves_from_wherever_it_starts(cap: float | None) -> None:
    """At the floor, at the cap and beyond either, both ways: a hard clamp would have no gradient there."""
    start = torch.tensor([0.0, 1e-3, 0.05, 0.1, 0.2, 5.0])
    part = Positive(start, 1e-3, cap)
    before = part().detach().clone()
    room = before - 1e-3 if cap is None else torch.minimum(before - 1e-3, cap - before)  # to the nearest bound
    assert (room > 0).all()
    part().sum().backward()
    assert part.raw.grad is not None
    assert (part.raw.grad > 0.4 * room.clamp(max=1)).all()  # a step of one goes a good part of that way
    assert (part.raw.grad[3:] > 5e-5).all()  # at the cap and beyond it
    for direction in (1, -1):
        moved = Positive(start, 1e-3, cap)
        optimiser = torch.optim.Adam(moved.parameters(), lr=0.1)
        for _ in range(20):
            optimiser.zero_grad()
            (direction * moved()).sum().backward()
            optimiser.step()
        assert (direction * (before - moved()) > 0).all()


def test_a_cap_below_the_floor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the cap 1e-07 must be above the floor 1e-06"):
        Positive(torch.ones(2), 1e-6, 1e-7)


def test_positives_together_are_each_alone() -> None:
    """Several bounds, shapes and types, one of them pruned: values and gradients."""
    parts = [
        Positive(0.05 * torch.rand(shape, generator=generator(at)).to(dtype) + 0.01, floor, cap)
        for at, (shape, floor, cap, dtype) in enumerate(
            [
                ((3, 2), 1e-3, 0.1, torch.float64),
                ((), 1e-6, None, torch.float64),
                ((4,), 1e-3, 0.1, torch.float64),
                ((2, 2), 1e-6, 0.1, torch.float64),
                ((3,), 1e-6, None, torch.float32),
                ((5,), 1e-6, None, torch.float64),
                ((), 1e-3, 0.1, torch.float64),
            ]
        )
    ]
    parts[2].keep = torch.tensor([1.0, 0.0, 1.0, 0.0]).double()
    towards = [torch.randn(p.raw.shape, generator=generator(i)).to(p.raw.dtype) for i, p in enumerate(parts)]
    found = together(parts)
    sum((v * t).sum().double() for v, t in zip(found, towards, strict=True)).backward()  # type: ignore[union-attr]
    for part, value, t in zip(parts, found, towards, strict=True):
        assert value.dtype == part.raw.dtype
        assert value.shape == part.raw.shape
        close(value, part().detach())
        (alone,) = torch.autograd.grad((part() * t).sum(), part.raw)
        assert part.raw.grad is not None
        close(part.raw.grad, alone)
    assert (found[2][[1, 3]] == 0).all()
    assert together([]) == []


# inducing weights: KL


def inducing(
    d_out: int = 3,
    d_in: int = 4,
    M_out: int = 2,
    M_in: int = 3,
    law: Distribution | None = None,
    lam_max: float | None = 0.9,
) -> Inducing:
    law = law if law is not None else MeanField(normal(M_out, M_in, at=5), 0.3, 0.9)
    made = Inducing(normal(M_out, d_out, at=6), normal(M_in, d_in, at=7), law, 0.7, lam=0.4, lam_max=lam_max)
    made.D_r = Positive(torch.linspace(0.2, 0.8, M_out).double(), 1e-6)
    made.D_c = Positive(torch.linspace(0.5, 1.5, M_in).double(), 1e-6)
    return made


def projections(q: Inducing) -> list[tuple[Tensor, Tensor]]:
    """A and Zᵀ Ψ⁻¹ Z of either side, the jitter in Ψ, by explicit inverses."""
    found = []
    for part, diagonal in ((q.Z_r, q.D_r), (q.Z_c, q.D_c)):
        Z, D = part().detach().double(), diagonal().detach().double()
        Psi = Z @ Z.T + torch.diag(D**2)
        Psi = Psi + 1e-4 * Psi.diagonal().mean() * torch.eye(len(Psi)).double()
        found.append((Z.T @ torch.linalg.inv(torch.linalg.cholesky(Psi)).T, Z.T @ torch.linalg.inv(Psi) @ Z))
    return found


def test_R_of_lambda_is_the_kl_of_the_conditionals() -> None:
    """[Ritter21, eq. 8] against dense Gaussians with one mean, N(m, λ²C) and N(m, C)."""
    q = inducing()
    (_, P_r), (_, P_c) = projections(q)
    C = 0.7**2 * (torch.eye(12) - torch.kron(P_r, P_c))
    m = normal(12)
    R = kl_divergence(MultivariateNormal(m, 0.4**2 * C), MultivariateNormal(m, C))
    assert q.law is not None
    close(q.kl(), R + q.law.kl(1.0).detach())
    close(q.kl(), R + kl_divergence(Normal(q.law.freeze().mean(None), 0.3), Normal(0.0, 1.0)).sum().detach())


def test_R_of_lambda_is_the_share_of_the_conditional_in_a_dense_kl() -> None:
    """KL of the joint q(W, V) to the joint prior: the chain rule gives R(λ) + KL[q(V)]."""
    q = inducing()
    (A_r, P_r), (A_c, P_c) = projections(q)
    T = 0.7 * torch.kron(A_r, A_c)  # vec W = T vec V + noise, rows stacked
    noise = 0.7**2 * (torch.eye(12) - torch.kron(P_r, P_c))

    def joint(m: Tensor, S: Tensor, lam: float) -> MultivariateNormal:
        top = torch.cat([T @ S @ T.T + lam**2 * noise, T @ S], 1)
        return MultivariateNormal(torch.cat([T @ m, m]), torch.cat([top, torch.cat([S @ T.T, S], 1)]))

    posterior = joint(normal(2, 3, at=5).flatten(), 0.09 * torch.eye(6).double(), 0.4)
    prior = joint(torch.zeros(6).double(), torch.eye(6).double(), 1.0)
    close(prior.covariance_matrix[:12, :12], 0.49 * torch.eye(12).double())  # the marginal prior of W is N(0, σ²)
    torch.testing.assert_close(q.kl().detach(), kl_divergence(posterior, prior), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("data_size", "beta"), [(None, 1.0), (1, 0.25), (3, 0.75), (4, 1.0), (1000, 1.0)])
def test_lambda_is_weighted_by_the_size_of_the_data(data_size: int | None, beta: float) -> None:
    """[Ritter21, eq. 45]: β = min(1, N/d_in) on R alone."""
    q = inducing()
    lam = 0.4
    R = 12 * (lam**2 / 2 - math.log(lam) - 0.5)
    assert q.law is not None
    close(q.kl(data_size), beta * R + q.law.kl(1.0).detach())


def test_without_noise_and_for_point_masses_the_kl_terms_vanish() -> None:
    q = inducing(lam_max=0)
    assert q.law is not None
    close(q.kl(3), q.law.kl(1.0).detach())
    close(inducing(law=Mixture(normal(5, 2, 3))).kl(), inducing().kl().detach() - mean_field_kl())
    close(inducing(law=Mixture(normal(5, 2, 3)), lam_max=0).kl(), 0.0)


def mean_field_kl() -> Tensor:
    return kl_divergence(Normal(normal(2, 3, at=5), 0.3), Normal(0.0, 1.0)).sum()


# inducing weights: draws with V integrated out, and gradients

LAWS: dict[str, Callable[[int, int], Distribution]] = {
    "ffg-u": lambda M_out, M_in: MeanField(normal(M_out, M_in, at=5), 0.3, 0.9),
    "fcg-u": lambda M_out, M_in: correlated(FullCovariance(normal(M_out, M_in, at=5), 0.3, 0.9)),
    "ensemble-u": lambda M_out, M_in: Mixture(normal(3, M_out, M_in, at=5)),
}


def correlated(law: FullCovariance) -> FullCovariance:
    with torch.no_grad():
        law.below.copy_(normal(law.below.numel(), at=8))
    return law


def matrices(operand: Dense | Factored) -> Tensor:
    return operand.W if isinstance(operand, Dense) else operand.dense()


SHAPES = {"M < d": (3, 4, 2, 3), "M > d": (2, 3, 3, 4), "M_out > d_out": (2, 5, 3, 2), "M = d": (3, 3, 3, 3)}


@pytest.mark.parametrize("repeated", [False, True], ids=["", "repeated singular values"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("law", LAWS)
def test_gradients_of_a_drawn_W_are_finite_differences(
    law: str, shape: tuple[int, int, int, int], repeated: bool
) -> None:
    """For fixed noise, with respect to every number of every parameter: central differences in float64."""
    q = inducing(*shape, LAWS[law](*shape[2:]))
    if repeated:  # all of p and of q in one place: the gradient of an SVD is undefined there
        with torch.no_grad():
            for Z in (q.Z_r.value, q.Z_c.value):
                Z.copy_(1.5 * torch.eye(*Z.shape).double())
        q.D_r, q.D_c = (Positive(torch.full((M,), 0.3).double(), 1e-6) for M in shape[2:])
    noise, member = normal(2, q.trainable().normals, at=10), torch.tensor([2, 0])
    towards = normal(2, *shape[:2], at=11)

    def value() -> Tensor:
        return (q.trainable().draw(noise, member).W * towards).sum()

    value().backward()
    checked = set()
    for name, parameter in q.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 1e-4, name  # every parameter matters
        flat, h = parameter.data.view(-1), 1e-6
        for i in range(len(flat)):
            at = flat[i].item()
            ends = []
            for step in (h, -h):
                flat[i] = at + step
                with torch.no_grad():
                    ends.append(value().item())
            flat[i] = at
            assert abs((ends[0] - ends[1]) / (2 * h) - grad.view(-1)[i].item()) < 1e-7 * (1 + grad.abs().max()), name
        checked.add(name.split(".")[0])
    assert checked == {"Z_r", "Z_c", "D_r", "D_c", "lam", "law"}


def several(law: str, lam_max: float | None) -> list[Inducing]:
    """Layers of one kind and several shapes, two alike next to each other and one alike elsewhere; nothing equal."""
    made = []
    for i, (d_out, d_in) in enumerate([(3, 4), (3, 4), (4, 3), (2, 5), (3, 4)]):
        q = Inducing(
            normal(2, d_out, at=20 + i),
            normal(3, d_in, at=30 + i),
            LAWS[law](2, 3),
            0.3 + 0.2 * i,
            lam=0.2 + 0.1 * i,
            lam_max=lam_max,
        )
        q.D_r, q.D_c = Positive(torch.linspace(0.2, 0.8 + i, 2).double(), 1e-6), Positive(normal(3).abs() + i, 1e-6)
        with torch.no_grad():
            for p in q.law.parameters():  # type: ignore[union-attr]
                p.add_(normal(*p.shape, at=40 + i) / 4)
        made.append(q)
    return made


@pytest.mark.parametrize("lam_max", [0, 0.9], ids=["without noise", "with noise"])
@pytest.mark.parametrize("law", LAWS)
def test_layers_drawn_together_are_each_drawn_alone(law: str, lam_max: float | None) -> None:
    """The same normals give the same weights and gradients, also where V is given and q is of another kind."""
    layers = several(law, lam_max)
    other = inducing(4, 3, 3, 2, LAWS[law](3, 2))
    (both, apart), K, member = Inducing.train_together([layers, [other]]), 2, torch.tensor([2, 0])
    of_V = 0 if law == "ensemble-u" else 6
    noises = [
        normal(K, of_V + (q.shape[0] + 2) * (q.shape[1] + 3) * (lam_max != 0), at=i) for i, q in enumerate(layers)
    ]
    noise = torch.cat([*(z[:, :of_V] for z in noises), *(z[:, of_V:] for z in noises)], 1)
    assert noise.shape[1] == both.normals
    V = normal(K, len(layers), 2, 3, at=50)
    parameters = [p for q in layers for p in q.parameters()]
    for given in (None, V):
        if given is None:
            found = [d.W for d in both.draw_each(noise, member)]
            alone = [q.trainable().draw(z, member).W for q, z in zip(layers, noises, strict=True)]
        else:
            found = [d.W for d in both.given(given).draw_each(noise[:, len(layers) * of_V :], member)]
            alone = [
                q.trainable().given(given[:, i]).draw(z[:, of_V:], member).W
                for i, (q, z) in enumerate(zip(layers, noises, strict=True))
            ]
        gradients = []
        for drawn in (found, alone):
            loss = sum((W * normal(*W.shape, at=i)).sum() for i, W in enumerate(drawn))
            gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))  # type: ignore[arg-type]
        for ours, expected in zip(found, alone, strict=True):
            close(ours, expected.detach())
        for g, h in zip(*gradients, strict=True):
            close(torch.zeros(()) if g is None else g, torch.zeros(()) if h is None else h)
    z = normal(K, apart.normals, at=60)
    close(apart.draw(z, member).W, other.trainable().draw(z, member).W.detach())


def test_a_method_without_a_kl_is_refused_when_it_is_made() -> None:
    class Silent(Posterior):
        def trainable(self) -> Factors:
            raise AssertionError

    with pytest.raises(TypeError, match=r"abstract method '?kl'?"):
        Silent()  # type: ignore[abstract]


@pytest.mark.parametrize("data_size", [None, 4])
@pytest.mark.parametrize("law", LAWS)
def test_kl_of_layers_together_is_the_sum_of_their_kls(law: str, data_size: int | None) -> None:
    """Each alone is checked above; of several kinds and shapes, with λ and without."""
    layers = [*several(law, 0.9), *several("ffg-u", None), *several("fcg-u", 0)]
    expected = sum(q.kl(data_size).item() for q in layers)
    close(Inducing.kl_together(layers, data_size), expected)
    close(Inducing.kl_together(list(reversed(layers)), data_size), expected)


def test_kl_of_pruned_and_whole_laws_together() -> None:
    """A pruned entry adds nothing, wherever it stands."""
    laws = [mean_field(), mean_field(None), mean_field(0.8)]
    keep = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    laws[1].centre.keep = laws[1].spread.keep = keep
    found = MeanField.kl_together(laws, 0.3)
    expected = 0.0
    for law, kept in zip(laws, (torch.ones(3, 2), keep, torch.ones(3, 2)), strict=True):
        raw = Normal(law.centre.value.detach(), torch.where(kept > 0, law.spread().detach(), 1.0))
        expected += float((kept * kl_divergence(raw, Normal(torch.zeros(3, 2).double(), 0.3))).sum())
    close(found, expected)
    found.backward()
    for law in laws:
        assert law.spread.raw.grad is not None
        assert law.spread.raw.grad.isfinite().all()


def test_every_layer_of_a_mixed_network_trains_with_its_own_weights() -> None:
    """With all randomness turned down, a drawn network is the mean one, whatever is drawn together."""
    torch.manual_seed(SEED)
    net = nn.Sequential(*(nn.Linear(6, 6, bias=i % 2 == 0) for i in range(8)), nn.Linear(6, 3), nn.Linear(3, 6))
    methods: Overrides = {
        "1": "fcg-u",
        "2": "ensemble-u",
        "3": "ffg-w",
        "4": {"inducing": (3, 4)},
        "6": "deterministic",
    }
    made = bayesianize(net, "ffg-u", inducing=4, members=1, start="prior", layers=methods)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith(("lam.raw", "spread.raw")):
                p.fill_(-100)
    x = torch.randn(5, 6)
    mean = predict(made, made.factors(), x, samples=0, keep_outputs=True).outputs
    assert mean is not None
    torch.testing.assert_close(
        made.sample(x, 3).detach(), mean.expand(3, -1, -1), rtol=1e-3, atol=1e-4 * float(mean.std())
    )
    total = sum(layer.q.kl(7).item() for layer in made.layers.values())
    assert made.kl(7).item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u"])
def test_a_training_step_reaches_every_parameter(method: str) -> None:
    """Through a whole network, in float32, with a head of M > d_out; the KL's gradient too."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3))
    made = bayesianize(net, method, inducing=5, start="prior", members=1)
    x = torch.randn(4, 2, 4, 4)
    (made.sample(x, 2).square().mean() + made.kl() / 100).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u", "ffg-w", "fcg-w", "ensemble-w", "mc-dropout"])
def test_a_network_in_float64_is_sampled(method: str) -> None:
    torch.manual_seed(SEED)
    made = bayesianize(nn.Linear(5, 3).double(), method, inducing=2)
    x = torch.randn(4, 5, dtype=torch.float64)
    assert made.sample(x, 2).dtype == torch.float64
    assert predict(made, made.factors(), x, samples=2).summary is not None


# MC dropout

DROPPED: dict[str, Geometry] = {
    "linear": Linear(4, 3, bias=True),
    "linear without bias": Linear(4, 3, bias=False),
    "conv": Conv(2, 4, (3, 2), (1, 1), (1, 1), (1, 1), 1, bias=True),
    "conv in groups": Conv(4, 6, (3,), (1,), (1,), (1,), 2, bias=True),
    "conv3d": Conv(2, 2, (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, bias=False),
}
each_dropped = pytest.mark.parametrize("g", DROPPED.values(), ids=DROPPED.keys())


def dropout(g: Geometry, rate: float = 0.3) -> Dropout:
    return Dropout(normal(*g.shape, at=12), rate, g.groups, g.inputs, g.bias, sigma=0.5)


@each_dropped
def test_dropped_weights_have_the_mean_and_variance_of_bernoullis(g: Geometry) -> None:
    """Per entry, mean W and variance W² rate/(1 − rate), and the bias never dropped; 5 standard errors."""
    q, rate = dropout(g), 0.3
    f = q.factors()
    assert f.normals == g.inputs
    drawn = f.draw(normal(N, f.normals, at=13), None)
    assert isinstance(drawn, Dense)
    W, draws = q.W().detach(), drawn.W
    bias = torch.zeros(g.shape[1], dtype=torch.bool)
    bias[-1] = g.bias
    assert (draws[:, :, bias] == W[:, bias]).all()
    v = W[:, ~bias] ** 2 * rate / (1 - rate)
    kept = draws[:, :, ~bias]
    assert ((kept.mean(0) - W[:, ~bias]).abs() < 5 * (v / N).sqrt()).all()
    bernoulli = scipy.stats.bernoulli(1 - rate)
    kurtosis = float(bernoulli.stats("k")) + 3
    assert ((kept.var(0) - v).abs() < 5 * v * ((kurtosis - 1) / N) ** 0.5).all()
    values = torch.stack([torch.zeros_like(W), W / (1 - rate)])[..., ~bias]
    assert (kept[:1000, None] - values).abs().amin(1).max() < 1e-12  # dropped, or kept and scaled
    close(matrices(f.mean(None))[0], W)


@each_dropped
def test_one_mask_per_sample_drops_whole_inputs(g: Geometry) -> None:
    """Against torch's own layer on masked inputs: the same channels for every row, location and output."""
    K, B, rate = 16, 3, 0.3
    f = dropout(g).factors()
    noise = normal(K, f.normals, at=14)
    keep = torch.tensor(scipy.stats.norm.cdf(noise.numpy()) < 1 - rate).double() / (1 - rate)  # (K, inputs)
    assert len(keep.unique(dim=0)) > 2
    if isinstance(g, Linear):
        x, mask = normal(B, g.inputs), keep
        layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d = nn.Linear(g.inputs, g.outputs, g.bias)
    else:
        x, mask = normal(B, g.inputs, *[4] * g.dims), keep.view(*keep.shape, *[1] * g.dims)
        made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[g.dims - 1]
        layer = made(g.inputs, g.outputs, g.kernel, padding=g.padding, groups=g.groups, bias=g.bias)  # type: ignore[arg-type]
    W = f.W
    state = {"weight": W[:, :-1] if g.bias else W, "bias": W[:, -1]}
    layer = layer.double()
    layer.load_state_dict({k: state[k].reshape(v.shape) for k, v in layer.state_dict().items()})
    expected = torch.cat([layer(x * mask_k) for mask_k in mask])
    folded = x.repeat(K, *[1] * (x.dim() - 1))
    close(apply(g, folded, f.draw(noise, None), K, "loop"), expected.detach())
    close(apply(g, folded, f.draw(noise, None), K, "batch"), expected.detach())


@each_dropped
def test_in_training_masks_differ_from_row_to_row(g: Geometry) -> None:
    """As an ordinary dropout layer: whole channels, one mask a row, the mean kept."""
    q = dropout(g)
    f = q.trainable()
    assert f.normals == 0
    operand = f.draw(torch.zeros(1, 0), None)
    assert isinstance(operand, Dropped)
    x = normal(g.inputs) if isinstance(g, Linear) else normal(g.inputs, *g.kernel)
    exact = (
        Conv(g.inputs, g.outputs, g.kernel, g.stride, (0,) * g.dims, g.dilation, g.groups, g.bias)
        if isinstance(g, Conv)
        else g
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        out = apply(exact, x.expand(20_000, *x.shape), operand, 1, "loop").flatten(1).detach()
    whole = matrices(q.factors().mean(None))[0]
    patches = x.reshape(g.groups, -1)  # one a group
    patches = torch.cat([patches, torch.ones(g.groups, int(g.bias)).double()], 1)
    terms = (whole.view(g.groups, -1, g.shape[1]) * patches[:, None]).flatten(0, 1)  # (d_out, d_in)
    weights = terms[:, : g.shape[1] - g.bias]
    by_input = weights.view(len(weights), g.inputs // g.groups, -1).sum(2)  # what is dropped together
    v = by_input.square().sum(1) * 0.3 / 0.7
    assert ((out.mean(0) - terms.sum(1)).abs() < 5 * (v / len(out)).sqrt() + 1e-12).all()
    fourth = by_input.pow(4).sum(1) * (float(scipy.stats.bernoulli(0.7).stats("k")) * (0.3 / 0.7) ** 2)
    assert ((out.var(0) - v).abs() < 5 * ((2 * v**2 + fourth.clamp(min=0)) / len(out)).sqrt()).all()


# ensembles


def test_members_are_cycled_in_a_seeded_order() -> None:
    E, orders = 5, set()
    for seed in range(20):
        drawn = Draws(13, torch.zeros(13, 0), seed).member(E).tolist()
        assert sorted(drawn[:E]) == list(range(E))
        assert drawn == [drawn[k % E] for k in range(13)]
        later = Draws(6, torch.zeros(6, 0), seed, start=7).member(E).tolist()
        assert later == drawn[7:]  # wherever the passes are cut
        orders.add(tuple(drawn[:E]))
    assert len(orders) > 10
    assert Draws(E, None, 3).member(E).tolist() == list(range(E))  # the mean takes them in turn


def test_samples_of_an_ensemble_are_its_members() -> None:
    """K = 2E samples: each network twice; the mean, each once. BatchNorm is each member's own."""
    torch.manual_seed(SEED)
    networks = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    for network in networks:
        network(torch.randn(30, 3) * 2 + 1)  # running statistics of its own
        network.eval()
    x = torch.randn(5, 3)
    made = ensemble(networks)
    factors = made.factors()
    outputs = predict(made, factors, x, samples=6, seed=SEED, keep_outputs=True).outputs
    order = Draws(6, torch.zeros(6, 0), SEED).member(3).tolist()
    assert outputs is not None
    torch.testing.assert_close(outputs, torch.stack([networks[m](x).detach() for m in order]))
    each = predict(made, factors, x, samples=0, keep_outputs=True).outputs
    assert each is not None
    torch.testing.assert_close(each, torch.stack([network(x).detach() for network in networks]))


def test_the_members_of_an_inducing_ensemble_share_their_projections() -> None:
    """W of member m is σ A_r V_m A_cᵀ plus λ-noise; without noise exactly that."""
    V = normal(3, 2, 3, at=5)
    q = inducing(law=Mixture(V), lam_max=0)
    (A_r, _), (A_c, _) = projections(q)
    member = torch.tensor([2, 0, 1, 2])
    for f in (q.factors(), q.trainable()):
        assert f.members == 3
        close(matrices(f.draw(torch.zeros(4, 0).double(), member)), 0.7 * A_r @ V[member] @ A_c.T)
        close(matrices(f.mean(member)), 0.7 * A_r @ V[member] @ A_c.T)


# a hierarchy [Ritter21, appendix H]


class Beside(nn.Module):
    """Layers side by side, so that the identity as input shows all their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4, bias=False), nn.Linear(5, 6, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x)], 1)


def hierarchy(lam_below: float) -> BayesianNetwork:
    """M_in differs from layer to layer; large λ and spreads, so that every term of the covariance counts."""
    torch.manual_seed(SEED)
    below: Overrides = {"*": {"lam_max": lam_below, "noise": "exact"}, "b": {"inducing": (4, 2)}}
    made = bayesianize(Beside(), "ffg-u", inducing=(4, 3), hierarchy=(2, 5), start="prior", lam_max=0.9, layers=below)
    top, parts = posteriors(made)
    top.lam = Positive(torch.tensor(0.2), 1e-6, 0.9)
    top.law = MeanField(torch.randn(2, 5), 0.8, 0.9)
    for i, q in enumerate(parts):
        if lam_below:
            q.lam = Positive(torch.tensor(0.3 + 0.2 * i), 1e-6, 0.9)
    for q in (top, *parts):  # far from singular
        q.D_r, q.D_c = (Positive(torch.linspace(0.2, 0.6, len(Z.value)), 1e-6) for Z in (q.Z_r, q.Z_c))
    return made


def posteriors(made: BayesianNetwork) -> tuple[Inducing, list[Inducing]]:
    """The global one and those of the layers."""
    assert made.hierarchy is not None
    found = [layer.posterior for layer in (made.hierarchy, *made.layers.values())]
    top, *parts = [q for q in found if isinstance(q, Inducing)]
    assert len(parts) == 3
    return top, parts


@dataclass(frozen=True)
class DenseHierarchy:
    mean_V: Tensor  # (32,)  the V's of the layers side by side, 4 × 8, rows stacked
    C_V: Tensor
    mean_W: Tensor  # (75,)  a, b, c, each with its rows stacked
    C_W: Tensor


def dense(made: BayesianNetwork) -> DenseHierarchy:
    top, parts = posteriors(made)
    assert isinstance(top.law, MeanField)
    (A_r, P_r), (A_c, P_c) = projections(top)
    T = torch.kron(A_r, A_c)  # the prior of V has σ = 1
    mean = T @ top.law.centre().detach().double().flatten()
    C_V = 0.8**2 * T @ T.T + 0.2**2 * (torch.eye(32) - torch.kron(P_r, P_c))
    place, at, maps, noises = torch.arange(32).view(4, 8), 0, [], []
    for i, q in enumerate(parts):
        (A_r, P_r), (A_c, P_c) = projections(q)
        M_in, lam = A_c.shape[1], 0.0 if q.lam is None else 0.3 + 0.2 * i
        T = torch.zeros(len(A_r) * len(A_c), 32).double()
        T[:, place[:, at : at + M_in].flatten()] = 5**-0.5 * torch.kron(A_r, A_c)
        maps.append(T)
        noises.append(lam**2 / 5 * (torch.eye(len(T)) - torch.kron(P_r, P_c)))
        at += M_in
    J = torch.cat(maps)
    return DenseHierarchy(mean, C_V, J @ mean, J @ C_V @ J.T + torch.block_diag(*noises))


def drawn_weights(made: BayesianNetwork, form: str) -> Tensor:
    """Joint draws of all layers' weights, each layer with its rows stacked: (20,000, 75)."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + 1)
        parts = []
        for _ in range(10):
            if form == "trained":
                parts.append(made.sample(torch.eye(5), 2000))
            else:
                factors = made.factors()
                draws = Draws(2000, torch.randn(2000, factors.normals), SEED)
                parts.append(made.run(torch.eye(5), factors, draws, dict.fromkeys(made.layers, "batch")))
    return torch.cat(parts).double().mT.flatten(1)  # (N, 5, 15): the identity's rows are the weights' columns


@pytest.mark.parametrize("form", ["served", "trained"])
def test_a_hierarchy_draws_the_Vs_of_all_layers_from_the_dense_gaussian(form: str) -> None:
    """Without noise below, each layer's V is read off its W; jointly, so correlations across layers are seen too."""
    made = hierarchy(lam_below=0.0)
    oracle = dense(made)
    W, found, at = drawn_weights(made, form), [], 0
    for q in posteriors(made)[1]:
        (A_r, _), (A_c, _) = projections(q)
        block = W[:, at : at + 5 * len(A_r)].view(-1, len(A_r), 5)
        found.append(5**0.5 * torch.linalg.pinv(A_r) @ block @ torch.linalg.pinv(A_c).T)
        at += 5 * len(A_r)
    assert_law(torch.cat(found, 2).flatten(1), oracle.mean_V, oracle.C_V)
    across = oracle.C_V.view(4, 8, 4, 8)[:, :3, :, 3:].abs().max() / oracle.C_V.diagonal().max()
    assert across > 0.1  # or the layers would not be seen to hang together


@pytest.mark.parametrize("form", ["served", "trained"])
def test_a_hierarchy_draws_the_weights_of_all_layers_from_the_dense_gaussian(form: str) -> None:
    made = hierarchy(lam_below=0.9)
    oracle = dense(made)
    assert_law(drawn_weights(made, form), oracle.mean_W, oracle.C_W)


def test_the_mean_of_a_hierarchy_is_the_mean_of_its_draws() -> None:
    made = hierarchy(lam_below=0.9)
    outputs = predict(made, made.factors(), torch.eye(5), samples=0, keep_outputs=True).outputs
    assert outputs is not None
    torch.testing.assert_close(outputs.double().mT.flatten(), dense(made).mean_W, rtol=1e-4, atol=1e-5)


def test_kl_of_a_hierarchy_is_the_sum_of_its_terms() -> None:
    """R(λ) of the top and of each layer, and KL[q(U)] of the top alone; β weighs the layers' terms."""
    made = hierarchy(lam_below=0.9)
    law = posteriors(made)[0].law
    assert isinstance(law, MeanField)

    def R(lam: float, n: int) -> float:
        return n * (lam**2 / 2 - math.log(lam) - 0.5)

    q = Normal(law.centre().detach().double(), 0.8)
    top = R(0.2, 4 * 8) + float(kl_divergence(q, Normal(0.0, 1.0)).sum())
    below = R(0.3, 4 * 5) + R(0.5, 6 * 5) + R(0.7, 5 * 5)
    assert made.kl().item() == pytest.approx(top + below, rel=1e-5)
    assert made.kl(data_size=2).item() == pytest.approx(top + 0.4 * below, rel=1e-5)


def test_a_training_step_reaches_every_parameter_of_a_hierarchy() -> None:
    made = hierarchy(lam_below=0.9)
    (made.sample(torch.randn(3, 5), 2).square().mean() + made.kl() / 100).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
