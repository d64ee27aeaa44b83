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
from dubito.service.problems import Gone, Late, Overloaded

log = logging.getLogger("dubito")
LONGEST_WAIT = 60.0  # seconds that a refused client is told to stay away


@dataclass(eq=False)
class Ticket:
    """A request, or a part of one, on its way."""

    ask: Ask
    future: "asyncio.Future[Answered]"
    timer: asyncio.TimerHandle  # of the deadline
    queued: float = field(default_factory=time.monotonic)
    ended: float = 0.0


class Batcher:
    """One thread that answers, fed by coroutines of one event loop."""

    def __init__(
        self,
        answer: Callable[[Sequence[Ask]], list[Answer]],
        *,
        max_work: int,
        max_queue: int,
        device: threading.Lock,
        on_batch: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """`device` is held while answering: models that share a device take turns."""
        self.answer, self.max_work, self.max_queue, self.on_batch = answer, max_work, max_queue, on_batch
        self.device = device
        self.queue: deque[Ticket] = deque()
        self.work = 0  # rows times samples in the queue
        self.running: list[Ticket] = []
        self.since: float | None = None  # when the running batch began
        self.rate = 0.0  # work per second, as seen lately
        self.closing = False
        self.changed = threading.Condition()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self.thread.start()

    def alive(self, stuck_seconds: float) -> bool:
        """Whether the thread is there and gets on."""
        since = self.since
        return self.thread.is_alive() and (since is None or time.monotonic() - since < stuck_seconds)

    @property
    def depth(self) -> int:
        return len(self.queue)

    def check_room(self, more: int, seconds: float) -> None:
        """Raises Overloaded where the queue is full or would not be through in time, or Gone. An empty queue takes
        anything."""
        if self.closing or not self.thread.is_alive():
            raise Gone
        wait = self.work / self.rate if self.rate else 0.0
        if self.queue and (self.work + more > self.max_queue or wait > seconds):
            raise Overloaded(self.work, self.max_queue, min(LONGEST_WAIT, max(0.1, wait)))

    def put(self, ask: Ask, seconds: float) -> list[Ticket]:
        """Accepted when this returns: answered, failed or late within `seconds`. Oversize requests go in parts."""
        self.check_room(ask.work, seconds)
        asks = [ask] if ask.work <= self.max_work or len(ask.x) == 1 else self._parts(ask)
        tickets = [self._ticket(part, seconds) for part in asks]
        with self.changed:
            self.queue.extend(tickets)
            self.work += ask.work
            self.changed.notify()
        return tickets

    def _parts(self, ask: Ask) -> list[Ask]:
        """Each fits a batch; one seed for all, so that all rows of the request see the same functions."""
        seed = randbits(SEED_BITS) if ask.seed is None else ask.seed
        rows = max(1, self.max_work * len(ask.x) // ask.work)
        return [replace(ask, x=x, seed=seed) for x in ask.x.split(rows)]

    def _ticket(self, ask: Ask, seconds: float) -> Ticket:
        future = self.loop.create_future()
        return Ticket(ask, future, self.loop.call_later(max(0.0, seconds), _expire, future, seconds))

    async def answered(self, tickets: Sequence[Ticket]) -> Answered:
        """The answer, or Late or whatever the model made of the request; whoever is cancelled takes it along."""
        try:
            return joined([await ticket.future for ticket in tickets])
        finally:
            self.drop(tickets)

    @staticmethod
    def drop(tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more: those that are queued never reach the device."""
        for ticket in tickets:
            ticket.timer.cancel()
            if not ticket.future.cancel() and not ticket.future.cancelled():
                ticket.future.exception()  # looked at, so that it is not reported as forgotten

    def _run(self) -> None:
        """The inference thread."""
        try:
            while (batch := self._take()) is not None:
                if batch:
                    self._serve(batch)
        except BaseException:
            log.critical("the inference loop has died", exc_info=True)
        finally:
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
                self.work -= ticket.ask.work
                if not ticket.future.done():
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
            try:
                answers = self.answer([ticket.ask for ticket in batch])
            except Broken:
                raise
            except Exception as error:
                answers = [error] * len(batch)
        ended = time.monotonic()
        for ticket in batch:
            ticket.ended = ended
        rate = sum(ticket.ask.work for ticket in batch) / max(1e-6, ended - started)
        self.rate = 0.8 * self.rate + 0.2 * rate if self.rate else rate
        self.running, self.since = [], None
        self.on_batch(sum(len(ticket.ask.x) for ticket in batch))
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
        ticket.timer.cancel()
        if ticket.future.done():
            continue
        if isinstance(found, Exception):
            ticket.future.set_exception(found)
        else:
            ticket.future.set_result(found)


def _expire(future: "asyncio.Future[Answered]", seconds: float) -> None:
    if not future.done():
        future.set_exception(Late(seconds))
