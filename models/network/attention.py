"""torch's attention with its projections as layers of their own, so that they can have posteriors.

`nn.MultiheadAttention` keeps the projections of queries, keys and values in one bare parameter and reads the weights of
the last projection past its layer.
"""

import copy
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models.network import window_attention


class Attention(nn.Module):
    """Computes what the nn.MultiheadAttention does that it was made of, with the same parameters."""

    in_proj: nn.Module
    out_proj: nn.Module
    in_proj_bias = None  # torch's encoder layers ask for it; without one they call this module, not a kernel of theirs

    def __init__(self, of: nn.MultiheadAttention) -> None:
        super().__init__()
        assert can_open(of)
        self.embed_dim, self.num_heads, self.batch_first = of.embed_dim, of.num_heads, of.batch_first
        self.dropout, self.biased = of.dropout, of.in_proj_bias is not None
        assert isinstance(of.in_proj_weight, nn.Parameter)
        self.in_proj = _linear(of.in_proj_weight, of.in_proj_bias)
        last = of.out_proj
        assert isinstance(last.weight, nn.Parameter)
        self.out_proj = _linear(last.weight, last.bias)
        self.train(of.training)

    def closed(self) -> nn.MultiheadAttention:
        """torch's own of these sizes, without storage."""
        with torch.device("meta"):
            theirs = nn.MultiheadAttention(
                self.embed_dim, self.num_heads, self.dropout, self.biased, batch_first=self.batch_first
            )
        return theirs.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; `is_causal` only says of the mask what it holds, so it is not needed."""
        single = query.dim() == 2
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))  # (N, heads, L, d)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropped = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (logits if mask is None else logits + mask).softmax(-1)
            if dropped:
                weights = F.dropout(weights, dropped)
            mixed = weights @ v
            if average_attn_weights:
                weights = weights.mean(1)
            if single:
                weights = weights[0]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if single:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (N, L, E)."""
        whole: dict[int, tuple[Tensor, ...]] = {}  # one pass for inputs that are the same
        for x in (query, key, value):
            if id(x) not in whole:
                rows = x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
                whole[id(x)] = self.in_proj(rows).chunk(3, -1)
        return tuple(whole[id(x)][i] for i, x in enumerate((query, key, value)))

    def _heads(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return apart

    def _mask(self, attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """What is added to the logits, which have the shape (N, heads, L, S)."""
        parts = []
        if attention is not None:
            parts.append(attention if attention.dim() == 2 else attention.unflatten(0, (-1, self.num_heads)))
        if padding is not None:
            parts.append(padding.view(-1, 1, 1, padding.shape[-1]))
        if not parts:
            return None
        total = torch.zeros((), dtype=like.dtype, device=like.device)
        for part in parts:
            if part.dtype == torch.bool:
                part = torch.zeros_like(part, dtype=like.dtype).masked_fill(part, -math.inf)
            total = total + part
        return total

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


def can_open(module: nn.Module) -> bool:
    """Whether it is an attention whose projections can be layers: of one size, and without rows added to its keys."""
    return (
        type(module) is nn.MultiheadAttention
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def opened(net: nn.Module, names: Iterable[str] | None = None) -> nn.Module:
    """The network with such attentions opened: all of them, or those with a projection among the names of layers.

    Those of torchvision within windows are opened in any case. Itself where there are none, else a copy that shares
    its parameters.
    """
    wanted = None if names is None else {name.rpartition(".")[0] for name in names}
    modules = dict(net.named_modules())
    swaps: dict[nn.Module, nn.Module] = {
        m: Attention(m) for name, m in modules.items() if can_open(m) and (wanted is None or name in wanted)
    }
    swaps |= {m: kind.of(m) for m in modules.values() if (kind := window_attention.kind_of(m)) is not None}
    if not swaps:
        return net
    memo: dict[int, object] = {id(old): new for old, new in swaps.items()}
    memo |= {id(t): t for t in (*net.parameters(), *net.buffers())}
    return copy.deepcopy(net, memo)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A layer that holds these very parameters."""
    d_out, d_in = weight.shape
    layer = nn.Linear(d_in, d_out, bias=bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer
