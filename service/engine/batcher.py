"""The batcher: requests that are queued when a device becomes free form a batch; none waits for a batch to fill."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from secrets import randbits

from dubito.models.predictions.prediction import SEED_BITS
from dubito.service.engine.engine import Answer, Engine, PredictRequest, PredictResult, joined
from dubito.service.engine.pace import Pace
from dubito.service.engine.turn import Turn
from dubito.service.engine.worker import Batch, Ticket, Worker
from dubito.service.fair import FairQueue
from dubito.service.problems import Crowded, Gone, Hopeless, Late, Overloaded

PATIENCE = 0.05  # seconds after which an answer counts as slow
WORTH = 1.05  # gain in inputs per second for which some requests are left to the next batch
TURNS = 8  # turns of the loop, each of some microseconds, without a new request before a batch is formed
LONGEST_WAIT = 60.0  # longest Retry-After of a refused request, in seconds
SURE = 1.5  # a request that takes this many times what it has is refused: the pace is an estimate
RECENT = 1.0  # seconds for which a client counts as one that others share with
OVERFULL = 2  # times the queue that may be under way, where clients come that have less than their share


class Batcher:
    """One queue of one model, fed by coroutines of one event loop, and worked off by a thread for each of its engines.

    The loop appends tickets and wakes a worker that sleeps; workers take them out, and call the loop back when they are
    answered. Only the loop changes the counts, so they need no lock.
    """

    def __init__(
        self,
        copies: Sequence[tuple[Engine, Turn]],
        *,
        max_work: int,
        max_queue: int,
        on_batch: Callable[[int, float], None] = lambda rows, cpu: None,
    ) -> None:
        """`copies` of the model: each engine with its device, which is held during passes, since models may share it.

        A batch has at most `max_work` (rows × draws), and at most the rows that the engine computes best together; at
        most `max_queue` is queued.

        Where the engine knows how long its work takes, batches are shorter than `max_work`, and the shorter where
        clients or models share the device. A request of more than a short batch is long: it goes in parts, and between
        the passes of a part others are answered.

        `on_batch` is called for each batch, with its rows and its processor time.
        """
        self.engine = engine = copies[0][0]  # by which batches are formed; the others are its copies
        self.max_queue, self.on_batch = max_queue, on_batch
        self.max_work = int(min(max_work, max(engine.slices[1], 1)))  # of a batch that nobody waits for
        self.short = int(min(max_work, max(engine.slices[0], 1)))  # of one that others wait for
        self.unpaused = max(1, int(self.short / engine.first_draw))  # rows of a draw: others come between two draws
        self.trace: Callable[[Batch, float], None] | None = None  # called for each batch with the time of its end
        self.max_rows = sys.maxsize  # of a batch, for requests like the last one
        self.taking = threading.Lock()  # held by the worker that forms a batch
        self.queue: FairQueue[Ticket] = FairQueue()
        self.long: FairQueue[Ticket] = FairQueue()  # parts of long requests
        self.by_client: dict[str, int] = {}  # work under way
        self.long_work = 0  # of long requests under way
        self.shared = -RECENT  # time at which a client last came while others were under way
        self.work = self.rows = 0  # accepted and not yet answered: rows × draws, and rows
        self.cost = 0  # rows × draws as many as are usual
        self.pace = Pace(engine.timed)
        self.closing = False
        self.ringing = False  # a call that wakes a worker is scheduled
        self.gathered = 0  # rows queued while it slept
        self.fresh: dict[Ticket, None] = {}  # tickets without a timer, oldest first
        self.look: asyncio.TimerHandle | None = None  # next check of the fresh tickets
        self.loop = asyncio.get_running_loop()
        self.workers = [Worker(self, engine, device) for engine, device in copies]
        for worker in self.workers:
            worker.thread.start()

    def alive(self, stuck_seconds: float) -> bool:
        """Whether every thread runs, and no batch is stuck."""
        return all(worker.alive(stuck_seconds) for worker in self.workers)

    def stuck(self, seconds: float) -> bool:
        return any(worker.stuck(seconds) for worker in self.workers)

    @property
    def dead(self) -> bool:
        return all(worker.dead for worker in self.workers)

    @property
    def asleep(self) -> bool:
        """A worker waits."""
        return any(worker.asleep for worker in self.workers)

    @property
    def running(self) -> list[Ticket]:
        """Taken and not yet delivered."""
        return [ticket for worker in self.workers for ticket in worker.running]

    @property
    def depth(self) -> int:
        return len(self.queue) + len(self.long)

    @property
    def waiting(self) -> int:
        """Queued tickets that somebody still waits for."""
        return sum(ticket.counted for line in (self.queue, self.long) for ticket in line)

    def check_room(self, more: int, seconds: float, client: str = "", long: bool = False) -> None:
        """Raise Overloaded where the queue is full, Crowded where it is too slow for the deadline, Gone where the model
        is unloaded. A request is never refused while nothing else is queued.

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
        wait = self.pace.of(before * self.cost / self.work, batch) / len(self.workers)
        full = self.work + more > self.max_queue and (
            mine + more > self.max_queue // clients or self.work + more > OVERFULL * self.max_queue
        )
        if long and self.long_work:
            full = full or self.long_work + more > self.max_queue // 2
        if full:
            raise Overloaded(self.work, self.max_queue, min(LONGEST_WAIT, max(0.1, wait)))
        if wait > seconds:
            raise Crowded(seconds, min(LONGEST_WAIT, wait))

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
        request.cost = self.engine.cost(request)
        long = request.cost > self.short
        self.check_room(request.work, seconds, client, long)
        self.max_rows = self.engine.most_rows(request)
        if long and (needed := self.pace.of(request.cost, self.max_work)) > SURE * seconds:
            raise Hopeless(max(0.0, seconds), needed)
        whole = request.rows == 1 or (
            request.cost <= self.max_work and request.rows <= min(self.max_rows, self.unpaused)
        )
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
        self.cost += sum(part.cost for part in parts)
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
        """Wake one worker that sleeps."""
        self.ringing, self.gathered = False, 0
        self.wake_one()

    def wake_one(self) -> None:
        if (sleeping := next((worker for worker in self.workers if worker.asleep), None)) is not None:
            sleeping.wake()

    def _parts(self, request: PredictRequest) -> list[PredictRequest]:
        """Split a request into parts that fit a batch, with one seed, so that all rows use the same draws."""
        seed = randbits(SEED_BITS) if request.seed is None else request.seed
        rows = min(self.max_rows, self.unpaused, max(1, self.max_work * request.rows // request.cost))
        starts = range(0, request.rows, rows)
        parts = [replace(request, x=request.x[i : i + rows], seed=seed, start=i) for i in starts]
        for part in parts:
            part.cost = self.engine.cost(part)
        return parts

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
        """No longer count a ticket's work nor keep its inputs, unless the thread has taken it."""
        with self.taking:
            if ticket.taken:
                return
            self._discount(ticket)
            ticket.request.x = ticket.request.x[:0].copy()  # the ticket stays in its line until its turn comes

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

    def take(self, worker: Worker) -> list[Ticket]:
        """The next batch from the queue, without cancelled tickets."""
        with self.taking:
            worker.long_next = len(self.long) > 0 and (worker.long_next or not self.queue)
            batch = self._from(self.long, worker, 1) if worker.long_next else self._from(self.queue, worker)
        worker.long_next = not worker.long_next
        if self.depth:
            self.wake_one()
        return batch

    def take_short(self, worker: Worker) -> list[Ticket]:
        with self.taking:
            return self._from(self.queue, worker)

    def _from(self, line: FairQueue[Ticket], worker: Worker, count: int = sys.maxsize) -> list[Ticket]:
        """Take the next batch, of at most `count` tickets."""
        batch: list[Ticket] = []
        work, rows, most = 0, 0, sys.maxsize
        limit = self.short if self.contended(worker.device) or line.clients > 1 else self.max_work
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
        worker.running += batch
        return batch

    def contended(self, device: Turn) -> bool:
        """Clients or models share the device."""
        return device.contended or time.monotonic() - self.shared < RECENT

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

    def deliver(self, batch: Batch, answers: Sequence[Answer]) -> None:
        self._on_loop(lambda: self._deliver(batch, dict(zip(batch.wanted, answers, strict=True))))

    def _deliver(self, batch: Batch, answers: dict[Ticket, Answer]) -> None:
        if batch.wanted:
            self.on_batch(sum(ticket.request.rows for ticket in batch.wanted), batch.cpu)
        if batch.work and not any(isinstance(answer, Exception) for answer in answers.values()):
            self.pace.add(batch.work, batch.seconds)  # of what was computed whole
        for ticket in batch.tickets:
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

    def died(self, worker: Worker) -> None:
        self._on_loop(lambda: self._drop_all() if self.dead else self._lose(worker.running))

    def _lose(self, tickets: Sequence[Ticket]) -> None:
        """Fail what a worker had taken that ended; others go on."""
        for ticket in tickets:
            self._discount(ticket)
            if not ticket.future.done():
                ticket.future.set_exception(Gone())

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
        """Refuse new requests, answer the accepted ones, and end the threads."""
        self.closing = True
        for worker in self.workers:
            worker.wake()
        while any(worker.thread.is_alive() for worker in self.workers):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # let its last delivery run
        if self.look is not None:
            self.look.cancel()
