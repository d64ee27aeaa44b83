"""Priors of a layer's weights with a scale of their own, and the q over that scale [Ober21, section 2.3].

The weights of one output unit have the prior N(0, P⁻¹). `neal`: P = I/σ², σ = prior_scale/√d_in. `standard`: the same
with σ = prior_scale. `scale`: P = s I/σ², s ~ Gamma(2, 2). `spatial-iw`: P = (I ⊗ L)/σ², where I is over channels and
L over the taps of a kernel, L ~ W⁻¹((d_in + 1) I, d_in + 1), an inverse Wishart; a bias has the precision 1/σ².
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.models.numerics.gamma import NORMALS, gamma
from dubito.models.posteriors.entry import LayerSizes, Option, prior_of
from dubito.models.posteriors.protocol import Value

PriorKind = Literal["neal", "standard", "scale", "spatial-iw"]
PRIOR = Option(
    "neal",
    "neal, standard, scale or spatial-iw",
    lambda v: v in ("neal", "standard", "scale", "spatial-iw"),
)
SHAPE = RATE = 2.0  # of the prior of s
START = 10.0  # of α, β and ν


def sigma_of(options: Mapping[str, Any], d_in: int) -> float:
    """σ of the prior: of every weight, but for s or L."""
    return prior_of(options, 1 if options["prior"] == "standard" else d_in)


def taps_of(geometry: LayerSizes) -> int:
    """Taps of the kernel: 1 for a linear layer."""
    return (geometry.shape[1] - geometry.bias) * geometry.groups // geometry.inputs


@dataclass(frozen=True)
class Precision:
    """P in K draws: τ I, or τ (I ⊗ L) with τ alone for a bias."""

    tau: Tensor  # (K or 1,)
    L: Tensor | None = None  # (K or 1, taps, taps)
    log_det_L: Tensor | None = None  # (K or 1,)

    def added_to(self, G: Tensor) -> Tensor:
        """P + G: (K or 1, d_in, d_in) -> (K, d_in, d_in)."""
        d_in = G.shape[-1]
        if self.L is None:
            return G + self.tau[:, None, None] * torch.eye(d_in, dtype=G.dtype, device=G.device)
        taps = self.L.shape[-1]
        channels = d_in // taps
        eye = torch.eye(channels, dtype=G.dtype, device=G.device)
        P = torch.einsum("cd,kij->kcidj", eye, self.L.to(G.dtype)).reshape(-1, channels * taps, channels * taps)
        if d_in > channels * taps:  # the bias
            P = _with_one(P)
        return G + self.tau[:, None, None].to(G.dtype) * P

    def energy(self, W: Tensor) -> Tensor:
        """Σ wᵀ P w over the rows of W: (K, d_out, d_in) -> (K,)."""
        tau = self.tau.to(W.dtype)
        if self.L is None:
            return tau * W.square().sum((1, 2))
        taps = self.L.shape[-1]
        channels = W.shape[-1] // taps
        kernel, bias = W[..., : channels * taps], W[..., channels * taps :]
        blocks = kernel.reshape(len(W), -1, taps)
        return tau * ((blocks @ self.L.to(W.dtype) * blocks).sum((1, 2)) + bias.square().sum((1, 2)))

    def log_det(self, d_in: int) -> Tensor:
        """log det P: (K or 1,)."""
        if self.L is None or self.log_det_L is None:
            return d_in * self.tau.log()
        return d_in * self.tau.log() + d_in // self.L.shape[-1] * self.log_det_L


def _with_one(P: Tensor) -> Tensor:
    """Each matrix with a further row and column, 1 where they meet."""
    wide = nn.functional.pad(P, (0, 1, 0, 1))
    wide[:, -1, -1] = 1.0
    return wide


@dataclass(frozen=True)
class Expected:
    """E[P] and E[log det P] under q over the scale: what the KL of a Gaussian to the prior needs."""

    P: Precision  # of one "draw"; its log_det_L is that of E[L]
    log_det: Tensor  # ()

    def kl_of(self, mean: Tensor, std: Tensor) -> Tensor:
        """KL of a factorised Gaussian over W (d_out, d_in), q over the scale held apart."""
        d_out, d_in = mean.shape
        diagonal = self.P.added_to(torch.zeros(1, d_in, d_in, dtype=mean.dtype, device=mean.device))[0].diagonal()
        squares = self.P.energy(mean[None])[0] + (std.square() * diagonal).sum()
        return (squares - d_out * self.log_det - 2 * std.log().sum() - mean.numel()) / 2


class FrozenPrior(Value, ABC):
    """q over the scale of a prior, as a value: it turns normals into precisions."""

    @property
    @abstractmethod
    def normals(self) -> int:
        """Standard normals that one draw needs."""

    @abstractmethod
    def draw(self, noise: Tensor | None) -> Precision:
        """(K, normals) -> K precisions; None: one at the centre of q."""

    @abstractmethod
    def expected(self, d_in: int) -> Expected:
        """In closed form."""


@dataclass(frozen=True)
class FixedPrior(FrozenPrior):
    """Neal's and the standard prior: nothing is random."""

    tau: Tensor  # ()

    @property
    def normals(self) -> int:
        return 0

    def draw(self, noise: Tensor | None) -> Precision:
        return Precision(self.tau.double()[None])

    def expected(self, d_in: int) -> Expected:
        return Expected(P := self.draw(None), P.log_det(d_in)[0])


@dataclass(frozen=True)
class ScaleLaw(FrozenPrior):
    """s ~ Gamma(shape, rate)."""

    tau: Tensor  # ()
    shape: Tensor  # ()
    rate: Tensor  # ()

    @property
    def normals(self) -> int:
        return NORMALS

    def draw(self, noise: Tensor | None) -> Precision:
        shape = self.shape.double()
        x = shape[None] if noise is None else gamma(noise, shape)
        return Precision(self.tau.double() * x / self.rate.double())

    def expected(self, d_in: int) -> Expected:
        shape, rate = self.shape.double(), self.rate.double()
        log_s = shape.digamma() - rate.log()
        return Expected(self.draw(None), d_in * (self.tau.double().log() + log_s))


@dataclass(frozen=True)
class InverseWishart(FrozenPrior):
    """L ~ W⁻¹(T Tᵀ, ν): L = R Rᵀ with R = T A⁻ᵀ, A the lower triangle of Bartlett's decomposition."""

    tau: Tensor  # ()
    T: Tensor  # (taps, taps)  lower
    nu: Tensor  # ()

    @property
    def normals(self) -> int:
        taps = len(self.T)
        return taps * NORMALS + taps * (taps - 1) // 2

    def draw(self, noise: Tensor | None) -> Precision:
        taps, T, nu = len(self.T), self.T.double(), self.nu.double()
        log_det = 2 * T.diagonal().log().sum()
        if noise is None:  # the inverse of the mean of L⁻¹
            return Precision(self.tau.double()[None], (T @ T.mT / nu)[None], (log_det - taps * nu.log())[None])
        for_diagonal, below = noise.double().split([taps * NORMALS, taps * (taps - 1) // 2], dim=1)
        shapes = (nu - torch.arange(taps, dtype=T.dtype, device=T.device)) / 2
        diagonal = (2 * gamma(for_diagonal.view(-1, taps, NORMALS), shapes)).sqrt()  # χ of ν, ν − 1, …
        A = torch.diag_embed(diagonal)
        rows, columns = torch.tril_indices(taps, taps, -1, device=T.device)
        A = A.index_put((torch.arange(len(A), device=T.device)[:, None], rows, columns), below)
        R_T = torch.linalg.solve_triangular(A, T.mT, upper=False)
        log_det = log_det - 2 * diagonal.log().sum(1)
        return Precision(self.tau.double()[None], R_T.mT @ R_T, log_det)

    def expected(self, d_in: int) -> Expected:
        """E[L] = T Tᵀ/(ν − taps − 1) and E[log det L] = log det(T Tᵀ/2) − Σ ψ((ν − i)/2), i from 0 below taps."""
        taps, T, nu, tau = len(self.T), self.T.double(), self.nu.double(), self.tau.double()
        halves = (nu - torch.arange(taps, dtype=T.dtype, device=T.device)) / 2
        log_det_L = 2 * T.diagonal().log().sum() - taps * math.log(2) - halves.digamma().sum()
        P = Precision(tau[None], (T @ T.mT / (nu - taps - 1))[None])
        return Expected(P, d_in * tau.log() + d_in // taps * log_det_L)


class WeightPrior(nn.Module):
    """A fixed prior, and the base of those with a q; `sigma` is set anew where the layer's prior is."""

    def freeze(self, sigma: float, like: Tensor) -> FrozenPrior:
        return FixedPrior(like.new_full((), 1 / sigma**2))

    def kl(self, like: Tensor) -> Tensor:
        """KL of q over the scale to its prior."""
        return like.new_zeros(())


class ScalePrior(WeightPrior):
    """q(s) = Gamma(2 + α, 2 + β); α and β are kept as logarithms, for α grows to half the number of weights."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(like.new_full((), math.log(START))) for _ in range(2))

    def freeze(self, sigma: float, like: Tensor) -> ScaleLaw:
        tau = like.new_full((), 1 / sigma**2)
        return ScaleLaw(tau, SHAPE + self.alpha.exp(), RATE + self.beta.exp())

    def kl(self, like: Tensor) -> Tensor:
        """KL(Gamma(a, b) ‖ Gamma(2, 2)), shapes and rates."""
        a, b = SHAPE + self.alpha.double().exp(), RATE + self.beta.double().exp()
        kl = (a - SHAPE) * a.digamma() - a.lgamma() + math.lgamma(SHAPE) + SHAPE * (b.log() - math.log(RATE))
        return (kl + a * (RATE - b) / b).to(like.dtype)


class SpatialPrior(WeightPrior):
    """q(L) = W⁻¹((d_in + 1) I + Ψ, d_in + 1 + ν); Ψ = B Bᵀ, and ν is kept as a logarithm."""

    def __init__(self, taps: int, d_in: int, like: Tensor) -> None:
        super().__init__()
        self.taps, self.dof = taps, d_in + 1
        start = like.new_zeros(taps, taps)
        self.B = nn.Parameter(start if start.is_meta else start.fill_diagonal_(math.sqrt(START)))
        self.nu = nn.Parameter(like.new_full((), math.log(START)))

    def _q(self) -> tuple[Tensor, Tensor]:
        """T, the Cholesky factor of (d_in + 1) I + Ψ, and the degrees of freedom."""
        B = self.B.double()
        Psi = B @ B.mT + self.dof * torch.eye(self.taps, dtype=B.dtype, device=B.device)
        return torch.linalg.cholesky_ex(Psi).L, self.dof + self.nu.double().exp()

    def freeze(self, sigma: float, like: Tensor) -> InverseWishart:
        return InverseWishart(like.new_full((), 1 / sigma**2), *self._q())

    def kl(self, like: Tensor) -> Tensor:
        """KL(W⁻¹(Ψ_q, n) ‖ W⁻¹(m I, m)), m = d_in + 1: that of the Wishart distributions of L⁻¹."""
        (T, n), m, p = self._q(), float(self.dof), self.taps
        inverse = torch.linalg.solve_triangular(T, torch.eye(p, dtype=T.dtype, device=T.device), upper=False)
        log_det = p * math.log(m) - 2 * T.diagonal().log().sum()  # of m Ψ_q⁻¹
        i = torch.arange(p, dtype=T.dtype, device=T.device)
        half, prior = (n - i) / 2, (m - i) / 2
        kl: Tensor = n / 2 * (m * inverse.square().sum() - p) - m / 2 * log_det
        return (kl + (prior.lgamma() - half.lgamma() + (n - m) / 2 * half.digamma()).sum()).to(like.dtype)


def prior_by(kind: PriorKind, geometry: LayerSizes, like: Tensor) -> WeightPrior:
    match kind:
        case "scale":
            return ScalePrior(like)
        case "spatial-iw":
            return SpatialPrior(taps_of(geometry), geometry.shape[1], like)
    return WeightPrior()
