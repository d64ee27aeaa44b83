"""Walsh–Hadamard variational inference [Rossi20]: W = S_1 H diag(g) H S_2 in square blocks, q over g alone.

The prior of g is N(0, I) here. The paper's is N(0, 1e-5 I) with larger scales, which gives the same law of W: only
S_1 S_2 std(g) counts. S_1 and S_2 start at ±(σ²D)^¼, so that each entry of W has the prior variance σ², and are free
numbers: nothing penalises them. A bias is a factorised Gaussian beside W, not a column of it: it would double D.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.fields import PositiveFinite, Size
from dubito.models.numerics.hadamard import transform
from dubito.models.numerics.normals import normals
from dubito.models.posteriors.blocks import Blocks, Grid, side, weights
from dubito.models.posteriors.entry import PRIOR_SCALE, Entry, LayerSizes, Option, Origin, is_depthwise, prior_of
from dubito.models.posteriors.flows import Planar
from dubito.models.posteriors.full_covariance import COVARIANCE_LIMIT, BlockCovariance, check_limit
from dubito.models.posteriors.mean_field import V_STD, W_STD, MeanField
from dubito.models.posteriors.protocol import Dense, Factors, Frozen, Posterior

MOST_FLOWS = 64


def is_power_of_two(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and not value & (value - 1)


class WhviLayer(Entry):
    kind: Literal["whvi"] = "whvi"
    method: Literal["whvi", "whvi-column"] = "whvi"
    D: Size  # side of a block
    covariance: Literal["diagonal", "full"]
    flows: Annotated[int, Field(ge=0, le=MOST_FLOWS)] = 0
    sigma: PositiveFinite

    what: ClassVar = {
        "whvi": "Walsh–Hadamard VI: blocks S_1 H diag(g) H S_2 of W, a distribution over g alone",
        "whvi-column": "the same with the weights of each output folded into a square, which is one block",
    }
    options: ClassVar = {
        "prior_scale": PRIOR_SCALE,
        "covariance_limit": COVARIANCE_LIMIT,
        "D": Option(None, "a power of two", lambda v: v is None or is_power_of_two(v)),  # None: of W's shorter side
        "covariance": Option("diagonal", "diagonal or full", lambda v: v in ("diagonal", "full")),  # of g, by block
        "flows": Option(
            0, f"a whole number from 0 to {MOST_FLOWS}", lambda v: isinstance(v, int) and 0 <= v <= MOST_FLOWS
        ),  # planar, on g
    }
    spreads = frozenset({"whvi", "whvi-column"})

    @model_validator(mode="after")
    def _power(self) -> Self:
        if not is_power_of_two(self.D):
            raise ValueError(f"D is {self.D}; the side of a block is a power of two")
        return self

    @classmethod
    def suits(cls, geometry: LayerSizes) -> bool:
        """Depthwise convolutions are left as they are."""
        return not is_depthwise(geometry)

    @classmethod
    def describe(cls, method: Any, o: Mapping[str, Any], geometry: LayerSizes, W: Tensor | None = None) -> Self:
        d_out, d_in = geometry.shape
        D = side(d_out, d_in - geometry.bias, method == "whvi-column") if o["D"] is None else o["D"]
        if o["covariance"] == "full":
            check_limit(D, o["covariance_limit"], "Smaller blocks (option D) fit, or covariance='diagonal'.")
        return cls(method=method, D=D, covariance=o["covariance"], flows=o["flows"], sigma=prior_of(o, d_in))

    def start(self, origin: Origin) -> "Whvi":
        """From the prior, or from a network: the nearest g, and scales that give each block the size of its weights.

        A block has 3D numbers for D² weights: of weights without structure about 1/D of the energy is kept, so this is
        a start of the right size and of little more, and a network that is to answer like its origin needs training.
        """
        W, with_bias = origin.W, origin.geometry.bias
        bias = MeanField(W[:, -1].clone(), W_STD, None) if with_bias else None
        W = W[:, : W.shape[1] - with_bias]
        grid = Grid(W.shape[0], W.shape[1], self.D, fold=self.method == "whvi-column")
        g = normals(W, grid.rows * grid.columns, self.D)
        std = V_STD if origin.spread is None else origin.spread
        q = Whvi(grid, nn.Identity(), bias, self.sigma, W)
        if origin.trained and not W.is_meta:
            g = fit_blocks(q, W, g)
        q.law = BlockCovariance(g, std) if self.covariance == "full" else MeanField(g, std, None)
        if self.flows:
            q.law = Planar(q.law, self.flows, g)
        return q

    def check(self, d_out: int, d_in: int) -> None:
        """No block is so large that it is nothing but padding."""
        if (most := 1 << (max(d_out, d_in) - 1).bit_length()) < self.D:
            raise ConversionError(f"D = {self.D} for weights of {d_out} × {d_in}: expected at most {most}.")

    def row(self) -> dict[str, Any]:
        return {"D": self.D, "covariance": self.covariance, "flows": self.flows}

    def cells(self, row: Mapping[str, Any]) -> tuple[str, str]:
        blocks = f"{row['blocks']} × {self.D}" if "blocks" in row else f"blocks of {self.D}"
        return blocks, f"{self.covariance} Σ" + (f", {self.flows} flows" if self.flows else "")


@dataclass(frozen=True)
class WhviFactors(Factors):
    """What a server keeps: O(D) numbers a block, and never W.

    `q_g` turns normals into g: for a Gaussian, `q_g.centre` is μ and `q_g.spread` (diagonal) or `q_g.root` is Σ^½.
    """

    grid: Grid
    S_1: Tensor  # (rows, columns, D)  zero beyond d_out
    S_2: Tensor  # (rows, columns, D)  zero beyond d_in
    q_g: Frozen  # over (rows · columns, D)
    q_b: Frozen | None  # over (d_out,): the bias

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int]:
        return self.q_g.normals, 0 if self.q_b is None else self.q_b.normals

    def factored_is_cheaper(self, groups: int) -> bool:
        """Not for grouped convolutions, where a block of W meets several groups' inputs."""
        return groups == 1

    def mean(self, member: Tensor | None) -> Dense | Blocks:
        return self._operand(self.q_g.mean(None), None if self.q_b is None else self.q_b.mean(None))

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense | Blocks:
        for_g, for_b = noise.split(self._parts(), dim=1)
        return self._operand(self.q_g.draw(for_g, None), None if self.q_b is None else self.q_b.draw(for_b, None))

    def _operand(self, g: Tensor, bias: Tensor | None) -> Dense | Blocks:
        """A folded matrix is one row or column, or that of a last layer, which has few rows: that is formed."""
        blocks = Blocks(self.grid, self.S_1, self.S_2, g.view(-1, *self.S_1.shape), bias)
        return Dense(blocks.dense()) if self.grid.folded else blocks


class Whvi(Posterior):
    unprunable = "whvi layers have no Z, and every entry of S_1, S_2 and g takes part in a whole block"

    def __init__(self, grid: Grid, law: nn.Module, bias: MeanField | None, sigma: float, like: Tensor) -> None:
        super().__init__()
        self.grid, self.sigma = grid, sigma
        start = math.sqrt(sigma * math.sqrt(grid.D))
        # with equal signs W would be symmetric, each of its rows the first one in another order
        self.S_1, self.S_2 = (nn.Parameter(start * signs(shape, like)) for shape in grid.scales)
        self.law = law  # over g, (rows · columns, D)
        self.bias = bias

    @property
    def q(self) -> MeanField | BlockCovariance | Planar:
        return self.law  # type: ignore[return-value]  # nn.Module by type, one of these by construction

    @property
    def gaussian(self) -> bool:
        return not isinstance(self.law, Planar)

    def trainable(self) -> WhviFactors:
        """The same law with gradients: W is formed where `Blocks` says that this is faster, as in prediction."""
        S_1, S_2 = self.grid.spread_rows(self.S_1), self.grid.spread_columns(self.S_2)
        return WhviFactors(self.grid, S_1, S_2, self.q.freeze(), None if self.bias is None else self.bias.freeze())

    def row(self) -> dict[str, Any]:
        return {"blocks": self.grid.rows * self.grid.columns}

    def kl(self, data_size: int | None = None) -> Tensor:
        return self.kl_together([self], data_size)

    @classmethod
    def kl_together(cls, layers: Sequence[Self], data_size: int | None = None) -> Tensor:
        """In closed form, but for flows; with few kernels."""
        priors: dict[float, list[MeanField]] = {}
        terms = []
        for layer in layers:
            if isinstance(layer.q, MeanField):
                priors.setdefault(1.0, []).append(layer.q)
            else:
                terms.append(layer.q.kl(1.0))
            if layer.bias is not None:
                priors.setdefault(layer.sigma, []).append(layer.bias)
        return torch.stack([*terms, *(MeanField.kl_together(laws, prior) for prior, laws in priors.items())]).sum()


@torch.no_grad()
def fit_blocks(q: Whvi, W: Tensor, otherwise: Tensor) -> Tensor:
    """Set S_1 and S_2 for the nearest g, and return it; a matrix that is no more than noise to g has it at random."""
    g = nearest(q, W)
    shape = (1, q.grid.rows, q.grid.columns, q.grid.D)
    S_1, S_2 = q.grid.spread_rows(q.S_1), q.grid.spread_columns(q.S_2)
    fitted = weights(q.grid, S_1, S_2, g.view(shape)).norm()
    if not fitted > 1e-6 * W.norm():
        return otherwise
    for S in (q.S_1, q.S_2):
        S.mul_((W.norm() / fitted).sqrt())
    return g


def signs(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randint(2, shape, device=like.device).to(like.dtype) * 2 - 1


@torch.no_grad()
def nearest(q: Whvi, W: Tensor) -> Tensor:
    """The g whose W is nearest to this one (d_out × d_in, no bias) with S_1 and S_2 as they are: (rows · columns, D).

    Least squares: A of vec(W) = A g has AᵀA_lm = c(l xor m) with c = (H s_1²)(H s_2²)/D, which H diagonalises. Where
    a folded row ends within a row of its block, the rest of that counts as zeros.
    """
    grid, D = q.grid, q.grid.D
    S_1, S_2 = grid.spread_rows(q.S_1).double(), grid.spread_columns(q.S_2).double()
    cut = grid.cut(W.double()) * S_1[..., None] * S_2[..., None, :]
    target = transform(transform(cut).mT).diagonal(dim1=-2, dim2=-1)  # Aᵀ vec(W)
    values = transform(transform(S_1.square()) * transform(S_2.square())) / math.sqrt(D)  # eigenvalues of AᵀA
    known = values > 1e-9 * values.amax(-1, keepdim=True)
    g = transform(torch.where(known, transform(target) / torch.where(known, values, 1.0), 0.0))
    return g.flatten(0, 1).to(W.dtype)
