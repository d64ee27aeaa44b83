"""Servers in processes of their own, and the processor time that they have taken."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection, create_server

import httpx
import psutil

STAGE = re.compile(r'dubito_stage_seconds_sum{.*stage="(\w+)"}')
LIMIT = 120.0  # seconds to start on a busy machine


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    log: Path

    def cpu(self) -> float:
        """Seconds of user and system time, its children's included."""
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def metrics(self) -> dict[str, float]:
        """Metrics of the server, for one model: series by name, those of stages by the stage."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        series = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        values = {name.partition("{")[0]: float(value) for name, _, value in series}
        return values | {stage[1]: float(value) for name, _, value in series if (stage := STAGE.match(name))}


@contextmanager
def running(
    command: Sequence[str], log: Path, health: str | None, python: str = sys.executable, **environment: str
) -> Iterator[Server]:
    """`python -m COMMAND --port N` until it answers 200 at `health`, or takes connections where that is None; what it
    prints goes to the log."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    clean["OMP_NUM_THREADS"] = "1"  # on two cores, threads that wait for each other are all one would see
    words = [python, "-m", *command, "--port", str(port)]
    with log.open("w") as file, subprocess.Popen(words, stdout=file, stderr=file, env=clean | environment) as process:
        server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), log)
        try:
            _wait(server, process, health)
            yield server
        finally:
            children = server.process.children(recursive=True) if process.poll() is None else []
            process.terminate()
            _, alive = psutil.wait_procs([server.process, *children], timeout=10)
            for one in alive:
                one.kill()


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _wait(server: Server, process: "subprocess.Popen[bytes]", health: str | None) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None:
        try:
            if health is None:
                create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 5).close()
                return
            if httpx.get(server.url + health, timeout=5).status_code == 200:
                return
        except (httpx.HTTPError, OSError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"a server did not start; it said: {server.log.read_text()[-2000:]}")
