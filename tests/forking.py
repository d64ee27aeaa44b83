"""A process that has imported what takes seconds, of which others are forked: commands, and the workers of pytest.

Who wants one connects to a Unix socket, says what is to run, and hands over its input, output and errors. The answer is
the number of the process; its exit code follows once it has ended.
"""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

SERVE = "import sys; sys.path[:] = {path!r}; from tests.forking import serve; serve({address!r}, {module!r})"
PYTHON = """
import runpy, sys
sys.argv = [word for word in sys.argv[1:] if word not in ("-u", "-B")]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
said = json.dumps([{code!r}, sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(line, [len(said).to_bytes(8, "big")], [0, 1, 2])
line.sendall(said)
pid = int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big", signed=True) % 256)
"""
forks = multiprocessing.get_context("fork")


class Server:
    """The process that forks others. It ends with the process that began it."""

    def __init__(self, module: str) -> None:
        """It has imported the module, which takes seconds: who connects before that waits."""
        self.folder = TemporaryDirectory()  # an address has 107 bytes at most
        self.address = f"{self.folder.name}/socket"
        command = [sys.executable, "-c", SERVE.format(path=sys.path, address=self.address, module=module)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.read()  # until it listens
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._process.communicate()  # by the end of its input
        self.folder.cleanup()


def write_script(path: Path, address: str, code: str) -> None:
    """A script that runs Python code in a process forked for it, with the script's arguments."""
    path.write_text(SCRIPT.format(python=sys.executable, address=address, code=code))
    path.chmod(0o755)


def serve(address: str, module: str) -> None:
    owner = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    os.dup2(2, 1)  # the owner need not wait for the module
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_module(module)
    running: dict[int, tuple[BaseProcess, socket.socket]] = {}
    while True:
        for ready in wait([listener, owner, *running]):
            if ready is listener:
                line = listener.accept()[0]
                others = [other.fileno() for _, other in running.values()]
                process = _fork(line, [owner, listener.fileno(), *running, *others])
                assert process.pid is not None
                # elsewhere than on Linux: a pipe, which its own children hold open, too
                end = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else os.dup(process.sentinel)
                running[end] = process, line
            elif ready == owner:
                os._exit(0)  # to take apart all that was imported would take seconds
            else:
                assert isinstance(ready, int)
                process, line = running.pop(ready)
                os.close(ready)
                process.join()
                assert process.exitcode is not None
                with line:
                    line.send(process.exitcode.to_bytes(8, "big", signed=True), socket.MSG_NOSIGNAL)


def _fork(line: socket.socket, ours: Sequence[int]) -> BaseProcess:
    """Fork the process that is asked for, which has not the descriptors `ours`."""
    length, streams, _, _ = socket.recv_fds(line, 8, 3)
    with line.makefile("rb") as file:
        words = json.loads(file.read(int.from_bytes(length, "big")))
    process = forks.Process(target=_run, args=(streams, [*ours, line.fileno()], *words))
    process.start()
    assert process.pid is not None
    for stream in streams:
        os.close(stream)
    line.send(process.pid.to_bytes(8, "big"))
    return process


def _run(
    streams: list[int], ours: list[int], code: str, words: list[str], environment: dict[str, str], folder: str
) -> None:
    for to, stream in enumerate(streams):
        os.dup2(stream, to)
    for file in (*streams, *ours):
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # a shell that runs the tests in the background has its children ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    trusted = os.environ.get("SSL_CERT_FILE")
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if environment.get("SSL_CERT_FILE") != trusted:  # aiohttp reads it as it is imported
        from aiohttp import connector

        connector._SSL_CONTEXT_VERIFIED = connector._make_ssl_context(True)
    sys.argv = ["dubito", *words]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


class Forked:
    """A process that was forked for us: `multiprocessing`'s Process, as far as it is needed here."""

    def __init__(
        self,
        address: str,
        code: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stdout: IO[str],
        stderr: IO[str],
    ) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        said = json.dumps([code, list(words), dict(environment), str(folder)]).encode()
        with open(os.devnull) as stdin:
            streams = [stream.fileno() for stream in (stdin, stdout, stderr)]
            socket.send_fds(self._line, [len(said).to_bytes(8, "big")], streams)
        self._line.sendall(said)
        self.pid = int.from_bytes(self._line.recv(8, socket.MSG_WAITALL), "big")
        self._ended: int | None = None
        self._lock = threading.Lock()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; −9 where signal 9 has ended it."""
        self.join(0)
        return self._ended

    def join(self, timeout: float | None = None) -> None:
        if self._ended is None and wait([self._line], timeout):
            with self._lock:
                if self._ended is None:
                    self._ended = int.from_bytes(self._line.recv(8, socket.MSG_WAITALL), "big", signed=True)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def send(self, number: int) -> None:
        """A signal; of no effect on a process that has ended."""
        if self.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def close(self) -> None:
        self._line.close()
