"""The bank: few points that stand for the features of the training data, and how far other features are from them.

Distances are as in [Sun22] (arXiv 2204.06507): between features of length 1, to the k-th nearest. The points are the
centres of clusters, so k is 1. Each member of an ensemble has features of its own, and so points of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models.manifest import FeatureBankEntry
from dubito.models.posteriors.protocol import Value

LEVELS = 127  # of int8, on either side of zero


@dataclass(frozen=True)
class Nearest(Value):
    """Reads the distance of features to the nearest point off a pass."""

    points: Tensor  # (E, N, d)  of each member; E is 1 where there are none
    columns: int = 1

    def __call__(self, features: Tensor, K: int, member: Callable[[int], Tensor]) -> Tensor:
        z = F.normalize(features.float(), dim=-1)
        E, _, d = self.points.shape
        if E == 1:
            return _nearest(z, self.points[0])[:, None]
        chosen = self.points[member(E).to(z.device)]  # (K, N, d)
        return _nearest(z.view(K, -1, d), chosen).reshape(-1, 1)


def _nearest(z: Tensor, points: Tensor) -> Tensor:
    """Distances of z (…, n, d) to the nearest of the points (…, N, d): (…, n)."""
    squares = points.square().sum(-1)[..., None, :] - 2 * z @ points.mT  # less |z|²
    return (z.square().sum(-1) + squares.amin(-1)).clamp(min=0).sqrt()


class FeatureBank(nn.Module):
    """The points as they are stored: int8, and a scale for each."""

    levels: Tensor
    scale: Tensor

    def __init__(self, levels: Tensor, scale: Tensor, entry: FeatureBankEntry) -> None:
        super().__init__()
        self.register_buffer("levels", levels)  # (E, N, d)
        self.register_buffer("scale", scale)  # (E · N,)
        self.entry = entry  # what an artifact says of it

    @classmethod
    def of(cls, points: Tensor, layer: str) -> "FeatureBank":
        """A bank of the points (E, N, d)."""
        scale = points.abs().amax(-1).clamp(min=1e-12) / LEVELS
        levels = (points / scale[..., None]).round().to(torch.int8)
        E, N, d = points.shape
        return cls(levels, scale.flatten(), FeatureBankEntry(layer=layer, members=E, points=N, features=d))

    @classmethod
    def blank(cls, entry: FeatureBankEntry) -> "FeatureBank":
        """A bank of the right size, into which tensors can be loaded."""
        shape = (entry.members, entry.points, entry.features)
        return cls(torch.empty(shape, dtype=torch.int8), torch.empty(shape[0] * shape[1]), entry)

    def reading(self) -> Nearest:
        return Nearest(self.levels.float() * self.scale.float().view(*self.levels.shape[:2], 1))
