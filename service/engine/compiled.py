"""Passes on a CPU as sessions of onnxruntime: draws from given normals, layers and sums, compiled when a model loads.

A small network spends its time in torch on dispatching operators. A session runs the same operators, with the same
normals, in a third of the time. Each pass is compared with torch's before it serves, and is used where it is faster.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors, Plan
from dubito.models.numerics.normals import Normals, NormalsAhead
from dubito.models.numerics.normals_native import prepare
from dubito.models.predictions.prediction import Job, evaluating, seed_of, sums_of, tempered
from dubito.models.predictions.uncertainty import Reals, on_host, value_sums_of_both
from dubito.service.engine.budget import MemoryShare
from dubito.service.engine.pace import seconds_of
from dubito.service.engine.plans import plan_file
from dubito.service.engine.recording import LARGEST as LARGEST_PASS
from dubito.service.engine.recording import NotRecorded, record

log = logging.getLogger("dubito")
INPUT, COLUMNS, OUTPUT = "x", "columns_", "sums"
RUNS = 9  # timed runs of a pass, of which the fastest counts; fewer of one that takes long
SHORT = 0.02  # seconds of a pass that is timed so often
THREADS = 8  # of a session, at most
FASTER = 0.9  # of torch's time: a session that takes longer is not used
AGREES = 1e-3  # largest difference of the means over draws, of 1 or of the mean where that is larger
LARGEST = 1 << 29  # bytes of the folder of compiled passes
CHECKED = 2  # seeds with which a pass is compared with torch's


@dataclass(frozen=True)
class Written:
    """A pass of K draws as a serialised ONNX model, whose inputs are x and the parts of the normals, by columns."""

    K: int
    sizes: tuple[int, ...]  # of all parts of the normals of a draw, in order
    model: bytes


@cache
def _share_memory() -> None:
    """One pool of memory for the values of all sessions, of which one or two run at a time."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 1}))  # as requested


class Session:
    """A written pass, ready to run."""

    def __init__(self, written: Written, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch's threads need the cores, too
        _share_memory()
        options.add_session_config_entry("session.use_env_allocators", "1")
        session = onnxruntime.InferenceSession(written.model, options, providers=["CPUExecutionProvider"])
        self.run, self.K, self.sizes = session.run, written.K, np.array(written.sizes)
        taken = {given.name for given in session.get_inputs()}
        starts = [0, *np.cumsum(self.sizes).tolist()]
        self._parts = [
            (name, self.K * start, self.K * end, (self.K, end - start))
            for start, end in pairwise(starts)
            if (name := f"{COLUMNS}{start}") in taken
        ]

    def __call__(self, x: NDArray[Any], normals: NDArray[np.float32]) -> Reals:
        inputs = {name: normals[start:end].reshape(shape) for name, start, end, shape in self._parts}
        sums: Reals = self.run(None, {INPUT: x, **inputs})[0]
        return sums


class CompiledPass:
    """The pass of B inputs and K draws, in one session, or half of its draws in each of two threads."""

    def __init__(self, written: Sequence[Written], threads: int, network: BayesianNetwork, B: int, pool: Executor):
        """`threads` of each session."""
        by_model = {one.model: Session(one, threads) for one in written}
        self.sessions = [by_model[one.model] for one in written]
        self.written, self.threads, self.B, self._pool = written, threads, B, pool
        self.bytes = sum(2 * len(model) for model in by_model)  # the constants, and as products pack them
        self._D = network.task.outputs if network.task.kind == "regression" else None

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        rows: NDArray[Any] = on_host(x)
        if len(rows) < self.B:
            rows = np.concatenate([rows, np.broadcast_to(rows[:1], (self.B - len(rows), *rows.shape[1:]))])
        first, *rest = self.sessions
        noise = normals.parts(first.K, first.sizes).numpy()
        if not rest:
            return first(rows, noise)[: len(x)]
        (second,) = rest
        begun = self._pool.submit(first, rows, noise)
        others = second(rows, normals.parts(second.K, second.sizes).numpy())
        sums = begun.result()
        if self._D is not None:
            return value_sums_of_both(sums, first.K, others, second.K, self._D)[: len(x)]
        return (sums + others)[: len(x)]


class CompiledPasses:
    """The compiled passes of one model by B and K; passes that cannot be compiled run by torch."""

    def __init__(self, network: BayesianNetwork, factors: NetworkFactors, cache: "PassCache", seconds: float) -> None:
        """Compiling and timing take about `seconds` in all; passes that the cache holds are only compared."""
        self.network, self.factors, self.cache, self.left = network, factors, cache, seconds
        self.known: dict[tuple[int, int], CompiledPass] = {}
        self.bytes = self._largest = 0
        self._key: str | None = None
        self._pool = ThreadPoolExecutor(1, "half a pass")
        self._ahead: tuple[int, NormalsAhead, Future[None]] | None = None  # for K draws
        prepare(cache.folder)

    def at(self, B: int, K: int) -> CompiledPass | None:
        return self.known.get((B, K))

    def ahead(self, B: int, K: int) -> NormalsAhead | None:
        """Normals for a request without a seed, if they were made for this pass; they are handed out once."""
        if self._ahead is None or self._ahead[0] != K or self.at(B, K) is None:
            return None
        (_, normals, begun), self._ahead = self._ahead, None
        begun.result()
        return normals

    def make_ahead(self, B: int, K: int) -> None:
        """Begin with the normals of the next request without a seed, in the thread that computes halves."""
        found = self.at(B, K)
        if found is not None and self._ahead is None:
            normals = NormalsAhead(seed_of(None), [(one.K, one.sizes) for one in found.sessions])
            self._ahead = K, normals, self._pool.submit(normals.make)

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
        check, key = _Check(job, K), self._key_of(job, K)
        kept = self.cache.read(key)
        if kept is not None:
            try:
                threads, written = _unpacked(kept)
                if not threads:
                    return None
                found = CompiledPass(written, threads, self.network, job.B, self._pool)
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
        for written, threads in self._ways(job, K, largest):
            found = CompiledPass(written, threads, self.network, job.B, self._pool)
            check.compare(found)
            times[found] = _seconds(partial(check.run, found), min([plain, *times.values()]))
            if time.perf_counter() - began > self.left:
                break
        best = min(times, key=times.__getitem__)
        plain = min(plain, _seconds(check.plain, plain))  # before and after: the machine may have been busy
        faster = times[best] < FASTER * plain
        self.cache.write(key, _packed(best.threads, best.written) if faster else _packed(0, ()))
        self.left -= time.perf_counter() - began
        return best if faster else None

    def _ways(self, job: Job, K: int, largest: int) -> Iterator[tuple[list[Written], int]]:
        """Ways to compute the pass, with the threads of a session."""
        cores = min(THREADS, torch.get_num_threads())
        for plan in _plans(job.plan(job.B, K)):
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
            versions = [metadata.version(name) for name in ("torch", "onnxruntime", "dubito")]
            factors = self.factors
            digest = hashlib.sha256()
            parts = (*versions, platform.machine(), self.network.task, factors.layers, factors.hierarchy, factors.read)
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
    from dubito.service.engine.lowering import OPERATORS, Writer

    network, factors = job.network, job.factors

    def sums(x: Tensor, normals: Tensor) -> Tensor:
        outputs = network.run(x, factors, Draws(K, normals, 0), plan)
        return sums_of(network, factors.read)(tempered(outputs, job.temperature, factors.read))

    recording = record(sums, (job.x, torch.zeros(K, factors.normals)), frozenset(OPERATORS), largest)
    model, sizes = Writer().write(recording, (INPUT, "normals"), OUTPUT, apart="normals", columns=COLUMNS)
    return Written(K, tuple(sizes), model)


class _Check:
    """Compares a compiled pass with torch's on random inputs."""

    def __init__(self, job: Job, K: int) -> None:
        self.job, self.network, self.K = job, job.network, K
        self.x = torch.randn(job.given.shape, generator=torch.Generator().manual_seed(1))
        self.draws = Draws(K, None, 0, by_graph=True)
        self.expected = [self._plain(seed) for seed in range(CHECKED)]

    def _plain(self, seed: int) -> Reals:
        draws = Draws(self.K, self._normals(seed).rows(self.K, self.job.factors.normals), 0)
        plan, read = self.job.plan(self.job.B, self.K), self.job.factors.read
        outputs = self.network.go(self.x, self.network.arrange(self.job.factors, draws, plan))
        sums: Reals = sums_of(self.network, read)(tempered(outputs, self.job.temperature, read)).double().numpy()
        return sums

    def _normals(self, seed: int) -> Normals:
        return Normals(seed, torch.device("cpu"))

    def plain(self) -> Reals:
        return self._plain(0)

    def run(self, compiled: CompiledPass, seed: int = 0) -> Reals:
        return compiled.sums(self.x, self.draws, self._normals(seed))

    def compare(self, compiled: CompiledPass) -> None:
        for seed, expected in enumerate(self.expected):
            sums = self.run(compiled, seed)
            if sums.shape != expected.shape or sums.dtype != np.float64:
                raise NotRecorded(f"its sums are {sums.dtype} {sums.shape}, torch's float64 {expected.shape}")
            error = np.abs(sums - expected) / np.maximum(self.K, np.abs(expected))
            if not (error <= AGREES).all() and np.isfinite(expected).all():
                raise NotRecorded(f"its sums differ from torch's by {np.nanmax(error):.2g} of their size")


def _plans(plan: Plan) -> list[Plan]:
    """Plans to be tried: with all draws of a layer in one call, for which a session has no patches to copy; and as
    measured with torch."""
    together: Plan = {name: "batch" if how in ("loop", "unfold") else how for name, how in plan.items()}
    return [together] if together == dict(plan) else [together, plan]


def _seconds(run: Callable[[], object], limit: float) -> float:
    """Seconds of the fastest of some runs; of the first two alone where these take long, or longer than the limit."""
    run()
    first = seconds_of(run)
    if first > 2 * limit:
        return first
    return min([first, *(seconds_of(run) for _ in range(RUNS if first < SHORT else 1))])


def _packed(threads: int, written: Sequence[Written]) -> bytes:
    """For the cache: a line of JSON, then the models."""
    models = list(dict.fromkeys(one.model for one in written))
    passes = [{"K": one.K, "sizes": one.sizes, "model": models.index(one.model)} for one in written]
    head = {"threads": threads, "passes": passes, "lengths": [len(model) for model in models]}
    return json.dumps(head).encode() + b"\n" + b"".join(models)


def _unpacked(kept: bytes) -> tuple[int, list[Written]]:
    line, _, rest = kept.partition(b"\n")
    head = json.loads(line)
    ends = [0, *accumulate(head["lengths"])]
    models = [rest[start:end] for start, end in pairwise(ends)]
    passes = [Written(one["K"], tuple(one["sizes"]), models[one["model"]]) for one in head["passes"]]
    return int(head["threads"]), passes


class PassCache:
    """Compiled passes in a folder, one file each, which begins with a checksum; with folder None nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """None where there is no such file, or it is damaged."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.pass"
        try:
            content = path.read_bytes()
            os.utime(path)  # files that were not read for longest are removed first
        except OSError:
            return None
        if content[:32] != hashlib.sha256(content[32:]).digest():
            log.warning("a compiled pass of the cache is damaged", extra={"file": str(path)})
            return None
        return content[32:]

    def write(self, key: str, content: bytes) -> None:
        if self.folder is None or len(content) > LARGEST:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f"{key}.{os.getpid()}"
            draft.write_bytes(hashlib.sha256(content).digest() + content)
            draft.replace(self.folder / f"{key}.pass")
            self._shrink()
        except OSError as error:
            log.warning("compiled passes cannot be kept", extra={"error": str(error)})
            self.folder = None

    def _shrink(self) -> None:
        """Remove the files that were not used for longest, beyond the limit of the folder."""
        held = 0
        for path, size in self._by_age():
            held += size
            if held > LARGEST:
                path.unlink(missing_ok=True)

    def _by_age(self) -> Iterator[tuple[Path, int]]:
        assert self.folder is not None
        files = [(path, path.stat()) for path in self.folder.glob("*.pass")]
        return ((path, stat.st_size) for path, stat in sorted(files, key=lambda one: -one[1].st_mtime))


def pass_folder() -> Path:
    """The folder of compiled passes, in the user's cache folder."""
    return plan_file().with_name("passes")
