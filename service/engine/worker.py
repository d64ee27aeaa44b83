"""A worker: the thread that computes batches of a queue with one engine, and hands their answers to the event loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from dubito.service.engine.engine import Answer, Broken, Engine, PredictRequest, PredictResult
from dubito.service.engine.turn import Turn
from dubito.service.problems import Gone

log = logging.getLogger("dubito")
T = TypeVar("T")


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
        self.work, self.seconds = 0, 0.0  # of its passes; 0 where they say nothing of the pace

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


class Queue(Protocol):
    """What a worker asks of the queue that it works off."""

    short: int
    max_work: int
    closing: bool
    trace: Callable[[Batch, float], None] | None

    @property
    def depth(self) -> int:
        """Tickets that are queued."""

    def take(self, worker: "Worker") -> list[Ticket]:
        """The next batch."""

    def take_short(self, worker: "Worker") -> list[Ticket]:
        """The next batch of short requests."""

    def contended(self, device: Turn) -> bool:
        """Clients or models share the device."""

    def wake_one(self) -> None:
        """Wake a worker that sleeps, if there is one."""

    def deliver(self, batch: Batch, answers: Sequence[Answer]) -> None:
        """Called from the thread: hand the answers to those who wait."""

    def died(self, worker: "Worker") -> None:
        """Called from the thread: it ends."""


class Worker:
    """One inference thread with its engine. `device` is held during passes: models that share a device take turns."""

    def __init__(self, queue: Queue, engine: Engine, device: Turn) -> None:
        self.queue, self.engine, self.device = queue, engine, device
        self.long_next = False  # it is the turn of a long request
        self.outer: Batch | None = None  # long batch between whose passes others are answered
        self.running: list[Ticket] = []  # taken and not yet delivered
        self.since: float | None = None  # time at which the running batch began, or last made progress
        self.dead = False
        self.asleep = False  # it waits for the bell
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="inference", daemon=True)

    def alive(self, stuck_seconds: float) -> bool:
        """Whether the thread runs, and its batch is not stuck."""
        return not self.dead and not self.stuck(stuck_seconds)

    def stuck(self, seconds: float) -> bool:
        """Whether its batch has taken so long."""
        since = self.since
        return not self.dead and since is not None and time.monotonic() - since >= seconds

    def wake(self) -> None:
        """From any thread; a bell too many does no harm."""
        if self.asleep:
            self.asleep = False
            self.bell.put(None)

    def _run(self) -> None:
        """The inference thread."""
        last: Batch | None = None  # computed and not yet delivered: the device can start the next batch meanwhile
        try:
            device = self.engine.model.device
            if device.type == "cuda" and device.index is not None:  # else the GPU that the process uses already
                torch.cuda.set_device(device)
            while self._work_comes(last is None):
                if self.queue.depth:
                    last = self._serve(last)
                elif last is not None:
                    self._conclude(last)
                    last = None
        except BaseException:
            log.critical("the inference loop has died", exc_info=True)
        finally:
            self.dead = True
            self.queue.died(self)

    def _work_comes(self, patient: bool) -> bool:
        """Whether to go on; False once the queue is closed. If `patient`, wait until something is queued."""
        while patient and not self.queue.depth:
            if self.queue.closing:
                return False
            self.asleep = True  # set before the queue is checked again: from now on `put` rings the bell
            if not self.queue.depth and not self.queue.closing:
                self.bell.get()
            self.asleep = False
        return True

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
            self.queue.wake_one()  # its device may be free
            self.device.acquire()
        held = True
        try:
            while held and self.queue.depth:
                if not (tickets := self.queue.take(self)):
                    continue
                batch = Batch(tickets)
                left = self._pass(batch, last)
                last = batch if left else None
                if self.queue.depth:
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
        short = self.queue.short
        finest = int(min(short, self.engine.finest)) if self.device.contended else short
        self.engine.pause = self._between if work > finest else None
        contended = self.queue.contended(self.device)
        self.engine.pass_work = finest if contended else self.queue.max_work
        if self.device.contended or any(ticket.long for ticket in batch.wanted):
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
            batch.work, batch.seconds = work, time.monotonic() - started - batch.others
        return launched is not None

    def _between(self) -> None:
        """Between two passes of a batch: other models use the device, and short requests are answered."""
        batch, began = self.outer, time.monotonic()
        assert batch is not None
        if all(ticket.future.done() for ticket in batch.wanted):
            raise Abandoned
        self.device.yield_()
        if batch.wanted[0].long and (tickets := self.queue.take_short(self)):
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
        if batch.wanted and self.queue.trace is not None:
            self.queue.trace(batch, ended)
        ended_now = set(batch.tickets)
        self.running = [ticket for ticket in self.running if ticket not in ended_now]
        self.since = None
        self.queue.deliver(batch, answers)
