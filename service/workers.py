"""`dubito serve --workers N`: processes that serve one port, each with its models, started and watched by this one."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dubito.models.cli import permit_network
from dubito.models.errors import DubitoError
from dubito.models.numerics.cores import available_cores, chosen
from dubito.service.logs import start_logging, writer
from dubito.service.run import Membership, listen, serve
from dubito.service.settings import Settings

WORK = "from dubito.service.workers import work; work()"
PAUSE, LONGEST = 1.0, 30.0  # seconds before a worker that ended is started again, at first and at most
SHARED = ("max_connections", "max_requests", "held_bytes", "unsent_bytes", "memory_bytes")  # each has its part of these
log = logging.getLogger("dubito")


@dataclass
class WorkerProcess:
    """A process of the server, and what it has said of itself."""

    index: int
    told: dict[str, Any]  # what it is started with
    listener: int  # number of the file
    environment: dict[str, str]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    greeting: str = ""

    async def run(self, stopping: asyncio.Event) -> int:
        """Run it until the server stops, again whenever it ends before; its exit code.

        One that never becomes ready is not started again: a DubitoError has its reason.
        """
        pause = PAUSE
        while True:
            started = await self._start()
            if stopping.is_set():  # while it was being started
                self.send(signal.SIGTERM)
            failed = await self._greeted()
            code = await started.wait()
            if stopping.is_set():
                return code
            if not self.ready.is_set():
                raise DubitoError(failed or f"a worker ended with exit code {code} before it was ready.")
            fields = {"worker": self.index, "exit code": code, "error": failed, "seconds": pause}
            log.error("a worker has ended, and is started again", extra=fields)
            try:
                await asyncio.wait_for(stopping.wait(), pause)
                return code
            except TimeoutError:
                pause = min(LONGEST, 2 * pause) if failed else PAUSE
            self.told["at_once"] = False  # the others answer meanwhile

    async def _start(self) -> asyncio.subprocess.Process:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WORK,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[self.listener],
            start_new_session=True,  # Ctrl-C is for the first process alone, which passes it on
            env=self.environment,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(self.told).encode() + b"\n")  # and stays open while this process lives
        return self.process

    async def _greeted(self) -> str:
        """Wait until it is ready; its error, if it ends before."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        said = json.loads(line) if line else {}
        if "greeting" in said:
            self.greeting = said["greeting"]
            self.ready.set()
        return str(said.get("error", ""))

    def send(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


def supervise(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve by several processes until a signal; returns the exit code, 0 if every accepted request was answered."""
    start_logging(settings.log_level, settings.log_bytes)
    try:
        with listen(settings) as listener, TemporaryDirectory(prefix="dubito-") as folder, reserve(settings) as rpc:
            if rpc is not None:
                settings = settings.model_copy(update={"grpc_port": rpc.getsockname()[1]})
            return asyncio.run(_supervise(settings, listener, Path(folder), say))
    finally:
        writer.flush()


def reserve(settings: Settings) -> "AbstractContextManager[socket.socket | None]":
    """A port for the gRPC servers of all workers, which share it."""
    if settings.grpc_port is None:
        return nullcontext()
    return listen(settings, settings.grpc_port, shared=True)


async def _supervise(settings: Settings, listener: socket.socket, folder: Path, say: Callable[[str], None]) -> int:
    count, stopping, loop = settings.workers, asyncio.Event(), asyncio.get_running_loop()
    given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS" or name not in chosen}
    environment = {"OMP_NUM_THREADS": str(max(1, available_cores() // count)), **given}
    own = shares(settings).model_dump(mode="json")
    workers = []
    for index in range(count):
        told = {"settings": own, "index": index, "listener": listener.fileno(), "folder": str(folder)}
        workers.append(WorkerProcess(index, {**told, "at_once": index == 0}, listener.fileno(), environment))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stopping, workers)
    running = [asyncio.create_task(worker.run(stopping)) for worker in workers]
    greeting = asyncio.create_task(_greet(workers, say))
    try:
        codes: list[int] = await asyncio.gather(*running)
    except BaseException:
        _stop(stopping, workers)
        await asyncio.wait(running)
        raise
    finally:
        greeting.cancel()
    log.info("stopped", extra={"workers": count})
    return max(abs(code) for code in codes)


async def _greet(workers: Sequence[WorkerProcess], say: Callable[[str], None]) -> None:
    for worker in workers:
        await worker.ready.wait()
    first, _, rest = workers[0].greeting.partition("\n")
    say(f"{first.removesuffix('.')}, with {len(workers)} workers.\n{rest}")


def _stop(stopping: asyncio.Event, workers: Sequence[WorkerProcess]) -> None:
    """A second signal ends them at once, as it does without workers."""
    stopping.set()
    for worker in workers:
        worker.send(signal.SIGTERM)


def shares(settings: Settings) -> Settings:
    """The settings of one worker: what is limited for the whole server is divided."""
    return settings.model_copy(update={name: -(-getattr(settings, name) // settings.workers) for name in SHARED})


def work() -> None:
    """A worker's process: it serves with what its parent tells it, until a signal or the parent's end."""
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a network's code prints is for the log
    told = json.loads(sys.stdin.readline())
    settings = Settings.model_validate(told["settings"])
    with socket.socket(fileno=told["listener"]) as listener:
        member = Membership(Path(told["folder"]), told["index"], settings.workers, listener, told["at_once"])
        try:
            for name in settings.networks:
                permit_network(name)
            code = serve(settings, lambda text: print(json.dumps({"greeting": text}), file=parent, flush=True), member)
        except DubitoError as error:
            print(json.dumps({"error": str(error)}), file=parent, flush=True)
            code = 2
    sys.exit(code)
