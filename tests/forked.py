"""The command `dubito` in a process of its own, forked from one that has imported torch: the import takes seconds.

From there on it is a process like any other, with its own arguments, environment, folder, output, signals and exit
code. The tests of the README, of `make serve` and of `tests/test_cli.py` start the command as a user does.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

LIMIT = 90.0  # seconds that a command takes at most on a busy machine
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["dubito.cli", "dubito.service.run", __name__])


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def clean() -> dict[str, str]:
    """Our environment without dubito's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}


def start(
    *arguments: str | Path, stdout: IO[str], stderr: IO[str], folder: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """`dubito ARGUMENTS`; a PYTHONPATH of the environment is heeded, what torch reads while it is imported is not."""
    streams = [Connection(os.dup(stream.fileno()), readable=False) for stream in (stdout, stderr)]
    words = [str(word) for word in arguments]
    process = forks.Process(target=_run, args=(words, clean() | dict(environment or {}), folder, *streams))
    process.start()
    for stream in streams:
        stream.close()
    return process


def run(*arguments: str | Path) -> Ended:
    with TemporaryDirectory() as folder:
        out, error = Path(folder) / "out", Path(folder) / "error"
        with out.open("w") as stdout, error.open("w") as stderr:
            process = start(*arguments, stdout=stdout, stderr=stderr, folder=Path(folder))
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        assert code is not None
        return Ended(code, out.read_text(), error.read_text())


def _run(words: list[str], environment: dict[str, str], folder: Path, stdout: Connection, stderr: Connection) -> None:
    from dubito.cli import main

    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["dubito", *words]
    main()
