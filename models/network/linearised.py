"""Subnetwork Laplace [Daxberger21]: a Gaussian over S weights of a trained network, linearised about those weights.

f(x) + J_S(x) δ, δ ~ N(0, H_S⁻¹), where H_S = L Lᵀ is the curvature over the chosen weights plus the prior's precision.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.models.errors import ArtifactError
from dubito.models.network.jacobian import Linearised, chosen_of, turn
from dubito.models.network.learned import Learned
from dubito.models.network.network import (
    BayesianNetwork,
    Draws,
    InBlocks,
    JointPosterior,
    NetworkFactors,
    Planner,
    Shared,
)
from dubito.models.posteriors.protocol import Value
from dubito.models.posteriors.subnetwork import SubnetworkEntry

_one_at_a_time = threading.RLock()
TANGENTS = 1 << 26  # numbers: of weights that draws move, held at a time
JACOBIAN = 1 << 26  # numbers of a Jacobian that is kept for all draws of a request
SELECTED = {
    "variance": "of the largest variance under a diagonal Laplace approximation",
    "random": "chosen at random",
    "magnitude": "of the largest magnitude",
    "last-layer": "of the last layer",
}


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


@dataclass(frozen=True)
class LinearisedFactors(NetworkFactors):
    """A plain network that is linearised about its weights, and the Gaussian over some of them."""

    closed_form: ClassVar[bool] = True
    folds: ClassVar[bool] = False
    capturable: ClassVar[bool] = False
    subnetwork: SubnetworkFactors = field(kw_only=True)

    @cached_property
    def normals(self) -> int:
        return self.subnetwork.normals

    def outputs(self, network: BayesianNetwork, x: Tensor, draws: Draws, plan: Planner, rows: int) -> Tensor:
        moves = None if draws.noise is None else self.subnetwork.draw(draws.noise)
        return torch.cat([self._block(network, block, moves, rows) for block in x.split(rows)], 1)

    def _block(self, network: BayesianNetwork, x: Tensor, moves: Tensor | None, rows: int) -> Tensor:
        """Under K moves of the chosen weights (K, S), or under none: (B, ...) -> (K, B, C).

        Either K products J δ in forward mode, or the rows of J, a backward pass for each of the C outputs: whichever
        takes fewer passes. The numbers are the same.
        """
        if moves is None:
            return plain(network, x)[None]
        if 2 * len(moves) < outputs_of(network, x):
            return by_jvp(network.net, network.learned, x, self.subnetwork.index, moves, max(1, rows // len(x)))
        there = self._at(network, x)
        out = there.outputs.repeat(len(moves), 1, 1)
        for c, J in enumerate(there.rows()):
            out[..., c] += moves.to(J.dtype) @ J.mT
        return out

    def _at(self, network: BayesianNetwork, x: Tensor) -> Linearised:
        return Linearised(network.net, x, self.subnetwork.index, network.learned)

    def shared(self, network: BayesianNetwork, x: Tensor, most: int, in_blocks: InBlocks) -> Shared | None:
        """f (B, C) and J (B, C, S) of all inputs, where that is cheap and fits."""
        C = outputs_of(network, x)
        if 2 * most < C or len(x) * C * self.normals > JACOBIAN:
            return None
        f, J = in_blocks(lambda block: ((there := self._at(network, block)).outputs, there.jacobian()))

        def moved(draws: Draws, rows: Tensor | None) -> Tensor:
            assert draws.noise is not None
            moves = self.subnetwork.draw(draws.noise).to(J.dtype)
            chosen = slice(None) if rows is None else rows
            return f[chosen] + torch.einsum("bcs,ks->kbc", J[chosen], moves)

        return moved

    def moments(self, network: BayesianNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and diag(J H_S⁻¹ Jᵀ)."""
        there = self._at(network, x)
        return there.outputs, torch.stack([self.subnetwork.variance(J) for J in there.rows()], 1)

    def resident(self, net: nn.Module, device: torch.device, dtype: torch.dtype) -> "LinearisedFactors":
        return replace(super().resident(net, device, dtype), subnetwork=self.subnetwork.to(device))


class Subnetwork(JointPosterior):
    """The Gaussian as it is stored: indices, and the lower triangle row by row."""

    key = "subnetwork"
    over_weights = True
    not_pruned = (
        "this is a subnetwork-laplace model, which has nothing to prune: its posterior is as small as the size S "
        "that it was made with. Make it anew with a smaller one (dubito laplace --size)."
    )
    index: Tensor
    triangle: Tensor
    entry: SubnetworkEntry

    def __init__(self, index: Tensor, triangle: Tensor, entry: SubnetworkEntry) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.register_buffer("triangle", triangle)
        self.entry = entry

    @classmethod
    def of(cls, index: Tensor, L: Tensor, entry: SubnetworkEntry) -> "Subnetwork":
        return cls(index.to(torch.int32), pack(L).float(), entry)

    @classmethod
    def blank(cls, entry: Any) -> "Subnetwork":
        S = entry.size
        return cls(torch.empty(S, dtype=torch.int32), torch.empty(S * (S + 1) // 2), entry)

    @classmethod
    def sized(cls, S: int) -> "Subnetwork":
        """For counting, without storage."""
        with torch.device("meta"):
            return cls.blank(SubnetworkEntry(size=S, select="variance", prior_precision=1.0, examples=1))

    def factors(self) -> SubnetworkFactors:
        return SubnetworkFactors(self.index.long(), unpack(self.triangle.float()))

    def prepare(self, plain: NetworkFactors) -> LinearisedFactors:
        return LinearisedFactors(**{f.name: getattr(plain, f.name) for f in fields(plain)}, subnetwork=self.factors())

    def check(self, net: nn.Module) -> None:
        index, S, D = self.index.long(), len(self.index), sum(p.numel() for p in net.parameters())
        if S > D or int(index[0]) < 0 or int(index[-1]) >= D or not (index.diff() > 0).all():
            raise ArtifactError(
                f"the indices of its subnetwork are no {S:,} weights of the {D:,} that it has, in order."
            )
        places = torch.arange(1, S + 1, device=index.device).cumsum(0) - 1
        if not (self.triangle[places] > 0).all():
            raise ArtifactError("the triangle of its subnetwork has a diagonal that is not positive: it is no factor.")

    @staticmethod
    def facts(entry: Any, network: BayesianNetwork | None) -> dict[str, Any]:
        """For `dubito inspect`, with how many of each parameter's weights were chosen where the network is known."""
        by_name: dict[str, int] = {}
        if network is not None and isinstance(network.joint, Subnetwork):
            chosen = chosen_of(network.net, network.joint.index.long())
            by_name = {name: len(local) for name, (_, local) in chosen.items()}
        S = entry.size
        return {**entry.model_dump(mode="json"), "triangle": S * (S + 1) // 2, "parameters": by_name}

    @staticmethod
    def lines(facts: Mapping[str, Any], calibration: Mapping[str, Any] | None) -> Iterator[str]:
        """What `dubito inspect` says of these facts."""
        yield f"{facts['method']}: Gaussian over some of the weights, about which the network is linearised"
        yield f"S = {facts['size']:,} weights {SELECTED[facts['select']]}; all others are as trained"
        yield (
            f"precision: curvature summed over {facts['examples']:,} examples + {facts['prior_precision']:.4g} of the "
            f"prior, as a Cholesky factor of {facts['triangle']:,} numbers"
        )
        default = "probit" if calibration is None else calibration["method"]
        yield f"answers in closed form (probit) or by draws (sampling); unless told, {default}"
        if facts["parameters"]:
            yield "chosen in: " + ", ".join(f"{name} {n:,}" for name, n in facts["parameters"].items())


def pack(L: Tensor) -> Tensor:
    """The lower triangle (S, S), row after row: (S (S + 1) / 2,)."""
    return torch.cat([row[: i + 1] for i, row in enumerate(L)])


def unpack(triangle: Tensor) -> Tensor:
    S = (isqrt(8 * len(triangle) + 1) - 1) // 2
    L = triangle.new_zeros(S, S)
    for i, row in enumerate(triangle.split(list(range(1, S + 1)))):
        L[i, : i + 1] = row
    return L


def outputs_of(network: BayesianNetwork, x: Tensor) -> int:
    """C, by one input that is tried once."""
    if network.learned.outputs is None:
        network.learned.outputs = plain(network, x[:1]).shape[-1]
    return network.learned.outputs


def plain(network: BayesianNetwork, x: Tensor) -> Tensor:
    """The network at its own weights."""
    with turn(network.net, network.learned), torch.no_grad():
        f: Tensor = network.net(x)
    return f


def by_jvp(net: nn.Module, learned: Learned, x: Tensor, index: Tensor, moves: Tensor, at_once: int) -> Tensor:
    """Forward passes with tangents, `at_once` of the K draws in each: (K, B, C)."""
    chosen = chosen_of(net, index)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    centre = {name: parameters.pop(name) for name in chosen}

    def f(w: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(net, {**parameters, **w}, (x,))
        return out

    def moved(tangents: dict[str, Tensor]) -> Tensor:
        value, change = jvp(f, (centre,), (tangents,))
        out: Tensor = value + change
        return out

    _wake_forward_mode()
    k = max(1, min(at_once, TANGENTS // sum(p.numel() for p in centre.values())))
    parts: list[Tensor] = []
    # in inference mode torch 2.11 gives tangents of zero, without a word; the fused attention has no forward mode
    with (
        turn(net, learned),
        torch.inference_mode(False),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        _forward_mode_of(net),
    ):
        for some in moves.split(k):
            tangents = {}
            for name, (columns, local) in chosen.items():
                flat = centre[name].new_zeros(len(some), centre[name].numel())
                flat[:, local] = some[:, columns].to(flat.dtype)
                tangents[name] = flat.view(len(some), *centre[name].shape)
            if learned.batched and len(some) > 1:
                try:
                    parts.append(vmap(moved)(tangents))
                    continue
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # something in the network cannot be batched: one draw at a time, then
                    learned.batched = False
            parts += [moved({name: t[i] for name, t in tangents.items()})[None] for i in range(len(some))]
    return torch.cat(parts)


@contextmanager
def _forward_mode_of(net: nn.Module) -> Iterator[None]:
    """oneDNN's LSTM of a CPU has no forward mode; torch's own has. The setting is the process's, so one at a time."""
    if not any(isinstance(m, nn.LSTM) for m in net.modules()) or not torch.backends.mkldnn.is_available():
        yield
        return
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that some Intel GPU is missing
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@cache
def _wake_forward_mode() -> None:
    """torch warns of itself when forward mode is first used; nobody here can do anything about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        jvp(torch.sin, (torch.zeros(1),), (torch.zeros(1),))
