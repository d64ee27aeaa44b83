"""Draws of a layer with inducing weights: what a server keeps of it, and what a training step makes of several."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.models.posteriors.matheron import (
    MatheronFactors,
    Side,
    draw_jointly,
    draw_projected,
    draw_weights,
    through,
)
from dubito.models.posteriors.protocol import Dense, Factored, Factors, Frozen, Value

LambdaLaw = Literal["exact", "factored"]
ROOM = 16  # a column of B with a bias takes a multiple of so many numbers


def factored_is_cheaper(d_out: int, d_in: int, r: int, groups: int = 1) -> bool:
    """Multiplications per input: through r shared filters (for each group), or by the weights themselves."""
    return r * (d_out + d_in * groups) < d_out * d_in


@dataclass(frozen=True)
class Given(Value):
    """V as a hierarchy has drawn it."""

    V: Tensor  # (K, M_out, M_in), or of n layers (K, n, M_out, M_in)
    normals: int = 0
    members: int = 0

    def mean(self, member: Tensor | None) -> Tensor:
        return self.V

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        return self.V


class WithV(Factors):
    """What serving and training share: V comes from q(V), or from a hierarchy."""

    q_V: Frozen | None  # None: a hierarchy draws V, which is not given yet

    @property
    def members(self) -> int:
        return self.q_V.members if self.q_V is not None else 0

    @property
    def normals_of_V(self) -> int:
        return self.q_V.normals if self.q_V is not None else 0

    @property
    def known_V(self) -> Frozen:
        assert self.q_V is not None
        return self.q_V


@dataclass(frozen=True)
class InducingFactors(WithV):
    """What a server keeps of an inducing layer: never a d_out × d_in matrix.

    The law of the λ-noise is the artifact's: `exact` is q(W | V) itself, drawn by way 2; `factored` is way 3, where
    each direction of `B` has its own noise and everything outside their span shares one.
    """

    matheron: MatheronFactors  # B_c is not stored apart: it is the first columns of B
    B: Tensor  # (d_in, r_in + R)  B_c and, beside it, R further directions
    q_V: Frozen | None  # None: a hierarchy draws V
    lam: float
    sigma: float
    noise: LambdaLaw

    @property
    def dtype(self) -> torch.dtype:
        return self.matheron.p.dtype

    def narrow(self, dtype: torch.dtype) -> "InducingFactors":
        return replace(self, matheron=self.matheron.narrow(dtype), B=self.B.to(dtype))._joined()

    def _each(self, change: Callable[[Tensor], Tensor], seen: dict[Tensor, Tensor] | None = None) -> "InducingFactors":
        return super()._each(change, seen)._joined()

    def tap_by_tap(self, channels: int, bias: bool) -> "InducingFactors | None":
        """One permutation of the rows of B, where no W is formed."""
        if self.forms_W:
            return None
        rows, last = self.B.T.split([len(self.B) - bias, int(bias)], 1)
        B = rows.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1)
        if bias:  # columns begin where a GPU can load several numbers at once
            room = B.new_zeros(len(B), -(-len(self.B) // ROOM) * ROOM)
            room[:, : len(self.B)] = torch.cat([B, last], 1)
            B = room[:, : len(self.B)]
        B = B.T
        return replace(self, B=B)._joined()

    def _joined(self) -> "InducingFactors":
        return replace(self, matheron=replace(self.matheron, B_c=self.B[:, : len(self.matheron.q)]))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.matheron.B_r), len(self.matheron.B_c)

    @property
    def spans(self) -> bool:
        """B spans every input, so that nothing is left outside it."""
        return self.B.shape[1] == self.B.shape[0]

    @property
    def forms_W(self) -> bool:
        """A draw is W itself: the exact law's noise has no factors, but where G = W B_c says all of W.

        There a GPU draws G, as it does for most layers; a CPU would only have one more product to take.
        """
        return self.lam > 0 and self.noise == "exact" and not (self.spans and self.B.is_cuda)

    @property
    def projection(self) -> tuple[Tensor, bool] | None:
        if self.forms_W:
            return None
        return (self.matheron.B_c, False) if self.lam == 0 else (self.B, not self.spans)

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> tuple[int, int, int]:
        """Normals of V, and two of the λ-noise: way 2's E and ε, or way 3's ε and e."""
        of_V = self.normals_of_V
        d_out, d_in = self.shape
        if self.lam == 0:
            return of_V, 0, 0
        if self.forms_W:
            return of_V, d_out * d_in, len(self.matheron.p) * len(self.matheron.q)
        return of_V, d_out * self.B.shape[1], 0 if self.spans else d_out

    def given(self, V: Tensor) -> "InducingFactors":
        return replace(self, q_V=Given(V))

    def factored_is_cheaper(self, groups: int) -> bool:
        remainder = self.lam > 0 and self.noise == "factored" and not self.spans  # needs the shared filters in any case
        return remainder or factored_is_cheaper(*self.shape, self.B.shape[1], groups)

    def mean(self, member: Tensor | None) -> Factored:
        return self._decided_by(self.known_V.mean(member))

    def _decided_by(self, V: Tensor) -> Factored:
        return Factored(self.matheron.B_c, self.sigma * self.matheron.B_r.to(V.dtype) @ self.matheron.decided(V), None)

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense | Factored:
        for_V, first, second = noise.split(self._parts(), dim=1)
        V = self.known_V.draw(for_V, member)
        if self.lam == 0:
            return self._decided_by(V)
        K, f = len(noise), self.matheron
        d_out, d_in = self.shape
        if self.forms_W:
            eps = second.view(K, len(f.p), len(f.q))
            return Dense(draw_weights(f, V, self.lam, self.sigma, first.view(K, d_out, d_in), eps))
        eps, extra = first.view(K, d_out, -1).tensor_split([len(f.q)], dim=2)  # extra: the R further directions
        scale = self.lam * self.sigma
        G = torch.cat([draw_projected(f, V, self.lam, self.sigma, eps), scale * extra], 2)
        return Factored(self.B, G, None if self.spans else scale * second)


@dataclass(frozen=True)
class TrainableInducing(WithV):
    """The same law for a training step, of n layers of one kind: differentiable, every draw a dense W (exact noise)."""

    sigma: Tensor  # (n, 1, 1)
    lam: Tensor | None  # (n, 1, 1)
    q_V: Frozen | None  # over (n, M_out, M_in)
    runs: tuple[tuple[Side, Side], ...]  # rows and columns of neighbours of one shape, stacked

    @property
    def normals(self) -> int:
        return sum(self._parts())

    def _parts(self) -> list[int]:
        """Normals of V, and of each run's λ-noise."""
        noises = [] if self.lam is None else [len(r.P) * r.P.shape[2] * c.P.shape[2] for r, c in self.runs]
        return [self.normals_of_V, *noises]

    def given(self, V: Tensor) -> "TrainableInducing":
        return replace(self, q_V=Given(V if V.dim() == 4 else V.unsqueeze(-3)))

    def mean(self, member: Tensor | None) -> Dense:
        """Of a layer alone, as is `draw`."""
        (W,) = through(self.runs, self.sigma * self.known_V.mean(member))
        return Dense(W[:, 0])

    def draw(self, noise: Tensor, member: Tensor | None) -> Dense:
        (W,) = self.draw_each(noise, member)
        return W

    def draw_each(self, noise: Tensor, member: Tensor | None) -> list[Dense]:
        for_V, *for_W = noise.split(self._parts(), dim=1)
        V = self.known_V.draw(for_V, member)
        if self.lam is None:
            drawn = through(self.runs, self.sigma * V)
        else:
            N = [z.view(-1, len(r.P), r.P.shape[2], c.P.shape[2]) for z, (r, c) in zip(for_W, self.runs, strict=True)]
            drawn = draw_jointly(self.runs, V, self.lam, self.sigma, N)
        return [Dense(W) for run in drawn for W in (run.unbind(1) if run.shape[1] > 1 else [run.squeeze(1)])]
