"""The normals of an exported graph, run by onnxruntime: their law, and that none of them shares bits with another."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dubito.deploy.edge.graph import Graph
from dubito.deploy.edge.normals import DEVIATION, B, C, GraphNormals, rotation

Floats = NDArray[np.float32]
Words = NDArray[np.uint64]
SEEDS = (0, 2**40 + 3, -5)
EACH = [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
K, SIZES = 8, (1 << 17, 100_003, 3_000, 5_001)  # draws, and normals of the layers
MOST = 5.0  # standard errors


def session_of(g: Graph, names: list[str], kind: int, inputs: dict[str, int]) -> Callable[..., list[Any]]:
    entries = [helper.make_tensor_value_info("seed", TensorProto.INT64, [])]
    entries += [helper.make_tensor_value_info(name, of, ["n"]) for name, of in inputs.items()]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in names]
    graph = helper.make_graph(g.nodes, "normals", entries, outputs, g.initializers)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("dubito", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(g.functions.values()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(seed: int, **more: NDArray[Any]) -> list[Any]:
        return list(session.run(None, {"seed": np.array(seed, np.int64), **more}))

    return run


def drawing(draws: int, sizes: tuple[int, ...]) -> Callable[..., list[Any]]:
    g = Graph()
    noise = GraphNormals(g, draws, "seed")
    names = [noise.normals(n, f"layer{i}:V") for i, n in enumerate(sizes)]
    noise.finish()
    return session_of(g, names, TensorProto.FLOAT, {})


def words_of(draws: int) -> Callable[..., list[Any]]:
    """Words (draws, n) of a seed and of counters (n,)."""
    g = Graph()
    words = GraphNormals(g, draws, "seed").words("counters")
    return session_of(g, [words], TensorProto.UINT64, {"counters": TensorProto.UINT64})


@pytest.fixture(scope="module")
def layers() -> dict[int, list[Floats]]:
    """Normals (K, n) of each layer, by seed."""
    run = drawing(K, SIZES)
    return {seed: run(seed) for seed in SEEDS}


def even_moment(k: int) -> float:
    """E z^k = (k − 1)!! of a standard normal."""
    return float(math.prod(range(k - 1, 0, -2)))


@pytest.mark.parametrize("seed", EACH)
def test_moments_are_those_of_a_normal(layers: dict[int, list[Floats]], seed: int) -> None:
    """To the eighth order, in all layers and at each of the sixteen places of a rotation."""
    a, b, few, more = layers[seed]
    assert [v.shape for v in (a, b, few, more)] == [(K, n) for n in SIZES]
    places = a.reshape(-1, 16).astype(np.float64)
    for z in (np.concatenate([v.ravel() for v in (a, b, few, more)]).astype(np.float64), *places.T):
        power = np.ones_like(z)
        for k in range(1, 9):
            power *= z  # z**k takes twenty times as long
            expected = even_moment(k) if k % 2 == 0 else 0.0
            error = math.sqrt((even_moment(2 * k) - expected**2) / z.size)
            assert abs(power.mean() - expected) < MOST * error, k


def neighbours(
    layers: dict[int, list[Floats]], seed: int, form: Callable[[Floats], NDArray[Any]]
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Pairs of normals that are next to each other in some direction, in this form: (a name, the ones, the others).

    A form (..., K, n) is made of normals (K, n) once, not for each pair.
    """
    following = next(iter(s for s in SEEDS if s != seed))
    a, b, other_seed = map(form, (*layers[seed][:2], layers[following][0]))
    for lag in (*(1 << i for i in range(17)), 3, 15, 17, 255):
        yield f"lag {lag}", a[..., :-lag], a[..., lag:]
    n = b.shape[-1]
    yield "layer", a[..., :n], b
    for one, other in itertools.combinations(range(K), 2):
        yield f"draws {one} and {other}", a[..., [one], :], a[..., [other], :]
    yield "seed", a, other_seed
    yield "seed and draw", a[..., :-1, :], other_seed[..., 1:, :]


@pytest.mark.parametrize("seed", EACH)
def test_neighbours_are_uncorrelated(layers: dict[int, list[Floats]], seed: int) -> None:
    """In value, size and third power; each has variance 1, so the mean of N products has the standard error 1/√N."""

    def powers(v: Floats) -> NDArray[np.float64]:
        z = v.astype(np.float64)
        return np.stack([z, (z * z - 1) / math.sqrt(2), z * (z * z - 3) / math.sqrt(6)])

    for name, one, other in neighbours(layers, seed, powers):
        N = one[0].size
        for i, j in ((1, 1), (2, 2), (1, 2), (3, 3)):
            mean = np.einsum("kn,kn->", one[i - 1], other[j - 1]) / N
            assert abs(mean) < MOST / math.sqrt(N), (name, i, j)


@pytest.mark.parametrize("seed", EACH)
def test_pairs_fill_equally_likely_squares_equally(layers: dict[int, list[Floats]], seed: int) -> None:
    """χ² of 16 × 16 squares; it has the mean 255 and the variance 510."""
    from scipy.stats import norm

    edges = norm.ppf(np.arange(1, 16) / 16)
    for name, one, other in neighbours(layers, seed, lambda z: np.searchsorted(edges, z)):
        if name.startswith("lag"):  # whole pairs, so that they are independent of each other
            lag = int(name.split()[1])
            keep = np.arange(one.shape[1]) // lag % 2 == 0
            one, other = one[:, keep], other[:, keep]
        cell = (one * 16 + other).ravel()
        counts, expected = np.bincount(cell, minlength=256), cell.size / 256
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi2 - 255) < MOST * math.sqrt(510), name


@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_tails_reach_as_far_as_those_of_a_normal(start: int) -> None:
    """Counts beyond 3, 4, 4.5 and 5 on each side, of 33 million normals: 10 are expected beyond 5."""
    from scipy.stats import norm

    run, limits, N = drawing(16, (1 << 18,)), (3.0, 4.0, 4.5, 5.0), 0
    counts = np.zeros((2, len(limits)))
    for seed in range(start, start + 8):
        (z,) = run(seed)
        N += z.size
        far = z[np.abs(z) > limits[0]]
        counts += [[(sign * far > limit).sum() for limit in limits] for sign in (1, -1)]
    expected = N * norm.sf(limits)
    assert expected[-1] > 9
    assert (np.abs(counts - expected) < MOST * np.sqrt(expected)).all(), counts
    assert (np.abs(counts.sum(0) - 2 * expected) < MOST * np.sqrt(2 * expected)).all()


def bits_of(words: Words) -> NDArray[np.uint8]:
    """(..., 64), the lowest first."""
    return np.unpackbits(np.ascontiguousarray(words)[..., None].view(np.uint8), axis=-1, bitorder="little")


@pytest.mark.parametrize("seed", EACH)
def test_bits_of_words_are_even_and_independent(seed: int) -> None:
    """Of one word, and of the words of neighbouring counters and draws."""
    (words,) = words_of(4)(seed, counters=np.arange(30_000, dtype=np.uint64))
    signs = np.float32(2) * bits_of(words) - 1  # (4, n, 64); sums of fewer than 2²⁴ signs are exact
    N = words.size
    assert (np.abs(signs.mean((0, 1), dtype=np.float64)) < MOST / math.sqrt(N)).all()
    flat = signs.reshape(-1, 64)
    within = flat.T @ flat / N
    assert np.abs(within - np.eye(64)).max() < MOST / math.sqrt(N)
    for one, other in ((signs[:, :-1], signs[:, 1:]), (signs[:-1], signs[1:]), (signs[:2], signs[2:])):
        a, b = one.reshape(-1, 64), other.reshape(-1, 64)
        assert np.abs(a.T @ b).max() < MOST * math.sqrt(len(a))


@pytest.mark.parametrize("seed", EACH)
def test_a_bit_of_the_counter_changes_half_of_the_bits(seed: int) -> None:
    """Each of 64 bits of a counter, small or large: every bit of the word flips in half of the cases."""
    run, rng = words_of(4), np.random.default_rng(0)
    counters = np.concatenate([np.arange(2_000), rng.integers(0, 2**63, 2_000)]).astype(np.uint64)
    for bit in map(np.uint64, range(64)):
        without = counters[counters >> bit & np.uint64(1) == 0]  # else a pair of counters would count twice
        (words,), (changed,) = (run(seed, counters=c) for c in (without, without | np.uint64(1) << bit))
        share = bits_of(words ^ changed).mean((0, 1))
        assert np.abs(share - 0.5).max() < MOST * 0.5 / math.sqrt(words.size), bit


@pytest.mark.parametrize("first", [0, 2**50])
def test_a_bit_of_the_seed_changes_half_of_the_bits(first: int) -> None:
    run, counters = words_of(4), np.arange(256, dtype=np.uint64)
    seeds = range(first, first + 800, 100)  # no two differ in one bit only
    words = np.stack([run(seed, counters=counters)[0] for seed in seeds])
    for bit in range(64):
        flip = 1 << bit if bit < 63 else -(1 << 63)
        changed = np.stack([run(seed ^ flip, counters=counters)[0] for seed in seeds])
        share = bits_of(words ^ changed).mean((0, 1, 2))
        assert np.abs(share - 0.5).max() < MOST * 0.5 / math.sqrt(words.size), bit


def test_no_word_comes_twice() -> None:
    """Of any layer, draw or seed: two of 1.2 million words of 64 bits are equal with probability 4e-8."""
    counters = np.arange(50_000, dtype=np.uint64)
    run = words_of(8)
    words = np.stack([run(seed, counters=counters)[0] for seed in SEEDS])
    assert len(np.unique(words)) == words.size


def mixed(x: int) -> int:
    """The mixing of SplitMix64, in whole numbers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_normals_are_those_of_the_documented_formula() -> None:
    """Bit by bit in Python's whole numbers, for the places of two layers; the rotation is the module's own."""
    seed, draws, sizes = -12345, 3, (100, 60)
    step, draw = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    found = np.concatenate(drawing(draws, sizes)(seed), 1)
    assert found.shape == (draws, 160)
    quarters = np.zeros((draws, 4, 48))  # 160 normals need 40 words; sixteen are rotated together
    for k in range(draws):
        key = mixed((mixed((seed + draw) % 2**64) + (k + 1) * draw) % 2**64)
        for i in range(48):
            x = (key + mixed(i * step % 2**64)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 32) * 0x94D049BB133111EB % 2**64
            x ^= x >> 32
            for piece in range(4):
                u = x >> 16 * piece & 0xFFFF
                quarters[k, piece, i] = (u - 65536 if u >= 32768 else u) / 32768
    z = quarters * (B + 1 / (C - quarters**2)) / DEVIATION
    expected = (z.reshape(draws, -1, 16) @ rotation()).reshape(draws, -1)
    np.testing.assert_allclose(found, expected[:, :160], atol=1e-5)


def test_every_number_of_sixteen_bits_makes_the_moments_of_a_normal() -> None:
    """Over all 65,536; sixteen are rotated by an orthogonal matrix, which divides what is left of odd cumulants."""
    u = np.arange(-32768, 32768) / 32768
    z = u * (B + 1 / (C - u**2)) / DEVIATION
    assert abs(z.mean()) < 5e-5  # there is one negative number more than positive ones
    z -= z.mean()
    for k in (2, 4, 6):
        assert abs((z**k).mean() - even_moment(k)) < 1e-9
    assert abs((z**3).mean()) < 4e-4
    assert abs((z**5).mean() - 10 * (z**3).mean()) < 1e-3
    np.testing.assert_allclose(rotation().T @ rotation(), np.eye(16), atol=1e-12)
    assert np.abs(rotation().sum(0)).max() == 1


def test_the_tails_of_a_sum_of_sixteen_are_as_documented() -> None:
    """Shares beyond 4, 5 and 6 by inverting the characteristic function, without any sampling."""
    from scipy.stats import norm

    u = (np.arange(32768) + 0.5) / 32768  # without the half that u is off by; positive ones, as the cosine is even
    z = u * (B + 1 / (C - u**2)) / DEVIATION
    t = 0.01 * (np.arange(1_200) + 0.5)
    characteristic = np.array([np.cos(s * z / 4).mean() for s in t]) ** 16
    for limit, expected in ((4, 0.0003), (5, 0.006), (6, 0.033)):
        less = ((characteristic - np.exp(-(t**2) / 2)) * np.sin(t * limit) / t).sum() * 0.01 / math.pi
        assert less / norm.sf(limit) == pytest.approx(expected, rel=0.1)
