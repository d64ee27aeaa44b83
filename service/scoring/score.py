"""Scores rows: reads, computes and writes at the same time, on one device or on several.

Every row is answered with the draws of one seed, and batch i always holds the same rows, so a value depends on the seed
and the row's number alone, not on which process computed it or how often the work was broken off. The executions of
layers, which change sums by a rounding, are measured once on a machine and kept.
"""

import glob
import math
import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch

from dubito import __version__
from dubito.models.artifact.artifact import load
from dubito.models.cli import permit_network
from dubito.models.disk import check_not_read
from dubito.models.errors import DubitoError, InputError
from dubito.models.manifest import Predictive
from dubito.models.numerics.proof import name_of
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.models.predictions.answers import check_group, joined_columns
from dubito.models.predictions.model import USUAL, Model
from dubito.models.predictions.resident import reside
from dubito.models.remote.address import place_of
from dubito.models.remote.cache import hash_of, local_copy
from dubito.service.engine.budget import Budget
from dubito.service.engine.device import dtype_of, trusted
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.plans import PlanCache, plan_file
from dubito.service.scoring.blocks import Block
from dubito.service.scoring.parts import PartsFolder, ScoreError, ScoringJob, difference, job_of
from dubito.service.scoring.replies import reply_columns, schema_of
from dubito.service.scoring.rows import rows_of_input

BATCH = {"cpu": 64, "cuda": 256}  # rows, by kind of device
SECONDS, MOST = 2.0, 1 << 16  # a part takes about so long, and has at most so many rows
AHEAD = 4  # blocks read before they are needed, and parts that wait to be written
READ = 4 << 20  # bytes of inputs that are read at once, a batch at least: each block wakes a thread
PLAN_SECONDS = 60.0  # to measure executions, once for a machine: no job waits long for it
T = TypeVar("T")


@dataclass(frozen=True)
class Scoring:
    """What is asked for."""

    file: str | Path  # path or address, as is the input
    input: str
    output: Path
    samples: int | Literal["auto"] | None = None
    seed: int = 0
    method: Predictive | None = None
    group: str | None = None
    network: str | None = None
    on_bad: Literal["stop", "null"] = "stop"
    batch: int | None = None

    @property
    def drawn(self) -> int | Literal["auto"]:
        return USUAL if self.samples is None else self.samples

    def predictive(self, model: Model) -> Predictive:
        """As `dubito predict` chooses it: with `samples`, by draws."""
        return self.method or (model.method if self.samples is None else "sampling")


class Scorer:
    """One process's share: the model on its device, the rows, and the folder of parts."""

    def __init__(self, asked: Scoring, device: str, workers: int = 1) -> None:
        permit_network(asked.network)
        self.asked, self.folder = asked, PartsFolder(asked.output)
        with local_copy(asked.file) as self.file:
            self.model = load(self.file)
        check_group(self.model.card.calibration, asked.group)
        if self.model.card.input is None:
            raise InputError(f"{asked.file} does not say what its inputs look like; save it with a card that does.")
        self.predictive = asked.predictive(self.model)
        if self.predictive == "probit" and not self.model.manifest.closed_form:
            raise InputError("--method is probit, but this model has no closed form; expected sampling, or none.")
        if self.predictive == "probit" and asked.samples is not None:
            raise InputError("--method is probit, which takes no draws; leave --samples out, or say sampling.")
        self.rows, self.shape = rows_of_input(asked.input, self.model.card.input), self.model.card.input.shape
        self.input = self.rows.fingerprint()
        self.workers, self.device = workers, torch.device(device.partition(":")[0])
        if self.device.type == "cuda":
            torch.cuda.set_device(device)
        self.dtype, _ = trusted(dtype_of("auto", self.device)[0], self.device)
        kind = self.model.manifest.task.kind == "classification"
        errors, files = asked.on_bad == "null", self.rows.files(0, 0) is not None
        self.schema = schema_of(self.model.card, kind, files, errors)

    def given(self) -> dict[str, Any]:
        """What every run of this job must have."""
        asked = self.asked
        options = {"samples": asked.drawn, "seed": asked.seed, "method": self.predictive, "group": asked.group}
        where = {"device": self.device.type, "dtype": name_of(self.dtype), "torch": str(torch.__version__)}
        if self.device.type == "cuda":
            where["gpu"] = torch.cuda.get_device_name()
        return {
            "artifact": hash_of(self.file),
            "input": self.input,
            **options,
            "on-bad": asked.on_bad,
            "batch": asked.batch,
            **where,
            "dubito": __version__,
        }

    def prepare(self) -> ScoringJob:
        """Make the engine; the first process of a job measures executions and records them, others use its record."""
        given = self.given()
        with self.folder.alone("prepare", wait=True):
            known = self.folder.job()
            if known is not None:
                if other := difference(known.given, given):
                    raise ScoreError(
                        f"{self.folder.path} holds parts of another job ({other}): go on with what they were made "
                        "with, take another output, or start anew with --fresh."
                    )
                torch.set_num_threads(known.threads)
                self.engine = self._engine(known.batch, self.folder.path / "plans.json", 0.0)
                return known
            threads = max(1, torch.get_num_threads() // self.workers)
            torch.set_num_threads(threads)
            batch = min(self.asked.batch, self.rows.count) if self.asked.batch else BATCH[self.device.type]
            while not (
                engine := self._engine(batch, plan_file(), PLAN_SECONDS)
            ).buckets:  # it does not fit the device's memory
                batch //= 2
            self.engine, plans = engine, engine.plans.cache
            plans.path = self.folder.path / "plans.json"
            plans.save()
            pace = min((seconds / work for work, seconds in engine.timed), default=0.0) * self.request(0).work
            many = max(1, min(MOST // batch, int(SECONDS / max(1e-9, pace * batch))))
            job = ScoringJob(given, self.rows.count, batch, many * batch, threads)
            self.folder.begin(job)
            return job

    def _engine(self, batch: int, plans_in: Path, plan_seconds: float) -> Engine:
        plans = PlanCache(plans_in, self.device)
        model = reside(self.model, self.device, self.dtype)
        engine = Engine(model, (batch,), plans, plan_seconds, share=Budget.of(0, self.device).share())
        drawn = self.asked.drawn
        engine.warm(AT_MOST if drawn == "auto" else drawn, nullcontext())
        return engine

    def request(self, start: int, x: Any = None) -> PredictRequest:
        asked = self.asked
        x = np.zeros((1, 1), np.float32) if x is None else x
        closed = self.predictive == "probit"
        return PredictRequest(
            x, asked.drawn, asked.seed, AT_MOST, TOLERANCE, closed=closed, group=asked.group, start=start
        )

    def score(self, parts: Iterable[int], job: ScoringJob, done: Callable[[int], None]) -> None:
        """Make these parts; `done` is called with the rows of each one that is on the disk."""
        with ThreadPoolExecutor(1, "reader") as reader, ThreadPoolExecutor(1, "writer") as writer:
            writing: deque[Future[int]] = deque()
            part: list[tuple[Block, PredictResult]] = []
            for (i, _, stop), block, result in self._answers(reader, parts, job):
                part.append((block, result))
                if stop == job.span(i)[1]:
                    writing.append(writer.submit(self._write, i, job, part))
                    part = []
                while writing and (writing[0].done() or len(writing) > AHEAD):
                    done(writing.popleft().result())
            for future in writing:
                done(future.result())

    def _answers(
        self, reader: ThreadPoolExecutor, parts: Iterable[int], job: ScoringJob
    ) -> Iterator[tuple[tuple[int, int, int], Block, PredictResult]]:
        """Each batch with its part, first row, last row + 1, and answers. Blocks of batches are read ahead in order."""
        read: deque[tuple[tuple[int, int, int], Block]] = deque()
        many = job.batch * max(1, READ // (4 * job.batch * math.prod(self.shape)))
        spans = ((i, a, min(job.span(i)[1], a + many)) for i in parts for a in range(*job.span(i), many))

        def requests() -> Iterator[PredictRequest]:
            for (i, start, stop), block in ahead(reader, spans, lambda span: self.rows.read(*span[1:])):
                if block.bad and self.asked.on_bad == "stop":
                    row, what = min(block.bad.items())
                    raise InputError(
                        f"row {start + row}: {what}. Mend it and start anew: --fresh; or --fresh --on-bad null."
                    )
                for a in range(start, stop, job.batch):
                    b = min(stop, a + job.batch)
                    read.append(((i, a, b), block.part(a - start, b - start)))
                    yield self.request(a, read[-1][1].x)

        for result in results(self.engine, requests()):
            span, block = read.popleft()
            if isinstance(result, Exception):
                raise ScoreError(f"rows {span[1]} to {span[2] - 1}: {result}") from result
            yield span, block, result

    def _write(self, i: int, job: ScoringJob, part: Sequence[tuple[Block, PredictResult]]) -> int:
        start, stop = job.span(i)
        bad, begin = np.zeros(stop - start, bool), 0
        errors: list[str | None] = [None] * len(bad)
        for block, _ in part:
            for row, what in block.bad.items():
                bad[begin + row], errors[begin + row] = True, what
            begin += len(block.x)
        answered = [result for _, result in part]
        columns = joined_columns([one.columns for one in answered])
        rules = [rule for result in answered for rule in result.rules]
        arrays = reply_columns(columns, rules, self.model.card, bad)
        arrays["row"] = pa.array(np.arange(start, stop))
        arrays["file"] = pa.array(self.rows.files(start, stop) or [], pa.string())
        arrays["error"] = pa.array(errors, pa.string())
        self.folder.write(i, pa.table([arrays[name] for name in self.schema.names], schema=self.schema))
        return stop - start

    def check_unchanged(self, job: ScoringJob) -> None:
        try:
            unchanged = self.rows.fingerprint() == job.given["input"]
        except OSError:  # a file is gone
            unchanged = False
        if not unchanged:
            self.folder.clear()  # a file may come to look as before
            raise ScoreError(
                f"{self.asked.input} was changed while it was scored, and some rows may be of what it was before, so "
                "nothing is kept: score it again once nothing writes to it."
            )

    def about(self) -> dict[str, Any]:
        """What a reply says once for all of its predictions."""
        asked = self.asked
        drawn = 0 if self.predictive == "probit" else asked.drawn
        return {"model": place_of(asked.file).stem, "samples": drawn, "seed": asked.seed, "method": self.predictive}


def results(engine: Engine, requests: Iterable[PredictRequest]) -> Iterator[PredictResult | Exception]:
    """The answer to each request, alone. Where a graph computes it, the host works on the one before meanwhile."""
    last = None
    for request in requests:
        launched = engine.launch([request])
        if last is not None:
            yield last.answers()[0]
            last = None
        if launched is None:
            yield engine.answer([request])[0]
        else:
            launched.wait()
            last = launched
    if last is not None:
        yield last.answers()[0]


S = TypeVar("S")


def ahead(pool: ThreadPoolExecutor, items: Iterable[S], make: Callable[[S], T]) -> Iterator[tuple[S, T]]:
    """Each item with what is made of it, a few items ahead."""
    waiting: deque[tuple[S, Future[T]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(make, item)))
            if len(waiting) > AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


@dataclass(frozen=True)
class Scored:
    rows: int
    before: int  # rows that earlier runs had made


Progress = Callable[[int], Any]  # how many rows are left -> a context whose value is called with rows as they are done


Spread = Callable[[Scoring, PartsFolder, Progress], tuple[ScoringJob, set[int]]]  # the job, and what was there before


def score(
    asked: Scoring, devices: Sequence[str], fresh: bool, progress: Progress, spread: Spread | None = None
) -> Scored:
    """Score every row once, or the rows that an earlier run has left.

    `spread` makes the missing parts elsewhere; without it they are made here, several devices by a process each.
    """
    output = asked.output
    if not output.parent.is_dir():
        raise ScoreError(f"cannot write {output}: there is no folder {output.parent}.")
    if output.is_dir():
        raise ScoreError(f"{output} is a folder; expected the name of a Parquet file.")
    check_not_read(output, asked.file, asked.input, *glob.glob(asked.input, recursive=True))
    folder = PartsFolder(output)
    new = not folder.path.exists()
    scorer = Scorer(asked, devices[0])
    if len(devices) > 1 and spread is None:
        spread = partial(_on_each, devices)
    with folder.alone():
        try:
            return _score(asked, scorer, folder, fresh, progress, spread)
        except BaseException:
            if new and folder.job() is None:  # nothing has begun
                folder.remove()
            raise


def _score(
    asked: Scoring, scorer: Scorer, folder: PartsFolder, fresh: bool, progress: Progress, spread: Spread | None
) -> Scored:
    if fresh or folder.job() is None:
        folder.clear()
    if asked.output.exists() and not fresh:
        known = job_of(asked.output)
        if known is None:
            raise ScoreError(f"{asked.output} is no output of `dubito score`: take another name, or --fresh.")
        if other := difference(known, scorer.given()):
            raise ScoreError(f"{asked.output} holds other predictions ({other}): take another name, or --fresh.")
        folder.remove()
        return Scored(scorer.rows.count, scorer.rows.count)
    if spread is None:
        job = scorer.prepare()
        finished = folder.finished(job)
        missing = [i for i in range(job.parts) if i not in finished]
        with progress(job.rows_of(missing)) as done:
            scorer.score(missing, job, done)
    else:
        job, finished = spread(asked, folder, progress)
    scorer.check_unchanged(job)
    folder.assemble(job, scorer.about())
    return Scored(job.rows, job.rows_of(finished))


def _on_each(
    devices: Sequence[str], asked: Scoring, folder: PartsFolder, progress: Progress
) -> tuple[ScoringJob, set[int]]:
    """One process for each device; they take parts from one queue."""
    context = multiprocessing.get_context("spawn")
    parts, said = context.Queue(), context.Queue()
    fields = asdict(asked)
    workers = [
        context.Process(target=_work, args=(fields, device, len(devices), parts, said), daemon=True)
        for device in devices
    ]
    for worker in workers:
        worker.start()
    try:
        while (message := _next(said, workers)) != "ready":
            raise ScoreError(str(message))
        job = folder.job()
        assert job is not None
        finished = folder.finished(job)
        missing = [i for i in range(job.parts) if i not in finished]
        for i in missing:
            parts.put(i)
        for _ in workers:
            parts.put(None)
        left = job.rows_of(missing)
        with progress(left) as done:
            while left:
                match _next(said, workers):
                    case int(rows):
                        left -= rows
                        done(rows)
                    case "ready":
                        continue
                    case error:
                        raise ScoreError(str(error))
        for worker in workers:
            worker.join()
        return job, finished
    finally:
        for worker in workers:
            worker.kill()


def _next(said: Any, workers: Sequence[Any]) -> object:
    """What a worker says next; raises if one has died without a word."""
    while True:
        try:
            return said.get(timeout=1.0)
        except queue.Empty:
            for worker in workers:
                if worker.exitcode not in (None, 0):
                    raise ScoreError(
                        f"a process ended with code {worker.exitcode}; run the command again to go on."
                    ) from None


def _work(fields: dict[str, Any], device: str, workers: int, parts: Any, said: Any) -> None:
    """A process that scores on one device. It ends with the one that started it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        scorer = Scorer(Scoring(**fields), device, workers)
        job = scorer.prepare()
        said.put("ready")
        scorer.score(iter(parts.get, None), job, said.put)
    except DubitoError as error:
        said.put(str(error))
