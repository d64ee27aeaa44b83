"""torchvision's attention within shifted windows (Swin), with its projections as layers that are called.

torchvision reads the weights of the projections past their layers, which then cannot have posteriors.
"""

import copy
import math
import sys
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

APART = -100.0  # torchvision's; added to the logits of tokens that only the shift has put into one window
LARGEST_SCALE = math.log(100.0)  # of `logit_scale`


class WindowAttention(nn.Module):
    """Computes what torchvision's ShiftedWindowAttention does; parameters, buffers and layers have the same names.

    Tokens (B, H, W, dim) attend within windows of h × w = N tokens. A shift moves the windows by so many rows and
    columns, so that they lie across the edges of unshifted ones.
    """

    by_place: ClassVar[tuple[str, ...]] = ()  # modules whose inputs are places in a window: they have no posterior
    qkv: nn.Module
    proj: nn.Module
    relative_position_index: Tensor
    fixed_bias: Tensor | None  # see `fix_positions`

    def __init__(
        self,
        dim: int,
        window_size: tuple[int, int],
        shift_size: tuple[int, int],
        num_heads: int,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not _are_sizes(dim, window_size, shift_size, num_heads):
            raise ValueError("expected windows and shifts (height, width), and heads that divide the channels")
        self.dim, self.num_heads = dim, num_heads
        self.window_size, self.shift_size = window_size, shift_size
        self.qkv_bias, self.proj_bias = qkv_bias, proj_bias
        self.attention_dropout, self.dropout = attention_dropout, dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self._define_positions()
        self.register_buffer("relative_position_index", _differences(*window_size))
        self.register_buffer("fixed_bias", None, persistent=False)

    def _define_positions(self) -> None:
        """Parameters and buffers of the logits' bias, which depends on places in a window alone."""
        h, w = self.window_size
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), self.num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    @classmethod
    def of(cls, theirs: Any) -> Self:
        """From torchvision's, with the same parameters and buffers and copies of its layers."""
        sizes = theirs.qkv.in_features, tuple(theirs.window_size), tuple(theirs.shift_size), theirs.num_heads
        biases = theirs.qkv.bias is not None, theirs.proj.bias is not None
        with torch.device("meta"):
            ours = cls(*sizes, *biases, theirs.attention_dropout, theirs.dropout)
        held: dict[int, object] = {id(t): t for t in (*theirs.parameters(), *theirs.buffers())}
        ours._parameters.update(theirs._parameters)
        ours._buffers.update(theirs._buffers)
        ours._modules.update({name: copy.deepcopy(layer, held) for name, layer in theirs._modules.items()})
        return ours.train(theirs.training)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1:3]
        h, w = self.window_size
        if H % h or W % w:
            x = F.pad(x, (0, 0, 0, -W % w, 0, -H % h))
        rows, columns = x.shape[1:3]
        down = self.shift_size[0] if rows > h else 0  # a window as high as the map is not shifted
        right = self.shift_size[1] if columns > w else 0
        if down or right:
            x = x.roll((-down, -right), (1, 2))
        q, k, v = (part.flatten(0, 1).transpose(1, 2) for part in self._projected(self._windows(x)))
        mixed = self._mixed(q, k, v, self._bias(rows, columns, down, right, x.device))  # (B·windows, heads, N, d)
        tokens = mixed.transpose(1, 2).flatten(2).unflatten(1, (h, w))
        x = tokens.unflatten(0, (-1, rows // h, columns // w)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if down or right:
            x = x.roll((down, right), (1, 2))
        out = self.proj(x[:, :H, :W])  # torchvision projects the padding too, and then leaves it out
        return F.dropout(out, self.dropout) if self.training else out

    def _windows(self, x: Tensor) -> Tensor:
        """(B, rows, columns, ...) -> (B, windows, N, ...)."""
        h, w = self.window_size
        windows: Tensor = x.unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return windows

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of (B, windows, N, dim), each (B, windows, N, heads, d); logits are q kᵀ."""
        q, k, v = self._by_head(self.qkv(x))
        return q * (self.dim // self.num_heads) ** -0.5, k, v

    def _by_head(self, qkv: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return parts

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        dropped = self.attention_dropout if self.training else 0.0
        if len(bias) == 1:
            return F.scaled_dot_product_attention(q, k, v, bias, dropped, scale=1.0)
        # torch's function would need the bias of each window once for each input
        logits = ((q @ k.mT).unflatten(0, (-1, len(bias))) + bias).flatten(0, 1)
        weights = logits.softmax(-1)
        return (F.dropout(weights, dropped) if dropped else weights) @ v

    def _bias(self, rows: int, columns: int, down: int, right: int, device: torch.device) -> Tensor:
        """What is added to the logits: (1, heads, N, N); (windows, heads, N, N) where windows are shifted."""
        bias = self.position_bias() if self.fixed_bias is None else self.fixed_bias
        if not down and not right:
            return bias[None]
        # the last `down` rows and `right` columns were rolled there from the other edge: they are no neighbours
        below = torch.arange(rows, device=device) >= rows - down
        beside = torch.arange(columns, device=device) >= columns - right
        part = self._windows(2 * below[None, :, None] + beside)[0]  # (windows, N)
        apart = (part[:, None, :, None] != part[:, None, None]) * APART
        return bias + apart.to(bias.dtype)

    def position_bias(self) -> Tensor:
        """The bias of each pair of places in a window: (heads, N, N)."""
        return self._between_places(self.relative_position_bias_table)

    def fix_positions(self) -> None:
        """Compute `position_bias` once, for weights that no longer change."""
        self._buffers = dict(self._buffers)  # its own, as this may be a shallow copy
        with torch.no_grad():
            self.fixed_bias = self.position_bias()

    def _between_places(self, table: Tensor) -> Tensor:
        """Numbers for each difference of two places (differences, heads) -> for each pair (heads, N, N)."""
        N = math.prod(self.window_size)
        pairs: Tensor = table.index_select(0, self.relative_position_index).unflatten(0, (N, N))
        return pairs.permute(2, 0, 1)

    def extra_repr(self) -> str:
        sizes = f"{self.dim}, window_size={self.window_size}, shift_size={self.shift_size}, heads={self.num_heads}"
        return f"{sizes}, attention_dropout={self.attention_dropout}, dropout={self.dropout}"


class WindowAttentionV2(WindowAttention):
    """Computes what torchvision's ShiftedWindowAttentionV2 does: logits are scaled cosines, and the bias of each pair
    of places comes from a small network."""

    by_place = ("cpb_mlp",)
    relative_coords_table: Tensor

    def _define_positions(self) -> None:
        self.register_buffer("relative_coords_table", _coordinates(*self.window_size))
        self.logit_scale = nn.Parameter(torch.full((self.num_heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, self.num_heads, bias=False)
        )

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = self.logit_scale.clamp(max=LARGEST_SCALE).exp()[..., 0]  # (heads, 1)
        windows = x.shape[1:3]
        if self.qkv_bias:
            # torchvision sets the keys' part of this bias to zero in every pass. A posterior draws that part too, and
            # the layer may not form its draws, so the bias is read off a token of zeros and taken from the keys: with
            # draws as weights torchvision's module answers the same, and that part has no gradient.
            qkv = self.qkv(F.pad(x.flatten(1, 2), (0, 0, 0, 1)))
            q, k, v = self._by_head(qkv[:, :-1].unflatten(1, windows))
            k = k - self._by_head(qkv[:, -1:, None])[1]
        else:
            q, k, v = self._by_head(self.qkv(x))
        return _directions(q) * scale, _directions(k), v

    def position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * self._between_places(table).sigmoid()


def kind_of(module: nn.Module) -> type[WindowAttention] | None:
    """The class of ours that computes what this module of torchvision does; None for any other module."""
    swin = _torchvisions()
    if swin is None or not all(type(getattr(module, name, None)) is nn.Linear for name in ("qkv", "proj")):
        return None
    kinds = {swin.ShiftedWindowAttention: WindowAttention, swin.ShiftedWindowAttentionV2: WindowAttentionV2}
    kind: type[WindowAttention] | None = kinds.get(type(module))
    return kind


def reads_past(module: nn.Module) -> bool:
    """Whether it computes by torchvision's code, which reads the weights of `qkv` and `proj` without calling them."""
    swin = _torchvisions()
    if swin is None:
        return False
    theirs = (swin.ShiftedWindowAttention, swin.ShiftedWindowAttentionV2)
    return isinstance(module, theirs) and type(module).forward in [kind.forward for kind in theirs]


def _torchvisions() -> Any:
    """torchvision's module with these classes; None where nobody has imported it, for that takes long."""
    return sys.modules.get("torchvision.models.swin_transformer")


def _are_sizes(dim: int, window_size: tuple[int, int], shift_size: tuple[int, int], num_heads: int) -> bool:
    if len(window_size) != 2 or len(shift_size) != 2:
        return False
    return min(dim, *window_size, num_heads) > 0 and min(shift_size) >= 0 and dim % num_heads == 0


def _directions(x: Tensor) -> Tensor:
    """Vectors of length 1; zeros stay zeros, with gradients of zero.

    Keys of padding are zeros. F.normalize divides their gradients by 1e-12, after which those of the bias no longer
    cancel, and in float16 it divides by zero.
    """
    least = max(1e-12, torch.finfo(x.dtype).tiny)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=least) * (length > least)


def _differences(h: int, w: int) -> Tensor:
    """For each pair of places in a window, the number of their difference among all differences: (N²,)."""
    row, column = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
    down, right = row[:, None] - row + h - 1, column[:, None] - column + w - 1
    return (down * (2 * w - 1) + right).flatten()


def _coordinates(h: int, w: int) -> Tensor:
    """Each difference of places on a logarithmic scale: (1, 2h − 1, 2w − 1, 2)."""
    axes = [8 * torch.arange(1 - n, n, dtype=torch.float32) / (n - 1) for n in (h, w)]
    differences = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)[None]
    table: Tensor = differences.sign() * (differences.abs() + 1).log2() / 3
    return table
