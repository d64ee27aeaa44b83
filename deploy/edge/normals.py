"""Standard normals from a seed: a counter-based generator of integer operators, the same on every device.

Each draw has a key of two words, each sixteen normals a counter; three rounds of multiply and xor-shift mix them.
Twelve bits of the result choose eight directions in the plane, and twelve more eight lengths, from two tables of 4,096
rows: eight Box-Muller pairs. Counters never repeat between layers, so no two layers share normals.

The rows are lattices, u = (2i + 1) aᵖ mod 2N of 2N for pair p, so every pair takes every angle and every length equally
often. No sum of up to four angles of a row, or of their negatives, is constant: moments up to the fifth order between
the normals of a row are those of independent ones, except for squares, whose product is 1 within 0.006. The largest
length is 4.25. A runtime computes the tables once, at load.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper

from dubito.deploy.edge.graph import OPSET, OURS, Graph

MIX = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))  # shift, then multiply; a shift by 14 ends it
LAST = 14
TOGETHER = 1 << 20  # normals drawn by one lookup, which shares the cost of reading a table
GOLDEN = 0x9E3779B9
BITS, PAIRS = 12, 8  # bits of an index into a table, pairs in its row
ROWS, WIDTH = 1 << BITS, 2 * PAIRS
ANGLES, LENGTHS = 451, 2251  # a of the lattices, found by exhaustive search


class GraphNormals:
    """The normals of K draws: those of each layer are a (K, n) value with the layer's name."""

    def __init__(self, graph: Graph, K: int, seed: str) -> None:
        self.graph, self.K = graph, K
        wide = graph.op("Cast", seed, to=TensorProto.UINT64)
        low = graph.op("BitwiseAnd", wide, graph.constant(0xFFFFFFFF, np.uint64))
        high = graph.op("BitShift", wide, graph.constant(32, np.uint64), direction="RIGHT")
        words = [graph.op("Cast", word, to=TensorProto.UINT32) for word in (low, high)]
        zero = graph.constant(0, np.uint32)
        self._seed = _mixed(graph, graph.add(_mixed(graph, words[0], zero), words[1]), zero)
        numbers = (np.arange(K, dtype=np.uint32)[:, None] + np.uint32(1)) * np.uint32(GOLDEN)
        self._first = _mixed(graph, graph.add(self._seed, graph.constant(numbers)), zero)  # (K, 1)
        self._second = _mixed(graph, self._first, self._seed)  # (K, 1)
        self._needed: list[tuple[str, int]] = []
        self._first_node = len(graph.nodes)

    def normals(self, n: int, name: str) -> str:
        """Name of (K, n) standard normals, which `finish` draws."""
        self._needed.append((name, n))
        return name

    def finish(self) -> None:
        """Draw all normals, many at a time, in nodes before those of the layers."""
        if not self._needed:
            return
        g, before = self.graph, len(self.graph.nodes)
        drawn: list[list[tuple[str, int]]] = [[]]
        for one in self._needed:
            if self.K * sum(n for _, n in drawn[-1]) >= TOGETHER:
                drawn.append([])
            drawn[-1].append(one)
        rows = [-(-sum(n for _, n in part) // WIDTH) for part in drawn]
        tables = self._tables()
        for part, *index in zip(drawn, *self._indices(rows), strict=True):
            self._draw(part, [g.op("Gather", table, i) for table, i in zip(tables, index, strict=True)])
        nodes, g.nodes[before:] = g.nodes[before:], []
        g.nodes[self._first_node : self._first_node] = nodes

    def _draw(self, part: list[tuple[str, int]], factors: list[str]) -> None:
        """Directions times lengths, split into the named values."""
        g = self.graph
        left = -sum(n for _, n in part) % WIDTH
        whole = part[0][0] if len(part) == 1 and not left else None
        every = g.op("Reshape", g.mul(*factors), g.constant([0, -1]), out=whole)
        if whole is None:
            part = [*part, (g.name(), left)] if left else part
            sizes = np.array([n for _, n in part])
            g.ops("Split", every, g.constant(sizes), outputs=[name for name, _ in part], axis=1)

    def _tables(self) -> tuple[str, str]:
        """Tables of cos and sin of eight angles, and of eight lengths twice: (ROWS, WIDTH) each."""
        g = self.graph
        turns = g.mul(_lattice(g, ANGLES), g.constant(2 * np.pi))
        squares = -2 * np.log((2 * np.arange(ROWS) + 1) / (2 * ROWS))
        scale = -4 / squares.mean()  # the mean of squared lengths is 2
        lengths = g.op("Sqrt", g.mul(g.op("Log", _lattice(g, LENGTHS)), g.constant(scale)))
        directions = g.op("Concat", g.op("Cos", turns), g.op("Sin", turns), axis=1)
        return directions, g.op("Concat", lengths, lengths, axis=1)

    def _indices(self, rows: list[int]) -> list[list[str]]:
        """Indices (K, n) into each table, for each n of `rows`."""
        g = self.graph
        counters = g.op("Range", g.constant(0), g.constant(sum(rows)), g.constant(1))
        word = _mixed(g, g.add(self._first, g.op("Cast", counters, to=TensorProto.UINT32)), self._second)
        upper, indices = g.constant(32 - BITS, np.uint32), []
        for x in (word, g.mul(word, g.constant(1 << BITS, np.uint32))):
            index = g.op("Cast", g.op("BitShift", x, upper, direction="RIGHT"), to=TensorProto.INT32)
            indices.append(g.split(index, 1, rows))
        return indices

    def keys(self, E: int, name: str) -> str:
        """Random numbers (E,) whose order is the order of an ensemble's members."""
        counter = self.graph.constant(np.arange(E, dtype=np.uint32))
        mixed = _mixed(self.graph, self.graph.add(counter, self._seed), self.graph.constant(GOLDEN, np.uint32))
        return self.graph.op("Cast", mixed, to=TensorProto.DOUBLE, out=name)


def _mixed(graph: Graph, x: str, second: str) -> str:
    graph.functions.setdefault("Mix", _mix())
    return graph.op("Mix", x, second, domain=OURS)


def _mix() -> onnx.FunctionProto:
    """The function Mix: x (uint32) and a second word of the key -> a word whose bits depend on all bits of both."""
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


def _lattice(g: Graph, a: int) -> str:
    """Lattice in (0, 1), (ROWS, PAIRS); each column is a permutation of (2i + 1) / (2 ROWS)."""
    steps = g.op("Range", g.constant(1), g.constant(2 * ROWS), g.constant(2))
    odd = g.reshape(g.op("Cast", steps, to=TensorProto.UINT32), (ROWS, 1))
    factors = np.array([pow(a, p, 2 * ROWS) for p in range(PAIRS)], np.uint32) << np.uint32(31 - BITS)
    # overflow removes the upper bits of a product, which is the modulus
    return g.mul(g.op("Cast", g.mul(odd, g.constant(factors)), to=TensorProto.FLOAT), g.constant(2.0**-32))


def _function(name: str, inputs: list[str], outputs: list[str], g: Graph) -> onnx.FunctionProto:
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in g.initializers]
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(OURS, 1)]
    return helper.make_function(OURS, name, inputs, outputs, [*constants, *g.nodes], imports)
