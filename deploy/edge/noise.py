"""Standard normals from a seed: a counter-based generator of integer operators, the same on every device.

Two words of key belong to a sample, a counter to each pair of normals; three rounds of multiply and xor-shift mix
them. The word that results is a radius, its lower half an angle (Box and Muller). Counters never repeat between
layers, so no two layers share noise.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper

from dubito.deploy.edge.graph import OPSET, OURS, Graph

MIX = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))  # shift, then multiply; a shift by 14 ends it
LAST = 14
SMALL = 1 << 13  # normals of a sample
GOLDEN = 0x9E3779B9
# −cos πy in powers of y² for |y| ≤ 1, to 8e-7: runtimes are slow at cosines
WAVE = (-0.99999921, 4.93474507, -4.05804088, 1.3323684, -0.22964948, 0.02057686)


class Noise:
    """Shares out the normals of K samples: each layer's are a (K, n) value called by the layer's name."""

    def __init__(self, graph: Graph, K: int, seed: str) -> None:
        self.graph, self.K = graph, K
        self._counter = 0
        graph.functions["Normals"] = _normals()
        wide = graph.op("Cast", seed, to=TensorProto.UINT64)
        low = graph.op("BitwiseAnd", wide, graph.constant(0xFFFFFFFF, np.uint64))
        high = graph.op("BitShift", wide, graph.constant(32, np.uint64), direction="RIGHT")
        words = [graph.op("Cast", word, to=TensorProto.UINT32) for word in (low, high)]
        zero = graph.constant(0, np.uint32)
        self._seed = _mixed(graph, graph.add(_mixed(graph, words[0], zero), words[1]), zero)
        numbers = (np.arange(K, dtype=np.uint32)[:, None] + np.uint32(1)) * np.uint32(GOLDEN)
        self._first = _mixed(graph, graph.add(self._seed, graph.constant(numbers)), zero)  # (K, 1)
        self._second = _mixed(graph, self._first, self._seed)  # (K, 1)
        self._small: list[tuple[str, int]] = []
        self._at = len(graph.nodes)

    def normals(self, n: int, name: str) -> str:
        """(K, n) standard normals; a few at a time are drawn with others by `finish`, as an operator has its price."""
        if n <= SMALL:
            self._small.append((name, n))
            return name
        return self._drawn(n, name)

    def finish(self) -> None:
        """Once all are asked for, the few are drawn, before any layer uses them."""
        if self._small:
            at = len(self.graph.nodes)
            sizes = [n for _, n in self._small]
            if len(sizes) == 1:
                self._drawn(sizes[0], self._small[0][0])
            else:
                every = self._drawn(sum(sizes), self.graph.name())
                names = [name for name, _ in self._small]
                self.graph.ops("Split", every, self.graph.constant(np.array(sizes)), outputs=names, axis=1)
            made, self.graph.nodes[at:] = self.graph.nodes[at:], []
            self.graph.nodes[self._at : self._at] = made

    def _drawn(self, n: int, name: str) -> str:
        pairs = (n + 1) // 2
        span = (self.graph.constant(self._counter), self.graph.constant(self._counter + pairs))
        self._counter += pairs
        whole = None if n % 2 else name
        made = self.graph.op("Normals", self._first, self._second, *span, out=whole, domain=OURS)
        if n % 2:
            zero, one = self.graph.constant([0]), self.graph.constant([1])
            made = self.graph.op("Slice", made, zero, self.graph.constant([n]), one, out=name)
        return made

    def keys(self, E: int, name: str) -> str:
        """(E,) numbers whose order is that of an ensemble's members."""
        counter = self.graph.constant(np.arange(E, dtype=np.uint32))
        mixed = _mixed(self.graph, self.graph.add(counter, self._seed), self.graph.constant(GOLDEN, np.uint32))
        return self.graph.op("Cast", mixed, to=TensorProto.DOUBLE, out=name)


def _mixed(graph: Graph, x: str, second: str) -> str:
    graph.functions.setdefault("Mix", _mix())
    return graph.op("Mix", x, second, domain=OURS)


def _mix() -> onnx.FunctionProto:
    """x (uint32) and a second word of key -> a word in which every bit hangs on every bit of both."""
    g = Graph()
    (first, m1), (second, m2), (third, m3) = MIX
    x = _times(g, _folded(g, "x", first), m1)
    x = _times(g, g.add(_folded(g, x, second), "second"), m2)
    x = _times(g, _folded(g, x, third), m3)
    _folded(g, x, LAST, out="y")
    return _function("Mix", ["x", "second"], ["y"], g)


def _folded(g: Graph, x: str, shift: int, out: str | None = None) -> str:
    shifted = g.op("BitShift", x, g.constant(shift, np.uint32), direction="RIGHT")
    return g.op("BitwiseXor", x, shifted, out=out)


def _times(g: Graph, x: str, factor: int) -> str:
    return g.mul(x, g.constant(factor, np.uint32))


def _normals() -> onnx.FunctionProto:
    """Two key words (K, 1) and a span of counters -> (K, 2 · counters) standard normals."""
    g = Graph()
    counters = g.op("Cast", g.op("Range", "start", "stop", g.constant(1)), to=TensorProto.UINT32)
    word = g.op("Mix", g.add("first", counters), "second", domain=OURS)
    share = g.op("Cast", word, to=TensorProto.FLOAT)
    share = g.add(g.mul(share, g.constant((1 - 2.0**-20) / 2**32)), g.constant(2.0**-34))  # in (0, 1)
    radius = g.op("Sqrt", g.mul(g.op("Log", share), g.constant(-2.0)))
    turn = g.mul(word, g.constant(1 << 16, np.uint32))  # the lower half of the word as a share of the circle, in 2⁻³²
    axes = [g.op("Unsqueeze", v, g.constant([1])) for v in (turn, radius)]
    both = g.add(axes[0], g.constant(np.array([[0], [3 << 30]], np.uint32)))  # a quarter apart: cosine and sine
    y = g.add(g.mul(g.op("Cast", both, to=TensorProto.FLOAT), g.constant(2.0**-31)), g.constant(-1.0))
    z, wave = g.mul(y, y), g.constant(WAVE[-1])
    for coefficient in WAVE[-2::-1]:
        wave = g.add(g.mul(z, wave), g.constant(coefficient))
    g.op("Reshape", g.mul(axes[1], wave), g.constant([0, -1]), out="normals")
    return _function("Normals", ["first", "second", "start", "stop"], ["normals"], g)


def _function(name: str, inputs: list[str], outputs: list[str], g: Graph) -> onnx.FunctionProto:
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in g.initializers]
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(OURS, 1)]
    return helper.make_function(OURS, name, inputs, outputs, [*constants, *g.nodes], imports)
