"""Files that are whole or not there, whatever ends the process or the machine."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from dubito.models.errors import InputError


def check_not_read(out: Path, *read: str | Path | None) -> None:
    """Refuse an output in place of a file that is read, which would be lost; `kind:PATH` names a file, too."""
    for name in [str(one) for one in read if one]:
        for path in (name, name.partition(":")[2]):
            with suppress(OSError, ValueError):
                if path and os.path.samefile(path, out):
                    raise InputError(f"{out} would be written, but it is {name}, which is read; expected another file.")


_held: set[Path] = set()  # locks of this process


@contextmanager
def alone(lock: Path) -> Iterator[bool]:
    """Whether no other process is here; a killed one leaves no lock behind, and a disk without locks has none."""
    lock = lock.absolute()
    if lock in _held:
        yield True
        return
    if (file := _locked(lock)) is None:
        yield False
        return
    _held.add(lock)
    try:
        yield True
    finally:
        _held.remove(lock)
        lock.unlink(missing_ok=True)
        file.close()


def _locked(lock: Path) -> IO[str] | None:
    """The file, open and locked; None where another process has locked it."""
    while True:
        file = lock.open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
                    return file
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return file
            file.close()
            return None
        file.close()  # who had it before has just removed it


def draft_of(path: Path) -> Path:
    """A name beside the path that nobody else takes: several containers that share a folder all have process 1."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")


def replace_by_draft(path: Path, content: bytes) -> None:
    """Write a file that may be lost, as of a cache: others see all of it or what was there before."""
    draft = draft_of(path)
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_by(part: Path, path: Path, content: bytes, *, mode: Literal["xb", "wb"]) -> None:
    """Into `part` first, then moved to its place: a full disk or a crash never leaves half a file under the name."""
    try:
        with part.open(mode) as file:
            file.write(content)
        put_in_place(part, path)
    finally:
        with suppress(OSError, ValueError):
            part.unlink(missing_ok=True)


def put_in_place(part: Path, path: Path) -> None:
    """Move a written file to its name in the same folder or disk, once it is on the disk; then the name is, too."""
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
