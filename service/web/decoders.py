"""Processes that decode bodies for the server. One that takes too long, or works for a client that has gone, is ended.

Each process has a thread of the server, which sends it one body at a time. The first process takes only light bodies,
so that a small picture never waits behind a large one; the others take what comes, and start when first needed.
"""

import asyncio
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.models.errors import DubitoError
from dubito.service.fair import FairQueue
from dubito.service.problems import FAILED, Gone, Late, Problem
from dubito.service.settings import Settings
from dubito.service.web.decode import NICE, receive, send
from dubito.service.web.http import ClientGone, DisconnectWatch

log = logging.getLogger("dubito")
START = 60.0  # longest time for a process to start, in seconds
GRACE = 0.25  # seconds that a process may go on for a client that has gone: to start another one takes longer
LIGHT_SECONDS = 1.0  # longest time for a light body; it is then tried once more as a heavy one
PATIENCE = 0.05  # seconds after which it is watched whether the client goes
OUTCOMES = ("ok", "refused", "late", "gone", "died")

Take = Callable[[NDArray[Any], bool], None]  # an array, and whether it is the pixels of a picture


@dataclass(eq=False)
class DecodeJob:
    """A body to be decoded."""

    task: dict[str, Any]
    body: bytes | memoryview
    client: str
    deadline: float  # by time.monotonic()
    take: Take  # is given each decoded array, in the thread of the process
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[bytes]"
    begun: float = math.inf
    unwanted: bool = False

    def end(self, outcome: bytes | BaseException) -> None:
        def deliver() -> None:
            if self.future.done():
                return
            if isinstance(outcome, bytes):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(deliver)


class Decoders:
    """The processes, and the bodies that wait for one; clients take turns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.light: FairQueue[DecodeJob] = FairQueue()
        self.heavy: FairQueue[DecodeJob] = FairQueue()
        self.changed = threading.Condition()
        self.closed = False
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)  # bodies by what became of them
        few = settings.decode_processes
        self.decoders = [Decoder(self, light=n == 0 and few > 1) for n in range(few)]

    def start(self) -> None:
        for decoder in self.decoders:
            decoder.start()

    async def run(
        self,
        task: Mapping[str, Any],
        body: bytes | memoryview,
        take: Take,
        *,
        light: bool,
        client: str,
        seconds: float,
        watch: DisconnectWatch,
    ) -> bytes:
        """Decode a body within `seconds`; returns what JSON has beside its inputs."""
        if self.closed:
            raise Gone
        loop = asyncio.get_running_loop()
        job = DecodeJob({**task}, body, client, time.monotonic() + seconds, take, loop, loop.create_future())
        self._add(job, light)
        watcher = loop.call_later(PATIENCE, watch.start)
        watch.leave = partial(_cancel, job.future)
        try:
            async with asyncio.timeout(seconds):
                return await job.future
        except TimeoutError:
            self.counts["late"] += 1
            raise Late(seconds) from None
        except asyncio.CancelledError:
            self.counts["gone"] += watch.gone
            if watch.gone:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()
            watch.stop()
            if not job.future.done() or job.future.cancelled():
                job.unwanted = True
                wait = max(0.0, job.begun + GRACE - time.monotonic()) if job.begun < math.inf else 0.0
                loop.call_later(wait, self._stop, job)
            # an error refers to this frame: what refers to the error would keep the body until a garbage collection
            job.take, watch.leave = lambda array, picture: None, lambda: None
            job.body = body = b""
            del job

    def _add(self, job: DecodeJob, light: bool) -> None:
        job.task["limits"] = {**job.task["limits"], "light": light and len(self.decoders) > 1}
        (self.light if light else self.heavy).append(job.client, job)
        with self.changed:
            self.changed.notify_all()

    def _stop(self, job: DecodeJob) -> None:
        for decoder in self.decoders:
            decoder.stop(job)

    def next(self, light: bool) -> DecodeJob | None:
        """The next body for a process, once there is one; None once the server stops."""
        with self.changed:
            while not self.closed:
                job = self.light.pop() if light else self.heavy.pop() or self.light.pop()
                if job is not None:
                    return job
                self.changed.wait()
        return None

    @property
    def depth(self) -> int:
        return len(self.light) + len(self.heavy)

    def close(self) -> None:
        """End the processes; who waits for one is told to ask again."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for job in (*self.light, *self.heavy):
            job.end(Gone())
        for decoder in self.decoders:
            decoder.kill()
        for decoder in self.decoders:
            if (process := decoder.process) is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)


def give_way() -> None:
    """Lower the priority of this thread, which resizes pictures, and of the process that it starts, whose start alone
    takes half a second of processor time. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual + NICE)


def _cancel(future: "asyncio.Future[bytes]") -> None:
    future.cancel()


class Decoder(threading.Thread):
    """A process and the thread that feeds it."""

    def __init__(self, pool: Decoders, light: bool) -> None:
        super().__init__(name="decoder", daemon=True)
        self.pool, self.light = pool, light
        self.process: subprocess.Popen[bytes] | None = None
        self.peer: socket.socket | None = None
        self.current: DecodeJob | None = None
        self.lock = threading.Lock()  # of `current` and `process`: only the process of the current job may be ended

    def run(self) -> None:
        give_way()
        if self.light:
            with suppress(OSError, EOFError):
                self._connected(time.monotonic() + START)
        while (job := self.pool.next(self.light)) is not None:
            if job.unwanted:
                continue
            with self.lock:
                self.current, job.begun = job, time.monotonic()
            outcome = self._outcome(job)
            with self.lock:
                self.current = None
            if outcome is None:
                self.pool._add(job, light=False)
            else:
                job.end(outcome)
            del job, outcome
        self._discard()

    def stop(self, job: DecodeJob) -> None:
        """End the process if it works on this job."""
        with self.lock:
            if self.current is job and self.process is not None:
                self.process.kill()

    def kill(self) -> None:
        with self.lock:
            if self.process is not None:
                self.process.kill()

    def _outcome(self, job: DecodeJob) -> bytes | BaseException | None:
        """What the process says; None where the body is heavier than it seemed."""
        most = LIGHT_SECONDS if self.light else self.pool.settings.decode_seconds
        try:
            peer = self._connected(time.monotonic() + START)
            end = min(job.deadline, time.monotonic() + most)
            return self._exchange(peer, job, end)
        except TimeoutError:
            self._discard()
            if time.monotonic() >= job.deadline:
                return Late(most)  # the request has been answered so already
            if self.light:
                return None
            self.pool.counts["late"] += 1
            said = f"the body takes more than {most:g} s to decode; send smaller pictures, or fewer at a time."
            return Problem(413, said, reason="picture")
        except (EOFError, OSError) as error:
            self._discard()
            if job.unwanted or self.pool.closed:
                return Gone()
            self.pool.counts["died"] += 1
            log.error("a decoding process has ended", extra={"error": f"{type(error).__name__}: {error}"[:200]})
            return Problem(413, "the body cannot be decoded with the memory that there is for it.", reason="picture")
        except Exception as error:
            self._discard()
            return error

    def _exchange(self, peer: socket.socket, job: DecodeJob, end: float) -> bytes | BaseException | None:
        failed: BaseException | None = None
        peer.settimeout(max(0.001, end - time.monotonic()))
        send(peer, job.task, job.body)
        while True:
            peer.settimeout(max(0.001, end - time.monotonic()))
            fields, content = receive(peer)
            for line in fields.get("logged", ()):
                log.warning(line)
            if "dtype" in fields:
                if failed is None and not job.unwanted:
                    try:
                        array = np.frombuffer(content, fields["dtype"]).reshape(fields["shape"])
                        job.take(array, fields["picture"])
                    except DubitoError as error:  # about the request; the process goes on to the end of it
                        failed = error
                continue
            if "heavier" in fields:
                return None
            if "fault" in fields:
                log.error("a body was not decoded", extra={"error": fields["fault"]})
                return Problem(500, FAILED)
            if failed is None and "status" in fields:
                failed = Problem(fields["status"], fields["detail"], reason=fields["reason"])
            self.pool.counts["ok" if failed is None else "refused"] += 1
            return bytes(content) if failed is None else failed

    def _connected(self, end: float) -> socket.socket:
        """The socket of the process, which is started if there is none."""
        if self.peer is not None and self.process is not None and self.process.poll() is None:
            return self.peer
        self._discard()
        mine, its = socket.socketpair()
        for one in (mine, its):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        words = [sys.executable, "-P", "-m", "dubito.service.web.decode", str(self.pool.settings.decode_bytes)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with its, self.lock:
            self.peer = mine
            if self.pool.closed:
                raise EOFError
            self.process = subprocess.Popen(
                words, stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        mine.settimeout(max(0.001, end - time.monotonic()))
        receive(mine)  # it is ready
        return mine

    def _discard(self) -> None:
        with self.lock:
            process, self.process = self.process, None
            peer, self.peer = self.peer, None
        if peer is not None:
            peer.close()
        if process is not None:
            process.kill()
            process.wait()
