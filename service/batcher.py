"""The batcher: whatever is queued when the device is free goes together; nobody waits for a batch to fill."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from secrets import randbits

from dubito.models.prediction import SEED_BITS
from dubito.service.engine import Answer, Answered, Ask, Broken, joined
from dubito.service.pace import Pace
from dubito.service.problems import Gone, Late, Overloaded

log = logging.getLogger("dubito")
LONGEST_WAIT = 60.0  # seconds that a refused client is told to stay away


@dataclass(eq=False)
class Ticket:
    """A request, or a part of one, on its way."""

    ask: Ask
    future: "asyncio.Future[Answered]"
    timer: asyncio.TimerHandle | None = None  # of the deadline
    queued: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    taken: bool = False  # by the device


class Batcher:
    """One thread that answers, fed by coroutines of one event loop."""

    def __init__(
        self,
        answer: Callable[[Sequence[Ask]], list[Answer]],
        *,
        max_work: int,
        max_queue: int,
        device: threading.Lock,
        on_batch: Callable[[int, float], None] = lambda rows, cpu: None,
    ) -> None:
        """`device` is held while answering: models that share a device take turns.

        `on_batch` is told of each batch: its rows, and the processor time of this thread for it.
        """
        self.answer, self.max_work, self.max_queue, self.on_batch = answer, max_work, max_queue, on_batch
        self.device = device
        self.queue: deque[Ticket] = deque()
        self.work = 0  # rows times samples that were accepted and are not done
        self.running: list[Ticket] = []
        self.since: float | None = None  # when the running batch began
        self.pace = Pace()
        self.closing = self.dead = False
        self.changed = threading.Condition()
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
        wait = self.pace.of(self.work, self.max_work)
        if self.work and (self.work + more > self.max_queue or wait > seconds):
            raise Overloaded(self.work, self.max_queue, min(LONGEST_WAIT, max(0.1, wait)))

    def put(self, ask: Ask, seconds: float) -> list[Ticket]:
        """Accepted when this returns: answered, failed or late within `seconds`. Oversize requests go in parts."""
        self.check_room(ask.work, seconds)
        asks = [ask] if ask.work <= self.max_work or ask.rows == 1 else self._parts(ask)
        tickets = [self._ticket(part, seconds) for part in asks]
        with self.changed:
            self.queue.extend(tickets)
            self.work += ask.work
            self.changed.notify()
        return tickets

    def _parts(self, ask: Ask) -> list[Ask]:
        """Each fits a batch; one seed for all, so that all rows of the request see the same functions."""
        seed = randbits(SEED_BITS) if ask.seed is None else ask.seed
        rows = max(1, self.max_work * ask.rows // ask.work)
        return [replace(ask, x=ask.x[at : at + rows], seed=seed) for at in range(0, ask.rows, rows)]

    def _ticket(self, ask: Ask, seconds: float) -> Ticket:
        future = self.loop.create_future()
        ticket = Ticket(ask, future)
        ticket.timer = self.loop.call_later(max(0.0, seconds), self._expire, ticket, seconds)
        return ticket

    async def answered(self, tickets: Sequence[Ticket]) -> Answered:
        """The answer, or Late or whatever the model made of the request; whoever is cancelled takes it along."""
        try:
            return joined([await ticket.future for ticket in tickets])
        finally:
            self.drop(tickets)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more: those that are queued never reach the device, and no longer count."""
        for ticket in tickets:
            if ticket.timer is not None:
                ticket.timer.cancel()
            if ticket.future.cancel():
                self._forgo(ticket)
            elif not ticket.future.cancelled():
                ticket.future.exception()  # looked at, so that it is not reported as forgotten

    def _expire(self, ticket: Ticket, seconds: float) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(Late(seconds))
            self._forgo(ticket)

    def _forgo(self, ticket: Ticket) -> None:
        """Its work will not be done, unless it has been begun."""
        with self.changed:
            if not ticket.taken:
                ticket.taken = True
                self.work -= ticket.ask.work

    def _run(self) -> None:
        """The inference thread."""
        try:
            while (batch := self._take()) is not None:
                if batch:
                    self._serve(batch)
                    with self.changed:
                        self.work -= sum(ticket.ask.work for ticket in batch)
        except BaseException:
            log.critical("the inference loop has died", exc_info=True)
        finally:
            self.dead = True
            self._tell(self._drop_all)

    def _take(self) -> list[Ticket] | None:
        """What is queued, up to a batch's work, without those that nobody waits for; None at the end."""
        with self.changed:
            while not self.queue:
                if self.closing:
                    return None
                self.changed.wait()
            batch: list[Ticket] = []
            work = 0
            while self.queue and (not batch or work + self.queue[0].ask.work <= self.max_work):
                ticket = self.queue.popleft()
                if not ticket.taken:  # else nobody waits for it any more
                    ticket.taken = True
                    batch.append(ticket)
                    work += ticket.ask.work
            self.running = batch
            return batch

    def _serve(self, batch: list[Ticket]) -> None:
        with self.device:
            self.since = started = time.monotonic()
            batch = [ticket for ticket in batch if not ticket.future.done()]  # the device may have been long in coming
            if not batch:
                self.since = None
                return
            cpu = time.thread_time()
            try:
                answers = self.answer([ticket.ask for ticket in batch])
            except Broken:
                raise
            except Exception as error:
                answers = [error] * len(batch)
            cpu = time.thread_time() - cpu
        ended = time.monotonic()
        for ticket in batch:
            ticket.ended = ended
        self.pace.add(sum(ticket.ask.work for ticket in batch), ended - started)
        self.running, self.since = [], None
        self.on_batch(sum(ticket.ask.rows for ticket in batch), cpu)
        self._tell(lambda: _deliver(batch, answers))

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _drop_all(self) -> None:
        with self.changed:
            left = [*self.running, *self.queue]
            self.queue.clear()
            self.work = 0
        for ticket in left:
            if not ticket.future.done():
                ticket.future.set_exception(Gone())

    async def close(self) -> None:
        """No new requests; those that were accepted are answered first."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        while self.thread.is_alive():
            await asyncio.sleep(0.005)


def _deliver(batch: list[Ticket], answers: list[Answer]) -> None:
    for ticket, found in zip(batch, answers, strict=True):
        if ticket.future.done():
            continue
        if isinstance(found, Exception):
            ticket.future.set_exception(found)
        else:
            ticket.future.set_result(found)
