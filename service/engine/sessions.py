"""A pass on a CPU as sessions of onnxruntime: one makes K draws from normals, one applies them to inputs.

The draws of a request without a seed are made while the one before it is answered.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.numerics.normals import Normals
from dubito.models.predictions.prediction import seed_of
from dubito.models.predictions.uncertainty import Reals, on_host, value_sums_of_both

log = logging.getLogger("dubito")
INPUT, COUNTED, COLUMNS, OUTPUT = "x", "counted", "columns_", "sums"
Operands = Mapping[str, NDArray[Any]]  # what a session takes beside the inputs


@dataclass(frozen=True)
class Written:
    """A pass of K draws as serialised ONNX models."""

    K: int
    sizes: tuple[int, ...]  # of all parts of the normals of a draw, in order
    draws: bytes  # parts of the normals, by columns -> operands; empty where `network` takes the parts
    network: bytes  # x, which draws count, and operands -> sums
    operands: tuple[str, ...]
    size: int  # bytes of the operands


@cache
def _share_memory() -> None:
    """One pool of memory for the values of all sessions, of which one or two run at a time."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": 1}))  # as requested


def open_session(model: bytes, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch's threads need the cores, too
    _share_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def runtime_version() -> str:
    """Of onnxruntime, whichever of its packages is installed."""
    import onnxruntime

    return str(onnxruntime.__version__)


class Sessions:
    """Open sessions by their models: passes of several sizes may have the same draws."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[tuple[bytes, int], Any] = WeakValueDictionary()

    def of(self, model: bytes, threads: int) -> Any:
        """The session of a model; None where it is empty."""
        found = self._open.get((model, threads))
        if found is None and model:
            found = self._open[model, threads] = open_session(model, threads)
        return found


class PassPart:
    """A written pass, ready to run."""

    def __init__(self, written: Written, sessions: Sessions, threads: int) -> None:
        self.K, self.sizes = written.K, np.array(written.sizes)
        self.drawing, self._network = (sessions.of(model, threads) for model in (written.draws, written.network))
        self._operands = list(written.operands)
        self._index = np.arange(self.K)
        taken = {one.name for one in (self.drawing or self._network).get_inputs()}
        starts = [0, *np.cumsum(self.sizes).tolist()]
        self._columns = [
            (name, self.K * start, self.K * end, (self.K, end - start))
            for start, end in pairwise(starts)
            if (name := f"{COLUMNS}{start}") in taken
        ]

    def draw(self, normals: NDArray[np.float32], k: int) -> Operands:
        """From the normals of k draws; where that is less than K, with zeros in place of the others."""
        if k < self.K:
            columns = {}
            for name, start, _, (K, size) in self._columns:
                columns[name] = np.zeros((K, size), np.float32)
                columns[name][:k] = normals[start // K * k :][: k * size].reshape(k, size)
        else:
            columns = {name: normals[start:end].reshape(shape) for name, start, end, shape in self._columns}
        if self.drawing is None:
            return columns
        return dict(zip(self._operands, self.drawing.run(self._operands, columns), strict=True))

    def given(self, normals: Normals, k: int) -> "Operands | NDArray[np.float32]":
        """The next k draws, if they were made ahead, or else their normals."""
        ahead = normals.take(self, k) if isinstance(normals, DrawsAhead) else None
        return normals.parts(k, self.sizes).numpy() if ahead is None else ahead

    def __call__(self, x: NDArray[Any], given: "Operands | NDArray[np.float32]", k: int) -> Reals:
        """The sums over the first k draws."""
        operands = self.draw(given, k) if isinstance(given, np.ndarray) else given
        sums: Reals = self._network.run(None, {INPUT: x, COUNTED: (self._index < k).astype(np.float64), **operands})[0]
        return sums


class DrawsAhead(Normals):
    """The normals of a seed that nobody has chosen. The first draws from them may have been made before."""

    def __init__(self, parts: Sequence[PassPart] = (), pool: Executor | None = None) -> None:
        """`parts` of the pass that is expected; the pool makes their draws."""
        super().__init__(seed_of(None), torch.device("cpu"))
        self._parts, self._taken = list(parts), 0
        self._made: Future[list[Operands]] | None = None if pool is None else pool.submit(self._make, list(parts))

    def _make(self, parts: Sequence[PassPart]) -> list[Operands]:
        normals = Normals(self.seed, self.device)
        return [part.draw(normals.parts(part.K, part.sizes).numpy(), part.K) for part in parts]

    def take(self, part: PassPart, k: int) -> Operands | None:
        """The draws of this part of a pass, of which k are used, if it is the one that was expected; they are handed
        out once."""
        if self._made is None or not self._parts or not same_draws(part, self._parts[0]):
            self._drop()
            return None
        try:
            operands = self._made.result().pop(0)
        except Exception as error:  # they are made again
            log.warning("draws were not made ahead", extra={"why": str(error)[:200]})
            self._made = None
            return None
        self._parts.pop(0)
        self._taken += k
        if k < part.K:
            self._drop()  # those that were not used come next
        return operands

    def _drop(self) -> None:
        """What is not begun yet would keep the pool from the pass itself."""
        if self._made is not None:
            self._made.cancel()
            self._made = None

    def parts(self, K: int, sizes: NDArray[np.int64]) -> Tensor:
        self._drop()  # from here on in order
        if self._taken:
            taken, self._taken = self._taken, 0
            super().parts(taken, np.array([int(sizes.sum())]))
        return super().parts(K, sizes)


def same_draws(one: PassPart, other: PassPart) -> bool:
    if one.drawing is None:
        return one is other
    return one.drawing is other.drawing and one.K == other.K


class CompiledPass:
    """The pass of B inputs and up to K draws, in one part, or half of its draws in each of two threads."""

    def __init__(
        self,
        written: Sequence[Written],
        threads: int,
        network: BayesianNetwork,
        B: int,
        pool: Executor,
        sessions: Sessions | None = None,
        taken: Callable[["CompiledPass"], None] | None = None,
    ) -> None:
        """`threads` of each session. `taken` is called once a request without a seed has its draws: the next ones may
        be made."""
        sessions = sessions or Sessions()
        self.parts = [PassPart(one, sessions, threads) for one in written]
        self.written, self.threads, self.B, self._pool, self._taken = written, threads, B, pool, taken
        models = {model for one in written for model in (one.draws, one.network)}
        # the constants, and as products pack them; draws that are used, and the next ones, or these ones' normals
        self.bytes = sum(2 * len(model) for model in models)
        self.bytes += sum(2 * one.size or 4 * one.K * sum(one.sizes) for one in written)
        self._D = network.task.outputs if network.task.kind == "regression" else None

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        rows: NDArray[Any] = on_host(x)
        if len(rows) < self.B:
            rows = np.concatenate([rows, np.broadcast_to(rows[:1], (self.B - len(rows), *rows.shape[1:]))])
        first, *rest = self.parts
        k = min(draws.K, first.K)
        if k == draws.K:
            given = first.given(normals, k)
            self._next(normals)
            return first(rows, given, k)[: len(x)]
        (second,), m = rest, draws.K - k
        begun = self._pool.submit(first, rows, first.given(normals, k), k)
        given = second.given(normals, m)
        self._next(normals)
        others = second(rows, given, m)
        sums = begun.result()
        if self._D is not None:
            return value_sums_of_both(sums, k, others, m, self._D)[: len(x)]
        return (sums + others)[: len(x)]

    def _next(self, normals: Normals) -> None:
        if self._taken is not None and isinstance(normals, DrawsAhead):
            self._taken(self)


def packed(threads: int, written: Sequence[Written]) -> bytes:
    """For the cache: a line of JSON, then the models."""
    models = list(dict.fromkeys(model for one in written for model in (one.draws, one.network)))
    numbers = [{"draws": models.index(one.draws), "network": models.index(one.network)} for one in written]
    passes = [{**vars(one), **which} for one, which in zip(written, numbers, strict=True)]
    head = {"threads": threads, "passes": passes, "lengths": [len(model) for model in models]}
    return json.dumps(head).encode() + b"\n" + b"".join(models)


def unpacked(kept: bytes) -> tuple[int, list[Written]]:
    line, _, rest = kept.partition(b"\n")
    head = json.loads(line)
    ends = [0, *accumulate(head["lengths"])]
    models = [rest[start:end] for start, end in pairwise(ends)]
    passes = []
    for one in head["passes"]:
        lists = {key: tuple(one[key]) for key in ("sizes", "operands")}
        passes.append(Written(**{**one, **lists, "draws": models[one["draws"]], "network": models[one["network"]]}))
    return int(head["threads"]), passes
