"""`dubito serve`: binds the port, loads the models, prints the address of the console, and shuts down gracefully."""

import asyncio
import ctypes
import gc
import logging
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from dubito.models.errors import DubitoError
from dubito.models.extras import need
from dubito.service.logs import start_logging, writer
from dubito.service.settings import Settings
from dubito.service.siblings import Siblings
from dubito.service.web.acceptor import ACCEPTS, Acceptor
from dubito.service.web.app import Server, application
from dubito.service.web.connection import protocol
from dubito.service.web.limits import ConnectionLimits
from dubito.service.web.state import State

if TYPE_CHECKING:
    from dubito.service.grpc.server import GrpcServer

SWITCH = 0.0003  # switch interval of the interpreter: the thread that feeds the GPU waits less than with the usual 5 ms
BACKLOG = 2048  # connections that the system accepts before the server does
UNSENT = 1 << 17  # bytes that the system takes for a client that does not read; without a limit, megabytes
WATCHED = 1.0  # seconds between two looks of a worker at itself
SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
log = logging.getLogger("dubito")


@dataclass(frozen=True)
class Membership:
    """What a process knows that is one of several workers of a server."""

    folder: Path  # in which they find each other
    index: int
    count: int
    listener: socket.socket  # the same for all
    at_once: bool  # connections are accepted while models are loaded; else others have them meanwhile


class Front(uvicorn.Server):
    """uvicorn without its signal handlers, since ours first make the server not ready, and with our own acceptor."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, member: Membership | None = None) -> None:
        super().__init__(config)
        self.limits = limits
        self.acceptors: list[Acceptor] = []
        self.at_a_time = ACCEPTS if member is None else 1  # so that connections spread over the workers
        self.gate = asyncio.Event()  # connections are accepted once it is set

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        await self.gate.wait()
        for listener in sockets or ():
            made = Acceptor(listener, self.config.backlog, self.limits, self._protocol, self.at_a_time)
            self.acceptors.append(made)

    def _protocol(self, first: bytes, ticket: int) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(self.config, self.server_state, self.lifespan.state, first=first, ticket=ticket)
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self.acceptors:
            await acceptor.close()
        await super().shutdown(sockets=[])


def serve(settings: Settings, say: Callable[[str], None], member: Membership | None = None) -> int:
    """Serve until a signal; returns the exit code, 0 if every accepted request was answered."""
    if settings.grpc_port is not None:
        need("grpc", "grpc", "grpc_health", "grpc_reflection")
    start_logging(settings.log_level, settings.log_bytes)
    try:
        siblings = None if member is None else Siblings(member.folder, member.index, member.count)
        state = State(settings, siblings)
        server = Server(state)
        config = uvicorn.Config(
            application(server),
            http=protocol(state.limits),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
        )
        with (
            listen(settings) if member is None else member.listener as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_serve(server, Front(config, state.limits, member), listener, say, member))
    finally:
        writer.flush()


def listen(settings: Settings, port: int | None = None, *, shared: bool = False) -> socket.socket:
    """A socket bound to the port, by default the server's; `shared`: others of this user may bind it too."""
    option, port = ("--port", settings.port) if port is None else ("--grpc-port", port)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with suppress(AttributeError, OSError):  # a system that does not know it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # also of its connections
    try:
        listener.bind((settings.host, port))
    except OSError as error:
        listener.close()
        raise DubitoError(
            f"cannot listen on {settings.host}, port {port}: {error.strerror or error}; "
            f"take another {option} (0 finds a free one) or --host."
        ) from None
    return listener


async def _serve(
    server: Server,
    front: Front,
    listener: socket.socket,
    say: Callable[[str], None],
    member: Membership | None = None,
) -> int:
    state, stop = server.state, asyncio.Event()
    if member is None or member.at_once:
        front.gate.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop_or_exit, stop)
    watching = None if member is None else asyncio.create_task(_watch(state, stop))
    rpc, rpc_port = await _start_grpc(server)
    serving = asyncio.create_task(front.serve([listener]))
    starting = asyncio.create_task(state.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # an error of a model ends the server before it is ready
            if state.repository is not None and state.repository.devices[0].device.type == "cuda":
                sys.setswitchinterval(SWITCH)
            gc.collect()
            gc.freeze()  # later collections skip the objects that exist now
            front.gate.set()
            say(_greeting(state, listener, rpc_port))
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining")
        state.draining = True  # not ready, but requests are still answered
        await asyncio.sleep(state.settings.linger_seconds)
        await _accept_the_rest(listener)
    finally:
        state.draining = front.should_exit = True
        front.gate.set()
        if watching is not None:
            watching.cancel()
        end = time.monotonic() + state.settings.drain_seconds
        stopping.cancel()
        starting.cancel()
        if rpc is not None:
            await rpc.stop(state.settings.drain_seconds)  # HTTP drains meanwhile
        await asyncio.wait({serving, starting})
        gc.unfreeze()
    try:
        await state.stop(max(1.0, end - time.monotonic()))
    except TimeoutError:
        log.error("accepted requests were not answered in time")
        return 1
    if state.limits.cancelled:
        log.error("accepted requests were not answered in time", extra={"requests": state.limits.cancelled})
        return 1
    log.info("stopped")
    return 0


async def _watch(state: State, stop: asyncio.Event) -> None:
    """Of a worker: stop when its parent is gone, and end when an engine is stuck or dead, to be started again."""
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: None if os.read(sys.stdin.fileno(), 1) else _gone(loop, stop))
    while True:
        await asyncio.sleep(WATCHED)
        if not state.live:
            log.critical("an engine is stuck or dead: the worker ends")
            writer.flush()
            os._exit(1)


def _gone(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.remove_reader(sys.stdin)
    stop.set()


async def _accept_the_rest(listener: socket.socket) -> None:
    """Let in no more connections, and wait until those that the system has accepted are the server's: the others would
    be reset when the port closes."""
    with suppress(OSError):  # not Linux: a connection that comes in the last moment may be reset
        drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, drop the packet
        program = struct.pack("HP", 1, ctypes.addressof(drop))
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    until = asyncio.get_running_loop().time() + 1
    while select.select([listener], [], [], 0)[0] and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.005)


async def _start_grpc(server: Server) -> "tuple[GrpcServer | None, int]":
    """The gRPC server and its port, where the settings ask for one."""
    if server.state.settings.grpc_port is None:
        return None, 0
    from dubito.service.grpc.server import GrpcServer

    rpc = GrpcServer(server)
    return rpc, await rpc.start()


def _stop_or_exit(stop: asyncio.Event) -> None:
    """The first signal drains; the second one exits at once."""
    if stop.is_set():
        writer.flush()
        os._exit(1)
    stop.set()


def _greeting(state: State, listener: socket.socket, rpc_port: int) -> str:
    assert state.repository is not None
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(f"{one.name} (version {one.version})" for one in state.repository.served.values())
    where = f"http://{shown}:{port}"
    lines = [f"dubito serves {names} on {', '.join(one.name for one in state.repository.devices)}."]
    lines += [
        f"not served: {row['name']} (version {row['version'] or 'none'}): {row['reason']}"
        for row in state.repository.index()
        if row["state"] != "READY" and row["reason"]
    ]
    rpc = f"   gRPC {shown}:{rpc_port}" if rpc_port else ""
    return "\n".join([*lines, f"console {where}/   API {where}/docs   metrics {where}/metrics{rpc}"])
