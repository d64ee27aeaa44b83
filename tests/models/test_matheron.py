"""The ways of drawing W given V, against the dense Gaussian of [Ritter21, eq. 34] that only a toy size can afford.

Draws are affine in their standard normals, so most laws are checked exactly: the value at zero noise is the mean, the
slopes give the covariance. Monte Carlo with real normals, to 5 standard errors, checks what that cannot see.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._rule import draw_by_rule
from dubito.models.network.geometry import Execution, Linear, apply
from dubito.models.numerics.parameters import Positive
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.inducing_factors import InducingFactors, LambdaLaw
from dubito.models.posteriors.matheron import (
    MatheronFactors,
    draw_jointly,
    draw_projected,
    draw_weights,
    factorise,
    regularise,
    sides,
    whiten,
)
from dubito.models.posteriors.protocol import Dense, Factored
from tests.examples import at_most

SEED = 0
pytestmark = pytest.mark.draws
N = at_most(40_000)


@dataclass(frozen=True)
class Toy:
    """A layer and one V, all in float64."""

    Z_r: Tensor  # (M_out, d_out)
    D_r: Tensor
    Z_c: Tensor  # (M_in, d_in)
    D_c: Tensor
    V: Tensor  # (M_out, M_in)
    lam: float = 0.6
    sigma: float = 1.3

    @property
    def shape(self) -> tuple[int, int]:
        return self.Z_r.shape[1], self.Z_c.shape[1]

    @property
    def law(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of W with its rows stacked: eq. 34 with Ψ inverted outright."""
        Z_r, D_r, Z_c, D_c, V = (t.numpy() for t in (self.Z_r, self.D_r, self.Z_c, self.D_c, self.V))
        Psi_r, Psi_c = Z_r @ Z_r.T + np.diag(D_r**2), Z_c @ Z_c.T + np.diag(D_c**2)
        left, right = Z_r.T @ np.linalg.inv(Psi_r), np.linalg.inv(Psi_c) @ Z_c
        U = np.linalg.cholesky(Psi_r) @ V @ np.linalg.cholesky(Psi_c).T
        C = np.eye(Z_r.shape[1] * Z_c.shape[1]) - np.kron(left @ Z_r, Z_c.T @ right)
        return torch.tensor(self.sigma * left @ U @ right).flatten(), torch.tensor((self.lam * self.sigma) ** 2 * C)

    def law_of_outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of W x for all inputs x (n, d_in) at once: (n, d_out) and (n, d_out, n, d_out)."""
        mean, C = self.law
        d_out, d_in = self.shape
        return x @ mean.view(d_out, d_in).T, torch.einsum("ni,aibj,mj->namb", x, C.view(d_out, d_in, d_out, d_in), x)

    @property
    def factors(self) -> MatheronFactors:
        return factorise(whiten(self.Z_r, self.D_r), whiten(self.Z_c, self.D_c))

    def jittered(self) -> "Toy":
        """With D² + 1e-4 × the mean diagonal of Ψ for D²."""
        r, c = ((Z @ Z.T).diagonal() + D**2 for Z, D in ((self.Z_r, self.D_r), (self.Z_c, self.D_c)))
        return replace(self, D_r=(self.D_r**2 + 1e-4 * r.mean()).sqrt(), D_c=(self.D_c**2 + 1e-4 * c.mean()).sqrt())

    def before_jitter(self) -> "Toy":
        """The layer that `jittered` makes this one of."""
        Ds = []
        for Z, D in ((self.Z_r, self.D_r), (self.Z_c, self.D_c)):
            diagonal = ((Z @ Z.T).diagonal() + D**2).mean() / (1 + 1e-4)  # the mean of Ψ's before it grew by 1e-4
            Ds.append((D**2 - 1e-4 * diagonal).sqrt())
        return replace(self, D_r=Ds[0], D_c=Ds[1])

    def posterior(self, noise: LambdaLaw, directions: Tensor | None = None) -> Inducing:
        made = Inducing(self.Z_r, self.Z_c, None, self.sigma, lam=self.lam, noise=noise)
        made.D_r, made.D_c = Positive(self.D_r, 1e-9), Positive(self.D_c, 1e-9)
        made.directions = None if directions is None else directions.T
        return made


def toy(d_out: int, d_in: int, M_out: int, M_in: int, seed: int = SEED) -> Toy:
    """Spectra far apart, p near 1 and q near 0, so that swapping them shows."""
    rng = torch.Generator().manual_seed(seed)
    Z_r, Z_c, V = (torch.randn(*s, generator=rng).double() for s in ((M_out, d_out), (M_in, d_in), (M_out, M_in)))
    return Toy(Z_r, torch.linspace(0.1, 0.6, M_out).double(), Z_c, torch.linspace(0.9, 2.5, M_in).double(), V)


TOYS = {
    "square": toy(3, 3, 2, 2),
    "wide": toy(2, 5, 2, 3),
    "tall": toy(5, 2, 3, 1),
    "M_out > d_out": toy(2, 4, 5, 2),
    "M_in > d_in": toy(4, 2, 2, 5),
    "both M > d": toy(2, 3, 4, 6),
}
each_toy = pytest.mark.parametrize("t", TOYS.values(), ids=TOYS.keys())
sizes = st.integers(1, 5)


def assert_law(draws: Tensor, mean: Tensor, C: Tensor) -> None:
    """Mean and full covariance of draws (N, n), to 5 standard errors of a Gaussian sample."""
    v, n = C.diagonal(), len(draws)
    assert ((draws.mean(0) - mean).abs() < 5 * (v / n).sqrt() + 1e-12).all()
    assert ((draws.T.cov() - C).abs() < 5 * ((v[:, None] * v + C**2) / n).sqrt() + 1e-12).all()


def exact_law(draw: Callable[[Tensor], Tensor], normals: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of an affine map of standard normals, (K, normals) -> (K, n), without sampling."""
    at = draw(torch.cat([torch.zeros(1, normals), torch.eye(normals)]).double())
    slopes = at[1:] - at[0]
    z = torch.randn(3, normals, generator=torch.Generator().manual_seed(SEED)).double()
    torch.testing.assert_close(draw(z), at[0] + z @ slopes)  # affine indeed
    return at[0], slopes.T @ slopes


def assert_exact(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-8, atol=1e-11)


# ways 1 and 2, the training form, and way 3's G: each as a function of the layer that draws N matrices

Way = Callable[[Toy, int, torch.Generator], Tensor]


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def by_rule(t: Toy, n: int, rng: torch.Generator) -> Tensor:
    return draw_by_rule(t.Z_r, t.D_r, t.Z_c, t.D_c, t.V.expand(n, -1, -1), t.lam, t.sigma, rng)


def spectral(t: Toy, n: int, rng: torch.Generator) -> Tensor:
    f = t.factors
    E, eps = normal(n, *t.shape, rng=rng), normal(n, len(f.p), len(f.q), rng=rng)
    return draw_weights(f, t.V, t.lam, t.sigma, E, eps)


def jointly(t: Toy, n: int, rng: torch.Generator) -> Tensor:
    bare = t.before_jitter()
    r, c = sides([[bare.Z_r], [bare.Z_c]], [[bare.D_r], [bare.D_c]])
    noise = normal(n, 1, r.P.shape[2], c.P.shape[2], rng=rng)
    lam, sigma = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (t.lam, t.sigma))
    (W,) = draw_jointly([(r, c)], t.V, lam, sigma, [noise])
    return W[:, 0]


WAYS: dict[str, Way] = {"rule": by_rule, "spectral": spectral, "jointly": jointly}


def projected(t: Toy, n: int, rng: torch.Generator) -> Tensor:
    f = t.factors
    return draw_projected(f, t.V, t.lam, t.sigma, normal(n, t.shape[0], len(f.q), rng=rng))


def through(B: Tensor, t: Toy) -> tuple[Tensor, Tensor]:
    """The dense law of W B, rows stacked."""
    mean, C = t.law
    T = torch.kron(torch.eye(t.shape[0]).double(), B.T)
    return T @ mean, T @ C @ T.T


@each_toy
def test_equation_34_is_the_conditional_of_the_augmented_prior(t: Toy) -> None:
    """The oracle itself: the joint Gaussian of W and U [Ritter21, eq. 6] conditioned on U, for λ = 1."""
    d_out, d_in = t.shape
    rows, columns = (
        torch.cat([torch.cat([torch.eye(Z.shape[1]).double(), Z.T], 1), torch.cat([Z, Z @ Z.T + torch.diag(D**2)], 1)])
        for Z, D in ((t.Z_r, t.D_r), (t.Z_c, t.D_c))
    )
    joint = t.sigma**2 * torch.kron(rows, columns)
    place = torch.arange(len(joint)).view(len(rows), len(columns))
    W, U = place[:d_out, :d_in].flatten(), place[d_out:, d_in:].flatten()
    L_r, L_c = (torch.linalg.cholesky(S[d:, d:]) for S, d in ((rows, d_out), (columns, d_in)))
    gain = joint[W][:, U] @ torch.linalg.inv(joint[U][:, U])
    # here U has the prior σ²(Ψ_r ⊗ Ψ_c), so it is σ L_r V L_cᵀ
    mean, C = gain @ (t.sigma * L_r @ t.V @ L_c.T).flatten(), joint[W][:, W] - gain @ joint[U][:, W]
    assert_exact(replace(t, lam=1.0).law, (mean, C))


@each_toy
def test_every_way_draws_the_conditional_and_they_agree_with_each_other(t: Toy) -> None:
    """Means and covariances are those of the dense law, of W B_c for way 3. Two samples of one law: theirs differ by
    5 standard errors of the difference at most."""
    B_c = t.factors.B_c
    samples = {name: way(t, N, torch.Generator().manual_seed(SEED + i)) for i, (name, way) in enumerate(WAYS.items())}
    for W in samples.values():
        assert_law(W.flatten(1), *t.law)
    by_way_3 = projected(t, N, torch.Generator().manual_seed(SEED + 9)).flatten(1)
    assert_law(by_way_3, *through(B_c, t))
    pairs = [(a.flatten(1), b.flatten(1)) for a, b in combinations(samples.values(), 2)]
    pairs += [((W @ B_c).flatten(1), by_way_3) for W in samples.values()]
    for a, b in pairs:
        C = (a.T.cov() + b.T.cov()) / 2
        v = C.diagonal()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * (2 * v / N).sqrt()).all()
        assert ((a.T.cov() - b.T.cov()).abs() < 5 * (2 * (v[:, None] * v + C**2) / N).sqrt()).all()


@given(d_out=sizes, d_in=sizes, M_out=sizes, M_in=sizes, seed=st.integers(0, 99))
@settings(max_examples=at_most(20), deadline=None, derandomize=True)
def test_way_2_the_training_form_and_way_3_have_the_exact_law(
    d_out: int, d_in: int, M_out: int, M_in: int, seed: int
) -> None:
    t = toy(d_out, d_in, M_out, M_in, seed)
    f = t.factors
    n, m = d_out * d_in, len(f.p) * len(f.q)

    def by_way_2(z: Tensor) -> Tensor:
        E, eps = z.split([n, m], 1)
        return draw_weights(
            f, t.V, t.lam, t.sigma, E.view(-1, d_out, d_in), eps.view(-1, *f.p.shape, *f.q.shape)
        ).flatten(1)

    assert_exact(exact_law(by_way_2, n + m), t.law)
    bare = t.before_jitter()
    r, c = sides([[bare.Z_r], [bare.Z_c]], [[bare.D_r], [bare.D_c]])
    lam, sigma = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (t.lam, t.sigma))
    tall, wide = d_out + M_out, d_in + M_in

    def by_training(z: Tensor) -> Tensor:
        return draw_jointly([(r, c)], t.V, lam, sigma, [z.view(-1, 1, tall, wide)])[0].flatten(1)

    assert_exact(exact_law(by_training, tall * wide), t.law)
    G = exact_law(
        lambda z: draw_projected(f, t.V, t.lam, t.sigma, z.view(len(z), d_out, -1)).flatten(1), d_out * len(f.q)
    )
    assert_exact(G, through(f.B_c, t))


@each_toy
def test_factors_are_the_thin_svds_of_A(t: Toy) -> None:
    """Orthonormal bases of the rows of Z, and p, q the eigenvalues of Zᵀ Ψ⁻¹ Z."""
    f = t.factors
    for B, s, Q, Z, D in ((f.B_r, f.p, f.Q_r, t.Z_r, t.D_r), (f.B_c, f.q, f.Q_c, t.Z_c, t.D_c)):
        assert B.shape == (Z.shape[1], min(Z.shape))
        torch.testing.assert_close(B.T @ B, torch.eye(min(Z.shape)).double())
        torch.testing.assert_close(B @ B.T, torch.linalg.pinv(Z) @ Z)
        P = Z.T @ torch.linalg.inv(Z @ Z.T + torch.diag(D**2)) @ Z
        torch.testing.assert_close(B * s @ B.T, P)
        torch.testing.assert_close(B * s.sqrt() @ Q.T, whiten(Z, D))


# way 3 as a server runs it: Inducing.factors() with factored noise, applied to inputs


def outputs(f: InducingFactors, V: Tensor, x: Tensor, execution: Execution = "factored") -> Callable[[Tensor], Tensor]:
    """W x for every sample and input, from normals: (K, normals) -> (K, n·d_out)."""
    d_out, d_in = f.shape

    def draw(noise: Tensor) -> Tensor:
        K = len(noise)
        out = apply(Linear(d_in, d_out, bias=False), x.repeat(K, 1), f.given(V).draw(noise, None), K, execution)
        return out.view(K, -1)

    return draw


def joint_law(f: InducingFactors, t: Toy, x: Tensor) -> tuple[Tensor, Tensor]:
    """What f gives, exactly: (n, d_out) and (n, d_out, n, d_out)."""
    mean, C = exact_law(outputs(f, t.V, x), f.normals)
    n, d_out = len(x), t.shape[0]
    return mean.view(n, d_out), C.view(n, d_out, n, d_out)


def marginals(law: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Each input on its own: (n, d_out) and (n, d_out, d_out)."""
    return law[0], torch.einsum("nanb->nab", law[1])


def inputs(n: int, d_in: int) -> Tensor:
    return 2 * torch.randn(n, d_in, generator=torch.Generator().manual_seed(SEED + 1)).double()


@each_toy
def test_way_3_gives_every_input_the_exact_marginal_law(t: Toy) -> None:
    """Mean, variance and covariance between the outputs of one input, wherever it lies."""
    x = inputs(7, t.shape[1])
    found = joint_law(t.posterior("factored").factors(), t, x)
    assert_exact(marginals(found), marginals(t.jittered().law_of_outputs(x)))


@each_toy
def test_way_3_gives_the_marginal_law_by_monte_carlo(t: Toy) -> None:
    x = inputs(2, t.shape[1])
    f = t.posterior("factored").factors()
    mean, C = t.jittered().law_of_outputs(x)
    noise = normal(N, f.normals, rng=torch.Generator().manual_seed(SEED))
    draws = outputs(f, t.V, x)(noise).view(N, *mean.shape)
    for i in range(len(x)):
        assert_law(draws[:, i], mean[i], C[i, :, i])


@each_toy
def test_way_3_is_exact_jointly_for_inputs_in_the_span(t: Toy) -> None:
    """Any combination of the rows of Z_c: covariances between inputs and outputs alike."""
    x = inputs(4, len(t.Z_c)) @ t.Z_c
    assert_exact(joint_law(t.posterior("factored").factors(), t, x), t.jittered().law_of_outputs(x))


def test_way_3_has_correlation_1_outside_the_span() -> None:
    """As documented: one shared noise, where the truth is the cosine of the two inputs."""
    t = TOYS["wide"]
    outside = torch.linalg.svd(t.Z_c).Vh[len(t.Z_c) :]  # orthonormal
    x = torch.stack([2 * outside[0], 0.6 * outside[0] + 0.8 * outside[1]])
    C = joint_law(t.posterior("factored").factors(), t, x)[1]
    C_true = t.jittered().law_of_outputs(x)[1]
    for a in range(2):
        length = (C[0, a, 0, a] * C[1, a, 1, a]).sqrt()
        torch.testing.assert_close(C[0, a, 1, a] / length, torch.ones(()).double())
        torch.testing.assert_close(C_true[0, a, 1, a] / length, torch.tensor(0.6).double())


@pytest.mark.parametrize("R", [1, 2, 4])
def test_directions_make_way_3_exact_on_what_they_span(R: int) -> None:
    """On every input that B_c and the R directions span, and with R = d_in − r_in = 4 on all inputs."""
    t = toy(2, 6, 2, 2)
    directions = normal(6, R, rng=torch.Generator().manual_seed(SEED))
    f = t.posterior("factored", directions).factors()
    assert f.B.shape == (6, 2 + R)
    torch.testing.assert_close(f.B.T @ f.B, torch.eye(2 + R).double())
    assert f.spans == (R == 4)
    assert f.normals == 2 * (2 + R) + (0 if f.spans else 2)
    spanned = torch.cat([t.Z_c, directions.T])
    x = inputs(5, len(spanned)) @ spanned if R < 4 else inputs(5, 6)
    expected = t.jittered().law_of_outputs(x)
    assert_exact(joint_law(f, t, x), expected)
    draws = outputs(f, t.V, x)(normal(N, f.normals, rng=torch.Generator().manual_seed(SEED)))
    assert_law(draws, expected[0].flatten(), expected[1].reshape(draws.shape[1], -1))
    everywhere = inputs(5, 6)  # and the marginal law still holds everywhere
    assert_exact(marginals(joint_law(f, t, everywhere)), marginals(t.jittered().law_of_outputs(everywhere)))


def test_directions_that_add_nothing_are_left_out() -> None:
    """Those in the span of Z_c, repeated ones, and more than there is room for."""
    t = toy(2, 6, 2, 2)
    new = normal(6, 1, rng=torch.Generator().manual_seed(SEED))
    assert t.posterior("factored", torch.cat([t.Z_c.T, new, 2 * new], 1)).factors().B.shape == (6, 3)
    many = t.posterior("factored", normal(6, 9, rng=torch.Generator().manual_seed(SEED))).factors()
    assert many.B.shape == (6, 6)
    assert many.spans
    assert t.posterior("exact", new).factors().B.shape == (6, 2)


@each_toy
@pytest.mark.parametrize("execution", get_args(Execution))
def test_plans_do_not_change_way_3(t: Toy, execution: Execution) -> None:
    x, f = inputs(3, t.shape[1]), t.posterior("factored").factors()
    noise = normal(4, f.normals, rng=torch.Generator().manual_seed(SEED))
    torch.testing.assert_close(outputs(f, t.V, x, execution)(noise), outputs(f, t.V, x)(noise))


# λ = 0


@each_toy
def test_without_noise_all_ways_are_the_conditional_mean(t: Toy) -> None:
    still = replace(t, lam=0.0)
    mean = still.law[0].view(1, *t.shape)
    rng = torch.Generator().manual_seed(SEED)
    for way in WAYS.values():
        torch.testing.assert_close(way(still, 1, rng), mean)
    torch.testing.assert_close(projected(still, 1, rng) @ t.factors.B_c.T, mean)
    expected = t.jittered().law[0].view(1, *t.shape)
    for noise in ("exact", "factored"):
        made = Inducing(t.Z_r, t.Z_c, None, t.sigma, lam_max=0, noise=noise)
        made.D_r, made.D_c = Positive(t.D_r, 1e-9), Positive(t.D_c, 1e-9)
        nothing = torch.zeros(1, 0).double()
        served, trained = made.factors(), made.trainable()
        assert served.normals == trained.normals == 0
        drawn = served.given(t.V[None]).draw(nothing, None)
        assert isinstance(drawn, Factored)
        assert drawn.e is None
        torch.testing.assert_close(drawn.dense(), expected)
        torch.testing.assert_close(served.given(t.V[None]).mean(None).dense(), expected)
        torch.testing.assert_close(trained.given(t.V[None]).draw(nothing, None).W, expected)
        torch.testing.assert_close(trained.given(t.V[None]).mean(None).W, expected)


# jitter


def start_of_training(d_out: int, d_in: int, M_out: int, M_in: int, seed: int = SEED) -> Toy:
    """Z from N(0, 1/M) and D = 1e-3, where the jitter is many times D²."""
    t = toy(d_out, d_in, M_out, M_in, seed)
    D_r, D_c = torch.full((M_out,), 1e-3).double(), torch.full((M_in,), 1e-3).double()
    return replace(t, Z_r=t.Z_r / M_out**0.5, Z_c=t.Z_c / M_in**0.5, D_r=D_r, D_c=D_c)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (3, 4, 2, 3)], ids=["both M > d", "both M < d"])
def test_the_jitter_is_part_of_D_in_every_way(shape: tuple[int, int, int, int]) -> None:
    t = start_of_training(*shape)
    mean, C = t.jittered().law
    P_r, P_c = (torch.linalg.pinv(Z) @ Z for Z in (t.Z_r, t.Z_c))
    decided = torch.kron(P_r, P_c)
    assert (decided @ C @ decided).trace() > 5 * (decided @ t.law[1] @ decided).trace()  # so that it shows
    served, trained = t.posterior("exact").factors(), t.posterior("exact").trainable()
    assert_exact(exact_law(lambda z: drawn(served.given(t.V).draw(z, None)).flatten(1), served.normals), (mean, C))
    assert_exact(exact_law(lambda z: trained.given(t.V[None]).draw(z, None).W.flatten(1), trained.normals), (mean, C))
    torch.testing.assert_close(served.given(t.V[None]).mean(None).dense().flatten(), mean)
    torch.testing.assert_close(trained.given(t.V[None]).mean(None).W.flatten(), mean)
    ours = replace(t, D_r=regularise(t.Z_r, t.D_r), D_c=regularise(t.Z_c, t.D_c))
    W = by_rule(ours, N, torch.Generator().manual_seed(SEED)).flatten(1)
    rotate = torch.linalg.eigh(C)[1]  # where the jitter is all the variance there is
    assert_law(W @ rotate, rotate.T @ mean, rotate.T @ C @ rotate)


def drawn(operand: Dense | Factored) -> Tensor:
    return operand.W if isinstance(operand, Dense) else operand.dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_singular_Psi_still_factorises(scale: float, dtype: torch.dtype) -> None:
    """Rows of Z that repeat, M > d, a D of nothing; and at any scale, for the jitter is relative."""
    t = toy(3, 4, 9, 8)
    Z_r = (scale * torch.cat([t.Z_r[:3]] * 3)).to(dtype)
    Z_c = (scale * t.Z_c[:1].expand(8, 4)).to(dtype)
    D_r, D_c = torch.full((9,), 1e-30, dtype=dtype), torch.full((8,), 1e-30, dtype=dtype)
    A_r, A_c = whiten(Z_r, regularise(Z_r, D_r)), whiten(Z_c, regularise(Z_c, D_c))
    f = factorise(A_r, A_c)
    # Z repeated m times is √m Z as far as Zᵀ Ψ⁻¹ Z is concerned
    Z, diagonal = t.Z_r[:3], (t.Z_r[:3] ** 2).sum(1).mean()
    P_r = Z.T @ torch.linalg.inv(Z @ Z.T + torch.eye(3) * 1e-4 * diagonal / 3) @ Z
    z = t.Z_c[0]
    P_c = torch.outer(z, z) / (z @ z * (1 + 1e-4 / 8))
    for B, s, P in ((f.B_r, f.p, P_r), (f.B_c, f.q, P_c)):
        torch.testing.assert_close((B * s @ B.T).double(), P, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-7)
    made = Inducing(Z_r, Z_c, None, 1.0, D=1e-6, lam=0.1)
    for factors in (made.factors(), made.trainable()):
        noise = torch.randn(2, factors.normals, generator=torch.Generator().manual_seed(SEED)).to(dtype)
        assert drawn(factors.given(t.V.to(dtype)).draw(noise, None)).isfinite().all()


def test_p_and_q_are_in_range_in_float32() -> None:
    """Over many random layers, with the jitter and without it (rounding alone then lifts a quarter of them above 1)."""
    rng = torch.Generator().manual_seed(SEED)
    above = 0
    for i in range(150):
        M, d_out, d_in = (int(n) for n in torch.randint(1, 40, (3,), generator=rng))
        Z_r, Z_c = (torch.randn(M, d, generator=rng) for d in (d_out, d_in))
        f = Inducing(Z_r, Z_c, None, 0.1, D=1e-3).factors().matheron
        keep = (min(M, d_out, d_in) + 1) // 2  # without jitter Ψ must be far from singular
        tiny = torch.full((keep,), 1e-6)
        A_r, A_c = whiten(Z_r[:keep, :], tiny), whiten(Z_c[:keep, :], tiny)
        bare = factorise(A_r, A_c)
        above += int(max(torch.linalg.svdvals(A_r)[0], torch.linalg.svdvals(A_c)[0]) > 1)
        for s in (f.p, f.q, bare.p, bare.q):
            assert ((s >= 0) & (s <= 1)).all(), f"layer {i}"
        V = torch.randn(1, M, M, generator=rng)
        E, eps = torch.randn(1, d_out, d_in, generator=rng), torch.randn(1, len(f.p), len(f.q), generator=rng)
        assert draw_weights(f, V, 0.1, 0.1, E, eps).isfinite().all()
        assert draw_projected(f, V, 0.1, 0.1, E @ f.B_c).isfinite().all()
    assert above > 15  # or the clamp was not needed, and this test is idle


def test_many_sides_are_factorised_together_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of several shapes, in any order: each side is what it is alone, and there is one Cholesky for each M."""
    rng = torch.Generator().manual_seed(SEED)
    runs = [(2, 4, 7), (1, 3, 5), (3, 4, 7), (1, 4, 2), (2, 3, 9), (1, 4, 7)]
    Z = [[torch.randn(M, d, generator=rng, dtype=torch.float64) for _ in range(n)] for n, M, d in runs]
    D = [[torch.rand(M, generator=rng, dtype=torch.float64) + 0.1 for _ in range(n)] for n, M, _ in runs]
    calls: list[torch.Size] = []
    once = torch.linalg.cholesky_ex

    def counted(Psi: Tensor) -> object:
        calls.append(Psi.shape)
        return once(Psi)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    found = sides(Z, D)
    assert sorted(calls) == [(3, 3, 3), (7, 4, 4)]
    for of_run, side in zip(zip(Z, D, strict=True), found, strict=True):
        assert len(side.A) == len(of_run[0])
        for z, d, A, P in zip(*of_run, side.A, side.P, strict=True):
            gram = (z @ z.T).numpy()
            squares = d.numpy() ** 2 + 1e-4 * (gram.diagonal() + d.numpy() ** 2).mean()
            L = np.linalg.cholesky(gram + np.diag(squares))
            expected = np.linalg.solve(L, z.numpy())
            np.testing.assert_allclose(A.numpy(), expected.T, rtol=1e-10, atol=1e-12)
            expected = np.hstack([expected, np.linalg.solve(L, np.diag(np.sqrt(squares)))])
            np.testing.assert_allclose(P.numpy(), expected, atol=1e-12)
