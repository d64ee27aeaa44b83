"""Weights by inducing points [Ober21]: regressed from pseudo-outputs V on features, with precisions Λ.

Global inducing points (`gi`): the features are what inducing inputs become under the weights drawn for the layers
before, so that layers are correlated; the network draws its layers in sequence. Local ones (`li`): each layer has
inducing inputs of its own, and layers are independent. `prior`: weights drawn from the prior, nothing is trained.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.fields import PositiveFinite, Size
from dubito.models.numerics.normals import normals
from dubito.models.posteriors.entry import (
    PRIOR_SCALE,
    Entry,
    JointEntry,
    LayerSizes,
    Option,
    Origin,
    is_count,
    is_depthwise,
)
from dubito.models.posteriors.protocol import Arrived, Dense, Factors, InSequence, Posterior, Seen
from dubito.models.posteriors.regression import kl_of, regress
from dubito.models.posteriors.weight_priors import PRIOR, FrozenPrior, PriorKind, WeightPrior, prior_by, sigma_of

MOST_NUMBERS = 1 << 26  # of all inducing inputs
LOG_LAM = -4.0  # of the precisions at the start; 0 for the outputs of the network
SURE = 100.0  # from a trained network: how often Σ λ‖φ‖² is the trace of the prior's precision
POINTS = Option(64, "a whole number from 1", is_count)
INSTEAD = "Distil it to a small ensemble (dubito compact), and export that."
UNPRUNABLE = "inducing points have no Z, and every point takes part in all weights of a layer"


class InducingInputsEntry(JointEntry):
    """Inputs by which layers of methods gi and dgp are drawn, one after the other."""

    since: ClassVar[int] = 5
    in_sequence: ClassVar[bool] = True
    method: Literal["gi"] = "gi"
    points: Size  # M
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)]  # of one input

    def check(self, manifest: Any) -> None:
        layers = [layer for layer in manifest.layers.values() if layer.in_sequence]
        if not layers or any(getattr(layer, "points", None) != self.points for layer in layers):
            raise ValueError(f"{self.points} inducing inputs belong to layers of methods gi or dgp with as many points")
        if manifest.members or manifest.hierarchy:
            raise ValueError("inducing inputs do not go with ensemble members or a hierarchy")
        if self.points * math.prod(self.shape) > MOST_NUMBERS:
            raise ValueError(f"the inducing inputs have more than {MOST_NUMBERS:,} numbers")


class PointsEntry(Entry):
    """What both kinds of inducing points say of a layer."""

    not_exported = INSTEAD

    points: Size  # M
    prior: PriorKind
    sigma: PositiveFinite

    options: ClassVar = {"M_out": POINTS, "M_in": POINTS, "prior": PRIOR, "prior_scale": PRIOR_SCALE}

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """Depthwise convolutions are left as they are."""
        return not is_depthwise(geometry)

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        if o["M_out"] != o["M_in"]:
            raise ConversionError(
                f"inducing is {(o['M_out'], o['M_in'])}; expected one number with {method}: that of inducing points."
            )
        sigma = sigma_of(o, geometry.shape[1])
        return cls.model_validate({"points": o["M_in"], "prior": o["prior"], "sigma": sigma})

    @property
    def examples(self) -> int:
        return self.points

    def row(self) -> dict[str, Any]:
        return {"points": self.points, "prior": self.prior}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        return f"{self.points} points", f"{self.prior} prior"


class GlobalLayer(PointsEntry):
    kind: Literal["global"] = "global"
    method: Literal["gi"] = "gi"
    places: Size = 1  # of a feature map, each with a pseudo-output for each point; 1 for a vector

    what: ClassVar = {"gi": "global inducing points: weights regressed on inducing inputs, layer after layer"}
    in_sequence = True

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        if geometry.groups > 1:
            raise ConversionError(
                f"gi regresses the weights of all outputs on the same inputs, but this convolution has "
                f"{geometry.groups} groups. Give it another method, such as ffg-w."
            )
        return super().describe(method, o, geometry, W)

    def start(self, origin: Origin) -> "GlobalPoints":
        W, prior = origin.W, prior_by(self.prior, origin.geometry, origin.W)
        V = normals(W, self.points, self.places, len(W))
        return GlobalPoints(V, W.shape[1], prior, self.sigma)

    def seeing(self, seen: Seen) -> "GlobalLayer":
        return self.model_copy(update={"places": seen.outputs.shape[1]})

    def row(self) -> dict[str, Any]:
        return {**super().row(), "places": self.places}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        points, law = super().cells(row)
        return points + (f" × {self.places} places" if self.places > 1 else ""), law


class LocalLayer(PointsEntry):
    kind: Literal["local"] = "local"
    method: Literal["li"] = "li"

    what: ClassVar = {"li": "local inducing points: weights regressed on inducing inputs of each layer's own"}

    def start(self, origin: Origin) -> "LocalPoints":
        """The inputs Z are random; their pseudo-outputs are those of the layer as it is."""
        (_, d_in), W, bias = origin.geometry.shape, origin.W, origin.geometry.bias
        q = LocalPoints(
            normals(W, self.points, d_in - bias),
            W.new_empty(self.points, len(W)),
            bias,
            prior_by(self.prior, origin.geometry, W),
            self.sigma,
        )
        if not W.is_meta:
            rows = _with_ones(q.Z.detach()) if bias else q.Z.detach()
            q.observe(Seen(rows, V := rows @ W.T, V[:, None]), origin.trained)
        return q


class PriorLayer(Entry):
    kind: Literal["prior"] = "prior"
    method: Literal["prior"] = "prior"
    sigma: PositiveFinite

    what: ClassVar = {"prior": "weights drawn from the prior; nothing is trained"}
    not_exported = INSTEAD
    options: ClassVar = {"prior_scale": PRIOR_SCALE, "prior": PRIOR}

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        if o["prior"] not in ("neal", "standard"):
            raise ConversionError(
                f"prior is {o['prior']!r}, whose scale is learned; a layer drawn from the prior takes neal or standard."
            )
        return cls(sigma=sigma_of(o, geometry.shape[1]))

    def start(self, origin: Origin) -> "PriorWeights":
        return PriorWeights(origin.W, self.sigma)


@dataclass(frozen=True)
class GlobalFactors(InSequence):
    V: Tensor  # (M, places, d_out)  pseudo-outputs
    lam: Tensor  # (M,)  precisions, the same for all places and outputs of a point
    prior: FrozenPrior
    d_in: int

    @property
    def normals(self) -> int:
        return self.prior.normals + self.V.shape[-1] * self.d_in

    def draw_given(self, arrived: Arrived, noise: Tensor | None) -> tuple[Dense, Tensor]:
        n = self.prior.normals
        P = self.prior.draw(None if noise is None else noise[:, :n])
        W, ratio = regress(*arrived.sums(self.V, self.lam), P, None if noise is None else noise[:, n:])
        return Dense(W.to(self.V.dtype)), ratio


@dataclass(frozen=True)
class LocalFactors(Factors):
    G: Tensor  # (d_in, d_in)   ΦᵀΛΦ of the layer's inducing inputs Φ
    h: Tensor  # (d_in, d_out)  ΦᵀΛV
    prior: FrozenPrior

    @property
    def normals(self) -> int:
        return self.prior.normals + self.h.numel()

    def mean(self, member: Tensor | None) -> Dense:
        return Dense(self._drawn(None))

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense:
        return Dense(self._drawn(noise))

    def _drawn(self, noise: Tensor | None) -> Tensor:
        n = self.prior.normals
        P = self.prior.draw(None if noise is None else noise[:, :n])
        W, _ = regress(self.G[None], self.h[None], P, None if noise is None else noise[:, n:])
        return W.to(self.h.dtype)


@dataclass(frozen=True)
class PriorFactors(Factors):
    scale: Tensor  # (d_out, d_in)  σ, one number in memory

    @property
    def normals(self) -> int:
        return self.scale.numel()

    def mean(self, member: Tensor | None) -> Dense:
        return Dense(torch.zeros_like(self.scale)[None])

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense:
        return Dense(self.scale * noise.view(-1, *self.scale.shape))


class GlobalPoints(Posterior):
    """V and Λ of one layer. Its KL is that of the prior's scale; log Q − log P of the weights comes with each draw."""

    gaussian = False

    unprunable = UNPRUNABLE
    noise_in_W = False  # not without the layers before

    def __init__(self, V: Tensor, d_in: int, prior: WeightPrior, sigma: float) -> None:
        super().__init__()
        self.V = nn.Parameter(V)
        self.log_lam = nn.Parameter(V.new_full((len(V),), LOG_LAM))
        self.prior, self.d_in, self.sigma = prior, d_in, sigma

    def trainable(self) -> GlobalFactors:
        return GlobalFactors(self.V, self.log_lam.exp(), self.prior.freeze(self.sigma, self.V), self.d_in)

    def kl(self, data_size: int | None = None) -> Tensor:
        return self.prior.kl(self.V)

    @torch.no_grad()
    def observe(self, seen: Seen, trained: bool) -> None:
        """Pseudo-outputs are those of the plain network; of one that is not trained, the targets at its last layer."""
        if seen.targets is not None and not trained:
            self.V.copy_(seen.targets)
            self.log_lam.zero_()
            return
        self.V.copy_(seen.outputs)
        if trained:
            self.log_lam.fill_(sure_of(seen.rows, self.sigma) - math.log(self.V.shape[1]))


class LocalPoints(Posterior):
    gaussian = False

    unprunable = UNPRUNABLE

    def __init__(self, Z: Tensor, V: Tensor, bias: bool, prior: WeightPrior, sigma: float) -> None:
        super().__init__()
        self.Z, self.V = nn.Parameter(Z), nn.Parameter(V)
        self.log_lam = nn.Parameter(V.new_full((len(V),), LOG_LAM))
        self.bias, self.prior, self.sigma = bias, prior, sigma

    def trainable(self) -> LocalFactors:
        Phi = _with_ones(self.Z) if self.bias else self.Z
        weighted = (Phi * self.log_lam.exp()[:, None]).mT
        return LocalFactors(weighted @ Phi, weighted @ self.V, self.prior.freeze(self.sigma, self.V))

    def kl(self, data_size: int | None = None) -> Tensor:
        """In closed form given the scale of the prior, of which one draw is made where it is random."""
        f = self.trainable()
        noise = torch.randn(1, f.prior.normals, device=self.V.device) if f.prior.normals else None
        return kl_of(f.G[None], f.h[None], f.prior.draw(noise))[0].to(self.V.dtype) + self.prior.kl(self.V)

    @torch.no_grad()
    def observe(self, seen: Seen, trained: bool) -> None:
        """Z and V are inputs of the plain layer and its outputs there."""
        self.Z.copy_(seen.rows[:, : self.Z.shape[1]])
        self.V.copy_(seen.given)
        if trained:
            self.log_lam.fill_(sure_of(seen.rows, self.sigma))


class PriorWeights(Posterior):
    gaussian = False

    unprunable = "layers drawn from the prior hold nothing"
    noise_in_W = False  # there is no mean to compare with

    def __init__(self, W: Tensor, sigma: float) -> None:
        super().__init__()
        self.shape, self.sigma = tuple(W.shape), sigma
        self.one = nn.Parameter(W.new_ones(()), requires_grad=False)  # knows the device

    def trainable(self) -> PriorFactors:
        return PriorFactors((self.sigma * self.one).expand(self.shape))

    def kl(self, data_size: int | None = None) -> Tensor:
        return torch.zeros_like(self.one)


def sure_of(Phi: Tensor, sigma: float) -> float:
    """log λ with which Σ λ‖φ‖² is SURE times the trace of the prior's precision, of features (M, d_in)."""
    d_in = Phi.shape[-1]
    return math.log(SURE * d_in / sigma**2 / max(float(Phi.double().square().sum()), 1e-30))


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
