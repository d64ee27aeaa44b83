"""Passes on a CPU as sessions of onnxruntime: draws from given normals, layers and sums, compiled when a model loads.

A small network spends its time in torch on dispatching operators. A session runs the same operators, with the same
normals, in a third of the time. Each pass is compared with torch's before it serves, and is used where it is faster.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor, nn

from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors, Plan
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.numerics.normals_native import prepare
from dubito.models.numerics.processor import processor
from dubito.models.predictions.prediction import Job, evaluating, sums_of, tempered
from dubito.models.predictions.uncertainty import Reals
from dubito.service.engine.budget import MemoryShare
from dubito.service.engine.pace import seconds_of
from dubito.service.engine.pass_cache import PassCache
from dubito.service.engine.recording import LARGEST as LARGEST_PASS
from dubito.service.engine.recording import NotRecorded, record
from dubito.service.engine.sessions import (
    COLUMNS,
    COUNTED,
    INPUT,
    OUTPUT,
    CompiledPass,
    DrawsAhead,
    Sessions,
    Written,
    packed,
    runtime_version,
    unpacked,
)

log = logging.getLogger("dubito")
RUNS = 9  # timed runs of a pass, of which the fastest counts; fewer of one that takes long
SHORT = 0.02  # seconds of a pass that is timed so often
THREADS = 8  # of a session, at most
FASTER = 0.9  # of torch's time: a session that takes longer is not used
AGREES = 1e-3  # largest difference of the means over draws, of 1 or of the mean where that is larger
FORM = 4  # of the files in the cache


class CompiledPasses:
    """The compiled passes of one model by B and K; passes that cannot be compiled run by torch."""

    def __init__(self, network: BayesianNetwork, factors: NetworkFactors, cache: PassCache, seconds: float) -> None:
        """Compiling and timing take about `seconds` in all; passes that the cache holds are only compared."""
        self.network, self.factors, self.cache, self.left = network, factors, cache, seconds
        self.known: dict[tuple[int, int], CompiledPass] = {}
        self.bytes = self._largest = 0
        self._key: str | None = None
        self._sessions, self._pool = Sessions(), ThreadPoolExecutor(1, "half a pass")
        self._ahead: DrawsAhead | None = None
        prepare(cache.folder)

    def at(self, B: int, K: int) -> CompiledPass | None:
        return self.known.get((B, K))

    def unseeded(self) -> DrawsAhead:
        """Normals of a seed that nobody has chosen, for a request whose first pass is compiled."""
        ahead, self._ahead = self._ahead or DrawsAhead(), None
        return ahead

    def _draw_ahead(self, used: CompiledPass) -> None:
        """Begin with the draws of the next request without a seed, in the thread that computes halves."""
        if self._ahead is None:
            self._ahead = DrawsAhead(used.parts, self._pool)

    def _opened(self, written: Sequence[Written], threads: int, B: int) -> CompiledPass:
        then = WeakMethod(self._draw_ahead)

        def taken(used: CompiledPass) -> None:
            if (draw := then()) is not None:
                draw(used)

        return CompiledPass(written, threads, self.network, B, self._pool, self._sessions, taken)

    def compile(self, job: Job, K: int, share: MemoryShare) -> None:
        """Compile the pass of K draws of the job's inputs, where it is one pass and the memory allows it."""
        size, factors = (job.B, K), self.factors
        possible = factors.capturable and factors.folds and job.dtype == torch.float32 == job.given.dtype
        if not K or not possible or size in self.known or job.max_rows < job.B * K or not available():
            return
        if K > 1 and not self.network.learned.folds:
            return
        try:
            with evaluating(self.network), torch.inference_mode():
                found = self._compiled(job, K, share)
        except NotRecorded as error:
            log.info("a pass is not compiled", extra={"inputs": job.B, "samples": K, "why": str(error)})
            self.left = 0.0  # nor is one of another size
            return
        except Exception as error:  # of onnxruntime: torch's pass is there
            log.warning("a pass is not compiled", extra={"inputs": job.B, "samples": K, "why": str(error)[:200]})
            return
        if found is None:
            return
        if share.limited and share.budget.left < found.bytes + share.need(*size):
            log.info("a compiled pass does not fit the memory", extra={"inputs": job.B, "samples": K})
            return
        self.known[size] = found
        self._largest = max(self._largest, int(share.need(*size)))
        self.bytes = self._largest + sum(one.bytes for one in self.known.values())  # values share one pool

    def _compiled(self, job: Job, K: int, share: MemoryShare) -> CompiledPass | None:
        """The fastest way, from the cache or anew; None where torch is as fast."""
        check, key = _Check(job, K, self._pool), self._key_of(job, K)
        kept = self.cache.read(key)
        if kept is not None:
            try:
                threads, written = unpacked(kept)
                if not threads:
                    return None
                if (has := sum(one.K for one in written)) != K:
                    raise NotRecorded(f"it has {has} draws, not {K}")
                found = self._opened(written, threads, job.B)
                check.compare(found)
                return found
            except Exception as error:
                log.warning("a compiled pass of the cache is not used", extra={"why": str(error)[:200]})
        if self.left <= 0:
            return None
        began = time.perf_counter()
        largest = min(LARGEST_PASS, share.budget.left) if share.limited else LARGEST_PASS
        times: dict[CompiledPass, float] = {}
        plain = _seconds(check.plain, math.inf)
        failed: NotRecorded | None = None
        for plan in _plans(job.plan(job.B, K), cheapest(self.factors)):
            if times and time.perf_counter() - began > self.left:
                break
            try:
                for written, threads in self._ways(job, K, plan, largest):
                    then = check.draw_ahead
                    found = CompiledPass(written, threads, self.network, job.B, self._pool, self._sessions, then)
                    check.compare(found)
                    times[found] = _seconds(partial(check.run_unseeded, found), min([plain, *times.values()]))
                    if time.perf_counter() - began > self.left:
                        break
            except NotRecorded as error:  # another plan may do
                failed = error
        if failed is not None and not times:
            raise failed
        best = min(times, key=times.__getitem__)
        plain = min(plain, _seconds(check.plain, plain))  # before and after: the machine may have been busy
        faster = times[best] < FASTER * plain
        self.cache.write(key, packed(best.threads, best.written) if faster else packed(0, ()))
        self.left -= time.perf_counter() - began
        return self._opened(best.written, best.threads, job.B) if faster else None

    def _ways(self, job: Job, K: int, plan: Plan, largest: int) -> Iterator[tuple[list[Written], int]]:
        """Ways to compute the pass by a plan, with the threads of a session."""
        cores = min(THREADS, torch.get_num_threads())
        whole = write_pass(job, K, plan, largest)
        if cores > 1:
            yield [whole], cores
        yield [whole], 1
        if cores > 1 and K > 1:
            first = write_pass(job, K - K // 2, plan, largest)
            yield [first, first if K % 2 == 0 else write_pass(job, K // 2, plan, largest)], 1

    def _key_of(self, job: Job, K: int) -> str:
        """What decides how a pass is computed and how fast it is, the weights included."""
        if self._key is None:
            versions = [FORM, torch.__version__, runtime_version(), metadata.version("dubito")]
            factors = self.factors
            digest = hashlib.sha256()
            parts = (*versions, processor(), self.network.task, factors.layers, factors.hierarchy, factors.read)
            for part in _leaves((*parts, self.network)):
                digest.update(part)
            self._key = digest.hexdigest()
        shape = (tuple(job.given.shape), K, job.temperature, torch.get_num_threads())
        return hashlib.sha256(repr((self._key, shape)).encode()).hexdigest()


def _leaves(value: object) -> Iterator[bytes | memoryview]:
    """All that a value holds, as bytes, in a fixed order."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    elif isinstance(value, nn.Module):
        yield repr(value).encode()
        yield from (leaf for t in (*value.parameters(), *value.buffers()) for leaf in _leaves(t))
    elif isinstance(value, Mapping):
        yield from (leaf for pair in value.items() for leaf in _leaves(pair))
    elif isinstance(value, list | tuple):
        yield from (leaf for part in value for leaf in _leaves(part))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _leaves([type(value).__name__, vars(value)])
    else:
        yield repr(value).encode()


def available() -> bool:
    return find_spec("onnxruntime") is not None and find_spec("onnx") is not None


def write_pass(job: Job, K: int, plan: Plan, largest: int = LARGEST_PASS) -> Written:
    """The pass of K draws of the job's inputs, whose values together may take `largest` bytes."""
    from dubito.service.engine.division import divide
    from dubito.service.engine.lowering import OPERATORS, Writer

    network, factors = job.network, job.factors

    def sums(x: Tensor, counted: Tensor, normals: Tensor) -> Tensor:
        outputs = network.run(x, factors, Draws(K, normals, 0), plan)
        return sums_of(network, factors.read, counted)(tempered(outputs, job.temperature, factors.read))

    given = (job.x, torch.ones(K, dtype=torch.float64), torch.zeros(K, factors.normals))
    recording = record(sums, given, frozenset(OPERATORS), largest)
    model, sizes = Writer().write(recording, (INPUT, COUNTED, "normals"), OUTPUT, apart="normals", columns=COLUMNS)
    parts = divide(model, (INPUT, COUNTED))
    return Written(K, tuple(sizes), parts.draws, parts.network, parts.operands, parts.size)


class _Check:
    """Compares a compiled pass with torch's on random inputs."""

    def __init__(self, job: Job, K: int, pool: Executor) -> None:
        self.job, self.network, self.K, self._pool = job, job.network, K, pool
        self._ahead: DrawsAhead | None = None
        self.x = torch.randn(job.given.shape, generator=torch.Generator().manual_seed(1))
        counts = dict.fromkeys((K, max(1, K - 1)))  # a pass may have fewer draws than it was compiled for
        self.expected = [(k, seed, self._plain(k, seed)) for seed, k in enumerate(counts)]

    def _plain(self, k: int, seed: int) -> Reals:
        draws = Draws(k, self._normals(seed).rows(k, self.job.factors.normals), 0)
        plan, read = self.job.plan(self.job.B, self.K), self.job.factors.read
        outputs = self.network.go(self.x, self.network.arrange(self.job.factors, draws, plan))
        sums: Reals = sums_of(self.network, read)(tempered(outputs, self.job.temperature, read)).double().numpy()
        return sums

    def _normals(self, seed: int) -> Normals:
        return Normals(seed, torch.device("cpu"))

    def plain(self) -> Reals:
        return self._plain(self.K, 0)

    def _sums(self, compiled: CompiledPass, k: int, normals: Normals) -> Reals:
        return compiled.sums(self.x, Draws(k, None, 0, by_graph=True), normals)

    def run_unseeded(self, compiled: CompiledPass) -> Reals:
        """As one request after another: the draws of the next one are made meanwhile."""
        normals, self._ahead = self._ahead or DrawsAhead(), None
        return self._sums(compiled, self.K, normals)

    def draw_ahead(self, used: CompiledPass) -> None:
        self._ahead = DrawsAhead(used.parts, self._pool)

    def compare(self, compiled: CompiledPass) -> None:
        for k, seed, expected in self.expected:
            sums = self._sums(compiled, k, self._normals(seed))
            if sums.shape != expected.shape or sums.dtype != np.float64:
                raise NotRecorded(f"its sums are {sums.dtype} {sums.shape}, torch's float64 {expected.shape}")
            finite = np.isfinite(expected)
            if not np.array_equal(finite, np.isfinite(sums)):
                raise NotRecorded("its sums are finite where torch's are not, or not where they are")
            sums, expected = sums[finite], expected[finite]
            error = np.abs(sums - expected) / np.maximum(self.K, np.abs(expected))
            if not (error <= AGREES).all():
                raise NotRecorded(f"its sums differ from torch's by {error.max():.2g} of their size")


def _plans(measured: Plan, fewest: Plan) -> list[Plan]:
    """Plans to be tried: that of the fewest multiplications and the one that torch was measured with, with all draws of
    a layer in one call, for which a session has no patches to copy; and the latter as it is."""
    together: list[Plan] = [
        {name: "batch" if how in ("loop", "unfold") else how for name, how in plan.items()}
        for plan in (fewest, measured)
    ]
    plans = [*together, dict(measured)]
    return [plan for i, plan in enumerate(plans) if plan not in plans[:i]]


def _seconds(run: Callable[[], object], limit: float) -> float:
    """Seconds of the fastest of some runs; of the first two alone where these take long, or longer than the limit."""
    run()
    first = seconds_of(run)
    if first > 2 * limit:
        return first
    return min([first, *(seconds_of(run) for _ in range(RUNS if first < SHORT else 1))])
