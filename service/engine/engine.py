"""Answers batches of requests: requests that may share draws share passes, and one that fails affects no other."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import DubitoError, InputError, NumericsError
from dubito.models.manifest import Predictive
from dubito.models.network.network import Draws, Stock
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.numerics.proof import Checked
from dubito.models.predictions.adaptive import CHUNK, answer_each
from dubito.models.predictions.answers import Columns, Rule, Rulebook, columns_of, joined_columns
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import (
    Divide,
    GraphFor,
    Job,
    Passes,
    bucket_of,
    evaluating,
    in_one,
    no_graph,
    predict,
    predict_closed,
    seed_of,
)
from dubito.models.predictions.stopwatch import Stopwatch
from dubito.models.predictions.uncertainty import Reals
from dubito.service.engine.bank import Bank
from dubito.service.engine.budget import TRIED, Budget, MemoryShare, peak_of
from dubito.service.engine.compiled import CompiledPasses
from dubito.service.engine.fusion import with_units
from dubito.service.engine.graphs import PassGraph, PassGraphs, for_gpu
from dubito.service.engine.pace import Pace, least_seconds
from dubito.service.engine.pass_cache import PassCache
from dubito.service.engine.plans import PlanCache, Plans
from dubito.service.engine.sessions import CompiledPass

log = logging.getLogger("dubito")
UNFIT = "input {} holds NaN, infinity or a number too large for float32; expected none."
USUAL = 2 * CHUNK  # draws of "auto"
QUICK = 0.5  # seconds: batches that take longer are not timed at the start
PACED = 16  # inputs of the largest batch that is timed, at least: what a row takes beside others shows there
NEARLY = 1.5  # times as slow as a pass by torch a compiled one may be, for each draw
FURTHER = 4  # times the usual draws: what a draw takes is measured by them
PROVEN = 2  # inputs of the passes in which every product is checked
WEIGHED = (1, 4, 16, 64, 256)  # inputs of passes whose memory is measured, beside the buckets


@dataclass(slots=True)  # not frozen, which would be slower to create
class PredictRequest:
    """One parsed request: inputs in the model's input space, and its options."""

    x: NDArray[np.float32]  # (B, ...), read only
    samples: int | Literal["auto"]
    seed: int | None  # None: any draws, which may be shared with other requests
    max_samples: int  # for "auto"
    tolerance: float
    keep: bool = False  # return each draw's outputs too
    closed: bool = False  # probit: the closed form without draws, whose work counts as that of `samples` draws
    group: str | None = None  # whose quantile gives the prediction sets
    start: int = 0  # first row, where this is a part of a larger request

    rows: int = field(init=False)
    most: int = field(init=False)  # largest number of draws
    work: int = field(init=False)  # rows × draws, at most
    drawn: int = field(init=False)  # draws, as many as are usual for "auto"
    cost: int = field(init=False)  # rows × draws; what an engine knows better, the queue puts here

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        self.most = self.max_samples if self.samples == "auto" else self.samples
        self.drawn = min(self.most, USUAL) if self.samples == "auto" else max(1, self.most)
        self.work = self.rows * max(1, self.most)
        self.cost = self.rows * self.drawn


@dataclass(slots=True)
class PredictResult:
    """The results of a request, one row per input, on the host."""

    columns: Columns  # among them `samples`: number of draws of each input
    rules: Sequence[Rule]  # thresholds and quantiles that were applied, one for each input
    samples: int  # largest number of draws of any input
    seed: int
    seconds: Mapping[str, float]  # of the passes, by stage
    settled: bool = False  # by "auto": inputs differ in their number of draws
    outputs: Tensor | None = None  # (K, B, ...), each draw's outputs, with `keep`
    predictive: Predictive = "sampling"


Answer = PredictResult | Exception


class Broken(Exception):
    """The device is unusable; the error is not caused by a request."""


class Engine:
    """Answers requests with one model on its device."""

    def __init__(
        self,
        model: Model,
        buckets: Sequence[int],
        plan_cache: PlanCache | None = None,
        plan_seconds: float = 0.0,
        bank: Bank | None = None,
        share: MemoryShare | None = None,
        pass_cache: PassCache | None = None,
    ) -> None:
        """Executions that `plan_cache` does not hold are measured for about `plan_seconds`.

        With a bank, requests without a seed get its draws. `share` limits the device memory; None: no limit. With a
        `pass_cache`, passes on a CPU are compiled, for about `plan_seconds` beyond those that it holds.
        """
        self.bank = bank
        self.graphs: PassGraphs | None = None
        self.compiled: CompiledPasses | None = None
        if model.device.type == "cuda":
            model = for_gpu(model)
            self.graphs = PassGraphs(model.network, model.factors, buckets[-1])
        else:
            model = with_units(model)
            if pass_cache is not None:
                self.compiled = CompiledPasses(model.network, model.factors, pass_cache, plan_seconds)
        self.share = Budget(None).share() if share is None else share
        self.draws = 0  # of the largest pass so far
        self.timed: list[tuple[int, float]] = []  # work (rows × draws) and seconds of batches, at the start
        self.slices = math.inf, math.inf  # work of a short batch, and of a long one
        self.long_passes = math.inf, math.inf  # work of a pass of a long request: while others wait, and alone
        self.finest = math.inf  # work of a batch that other models need not wait for
        self.draw_rows = 0.0  # rows that would take as long as a draw does beside its rows
        self.first_draw = 1.0  # draws, of the usual number, that take as long as the only draw of a row
        self.usual = 0  # draws of the batches that were timed
        self.whole: dict[int, dict[int, float]] = {}  # seconds of answers by one compiled pass, by inputs and draws
        self.uncompiled = Pace()  # of passes, whose work is draws × (rows + `draw_rows`)
        self.fine = 0.0  # seconds of a pass after which others may come
        self.pause: Callable[[], None] | None = None  # called between the passes of a batch
        self.pass_work: float = sys.maxsize  # of a pass of a batch with pauses
        self.seed = seed_of(None)  # for the next launch without a seed
        self.model, self.buckets = model, buckets
        self.rulebook = Rulebook(model.card.calibration)
        self.plans = Plans(cheapest(model.factors), plan_cache or PlanCache(None, model.device), plan_seconds)

    def most_rows(self, request: PredictRequest) -> int:
        """Most inputs of a batch: those of the largest graph, where graphs answer the request."""
        if self.graphs is None or self.bank is not None or request.keep or request.closed or request.samples == 0:
            return sys.maxsize
        K = CHUNK if request.samples == "auto" else request.samples
        return self.buckets[-1] if self.graphs.answers(self.buckets[-1], K) else sys.maxsize

    def rates(self, requests: Sequence[PredictRequest]) -> Sequence[float]:
        """Inputs per second of a batch of 0, 1, 2, ... inputs, as far as graphs were timed."""
        K = self._one_pass(requests)
        return () if self.graphs is None or K is None else self.graphs.rates(K)

    def _one_pass(self, requests: Sequence[PredictRequest]) -> int | None:
        """The number of draws K, where one graph may answer all requests; else None."""
        K = requests[0].samples
        seeded = len(requests) > 1 and any(request.seed is not None for request in requests)
        if K == "auto" or self.bank is not None or seeded:
            return None
        return None if any(request.samples != K or request.keep or request.closed for request in requests) else K

    def answer(self, requests: Sequence[PredictRequest]) -> list[Answer]:
        """Answers in order. Requests of one group share a pass; if it fails, each of its requests is computed alone."""
        groups: dict[object, list[int]] = {}
        answers: dict[int, Answer] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._group(request, i), []).append(i)
        for members in groups.values():
            x = np.concatenate([requests[i].x for i in members])
            if _not_finite(x) is None:
                answers |= zip(members, self._answer_group([requests[i] for i in members], x), strict=True)
                continue
            bad = {i: row for i in members if (row := _not_finite(requests[i].x)) is not None}
            answers |= {i: InputError(UNFIT.format(requests[i].start + row)) for i, row in bad.items()}
            if fine := [requests[i] for i in members if i not in bad]:
                rest = self._answer_group(fine, np.concatenate([request.x for request in fine]))
                answers |= zip((i for i in members if i not in bad), rest, strict=True)
        return [answers[i] for i in range(len(requests))]

    def launch(self, requests: Sequence[PredictRequest]) -> "LaunchedBatch | None":
        """Start the graph that answers all requests; None where there is none.

        `wait` must be called before another pass starts.
        """
        try:
            return self._launch(requests)
        except torch.AcceleratorError as error:
            raise Broken from error
        except Exception as error:  # raised again for the request that caused it, when each is computed alone
            log.warning("a batch is not launched", extra={"why": f"{type(error).__name__}: {error}"[:200]})
            return None

    def _launch(self, requests: Sequence[PredictRequest]) -> "LaunchedBatch | None":
        K, given = self._one_pass(requests), requests[0].seed
        if self.graphs is None or K is None:
            return None
        graph = self.graphs.at(bucket_of(self.buckets, sum(request.rows for request in requests)), K)
        if graph is None:
            return None
        watch, seed = Stopwatch(self.model.device), self.seed if given is None else seed_of(given)
        x = graph.put([request.x for request in requests])
        watch.lap("sample")
        graph.go(seed, 0)
        self.seed = seed_of(None)  # from here on the host works while the device computes
        job = self._job(torch.from_numpy(x), seed, watch, K)
        launched = LaunchedBatch(self, requests, job, graph, _not_finite(x) is None)
        watch.lap("forward")
        return launched

    def warm(
        self, samples: int, device: AbstractContextManager[object], slices: tuple[float, float, float] | None = None
    ) -> None:
        """Measure executions and run every bucket once; raises what a request would raise.

        `slices`: seconds of a pass after which others may come, of a short batch and of a long one.

        Raises NumericsError where the device computes wrongly.

        `device` is entered for each bucket: other models on it wait for one bucket, not for all.
        """
        if self.share.limited:
            self._fit(device)
        with device:
            self._prove()
        by_torch: list[tuple[int, float]] = []  # timings before passes are compiled
        drawing = samples > 0 and self.model.factors.random and self.graphs is None
        per_draw: float | None = None  # seconds of one more draw of the fewest rows
        for rows in self.buckets:
            x = self._zeros(rows)
            job = self._job(self._normals(rows), 0, None)
            once = job.samples_at_once(rows)
            K = min(samples, once + samples % once)  # a full pass, and the remainder
            requests = [PredictRequest(x, K, None, max(1, K), 0.5)]
            if self.model.factors.closed_form:
                requests.append(PredictRequest(x, 0, None, 1, 0.5, closed=True))
            with device:
                if samples and self.model.factors.random:
                    self.plans.measure(job, min(samples, once))
                    self._weigh(rows)
                began = time.monotonic()
                for result in self.answer(requests):
                    if isinstance(result, Exception):
                        raise result
                if time.monotonic() - began < QUICK or rows <= self.buckets[0]:
                    self._time(requests[0])
                    by_torch.append(self.timed[-1])
                    if per_draw is None and slices is not None and drawing:
                        per_draw = self._per_draw(requests[0])
                if self.graphs is not None and samples:
                    before = torch.cuda.memory_reserved(self.model.device)
                    for k in {min(samples, once), samples % once, min(CHUNK, once)} - {0}:
                        if self.share.fits(rows, k):
                            self.graphs.capture(job, k)
                    self.plans.bytes += max(0, torch.cuda.memory_reserved(self.model.device) - before)
                    self._time(requests[0])  # with the graph
                if self.compiled is not None and samples:
                    before = self.compiled.bytes
                    for k in dict.fromkeys((min(samples, once), samples % once, min(CHUNK, once))):
                        self.compiled.compile(job, k, self.share)
                    self.plans.bytes += self.compiled.bytes - before
                    self._time(requests[0])
                    self.whole[rows] = self._whole(rows, K, self.timed[-1][1])
        self.plans.cache.save()
        if slices is not None:
            if self.timed and self.timed[-1][1] * PACED < QUICK * self.buckets[-1] < QUICK * PACED:
                with device:
                    self._time(PredictRequest(self._zeros(PACED), samples, None, max(1, samples), 0.5))
                by_torch.append(self.timed[-1])
            pace = Pace(self.timed)
            fine, short, long = slices
            least = max(1, samples)  # one input is always short
            self.slices = max(least, pace.work_in(short)), max(least, pace.work_in(long))
            self.finest = max(CHUNK, pace.work_in(fine))
            if drawing and samples > 1:
                with device:
                    self.first_draw = self._first_draw(pace, samples)
            if self.graphs is None:
                pace = Pace(by_torch)  # passes of other sizes than the compiled ones take longer
                self.usual, self.fine = samples, fine
                if per_draw and not pace.b:  # one size was timed, or all took as long: rows cost little
                    sloped = pace.with_slope(per_draw * samples / max(work for work, _ in by_torch))
                    pace = sloped.without(samples * self.buckets[0])
                if per_draw is not None:
                    self.draw_rows = pace.rows_of_a_draw(per_draw, self.buckets[0])
                self.uncompiled = pace.without(samples * self.draw_rows)
                self.long_passes = max(1, self.uncompiled.work_in(fine)), max(1, self.uncompiled.work_in(long))

    def cost(self, request: PredictRequest) -> int:
        """Work of a request, in which draws beyond the usual ones count with what they take beside their rows, and rows
        of fewer draws with what these do not share."""
        rows, drawn = request.rows, request.drawn
        if 1 <= drawn < self.usual:
            return round(rows * (drawn + (self.first_draw - 1) * (self.usual - drawn) / (self.usual - 1)))
        return rows * drawn + round(self.draw_rows * (drawn - self.usual))

    def _first_draw(self, pace: Pace, samples: int) -> float:
        """By what further rows of one draw take."""
        few, many = self.buckets[0], max(2 * self.buckets[0], self.buckets[-1], PACED)
        if not pace.b:
            return 1.0
        times = [self._seconds(PredictRequest(self._zeros(rows), 1, None, 1, 0.5)) for rows in (few, many)]
        return min(float(samples), max(1.0, (times[1] - times[0]) / ((many - few) * pace.b)))

    def _whole(self, rows: int, K: int, seconds: float) -> dict[int, float]:
        """Seconds of an answer by each compiled pass of so many inputs; those of K draws, where they take long."""
        assert self.compiled is not None
        sizes = [k for B, k in self.compiled.known if rows == B]
        if seconds > QUICK:
            return {k: seconds for k in sizes if k == K}
        seeded = {k: PredictRequest(self._zeros(rows), k, 0, k, 0.5) for k in sizes}  # their draws are not made ahead
        return {k: self._seconds(request) for k, request in seeded.items()}

    def _per_draw(self, request: PredictRequest) -> float:
        """Seconds of a draw beside others, for the request's rows; its own time is the last of `timed`."""
        more = replace(request, samples=FURTHER * request.most, max_samples=FURTHER * request.most)
        known = self.timed[-1][1]
        if known > QUICK:  # hardly anything of it is fixed, and more draws would take long
            return known / request.most
        return max(0.0, self._seconds(more) - known) / (more.most - request.most)

    def _time(self, request: PredictRequest) -> None:
        """Time an answer that was given before: the first of a size takes longer."""
        seconds = self._seconds(request)
        self.timed = [one for one in self.timed if one[0] != request.work] + [(request.work, seconds)]

    def _seconds(self, request: PredictRequest) -> float:
        return least_seconds(lambda: self.answer([request]))

    def _zeros(self, rows: int) -> NDArray[np.float32]:
        declared = self.model.card.input
        assert declared is not None
        return np.zeros((rows, *declared.shape), np.float32)

    def _normals(self, rows: int) -> Tensor:
        """Fixed random inputs, with which wrong products show."""
        return torch.randn(self._zeros(rows).shape, generator=torch.Generator().manual_seed(0))

    def _prove(self) -> None:
        """Check every product of a pass with draws and of a pass with the posterior mean against a wider dtype."""
        job = replace(self._job(self._normals(PROVEN), 0, None, TRIED), graph_for=no_graph)
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
        """Keep only the buckets whose passes fit the memory; larger requests are split."""
        for rows in sorted({*self.buckets, *(n for n in WEIGHED if n < max(self.buckets))}):
            with device:
                self._weigh(rows)
            if not self.share.fits(rows, 1):  # larger ones do not fit either
                break
        kept = tuple(rows for rows in self.buckets if self.share.fits(rows, 1))
        memory = {"left": self.share.budget.left, "limit": self.share.budget.limit}
        if not self.share.fits(1, 1):
            raise DubitoError(
                f"one input takes {self.share.need(1, 1):,.0f} bytes, and {memory['left']:,} are left of the "
                f"{memory['limit']:,} that the setting memory_bytes allows: raise it, or serve fewer models."
            )
        if dropped := [rows for rows in self.buckets if rows not in kept]:
            log.warning("batches that do not fit the memory go in parts", extra={"batches": dropped, **memory})
        self.buckets = kept

    def _weigh(self, rows: int) -> None:
        """Measure the memory of a pass with the current plan, where memory is limited."""
        if not self.share.limited:
            return
        job = self._job(torch.from_numpy(self._zeros(rows)), 0, None, TRIED)
        job = replace(job, fits=None, graph_for=no_graph)  # in one pass, and without graphs

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

    def _group(self, request: PredictRequest, i: int) -> object:
        """Key of the requests that may share passes. A request with a seed is alone, so that its answer has the same
        bits whatever else is in the batch."""
        if request.keep or request.seed is not None:
            return i
        if request.closed:
            return ("closed", request.group)
        if request.samples == 0 or self.model.factors.normals == 0:
            return ("repeatable", request.samples, request.group)
        return "drawn"

    def _answer_group(self, requests: list[PredictRequest], x: NDArray[np.float32]) -> list[Answer]:
        try:
            return list(self._together(requests, torch.from_numpy(x)))
        except torch.AcceleratorError as error:
            raise Broken from error
        except Exception as error:  # caused by one request's inputs: compute each request alone
            if len(requests) == 1:
                return [error]
        return [a for request in requests for a in self._answer_group([request], request.x.copy())]

    def _together(self, requests: list[PredictRequest], x: Tensor) -> list[PredictResult]:
        first = requests[0]
        watch = Stopwatch(self.model.device)
        if first.closed or first.keep or first.samples == 0 or self.model.factors.normals == 0:
            return self._repeatable(requests, x, watch)
        most = max(request.most for request in requests)
        ahead = self.bank.take(most) if self.bank is not None and first.seed is None else None
        if ahead is None:
            draws = min(CHUNK if request.samples == "auto" else request.most for request in requests)
            return self.conclude(requests, self._job(x, first.seed, watch, most, draws=draws))
        return self.conclude(requests, self._job(x, ahead.seed, watch, most, ahead.stock))

    def conclude(self, requests: Sequence[PredictRequest], job: Job) -> list[PredictResult]:
        """Draw, average and apply the calibration: one result per request."""
        most = [request.most for request in requests for _ in range(request.rows)]
        settle = [
            request.tolerance if request.samples == "auto" else 0.0 for request in requests for _ in range(request.rows)
        ]
        summary, drawn = answer_each(job, np.array(most), np.array(settle))
        taken: list[int] = drawn.tolist()
        rules: list[Rule] = []
        for request in requests:
            tolerance, limit = (request.tolerance, request.max_samples) if request.samples == "auto" else (None, None)
            rows = taken[len(rules) : len(rules) + request.rows]
            rules += [self.rulebook.rule(K, tolerance, limit, request.group) for K in rows]
        return self._apart(requests, columns_of(summary, rules), rules, taken, job.seed, job.watch)

    def _repeatable(self, requests: list[PredictRequest], x: Tensor, watch: Stopwatch) -> list[PredictResult]:
        """Results of requests that need the same passes: closed form, posterior mean, kept draws, ensembles."""
        first, model = requests[0], self.model
        samples = max(1, model.factors.members) if first.samples == "auto" else first.samples
        passes = self._passes(watch, first.seed, sum(request.cost for request in requests))
        if first.closed:
            prediction = predict_closed(model.network, model.factors, x, **passes)
        else:
            keep = first.keep
            prediction = predict(model.network, model.factors, x, samples, first.seed, keep_outputs=keep, **passes)
        rules = self.rulebook.of(prediction, first.group)
        columns = columns_of(prediction.summary, rules)
        outputs = None if prediction.outputs is None else prediction.outputs.cpu()  # only of a request that is alone
        drawn = [prediction.samples] * len(rules)
        return self._apart(
            requests, columns, rules, drawn, prediction.seed, watch, outputs, prediction.method, settles=False
        )

    def _apart(
        self,
        requests: Sequence[PredictRequest],
        columns: Columns,
        rules: list[Rule],
        drawn: list[int],
        seed: int,
        watch: Stopwatch,
        outputs: Tensor | None = None,
        predictive: Predictive = "sampling",
        settles: bool = True,
    ) -> list[PredictResult]:
        """Split batch results per request; without `settles`, "auto" is answered like a number of draws."""
        columns["samples"] = np.array(drawn)
        watch.lap("summarise")
        seconds = watch.seconds
        results, start = [], 0
        for request in requests:
            end = start + request.rows
            mine = {name: column[start:end] for name, column in columns.items()}
            settled = settles and request.samples == "auto"
            most = max(drawn[start:end])
            results.append(PredictResult(mine, rules[start:end], most, seed, seconds, settled, outputs, predictive))
            start = end
        return results

    def _job(
        self,
        x: Tensor,
        seed: int | None,
        watch: Stopwatch | None,
        most: int = 1,
        stock: Stock | None = None,
        draws: int | None = None,
    ) -> Job:
        """`draws` of the first pass, where others made ahead may take their place."""
        graph_for: GraphFor = no_graph if self.graphs is None else self.graphs.at
        divide: Divide = in_one
        if self.compiled is not None and stock is None:
            # which passes a seed takes does not depend on what was timed at the start, nor then its last digits
            graph_for, divide = (self._compiled_for, self._divided) if seed is None else (self.compiled.at, in_one)
        more = self._passes(watch, seed, len(x) * most)
        network, factors = self.model.network, self.model.factors
        normals, B = None, bucket_of(self.buckets, len(x))
        if self.compiled is not None and seed is None and draws is not None and self._begins_compiled(B, draws):
            normals = self.compiled.unseeded()
            seed = normals.seed
        job = Job.of(
            network,
            factors,
            x,
            seed,
            most=most,
            stock=stock,
            graph_for=graph_for,
            divide=divide,
            normals=normals,
            finite=True,
            **more,
        )
        self.draws = max(self.draws, min(most, job.samples_at_once(len(x))))
        return job

    def _begins_compiled(self, B: int, K: int) -> bool:
        return self._compiled_for(B, self._divided(B, K)) is not None

    def _compiled_for(self, B: int, K: int) -> CompiledPass | None:
        """The compiled pass of K draws, or else of the fewest more that take no longer than K draws by torch."""
        assert self.compiled is not None
        if (found := self.compiled.at(B, K)) is not None:
            return found
        more = [k for k, seconds in self.whole.get(B, {}).items() if k > K and seconds <= self._by_torch(B, K)]
        return self.compiled.at(B, min(more)) if more else None

    def _divided(self, B: int, K: int) -> int:
        """Draws of the next pass where K are left: all, or those of the largest compiled pass where such passes take
        less time in all."""
        known = self.whole.get(B)
        if not known or (most := max(known)) >= K:
            return K
        return most if math.ceil(K / most) * known[most] <= self._by_torch(B, K) else K

    def _by_torch(self, B: int, K: int) -> float:
        """Seconds of a pass; 0 before any was timed."""
        return self.uncompiled.a + self.uncompiled.b * K * (B + self.draw_rows)

    def _passes(self, watch: Stopwatch | None, seed: int | None, work: int) -> Passes:
        """A seed's passes do not depend on who else asks: their size would change its sums by a rounding."""
        sliced = self.graphs is None and (self.pause is not None if seed is None else work > self.slices[0])
        limit = self.pass_work if seed is None else min(self.slices[0], self.finest, self.long_passes[0])
        return {
            "pause": self.pause,
            "pass_rows": int(limit) if sliced and limit < sys.maxsize else None,  # graphs have sizes of their own
            "pass_draws": partial(self._pass_draws, limit) if sliced else None,
            "plan": self.plans.at,
            "temperature": self.model.temperature,
            "buckets": self.buckets,
            "watch": watch,
            "fits": self.share.fits if self.share.limited else None,
        }

    def _pass_draws(self, limit: float, B: int) -> int:
        """Draws of a pass of B inputs between two pauses: as many as `limit` (work) allows, or those of the compiled
        pass where others wait no longer for it and it is about as fast."""
        work = B + self.draw_rows
        K = max(1, int(limit / work)) if limit < sys.maxsize else sys.maxsize
        seconds = self._by_torch(B, K)
        whole = self.whole.get(B, {}).get(self.usual, math.inf)
        return self.usual if whole <= max(self.fine, seconds) and whole * K <= NEARLY * seconds * self.usual else K


class LaunchedBatch:
    """Requests whose graph runs on the device. After `wait` the device is free; then `answers` gives the results."""

    def __init__(
        self, engine: Engine, requests: Sequence[PredictRequest], job: Job, graph: PassGraph, fit: bool
    ) -> None:
        """The next launch overwrites the job's inputs: after `wait` only their number may be used.

        `fit`: all inputs are finite. If not, each request whose inputs are not gets an InputError.
        """
        self.engine, self.requests, self.job, self.graph, self.fit = engine, requests, job, graph, fit
        self.sums: Reals
        self.completed: list[Answer] | None = None  # answers that were computed without the graph

    def wait(self) -> None:
        self.job.watch.go_on()  # the time since the launch was spent on other requests
        try:
            sums = self.graph.fetch()[: self.job.B]
        except torch.AcceleratorError as error:
            raise Broken from error
        self.job.watch.lap("forward")
        if self.fit and np.isfinite(sums).all():
            self.sums = sums
        else:  # computing each request alone shows which one fails
            self.completed = self.engine.answer(self.requests)

    def answers(self) -> list[Answer]:
        if self.completed is not None:
            return self.completed
        self.job.watch.go_on()
        known = HostResults(self.sums)
        return list(self.engine.conclude(self.requests, replace(self.job, graph_for=lambda B, K: known, pause=None)))


@dataclass(frozen=True)
class HostResults:
    """Results already copied to the host, in place of a graph."""

    known: Reals

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        return self.known


def _not_finite(x: NDArray[np.float32]) -> int | None:
    """Index of the first row that is not finite; None where all are."""
    flat = x.reshape(-1)
    with np.errstate(over="ignore"):
        if math.isfinite(flat.dot(flat)):  # one pass over the data; an infinite sum may still be an overflow
            return None
    finite = np.isfinite(x).reshape(len(x), -1).all(1)
    return None if finite.all() else int(finite.argmin())


def joined(parts: Sequence[PredictResult]) -> PredictResult:
    """The results of the parts of one request as one result."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return PredictResult(
        joined_columns([part.columns for part in parts]),
        [rule for part in parts for rule in part.rules],
        max(part.samples for part in parts),
        first.seed,
        {stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in first.seconds},
        first.settled,
        None if first.outputs is None else torch.cat([part.outputs for part in parts if part.outputs is not None], 1),
        first.predictive,
    )
