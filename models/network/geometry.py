"""How a weight matrix acts on activations: linear layers and convolutions, K draws folded into the batch.

W is d_out × d_in, a convolution's (c_out, c_in/groups, *kernel) kernel flattened; with a bias, W's last column is the
bias and every input patch carries a last entry 1, at padded borders too.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models.posteriors.blocks import Blocks
from dubito.models.posteriors.functions import Functions
from dubito.models.posteriors.protocol import Dense, Dropped, Factored, Operand

FEW, MANY = 8, 32  # up to so few filters, from so many channels on, folding beats a CPU's convolution

# loop: dense weights, draw by draw; batch: all draws in one call; unfold: one product of all patches and weights;
# factored: without W, but for blocks that are faster with it. By GPU kernels that include the operators after the
# layer: fused and parted form no W, in one kernel or two, grouped has dense weights; mixed starts from what the kernel
# of the layer before has made
Execution = Literal["loop", "batch", "unfold", "factored", "fused", "parted", "grouped", "mixed"]


@dataclass(frozen=True)
class Linear:
    inputs: int
    outputs: int
    bias: bool
    groups: int = 1
    dims = 0  # axes of a picture

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs + self.bias

    def dense(self, x: Tensor, W: Tensor) -> Tensor:
        return F.linear(x, *_apart(W)) if self.bias else F.linear(x, W)

    def batched(self, x: Tensor, W: Tensor) -> Tensor:
        """x (K·B, ..., inputs) with draw k's weights for its own rows."""
        rows = x.reshape(len(W), -1, self.inputs)
        weights = upright(W[..., : self.inputs].mT)
        out = torch.baddbmm(W[:, None, :, -1], rows, weights) if self.bias else rows @ weights
        return out.view(*x.shape[:-1], self.outputs)

    def project(self, x: Tensor, B: Tensor) -> Tensor:
        """Bᵀx for every row, channels last: (..., inputs) -> (..., 1, r)."""
        return self.dense(x, B.T).unsqueeze(-2)

    def energy(self, x: Tensor) -> Tensor:
        """‖x‖²: (..., inputs) -> (..., 1)."""
        return squared_norm(x, -1).unsqueeze(-1) + self.bias

    def restore(self, out: Tensor) -> Tensor:
        """(..., 1, outputs) channels last -> the layer's own layout."""
        return out.flatten(-2)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate)

    def columns(self, x: Tensor) -> Tensor:
        """Every input vector the weights meet: (..., inputs) -> (..., 1, inputs)."""
        return x.unsqueeze(-2)

    def patches(self, x: Tensor) -> Tensor:
        """Every input vector the matrix meets, the bias's 1 included: (n, d_in)."""
        rows = x.reshape(-1, self.inputs)
        return torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if self.bias else rows


@dataclass(frozen=True)
class Conv:
    inputs: int  # channels
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    padding_mode: str = "zeros"
    taps_first: bool = False  # W's columns run tap by tap, the channels of each together, as memory channels last does

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs // self.groups * math.prod(self.kernel) + self.bias

    @property
    def dims(self) -> int:
        return len(self.kernel)

    def dense(self, x: Tensor, W: Tensor) -> Tensor:
        kernel, bias = self._kernel(W)
        return self._conv(self._pad(x), kernel, bias, self.groups)

    def batched(self, x: Tensor, W: Tensor) -> Tensor:
        """One grouped convolution: the K draws' channels side by side."""
        K = len(W)
        x = self._pad(x)
        beside = x.view(K, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)  # (B, K·c_in, ...)
        kernel, bias = self._kernel(W.flatten(0, 1))
        out = self._conv(beside, kernel, bias, K * self.groups)
        return out.view(len(out), K, self.outputs, *out.shape[2:]).transpose(0, 1).flatten(0, 1)

    def project(self, x: Tensor, B: Tensor) -> Tensor:
        """Bᵀ patch for every location and group, channels last: (n, c, ...) -> (n, ..., groups, r)."""
        kernel, bias = self._kernel(B.T if self.groups == 1 else B.T.repeat(self.groups, 1))
        x = self._pad(x)
        if x.device.type == "cpu" and len(kernel) <= FEW and self._foldable():
            out = self._conv_by_folding(x, kernel, bias)
        else:
            out = self._conv(*self._channels_last(x, kernel), bias, self.groups)
        last = out.movedim(1, -1)
        return last.view(*last.shape[:-1], self.groups, B.shape[1])

    def energy(self, x: Tensor) -> Tensor:
        """‖patch‖²: (n, c, ...) -> (n, ..., groups)."""
        x = self._pad(x)
        by_group = x.unflatten(1, (self.groups, -1))
        squares = squared_norm(by_group, 2)
        return self._window_sums(squares).movedim(1, -1) + self.bias

    def restore(self, out: Tensor) -> Tensor:
        """(n, ..., groups, outputs/groups) -> (n, outputs, ...), its channels last in memory."""
        return out.flatten(-2).movedim(-1, 1)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        return (F.dropout1d, F.dropout2d, F.dropout3d)[self.dims - 1](x, rate)

    def columns(self, x: Tensor) -> Tensor:
        """Every patch, its numbers in the order of W's: (n, c, ...) -> (n, ..., groups, c/groups · kernel)."""
        x = F.pad(x, self.sides()) if self.padding_mode == "zeros" else self._pad(x)
        for axis, (k, d, s) in enumerate(zip(self.kernel, self.dilation, self.stride, strict=True), 2):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # (n, c, *places, *taps so far)
        x = x.unflatten(1, (self.groups, -1))
        places, taps = range(3, 3 + self.dims), range(3 + self.dims, 3 + 2 * self.dims)
        within = (*taps, 2) if self.taps_first else (2, *taps)
        return x.permute(0, *places, 1, *within).flatten(-1 - self.dims)

    def patches(self, x: Tensor) -> Tensor:
        """Every patch the matrix meets, the bias's 1 included: (n, d_in)."""
        rows = self.columns(x).flatten(0, -2)
        return torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if self.bias else rows

    def _kernel(self, W: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = _apart(W) if self.bias else (W, None)
        if self.taps_first:
            return weight.reshape(len(W), *self.kernel, self.inputs // self.groups).movedim(-1, 1), bias
        return weight.reshape(len(W), self.inputs // self.groups, *self.kernel), bias

    def _pad(self, x: Tensor) -> Tensor:
        """Padding that the convolution cannot do itself (reflect, replicate, circular)."""
        return x if self.padding_mode == "zeros" else F.pad(x, self.sides(), mode=self.padding_mode)

    def sides(self) -> list[int]:
        """As F.pad wants them: the last axis first, before and after."""
        sides: list[int] = []
        for axis in reversed(range(self.dims)):
            if isinstance(self.padding, str):
                total = self.dilation[axis] * (self.kernel[axis] - 1) if self.padding == "same" else 0
                sides += [total // 2, total - total // 2]
            else:
                sides += [self.padding[axis]] * 2
        return sides

    def _window_sums(self, x: Tensor) -> Tensor:
        """Of each channel over the kernel's window: pooled where that can be, else convolved by ones (slower)."""
        padding, plain = self._padding(), all(d == 1 for d in self.dilation)
        if padding is not None and plain and all(2 * p <= k for p, k in zip(padding, self.kernel, strict=True)):
            pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[self.dims - 1]
            return pool(x, self.kernel, self.stride, padding) * math.prod(self.kernel)
        return self._conv(x, x.new_ones(x.shape[1], 1, *self.kernel), None, x.shape[1])

    def _padding(self) -> tuple[int, ...] | None:
        """Zeros on either side of each axis, where they are equal on both."""
        if self.padding_mode != "zeros":
            return (0,) * self.dims
        return None if isinstance(self.padding, str) else self.padding

    def _foldable(self) -> bool:
        padding = self._padding()
        if self.dims != 2 or self.groups != 1 or self.stride != (1, 1) or padding is None:
            return False
        if self.inputs < MANY or math.prod(self.kernel) > 9:  # the products would outweigh what they save
            return False
        return all(p <= d * (k - 1) for p, d, k in zip(padding, self.dilation, self.kernel, strict=True))

    def _conv_by_folding(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """The same convolution as one matrix product and a sum of shifted planes.

        A CPU's convolution takes as long for one filter as for sixteen; this takes half of that for a handful.
        """
        padding = self._padding()
        assert padding is not None
        B, c, *sizes = x.shape
        columns = kernel.flip(2, 3).permute(1, 0, 2, 3).reshape(c, -1)
        products = x.permute(0, 2, 3, 1).reshape(B, -1, c) @ columns  # (B, places, filters · taps)
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        out = tuple(n + 2 * p - r for n, p, r in zip(sizes, padding, reach, strict=True))
        outer = tuple(r - p for r, p in zip(reach, padding, strict=True))
        folded = F.fold(products.mT, out, self.kernel, self.dilation, outer)
        return folded if bias is None else folded + bias[:, None, None]

    def _channels_last(self, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """The layout that both CPUs and GPUs convolve fastest, and the one that a product over channels wants."""
        if self.dims == 1:
            return x, kernel
        layout = torch.channels_last if self.dims == 2 else torch.channels_last_3d
        return x.contiguous(memory_format=layout), kernel.contiguous(memory_format=layout)

    def _conv(self, x: Tensor, kernel: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        padding = self.padding if self.padding_mode == "zeros" else 0
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.dims - 1]
        return convolve(x, kernel, bias, self.stride, padding, self.dilation, groups)


Geometry = Linear | Conv


@dataclass(frozen=True)
class Affine:
    """A scale and a shift of each output, as of a BatchNorm after the layer, which cost less within its weights."""

    scale: Tensor  # (d_out,)
    shift: Tensor  # (d_out,)

    def absorbed(self, geometry: Geometry, W: Tensor) -> tuple[Geometry, Tensor]:
        """The layer with a bias, and its weights (K, d_out, d_in)."""
        W = W * self.scale[:, None]
        shift = self.shift.expand(len(W), -1)[..., None]
        if geometry.bias:
            return geometry, torch.cat([W[..., :-1], W[..., -1:] + shift], -1)
        return replace(geometry, bias=True), torch.cat([W, shift], -1)

    def absorbed_by_factors(self, f: Factored) -> Factored:
        """Without the shift."""
        return Factored(f.B, f.G * self.scale[:, None], None if f.e is None else f.e * self.scale)


def absorbs(geometry: Geometry, x: Tensor, operand: Operand, axis: int) -> bool:
    """Whether `apply` takes a scale and a shift along this axis: those of a linear layer's tokens may be by place."""
    by_output = axis == -1 or geometry.dims > 0 or x.dim() == 2
    return isinstance(operand, Dense | Factored) and by_output


def _apart(W: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias. Split, not sliced: the gradient of a slice is filled with zeros first."""
    weight, bias = W.split([W.shape[1] - 1, 1], dim=1)
    return weight, bias.squeeze(1)


def upright(matrices: Tensor) -> Tensor:
    """On a CPU, small products with transposed matrices can take ten times as long as with copies of them."""
    return matrices.contiguous() if matrices.device.type == "cpu" else matrices


def squared_norm(x: Tensor, axis: int) -> Tensor:
    """In float32 or better, whatever the type of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu" and x.stride(axis) != 1:  # where torch's norm takes up to fifty times as long
        return x.to(wide).square().sum(axis)
    length: Tensor = torch.linalg.vector_norm(x, dim=axis, dtype=wide)
    return length.square()


def apply(
    geometry: Geometry,
    x: Tensor,
    operand: Operand,
    K: int,
    execution: Execution,
    channels_last: bool = False,
    affine: Affine | None = None,
) -> Tensor:
    """The K draws of one layer on activations (K·B, ...), whose rows k·B … (k+1)·B − 1 belong to draw k.

    What comes out lies in memory as torch's own layers would leave it, so that a later `view` works; with
    `channels_last` it may keep the faster layout. `affine` follows the layer, where it `absorbs` one.
    """
    bare = geometry
    if isinstance(operand, Dropped):
        return geometry.dense(geometry.drop(x, operand.rate), operand.W[0])
    if isinstance(operand, Functions):
        return operand(x.reshape(K, -1, x.shape[-1])).view(*x.shape[:-1], geometry.outputs)
    if isinstance(operand, Dense):
        W = operand.W
        if affine is not None:
            geometry, W = affine.absorbed(geometry, W)
        out = _dense(geometry, x, W, K, execution)
    elif isinstance(operand, Blocks):
        vectors = x.numel() // (K * x.shape[1 if geometry.dims else -1])  # of each draw, about: strides leave fewer
        if execution == "factored" and geometry.groups == 1 and not operand.formed_is_faster(vectors, x.device):
            out = _by_blocks(geometry, x, operand, K)
        else:
            out = _dense(geometry, x, operand.dense(), K, execution)
    elif execution == "factored":
        out = _factored(geometry, x, operand, K, affine)
    else:
        W = operand.dense()
        if affine is not None:
            geometry, W = affine.absorbed(geometry, W)
            operand = affine.absorbed_by_factors(operand)
        out = _dense(geometry, x, W, K, execution)
        if operand.e is not None:
            length = _outside(bare, x, [bare.project(x, operand.B.to(x.dtype))])
            out = out + bare.restore(_mix(length[..., None], operand.e[..., None], K, bare.groups))
    return out if channels_last else out.contiguous()


def _dense(geometry: Geometry, x: Tensor, W: Tensor, K: int, execution: Execution) -> Tensor:
    W = W.to(x.dtype)
    if len(W) == 1:
        return geometry.dense(x, W.squeeze(0))
    if execution == "batch" or (execution == "factored" and geometry.dims == 0):
        return geometry.batched(x, W)
    if execution == "unfold":
        return _unfolded(geometry, x, W)
    return torch.cat([geometry.dense(rows, W_k) for rows, W_k in zip(x.chunk(K), W, strict=True)])


def _unfolded(geometry: Geometry, x: Tensor, W: Tensor) -> Tensor:
    """Every patch, times its draw's matrix."""
    c = geometry.columns(x)
    out = _mix(c, W[..., : c.shape[-1]], len(W), geometry.groups)
    if geometry.bias:
        by_group = W[..., -1].view(len(W), *[1] * (c.dim() - 2), geometry.groups, -1)  # (K, 1, ..., g, d_out/g)
        out = (out.unflatten(0, (len(W), -1)) + by_group).flatten(0, 1)
    return geometry.restore(out)


def _by_blocks(geometry: Geometry, x: Tensor, operand: Blocks, K: int) -> Tensor:
    patches = geometry.columns(x)
    out = operand.apply(patches.reshape(K, -1, patches.shape[-1]))
    return geometry.restore(out.view(*patches.shape[:-1], geometry.outputs))


def _factored(geometry: Geometry, x: Tensor, f: Factored, K: int, affine: Affine | None) -> Tensor:
    B, f = f.B.to(x.dtype), f if affine is None else affine.absorbed_by_factors(f)
    # a CPU's convolution is at its best with 64 filters: 69 of them take as long as 96
    parts = [geometry.project(x, some) for some in B.split(64 if x.device.type == "cpu" else B.shape[1], dim=1)]
    G = f.G
    if f.e is not None:
        parts.append(_outside(geometry, x, parts)[..., None])
        G = torch.cat([f.G, f.e[..., None]], 2)
    shift = None if affine is None else affine.shift
    return geometry.restore(_mix(parts[0] if len(parts) == 1 else torch.cat(parts, -1), G, K, geometry.groups, shift))


def _outside(geometry: Geometry, x: Tensor, parts: list[Tensor]) -> Tensor:
    """‖x − B Bᵀx‖ from the parts of Bᵀx; in half precision the difference of squares may round below zero."""
    left = geometry.energy(x)
    for c in parts:
        left = left - squared_norm(c, -1)
    return left.clamp(min=0).sqrt().to(x.dtype)


def _mix(c: Tensor, G: Tensor, K: int, groups: int, shift: Tensor | None = None) -> Tensor:
    """Draw k's matrix on its rows of c: (K·B, ..., g, r) and (K, d_out, r) -> (K·B, ..., g, d_out/g), g groups."""
    G = G.to(c.dtype)
    shift = None if shift is None else shift.to(c.dtype)
    if groups == 1:
        rows, weights = c.reshape(K, -1, c.shape[-1]), upright(G.mT)
        out = rows @ weights if shift is None else torch.baddbmm(shift, rows, weights)
        return out.view(*c.shape[:-1], G.shape[1])
    by_group = c.reshape(K, -1, groups, c.shape[-1]).transpose(1, 2)
    out = by_group @ upright(G.view(len(G), groups, -1, G.shape[2]).mT)  # (K, g, places, d_out/g)
    out = out.transpose(1, 2).reshape(*c.shape[:-1], -1)
    return out if shift is None else out + shift.view(groups, -1)
