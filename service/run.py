"""`dubito serve`: binds the port, loads the models, prints the address of the console, and shuts down gracefully."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from dubito.models.errors import DubitoError
from dubito.models.extras import need
from dubito.service.logs import flush_lines, start_logging
from dubito.service.settings import Settings
from dubito.service.web.app import Server, application
from dubito.service.web.state import State
from dubito.service.web.wire import Wire

if TYPE_CHECKING:
    from dubito.service.grpc.server import GrpcServer

KEEP_ALIVE = 65  # seconds that an idle connection stays open: longer than the usual minute of proxies
SWITCH = 0.0003  # switch interval of the interpreter: the thread that feeds the GPU waits less than with the usual 5 ms
log = logging.getLogger("dubito")


class Front(uvicorn.Server):
    """uvicorn without its signal handlers; ours first make the server not ready."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until a signal; returns the exit code, 0 if every accepted request was answered."""
    if settings.grpc_port is not None:
        need("grpc", "grpc", "grpc_health", "grpc_reflection")
    start_logging(settings.log_level)
    state = State(settings)
    server = Server(state)
    config = uvicorn.Config(
        application(server),
        http=Wire,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=settings.rate_per_second is not None,  # only the rate limit needs a client's address
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.drain_seconds) + 1,
    )
    with _listen(settings) as listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(server, Front(config), listener, say))


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise DubitoError(
            f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}; "
            "take another --port (0 finds a free one) or --host."
        ) from None
    return listener


async def _serve(server: Server, front: Front, listener: socket.socket, say: Callable[[str], None]) -> int:
    state, stop = server.state, asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop_or_exit, stop)
    rpc, rpc_port = await _start_grpc(server)
    serving = asyncio.create_task(front.serve([listener]))
    starting = asyncio.create_task(state.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # an error of a model ends the server before it is ready
            if state.repository is not None and state.repository.device.type == "cuda":
                sys.setswitchinterval(SWITCH)
            gc.collect()
            gc.freeze()  # later collections skip the objects that exist now
            say(_greeting(state, listener, rpc_port))
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining")
        state.draining = True  # not ready, but requests are still answered
        await asyncio.sleep(state.settings.linger_seconds)
    finally:
        state.draining = front.should_exit = True
        stopping.cancel()
        starting.cancel()
        cut_off = 0 if rpc is None else await rpc.stop(state.settings.drain_seconds)
        await asyncio.wait({serving, starting})
        gc.unfreeze()
    try:
        await state.stop()
    except TimeoutError:
        log.error("accepted requests were not answered in time")
        return 1
    if cut_off:
        log.error("accepted calls were cut off", extra={"calls": cut_off})
        return 1
    log.info("stopped")
    return 0


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
        flush_lines()
        os._exit(1)
    stop.set()


def _greeting(state: State, listener: socket.socket, rpc_port: int) -> str:
    assert state.repository is not None
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(f"{one.name} (version {one.version})" for one in state.repository.served.values())
    where = f"http://{shown}:{port}"
    lines = [f"dubito serves {names} on {state.repository.device}."]
    lines += [
        f"not served: {row['name']} (version {row['version'] or 'none'}): {row['reason']}"
        for row in state.repository.index()
        if row["state"] != "READY" and row["reason"]
    ]
    rpc = f"   gRPC {shown}:{rpc_port}" if rpc_port else ""
    return "\n".join([*lines, f"console {where}/   API {where}/docs   metrics {where}/metrics{rpc}"])
