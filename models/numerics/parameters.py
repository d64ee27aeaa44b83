"""Free parameters of a posterior: real or positive; either can be pruned."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIANGLE = "subnetwork.triangle"  # key in a state dict of the Cholesky factor of a subnetwork's precision


class Optional(nn.Module):
    """A module with a buffer that may be None: a state dict with or without it loads into either."""

    optional: str

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        there = state_dict.get(prefix + self.optional)
        like = next(self.parameters())
        blank = None if there is None else torch.empty(there.shape, dtype=there.dtype, device=like.device)
        setattr(self, self.optional, blank)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Free(Optional):
    """A real tensor; with a mask, pruned entries are exactly zero and get no gradient."""

    keep: Tensor | None
    optional = "keep"

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)
        self.register_buffer("keep", None)

    def forward(self) -> Tensor:
        return self.value if self.keep is None else self.value * self.keep


class Positive(Optional):
    """A tensor above `floor` and, if there is a cap, below it, by a softplus or a scaled sigmoid.

    These have a gradient everywhere; a hard clamp has none beyond its bound, so a value that starts there would never
    move. Pruned entries are exactly zero.
    """

    keep: Tensor | None
    optional = "keep"

    def __init__(self, value: Tensor, floor: float, cap: float | None = None) -> None:
        super().__init__()
        if cap is not None and cap <= floor:
            raise ValueError(f"the cap {cap} must be above the floor {floor}")
        self.floor, self.cap = floor, cap
        self.raw = nn.Parameter(value if value.is_meta else self._unbound(value.double()).to(value.dtype))
        self.register_buffer("keep", None)

    def forward(self) -> Tensor:
        return self._prune(self._bound(self.raw))

    def _bound(self, raw: Tensor) -> Tensor:
        if self.cap is None:
            return self.floor + F.softplus(raw)
        return self.floor + (self.cap - self.floor) * torch.sigmoid(raw)

    def _prune(self, value: Tensor) -> Tensor:
        return value if self.keep is None else value * self.keep

    def _unbound(self, value: Tensor) -> Tensor:
        """The raw tensor for `value`, which is moved slightly inside the bounds if it lies outside."""
        if self.cap is None:
            above = (value - self.floor).clamp(min=1e-3 * max(self.floor, 1e-6))
            return above + torch.log(-torch.expm1(-above))  # inverse of softplus, stable for small values
        share = (value - self.floor) / (self.cap - self.floor)
        return torch.logit(share.clamp(1e-6, 1 - 1e-3))  # the gradient is small only near the cap

    def extra_repr(self) -> str:
        return f"{tuple(self.raw.shape)}, floor={self.floor}, cap={self.cap}"


def together(parts: Sequence[Positive]) -> list[Tensor]:
    """The value of each part, computed together for all parts with the same bounds, which saves kernels."""
    by_index: dict[int, Tensor] = {}
    for indices in alike([(p.floor, p.cap, p.raw.dtype, p.raw.device) for p in parts]):
        values = parts[indices[0]]._bound(in_a_row([parts[i].raw for i in indices]))
        of_each = parted(values, [parts[i].raw.numel() for i in indices])
        by_index |= {i: parts[i]._prune(v.view_as(parts[i].raw)) for i, v in zip(indices, of_each, strict=True)}
    return [by_index[i] for i in range(len(parts))]


def alike(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indices of equal keys, by key in order of first occurrence."""
    places: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.values())


def neighbours(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indices of runs of equal keys."""
    runs: list[list[int]] = []
    for i, key in enumerate(keys):
        if i and keys[i - 1] == key:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    """All entries as one vector; a single tensor is not copied."""
    return torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0].flatten()


def parted(tensor: Tensor, lengths: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    """`split`, without the copy of the gradient that it makes for a single part."""
    return tensor.split(list(lengths), dim) if len(lengths) > 1 else [tensor]


def numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """A vector of numbers known on the host, made by fills: a graph cannot copy from the host."""
    return torch.cat([like.new_full((len(indices),), values[indices[0]]) for indices in neighbours(values)])


def keep_largest(parts: Sequence[Free] | Sequence[Positive], scores: Sequence[Tensor], n: int) -> None:
    """Prune all but the n entries of the largest scores, ties broken by order; what was pruned before stays pruned."""
    if not parts:
        return
    for part, score in zip(parts, scores, strict=True):
        if isinstance(part.keep, Tensor):
            score[~part.keep] = -1
    n = min(n, sum(int((s >= 0).sum()) for s in scores))
    flat = torch.cat([s.flatten() for s in scores]).cpu()
    kept = torch.zeros(len(flat), dtype=torch.bool)
    if n:
        least = flat.kthvalue(len(flat) - n + 1).values  # the n-th largest
        kept = flat > least
        ties = (flat == least).nonzero()[:, 0]
        kept[ties[: n - int(kept.sum())]] = True
    for part, mask in zip(parts, kept.split([s.numel() for s in scores]), strict=True):
        value = next(part.parameters()).data
        part.keep = mask.view(value.shape).to(value.device)
        value.masked_fill_(~mask.view(value.shape).to(value.device), 0)  # nothing is left of what was pruned


def owners(net: nn.Module) -> Counter[nn.Parameter]:
    """In how many modules each parameter stands."""
    return Counter(p for module in net.modules() for p in module._parameters.values() if p is not None)


def count(module: nn.Module) -> int:
    """Number of stored parameters: all but the pruned ones, and a subnetwork's triangle."""
    pruned = 0
    for part in module.modules():
        if isinstance(part, Free | Positive) and part.keep is not None:
            pruned += part.keep.numel() - int(part.keep.sum())
    triangles = sum(b.numel() for name, b in module.named_buffers() if name.endswith(TRIANGLE))
    return sum(p.numel() for p in module.parameters()) - pruned + triangles
