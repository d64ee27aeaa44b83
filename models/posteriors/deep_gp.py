"""Linear layers as Gaussian processes: deep GPs with inducing points, global (`dgp`) [Ober21] or local (`dsvi`).

In place of W x a layer computes f(x), a draw from a Gaussian process for each output (`functions.py`). `dgp`: the
inducing inputs of a layer are the outputs of the layer before at those of the network, and the outputs there have the
posterior of a regression of pseudo-outputs V with the precision matrix Λ [Ober21, eq. 22],

    u ~ N(Σ Λ v, Σ)     Σ = (k(Z, Z)⁻¹ + Λ)⁻¹

so that layers are correlated. With u = L w, L Lᵀ = k(Z, Z), this is the law of w in Bayesian linear regression of v on
the features L, which never inverts k(Z, Z). `dsvi`: each layer has inducing inputs of its own and a Gaussian over w, so
that layers are independent [Salimbeni17].
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.fields import PositiveFinite, Size
from dubito.models.numerics.normals import normals
from dubito.models.posteriors.entry import PRIOR_SCALE, Entry, LayerSizes, Option, Origin, is_count
from dubito.models.posteriors.full_covariance import BlockCovariance, FrozenFullCovariance
from dubito.models.posteriors.functions import Functions, root_of
from dubito.models.posteriors.protocol import Arrived, Factors, InSequence, Posterior, Seen
from dubito.models.posteriors.regression import regress
from dubito.models.posteriors.weight_priors import Precision

POINTS = Option(64, "a whole number from 1", is_count)
MOST_POINTS = 1 << 14  # of a layer: k(Z, Z) is the square of it
LOG_LAM = 4.0  # of the precisions of V at the start: hidden layers begin close to their mean function
HIDDEN, LAST = 0.1, 0.5  # standard deviations of w at the start of `dsvi`, of layers below the last and of the last
LAM = 10.0  # precision with which outputs of a plain layer become the start of `dsvi`


class ProcessEntry(Entry):
    """What both kinds of processes say of a layer."""

    points: Size  # M
    sigma: PositiveFinite  # standard deviation of the process at the start: it is learned

    options: ClassVar = {"M_out": POINTS, "M_in": POINTS, "prior_scale": PRIOR_SCALE}
    of_functions = True
    not_exported = "Serve it with dubito serve. Weights that can be exported: train gi, and distil it (dubito compact)."

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """Convolutions below are left as they are: features on which the processes stand."""
        return geometry.dims == 0

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        if geometry.dims:
            raise ConversionError(
                f"{method} makes linear layers Gaussian processes, and this is a convolution. Leave it out, and it "
                "stays deterministic, or give it another method, such as ffg-w."
            )
        if o["M_out"] != o["M_in"]:
            raise ConversionError(
                f"inducing is {(o['M_out'], o['M_in'])}; expected one number with {method}: that of inducing points."
            )
        if o["M_in"] > MOST_POINTS:
            raise ConversionError(f"inducing is {o['M_in']:,}; expected at most {MOST_POINTS:,} points with {method}.")
        sigma = 1.0 if o["prior_scale"] is None else o["prior_scale"]
        return cls.model_validate({"points": o["M_in"], "sigma": sigma})

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.points * getattr(self, "places", 1) > MOST_POINTS:
            raise ValueError(f"a layer has more than {MOST_POINTS:,} inducing points")
        return self

    @property
    def examples(self) -> int:
        return self.points

    def row(self) -> dict[str, Any]:
        return {"points": self.points}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        return f"{self.points} points", "squared-exponential kernel"


class GlobalProcessLayer(ProcessEntry):
    kind: Literal["global-process"] = "global-process"
    method: Literal["dgp"] = "dgp"
    places: Size = 1  # rows of the layer for each inducing input

    what: ClassVar = {"dgp": "deep Gaussian process with global inducing points: layers are drawn one after the other"}
    in_sequence = True

    def start(self, origin: Origin) -> "GlobalProcess":
        d_out, d_in = _sides(origin)
        return GlobalProcess(origin.W.new_zeros(self.points, self.places, d_out), d_in, self.sigma)

    def seeing(self, seen: Seen) -> "GlobalProcessLayer":
        places = seen.outputs.shape[1]
        if self.points * places > MOST_POINTS:
            raise ConversionError(
                f"a layer of method dgp meets {places:,} rows of each input: with {self.points:,} inducing inputs it "
                f"would have more than {MOST_POINTS:,} points. Take fewer, or another method by layers=."
            )
        return self.model_copy(update={"places": places})


class LocalProcessLayer(ProcessEntry):
    kind: Literal["local-process"] = "local-process"
    method: Literal["dsvi"] = "dsvi"

    what: ClassVar = {"dsvi": "deep Gaussian process with inducing inputs of each layer's own (DSVI)"}
    spreads = frozenset({"dsvi"})

    def start(self, origin: Origin) -> "LocalProcess":
        d_out, d_in = _sides(origin)
        std = HIDDEN if origin.spread is None else origin.spread
        return LocalProcess(normals(origin.W, self.points, d_in), d_out, std, self.sigma)


@dataclass(frozen=True)
class GlobalProcessFactors(InSequence):
    V: Tensor  # (n, d_out)  pseudo-outputs at the n = M · places inducing inputs
    R: Tensor  # (n, n)  Λ = R Rᵀ
    length: Tensor  # (d_in,)
    variance: Tensor  # ()
    by_row: bool = False  # training: what u leaves open differs from row to row

    @property
    def normals(self) -> int:
        return self.V.numel() + self.V.shape[1]

    def draw_given(self, arrived: Arrived, noise: Tensor | None) -> tuple[Functions, Tensor]:
        V, R, length, variance = (t.double() for t in (self.V, self.R, self.length, self.variance))
        rows = arrived.rows
        if rows.shape[1] != len(V):
            raise ValueError(f"{rows.shape[1]} inducing inputs arrive at a layer with {len(V)} pseudo-outputs")
        Z = rows.double() / length
        L = root_of(Z, variance)
        Phi = R.mT @ L  # features L of w, weighted
        one = Precision(torch.ones(1, dtype=L.dtype, device=L.device))
        w, ratio = regress(Phi.mT @ Phi, Phi.mT @ (R.mT @ V), one, None if noise is None else noise[:, : V.numel()])
        e = torch.zeros_like(w[..., 0]) if noise is None else noise[:, V.numel() :].double()
        return Functions(Z, L, w, None if self.by_row else e, length, variance), ratio


@dataclass(frozen=True)
class LocalProcessFactors(Factors):
    Z: Tensor  # (M, d_in)  over the length scales
    L: Tensor  # (M, M)
    q_w: FrozenFullCovariance  # over (d_out, M)
    length: Tensor  # (d_in,)
    variance: Tensor  # ()
    by_row: bool = False

    @property
    def normals(self) -> int:
        return self.q_w.normals + len(self.q_w.centre)

    def mean(self, member: Tensor | None) -> Functions:
        w = self.q_w.mean(None)
        return self._functions(w, torch.zeros_like(w[..., 0]))

    def draw(self, noise: Tensor, member: Tensor | None) -> Functions:
        for_w, e = noise.split([self.q_w.normals, len(self.q_w.centre)], dim=1)
        return self._functions(self.q_w.draw(for_w.to(self.q_w.dtype), None), e)

    def _functions(self, w: Tensor, e: Tensor) -> Functions:
        drawn = (w.double(), None if self.by_row else e.double())
        return Functions(self.Z, self.L, *drawn, self.length, self.variance)


class Process(Posterior):
    """The kernel of one layer's process; its length scales and its variance are learned."""

    gaussian = False
    noise_in_W = False  # there is no W
    unprunable = "a Gaussian process has no weights, and every point takes part in the whole function"

    def __init__(self, like: Tensor, d_in: int, sigma: float) -> None:
        super().__init__()
        self.log_length = nn.Parameter(like.new_full((d_in,), math.log(d_in) / 2))
        self.log_variance = nn.Parameter(like.new_full((), 2 * math.log(sigma)))
        self.sigma = sigma

    @torch.no_grad()
    def set_lengths(self, rows: Tensor) -> None:
        """√d_in times the standard deviation of each input, of rows (M, d_in): about their distance from each other."""
        std = rows.std(0, unbiased=False) if len(rows) > 1 else torch.ones_like(rows[0])
        self.log_length.copy_(torch.where(std > 1e-6, std, 1.0).log() + math.log(rows.shape[1]) / 2)


class GlobalProcess(Process):
    """V and Λ of one layer. log Q − log P of its outputs at the inducing inputs comes with each draw."""

    def __init__(self, V: Tensor, d_in: int, sigma: float) -> None:
        super().__init__(V, d_in, sigma)
        n = V.shape[0] * V.shape[1]
        self.V = nn.Parameter(V)
        self.log_lam = nn.Parameter(V.new_full((n,), LOG_LAM))
        self.below = nn.Parameter(V.new_zeros(n * (n - 1) // 2))

    def trainable(self) -> GlobalProcessFactors:
        n = len(self.log_lam)
        rows, columns = torch.tril_indices(n, n, -1, device=self.V.device)
        unit = torch.eye(n, dtype=self.V.dtype, device=self.V.device).index_put((rows, columns), self.below)
        R = (self.log_lam / 2).exp()[:, None] * unit
        return GlobalProcessFactors(
            self.V.flatten(0, 1), R, self.log_length.exp(), self.log_variance.exp(), by_row=True
        )

    @torch.no_grad()
    def factors(self) -> GlobalProcessFactors:
        return replace(self.trainable(), by_row=False).settle()

    def kl(self, data_size: int | None = None) -> Tensor:
        return torch.zeros_like(self.log_variance)

    @torch.no_grad()
    def observe(self, seen: Seen, trained: bool) -> None:
        """From the prior, V is 0, and the targets at the last layer; from a trained network, what its layers give."""
        self.set_lengths(seen.rows[:, : len(self.log_length)])
        if trained:
            self.V.copy_(seen.outputs)
        elif seen.targets is not None:
            self.V.copy_(seen.targets)


class LocalProcess(Process):
    def __init__(self, Z: Tensor, d_out: int, std: float, sigma: float) -> None:
        super().__init__(Z, Z.shape[1], sigma)
        self.Z = nn.Parameter(Z)
        self.law = BlockCovariance(Z.new_zeros(d_out, len(Z)), std)

    def trainable(self) -> LocalProcessFactors:
        length, variance = self.log_length.double().exp(), self.log_variance.double().exp()
        Z = self.Z.double() / length
        return LocalProcessFactors(Z, root_of(Z, variance), self.law.freeze(), length, variance, by_row=True)

    @torch.no_grad()
    def factors(self) -> LocalProcessFactors:
        return replace(self.trainable(), by_row=False).settle()

    def kl(self, data_size: int | None = None) -> Tensor:
        return self.law.kl(1.0)

    @torch.no_grad()
    def observe(self, seen: Seen, trained: bool) -> None:
        """Z are inputs of the plain layer, and w is regressed on its outputs there, or on targets at the last layer."""
        d_in = len(self.log_length)
        self.Z.copy_(seen.rows[:, :d_in])
        self.set_lengths(seen.rows[:, :d_in])
        if not trained and seen.targets is None:
            return
        V = seen.given if trained or seen.targets is None else seen.targets[:, 0]
        L = self.trainable().L
        one = Precision(torch.ones(1, dtype=L.dtype, device=L.device))
        w, _ = regress((LAM * L.mT @ L)[None], (LAM * L.mT @ V.double())[None], one, None)
        self.law = BlockCovariance(w[0].to(self.Z.dtype), HIDDEN if trained else LAST)


def _sides(origin: Origin) -> tuple[int, int]:
    """Outputs and inputs; a bias is no input."""
    d_out, d_in = origin.geometry.shape
    return d_out, d_in - origin.geometry.bias
