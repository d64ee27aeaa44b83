"""The batcher: what is queued when the device is free goes together; nobody waits for a batch to fill."""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from queue import SimpleQueue
from secrets import randbits
from typing import TypeVar

from dubito.models.predictions.prediction import SEED_BITS
from dubito.service.engine.engine import Answer, Answered, Ask, Broken, Engine, joined
from dubito.service.engine.pace import Pace
from dubito.service.problems import Gone, Late, Overloaded

log = logging.getLogger("dubito")
PATIENCE = 0.05  # seconds from which an answer is slow in coming
WORTH = 1.05  # times as many inputs a second, for which some are left to the next batch
T = TypeVar("T")
LONGEST_WAIT = 60.0  # seconds that a refused client is told to stay away


@dataclass(eq=False, slots=True)
class Ticket:
    """A request, or a part of one, on its way."""

    ask: Ask
    future: "asyncio.Future[Answered]"
    most: int  # rows that go together with it
    seconds: float  # that it may take
    slow: Callable[[], None] | None  # hears that it takes a while
    timer: asyncio.TimerHandle | None = None  # of the deadline, once that is near or the answer is slow
    queued: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    taken: bool = False  # by the device
    counted: bool = True  # as work to be done


class Batch:
    """Tickets that were taken together."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        self.wanted: list[Ticket] = []  # those of them that reached the device
        self.answers: Callable[[], list[Answer]] = list
        self.failed: Exception | None = None  # all of them
        self.cpu = 0.0  # seconds

    def run(self, part: Callable[[], T]) -> T | None:
        """A part of the work; where it fails, all do, but for the device itself."""
        if self.failed is not None:
            return None
        began = time.thread_time()
        try:
            return part()
        except Broken:
            raise
        except Exception as error:
            self.failed = error
            return None
        finally:
            self.cpu += time.thread_time() - began


class Batcher:
    """One thread that answers, fed by coroutines of one event loop.

    The loop puts tickets into a deque and rings a bell where the thread sleeps; the thread takes them out, and tells
    the loop when they are answered. All counting is the loop's, so nothing needs a lock.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_work: int,
        max_queue: int,
        device: threading.Lock,
        on_batch: Callable[[int, float], None] = lambda rows, cpu: None,
    ) -> None:
        """A batch has at most `max_work`, rows times samples, and no more rows than the engine likes together; more is
        not queued than `max_queue`. `device` is held while it is used: models that share a device take turns.

        `on_batch` is told of each batch: its rows, and the processor time of this thread for it.
        """
        self.engine, self.max_work, self.max_queue, self.on_batch = engine, max_work, max_queue, on_batch
        self.max_rows = sys.maxsize  # of a batch of such requests as came last
        self.device = device
        self.queue: deque[Ticket] = deque()
        self.work = self.rows = 0  # that were accepted and are not done: rows times samples, and rows
        self.running: list[Ticket] = []  # taken and not yet told of
        self.since: float | None = None  # when the device began with the running batch, or was last seen to get on
        self.pace = Pace()
        self.closing = self.dead = False
        self.asleep = False  # the thread, until the bell is rung
        self.ringing = False  # soon
        self.gathered = 0  # rows that were put while it slept
        self.fresh: dict[Ticket, None] = {}  # those without a timer, by age
        self.look: asyncio.TimerHandle | None = None  # at those
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self.thread.start()

    def alive(self, stuck_seconds: float) -> bool:
        """Whether the thread is there and gets on."""
        since = self.since
        return not self.dead and (since is None or time.monotonic() - since < stuck_seconds)

    @property
    def depth(self) -> int:
        return len(self.queue)

    def check_room(self, more: int, seconds: float) -> None:
        """Raises Overloaded where too much is under way or would not be through in time, or Gone. Whoever is alone may
        ask for anything."""
        if self.closing or self.dead:
            raise Gone
        if not self.work:
            return
        batch = min(self.max_work, max(1, self.max_rows * self.work // self.rows))
        wait = self.pace.of(self.work, batch)
        if self.work + more > self.max_queue or wait > seconds:
            raise Overloaded(self.work, self.max_queue, min(LONGEST_WAIT, max(0.1, wait)))

    def put(self, ask: Ask, seconds: float, slow: Callable[[], None] | None = None) -> list[Ticket]:
        """Accepted when this returns: answered, failed or late within `seconds`. Oversize requests go in parts.

        `slow` is called where the answer is not there after a while.
        """
        self.check_room(ask.work, seconds)
        self.max_rows = self.engine.most_rows(ask)
        whole = ask.rows == 1 or (ask.work <= self.max_work and ask.rows <= self.max_rows)
        asks = [ask] if whole else self._parts(ask)
        tickets = [self._ticket(part, seconds, slow if part is asks[0] else None) for part in asks]
        self.queue.extend(tickets)
        self.work += ask.work
        self.rows += ask.rows
        if self.asleep:
            self.gathered += ask.rows
            if 2 * self.gathered >= self.max_rows:
                self._wake()  # the others will be the next batch: waiting for all, the device would idle in between
            elif not self.ringing:  # once the loop has put whatever else has come by now
                self.ringing = True
                self.loop.call_soon(self._wake)
        return tickets

    def _wake(self) -> None:
        self.ringing, self.gathered = False, 0
        if self.asleep:
            self.asleep = False
            self.bell.put(None)

    def _parts(self, ask: Ask) -> list[Ask]:
        """Each fits a batch; one seed for all, so that all rows of the request see the same functions."""
        seed = randbits(SEED_BITS) if ask.seed is None else ask.seed
        rows = min(self.max_rows, max(1, self.max_work * ask.rows // ask.work))
        return [replace(ask, x=ask.x[at : at + rows], seed=seed, start=at) for at in range(0, ask.rows, rows)]

    def _ticket(self, ask: Ask, seconds: float, slow: Callable[[], None] | None) -> Ticket:
        """Most are answered before anybody looks, and never get a timer of their own."""
        ticket = Ticket(ask, self.loop.create_future(), self.max_rows, seconds, slow)
        if seconds <= 2 * PATIENCE:
            ticket.timer = self.loop.call_later(max(0.0, seconds), self._expire, ticket)
        else:
            self.fresh[ticket] = None
            if self.look is None:
                self.look = self.loop.call_later(PATIENCE, self._look)
        return ticket

    def _look(self) -> None:
        """At tickets that are not fresh any more: between one and two `PATIENCE` old."""
        now = time.monotonic()
        for ticket in [*takewhile(lambda ticket: now - ticket.queued >= PATIENCE, self.fresh)]:
            del self.fresh[ticket]
            ticket.timer = self.loop.call_later(max(0.0, ticket.queued + ticket.seconds - now), self._expire, ticket)
            if ticket.slow is not None:
                ticket.slow()
        self.look = self.loop.call_later(PATIENCE, self._look) if self.fresh else None

    async def answered(self, tickets: Sequence[Ticket]) -> Answered:
        """The answer, or Late or whatever the model made of the request; whoever is cancelled takes it along."""
        try:
            return joined([await ticket.future for ticket in tickets])
        finally:
            self.drop(tickets)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more: those that are queued never reach the device, and no longer count."""
        for ticket in tickets:
            self.fresh.pop(ticket, None)
            ticket.slow = None  # which knows the ticket: a circle would keep the body until it is collected
            if ticket.timer is not None:
                ticket.timer.cancel()
            if ticket.future.cancel() or ticket.future.cancelled():  # by whoever cancelled the task that waits for it
                self._forgo(ticket)
            else:
                ticket.future.exception()  # looked at, so that it is not reported as forgotten

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(Late(ticket.seconds))
            self._forgo(ticket)

    def _forgo(self, ticket: Ticket) -> None:
        """Its work will not be done, unless it has been begun."""
        if not ticket.taken:
            self._discount(ticket)

    def _discount(self, ticket: Ticket) -> None:
        if ticket.counted:
            ticket.counted = False
            self.work -= ticket.ask.work
            self.rows -= ticket.ask.rows

    def _run(self) -> None:
        """The inference thread."""
        last: Batch | None = None  # through the device, and not yet told of: the next may have it meanwhile
        try:
            while (tickets := self._take(last is None)) is not None:
                if tickets:
                    last = self._serve(Batch(tickets), last)
                elif last is not None:
                    self._conclude(last)
                    last = None
        except BaseException:
            log.critical("the inference loop has died", exc_info=True)
        finally:
            self.dead = True
            self._tell(self._drop_all)

    def _take(self, patient: bool) -> list[Ticket] | None:
        """What is queued, up to a batch's work and rows, without those that nobody waits for; None at the end.

        Where it is not patient, nothing may be queued yet.
        """
        while patient and not self.queue:
            if self.closing:
                return None
            self.asleep = True  # first, and then look again: whoever puts something now rings
            if not self.queue and not self.closing:
                self.bell.get()
            self.asleep = False
        batch: list[Ticket] = []
        work, rows, most = 0, 0, sys.maxsize
        while self.queue:
            ticket = self.queue[0]
            most = min(most, ticket.most)
            if batch and (work + ticket.ask.work > self.max_work or rows + ticket.ask.rows > most):
                break
            self.queue.popleft()
            if not ticket.future.done():  # else nobody waits for it any more
                batch.append(ticket)
                work, rows = work + ticket.ask.work, rows + ticket.ask.rows
        self._leave(batch)
        for ticket in batch:
            ticket.taken = True
        self.running += batch
        return batch

    def _leave(self, batch: list[Ticket]) -> None:
        """The last of them, for the next time, where the others would all but fill a smaller pass, and sooner so."""
        rates = self.engine.rates([ticket.ask for ticket in batch]) if len(batch) > 1 else ()
        ends = [*accumulate(ticket.ask.rows for ticket in batch)]
        if not rates or ends[-1] >= len(rates):
            return
        best = max(range(len(batch)), key=lambda i: rates[ends[i]])
        if rates[ends[best]] < WORTH * rates[ends[-1]]:
            return
        self.queue.extendleft(reversed(batch[best + 1 :]))
        del batch[best + 1 :]

    def _serve(self, batch: Batch, last: Batch | None) -> Batch | None:
        """The batch goes through the device, and the last one is told of; what is left to be told of is returned."""
        if not self.device.acquire(blocking=False):
            if last is not None:  # it need not wait for others
                self._conclude(last)
            last = None
            self.device.acquire()
        try:
            left = self._pass(batch, last)
        finally:
            self.device.release()
        if left:
            return batch
        self._conclude(batch)
        return None

    def _pass(self, batch: Batch, last: Batch | None) -> bool:
        """On the device; whether the answers are left to be made of what it found."""
        self.since = started = time.monotonic()
        batch.wanted = [t for t in batch.tickets if not t.future.done()]  # the device may have been long in coming
        asks = [ticket.ask for ticket in batch.wanted]
        try:
            launched = batch.run(lambda: self.engine.launch(asks)) if asks else None
        finally:
            if last is not None:
                self._conclude(last)
                self.since = time.monotonic()
        if launched is not None:
            batch.run(launched.wait)
            batch.answers = launched.answers
        elif asks:
            found = batch.run(lambda: self.engine.answer(asks))
            batch.answers = lambda: found or []
        if asks:
            self.pace.add(sum(ask.work for ask in asks), time.monotonic() - started)
        return launched is not None

    def _conclude(self, batch: Batch) -> None:
        found = batch.run(batch.answers)
        answers: Sequence[Answer] = [batch.failed] * len(batch.wanted) if batch.failed is not None else found or []
        ended = time.monotonic()
        for ticket in batch.wanted:
            ticket.ended = ended
        if batch.wanted:
            self.on_batch(sum(ticket.ask.rows for ticket in batch.wanted), batch.cpu)
        self.running = self.running[len(batch.tickets) :]
        self.since = None
        self._tell(lambda: self._deliver(batch.tickets, dict(zip(batch.wanted, answers, strict=True))))

    def _deliver(self, batch: list[Ticket], answers: dict[Ticket, Answer]) -> None:
        for ticket in batch:
            self._discount(ticket)
            if ticket.future.done():
                continue
            found = answers[ticket]
            if isinstance(found, Exception):
                ticket.future.set_exception(found)
            else:
                ticket.future.set_result(found)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _drop_all(self) -> None:
        left = [*self.running, *self.queue]
        self.queue.clear()
        self.work = self.rows = 0
        for ticket in left:
            if not ticket.future.done():
                ticket.future.set_exception(Gone())

    async def close(self) -> None:
        """No new requests; those that were accepted are answered first."""
        self.closing = True
        self._wake()
        while self.thread.is_alive():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # its last word comes first
        if self.look is not None:
            self.look.cancel()
