"""`dubito` and `python` for a shell, each a process forked from one that has imported torch, which takes seconds.

Each script hands its arguments, folder, environment and output to that process, passes signals on, and ends with the
exit code of the process that was forked for it.
"""

import json
import multiprocessing
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dubito.training.evaluation import evaluate
from tests import forked
from tests.few import few

forks = multiprocessing.get_context("fork")
PYTHON = """
import runpy, sys
sys.argv = sys.argv[1:]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
CODE = {"dubito": forked.DUBITO, "python": PYTHON}
SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
said = json.dumps([{name!r}, sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(line, [len(said).to_bytes(8, "big")], [1, 2])
line.sendall(said)
pid = int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big"))
"""


@contextmanager
def scripts(folder: Path) -> Iterator[None]:
    """Both scripts in a folder, where they work until the end. They calibrate and evaluate in short."""
    folder.mkdir(parents=True)
    with TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:  # an address has 107 bytes at most
        address = f"{short}/socket"
        for name in CODE:
            script = folder / name
            script.write_text(SCRIPT.format(python=sys.executable, address=address, name=name))
            script.chmod(0o755)
        server.bind(address)
        server.listen()
        process = forked.forks.Process(target=_serve, args=(server,))
        process.start()
        try:
            yield
        finally:
            process.kill()
            process.join()


def _serve(server: socket.socket) -> None:
    patch = pytest.MonkeyPatch()
    few(patch)
    patch.setattr(evaluate, "SHIFTED", 20)
    while True:
        line, _ = server.accept()
        with line:
            forks.Process(target=_answer, args=(line,)).start()


def _answer(line: socket.socket) -> None:
    length, streams, _, _ = socket.recv_fds(line, 8, 2)
    with line.makefile("rb") as file:
        name, words, environment, folder = json.loads(file.read(int.from_bytes(length, "big")))
    out, error = (Connection(stream, readable=False) for stream in streams)
    process = forks.Process(target=forked.run_here, args=(CODE[name], words, environment, folder, out, error))
    process.start()
    assert process.pid is not None
    line.sendall(process.pid.to_bytes(8, "big"))
    out.close()
    error.close()
    process.join()
    assert process.exitcode is not None
    line.sendall((process.exitcode % 256).to_bytes(8, "big"))
