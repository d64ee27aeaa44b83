"""Inducing weights [Ritter21]: a small V decides a large W through two projections. FFG-U, FCG-U and Ensemble-U."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, FiniteFloat, NonNegativeInt
from torch import Tensor

from dubito.models import fields
from dubito.models.errors import ConversionError
from dubito.models.fields import Members, Size
from dubito.models.numerics.normals import normals
from dubito.models.numerics.parameters import (
    Free,
    Optional,
    Positive,
    alike,
    in_a_row,
    keep_largest,
    neighbours,
    numbers,
    together,
)
from dubito.models.numerics.threads import by_one_thread
from dubito.models.posteriors.entry import (
    MEMBERS,
    PRIOR_SCALE,
    SIGMA_MAX,
    Entry,
    LayerSizes,
    Option,
    Origin,
    is_count,
    is_depthwise,
    prior_of,
)
from dubito.models.posteriors.full_covariance import COVARIANCE_LIMIT, FullCovariance, check_limit
from dubito.models.posteriors.inducing_factors import InducingFactors, LambdaLaw, TrainableInducing, factored_is_cheaper
from dubito.models.posteriors.inducing_together import gather
from dubito.models.posteriors.matheron import Side, factors_of, project, regularise, sides
from dubito.models.posteriors.mean_field import V_STD, MeanField
from dubito.models.posteriors.mixture import Mixture
from dubito.models.posteriors.protocol import Distribution, Factors, Gathered, Posterior

FLOOR_D = 1e-6
FLOOR_LAM = 1e-6
LEAST_LAM = 1e-5  # of a cap that is not 0
SPREAD = 0.1  # how far ensemble members start from each other
WIDE, SMALL = 128, 1e-5  # of a matrix whose SVD takes long, and of singular values beside the largest


class InducingLayer(Entry):
    kind: Literal["inducing"] = "inducing"
    method: Literal["ffg-u", "fcg-u", "ensemble-u", "hierarchical"]
    M_out: Size
    M_in: Size
    members: Members | None = None
    lam_max: Annotated[FiniteFloat, Field(ge=0)] | None
    sigma_max: fields.PositiveFinite | None
    sigma: fields.PositiveFinite  # of the prior
    noise: LambdaLaw
    directions: NonNegativeInt = 0  # R

    what: ClassVar = {
        "ffg-u": "factorised Gaussian over inducing weights",
        "fcg-u": "Gaussian with full covariance over inducing weights",
        "ensemble-u": "ensemble in the space of inducing weights",
        "hierarchical": "inducing weights drawn from global ones",
    }
    options: ClassVar = {
        "M_out": Option(64, "a whole number from 1", is_count),
        "M_in": Option(64, "a whole number from 1", is_count),
        "members": replace(MEMBERS, of=("ensemble-u",)),
        # None: 0.1 for ensemble-u, 0.03 for the others; 0: no noise of W given V
        "lam_max": Option(
            None, "0 (no noise) or a number from 1e-5", lambda v: v is None or v == 0 or LEAST_LAM <= v < math.inf
        ),
        # the same cap as a share of the norm of W: the λ-noise over the prior's mean W
        "lam_share": Option(None, "a positive number", lambda v: v is None or 0 < v < math.inf),
        "sigma_max": replace(SIGMA_MAX, of=("ffg-u", "fcg-u")),
        "prior_scale": PRIOR_SCALE,  # None: 1; from a network, the scale of its weights, so that V has an RMS of 1
        # auto: exact where forming W is as cheap as not forming it
        "noise": Option("auto", "auto, exact or factored", lambda v: v in ("auto", "exact", "factored")),
        "covariance_limit": replace(COVARIANCE_LIMIT, of=("fcg-u",)),
    }
    spreads = frozenset({"ffg-u", "fcg-u", "ensemble-u"})
    below = "hierarchical"

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """Depthwise convolutions are left as they are."""
        return not is_depthwise(geometry)

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        (d_out, d_in), M_out, M_in = geometry.shape, o["M_out"], o["M_in"]
        if method == "fcg-u":
            fits = math.isqrt(o["covariance_limit"])
            check_limit(M_out * M_in, o["covariance_limit"], f"M = {fits} (inducing={fits}) fits, or use ffg-u.")
        noise, ensemble = o["noise"], method == "ensemble-u"
        if noise == "auto":
            cheaper = factored_is_cheaper(d_out, d_in, min(M_in, d_in), geometry.groups)
            noise = "factored" if cheaper else "exact"
        sigma = prior_of(o, d_in)
        if W is not None and o["prior_scale"] is None:
            sigma = scale_of(W, M_out, M_in) or sigma
        return cls(
            method=method,
            M_out=M_out,
            M_in=M_in,
            members=o["members"] if ensemble else None,
            lam_max=cap_of_lam(o, d_out, d_in, 0.1 if ensemble else 0.03),
            sigma_max=o["sigma_max"] if method in ("ffg-u", "fcg-u") else None,
            sigma=sigma,
            noise=noise,
        )

    def start(self, origin: Origin) -> "Inducing":
        """From the prior, or from the truncated SVD of W."""
        (d_out, d_in), W, spread = origin.geometry.shape, origin.W, origin.spread
        if spread is not None and self.sigma_max is not None and spread >= self.sigma_max:
            raise ConversionError(
                f"spread is {spread} and sigma_max {self.sigma_max}; expected a spread below its cap."
            )
        Z_r = normals(W, self.M_out, d_out, divisor=math.sqrt(self.M_out))
        Z_c = normals(W, self.M_in, d_in, divisor=math.sqrt(self.M_in))
        V = normals(W, self.M_out, self.M_in)
        apart = normals(W, self.members or 0, *V.shape)
        q = Inducing(Z_r, Z_c, None, self.sigma, lam_max=self.lam_max, noise=self.noise)
        if origin.trained:
            V = q.fit(W)
            apart = apart - apart.mean(0)
        if self.directions:
            q.directions = W.new_zeros(self.directions, d_in)
        match self.method:
            case "ffg-u":
                q.law = MeanField(V, V_STD if spread is None else spread, self.sigma_max)
            case "fcg-u":
                q.law = FullCovariance(V, V_STD if spread is None else spread, self.sigma_max)
            case "ensemble-u":
                q.law = Mixture(V + (SPREAD if spread is None else spread) * apart)
        return q

    @classmethod
    def gather(cls, factors: Mapping[str, Factors], places: Mapping[str, int]) -> Gathered:
        return gather({name: f for name, f in factors.items() if isinstance(f, InducingFactors)}, places)

    def check(self, d_out: int, d_in: int) -> None:
        """M may exceed d, but not so far that M × M alone fills the memory."""
        for M, d in ((self.M_out, d_out), (self.M_in, d_in)):
            if max(1024, 4 * d) < M:
                raise ConversionError(f"M = {M} for a side of {d}: expected at most {max(1024, 4 * d)}.")

    @property
    def from_above(self) -> tuple[int, int] | None:
        return (self.M_out, self.M_in) if self.method == "hierarchical" else None

    def row(self) -> dict[str, Any]:
        return {"M_out": self.M_out, "M_in": self.M_in, "noise": self.noise, "directions": self.directions}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        R = f", R = {self.directions}" if self.noise == "factored" else ""
        return f"{self.M_out} × {self.M_in}", f"{self.noise}{R}"


class Inducing(Optional, Posterior):
    """q(W) = ∫ q(W | V) q(V) dV with free Z_r, Z_c, D_r, D_c, λ and q(V)."""

    optional = "directions"
    directions: Tensor | None  # (R, d_in)  leading directions of the layer's inputs outside the span of B_c

    def __init__(
        self,
        Z_r: Tensor,
        Z_c: Tensor,
        law: Distribution | None,
        sigma: float,
        *,
        D: float = 1e-3,
        lam: float = 1e-3,
        lam_max: float | None = None,
        noise: LambdaLaw = "exact",
    ) -> None:
        super().__init__()
        self.Z_r, self.Z_c = Free(Z_r), Free(Z_c)
        self.D_r = Positive(Z_r.new_full((len(Z_r),), D), FLOOR_D)
        self.D_c = Positive(Z_c.new_full((len(Z_c),), D), FLOOR_D)
        self.lam = None if lam_max == 0 else Positive(Z_r.new_full((), lam), FLOOR_LAM, lam_max)
        self.law = law
        self.sigma = sigma
        self.noise: LambdaLaw = noise
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
        return project(*self._on_cpu())

    def _on_cpu(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        Z_r, D_r, Z_c, D_c = (t.double().cpu() for t in (self.Z_r(), self.D_r(), self.Z_c(), self.D_c()))
        return Z_r, D_r, Z_c, D_c

    @torch.no_grad()
    def factors(self) -> InducingFactors:
        f = factors_of(*self._on_cpu())
        B = f.B_c
        if self.noise == "factored" and self.lam is not None and self.directions is not None:
            # one filter after the other in memory, as a convolution wants them and as the SVD leaves B_c
            B = torch.cat([B.T, outside(B, self.directions.T.double().cpu()).T]).T
        like = self.Z_r.value
        q_V = None if self.law is None else self.law.freeze().settle()
        factors = InducingFactors(f, B, None, self.scale(), self.sigma, self.noise)
        factors = factors.to(like.device, torch.promote_types(like.dtype, torch.float32))
        return replace(factors, q_V=q_V)

    def trainable(self) -> TrainableInducing:
        return self.train_together([[self]])[0]

    @classmethod
    def train_together(cls, kinds: Sequence[Sequence[Self]]) -> list[TrainableInducing]:
        """The layers of each kind as one value, the sides of all factorised together.

        Neighbours of one shape share their products, so layers had better come in the order of their shapes.
        """
        like = kinds[0][0].Z_r.value
        dtype = torch.promote_types(like.dtype, torch.float32)
        with torch.autocast(like.device.type, enabled=False):  # in half precision Ψ is not definite
            runs = [
                [[layers[i] for i in indices] for indices in neighbours([q.shape for q in layers])] for layers in kinds
            ]
            halves = [
                half
                for of_kind in runs
                for run in of_kind
                for half in ([(q.Z_r, q.D_r) for q in run], [(q.Z_c, q.D_c) for q in run])
            ]
            D = iter(together([D for half in halves for _, D in half]))
            Zs = [[Z().to(dtype) for Z, _ in half] for half in halves]
            both = sides(Zs, [[next(D).to(dtype) for _ in half] for half in halves])
            pairs = iter(zip(both[::2], both[1::2], strict=True))
            return [
                _join(layers, tuple(next(pairs) for _ in of_kind)) for layers, of_kind in zip(kinds, runs, strict=True)
            ]

    def kl(self, data_size: int | None = None) -> Tensor:
        return self.kl_together([self], data_size)

    @classmethod
    def kl_together(cls, layers: Sequence[Self], data_size: int | None = None) -> Tensor:
        """Σ β R(λ) + KL[q(V) ‖ N(0, I)]; with `data_size` N, β = min(1, N/d_in) (eq. 45), else 1."""
        laws, noisy = [q.law for q in layers if q.law is not None], [q for q in layers if q.lam is not None]
        terms = [
            type(laws[indices[0]]).kl_together([laws[i] for i in indices], 1.0)
            for indices in alike([type(law) for law in laws])
        ]
        if noisy:
            lam = in_a_row(together([q.lam for q in noisy if q.lam is not None]))
            shares = [1.0 if data_size is None else min(1.0, data_size / q.shape[1]) for q in noisy]
            sizes = numbers([beta * q.shape[0] * q.shape[1] for beta, q in zip(shares, noisy, strict=True)], lam)
            terms.append((sizes * (lam.square() / 2 - lam.log() - 0.5)).sum())
        return torch.stack(terms).sum() if terms else layers[0].Z_r.value.new_zeros(())

    @torch.no_grad()
    def fit(self, W: Tensor) -> Tensor:
        """Set Z so that a V exists whose mean weight is the best rank-M fit of W, and return that V.

        W ≈ B_r S B_cᵀ; the leading rows of Z become α Bᵀ, so that the leading columns of A are α/√(α² + D²) of B's.
        Rows beyond the rank stay as they are: a Cholesky factor's leading block does not see them.
        """
        Z_r, Z_c = self.Z_r.value, self.Z_c.value
        r = min(len(Z_r), len(Z_c), *W.shape)
        B_r, S, B_c = leading(W.double(), r)
        scales = []
        for Z, B, D in ((Z_r, B_r, self.D_r()), (Z_c, B_c, self.D_c())):
            alpha = math.sqrt(Z.shape[1] / len(Z))  # rows as long as the prior's
            Z[:r] = (alpha * B.T).to(Z.dtype)
            scales.append((1 + regularise(Z.double(), D.double())[:r].square() / alpha**2).sqrt())
        V = torch.zeros(len(Z_r), len(Z_c), dtype=torch.float64, device=W.device)
        V[:r, :r] = torch.diag(S * scales[0] * scales[1] / self.sigma)
        return V.to(W.dtype)

    @torch.no_grad()
    def distil(self, W: Tensor) -> None:
        """Z spans the leading directions of all members' rows and columns; V is the least-squares fit of each."""
        assert isinstance(self.law, Mixture)
        E, d_out, d_in = W.shape
        W = W.double().cpu()
        rows, columns = W.transpose(0, 1).reshape(d_out, E * d_in), W.permute(2, 0, 1).reshape(d_in, E * d_out)
        for Z, side in ((self.Z_r.value, rows), (self.Z_c.value, columns)):
            B, _, _ = leading(side, min(len(Z), *side.shape))
            Z[: B.shape[1]] = math.sqrt(Z.shape[1] / len(Z)) * B.T.to(Z)
        left, right = (torch.linalg.pinv(A) for A in self.projections())
        self.law.points.value.copy_(left @ W @ right.mT / self.sigma)

    @classmethod
    def prune(cls, layers: Sequence[tuple[Self, bool]], keep: float) -> None:
        """Z by magnitude; the mean of q(V) follows what is left of it, so that the mean weights change little."""
        posteriors = [q for q, _ in layers]
        Z = [part for q in posteriors for part in (q.Z_r, q.Z_c)]
        before = [q.projections() for q in posteriors]
        keep_largest(Z, [part().abs() for part in Z], round(keep * sum(part.value.numel() for part in Z)))
        for q, projections in zip(posteriors, before, strict=True):
            q._follow(projections)

    def prunable(self, bias: bool) -> int:
        return self.Z_r.value.numel() + self.Z_c.value.numel()

    def _follow(self, before: Sequence[Tensor]) -> None:
        """Move the mean of q(V) so that the mean weight A_r V A_cᵀ is nearest to what it was."""
        if self.law is None:  # a hierarchy draws V
            return
        left, right = (torch.linalg.pinv(now) @ was for now, was in zip(self.projections(), before, strict=True))
        assert isinstance(self.law, Mixture | MeanField | FullCovariance)
        V = (self.law.points if isinstance(self.law, Mixture) else self.law.centre).value
        V.copy_(left @ V.double().cpu() @ right.mT)

    @property
    def noise_in_W(self) -> bool:
        return self.law is not None  # None: a hierarchy draws V

    @property
    def takes_directions(self) -> bool:
        return self.noise == "factored" and self.lam is not None

    def set_directions(self, inputs: Tensor, factors: Factors, R: int) -> None:
        """In half precision, in memory as in every file: they are made orthonormal again with the factors."""
        assert isinstance(factors, InducingFactors)
        directions = leading_directions(inputs, factors.matheron.B_c, R).T
        self.directions = directions.half().to(self.Z_c.value.dtype).contiguous() if len(directions) else None

    def update(self) -> dict[str, Any]:
        return {"directions": 0 if self.directions is None else len(self.directions)}

    def row(self) -> dict[str, Any]:
        return {"lambda": self.scale()}


def _join(layers: Sequence[Inducing], runs: tuple[tuple[Side, Side], ...]) -> TrainableInducing:
    A = runs[0][0].A
    scales, laws = [q.lam for q in layers if q.lam is not None], [q.law for q in layers if q.law is not None]
    return TrainableInducing(
        sigma=numbers([q.sigma for q in layers], A).view(-1, 1, 1),
        lam=torch.stack(together(scales)).to(A.dtype).view(-1, 1, 1) if scales else None,
        q_V=type(laws[0]).freeze_together(laws).to(dtype=A.dtype) if laws else None,
        runs=runs,
    )


def cap_of_lam(o: Mapping[str, Any], d_out: int, d_in: int, default: float) -> float:
    """Of λ, from one of the two options that cap it."""
    lam_max: float | None = o["lam_max"]
    share: float | None = o["lam_share"]
    if share is None:
        return default if lam_max is None else lam_max
    if lam_max is not None:
        raise ConversionError(f"lam_share is {share} and lam_max {lam_max}; both cap λ: expected one of them.")
    return max(LEAST_LAM, share * lam_of_share(d_out, d_in, o["M_out"], o["M_in"]))


@by_one_thread
def scale_of(W: Tensor, M_out: int, M_in: int) -> float:
    """σ for which the V of W's best fit of rank M has an RMS of 1; 0 where W has no size, or is not there yet.

    The caps of q(V) and λ are in units of σ: with a σ far below the size of the weights they allow hardly any noise.
    """
    if W.is_meta or not W.isfinite().all():  # counted only, or refused when its posterior is made
        return 0.0
    short = W.double() if W.shape[0] <= W.shape[1] else W.double().T
    energies = torch.linalg.eigvalsh(short @ short.T).clamp(min=0)  # ascending squares of the singular values
    return math.sqrt(float(energies[-min(M_out, M_in) :].sum()) / (M_out * M_in))


def lam_of_share(d_out: int, d_in: int, M_out: int, M_in: int) -> float:
    """λ whose noise has the norm of W, where V has an RMS of 1: what V does not decide has d_out d_in − r_out r_in
    directions, each with a standard deviation of λσ, and ‖W‖ = σ √(M_out M_in)."""
    free = d_out * d_in - min(M_out, d_out) * min(M_in, d_in)
    return math.sqrt(M_out * M_in / free) if free else 1.0


@by_one_thread
def leading(W: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """The r largest singular values of W in float64, and their vectors: (d_out, r), (r,), (d_in, r).

    Of a wide matrix by the eigenvectors of W Wᵀ, a fraction of an SVD's time, where no value is so small beside the
    largest that its square is lost to rounding.
    """
    if min(W.shape) >= WIDE:
        short = W if W.shape[0] <= W.shape[1] else W.T
        squares, U = torch.linalg.eigh(short @ short.T)  # in rising order
        S, U = squares[-r:].flip(0).clamp(min=0).sqrt(), U[:, -r:].flip(1)
        if S[-1] > SMALL * S[0]:
            other = short.T @ U / S
            return (U, S, other) if short is W else (other, S, U)
    B_r, S, B_cT = torch.linalg.svd(W, full_matrices=False)
    return B_r[:, :r], S[:r], B_cT[:r].T


def leading_directions(x: Tensor, B: Tensor, R: int) -> Tensor:
    """The R leading directions of x (n, d) outside the span of B (d, r), uncentred: (d, ≤ R)."""
    x = x.to(B.dtype)
    left = x - (x @ B) @ B.T
    q = min(R + 8, *left.shape)
    _, _, directions = torch.svd_lowrank(left, q=q, niter=4)
    return directions[:, : min(R, B.shape[0] - B.shape[1], q)]


@by_one_thread
def outside(B: Tensor, directions: Tensor) -> Tensor:
    """An orthonormal basis of what `directions` (d, R) add to the span of B (d, r): (d, R') with R' ≤ min(R, d − r)."""
    left = directions - B @ (B.T @ directions)
    left = left - B @ (B.T @ left)  # once more: one pass leaves rounding of the size of B's share
    basis: Tensor
    basis, s, _ = torch.linalg.svd(left, full_matrices=False)
    new = int((s > 1e-6 * torch.linalg.matrix_norm(directions, 2).clamp(min=1e-30)).sum())
    return basis[:, : min(new, B.shape[0] - B.shape[1])]
