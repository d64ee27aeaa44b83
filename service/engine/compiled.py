"""Passes on a CPU as sessions of onnxruntime: draws from given normals, layers and sums, compiled when a model loads.

A small network spends its time in torch on dispatching operators. A session runs the same operators, with the same
normals, in a third of the time. Each pass is compared with torch's before it serves, and is used where it is faster.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors, Plan
from dubito.models.predictions.prediction import Job, evaluating, sums_of, tempered
from dubito.models.predictions.resident import tensors_of
from dubito.models.predictions.uncertainty import Reals, on_host
from dubito.service.engine.budget import MemoryShare
from dubito.service.engine.plans import plan_file
from dubito.service.engine.recording import NotRecorded, record

log = logging.getLogger("dubito")
INPUTS, OUTPUT = ("x", "normals"), "sums"
RUNS, WARM = 9, 2  # timed runs of a pass, of which the fastest counts, and runs before them
FASTER = 0.95  # of torch's time: a session that takes longer is not used
AGREES = 1e-3  # largest difference of the means over draws, of 1 or of the mean where that is larger
LARGEST = 1 << 29  # bytes of the folder of compiled passes
CHECKED = 2  # seeds with which a pass is compared with torch's


class CompiledPass:
    """The pass of B inputs and K draws, whose normals are handed in."""

    makes_normals = False

    def __init__(self, model: bytes, B: int, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch's threads need the cores, too
        self._run = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run
        self.B, self.threads, self.bytes = B, threads, 2 * len(model)  # the constants, and as products pack them

    def sums(self, x: Tensor, draws: Draws) -> Reals:
        """`sums_of` the outputs of these draws."""
        assert draws.noise is not None
        rows: NDArray[Any] = on_host(x)
        if len(rows) < self.B:
            rows = np.concatenate([rows, np.broadcast_to(rows[:1], (self.B - len(rows), *rows.shape[1:]))])
        sums: Reals = self._run(None, {"x": rows, "normals": draws.noise.numpy()})[0]
        return sums[: len(x)]


class CompiledPasses:
    """The compiled passes of one model by B and K; passes that cannot be compiled run by torch."""

    def __init__(self, network: BayesianNetwork, factors: NetworkFactors, cache: "PassCache", seconds: float) -> None:
        """Compiling and timing take about `seconds` in all; passes that the cache holds are only compared."""
        self.network, self.factors, self.cache, self.left = network, factors, cache, seconds
        self.known: dict[tuple[int, int], CompiledPass] = {}
        self.bytes = 0
        self._key: str | None = None

    def at(self, B: int, K: int) -> CompiledPass | None:
        return self.known.get((B, K))

    def compile(self, job: Job, K: int, share: MemoryShare) -> None:
        """Compile the pass of K draws of the job's inputs, where it is one pass and the memory allows it."""
        size, factors = (job.B, K), self.factors
        possible = factors.capturable and factors.folds and job.dtype == torch.float32 == job.given.dtype
        if not possible or size in self.known or job.max_rows < job.B * K or not available():
            return
        if K > 1 and not self.network.learned.folds:
            return
        try:
            with evaluating(self.network), torch.inference_mode():
                found = self._compiled(job, K)
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
        # the session keeps the memory of its values
        self.bytes += found.bytes + (int(share.need(*size)) if share.limited else 0)

    def _compiled(self, job: Job, K: int) -> CompiledPass | None:
        """The fastest session, from the cache or anew; None where torch is as fast."""
        check, key = _Check(job, K), self._key_of(job, K)
        kept = self.cache.read(key)
        if kept is not None:
            try:
                threads, model = _unpacked(kept)
                if not threads:
                    return None
                found = CompiledPass(model, job.B, threads)
                check.compare(found)
                return found
            except Exception as error:
                log.warning("a compiled pass of the cache is not used", extra={"why": str(error)[:200]})
        if self.left <= 0:
            return None
        began = time.perf_counter()
        times: dict[tuple[bytes, int], float] = {}
        for plan in _plans(job.plan(job.B, K)):
            model = write_pass(job, K, plan)
            for threads in sorted({1, torch.get_num_threads()}):
                found = CompiledPass(model, job.B, threads)
                check.compare(found)
                times[model, threads] = _seconds(partial(check.run, found))
        best = min(times, key=times.__getitem__)
        plain = _seconds(check.plain)
        faster = times[best] < FASTER * plain
        self.cache.write(key, _packed(best[1] if faster else 0, best[0] if faster else b""))
        self.left -= time.perf_counter() - began
        return CompiledPass(best[0], job.B, best[1]) if faster else None

    def _key_of(self, job: Job, K: int) -> str:
        """What decides how a pass is computed and how fast it is, the weights included."""
        if self._key is None:
            digest = hashlib.sha256(repr((self.network.net, self.network.task, platform.machine())).encode())
            for name in ("torch", "onnxruntime", "dubito"):
                digest.update(metadata.version(name).encode())
            for tensor in tensors_of([self.network, self.factors]):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            self._key = digest.hexdigest()
        shape = (tuple(job.given.shape), K, job.temperature, torch.get_num_threads())
        return hashlib.sha256(repr((self._key, shape)).encode()).hexdigest()


def available() -> bool:
    return find_spec("onnxruntime") is not None and find_spec("onnx") is not None


def write_pass(job: Job, K: int, plan: Plan) -> bytes:
    """The pass of K draws of the job's inputs as an ONNX model of the inputs and the normals."""
    from dubito.service.engine.lowering import OPERATORS, write

    network, factors = job.network, job.factors

    def sums(x: Tensor, normals: Tensor) -> Tensor:
        outputs = network.run(x, factors, Draws(K, normals, 0), plan)
        return sums_of(network, factors.read)(tempered(outputs, job.temperature, factors.read))

    recording = record(sums, (job.x, torch.zeros(K, factors.normals)), frozenset(OPERATORS))
    return write(recording, INPUTS, OUTPUT)


class _Check:
    """Compares a compiled pass with torch's on random inputs."""

    def __init__(self, job: Job, K: int) -> None:
        self.K, n = K, job.factors.normals
        rng = torch.Generator().manual_seed(1)
        self.x = torch.randn(job.given.shape, generator=rng)
        self.draws = [Draws(K, torch.randn(K, n, generator=rng), 0, by_graph=True) for _ in range(CHECKED)]
        self.job, self.network = job, job.network
        self.expected = [self._plain(draws) for draws in self.draws]

    def _plain(self, draws: Draws) -> Reals:
        plan = self.job.plan(self.job.B, self.K)
        outputs = self.network.go(self.x, self.network.arrange(self.job.factors, draws, plan))
        read = self.job.factors.read
        sums: Reals = sums_of(self.network, read)(tempered(outputs, self.job.temperature, read)).double().numpy()
        return sums

    def plain(self) -> Reals:
        return self._plain(self.draws[0])

    def run(self, compiled: CompiledPass) -> Reals:
        return compiled.sums(self.x, self.draws[0])

    def compare(self, compiled: CompiledPass) -> None:
        for draws, expected in zip(self.draws, self.expected, strict=True):
            sums = compiled.sums(self.x, draws)
            if sums.shape != expected.shape or sums.dtype != np.float64:
                raise NotRecorded(f"its sums are {sums.dtype} {sums.shape}, torch's float64 {expected.shape}")
            error = np.abs(sums - expected) / np.maximum(self.K, np.abs(expected))
            if not (error <= AGREES).all() and np.isfinite(expected).all():
                raise NotRecorded(f"its sums differ from torch's by {np.nanmax(error):.2g} of their size")


def _plans(plan: Plan) -> list[Plan]:
    """Plans to be tried: as measured with torch, and with all draws of a layer in one call where it takes one each."""
    together: Plan = {name: "batch" if execution == "loop" else execution for name, execution in plan.items()}
    return [plan] if together == dict(plan) else [plan, together]


def _seconds(run: Callable[[], object]) -> float:
    for _ in range(WARM):
        run()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def _packed(threads: int, model: bytes) -> bytes:
    return json.dumps({"threads": threads}).encode() + b"\n" + model


def _unpacked(kept: bytes) -> tuple[int, bytes]:
    head, _, model = kept.partition(b"\n")
    return int(json.loads(head)["threads"]), model


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
