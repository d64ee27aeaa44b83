"""Where a layer's posterior starts: at the prior, or near the weights of a trained network."""

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from dubito.models.errors import ConversionError
from dubito.models.manifest import DropoutLayer, InducingLayer, Layer, WeightLayer, WhviLayer
from dubito.models.network.geometry import Conv, Geometry, Linear
from dubito.models.numerics.normals import normals
from dubito.models.posteriors.blocks import Grid, weights
from dubito.models.posteriors.dropout import Dropout
from dubito.models.posteriors.flows import Planar
from dubito.models.posteriors.full_covariance import BlockCovariance, FullCovariance
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.matheron import regularise
from dubito.models.posteriors.mean_field import MeanField
from dubito.models.posteriors.mixture import Mixture
from dubito.models.posteriors.protocol import Law
from dubito.models.posteriors.weight_space import WeightSpace
from dubito.models.posteriors.whvi import Whvi, nearest

Start = Literal["network", "prior"]

V_STD = math.sqrt(1e-3)  # of q(V), and of WHVI's q(g), at the start, where no spread is asked for
W_STD = 1e-4  # of q(W) at the start
SPREAD_U, SPREAD_W = 0.1, 0.05  # how far ensemble members start from each other; the second in units of W's own

WIDE, SMALL = 128, 1e-5  # of a matrix whose SVD takes long, and of singular values beside the largest

CONVERTIBLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def geometry_of(module: nn.Module) -> Geometry:
    if isinstance(module, nn.Linear):
        return Linear(module.in_features, module.out_features, module.bias is not None)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
    return Conv(
        module.in_channels,
        module.out_channels,
        tuple(module.kernel_size),
        tuple(module.stride),
        padding,
        tuple(module.dilation),
        module.groups,
        module.bias is not None,
        module.padding_mode,
    )


def weight_of(module: nn.Module) -> Tensor:
    """W (d_out, d_in) of a Linear or Conv layer, its bias as the last column."""
    assert isinstance(module, CONVERTIBLE)
    W = module.weight.detach().flatten(1)
    if module.bias is None:
        return W
    if W.is_meta:  # joined or drawn without storage, torch would load its compiler, which takes seconds
        return W.new_empty(len(W), W.shape[1] + 1)
    return torch.cat([W, module.bias.detach()[:, None]], 1)


def posterior_for(
    entry: Layer, geometry: Geometry, module: nn.Module, start: Start, spread: float | None
) -> tuple[nn.Module, Tensor | None]:
    """The posterior, and for inducing weights the V that its mean weight comes from."""
    W = weight_of(module)
    if not W.is_meta and not W.isfinite().all():
        raise ConversionError("its weights hold NaN or infinity.")
    match entry:
        case DropoutLayer():
            q = Dropout(W.clone(), entry.rate, geometry.groups, geometry.inputs, geometry.bias, entry.sigma)
            return q, None
        case WeightLayer():
            return WeightSpace(_law_of_W(entry, W, module, start), entry.sigma), None
        case InducingLayer():
            return inducing_for(entry, *geometry.shape, W if start == "network" else None, W, spread)
        case WhviLayer():
            return whvi_for(entry, geometry, W, start, spread), None


def whvi_for(entry: WhviLayer, geometry: Geometry, W: Tensor, start: Start, spread: float | None) -> Whvi:
    """From the prior, or from a network: the nearest g, and scales that give each block the size of its weights.

    A block has 3D numbers for D² weights: of weights without structure about 1/D of the energy is kept, so this is a
    start of the right size and of little more, and a network that is to answer like its origin needs training.
    """
    bias = MeanField(W[:, -1].clone(), W_STD, None) if geometry.bias else None
    W = W[:, : W.shape[1] - geometry.bias]
    grid = Grid(W.shape[0], W.shape[1], entry.D)
    g = normals(W, grid.rows * grid.columns, entry.D)
    std = V_STD if spread is None else spread
    q = Whvi(grid, nn.Identity(), bias, entry.sigma, W)
    if start == "network" and not W.is_meta:
        g = fit_blocks(q, W, g)
    q.law = BlockCovariance(g, std) if entry.covariance == "full" else MeanField(g, std, None)
    if entry.flows:
        q.law = Planar(q.law, entry.flows, g)
    return q


@torch.no_grad()
def fit_blocks(q: Whvi, W: Tensor, otherwise: Tensor) -> Tensor:
    """Set S_1 and S_2 for the nearest g, and return it; a matrix that is no more than noise to g has it at random."""
    g = nearest(q, W)
    shape = (1, q.grid.rows, q.grid.columns, q.grid.D)
    S_1, S_2 = q.grid.spread_rows(q.S_1), q.grid.spread_columns(q.S_2)
    found = weights(q.grid, S_1, S_2, g.view(shape)).norm()
    if not found > 1e-6 * W.norm():
        return otherwise
    for S in (q.S_1, q.S_2):
        S.mul_((W.norm() / found).sqrt())
    return g


def _law_of_W(entry: WeightLayer, W: Tensor, module: nn.Module, start: Start) -> Law:
    if entry.method == "ffg-w":
        return MeanField(W.clone(), W_STD, entry.sigma_max)
    if entry.method == "fcg-w":
        return FullCovariance(W.clone(), W_STD, entry.sigma_max)
    assert entry.members is not None
    if start == "network":
        return Mixture(W + _apart(entry.members, W) * (SPREAD_W * W.std(unbiased=False)))
    return Mixture(torch.stack([W, *(_afresh(module) for _ in range(entry.members - 1))]))


def _afresh(module: nn.Module) -> Tensor:
    again = copy.deepcopy(module)
    again.reset_parameters()  # type: ignore[operator]  # Linear and Conv layers all have it
    return weight_of(again)


def _apart(members: int, like: Tensor) -> Tensor:
    """Normals that differ from member to member and average to nothing: (members, *like.shape)."""
    noise = torch.randn(members, *like.shape, dtype=like.dtype, device=like.device)
    return noise - noise.mean(0)


def inducing_for(
    entry: InducingLayer, d_out: int, d_in: int, W: Tensor | None, like: Tensor, spread: float | None
) -> tuple[Inducing, Tensor]:
    """From the prior, or with W given, from its truncated SVD; and the V that the mean weight comes from."""
    std, distance = (V_STD, SPREAD_U) if spread is None else (spread, spread)
    if spread is not None and entry.sigma_max is not None and spread >= entry.sigma_max:
        raise ConversionError(f"spread is {spread} and sigma_max {entry.sigma_max}; expected a spread below its cap.")
    Z_r = normals(like, entry.M_out, d_out, divisor=math.sqrt(entry.M_out))
    Z_c = normals(like, entry.M_in, d_in, divisor=math.sqrt(entry.M_in))
    V = normals(like, entry.M_out, entry.M_in)
    apart = normals(like, entry.members or 0, *V.shape)
    blank = Inducing(Z_r, Z_c, None, entry.sigma, lam_max=entry.lam_max, noise=entry.noise)
    if W is not None:
        V = fit(blank, W)
        apart = apart - apart.mean(0)
    if entry.directions:
        blank.directions = like.new_zeros(entry.directions, d_in)
    match entry.method:
        case "ffg-u":
            blank.law = MeanField(V, std, entry.sigma_max)
        case "fcg-u":
            blank.law = FullCovariance(V, std, entry.sigma_max)
        case "ensemble-u":
            blank.law = Mixture(V + distance * apart)
    return blank, V


@torch.no_grad()
def fit(posterior: Inducing, W: Tensor) -> Tensor:
    """Set Z so that a V exists whose mean weight is the best rank-M fit of W, and return that V.

    W ≈ B_r S B_cᵀ; the leading rows of Z become α Bᵀ, so that the leading columns of A are α/√(α² + D²) of B's.
    Rows beyond the rank stay as they are: a Cholesky factor's leading block does not see them.
    """
    Z_r, Z_c = posterior.Z_r.value, posterior.Z_c.value
    r = min(len(Z_r), len(Z_c), *W.shape)
    B_r, S, B_c = leading(W.double(), r)
    scales = []
    for Z, B, D in ((Z_r, B_r, posterior.D_r()), (Z_c, B_c, posterior.D_c())):
        alpha = math.sqrt(Z.shape[1] / len(Z))  # rows as long as the prior's
        Z[:r] = (alpha * B.T).to(Z.dtype)
        scales.append((1 + regularise(Z.double(), D.double())[:r].square() / alpha**2).sqrt())
    V = torch.zeros(len(Z_r), len(Z_c), dtype=torch.float64, device=W.device)
    V[:r, :r] = torch.diag(S * scales[0] * scales[1] / posterior.sigma)
    return V.to(W.dtype)


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
