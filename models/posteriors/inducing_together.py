"""Draws of many layers by few products: layer by layer, launching kernels would take longer than they run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dubito.models.numerics.normals import counted
from dubito.models.numerics.parameters import alike
from dubito.models.posteriors.inducing_factors import InducingFactors
from dubito.models.posteriors.mean_field import FrozenMeanField
from dubito.models.posteriors.protocol import Dense, Factored, Factors, Gathered, Group, Operand

LONG = 512  # outputs: layers of more take long to draw, and are mostly the last, so the others do not wait for them


@dataclass(frozen=True)
class Rows:
    """Layers of one d_out, stacked."""

    B_r: Tensor  # (n, d_out, r_out)
    scale: Tensor | None  # (n, 1, 1, 1)  λσ; None without λ-noise

    @property
    def d_out(self) -> int:
        return self.B_r.shape[1]


@dataclass(frozen=True)
class FactoredGroup:
    """FFG-U layers of one M, all without λ-noise or all with noise in factors, in the order of their d_out.

    Everything is drawn transposed, Gᵀ = σ √q ∘ Q_cᵀ Vᵀ A_rᵀ and its noise, so that the K draws are rows of a product.
    """

    names: tuple[str, ...]
    centre: Tensor  # (N, M_out, M_in)
    spread: Tensor
    Q_r: Tensor  # (N, M_out, r_out)
    Q_c: Tensor  # (N, M_in, r_in)
    p: Tensor  # (N, 1, r_out)
    q: Tensor  # (N, r_in, 1)
    sigma: Tensor  # (N, 1, 1)
    scale: Tensor | None  # (N, 1, 1)  λσ; None without λ-noise
    B: tuple[Tensor, ...]  # (d_in, r_in + R) of each layer
    rows: tuple[Rows, ...]
    B_r: Tensor  # (Σ d_out, r_out)  of all layers, which those of `rows` are views of
    beyond: bool  # something is left outside the span of B
    table: Tensor | None  # for the kernel that draws from a seed (`_table`); None: there is none for these sizes

    def draw_by(self, key: Tensor, K: int) -> list[Factored]:
        """K draws from where the key stands, (seed, first draw), by one kernel."""
        from dubito.models.posteriors.inducing_kernel import ALIGNED, draw_projected

        assert self.table is not None
        r = self.B[0].shape[1]
        G, e = draw_projected(
            key, K, self.table, self.centre, self.spread, self.Q_r, self.Q_c, self.p, self.q, self.sigma, self.scale,
            self.B_r, r, self.beyond, all(rows.d_out % ALIGNED == 0 for rows in self.rows),
        )  # fmt: skip
        sizes = [K * rows.d_out for rows in self.rows for _ in rows.B_r]
        Gs = G.split([size * r for size in sizes])
        es = [None] * len(sizes) if e is None else e.split(sizes)
        return [
            Factored(b, g.view(K, r, -1).mT, None if e_ is None else e_.view(K, -1))
            for b, g, e_ in zip(self.B, Gs, es, strict=True)
        ]

    def draw(self, noise: Sequence[Tensor]) -> list[Factored]:
        """Each layer's (K, normals) -> its K draws."""
        N, M_out, M_in = self.centre.shape
        K, r_in, r_out = len(noise[0]), self.Q_c.shape[2], self.Q_r.shape[2]
        for_V = torch.stack([z[:, : M_out * M_in] for z in noise]).view(N, K, M_out, M_in)
        V = torch.addcmul(self.centre[:, None], self.spread[:, None], for_V)
        right = (V.view(N, K * M_out, M_in) @ self.Q_c.to(V.dtype)).view(N, K, M_out, r_in)
        both = right.transpose(2, 3).reshape(N, K * r_in, M_out) @ self.Q_r.to(V.dtype)
        pq = self.q * self.p  # with its roots made anew for each draw, which takes less than keeping them would
        inner = both.view(N, K, r_in, r_out) * (self.sigma * pq.sqrt())[:, None]
        changes = None if self.scale is None else self.scale * ((1 - pq).sqrt() - 1)
        samples, offset = list[Factored](), 0
        for rows in self.rows:
            here = slice(offset, offset + len(rows.B_r))
            change = None if changes is None else changes[here]
            rest = [z[:, M_out * M_in :] for z in noise[here]]
            samples += self._of_rows(rows, inner[here], change, self.B[here], rest)
            offset = here.stop
        return samples

    def _of_rows(
        self, rows: Rows, inner: Tensor, change: Tensor | None, B: Sequence[Tensor], rest: Sequence[Tensor]
    ) -> list[Factored]:
        n, K, r_in, r_out = inner.shape
        dtype, B_r, d_out = rows.B_r.dtype, rows.B_r, rows.d_out
        if rows.scale is None or change is None:
            G = (inner.to(dtype).view(n, K * r_in, r_out) @ B_r.mT).view(n, K, r_in, d_out)
            return [Factored(b, g.mT, None) for b, g in zip(B, G, strict=True)]
        r = B[0].shape[1]  # with the further directions
        eps = torch.stack([z[:, : d_out * r].to(dtype).view(K, d_out, r).mT for z in rest])  # (n, K, r, d_out)
        along = (eps[:, :, :r_in].reshape(n, K * r_in, d_out) @ B_r).view(n, K, r_in, r_out)
        inner = torch.addcmul(inner, change[:, None], along.to(inner.dtype))
        G = eps * rows.scale.to(dtype)
        G[:, :, :r_in] += (inner.to(dtype).view(n, K * r_in, r_out) @ B_r.mT).view(n, K, r_in, d_out)
        e: Sequence[Tensor | None] = [None] * n
        if self.beyond:
            e = list(torch.stack([z[:, d_out * r :] for z in rest]) * rows.scale[:, 0])
        return [Factored(b, g.mT, e_) for b, g, e_ in zip(B, G, e, strict=True)]


@dataclass(frozen=True)
class DenseGroup:
    """FFG-U layers of one M with the exact law's noise: draws are W itself, by a kernel, from a seed."""

    names: tuple[str, ...]
    layers: tuple[InducingFactors, ...]
    centre: Tensor  # (N, M_out, M_in)
    spread: Tensor
    Q_r: Tensor
    Q_c: Tensor
    p: Tensor  # (N, r_out)
    q: Tensor  # (N, r_in)
    sigma: Tensor  # (N,)
    scale: Tensor  # (N,)  λσ
    B_r: Tensor  # (Σ d_out, r_out)
    B_c: Tensor  # (Σ d_in, r_in)
    table: Tensor  # see the kernel

    def draw(self, noise: Sequence[Tensor]) -> list[Operand]:
        """Each layer's (K, normals) -> its K draws, one layer after the other."""
        return [f.draw(z.to(f.dtype), None) for f, z in zip(self.layers, noise, strict=True)]

    def draw_by(self, key: Tensor, K: int) -> list[Operand]:
        from dubito.models.posteriors.inducing_kernel import ALIGNED, draw_whole

        sizes = [f.shape[0] * f.shape[1] for f in self.layers]
        W = draw_whole(
            key, K, self.table, self.centre, self.spread, self.Q_r, self.Q_c, self.p, self.q, self.sigma, self.scale,
            self.B_r, self.B_c, sum(sizes), all(f.shape[0] % ALIGNED == 0 for f in self.layers),
        )  # fmt: skip
        each = zip(self.layers, W.split([K * size for size in sizes]), strict=True)
        return [Dense(w.view(K, f.shape[1], f.shape[0]).mT) for f, w in each]


def gather(factors: Mapping[str, InducingFactors], places: Mapping[str, int]) -> Gathered:
    """Groups of those that can be drawn together, and their factors side by side in memory."""
    ready = {name: f for name, f in factors.items() if isinstance(f.q_V, FrozenMeanField)}
    groups, layers = list[Group](), dict[str, Factors]()
    for indices in alike([_size(f) for f in ready.values()]):
        names = tuple(sorted((list(ready)[i] for i in indices), key=lambda name: ready[name].shape[0]))
        those, starts = [ready[name] for name in names], [places[name] for name in names]
        keyed = _by_kernel(those, starts)
        if those[0].forms_W and keyed:
            groups.append(dense := stack_dense(names, those, starts))
            layers |= zip(names, dense.layers, strict=True)
        elif not those[0].forms_W and (keyed or len(names) > 1):
            groups.append(group := stack(names, those, starts if keyed else None))
            stacked = [B_r for rows in group.rows for B_r in rows.B_r]
            own = [_within(f, group, i, B_r) for i, (f, B_r) in enumerate(zip(those, stacked, strict=True))]
            layers |= zip(names, own, strict=True)
    return groups, layers


def _within(
    f: InducingFactors, group: FactoredGroup | DenseGroup, i: int, B_r: Tensor, B: Tensor | None = None
) -> InducingFactors:
    """The layer's factors as views of the group's memory."""
    B = f.B if B is None else B
    matheron = replace(f.matheron, B_r=B_r, Q_r=group.Q_r[i], Q_c=group.Q_c[i], B_c=B[:, : len(f.matheron.q)])
    return replace(f, matheron=matheron, q_V=FrozenMeanField(group.centre[i], group.spread[i]), B=B)


def _size(f: InducingFactors) -> tuple[object, ...]:
    more: object = (f.B.shape[1], f.spans) if f.lam else None
    if f.forms_W:
        more = f.shape[1] % 4
    sides = (*f.q_V.centre.shape, len(f.matheron.p), len(f.matheron.q))  # type: ignore[union-attr]
    return *sides, more, f.shape[0] > LONG


def _stacked(those: Sequence[InducingFactors]) -> dict[str, Tensor]:
    """q(V) and the rotations of the layers, stacked."""
    laws, matheron = [f.q_V for f in those if isinstance(f.q_V, FrozenMeanField)], [f.matheron for f in those]
    return {
        "centre": torch.stack([q.centre for q in laws]),
        "spread": torch.stack([q.spread for q in laws]),
        "Q_r": torch.stack([m.Q_r for m in matheron]),
        "Q_c": torch.stack([m.Q_c for m in matheron]),
    }


def stack_dense(names: tuple[str, ...], those: Sequence[InducingFactors], places: list[int]) -> DenseGroup:
    """A group of layers whose draws are dense; `places`: where the normals of each begin."""
    matheron, like = [f.matheron for f in those], those[0].B
    B_r, B_c = (torch.cat([getattr(m, side) for m in matheron]) for side in ("B_r", "B_c"))
    outputs, inputs = [f.shape[0] for f in those], [f.shape[1] for f in those]
    sums = [before(outputs), before(inputs), before([a * b for a, b in zip(outputs, inputs, strict=True)])]
    table = torch.tensor(list(zip(places, outputs, inputs, *sums, strict=True)), dtype=torch.int32, device=like.device)
    group = DenseGroup(
        names=names,
        layers=tuple(those),
        **_stacked(those),
        p=torch.stack([m.p for m in matheron]),
        q=torch.stack([m.q for m in matheron]),
        sigma=torch.tensor([f.sigma for f in those], device=like.device),
        scale=torch.tensor([f.lam * f.sigma for f in those], device=like.device),
        B_r=B_r,
        B_c=B_c,
        table=table,
    )
    sides = zip(B_r.split(outputs), B_c.split(inputs), strict=True)
    own = [_within(f, group, i, r, c) for i, (f, (r, c)) in enumerate(zip(those, sides, strict=True))]
    return replace(group, layers=tuple(own))


def before(sizes: list[int]) -> list[int]:
    """For each size, the sum of those before it."""
    return [0, *accumulate(sizes)][:-1]


def stack(names: tuple[str, ...], those: Sequence[InducingFactors], places: list[int] | None) -> FactoredGroup:
    """A group of layers, given in the order of their d_out; `places`: where the normals of each begin, for a kernel."""
    matheron, like, noisy = [f.matheron for f in those], those[0].matheron.p, those[0].lam > 0
    rows, offset, B_r = [], 0, torch.cat([m.B_r for m in matheron])
    for indices in alike([f.shape[0] for f in those]):
        scale = [those[i].lam * those[i].sigma for i in indices]
        scaled = torch.tensor(scale, dtype=like.dtype, device=like.device).view(-1, 1, 1, 1) if noisy else None
        here = slice(offset, offset + len(indices) * those[indices[0]].shape[0])
        rows.append(Rows(B_r[here].view(len(indices), -1, B_r.shape[1]), scaled))
        offset = here.stop

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)

    B = tuple(f.B if noisy else f.matheron.B_c for f in those)
    return FactoredGroup(
        names=names,
        **_stacked(those),
        p=torch.stack([m.p for m in matheron])[:, None],
        q=torch.stack([m.q for m in matheron])[..., None],
        sigma=numbers([f.sigma for f in those]),
        scale=numbers([f.lam * f.sigma for f in those]) if noisy else None,
        B=B,
        rows=tuple(rows),
        B_r=B_r,
        beyond=noisy and not those[0].spans,
        table=None if places is None else _table([f.shape[0] for f in those], places, like.device),
    )


def _by_kernel(those: Sequence[InducingFactors], places: list[int]) -> bool:
    like = those[0]
    if not counted(like.B.device):
        return False
    from dubito.models.posteriors.inducing_kernel import suits

    M_out, M_in = like.q_V.centre.shape  # type: ignore[union-attr]
    inputs = [f.shape[1] for f in those] if like.forms_W else []
    ends = [
        *(place + f.normals for place, f in zip(places, those, strict=True)),
        sum(math.prod(f.shape) for f in those),
    ]
    return suits(M_out, M_in, [*places, *inputs]) and max(ends) < 1 << 31  # the kernels count in 32 bits


def _table(outputs: list[int], places: list[int], device: torch.device) -> Tensor:
    """For the kernel, by layer: where its normals begin, d_out, and the sum of d_out before it."""
    return torch.tensor(list(zip(places, outputs, before(outputs), strict=True)), dtype=torch.int32, device=device)
