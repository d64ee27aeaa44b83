"""Inducing weights [Ritter21]: a small V decides a large W through two projections. FFG-U, FCG-U and Ensemble-U."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.models.numerics.parameters import Free, Optional, Positive, alike, in_a_row, neighbours, numbers, together
from dubito.models.posteriors.matheron import (
    MatheronFactors,
    Side,
    draw_jointly,
    draw_projected,
    draw_weights,
    factorise,
    regularise,
    sides,
    through,
    whiten,
)
from dubito.models.posteriors.protocol import Dense, Factored, Frozen, Law, Value

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

    matheron: MatheronFactors  # B_c is not stored apart: it is the first columns of B
    B: Tensor  # (d_in, r_in + R)  B_c and, beside it, R further directions
    q_V: Frozen | None  # None: a hierarchy draws V
    lam: float
    sigma: float
    noise: Noise

    @property
    def dtype(self) -> torch.dtype:
        return self.matheron.p.dtype

    def narrow(self, dtype: torch.dtype) -> "InducingFactors":
        return replace(self, matheron=self.matheron.narrow(dtype), B=self.B.to(dtype))._joined()

    def _each(self, change: Callable[[Tensor], Tensor], seen: dict[Tensor, Tensor] | None = None) -> "InducingFactors":
        return super()._each(change, seen)._joined()

    def reordered(self, channels: int) -> "InducingFactors":
        """Inputs that ran channel by channel run tap by tap: one permutation of the rows of B."""
        B = self.B.T.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1).T
        return replace(self, B=B)._joined()

    def _joined(self) -> "InducingFactors":
        return replace(self, matheron=replace(self.matheron, B_c=self.B[:, : len(self.matheron.q)]))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.matheron.B_r), len(self.matheron.B_c)

    @property
    def spans(self) -> bool:
        """B spans every input, so that nothing is left outside it."""
        return self.B.shape[1] == self.B.shape[0]

    @property
    def forms_W(self) -> bool:
        """A draw is W itself: the exact law's noise has no factors, but where G = W B_c says all of W.

        There a GPU draws G, as it does for most layers; a CPU would only have one more product to take.
        """
        return self.lam > 0 and self.noise == "exact" and not (self.spans and self.B.is_cuda)

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int, int]:
        """Normals of V, and two of the λ-noise: way 2's E and ε, or way 3's ε and e."""
        of_V = self.normals_of_V
        d_out, d_in = self.shape
        if self.lam == 0:
            return of_V, 0, 0
        if self.forms_W:
            return of_V, d_out * d_in, len(self.matheron.p) * len(self.matheron.q)
        return of_V, d_out * self.B.shape[1], 0 if self.spans else d_out

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Factored:
        V = self.mean_V(member, V)
        return Factored(self.matheron.B_c, self.sigma * self.matheron.B_r.to(V.dtype) @ self.matheron.decided(V), None)

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense | Factored:
        for_V, first, second = noise.split(self._parts(), dim=1)
        V = self.draw_V(for_V, member, V)
        if self.lam == 0:
            return self.mean(member, V)
        K, f = len(noise), self.matheron
        d_out, d_in = self.shape
        if self.forms_W:
            eps = second.view(K, len(f.p), len(f.q))
            return Dense(draw_weights(f, V, self.lam, self.sigma, first.view(K, d_out, d_in), eps))
        eps, extra = first.view(K, d_out, -1).tensor_split([len(f.q)], dim=2)  # extra: the R further directions
        scale = self.lam * self.sigma
        G = torch.cat([draw_projected(f, V, self.lam, self.sigma, eps), scale * extra], 2)
        return Factored(self.B, G, None if self.spans else scale * second)


@dataclass(frozen=True)
class TrainableInducing(WithV):
    """The same law for a training step, of n layers of one kind: differentiable, every draw a dense W (exact noise)."""

    sigma: Tensor  # (n, 1, 1)
    lam: Tensor | None  # (n, 1, 1)
    q_V: Frozen | None  # over (n, M_out, M_in)
    runs: tuple[tuple[Side, Side], ...]  # rows and columns of neighbours of one shape, stacked

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> list[int]:
        """Normals of V, and of each run's λ-noise."""
        noises = [] if self.lam is None else [len(r.P) * r.P.shape[2] * c.P.shape[2] for r, c in self.runs]
        return [self.normals_of_V, *noises]

    def mean(self, member: Tensor | None, V: Tensor | None = None) -> Dense:
        """Of a layer alone, as is `draw`; V is (K, M_out, M_in)."""
        (W,) = through(self.runs, self.sigma * self.mean_V(member, _among_layers(V)))
        return Dense(W[:, 0])

    def draw(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> Dense:
        (W,) = self.draw_each(noise, member, _among_layers(V))
        return W

    def draw_each(self, noise: Tensor, member: Tensor | None, V: Tensor | None = None) -> list[Dense]:
        """Every layer's K samples; V (K, n, M_out, M_in) where a hierarchy has drawn it already."""
        for_V, *for_W = noise.split(self._parts(), dim=1)
        V = self.draw_V(for_V, member, V)
        if self.lam is None:
            drawn = through(self.runs, self.sigma * V)
        else:
            N = [z.view(-1, len(r.P), r.P.shape[2], c.P.shape[2]) for z, (r, c) in zip(for_W, self.runs, strict=True)]
            drawn = draw_jointly(self.runs, V, self.lam, self.sigma, N)
        return [Dense(W) for run in drawn for W in (run.unbind(1) if run.shape[1] > 1 else [run.squeeze(1)])]


def _among_layers(V: Tensor | None) -> Tensor | None:
    """(K, M_out, M_in) -> (K, 1, M_out, M_in)."""
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
        self.D_r = Positive(Z_r.new_full((len(Z_r),), D), FLOOR_D)
        self.D_c = Positive(Z_c.new_full((len(Z_c),), D), FLOOR_D)
        self.lam = None if lam_max == 0 else Positive(Z_r.new_full((), lam), FLOOR_LAM, lam_max)
        self.law = law
        self.sigma = sigma
        self.noise: Noise = noise
        self.register_buffer("directions", None)

    @property
    def shape(self) -> tuple[int, int]:
        return self.Z_r.value.shape[1], self.Z_c.value.shape[1]

    @property
    def kind(self) -> Hashable:
        """Layers of one kind can be drawn together: V's of one shape and one sort of law."""
        of_V = tuple(p.shape for name, p in self.named_parameters() if name.startswith("law."))
        return len(self.Z_r.value), len(self.Z_c.value), self.lam is None, type(self.law), of_V

    def scale(self) -> float:
        """λ as a number; 0 is the delta conditional."""
        return 0.0 if self.lam is None else float(self.lam().detach())

    @torch.no_grad()
    def projections(self) -> tuple[Tensor, Tensor]:
        """A_r (d_out, M_out) and A_c (d_in, M_in), in float64 on the CPU."""
        Z_r, D_r, Z_c, D_c = (t.double().cpu() for t in (self.Z_r(), self.D_r(), self.Z_c(), self.D_c()))
        return whiten(Z_r, regularise(Z_r, D_r)), whiten(Z_c, regularise(Z_c, D_c))

    @torch.no_grad()
    def factors(self) -> InducingFactors:
        f = factorise(*self.projections())
        B = f.B_c
        if self.noise == "factored" and self.lam is not None and self.directions is not None:
            # one filter after the other in memory, as a convolution wants them and as the SVD leaves B_c
            B = torch.cat([B.T, outside(B, self.directions.T.double().cpu()).T]).T
        like = self.Z_r.value
        q_V = None if self.law is None else self.law.freeze().settle()
        made = InducingFactors(f, B, None, self.scale(), self.sigma, self.noise)
        made = made.to(like.device, torch.promote_types(like.dtype, torch.float32))
        return replace(made, q_V=q_V)

    def trainable(self) -> TrainableInducing:
        return train_together([[self]])[0]

    def kl(self, data_size: int | None = None) -> Tensor:
        return kl_together([self], data_size)


def train_together(kinds: Sequence[Sequence[Inducing]]) -> list[TrainableInducing]:
    """For one training step: the layers of each kind as one value, the sides of all factorised together.

    Neighbours of one shape share their products, so layers had better come in the order of their shapes.
    """
    like = kinds[0][0].Z_r.value
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.autocast(like.device.type, enabled=False):  # in half precision Ψ is not definite
        runs = [[[layers[i] for i in at] for at in neighbours([q.shape for q in layers])] for layers in kinds]
        halves = [
            half
            for of_kind in runs
            for run in of_kind
            for half in ([(q.Z_r, q.D_r) for q in run], [(q.Z_c, q.D_c) for q in run])
        ]
        D = iter(together([D for half in halves for _, D in half]))
        Zs = [[Z().to(dtype) for Z, _ in half] for half in halves]
        found = sides(Zs, [[next(D).to(dtype) for _ in half] for half in halves])
        pairs = iter(zip(found[::2], found[1::2], strict=True))
        return [_join(layers, tuple(next(pairs) for _ in of_kind)) for layers, of_kind in zip(kinds, runs, strict=True)]


def _join(layers: Sequence[Inducing], runs: tuple[tuple[Side, Side], ...]) -> TrainableInducing:
    A = runs[0][0].A
    scales, laws = [q.lam for q in layers if q.lam is not None], [q.law for q in layers if q.law is not None]
    return TrainableInducing(
        sigma=numbers([q.sigma for q in layers], A).view(-1, 1, 1),
        lam=torch.stack(together(scales)).to(A.dtype).view(-1, 1, 1) if scales else None,
        q_V=type(laws[0]).freeze_together(laws).to(dtype=A.dtype) if laws else None,
        runs=runs,
    )


def kl_together(layers: Sequence[Inducing], data_size: int | None = None) -> Tensor:
    """Σ β R(λ) + KL[q(V) ‖ N(0, I)]; with `data_size` N, β = min(1, N/d_in) (eq. 45), else 1."""
    laws, noisy = [q.law for q in layers if q.law is not None], [q for q in layers if q.lam is not None]
    terms = [type(laws[at[0]]).kl_together([laws[i] for i in at], 1.0) for at in alike([type(law) for law in laws])]
    if noisy:
        lam = in_a_row(together([q.lam for q in noisy if q.lam is not None]))
        shares = [1.0 if data_size is None else min(1.0, data_size / q.shape[1]) for q in noisy]
        sizes = numbers([beta * q.shape[0] * q.shape[1] for beta, q in zip(shares, noisy, strict=True)], lam)
        terms.append((sizes * (lam.square() / 2 - lam.log() - 0.5)).sum())
    return torch.stack(terms).sum() if terms else layers[0].Z_r.value.new_zeros(())


def outside(B: Tensor, directions: Tensor) -> Tensor:
    """An orthonormal basis of what `directions` (d, R) add to the span of B (d, r): (d, R') with R' ≤ min(R, d − r)."""
    left = directions - B @ (B.T @ directions)
    left = left - B @ (B.T @ left)  # once more: one pass leaves rounding of the size of B's share
    basis: Tensor
    basis, s, _ = torch.linalg.svd(left, full_matrices=False)
    new = int((s > 1e-6 * torch.linalg.matrix_norm(directions, 2).clamp(min=1e-30)).sum())
    return basis[:, : min(new, B.shape[0] - B.shape[1])]
