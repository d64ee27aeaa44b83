"""Posteriors over W itself: FFG-W, FCG-W and Ensemble-W."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from dubito.models.errors import ConversionError
from dubito.models.fields import Members, PositiveFinite
from dubito.models.numerics.parameters import keep_largest
from dubito.models.posteriors.entry import MEMBERS, PRIOR_SCALE, SIGMA_MAX, Entry, LayerSizes, Origin
from dubito.models.posteriors.full_covariance import COVARIANCE_LIMIT, FullCovariance, check_limit
from dubito.models.posteriors.mean_field import W_STD, MeanField
from dubito.models.posteriors.mixture import Mixture
from dubito.models.posteriors.protocol import Dense, Distribution, Factors, Frozen, Posterior
from dubito.models.posteriors.weight_priors import PRIOR, PriorKind, WeightPrior, prior_by, sigma_of

SPREAD = 0.05  # how far ensemble members start from each other, in units of W's own


class WeightLayer(Entry):
    kind: Literal["weights"] = "weights"
    method: Literal["ffg-w", "fcg-w", "ensemble-w"]
    members: Members | None = None
    sigma_max: PositiveFinite | None
    sigma: PositiveFinite
    prior: PriorKind = "neal"

    what: ClassVar = {
        "ffg-w": "factorised Gaussian over weights",
        "fcg-w": "Gaussian with full covariance over weights",
        "ensemble-w": "ensemble of weights",
    }
    options: ClassVar = {
        "members": replace(MEMBERS, of=("ensemble-w",)),
        "sigma_max": replace(SIGMA_MAX, of=("ffg-w", "fcg-w")),
        "prior_scale": PRIOR_SCALE,
        "covariance_limit": replace(COVARIANCE_LIMIT, of=("fcg-w",)),
        "prior": PRIOR,
    }
    spreads = frozenset({"ffg-w", "fcg-w"})
    copies_rest = frozenset({"ensemble-w"})

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        d_out, d_in = geometry.shape
        if method == "fcg-w":
            fits = math.isqrt(o["covariance_limit"])
            advice = f"fcg-u with M = {fits} (inducing={fits}) fits, or use ffg-w."
            check_limit(d_out * d_in, o["covariance_limit"], advice)
        sigma, prior = sigma_of(o, d_in), o["prior"]
        if method != "ffg-w" and prior in ("scale", "spatial-iw"):
            raise ConversionError(f"prior is {prior!r}, which {method} does not have; expected neal or standard.")
        if method == "ensemble-w":
            return cls(method=method, members=o["members"], sigma_max=None, sigma=sigma, prior=prior)
        return cls(method=method, sigma_max=o["sigma_max"], sigma=sigma, prior=prior)

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What earlier readers do not know is left out where it says nothing."""
        return {key: value for key, value in write(self).items() if key != "prior" or value != "neal"}

    def start(self, origin: Origin) -> "WeightSpace":
        return WeightSpace(self._law(origin), self.sigma, prior_by(self.prior, origin.geometry, origin.W))

    def _law(self, origin: Origin) -> Distribution:
        W, std = origin.W, W_STD if origin.spread is None else origin.spread
        match self.method:
            case "ffg-w":
                return MeanField(W.clone(), std, self.sigma_max)
            case "fcg-w":
                return FullCovariance(W.clone(), std, self.sigma_max)
        if not origin.trained:
            return Mixture(torch.stack([W, *(origin.afresh() for _ in range(self.ensemble - 1))]))
        apart = torch.randn(self.ensemble, *W.shape, dtype=W.dtype, device=W.device)
        return Mixture(W + (apart - apart.mean(0)) * (SPREAD * W.std(unbiased=False)))


@dataclass(frozen=True)
class WeightFactors(Factors):
    q_W: Frozen

    @property
    def normals(self) -> int:
        return self.q_W.normals

    @property
    def members(self) -> int:
        return self.q_W.members

    def narrow(self, dtype: torch.dtype) -> "WeightFactors":
        """Members are picked, not computed with: rounded ahead they give the same."""
        return replace(self, q_W=self.q_W.to(dtype=dtype)) if self.q_W.normals == 0 else self

    def mean(self, member: Tensor | None) -> Dense:
        return Dense(self.q_W.mean(member))

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense:
        return Dense(self.q_W.draw(noise, member))


class WeightSpace(Posterior):
    """q(W) given outright, against the prior N(0, σ²) per entry."""

    def __init__(self, law: Distribution, sigma: float, prior: WeightPrior | None = None) -> None:
        super().__init__()
        self.law = law
        self.sigma = sigma
        self.prior = WeightPrior() if prior is None else prior

    def trainable(self) -> WeightFactors:
        return WeightFactors(self.law.freeze())

    def kl(self, data_size: int | None = None) -> Tensor:
        """In closed form, the scale of the prior integrated out."""
        if type(self.prior) is WeightPrior or not isinstance(self.law, MeanField):
            return self.law.kl(self.sigma)
        q = self.law.freeze()
        expected = self.prior.freeze(self.sigma, q.centre).expected(q.centre.shape[1])
        return expected.kl_of(q.centre.double(), q.spread.double()).to(q.centre.dtype) + self.prior.kl(q.centre)

    @classmethod
    def prune(cls, layers: Sequence[tuple[Self, bool]], keep: float) -> None:
        """FFG-W by |mean|/std, its mean and its std each one parameter: of an odd number kept, the last weight keeps
        its mean alone. Biases stay."""
        laws, scores = [], []
        for q, bias in layers:
            if isinstance(q.law, MeanField):
                signal: Tensor = (q.law.centre().abs() / q.law.spread()).nan_to_num(nan=0.0)  # 0/0: pruned before
                signal[:, signal.shape[1] - bias :] = torch.inf  # the bias column
                laws.append(q.law)
                scores.append(signal)
        biases = sum(int(s.isinf().sum()) for s in scores)
        n = round(2 * keep * (sum(s.numel() for s in scores) - biases))
        keep_largest([law.centre for law in laws], [s.clone() for s in scores], n - n // 2 + biases)
        keep_largest([law.spread for law in laws], scores, n // 2 + biases)

    def prunable(self, bias: bool) -> int:
        if not isinstance(self.law, MeanField):
            return 0
        rows, columns = self.law.centre.value.shape
        return 2 * rows * (columns - bias)
