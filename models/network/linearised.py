"""Subnetwork Laplace [Daxberger21]: a Gaussian over S weights of a trained network, linearised about those weights.

f(x) + J_S(x) δ, δ ~ N(0, H_S⁻¹), where H_S = L Lᵀ is the curvature over the chosen weights plus the prior's precision.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from math import isqrt

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.models.manifest import SubnetworkEntry
from dubito.models.network.jacobian import Linearised, chosen_of, turn
from dubito.models.network.learned import Learned
from dubito.models.posteriors.protocol import Value

TANGENTS = 1 << 26  # numbers: of weights that draws move, held at a time


@dataclass(frozen=True)
class SubnetworkFactors(Value):
    """What draws and variances come from: which weights, and the Cholesky factor of their precision."""

    index: Tensor  # (S,)  places among all parameters of the network in a row, rising
    L: Tensor  # (S, S)  lower: H_S = L Lᵀ

    @property
    def normals(self) -> int:
        return len(self.index)

    def draw(self, noise: Tensor) -> Tensor:
        """K moves δ = L⁻ᵀ ε of the chosen weights: (K, S) -> (K, S)."""
        moves: Tensor = torch.linalg.solve_triangular(self.L.mT, noise.to(self.L.dtype).mT, upper=True)
        return moves.mT

    def variance(self, J: Tensor) -> Tensor:
        """diag(J H_S⁻¹ Jᵀ): (n, S) -> (n,)."""
        white: Tensor = torch.linalg.solve_triangular(self.L, J.to(self.L.dtype).mT, upper=False)
        return white.square().sum(0)


class Subnetwork(nn.Module):
    """The Gaussian as it is stored: indices, and the lower triangle row by row."""

    index: Tensor
    triangle: Tensor

    def __init__(self, index: Tensor, triangle: Tensor, entry: SubnetworkEntry) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.register_buffer("triangle", triangle)
        self.entry = entry  # what an artifact says of it

    @classmethod
    def of(cls, index: Tensor, L: Tensor, entry: SubnetworkEntry) -> "Subnetwork":
        return cls(index.to(torch.int32), pack(L).float(), entry)

    @classmethod
    def blank(cls, entry: SubnetworkEntry) -> "Subnetwork":
        """Of the right size, for what is about to be loaded."""
        S = entry.size
        return cls(torch.empty(S, dtype=torch.int32), torch.empty(S * (S + 1) // 2), entry)

    def factors(self) -> SubnetworkFactors:
        return SubnetworkFactors(self.index.long(), unpack(self.triangle.float()))


def pack(L: Tensor) -> Tensor:
    """The lower triangle (S, S), row after row: (S (S + 1) / 2,)."""
    return torch.cat([row[: i + 1] for i, row in enumerate(L)])


def unpack(triangle: Tensor) -> Tensor:
    S = (isqrt(8 * len(triangle) + 1) - 1) // 2
    L = triangle.new_zeros(S, S)
    for i, row in enumerate(triangle.split(list(range(1, S + 1)))):
        L[i, : i + 1] = row
    return L


def outputs_of(net: nn.Module, learned: Learned, x: Tensor) -> int:
    """C, by one input that is tried once."""
    if learned.outputs is None:
        learned.outputs = plain(net, learned, x[:1]).shape[-1]
    return learned.outputs


def plain(net: nn.Module, learned: Learned, x: Tensor) -> Tensor:
    """The network at its own weights."""
    with turn(net, learned), torch.no_grad():
        f: Tensor = net(x)
    return f


def linear_samples(
    net: nn.Module, learned: Learned, x: Tensor, factors: SubnetworkFactors, moves: Tensor | None, max_rows: int
) -> Tensor:
    """The linearised network under K moves of its chosen weights (K, S), or under none: (B, ...) -> (K, B, C).

    Either K products J δ in forward mode, or the rows of J, a backward pass for each of the C outputs: whichever takes
    fewer passes. The numbers are the same.
    """
    if moves is None:
        return plain(net, learned, x)[None]
    if 2 * len(moves) < outputs_of(net, learned, x):
        return by_jvp(net, learned, x, factors.index, moves, max(1, max_rows // len(x)))
    there = Linearised(net, x, factors.index, learned)
    out = there.outputs.repeat(len(moves), 1, 1)
    for c, J in enumerate(there.rows()):
        out[..., c] += moves.to(J.dtype) @ J.mT
    return out


def linear_rows(net: nn.Module, learned: Learned, x: Tensor, factors: SubnetworkFactors) -> tuple[Tensor, Tensor]:
    """f(x) (B, C) and J (B, C, S)."""
    there = Linearised(net, x, factors.index, learned)
    return there.outputs, there.jacobian()


def linear_moments(net: nn.Module, learned: Learned, x: Tensor, factors: SubnetworkFactors) -> tuple[Tensor, Tensor]:
    """Mean f(x) and variance diag(J H_S⁻¹ Jᵀ) of the linearised network's outputs, both (B, C)."""
    there = Linearised(net, x, factors.index, learned)
    return there.outputs, torch.stack([factors.variance(J) for J in there.rows()], 1)


def by_jvp(net: nn.Module, learned: Learned, x: Tensor, index: Tensor, moves: Tensor, at_once: int) -> Tensor:
    """Forward passes with tangents, `at_once` of the K draws in each: (K, B, C)."""
    chosen = chosen_of(net, index)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    centre = {name: parameters.pop(name) for name in chosen}

    def f(w: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(net, {**parameters, **w}, (x,))
        return out

    def moved(tangents: dict[str, Tensor]) -> Tensor:
        found = jvp(f, (centre,), (tangents,))
        made: Tensor = found[0] + found[1]
        return made

    _wake_forward_mode()
    k = max(1, min(at_once, TANGENTS // sum(p.numel() for p in centre.values())))
    found: list[Tensor] = []
    # in inference mode torch 2.11 gives tangents of zero, without a word; the fused attention has no forward mode
    with turn(net, learned), torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for some in moves.split(k):
            tangents = {}
            for name, (columns, local) in chosen.items():
                flat = centre[name].new_zeros(len(some), centre[name].numel())
                flat[:, local] = some[:, columns].to(flat.dtype)
                tangents[name] = flat.view(len(some), *centre[name].shape)
            if learned.batched and len(some) > 1:
                try:
                    found.append(vmap(moved)(tangents))
                    continue
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # something in the network cannot be batched: one draw at a time, then
                    learned.batched = False
            found += [moved({name: t[i] for name, t in tangents.items()})[None] for i in range(len(some))]
    return torch.cat(found)


@cache
def _wake_forward_mode() -> None:
    """torch warns of itself when forward mode is first used; nobody here can do anything about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        jvp(torch.sin, (torch.zeros(1),), (torch.zeros(1),))
