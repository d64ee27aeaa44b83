"""Functions drawn from a Gaussian process by their values at inducing inputs.

The kernel is squared-exponential with a length scale for each input. L is the Cholesky factor of k(Z, Z) at M inducing
inputs Z, their values are u = L w with the prior N(0, I) of w, and given u the process at an input x is

    f(x) = w a(x) + e √(k(x, x) − ‖a(x)‖²)     a(x) = L⁻¹k(Z, x), e standard normal

[Ober21, appendix E]. All of it is computed in float64: inducing inputs may lie close together or coincide, and then
k(Z, Z) is singular but for its jitter, which float32 would not see.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

JITTER = 1e-6  # added to the diagonal of k(Z, Z), times the variance of the process: u is observed with that noise
LEAST = 1e-12  # of the variance that is left given u, times that of the process: its root has a gradient


def correlations(x: Tensor, Z: Tensor) -> Tensor:
    """exp(−‖x − z‖²/2) of rows over their length scales: (..., n, d) and (..., M, d) -> (..., n, M)."""
    centre = Z.mean(-2, keepdim=True)  # far from the origin, differences of squares would cancel
    x, Z = x - centre, Z - centre
    squares = x.square().sum(-1)[..., :, None] + Z.square().sum(-1)[..., None, :] - 2 * x @ Z.mT
    return (-squares.clamp(min=0) / 2).exp()


def root_of(Z: Tensor, variance: Tensor) -> Tensor:
    """L of k(Z, Z) with its jitter, Z over the length scales: (..., M, d) -> (..., M, M)."""
    K = correlations(Z, Z) + JITTER * torch.eye(Z.shape[-2], dtype=Z.dtype, device=Z.device)
    root: Tensor = torch.linalg.cholesky_ex(K).L * variance.sqrt()
    return root


@dataclass(frozen=True)
class Functions:
    """K functions, given by w at inducing inputs, which each draw has of its own or all draws share."""

    Z: Tensor  # (K, M, d_in) or (M, d_in)  over the length scales
    L: Tensor  # (K, M, M) or (M, M)
    w: Tensor  # (K or 1, d_out, M)
    e: Tensor | None  # (K or 1, d_out)  one normal for all inputs; None: another for every input, in training
    length: Tensor  # (d_in,)
    variance: Tensor  # ()

    def part(self, offset: int, k: int) -> "Functions":
        """The k draws that start at `offset`."""
        some = slice(offset, offset + k)
        own: dict[str, Any] = {"Z": self.Z[some], "L": self.L[some]} if self.Z.dim() == 3 else {}
        return replace(self, w=self.w[some], e=None if self.e is None else self.e[some], **own)

    def joined(self, others: "list[Functions]") -> "Functions":
        """These draws and those of the others, all of the same process."""
        all_: list[Functions] = [self, *others]
        own: dict[str, Any] = (
            {"Z": torch.cat([f.Z for f in all_]), "L": torch.cat([f.L for f in all_])} if self.Z.dim() == 3 else {}
        )
        e = None if self.e is None else torch.cat([f.e for f in all_ if f.e is not None])
        return replace(self, w=torch.cat([f.w for f in all_]), e=e, **own)

    @property
    def own(self) -> list[Tensor]:
        """What each draw has of its own."""
        return [self.w, *([] if self.e is None else [self.e]), *([self.Z, self.L] if self.Z.dim() == 3 else [])]

    def at_points(self) -> Tensor:
        """u: (K, M, d_out)."""
        return self.L @ self.w.mT

    def __call__(self, x: Tensor) -> Tensor:
        """Of n inputs for each draw: (K, n, d_in) -> (K, n, d_out)."""
        cross = self.variance * correlations(x.double() / self.length, self.Z).mT  # (K, M, n)
        a: Tensor = torch.linalg.solve_triangular(self.L, cross, upper=False)
        left = (self.variance - a.square().sum(-2)).clamp(min=LEAST * self.variance.detach()).sqrt()  # (K, n)
        mean = a.mT @ self.w.mT
        e = torch.randn_like(mean) if self.e is None else self.e[:, None]
        return (mean + left[..., None] * e).to(x.dtype)

    def beyond(self, x: Tensor, rows: int) -> Tensor:
        """Of inputs (K, n, ..., d_in), the first `rows` of which are the inducing inputs: u itself there."""
        known = self.at_points().to(x.dtype).view(*x[:, :rows].shape[:-1], -1)
        rest = x[:, rows:]
        return torch.cat([known, self(rest.flatten(1, -2)).view(*rest.shape[:-1], known.shape[-1])], 1)
