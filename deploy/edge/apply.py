"""Applies K draws of a layer to activations in a graph, as `dubito.models.network.geometry` does; channels first.

Activations have K·B rows, draw after draw. Those that are the same for all draws have B rows and are computed once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import numpy_helper

from dubito.deploy.edge.blocks import BlockDraws, formed, on_channels, on_rows
from dubito.deploy.edge.draws import DenseDraws, Drawn, FactoredDraws, MaskedDraws
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.graph import Array, Graph
from dubito.deploy.edge.trace import pads
from dubito.models.network.geometry import Conv, Geometry, Linear

BATCH = 2  # number of inputs by whose cost it is decided whether G is formed or applied factor by factor
ONE = numpy_helper.from_array(np.ones(1, np.float32))


@dataclass(frozen=True)
class LayerInput:
    """The input of a layer, whether all draws share it, and the shapes before and after the layer without the rows."""

    x: str
    shared: bool
    before: tuple[int, ...]
    after: tuple[int, ...]


def apply(g: Graph, K: int, geometry: Geometry, place: LayerInput, operand: Drawn, shift: Array | None) -> str:
    """Activations (K·B, ...) after the layer, with a shift (d_out,) per channel added if given."""
    match operand:
        case FactoredDraws():
            return _factored(g, K, geometry, place, operand, shift)
        case DenseDraws():
            out = _dense(g, K, geometry, place, operand.W)
        case MaskedDraws():
            out = _masked(g, K, geometry, place, operand)
        case BlockDraws():
            out = _by_blocks(g, K, geometry, place, operand)
    return out if shift is None else g.add(out, g.constant(by_channel(shift, len(place.after))))


def by_channel(values: Array, dims: int) -> Array:
    """Values per channel, reshaped for broadcasting: channels are the first of `dims` axes after the rows."""
    return values.reshape(-1, *[1] * (dims - 1))


def _factored(g: Graph, K: int, geometry: Geometry, place: LayerInput, f: FactoredDraws, shift: Array | None) -> str:
    """c = Bᵀx by one product for all draws, then G c; the part outside B and the shift are further columns of G."""
    d, w, rows = geometry.outputs, f.width, 1 if place.shared else K
    groups = geometry.groups
    if isinstance(geometry, Linear):
        spots = math.prod(place.after[:-1])
        c, length = _project_linear(g, geometry, place.x, f)
        # (K or 1, B, width, positions), all rows of a draw being positions of one input
        c, length = (
            v and g.op("Transpose", g.reshape(v, (rows, 1, -1, n)), perm=[0, 1, 3, 2]) for v, n in ((c, w), (length, 1))
        )
    else:
        spots = math.prod(place.after[1:])
        c, length = _project_conv(g, geometry, place, f)
        by_group = (groups,) if groups > 1 else ()
        c, length = (v and g.reshape(v, (rows, -1, *by_group, n, spots)) for v, n in ((c, w), (length, 1)))
    columns, entries = _outside(g, K, f, length, shift, f"{type(geometry).__name__} {rows} {spots} {groups}")
    if groups == 1 and BATCH * spots * (d + w) < d * w:
        out = f.on(g, c)
        if columns:
            beside = g.op("Unsqueeze", _together(g, columns, 2), g.constant([1]))
            out = g.add(out, g.matmul(beside, _together(g, entries, 2)))
    else:
        G = _together(g, [f.G(g), *columns], 2)
        shape = (K, 1, groups, d // groups, w + len(columns)) if groups > 1 else (K, 1, d, w + len(columns))
        out = g.matmul(g.reshape(G, shape), _together(g, [c, *entries], -2))
    if shift is not None and not columns:
        out = g.add(out, g.constant(shift.reshape((groups, d // groups, 1) if groups > 1 else (d, 1))))
    if isinstance(geometry, Linear):
        out = g.op("Transpose", out, perm=[0, 1, 3, 2])
    return g.reshape(out, (-1, *place.after))


def _outside(
    g: Graph, K: int, f: FactoredDraws, length: str, shift: Array | None, sizes: str
) -> tuple[list[str], list[str]]:
    """Columns (K, d_out, 1) beyond those of B, and the entries that they are multiplied by."""
    if f.e is None:
        return [], []
    if shift is None:
        return [f.e], [length]
    key = f"ones of {sizes}"
    if key not in g.shared:
        g.shared[key] = g.op("ConstantOfShape", g.op("Shape", length), value=ONE)
    return [f.e, g.op("Expand", g.constant(shift[:, None]), g.constant([K, len(shift), 1]))], [length, g.shared[key]]


def _together(g: Graph, values: list[str], axis: int) -> str:
    return values[0] if len(values) == 1 else g.op("Concat", *values, axis=axis)


def _project_linear(g: Graph, linear: Linear, x: str, f: FactoredDraws) -> tuple[str, str]:
    """Bᵀx, and ‖x − B Bᵀx‖ if there is a part outside B."""
    B = g.op("Transpose", f.B_T)
    c = g.matmul(x, g.part(B, 0, 0, linear.inputs) if linear.bias else B)
    if linear.bias:
        c = g.add(c, g.reshape(g.part(B, 0, linear.inputs, linear.inputs + 1), (f.width,)))
    if f.e is None:
        return c, ""
    energy = g.op("ReduceSumSquare", x, g.constant([-1]))
    if linear.bias:
        energy = g.add(energy, g.constant(1.0))
    return c, _length(g, energy, g.op("ReduceSumSquare", c, g.constant([-1])))


def _length(g: Graph, whole: str, inside: str) -> str:
    return g.op("Sqrt", g.op("Relu", g.op("Sub", whole, inside)))


def _project_conv(g: Graph, conv: Conv, place: LayerInput, f: FactoredDraws) -> tuple[str, str]:
    """Bᵀ(patch), (rows, groups · width, *sizes), and the norm of the part outside B, (rows, groups, *sizes)."""
    x = _padded(g, conv, place.x)
    kernel, bias = _kernel(g, conv, f.B_T, f.width)
    if conv.groups > 1:
        kernel = g.op("Tile", kernel, g.constant([conv.groups] + [1] * (conv.dims + 1)))
        bias = bias and g.op("Tile", bias, g.constant([conv.groups]))
    c = _conv(g, conv, x, kernel, bias, conv.groups)
    if f.e is None:
        return c, ""
    energy = _padded(g, conv, _squares(g, place.x, conv.groups, conv.inputs // conv.groups, place.before[1:]))
    if math.prod(conv.kernel) > 1 or any(s > 1 for s in conv.stride) or any(sum(p) for p in pads(conv)):
        ones = g.constant(np.ones((conv.groups, 1, *conv.kernel), np.float32))
        energy = _conv(g, conv, energy, ones, None, conv.groups)
    if conv.bias:
        energy = g.add(energy, g.constant(1.0))
    return c, _length(g, energy, _squares(g, c, conv.groups, f.width, place.after[1:]))


def _squares(g: Graph, x: str, groups: int, channels: int, sizes: Sequence[int]) -> str:
    """Squares summed over the channels of a group, (rows, groups, *sizes), cached."""
    key = f"{x}² by {groups}"
    if key not in g.shared:
        flat = g.reshape(x, (-1, groups, channels, math.prod(sizes)))
        summed = g.op("ReduceSum", g.mul(flat, flat), g.constant([2]))
        g.shared[key] = g.reshape(summed, (-1, groups, *sizes))
    return g.shared[key]


def _kernel(g: Graph, conv: Conv, W: str, filters: int) -> tuple[str, str | None]:
    """Filters and bias from a matrix (filters, d_in)."""
    size = conv.shape[1] - conv.bias
    kernel = g.part(W, 1, 0, size) if conv.bias else W
    bias = g.reshape(g.part(W, 1, size, size + 1), (filters,)) if conv.bias else None
    return g.reshape(kernel, (filters, conv.inputs // conv.groups, *conv.kernel)), bias


def _padded(g: Graph, conv: Conv, x: str) -> str:
    """Input with padding that ONNX's Conv does not support."""
    if conv.padding_mode == "zeros":
        return x
    modes = {"reflect": "reflect", "replicate": "edge"}
    if conv.padding_mode not in modes:
        raise ExportError(f"a convolution pads {conv.padding_mode!r}, which opset 18 cannot; leave it deterministic.")
    around = pads(conv)
    sides = [0, 0, *(p for p, _ in around), 0, 0, *(p for _, p in around)]
    return g.op("Pad", x, g.constant(sides), mode=modes[conv.padding_mode])


def _conv(g: Graph, conv: Conv, x: str, kernel: str, bias: str | None, groups: int) -> str:
    around = pads(conv) if conv.padding_mode == "zeros" else [(0, 0)] * conv.dims
    return g.op(
        "Conv",
        *([x, kernel] if bias is None else [x, kernel, bias]),
        kernel_shape=list(conv.kernel),
        strides=list(conv.stride),
        dilations=list(conv.dilation),
        pads=[p for p, _ in around] + [p for _, p in around],
        group=groups,
    )


def _dense(g: Graph, K: int, geometry: Geometry, place: LayerInput, W: str) -> str:
    """K weight matrices, each on its own rows: a batched product, or one convolution with K groups."""
    if isinstance(geometry, Linear):
        rows = g.reshape(place.x, (1 if place.shared else K, -1, geometry.inputs))
        weights = g.op("Transpose", W, perm=[0, 2, 1])
        if geometry.bias:
            columns, last = g.split(weights, 1, [geometry.inputs, 1])
            return g.reshape(g.add(g.matmul(rows, columns), last), (-1, *place.after))
        return g.reshape(g.matmul(rows, weights), (-1, *place.after))
    conv, d = geometry, geometry.outputs
    x = _padded(g, conv, place.x)
    kernel, bias = _kernel(g, conv, g.reshape(W, (K * d, conv.shape[1])), K * d)
    groups = K * conv.groups
    if place.shared and conv.groups == 1:
        groups = 1
    elif K > 1:
        sizes = _sizes(conv, place.before[1:])
        if place.shared:
            x = g.op("Tile", x, g.constant([1, K, *[1] * conv.dims]))
        else:
            x = _swapped(g, x, K, conv.inputs, sizes)
    out = _conv(g, conv, x, kernel, bias, groups)
    if K == 1:
        return out
    beside = g.reshape(out, (-1, K, d * math.prod(place.after[1:])))
    return g.reshape(g.op("Transpose", beside, perm=[1, 0, 2]), (-1, *place.after))


def _sizes(conv: Conv, sizes: Sequence[int]) -> tuple[int, ...]:
    if conv.padding_mode == "zeros":
        return tuple(sizes)
    return tuple(n + sum(p) for n, p in zip(sizes, pads(conv), strict=True))


def _swapped(g: Graph, x: str, K: int, channels: int, sizes: tuple[int, ...]) -> str:
    """(K·B, c, ...) -> (B, K·c, ...)"""
    flat = g.op("Transpose", g.reshape(x, (K, -1, channels * math.prod(sizes))), perm=[1, 0, 2])
    return g.reshape(flat, (-1, K * channels, *sizes))


def _masked(g: Graph, K: int, geometry: Geometry, place: LayerInput, m: MaskedDraws) -> str:
    """One weight matrix for all draws; each draw drops inputs of its own."""
    rows = 1 if place.shared else K
    by_sample = g.reshape(place.x, (rows, -1, *place.before))
    inputs, ones = geometry.inputs, [1] * (len(place.before) - 1)
    shape = [*ones, inputs] if isinstance(geometry, Linear) else [inputs, *ones]
    dropped = g.mul(by_sample, g.reshape(m.mask, (K, 1, *shape)))
    x = g.reshape(dropped, (-1, *place.before))
    if isinstance(geometry, Linear):
        W = g.op("Transpose", m.W)
        if not geometry.bias:
            return g.matmul(x, W)
        columns, last = g.part(W, 0, 0, inputs), g.part(W, 0, inputs, inputs + 1)
        return g.add(g.matmul(x, columns), g.reshape(last, (geometry.outputs,)))
    filters, shift = _kernel(g, geometry, m.W, geometry.outputs)
    return _conv(g, geometry, _padded(g, geometry, x), filters, shift, geometry.groups)


def _by_blocks(g: Graph, K: int, geometry: Geometry, place: LayerInput, blocks: BlockDraws) -> str:
    if isinstance(geometry, Linear):
        rows = g.reshape(place.x, (1 if place.shared else K, -1, geometry.inputs))
        return g.reshape(on_rows(g, blocks, rows, K, place.shared), (-1, *place.after))
    if geometry.groups > 1:  # each group has its own rows of W, and H mixes all rows
        return _dense(g, K, geometry, place, formed(g, blocks, K))
    patches = _columns(g, geometry, place)
    out = on_channels(g, blocks, patches, K, place.shared, math.prod(place.after[1:]))
    return g.reshape(out, (-1, *place.after))


def _columns(g: Graph, conv: Conv, place: LayerInput) -> str:
    """All patches, channels first as in W: (rows, c · kernel, positions). By slices, axis by axis."""
    x, sides = _padded(g, conv, place.x), [sum(p) for p in pads(conv)]
    if conv.padding_mode == "zeros" and any(sides):
        around = pads(conv)
        x = g.op("Pad", x, g.constant([0, 0, *(p for p, _ in around), 0, 0, *(p for _, p in around)]))
    if math.prod(conv.kernel) > 1 or any(s > 1 for s in conv.stride):
        # the last axis first: each new kernel axis is put before the ones that exist
        for axis in reversed(range(conv.dims)):
            k, d, step, n = conv.kernel[axis], conv.dilation[axis], conv.stride[axis], place.after[1 + axis]
            last = 2 + axis + (conv.dims - 1 - axis)  # position of that axis, after the kernel axes
            taps = [
                g.op("Slice", x, *(g.constant([v]) for v in (t * d, t * d + (n - 1) * step + 1, last, step)))
                for t in range(k)
            ]
            x = g.op("Concat", *[g.op("Unsqueeze", tap, g.constant([2])) for tap in taps], axis=2)
    return g.reshape(x, (-1, conv.inputs * math.prod(conv.kernel), math.prod(place.after[1:])))
