"""Python, or the command `dubito`, in a process forked from one that has imported torch, which takes seconds.

From there on it is a process like any other, with its own arguments, environment, folder, output, signals and exit
code. The tests of `make serve` and of `tests/test_cli.py`, and the slow one of the README, start the command as a user
does.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

LIMIT = 600.0  # seconds, after which a command is hopeless even on a busy machine
DUBITO = "from dubito.cli import main; main()"
FEW = f"import pytest; from tests.few import few; few(pytest.MonkeyPatch()); {DUBITO}"  # it calibrates in short
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def start(
    code: str,
    arguments: Sequence[str | Path],
    *,
    stdout: IO[str],
    stderr: IO[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """`python -c CODE ARGUMENTS` in this environment less dubito's settings, changed as given.

    PYTHONPATH is heeded; what torch reads as it is imported, such as OMP_NUM_THREADS, is not.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    streams = [Connection(os.dup(stream.fileno()), readable=False) for stream in (stdout, stderr)]
    words = [str(word) for word in arguments]
    process = forks.Process(target=run_here, args=(code, words, clean | dict(environment or {}), folder, *streams))
    process.start()
    for stream in streams:
        stream.close()
    return process


@dataclass(frozen=True)
class Begun:
    """A process whose output goes to files."""

    process: BaseProcess
    stdout: Path
    stderr: Path

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None

    def send(self, number: int) -> None:
        if self.runs and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def end(self) -> Ended:
        """Once it has ended; one that does not is killed."""
        self.process.join(LIMIT)
        if self.runs:
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        ended = Ended(self.process.exitcode, self.stdout.read_text(), self.stderr.read_text())
        self.process.close()
        return ended


def interpret(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process that is not forked: triton reads this setting as it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def begin(
    code: str, arguments: Sequence[str | Path], folder: Path, logs: Path, environment: Mapping[str, str] | None = None
) -> Begun:
    """`python -c CODE ARGUMENTS` in a folder; its output goes to two files in `logs`."""
    out, error = logs / "stdout", logs / "stderr"
    with out.open("w") as stdout, error.open("w") as stderr:
        process = start(code, arguments, stdout=stdout, stderr=stderr, folder=folder, environment=environment)
    return Begun(process, out, error)


def run(*arguments: str | Path, code: str = DUBITO, environment: Mapping[str, str] | None = None) -> Ended:
    """`dubito ARGUMENTS`, to its end."""
    with TemporaryDirectory() as folder:
        return begin(code, arguments, Path(folder), Path(folder), environment).end()


def run_here(
    code: str, words: list[str], environment: dict[str, str], folder: str | Path, stdout: Connection, stderr: Connection
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    # a shell that runs the tests in the background has its children ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "SSL_CERT_FILE" in environment:  # aiohttp reads it as it is imported
        from aiohttp import connector

        connector._SSL_CONTEXT_VERIFIED = connector._make_ssl_context(True)
    sys.argv = ["dubito", *words]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
