"""MC dropout as a posterior over W: q(W) = W diag(z)/(1 − rate), z Bernoulli, one z per draw."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dubito.models.fields import PositiveFinite, Share
from dubito.models.numerics.parameters import Free
from dubito.models.posteriors.entry import PRIOR_SCALE, Entry, LayerSizes, Option, Origin, prior_of
from dubito.models.posteriors.protocol import Dense, Dropped, Factors, Posterior


class DropoutLayer(Entry):
    kind: Literal["dropout"] = "dropout"
    method: Literal["mc-dropout"] = "mc-dropout"
    rate: Share
    sigma: PositiveFinite

    what: ClassVar = {"mc-dropout": "dropout at prediction"}
    options: ClassVar = {
        "rate": Option(0.1, "a dropout rate between 0 and 1", lambda v: 0 < v < 1),
        "prior_scale": PRIOR_SCALE,
    }

    @classmethod
    def describe(cls, method: str, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        return cls(rate=o["rate"], sigma=prior_of(o, geometry.shape[1]))

    def start(self, origin: Origin) -> "Dropout":
        geometry = origin.geometry
        return Dropout(origin.W.clone(), self.rate, geometry.groups, geometry.inputs, geometry.bias, self.sigma)

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """Dropping whole input channels of a first convolution would hide the picture."""
        return geometry.dims == 0 or geometry.inputs > 4


@dataclass(frozen=True)
class DropoutFactors(Factors):
    W: Tensor  # (d_out, d_in)
    rate: float
    groups: int
    inputs: int  # input features or channels of the whole layer
    bias: bool
    by_row: bool = False  # training: masks differ from row to row, as in an ordinary dropout layer

    @property
    def normals(self) -> int:
        return 0 if self.by_row else self.inputs

    def mean(self, member: Tensor | None) -> Dense:
        return Dense(self.W[None])

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense | Dropped:
        """A draw is one function of the input: its mask is the same for every row and location."""
        if self.by_row:
            return Dropped(self.W[None], self.rate)
        d_out, d_in = self.W.shape
        kept = (noise < NormalDist().inv_cdf(1 - self.rate)).to(self.W.dtype) / (1 - self.rate)  # (K, inputs)
        kernel = (d_in - self.bias) // (self.inputs // self.groups)  # weights an input has in each row
        columns = kept.view(len(noise), self.groups, -1).repeat_interleave(kernel, -1)  # (K, groups, d_in − bias)
        if self.bias:
            columns = torch.cat([columns, columns.new_ones(*columns.shape[:2], 1)], -1)
        return Dense(self.W * columns.repeat_interleave(d_out // self.groups, 1))


class Dropout(Posterior):
    """Drops input features (Linear) or input channels (Conv), never the bias."""

    noise_in_W = False  # but in the inputs
    gaussian = False

    def __init__(self, W: Tensor, rate: float, groups: int, inputs: int, bias: bool, sigma: float) -> None:
        super().__init__()
        self.W = Free(W)
        self.rate, self.groups, self.inputs, self.bias, self.sigma = rate, groups, inputs, bias, sigma

    @torch.no_grad()
    def factors(self) -> DropoutFactors:
        return replace(self.trainable(), by_row=False).settle()

    def trainable(self) -> DropoutFactors:
        return DropoutFactors(self.W(), self.rate, self.groups, self.inputs, self.bias, by_row=True)

    def kl(self, data_size: int | None = None) -> Tensor:
        """[Gal16, arXiv 1506.02157], less its constants: W/(1 − rate) is there with probability 1 − rate."""
        W: Tensor = self.W()
        weights, bias = (W[:, :-1], W[:, -1:]) if self.bias else (W, W[:, :0])
        return (weights.square().sum() / (1 - self.rate) + bias.square().sum()) / (2 * self.sigma**2)
