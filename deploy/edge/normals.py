"""Standard normals from a seed: a counter-based generator of integer operators, the same on every device.

A word has 64 bits: the sum of the key of its draw and of its mixed counter, mixed once more. Seed and number of the
draw give the key. Each step is a bijection of 64 bits, so the words of a draw repeat after 2⁶⁴ counters. No counter is
used twice: no two layers, draws or positions share a word's bits. Mix is that of SplitMix64 [Steele, Lea, Flood 2014].
Counters do not depend on the seed: a runtime mixes them at load, and a word costs two multiplications and two
xor-shifts.

Each normal has 16 bits of its own, a quarter of a word: a whole number u, which z = u (b + 1 / (c − u²)) brings near a
normal. b and c are such that the fourth and the sixth cumulant of z are 0; odd ones are below 0.001, as u has one
negative value more than positive ones. An orthogonal matrix then rotates sixteen z, each from another word: they stay
uncorrelated, and the eighth cumulant is divided by 16³. The share of normals beyond 4, 5 and 6 is 0.03, 0.6 and 3.3 %
too small.
"""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dubito.deploy.edge.graph import OPSET, OURS, Graph

STEP, DRAW = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # between counters, and between draws: no key is a mixed counter
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, then multiply; a shift by 31 ends it
LAST = 31
HALF = 32
BITS, PIECES = 16, 4  # bits of a normal, normals of a word
GROUP = 16  # normals rotated together
B, C, DEVIATION = 9.322959513579613, 1.0696853557391315, 7.476231094082571  # b and c where |u| ≤ 1; deviation of z then
TOGETHER = 1 << 19  # normals drawn by one chain of nodes: few nodes, and values that stay near a core


class GraphNormals:
    """The normals of K draws: those of each layer are a (K, n) value with the layer's name."""

    def __init__(self, graph: Graph, K: int, seed: str) -> None:
        self.graph, self.K = graph, K
        for function in (_mix(), _words(), _normals()):
            graph.functions.setdefault(function.name, function)
        start = graph.add(graph.op("Cast", seed, to=TensorProto.UINT64), graph.constant(DRAW, np.uint64))
        self._seed = self._mixed(start)  # Mix leaves 0 as it is, hence the sum
        numbers = np.array([[(k + 1) * DRAW % (1 << 64)] for k in range(K)], np.uint64)
        self._key = self._mixed(graph.add(self._seed, graph.constant(numbers)))  # (K, 1)
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
        drawn: list[list[tuple[str, int]]] = []
        for name, n in self._needed:
            if not drawn or self.K * (n + sum(m for _, m in drawn[-1])) > TOGETHER:
                drawn.append([])
            drawn[-1].append((name, n))
        left = [-sum(n for _, n in part) % (PIECES * GROUP) for part in drawn]
        words = [(sum(n for _, n in part) + more) // PIECES for part, more in zip(drawn, left, strict=True)]
        for part, more, counters in zip(drawn, left, self._counters(words), strict=True):
            whole = part[0][0] if len(part) == 1 and not more else None
            every = g.op("Normals", self._key, counters, out=whole, domain=OURS)
            if whole is None:
                part = [*part, (g.name(), more)] if more else part
                sizes = np.array([n for _, n in part])
                g.ops("Split", every, g.constant(sizes), outputs=[name for name, _ in part], axis=1)
        nodes, g.nodes[before:] = g.nodes[before:], []
        g.nodes[self._first_node : self._first_node] = nodes

    def keys(self, E: int, name: str) -> str:
        """Random numbers (E,) whose order is the order of an ensemble's members."""
        numbers = np.array([-(e + 1) * DRAW % (1 << 64) for e in range(E)], np.uint64)
        mixed = self._mixed(self.graph.add(self._seed, self.graph.constant(numbers)))
        return self.graph.op("Cast", mixed, to=TensorProto.DOUBLE, out=name)

    def words(self, counters: str) -> str:
        """Words (K, n) of the counters (n,)."""
        return self.graph.op("Words", self._key, self._mixed_counters(counters), domain=OURS)

    def _counters(self, words: list[int]) -> list[str]:
        """Mixed counters (n,) for each n of `words`; they are constants."""
        g = self.graph
        counters = g.op("Range", g.constant(0), g.constant(sum(words)), g.constant(1))
        return g.split(self._mixed_counters(g.op("Cast", counters, to=TensorProto.UINT64)), 0, words)

    def _mixed_counters(self, counters: str) -> str:
        return self._mixed(self.graph.mul(counters, self.graph.constant(STEP, np.uint64)))

    def _mixed(self, x: str) -> str:
        return self.graph.op("Mix", x, domain=OURS)


def _mix() -> onnx.FunctionProto:
    """The function Mix: x (uint64) -> words whose bits depend on all bits of x."""
    g, x = Graph(), "x"
    for shift, factor in MIX:
        x = _times(g, _folded(g, x, shift), factor)
    _folded(g, x, LAST, out="y")
    return _function("Mix", ["x"], ["y"], g)


def _words() -> onnx.FunctionProto:
    """The function Words: keys (K, 1) and mixed counters (n,) -> words (K, n)."""
    g = Graph()
    x = g.add("key", "counters")
    (_, first), (_, second) = MIX
    _folded(g, _times(g, _folded(g, _times(g, x, first), HALF), second), HALF, out="y")
    return _function("Words", ["key", "counters"], ["y"], g)


def _normals() -> onnx.FunctionProto:
    """The function Normals: keys (K, 1) and mixed counters (n,) -> (K, 4n) normals; n is a multiple of 16."""
    g = Graph()
    x = g.op("Words", "key", "counters", domain=OURS)
    pieces = [x]
    for i in range(1, PIECES):
        pieces.append(g.op("BitShift", x, g.constant(BITS * i, np.uint64), direction="RIGHT"))
    lowest = [g.op("Cast", piece, to=TensorProto.INT16) for piece in pieces]  # Cast cuts the upper bits off
    u = g.op("Cast", g.op("Concat", *lowest, axis=1), to=TensorProto.FLOAT)  # (K, 4n)
    one = 4.0 ** (BITS - 1)  # the square of the u that stands for 1
    bent = g.op("Reciprocal", g.op("Sub", g.constant(C * one), g.mul(u, u)))
    z = g.mul(u, g.add(bent, g.constant(B / one)))
    rotated = g.matmul(g.reshape(z, (0, -1, GROUP)), g.constant(rotation() * (2.0 ** (BITS - 1) / DEVIATION)))
    g.op("Reshape", rotated, g.constant([0, -1]), out="y")
    return _function("Normals", ["key", "counters"], ["y"], g)


def rotation() -> NDArray[np.float64]:
    """An orthogonal matrix (16, 16) of ± ¼, the signs of Hadamard's and of a bent function of the row.

    The sum of every column is ± 1: the mean of u, −½, gives every normal a mean of ± 5e-5, and none a larger one.
    """
    bits = np.arange(GROUP)[:, None] >> np.arange(4) & 1
    bent = bits[:, :1] * bits[:, 1:2] + bits[:, 2:3] * bits[:, 3:]
    signs: NDArray[np.float64] = (-1.0) ** (bits @ bits.T + bent)
    rotated: NDArray[np.float64] = signs / np.sqrt(GROUP)
    return rotated


def _folded(g: Graph, x: str, shift: int, out: str | None = None) -> str:
    shifted = g.op("BitShift", x, g.constant(shift, np.uint64), direction="RIGHT")
    return g.op("BitwiseXor", x, shifted, out=out)


def _times(g: Graph, x: str, factor: int) -> str:
    return g.mul(x, g.constant(factor, np.uint64))


def _function(name: str, inputs: list[str], outputs: list[str], g: Graph) -> onnx.FunctionProto:
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in g.initializers]
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(OURS, 1)]
    return helper.make_function(OURS, name, inputs, outputs, [*constants, *g.nodes], imports)
