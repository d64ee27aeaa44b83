"""The free numbers of a posterior: plain or positive, each of which can be pruned."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Optional(nn.Module):
    """A module with a buffer that may be None: a state with or without it loads into either."""

    optional: str

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        there = state_dict.get(prefix + self.optional)
        like = next(self.parameters())
        setattr(self, self.optional, None if there is None else torch.empty_like(there, device=like.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Free(Optional):
    """A tensor of free numbers; with a mask, the pruned ones are exactly zero and get no gradient."""

    keep: Tensor | None
    optional = "keep"

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)
        self.register_buffer("keep", None)

    def forward(self) -> Tensor:
        return self.value if self.keep is None else self.value * self.keep


class Positive(Optional):
    """A tensor held above `floor` and, where there is a cap, below it; both bounds are smooth.

    A hard clamp has no gradient beyond its bound, so a value that starts there never moves; a softplus
    (no cap) or a scaled sigmoid (cap) has one everywhere. Pruned entries are exactly zero.
    """

    keep: Tensor | None
    optional = "keep"

    def __init__(self, value: Tensor, floor: float, cap: float | None = None) -> None:
        super().__init__()
        if cap is not None and cap <= floor:
            raise ValueError(f"the cap {cap} must be above the floor {floor}")
        self.floor, self.cap = floor, cap
        self.raw = nn.Parameter(self._unbound(value.double()).to(value.dtype))
        self.register_buffer("keep", None)

    def forward(self) -> Tensor:
        if self.cap is None:
            value = self.floor + F.softplus(self.raw)
        else:
            value = self.floor + (self.cap - self.floor) * torch.sigmoid(self.raw)
        return value if self.keep is None else value * self.keep

    def _unbound(self, value: Tensor) -> Tensor:
        """The raw tensor that gives `value`, pulled a little inside the bounds where it lies outside them."""
        if self.cap is None:
            above = (value - self.floor).clamp(min=1e-3 * max(self.floor, 1e-6))
            return above + torch.log(-torch.expm1(-above))  # the inverse of softplus, safe for small values
        share = (value - self.floor) / (self.cap - self.floor)
        return torch.logit(share.clamp(1e-6, 1 - 1e-3))  # near the cap, and only there, the gradient grows small

    def extra_repr(self) -> str:
        return f"{tuple(self.raw.shape)}, floor={self.floor}, cap={self.cap}"


def count(module: nn.Module) -> int:
    """Parameters that must be stored: all of them, less the pruned ones."""
    pruned = 0
    for part in module.modules():
        if isinstance(part, Free | Positive) and part.keep is not None:
            pruned += part.keep.numel() - int(part.keep.sum())
    return sum(p.numel() for p in module.parameters()) - pruned
