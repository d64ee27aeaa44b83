"""Inducing weights [Ritter21]: a small V decides a large W through two projections. FFG-U, FCG-U and Ensemble-U."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.models.matheron import (
    MatheronFactors,
    Side,
    draw_jointly,
    draw_projected,
    draw_weights,
    factorise,
    regularise,
    sides,
    whiten,
)
from dubito.models.parameters import Free, Optional, Positive, alike, in_a_row, together
from dubito.models.posterior import Dense, Factored, Frozen, Law, Value

FLOOR_D = 1e-6
FLOOR_LAM = 1e-6

Noise = Literal["exact", "factored"]


class WithV(Value):
    """What serving and training share: V comes from q(V), or from a hierarchy that has drawn it already."""

    q_V: Frozen | None  # None: a hierarchy draws V

    @property
    def members(self) -> int:
        return self.q_V.members if self.q_V is not None else 0

    @property
    def normals_of_V(self) -> int:
        return self.q_V.normals if self.q_V is not None else 0

    def mean_V(self, member: Tensor | None, given: Tensor | None) -> Tensor:
        if given is not None:
            return given
        assert self.q_V is not None
        return self.q_V.mean(member)

    def draw_V(self, noise: Tensor, member: Tensor | None, given: Tensor | None) -> Tensor:
        if given is not None:
            return given
        assert self.q_V is not None
        return self.q_V.draw(noise, member)


@dataclass(frozen=True)
class InducingFactors(WithV):
    """What a server keeps of an inducing layer: never a d_out × d_in matrix.

    The law of the λ-noise is the artifact's: `exact` is q(W | V) itself, drawn by way 2; `factored` is way 3, where
    each direction of `B` has its own noise and everything outside their span shares one.
    """

    matheron: MatheronFactors
    B: Tensor  # (d_in, r_in + R)  B_c and, beside it, R further directions
    q_V: Frozen | None  # None: a hierarchy draws V
    lam: float
    sigma: float
    noise: Noise

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.matheron.B_r), len(self.matheron.B_c)

    @property
    def spans(self) -> bool:
        """B spans every input, so that nothing is left outside it."""
        return self.B.shape[1] == self.B.shape[0]

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int, int]:
        """Normals of V, and two of the λ-noise: way 2's E and ε, or way 3's ε and e."""
        of_V = self.normals_of_V
        d_out, d_in = self.shape
        if self.lam == 0:
            return of_V, 0, 0
        if self.noise == "exact":
            return of_V, d_out * d_in, len(self.matheron.p) * len(self.matheron.q)
        return of_V, d_out * self.B.shape[1], 0 if self.spans else d_out

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Factored:
        V = self.mean_V(member, V)
        return Factored(self.matheron.B_c, self.sigma * self.matheron.B_r @ self.matheron.decided(V), None)

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense | Factored:
        for_V, first, second = noise.split(self._parts(), dim=1)
        V = self.draw_V(for_V, member, V)
        if self.lam == 0:
            return self.mean(member, V)
        K, f = len(noise), self.matheron
        d_out, d_in = self.shape
        if self.noise == "exact":
            eps = second.view(K, len(f.p), len(f.q))
            return Dense(draw_weights(f, V, self.lam, self.sigma, first.view(K, d_out, d_in), eps))
        eps, extra = first.view(K, d_out, -1).tensor_split([len(f.q)], dim=2)  # extra: the R further directions
        scale = self.lam * self.sigma
        G = torch.cat([draw_projected(f, V, self.lam, self.sigma, eps), scale * extra], 2)
        return Factored(self.B, G, None if self.spans else scale * second)


@dataclass(frozen=True)
class TrainableInducing(WithV):
    """The same law for a training step, of n layers of one kind: differentiable, every draw a dense W (exact noise)."""

    r: Side
    c: Side
    q_V: Frozen | None  # over (n, M_out, M_in)
    lam: Tensor | None  # (n, 1, 1)
    sigma: float

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int]:
        of_V = self.normals_of_V
        n, tall, wide = len(self.r.P), self.r.P.shape[2], self.c.P.shape[2]
        return of_V, 0 if self.lam is None else n * tall * wide

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Dense:
        """Of a layer alone, as is `draw`: V is (K, M_out, M_in)."""
        return Dense(self._means(self.mean_V(member, _among_layers(V)))[:, 0])

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense:
        (W,) = self.draw_each(noise, member, _among_layers(V))
        return W

    def draw_each(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> list[Dense]:
        """Every layer's K samples; V (K, n, M_out, M_in) where a hierarchy has drawn it already."""
        for_V, for_W = noise.split(self._parts(), dim=1)
        V = self.draw_V(for_V, member, V)
        if self.lam is None:
            W = self._means(V)
        else:
            N = for_W.view(len(noise), len(self.r.P), self.r.P.shape[2], self.c.P.shape[2])
            W = draw_jointly(self.r, self.c, V, self.lam, self.sigma, N)
        return [Dense(w) for w in (W.unbind(1) if W.shape[1] > 1 else [W.squeeze(1)])]

    def _means(self, V: Tensor) -> Tensor:
        """(K, n, M_out, M_in) -> (K, n, d_out, d_in)."""
        return self.sigma * self.r.A @ V @ self.c.A.mT


def _among_layers(V: Tensor | None) -> Tensor | None:
    """(..., M_out, M_in) -> (..., 1, M_out, M_in)."""
    return None if V is None else V.unsqueeze(-3)


class Inducing(Optional):
    """q(W) = ∫ q(W | V) q(V) dV with free Z_r, Z_c, D_r, D_c, λ and q(V)."""

    optional = "directions"
    directions: Tensor | None  # (R, d_in)  leading directions of the layer's inputs outside the span of B_c

    def __init__(
        self,
        Z_r: Tensor,
        Z_c: Tensor,
        law: Law | None,
        sigma: float,
        *,
        D: float = 1e-3,
        lam: float = 1e-3,
        lam_max: float | None = None,
        noise: Noise = "exact",
    ) -> None:
        super().__init__()
        self.Z_r, self.Z_c = Free(Z_r), Free(Z_c)
        self.D_r = Positive(torch.zeros_like(Z_r[:, 0]) + D, FLOOR_D)
        self.D_c = Positive(torch.zeros_like(Z_c[:, 0]) + D, FLOOR_D)
        self.lam = None if lam_max == 0 else Positive(torch.zeros_like(Z_r[0, 0]) + lam, FLOOR_LAM, lam_max)
        self.law = law
        self.sigma = sigma
        self.noise: Noise = noise
        self.register_buffer("directions", None)

    @property
    def shape(self) -> tuple[int, int]:
        return self.Z_r.value.shape[1], self.Z_c.value.shape[1]

    @property
    def kind(self) -> Hashable:
        """Layers of one kind can be drawn together."""
        shapes = tuple((p.shape, p.dtype) for p in self.parameters())
        return self.sigma, self.lam is None, type(self.law), shapes

    def scale(self) -> float:
        """λ as a number; 0 is the delta conditional."""
        return 0.0 if self.lam is None else float(self.lam().detach())

    @torch.no_grad()
    def factors(self) -> InducingFactors:
        Z_r, D_r, Z_c, D_c = (t.double().cpu() for t in (self.Z_r(), self.D_r(), self.Z_c(), self.D_c()))
        f = factorise(whiten(Z_r, regularise(Z_r, D_r)), whiten(Z_c, regularise(Z_c, D_c)))
        B = f.B_c
        if self.noise == "factored" and self.lam is not None and self.directions is not None:
            B = torch.cat([B, outside(B, self.directions.T.double().cpu())], 1)
        like = self.Z_r.value
        dtype = torch.promote_types(like.dtype, torch.float32)
        kept = f.to(like.device, dtype)
        B_kept = kept.B_c if B is f.B_c else B.to(like.device, dtype)
        q_V = None if self.law is None else self.law.freeze().settle()
        return InducingFactors(kept, B_kept, q_V, self.scale(), self.sigma, self.noise)

    def trainable(self) -> TrainableInducing:
        return train_together([[self]])[0]

    def kl(self, data_size: int | None = None) -> Tensor:
        return kl_together([self], data_size)


def train_together(runs: Sequence[Sequence[Inducing]]) -> list[TrainableInducing]:
    """For one training step: each run of layers of one kind side by side, the sides of all factorised together."""
    every = [q for run in runs for q in run]
    like = every[0].Z_r.value
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.autocast(like.device.type, enabled=False):  # in half precision Ψ is not definite
        Ds = iter(together([D for run in runs for D in (*(q.D_r for q in run), *(q.D_c for q in run))]))
        of_both = [Z for run in runs for Z in ([q.Z_r for q in run], [q.Z_c for q in run])]
        Z = [[free().to(dtype) for free in run] for run in of_both]
        D = [[next(Ds).to(dtype) for _ in run] for run in of_both]
        found = sides(Z, D)
        scales = iter(together([q.lam for q in every if q.lam is not None]))
        lam = [
            None if run[0].lam is None else torch.stack([next(scales) for _ in run]).to(dtype).view(-1, 1, 1)
            for run in runs
        ]
        q_V = [None if q is None else q.to(dtype=dtype) for q in _laws(runs)]
    sigma = [run[0].sigma for run in runs]
    return [TrainableInducing(*parts) for parts in zip(found[::2], found[1::2], q_V, lam, sigma, strict=True)]


def _laws(runs: Sequence[Sequence[Inducing]]) -> list[Frozen | None]:
    """q(V) of each run; None where a hierarchy draws V."""
    laws = [[q.law for q in run if q.law is not None] for run in runs]
    given = [i for i, run in enumerate(laws) if run]
    found: dict[int, Frozen] = {}
    for at in alike([type(laws[i][0]) for i in given]):
        places = [given[i] for i in at]
        found |= zip(places, type(laws[places[0]][0]).freeze_together([laws[i] for i in places]), strict=True)
    return [found.get(i) for i in range(len(runs))]


def kl_together(posteriors: Sequence[Inducing], data_size: int | None = None) -> Tensor:
    """Σ β R(λ) + KL[q(V) ‖ N(0, I)]; with `data_size` N, β = min(1, N/d_in) (eq. 45), else 1."""
    terms = []
    laws = [q.law for q in posteriors if q.law is not None]
    for at in alike([type(law) for law in laws]):
        terms.append(type(laws[at[0]]).kl_together([laws[i] for i in at], 1.0))
    noisy: dict[float, list[Positive]] = {}  # the λ's of each weight β d_in d_out
    for q in posteriors:
        d_out, d_in = q.shape
        beta = 1.0 if data_size is None else min(1.0, data_size / d_in)
        if q.lam is not None:
            noisy.setdefault(beta * d_out * d_in, []).append(q.lam)
    if noisy:
        lam = in_a_row(together([part for parts in noisy.values() for part in parts]))
        weights = torch.cat([lam.new_full((len(parts),), weight) for weight, parts in noisy.items()])
        terms.append(weights @ (lam.square() / 2 - lam.log() - 0.5))
    return torch.stack(terms).sum() if terms else posteriors[0].Z_r.value.new_zeros(())


def outside(B: Tensor, directions: Tensor) -> Tensor:
    """An orthonormal basis of what `directions` (d, R) add to the span of B (d, r): (d, R') with R' ≤ min(R, d − r)."""
    left = directions - B @ (B.T @ directions)
    left = left - B @ (B.T @ left)  # once more: one pass leaves rounding of the size of B's share
    basis: Tensor
    basis, s, _ = torch.linalg.svd(left, full_matrices=False)
    new = int((s > 1e-6 * torch.linalg.matrix_norm(directions, 2).clamp(min=1e-30)).sum())
    return basis[:, : min(new, B.shape[0] - B.shape[1])]
