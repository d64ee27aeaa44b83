"""Python, or the command `dubito`, in a process forked from one that has imported torch, which takes seconds.

From there on it is a process like any other, with its own arguments, environment, folder, output, signals and exit
code. The tests of `make serve` and of `tests/test_cli.py`, and the slow one of the README, start the command as a user
does.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.forking import Forked, Server

LIMIT = 600.0  # seconds, after which a command is hopeless even on a busy machine
DUBITO = "from dubito.cli import main; main()"
FEW = f"import pytest; from tests.few import few; few(pytest.MonkeyPatch()); {DUBITO}"  # it calibrates in short
INTERPRET = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
for name in [*sys.modules]:
    if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
        del sys.modules[name]
"""  # triton reads this setting as it is imported, and torch's compiler has imported it
ADDRESS = "TESTS_FORKED"  # of the server that all workers share
MODULE = "tests.preloaded"


@cache
def server() -> Server:
    """Of this process."""
    return Server(MODULE)


def address() -> str:
    return os.environ.get(ADDRESS) or server().address


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
) -> Forked:
    """`python -c CODE ARGUMENTS` in this environment less dubito's settings, changed as given.

    PYTHONPATH is heeded; what torch reads as it is imported, such as OMP_NUM_THREADS, is not.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    words = [str(word) for word in arguments]
    return Forked(address(), code, words, clean | dict(environment or {}), folder, stdout, stderr)


@dataclass(frozen=True)
class Begun:
    """A process whose output goes to files."""

    process: Forked
    stdout: Path
    stderr: Path

    @property
    def runs(self) -> bool:
        return self.process.is_alive()

    def send(self, number: int) -> None:
        self.process.send(number)

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
