"""Many requests answered together: those that may share draws share passes, and none is hurt by another's failure."""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import DubitoError, InputError, NumericsError
from dubito.models.manifest import Predictive
from dubito.models.network.network import Draws, Stock
from dubito.models.network.plan import cheapest
from dubito.models.numerics.proof import Checked
from dubito.models.predictions.adaptive import CHUNK, answer_each
from dubito.models.predictions.answers import Columns, Rule, Rulebook, columns_of
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import (
    Job,
    Passes,
    bucket_of,
    evaluating,
    nothing_captured,
    predict,
    predict_closed,
    seed_of,
)
from dubito.models.predictions.stopwatch import Stopwatch
from dubito.models.predictions.uncertainty import Reals
from dubito.service.engine.bank import Bank
from dubito.service.engine.budget import TRIED, Budget, Share, peak_of
from dubito.service.engine.graphs import Program, Programs, for_gpu
from dubito.service.engine.plans import Memory, Plans

log = logging.getLogger("dubito")
UNFIT = "input {} holds NaN, infinity or a number too large for float32; expected none."
PROVEN = 2  # inputs of the passes whose every product is computed twice
WEIGHED = (1, 4, 16, 64, 256)  # inputs of passes that are measured for what they take, beside the buckets


@dataclass(slots=True)  # not frozen, as one is made for each request
class Ask:
    """One request, parsed: inputs in the model's input space, and how to answer them."""

    x: NDArray[np.float32]  # (B, ...), read only
    samples: int | Literal["auto"]
    seed: int | None  # None: any draws will do, another request's too
    max_samples: int  # of "auto"
    tolerance: float
    keep: bool = False  # the draws themselves are wanted
    closed: bool = False  # no draws at all: the closed form, whose work is reckoned as that of so many draws
    group: str | None = None  # whose quantile makes the prediction sets
    start: int = 0  # of the request whose part this is: its first row

    rows: int = field(init=False)
    most: int = field(init=False)  # draws
    work: int = field(init=False)  # rows times samples, at most

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        self.most = self.max_samples if self.samples == "auto" else self.samples
        self.work = self.rows * max(1, self.most)


@dataclass(slots=True)
class Answered:
    """What is known about each input of a request, on the host."""

    columns: Columns  # `samples` among them: the draws of each
    rules: Sequence[Rule]  # by which the columns were decided, one for each input
    samples: int  # drawn, the most of any input
    seed: int
    seconds: Mapping[str, float]  # of the passes that it came from, by stage
    settled: bool = False  # by "auto": inputs differ in their draws
    outputs: Tensor | None = None  # (K, B, ...) where they were to be kept
    method: Predictive = "sampling"


Answer = Answered | Exception


class Broken(Exception):
    """The device answers nothing any more; what comes of it is no request's fault."""


class Engine:
    """A model on its device."""

    def __init__(
        self,
        model: Model,
        buckets: Sequence[int],
        memory: Memory | None = None,
        plan_seconds: float = 0.0,
        bank: Bank | None = None,
        share: Share | None = None,
    ) -> None:
        """Ways of computing are measured for about `plan_seconds`, those apart that the memory holds.

        Where there is a bank, draws that nobody has named a seed for come out of it. `share` is the part of the
        device's memory: without one there is no bound.
        """
        self.bank = bank
        self.programs: Programs | None = None
        if model.device.type == "cuda":
            model = for_gpu(model)
            self.programs = Programs(model.network, model.factors, buckets[-1])
        self.share = Budget(None).share() if share is None else share
        self.draws = 0  # of the largest pass so far: samples
        self.seed = seed_of(None)  # of the next launch that names none
        self.model, self.buckets = model, buckets
        self.rulebook = Rulebook(model.card.calibration)
        self.plans = Plans(cheapest(model.factors), memory or Memory(None, model.device), plan_seconds)

    def most_rows(self, ask: Ask) -> int:
        """Inputs that are best asked for together: those of the largest captured pass, where such passes answer."""
        if self.programs is None or self.bank is not None or ask.keep or ask.closed or ask.samples == 0:
            return sys.maxsize
        K = CHUNK if ask.samples == "auto" else ask.samples
        return self.buckets[-1] if self.programs.answers(self.buckets[-1], K) else sys.maxsize

    def rates(self, asks: Sequence[Ask]) -> Sequence[float]:
        """Inputs of these requests that are answered in a second where 0, 1, 2 and so on go together; as far as that is
        known."""
        K = self._one_pass(asks)
        return () if self.programs is None or K is None else self.programs.rates(K)

    def _one_pass(self, asks: Sequence[Ask]) -> int | None:
        """K, where one captured pass may answer them all."""
        K = asks[0].samples
        if K == "auto" or self.bank is not None or (len(asks) > 1 and any(ask.seed is not None for ask in asks)):
            return None
        return None if any(ask.samples != K or ask.keep or ask.closed for ask in asks) else K

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """In order. Requests of one group share a pass; where a group fails, each of its requests is tried alone."""
        groups: dict[object, list[int]] = {}
        found: dict[int, Answer] = {}
        for i, ask in enumerate(asks):
            groups.setdefault(self._group(ask, i), []).append(i)
        for members in groups.values():
            x = np.concatenate([asks[i].x for i in members])
            if _not_finite(x) is None:
                found |= zip(members, self._answer_group([asks[i] for i in members], x), strict=True)
                continue
            bad = {i: row for i in members if (row := _not_finite(asks[i].x)) is not None}
            found |= {i: InputError(UNFIT.format(asks[i].start + row)) for i, row in bad.items()}
            if fine := [asks[i] for i in members if i not in bad]:
                again = self._answer_group(fine, np.concatenate([ask.x for ask in fine]))
                found |= zip((i for i in members if i not in bad), again, strict=True)
        return [found[i] for i in range(len(asks))]

    def launch(self, asks: Sequence[Ask]) -> "Launched | None":
        """One captured pass that answers them all, begun; None where there is none.

        No other pass may be begun before it was waited for.
        """
        try:
            return self._launch(asks)
        except torch.AcceleratorError as error:
            raise Broken from error
        except Exception as error:  # seen again by whoever asks for it alone
            log.warning("a batch is not launched", extra={"why": f"{type(error).__name__}: {error}"[:200]})
            return None

    def _launch(self, asks: Sequence[Ask]) -> "Launched | None":
        K, given = self._one_pass(asks), asks[0].seed
        if self.programs is None or K is None:
            return None
        program = self.programs.at(bucket_of(self.buckets, sum(ask.rows for ask in asks)), K)
        if program is None:
            return None
        watch, seed = Stopwatch(self.model.device), self.seed if given is None else seed_of(given)
        x = program.put([ask.x for ask in asks])
        watch.lap("sample")
        program.go(seed, 0)
        self.seed = seed_of(None)  # whatever can be done once the device works is done then
        launched = Launched(self, asks, self._job(torch.from_numpy(x), seed, watch, K), program, _not_finite(x) is None)
        watch.lap("forward")
        return launched

    def warm(self, samples: int, device: AbstractContextManager[object]) -> None:
        """Every bucket planned and run once, with draws as a request would have them; raises what a request would.

        Where the device computes wrongly, that is a NumericsError.

        `device` is entered for each anew: others who answer on it wait for one bucket, not for all.
        """
        if self.share.limited:
            self._fit(device)
        with device:
            self._prove()
        for rows in self.buckets:
            x = self._zeros(rows)
            job = self._job(self._normals(rows), 0, None)
            once = job.samples_at_once(rows)
            K = min(samples, once + samples % once)  # whole passes, and what is left over
            asks = [Ask(x, K, None, max(1, K), 0.5)]
            if self.model.factors.closed_form:
                asks.append(Ask(x, 0, None, 1, 0.5, closed=True))
            with device:
                if samples and self.model.factors.random:
                    self.plans.measure(job, min(samples, once))
                    self._weigh(rows)
                for found in self.answer(asks):
                    if isinstance(found, Exception):
                        raise found
                if self.programs is not None and samples:
                    before = torch.cuda.memory_reserved(self.model.device)
                    for k in {min(samples, once), samples % once, min(CHUNK, once)} - {0}:
                        if self.share.fits(rows, k):
                            self.programs.capture(job, k)
                    self.plans.bytes += max(0, torch.cuda.memory_reserved(self.model.device) - before)
        self.plans.memory.save()

    def _zeros(self, rows: int) -> NDArray[np.float32]:
        declared = self.model.card.input
        assert declared is not None
        return np.zeros((rows, *declared.shape), np.float32)

    def _normals(self, rows: int) -> Tensor:
        """Inputs that no product is trivial for, the same each time."""
        return torch.randn(self._zeros(rows).shape, generator=torch.Generator().manual_seed(0))

    def _prove(self) -> None:
        """The products of a pass of draws, and of one of the mean, are right within rounding, whichever layer asks."""
        job = replace(self._job(self._normals(PROVEN), 0, None, TRIED), captured=nothing_captured)
        checked = Checked()
        with evaluating(job.network), torch.inference_mode(), checked:
            job.outputs(Draws(1, None, 0))
            if self.model.factors.random:
                job.outputs(job.draws(0, TRIED, job.B))
            if self.model.factors.closed_form:
                job.moments()
        if checked.fault is not None:
            raise NumericsError(f"this {self.model.device.type} computes the network wrongly: {checked.fault}.")

    def _fit(self, device: AbstractContextManager[object]) -> None:
        """Only buckets whose passes fit are kept; larger requests are worked off in parts."""
        for rows in sorted({*self.buckets, *(n for n in WEIGHED if n < max(self.buckets))}):
            with device:
                self._weigh(rows)
            if not self.share.fits(rows, 1):  # nor would more
                break
        kept = tuple(rows for rows in self.buckets if self.share.fits(rows, 1))
        told = {"left": self.share.budget.left, "limit": self.share.budget.limit}
        if not self.share.fits(1, 1):
            raise DubitoError(
                f"one input takes {self.share.need(1, 1):,.0f} bytes, and {told['left']:,} are left of the "
                f"{told['limit']:,} that the setting memory_bytes allows: raise it, or serve fewer models."
            )
        if dropped := [rows for rows in self.buckets if rows not in kept]:
            log.warning("batches that do not fit the memory go in parts", extra={"batches": dropped, **told})
        self.buckets = kept

    def _weigh(self, rows: int) -> None:
        """What a pass takes, as it is planned now, where there is a bound."""
        if not self.share.limited:
            return
        job = self._job(torch.from_numpy(self._zeros(rows)), 0, None, TRIED)
        job = replace(job, fits=None, captured=nothing_captured)  # in one go, and seen by the allocator

        def run() -> None:
            with evaluating(job.network), torch.inference_mode():
                if self.model.factors.random:
                    job.outputs(job.draws(0, TRIED, rows))
                else:
                    job.outputs(Draws(1, None, 0))

        try:
            self.share.measured(rows, peak_of(run, self.model.device))
        except torch.OutOfMemoryError:
            self.share.measured(rows, self.share.budget.left + 1)

    def _group(self, ask: Ask, i: int) -> object:
        """Requests with the same key may share passes. One with a seed is alone: its answer is the same to the bit
        whoever else asks."""
        if ask.keep or ask.seed is not None:
            return i
        if ask.closed:
            return ("closed", ask.group)
        if ask.samples == 0 or self.model.factors.normals == 0:
            return ("repeatable", ask.samples, ask.group)
        return "drawn"

    def _answer_group(self, asks: list[Ask], x: NDArray[np.float32]) -> list[Answer]:
        try:
            return list(self._together(asks, torch.from_numpy(x)))
        except torch.AcceleratorError as error:
            raise Broken from error
        except Exception as error:  # whatever one request's inputs made of the pass
            if len(asks) == 1:
                return [error]
        return [a for ask in asks for a in self._answer_group([ask], ask.x.copy())]

    def _together(self, asks: list[Ask], x: Tensor) -> list[Answered]:
        first = asks[0]
        watch = Stopwatch(self.model.device)
        if first.closed or first.keep or first.samples == 0 or self.model.factors.normals == 0:
            return self._repeatable(asks, x, watch)
        most = max(ask.most for ask in asks)
        ahead = self.bank.take(most) if self.bank is not None and first.seed is None else None
        if ahead is None:
            return self.conclude(asks, self._job(x, first.seed, watch, most))
        return self.conclude(asks, self._job(x, ahead.seed, watch, most, ahead.stock))

    def conclude(self, asks: Sequence[Ask], job: Job) -> list[Answered]:
        """Drawn and summed up."""
        most = [ask.most for ask in asks for _ in range(ask.rows)]
        settle = [ask.tolerance if ask.samples == "auto" else 0.0 for ask in asks for _ in range(ask.rows)]
        summary, drawn = answer_each(job, np.array(most), np.array(settle))
        taken: list[int] = drawn.tolist()
        rules: list[Rule] = []
        for ask in asks:
            tolerance, limit = (ask.tolerance, ask.max_samples) if ask.samples == "auto" else (None, None)
            rows = taken[len(rules) : len(rules) + ask.rows]
            rules += [self.rulebook.rule(K, tolerance, limit, ask.group) for K in rows]
        return self._apart(asks, columns_of(summary, rules), rules, taken, job.seed, job.watch)

    def _repeatable(self, asks: list[Ask], x: Tensor, watch: Stopwatch) -> list[Answered]:
        """Passes that every request of the group asks for alike."""
        first, model = asks[0], self.model
        samples = max(1, model.factors.members) if first.samples == "auto" else first.samples
        passes = self._passes(watch)
        if first.closed:
            found = predict_closed(model.network, model.factors, x, **passes)
        else:
            found = predict(model.network, model.factors, x, samples, first.seed, keep_outputs=first.keep, **passes)
        rules = self.rulebook.of(found, first.group)
        columns = columns_of(found.summary, rules)
        outputs = None if found.outputs is None else found.outputs.cpu()  # kept for a request alone
        drawn = [found.samples] * len(rules)
        return self._apart(asks, columns, rules, drawn, found.seed, watch, outputs, found.method, settles=False)

    def _apart(
        self,
        asks: Sequence[Ask],
        columns: Columns,
        rules: list[Rule],
        drawn: list[int],
        seed: int,
        watch: Stopwatch,
        outputs: Tensor | None = None,
        method: Predictive = "sampling",
        settles: bool = True,
    ) -> list[Answered]:
        """Give each request its own rows; without `settles`, "auto" is answered like a number of samples."""
        columns["samples"] = np.array(drawn)
        watch.lap("summarise")
        seconds = watch.seconds
        made, at = [], 0
        for ask in asks:
            end = at + ask.rows
            mine = {name: column[at:end] for name, column in columns.items()}
            settled = settles and ask.samples == "auto"
            made.append(Answered(mine, rules[at:end], max(drawn[at:end]), seed, seconds, settled, outputs, method))
            at = end
        return made

    def _job(
        self, x: Tensor, seed: int | None, watch: Stopwatch | None, most: int = 1, stock: Stock | None = None
    ) -> Job:
        captured, more = None if self.programs is None else self.programs.at, self._passes(watch)
        network, factors = self.model.network, self.model.factors
        job = Job.of(network, factors, x, seed, most=most, stock=stock, captured=captured, finite=True, **more)
        self.draws = max(self.draws, min(most, job.samples_at_once(len(x))))
        return job

    def _passes(self, watch: Stopwatch | None) -> Passes:
        return {
            "plan": self.plans.at,
            "temperature": self.model.temperature,
            "buckets": self.buckets,
            "watch": watch,
            "fits": self.share.fits if self.share.limited else None,
        }


class Launched:
    """Requests on the device. Once that was waited for, it is free for others; then come the answers."""

    def __init__(self, engine: Engine, asks: Sequence[Ask], job: Job, program: Program, fit: bool) -> None:
        """The job's inputs lie where the next ones will: once it was waited for, only their number may be asked.

        Where the inputs are not `fit`, each request whose own inputs are wrong gets an error that says so.
        """
        self.engine, self.asks, self.job, self.program, self.fit = engine, asks, job, program, fit
        self.sums: Reals
        self.found: list[Answer] | None = None

    def wait(self) -> None:
        self.job.watch.go_on()  # what was done meanwhile is counted elsewhere
        try:
            sums = self.program.fetch()[: self.job.B]
        except torch.AcceleratorError as error:
            raise Broken from error
        self.job.watch.lap("forward")
        if self.fit and np.isfinite(sums).all():
            self.sums = sums
        else:  # whose fault it is, is seen when each is asked for alone
            self.found = self.engine.answer(self.asks)

    def answers(self) -> list[Answer]:
        if self.found is not None:
            return self.found
        self.job.watch.go_on()
        known = Fetched(self.sums)
        return list(self.engine.conclude(self.asks, replace(self.job, captured=lambda B, K: known)))


@dataclass(frozen=True)
class Fetched:
    """The result of a pass that is done."""

    known: Reals

    def sums(self, x: Tensor, seed: int, start: int) -> Reals:
        return self.known


def _not_finite(x: NDArray[np.float32]) -> int | None:
    """The first such row."""
    flat = x.reshape(-1)
    with np.errstate(over="ignore"):
        if math.isfinite(flat.dot(flat)):  # one pass; too large a sum tells nothing yet
            return None
    finite = np.isfinite(x).reshape(len(x), -1).all(1)
    return None if finite.all() else int(finite.argmin())


def joined(parts: Sequence[Answered]) -> Answered:
    """The parts of one request as one answer."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Answered(
        {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns},
        [rule for part in parts for rule in part.rules],
        max(part.samples for part in parts),
        first.seed,
        {stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in first.seconds},
        first.settled,
        None if first.outputs is None else torch.cat([part.outputs for part in parts if part.outputs is not None], 1),
        first.method,
    )
