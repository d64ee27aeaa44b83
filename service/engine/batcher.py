"""The batcher: requests that are queued when the device becomes free form a batch; none waits for a batch to fill."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from queue import SimpleQueue
from secrets import randbits
from typing import TypeVar

from dubito.models.predictions.prediction import SEED_BITS
from dubito.service.engine.engine import Answer, Broken, Engine, PredictRequest, PredictResult, joined
from dubito.service.engine.pace import Pace
from dubito.service.engine.turn import Turn
from dubito.service.fair import FairQueue
from dubito.service.problems import Gone, Hopeless, Late, Overloaded

log = logging.getLogger("dubito")
PATIENCE = 0.05  # seconds after which an answer counts as slow
WORTH = 1.05  # gain in inputs per second for which some requests are left to the next batch
TURNS = 8  # turns of the loop, each of some microseconds, without a new request before a batch is formed
T = TypeVar("T")
LONGEST_WAIT = 60.0  # longest Retry-After of a refused request, in seconds
SURE = 1.5  # a request that takes this many times what it has is refused: the pace is an estimate
RECENT = 1.0  # seconds for which a client counts as one that others share with
OVERFULL = 2  # times the queue that may be under way, where clients come that have less than their share


class Abandoned(BaseException):
    """Nobody waits any longer for the batch that is being computed."""


class Died(BaseException):
    """The device broke while a batch was computed between the passes of another."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A queued request, or a part of one."""

    request: PredictRequest
    future: "asyncio.Future[PredictResult]"
    most: int  # most rows of a batch that it is in
    seconds: float  # until its deadline
    slow: Callable[[], None] | None  # called if it is not answered within `PATIENCE`
    client: str  # clients share the device
    long: bool  # worked off in turns with others
    trace: object = None  # of the request, where it is traced
    timer: asyncio.TimerHandle | None = None  # of the deadline; set once that is near or the answer is slow
    queued: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    taken: bool = False  # by the inference thread
    counted: bool = True  # in the batcher's `work` and `rows`


class Batch:
    """Tickets that are answered together."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        self.began = time.monotonic()  # when it came to the device
        self.wanted: list[Ticket] = []  # those still waited for when the device was free
        self.answers: Callable[[], list[Answer]] = list
        self.failed: Exception | None = None  # error of the whole batch
        self.cpu = 0.0  # seconds of processor time
        self.others = 0.0  # seconds between its passes that others had

    def run(self, part: Callable[[], T]) -> T | None:
        """Run a part of the work. An error fails the whole batch; a broken device ends the thread."""
        if self.failed is not None:
            return None
        began = time.thread_time()
        try:
            return part()
        except Broken:
            raise
        except Abandoned:
            self.failed = Gone()
            return None
        except Exception as error:
            self.failed = error
            return None
        finally:
            self.cpu += time.thread_time() - began


class Batcher:
    """One inference thread, fed by coroutines of one event loop.

    The loop appends tickets to a deque and wakes the thread if it sleeps; the thread takes them out, and calls the loop
    back when they are answered. Only the loop changes the counts, so they need no lock.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_work: int,
        max_queue: int,
        device: Turn,
        on_batch: Callable[[int, float], None] = lambda rows, cpu: None,
    ) -> None:
        """A batch has at most `max_work` (rows × draws), and at most the rows that the engine computes best together;
        at most `max_queue` is queued. `device` is held during passes: models that share a device take turns.

        Where the engine knows how long its work takes, batches are shorter than `max_work`, and the shorter where
        clients or models share the device. A request of more than a short batch is long: it goes in parts, and between
        the passes of a part others are answered.

        `on_batch` is called for each batch, with its rows and its processor time.
        """
        self.engine, self.max_queue, self.on_batch = engine, max_queue, on_batch
        self.max_work = int(min(max_work, max(engine.slices[1], 1)))  # of a batch that nobody waits for
        self.short = int(min(max_work, max(engine.slices[0], 1)))  # of one that others wait for
        self.trace: Callable[[Batch, float], None] | None = None  # called for each batch with the time of its end
        self.max_rows = sys.maxsize  # of a batch, for requests like the last one
        self.device = device
        self.queue: FairQueue[Ticket] = FairQueue()
        self.long: FairQueue[Ticket] = FairQueue()  # parts of long requests
        self.long_next = False  # it is their turn
        self.outer: Batch | None = None  # long batch between whose passes others are answered
        self.by_client: dict[str, int] = {}  # work under way
        self.long_work = 0  # of long requests under way
        self.shared = -RECENT  # time at which a client last came while others were under way
        self.work = self.rows = 0  # accepted and not yet answered: rows × draws, and rows
        self.cost = 0  # rows × draws as many as are usual
        self.running: list[Ticket] = []  # taken and not yet delivered
        self.since: float | None = None  # time at which the running batch began, or last made progress
        self.pace = Pace(engine.timed)
        self.closing = self.dead = False
        self.asleep = False  # the thread waits for the bell
        self.ringing = False  # a call that wakes it is scheduled
        self.gathered = 0  # rows queued while it slept
        self.fresh: dict[Ticket, None] = {}  # tickets without a timer, oldest first
        self.look: asyncio.TimerHandle | None = None  # next check of the fresh tickets
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self.thread.start()

    def alive(self, stuck_seconds: float) -> bool:
        """Whether the thread runs, and its batch is not stuck."""
        since = self.since
        return not self.dead and (since is None or time.monotonic() - since < stuck_seconds)

    @property
    def depth(self) -> int:
        return len(self.queue) + len(self.long)

    def check_room(self, more: int, seconds: float, client: str = "", long: bool = False) -> None:
        """Raise Overloaded where the queue is full or too slow for the deadline, Gone where the model is unloaded. A
        request is never refused while nothing else is queued.

        A client that has less than its share of the queue finds room where others have filled it. Long requests may
        fill half of it.
        """
        if self.closing or self.dead:
            raise Gone
        if not self.work:
            return
        slowest = self.pace.a + (self.pace.a + self.pace.b) * self.cost  # if each unit of work were a batch
        if self.work + more <= self.max_queue and slowest <= seconds and not (long and self.long_work):
            return  # the usual case
        mine = self.by_client.get(client, 0)
        clients = len(self.by_client) + (client not in self.by_client)
        ahead = self.work if long else min(self.work, 2 * (self.work - self.long_work))  # short ones go between passes
        before = min(ahead, clients * (mine + more))  # clients take turns
        batch = min(self.max_work, max(1, self.max_rows * self.work // self.rows))
        wait = self.pace.of(before * self.cost / self.work, batch)
        full = self.work + more > self.max_queue and (
            mine + more > self.max_queue // clients or self.work + more > OVERFULL * self.max_queue
        )
        if long and self.long_work:
            full = full or self.long_work + more > self.max_queue // 2
        if full or wait > seconds:
            raise Overloaded(self.work, self.max_queue, min(LONGEST_WAIT, max(0.1, wait)))

    def put(
        self,
        request: PredictRequest,
        seconds: float,
        slow: Callable[[], None] | None = None,
        client: str = "",
        trace: object = None,
        more: bool = False,
    ) -> list[Ticket]:
        """Queue a request; it is answered, failed or late within `seconds`. Large requests are split into parts.

        `more`: others may follow some turns of the loop later; the batch is then formed once none came for `TURNS`.
        `slow` is called if the answer is not there after `PATIENCE`.
        """
        long = request.cost > self.short
        self.check_room(request.work, seconds, client, long)
        self.max_rows = self.engine.most_rows(request)
        if long and (needed := self.pace.of(request.cost, self.max_work)) > SURE * seconds:
            raise Hopeless(max(0.0, seconds), needed)
        whole = request.rows == 1 or (request.cost <= self.max_work and request.rows <= self.max_rows)
        parts = (request,) if whole else self._parts(request)
        tickets = [self._ticket(part, seconds, None if part.start else slow, client, long, trace) for part in parts]
        line = self.long if long else self.queue
        for ticket in tickets:
            line.append(client, ticket)
        mine = self.by_client.get(client)
        if self.by_client and (mine is None or len(self.by_client) > 1 or self.long_work):
            self.shared = time.monotonic()
        self.by_client[client] = (mine or 0) + request.work
        self.work += request.work
        self.rows += request.rows
        self.cost += request.cost
        self.long_work += request.work if long else 0
        if self.asleep:
            self.gathered += request.rows
            if 2 * self.gathered >= self.max_rows:
                self._wake()  # half a batch: the rest becomes the next one, and the device does not idle meanwhile
            elif not self.ringing:  # wake it after the loop has queued the other requests that are ready now
                self.ringing = True
                self.loop.call_soon(self._ring, self.gathered, TURNS if more else 0)
        return tickets

    def _ring(self, gathered: int, turns: int) -> None:
        """Wake the thread after so many turns of the loop in which no request was queued."""
        if not turns or not self.asleep:
            self._wake()
        else:
            left = TURNS if self.gathered > gathered else turns - 1
            self.loop.call_soon(self._ring, self.gathered, left)

    def _wake(self) -> None:
        self.ringing, self.gathered = False, 0
        if self.asleep:
            self.asleep = False
            self.bell.put(None)

    def _parts(self, request: PredictRequest) -> list[PredictRequest]:
        """Split a request into parts that fit a batch, with one seed, so that all rows use the same draws."""
        seed = randbits(SEED_BITS) if request.seed is None else request.seed
        rows = min(self.max_rows, max(1, self.max_work * request.rows // request.cost))
        return [replace(request, x=request.x[i : i + rows], seed=seed, start=i) for i in range(0, request.rows, rows)]

    def _ticket(
        self,
        request: PredictRequest,
        seconds: float,
        slow: Callable[[], None] | None,
        client: str,
        long: bool,
        trace: object,
    ) -> Ticket:
        """A ticket; most are answered before `_look` runs, and never get a timer of their own."""
        ticket = Ticket(request, self.loop.create_future(), self.max_rows, seconds, slow, client, long, trace)
        if seconds <= 2 * PATIENCE:
            ticket.timer = self.loop.call_later(max(0.0, seconds), self._expire, ticket)
        else:
            self.fresh[ticket] = None
            if self.look is None:
                self.look = self.loop.call_later(PATIENCE, self._look)
        return ticket

    def _look(self) -> None:
        """Start the deadline timers of tickets older than `PATIENCE`, and call their `slow`."""
        now = time.monotonic()
        for ticket in [*takewhile(lambda ticket: now - ticket.queued >= PATIENCE, self.fresh)]:
            del self.fresh[ticket]
            ticket.timer = self.loop.call_later(max(0.0, ticket.queued + ticket.seconds - now), self._expire, ticket)
            if ticket.slow is not None:
                ticket.slow()
        self.look = self.loop.call_later(PATIENCE, self._look) if self.fresh else None

    async def result(self, tickets: Sequence[Ticket]) -> PredictResult:
        """Wait for the result; raises Late or the request's own error. Cancelling drops the request."""
        try:
            if len(tickets) == 1:
                return await tickets[0].future
            return joined([await ticket.future for ticket in tickets])
        finally:
            self.drop(tickets)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Cancel tickets: those still queued are not computed, and no longer count as work."""
        for ticket in tickets:
            self.fresh.pop(ticket, None)
            ticket.slow = None  # it refers to the ticket: the cycle would keep the body until a garbage collection
            if ticket.timer is not None:
                ticket.timer.cancel()
            if ticket.future.cancel() or ticket.future.cancelled():  # also if the waiting task was cancelled
                self._forgo(ticket)
            else:
                ticket.future.exception()  # marks it as retrieved: asyncio would log it otherwise

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(Late(ticket.seconds))
            self._forgo(ticket)

    def _forgo(self, ticket: Ticket) -> None:
        """No longer count a ticket's work, unless the thread has taken it."""
        if not ticket.taken:
            self._discount(ticket)

    def _discount(self, ticket: Ticket) -> None:
        if ticket.counted:
            ticket.counted = False
            self.work -= ticket.request.work
            self.rows -= ticket.request.rows
            self.cost -= ticket.request.cost
            self.long_work -= ticket.request.work if ticket.long else 0
            if left := self.by_client.get(ticket.client, 0) - ticket.request.work:
                self.by_client[ticket.client] = left
            else:
                self.by_client.pop(ticket.client, None)

    def _run(self) -> None:
        """The inference thread."""
        last: Batch | None = None  # computed and not yet delivered: the device can start the next batch meanwhile
        try:
            while self._work_comes(last is None):
                if self.depth:
                    last = self._serve(last)
                elif last is not None:
                    self._conclude(last)
                    last = None
        except BaseException:
            log.critical("the inference loop has died", exc_info=True)
        finally:
            self.dead = True
            self._on_loop(self._drop_all)

    def _work_comes(self, patient: bool) -> bool:
        """Whether to go on; False once the batcher is closed. If `patient`, wait until something is queued."""
        while patient and not self.depth:
            if self.closing:
                return False
            self.asleep = True  # set before the queue is checked again: from now on `put` rings the bell
            if not self.depth and not self.closing:
                self.bell.get()
            self.asleep = False
        return True

    def _take(self) -> list[Ticket]:
        """The next batch from the queue, without cancelled tickets."""
        self.long_next = len(self.long) > 0 and (self.long_next or not self.queue)
        batch = self._from(self.long, 1) if self.long_next else self._from(self.queue)
        self.long_next = not self.long_next
        return batch

    def _from(self, line: FairQueue[Ticket], count: int = sys.maxsize) -> list[Ticket]:
        """Take the next batch, of at most `count` tickets."""
        batch: list[Ticket] = []
        work, rows, most = 0, 0, sys.maxsize
        limit = self.short if self.contended or line.clients > 1 else self.max_work
        while len(batch) < count and (ticket := line.first()) is not None:
            most = min(most, ticket.most)
            if batch and (work + ticket.request.cost > limit or rows + ticket.request.rows > most):
                break
            line.pop()
            if not ticket.future.done():  # else it was cancelled, or is late
                batch.append(ticket)
                work, rows = work + ticket.request.cost, rows + ticket.request.rows
        self._leave(batch)
        for ticket in batch:
            ticket.taken = True
        self.running += batch
        return batch

    @property
    def contended(self) -> bool:
        """Clients or models share the device."""
        return self.device.contended or time.monotonic() - self.shared < RECENT

    def _leave(self, batch: list[Ticket]) -> None:
        """Return the last tickets to the queue where a smaller batch computes more inputs per second."""
        rates = self.engine.rates([ticket.request for ticket in batch]) if len(batch) > 1 else ()
        ends = [*accumulate(ticket.request.rows for ticket in batch)]
        if not rates or ends[-1] >= len(rates):
            return
        best = max(range(len(batch)), key=lambda i: rates[ends[i]])
        if rates[ends[best]] < WORTH * rates[ends[-1]]:
            return
        for ticket in reversed(batch[best + 1 :]):
            self.queue.put_back(ticket.client, ticket)
        del batch[best + 1 :]

    def _serve(self, last: Batch | None) -> Batch | None:
        """Compute what is queued once the device is free, while no other model has a better claim to it, and deliver it
        and the previous batch; returns a batch that is still undelivered.

        Batches are formed when the device is free, not before: requests that come meanwhile need not wait for another
        turn.
        """
        if not self.device.acquire(blocking=False):
            if last is not None:  # deliver it while another model has the device
                self._conclude(last)
            last = None
            self.device.acquire()
        held = True
        try:
            while held and self.depth:
                if not (tickets := self._take()):
                    continue
                batch = Batch(tickets)
                left = self._pass(batch, last)
                last = batch if left else None
                if self.depth:
                    held = self.device.keep()
                else:
                    self.device.release()
                    held = False
                if not left:
                    self._conclude(batch)
        finally:
            if held:
                self.device.release()
        return last

    def _pass(self, batch: Batch, last: Batch | None) -> bool:
        """Compute a batch; True where its answers are still to be made from what the device returned."""
        self.since = batch.began = started = time.monotonic()
        batch.wanted = [t for t in batch.tickets if not t.future.done()]  # some may have expired meanwhile
        requests = [ticket.request for ticket in batch.wanted]
        self.outer, work = batch, sum(request.cost for request in requests)
        finest = int(min(self.short, self.engine.finest)) if self.device.contended else self.short
        self.engine.pause = self._between if work > finest else None
        contended = self.contended
        self.engine.pass_work = finest if contended else self.max_work
        if any(ticket.long for ticket in batch.wanted):
            self.engine.pass_work = min(self.engine.pass_work, self.engine.long_passes[0 if contended else 1])
        try:
            launched = batch.run(lambda: self.engine.launch(requests)) if requests else None
        finally:
            if last is not None:
                self._conclude(last)
                self.since = time.monotonic()
        if launched is not None:
            batch.run(launched.wait)
            batch.answers = launched.answers
        elif requests:
            answers = batch.run(lambda: self.engine.answer(requests))
            batch.answers = lambda: answers or []
        self.engine.pause = self.outer = None
        if requests:
            self.pace.add(work, time.monotonic() - started - batch.others)
        return launched is not None

    def _between(self) -> None:
        """Between two passes of a batch: other models use the device, and short requests are answered."""
        batch, began = self.outer, time.monotonic()
        assert batch is not None
        if all(ticket.future.done() for ticket in batch.wanted):
            raise Abandoned
        self.device.yield_()
        if batch.wanted[0].long and (tickets := self._from(self.queue)):
            pause, self.engine.pause = self.engine.pause, None
            short = Batch(tickets)
            short.wanted = tickets
            try:
                answers = short.run(lambda: self.engine.answer([ticket.request for ticket in tickets]))
            except Broken as error:
                raise Died from error  # no error of the long request
            short.answers = lambda: answers or []
            self._conclude(short)
            batch.cpu -= short.cpu
            self.engine.pause = pause
            self.since = time.monotonic()
        batch.others += time.monotonic() - began

    def _conclude(self, batch: Batch) -> None:
        """Make the answers of a computed batch, and deliver them."""
        completed = batch.run(batch.answers)
        answers: Sequence[Answer] = [batch.failed] * len(batch.wanted) if batch.failed is not None else completed or []
        ended = time.monotonic()
        for ticket in batch.wanted:
            ticket.ended = ended
        if batch.wanted:
            self.on_batch(sum(ticket.request.rows for ticket in batch.wanted), batch.cpu)
            if self.trace is not None:
                self.trace(batch, ended)
        ended_now = set(batch.tickets)
        self.running = [ticket for ticket in self.running if ticket not in ended_now]
        self.since = None
        self._on_loop(lambda: self._deliver(batch.tickets, dict(zip(batch.wanted, answers, strict=True))))

    def _deliver(self, batch: list[Ticket], answers: dict[Ticket, Answer]) -> None:
        for ticket in batch:
            self._discount(ticket)
            if ticket.future.done():
                continue
            answer = answers[ticket]
            if isinstance(answer, Exception):
                ticket.future.set_exception(answer)
            else:
                ticket.future.set_result(answer)

    def _on_loop(self, what: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed
            return

    def _drop_all(self) -> None:
        left = [*self.running, *self.queue, *self.long]
        self.queue.clear()
        self.long.clear()
        self.work = self.rows = self.cost = self.long_work = 0
        self.by_client.clear()
        for ticket in left:
            if not ticket.future.done():
                ticket.future.set_exception(Gone())

    async def close(self) -> None:
        """Refuse new requests, answer the accepted ones, and end the thread."""
        self.closing = True
        self._wake()
        while self.thread.is_alive():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # let its last delivery run
        if self.look is not None:
            self.look.cancel()
