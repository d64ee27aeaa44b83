"""How each layer of a network is made Bayesian: one set of options, changed for some layers by name, glob or type."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.manifest import MOST_FLOWS, MOST_MEMBERS, DropoutLayer, InducingLayer, Layer, WeightLayer, WhviLayer
from dubito.models.names import METHODS, Method
from dubito.models.network.geometry import Geometry
from dubito.models.network.plan import factored_is_cheaper
from dubito.models.posteriors.blocks import side
from dubito.models.posteriors.full_covariance import LIMIT, check_limit
from dubito.models.posteriors.inducing import Noise

LEAST_LAM = 1e-5  # of a cap that is not 0
Override = str | Mapping[str, Any]  # a method, or options
Overrides = Mapping[str | type[nn.Module], Override]


@dataclass(frozen=True)
class Options:
    """How one layer is made Bayesian; `layers=` of `bayesianize` changes these for some layers."""

    method: Method
    M_out: int = 64
    M_in: int = 64
    members: int = 5
    lam_max: float | None = None  # None: 0.1 for ensemble-u, 0.03 for the others; 0: no noise of W given V
    lam_share: float | None = None  # the same cap as a share of the norm of W: the λ-noise over the prior's mean W
    sigma_max: float = 0.1  # cap of the standard deviations of q(V) or q(W)
    rate: float = 0.1  # of mc-dropout
    # The prior of W is N(0, prior_scale²/d_in). None: 1; but inducing weights that start from a network take the scale
    # of its weights, so that V starts with an RMS of 1.
    prior_scale: float | None = None
    noise: Noise | Literal["auto"] = "auto"  # auto: exact where forming W is as cheap as not forming it
    covariance_limit: int = LIMIT
    D: int | None = None  # side of WHVI's blocks, a power of two; None: of the shorter side of W
    covariance: Literal["diagonal", "full"] = "diagonal"  # of q(g) of WHVI, within each block
    flows: int = 0  # planar flows on g of WHVI

    def changed(self, override: Override) -> "Options":
        changes: dict[str, Any] = {"method": override} if isinstance(override, str) else dict(override)
        if "inducing" in changes:
            changes["M_out"], changes["M_in"] = pair(changes.pop("inducing"))
        unknown = changes.keys() - self.__dataclass_fields__.keys()
        if unknown:
            raise ConversionError(
                f"unknown option {sorted(unknown)[0]!r}; there are: inducing, {', '.join(self.__dataclass_fields__)}."
            )
        return replace(self, **changes).checked()

    def checked(self) -> "Options":
        if self.method not in METHODS:
            raise ConversionError(f"no method {self.method!r}; there are: {', '.join(METHODS)}.")
        for name in ("M_out", "M_in", "members", "covariance_limit"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConversionError(f"{name} is {value!r}; expected a whole number from 1.")
        if self.members > MOST_MEMBERS:
            raise ConversionError(f"members is {self.members}; expected at most {MOST_MEMBERS}.")
        if self.lam_max is not None and self.lam_max != 0 and not LEAST_LAM <= self.lam_max < math.inf:
            raise ConversionError(f"lam_max is {self.lam_max}; expected 0 (no noise) or a number from 1e-5.")
        if self.lam_share is not None:
            if not 0 < self.lam_share < math.inf:
                raise ConversionError(f"lam_share is {self.lam_share}; expected a positive number.")
            if self.lam_max is not None:
                raise ConversionError(
                    f"lam_share is {self.lam_share} and lam_max {self.lam_max}; both cap λ: expected one of them."
                )
        if not 1e-5 <= self.sigma_max < math.inf:
            raise ConversionError(f"sigma_max is {self.sigma_max}; expected a number from 1e-5.")
        if self.prior_scale is not None and not 0 < self.prior_scale < math.inf:
            raise ConversionError(f"prior_scale is {self.prior_scale}; expected a positive number.")
        if not 0 < self.rate < 1:
            raise ConversionError(f"rate is {self.rate}; expected a dropout rate between 0 and 1.")
        if self.noise not in ("auto", "exact", "factored"):
            raise ConversionError(f"noise is {self.noise!r}; expected auto, exact or factored.")
        if self.D is not None and (not isinstance(self.D, int) or self.D < 1 or self.D & (self.D - 1)):
            raise ConversionError(f"D is {self.D!r}; expected a power of two.")
        if self.covariance not in ("diagonal", "full"):
            raise ConversionError(f"covariance is {self.covariance!r}; expected diagonal or full.")
        if not isinstance(self.flows, int) or not 0 <= self.flows <= MOST_FLOWS:
            raise ConversionError(f"flows is {self.flows!r}; expected a whole number from 0 to {MOST_FLOWS}.")
        return self


def describe(geometry: Geometry, o: Options, W: Tensor | None = None) -> Layer:
    """The options as a manifest entry, every default settled; W (d_out, d_in) is the start, if there is one."""
    d_out, d_in = geometry.shape
    fits = math.isqrt(o.covariance_limit)
    sigma = (1.0 if o.prior_scale is None else o.prior_scale) / math.sqrt(d_in)
    match o.method:
        case "mc-dropout":
            return DropoutLayer(rate=o.rate, sigma=sigma)
        case "whvi":
            D = side(d_out, d_in - geometry.bias) if o.D is None else o.D
            if o.covariance == "full":
                check_limit(D, o.covariance_limit, "Smaller blocks (option D) fit, or covariance='diagonal'.")
            return WhviLayer(D=D, covariance=o.covariance, flows=o.flows, sigma=sigma)
        case "ffg-w" | "fcg-w" | "ensemble-w":
            if o.method == "fcg-w":
                check_limit(
                    d_out * d_in, o.covariance_limit, f"fcg-u with M = {fits} (inducing={fits}) fits, or use ffg-w."
                )
            members = o.members if o.method == "ensemble-w" else None
            cap = None if o.method == "ensemble-w" else o.sigma_max
            return WeightLayer(method=o.method, members=members, sigma_max=cap, sigma=sigma)
        case "ffg-u" | "fcg-u" | "ensemble-u":
            if o.method == "fcg-u":
                check_limit(o.M_out * o.M_in, o.covariance_limit, f"M = {fits} (inducing={fits}) fits, or use ffg-u.")
            ensemble = o.method == "ensemble-u"
            noise = o.noise
            if noise == "auto":
                cheaper = factored_is_cheaper(d_out, d_in, min(o.M_in, d_in), geometry.groups)
                noise = "factored" if cheaper else "exact"
            if W is not None and o.prior_scale is None:
                sigma = scale_of(W, o.M_out, o.M_in) or sigma
            lam_max = (0.1 if ensemble else 0.03) if o.lam_max is None else o.lam_max
            if o.lam_share is not None:
                lam_max = max(LEAST_LAM, o.lam_share * lam_of_share(d_out, d_in, o.M_out, o.M_in))
            return InducingLayer(
                method=o.method,
                M_out=o.M_out,
                M_in=o.M_in,
                members=o.members if ensemble else None,
                lam_max=lam_max,
                sigma_max=None if ensemble else o.sigma_max,
                sigma=sigma,
                noise=noise,
            )
        case _:
            raise ConversionError(f"{o.method!r} is no posterior.")


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


def pair(M: int | tuple[int, int]) -> tuple[int, int]:
    """(M_out, M_in) of one number or two."""
    both = (M, M) if isinstance(M, int) else M
    whole = isinstance(both, tuple | list) and len(both) == 2 and all(isinstance(m, int) and m > 0 for m in both)
    if not whole or isinstance(M, bool):
        raise ConversionError(
            f"inducing weights of size {M!r}; expected a whole number from 1, or a pair (M_out, M_in)."
        )
    return both[0], both[1]


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConversionError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Puts the layer's name in front of an error about it."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(f"layer {layer!r}: {error}") from None


def options_for(name: str, module: nn.Module, base: Options, overrides: Overrides) -> Options:
    """Types first, then globs, then names, so that the most particular has the last word."""
    matching: list[list[Override]] = [[], [], []]
    for key, override in overrides.items():
        if isinstance(key, type):
            if isinstance(module, key):
                matching[0].append(override)
        elif key == name:
            matching[2].append(override)
        elif fnmatchcase(name, key):
            matching[1].append(override)
    for override in [o for rank in matching for o in rank]:
        with naming(name):
            base = base.changed(override)
    return base


def check_used(overrides: Overrides, found: Mapping[str, nn.Module]) -> None:
    """An override that fits no layer is a mistake, most likely in a name."""
    for key in overrides:
        hit = any(isinstance(m, key) if isinstance(key, type) else fnmatchcase(n, key) for n, m in found.items())
        if not hit:
            raise ConversionError(f"layers={{{key!r}: …}} matches no layer; there are: {', '.join(found)}.")
