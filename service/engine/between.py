"""What runs between the Bayesian layers on a GPU, by kernels of ours where these are faster than torch's.

LayerNorm, depthwise convolutions with what follows them, and max pooling: a pass of K draws has K times the rows, and
torch's kernels for these are slow for many short rows. Which is faster is measured when a model loads.
"""

import hashlib
import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.models.network.geometry import Execution
from dubito.models.network.normalisation import ScaleShift
from dubito.service.engine.fusion import (
    FUNCTIONS,
    SECOND_TO_LAST,
    Activation,
    activation_of,
    chain,
    channel_norm,
    constant,
    only_user,
    permuted,
    without_hooks,
)

WIDEST = 8192  # of the rows that are normalised
LARGEST_SIDE = 7  # of what a kernel takes, which has code for each tap


class Between(nn.Module):
    """Operators on activations (rows, ...), by torch ("loop") or by kernels."""

    executions: tuple[Execution, ...] = ("loop", "fused")
    what: tuple[object, ...]  # all that their speed depends on, beside the inputs

    def __init__(self) -> None:
        super().__init__()
        self.chosen: Mapping[int, Execution] = {}  # by rows
        self.wrong: set[Execution] = set()  # executions with wrong results

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self._nearest(len(x)) if self.chosen and self.suits(x) else "loop")

    def _nearest(self, rows: int) -> Execution:
        execution = self.chosen[min(self.chosen, key=lambda known: abs(math.log(known / rows)))]
        return "loop" if execution in self.wrong else execution

    def suits(self, x: Tensor) -> bool:
        return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() > 0

    def case(self, x: Tensor) -> str:
        """Cache key of what was measured."""
        parts = (type(self).__name__, self.what, tuple(x.shape), x.stride(), str(x.dtype))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def compute(self, x: Tensor, execution: Execution) -> Tensor:
        raise NotImplementedError


class Norm(Between):
    """LayerNorm over the last axis."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.register_buffer("weight", None if weight is None else weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.what = (size, weight is not None, bias is not None)

    def suits(self, x: Tensor) -> bool:
        same = all(t is None or t.dtype == x.dtype for t in (self.weight, self.bias))
        return super().suits(x) and same and x.shape[-1] == self.size

    def compute(self, x: Tensor, execution: Execution) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps) if execution == "loop" else self.of(x)

    def of(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """By the kernel, of x + shift."""
        from dubito.service.engine.plain_kernels import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps, shift)


class MaxPool(Between):
    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool
        self.side, self.stride, self.padding = (_both(n) for n in (pool.kernel_size, pool.stride, pool.padding))
        self.what = (self.side, self.stride, self.padding)

    def suits(self, x: Tensor) -> bool:
        return super().suits(x) and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)

    def compute(self, x: Tensor, execution: Execution) -> Tensor:
        if execution == "loop":
            return self.pool(x)  # type: ignore[no-any-return]
        from dubito.service.engine.plain_kernels import max_pool

        return max_pool(x, self.side, self.stride, self.padding)


class Depthwise(Between):
    """A depthwise convolution, then optionally scale and shift and an activation, or LayerNorm over the channels, which
    are last in what comes out then.

    "parted": the convolution is torch's, and one kernel does what follows.
    """

    executions = ("loop", "fused", "parted")
    taps: Tensor  # (side, side, C), in float32, as are the others
    scale: Tensor  # (C,)
    shift: Tensor

    def __init__(
        self,
        conv: nn.Conv2d,
        affine: ScaleShift | None = None,
        then: Activation | None = None,
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.conv, self.affine, self.then, self.norm = conv, affine, then, norm
        C, device = conv.out_channels, conv.weight.device
        scale, shift = torch.ones(C, device=device), torch.zeros(C, device=device)
        if affine is not None:
            scale, shift = affine.scale.detach().float(), affine.shift.detach().float()
        if conv.bias is not None:
            shift = shift + scale * conv.bias.detach().float()
        self.register_buffer("taps", conv.weight.detach()[:, 0].permute(1, 2, 0).float().contiguous(), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.stride, self.padding = _both(conv.stride), _both(conv.padding)
        follows = (conv.bias is not None, affine is not None, then, None if norm is None else norm.what)
        self.what = (tuple(conv.weight.shape), self.stride, self.padding, *follows)

    def suits(self, x: Tensor) -> bool:
        laid = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)  # as what comes out
        return super().suits(x) and laid and x.dtype == self.conv.weight.dtype

    def compute(self, x: Tensor, execution: Execution) -> Tensor:
        if execution == "loop":
            return self._by_torch(x)
        from dubito.service.engine.kernels import Epilogue
        from dubito.service.engine.plain_kernels import depthwise, finish

        after = Epilogue(self.scale, self.shift, None, self.then)
        if execution == "fused":
            out = depthwise(x, self.taps, self.stride, self.padding, after)
            return out if self.norm is None else self.norm.of(out.permute(SECOND_TO_LAST))
        out = F.conv2d(x, self.conv.weight, None, self.stride, self.padding, 1, self.conv.groups)
        return finish(out, after) if self.norm is None else self.norm.of(out.permute(SECOND_TO_LAST), self.shift)

    def _by_torch(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        if self.norm is not None:
            return self.norm.compute(out.permute(SECOND_TO_LAST), "loop")
        if self.affine is not None:
            out = self.affine(out)
        return out if self.then is None else FUNCTIONS[self.then](out)


def with_between(form: nn.Module) -> nn.Module:
    """The form of a network for a GPU: operators between its units may be computed by kernels."""
    if not isinstance(form, fx.GraphModule) or find_spec("triton") is None:
        return form
    graph = fx.Graph()
    graph.output(graph.graph_copy(form.graph, {}))
    root = fx.GraphModule(form, graph)
    modules, taken = without_hooks(root), set[fx.Node]()
    for number, node in enumerate(list(graph.nodes)):
        if node in taken:
            continue
        one, last = _between(root, modules, modules.get(str(node.target)) if node.op == "call_module" else None, node)
        if one is None:
            continue
        root.add_submodule(name := f"between_{number}", one.eval())
        with graph.inserting_before(node):  # here: what it reads may be changed in place later
            new = graph.call_module(name, (node.args[0],))
        last.replace_all_uses_with(new)
        for old in chain(node, last):
            taken.add(old)
            graph.erase_node(old)
    graph.lint()
    root.recompile()
    return root


def _between(
    form: fx.GraphModule, modules: Mapping[str, nn.Module], module: nn.Module | None, node: fx.Node
) -> tuple[Between | None, fx.Node]:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None, node
    if type(module) is nn.LayerNorm and len(node.args) == 1 and not node.kwargs:
        return _norm(module.normalized_shape, module.weight, module.bias, module.eps), node
    if node.op == "call_function" and node.target is F.layer_norm:
        return _norm_of_call(form, node), node
    if type(module) is nn.MaxPool2d and _poolable(module):
        return MaxPool(module), node
    if type(module) is nn.Conv2d and _depthwise(module):
        return _with_following(form, modules, module, node)
    return None, node


def _with_following(
    form: fx.GraphModule, modules: Mapping[str, nn.Module], conv: nn.Conv2d, node: fx.Node
) -> tuple[Between, fx.Node]:
    last, affine, then = node, None, None
    if (after := only_user(last)) is not None:
        if (
            permuted(modules.get(str(after.target)), after) == SECOND_TO_LAST
            and (normed := only_user(after)) is not None
        ):
            norm, last = _between(form, modules, modules.get(str(normed.target)), normed)
            if isinstance(norm, Norm) and norm.size == conv.out_channels:
                return Depthwise(conv, norm=norm), last
            last = node
        affine = channel_norm(modules.get(str(after.target)), after, conv.out_channels)
        last = last if affine is None else after
    if (after := only_user(last)) is not None:
        then = activation_of(modules.get(str(after.target)), after)
        last = last if then is None else after
    return Depthwise(conv, affine, then), last


def _norm(sizes: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Norm | None:
    sizes = tuple(sizes) if isinstance(sizes, list | tuple) else (sizes,)
    if len(sizes) != 1 or not isinstance(sizes[0], int) or sizes[0] > WIDEST:
        return None
    return Norm(sizes[0], weight, bias, eps)


def _norm_of_call(form: fx.GraphModule, node: fx.Node) -> Norm | None:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    affine: dict[str, Tensor | None] = {}
    for name in ("weight", "bias"):
        value = given.get(name)
        affine[name] = constant(form, value) if isinstance(value, fx.Node) else None
        if value is not None and affine[name] is None:
            return None
    eps = given.get("eps", 1e-5)
    return _norm(given.get("normalized_shape"), **affine, eps=eps) if isinstance(eps, float) else None


def _poolable(pool: nn.MaxPool2d) -> bool:
    even = all(_both(n) is not None for n in (pool.kernel_size, pool.stride, pool.padding))
    small = even and _both(pool.kernel_size) <= LARGEST_SIDE
    return small and _both(pool.dilation) == 1 and not pool.ceil_mode and not pool.return_indices


def _depthwise(conv: nn.Conv2d) -> bool:
    alone = conv.groups == conv.in_channels == conv.out_channels > 1 and conv.padding_mode == "zeros"
    even = all(_both(n) is not None for n in (conv.kernel_size, conv.stride, conv.padding))
    return alone and even and _both(conv.dilation) == 1 and _both(conv.kernel_size) <= LARGEST_SIDE


def _both(size: Any) -> Any:
    """The number for both axes; None where they differ."""
    if isinstance(size, int):
        return size
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 and isinstance(size[0], int) else None
