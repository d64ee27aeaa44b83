"""Blocks of rows, and what every source of them has."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dubito.models.remote.cache import cache_folder

SAMPLED, BLOCK = 16, 1 << 16  # blocks of a file that its fingerprint covers, and their bytes
WRONG = "it holds NaN, infinity or a number too large for float32"


@dataclass(frozen=True)
class Block:
    """Consecutive rows as inputs of a model; those of bad rows are zeros."""

    x: NDArray[np.float32]  # (n, ...)
    bad: dict[int, str] = field(default_factory=dict)  # by offset in the block: what is wrong with the row

    def part(self, start: int, stop: int) -> "Block":
        """Some of its rows, by their offsets."""
        bad = {row - start: what for row, what in self.bad.items() if start <= row < stop}
        return Block(self.x[start:stop], bad)


class ScoredRows(Protocol):
    """Something to score: its number of rows, and blocks of them."""

    count: int

    def fingerprint(self) -> str:
        """A hash that changes with the contents, as they are now."""

    def read(self, start: int, stop: int) -> Block:
        """Rows from `start` up to `stop`. Fastest where calls go forwards."""

    def files(self, start: int, stop: int) -> list[str] | None:
        """The file of each row; None where one file holds them all."""


def fingerprint_of(path: Path) -> str:
    """A hash of a file's size, its time of change, and blocks spread over it: files may be too large to hash whole.

    A copy from an address is named after its hash, so that it has the same fingerprint when it is fetched again.
    """
    if path.parent == cache_folder() / "files":
        return path.stem
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for i in range(SAMPLED):
            file.seek(i * max(0, stat.st_size - BLOCK) // (SAMPLED - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def checked(x: NDArray[np.float32], bad: dict[int, str], names: Sequence[str] = ()) -> Block:
    """A block whose rows that are not finite are bad; `names` are those of a table's columns."""
    finite = np.isfinite(x)
    if not finite.all():
        flat = finite.reshape(len(x), -1)
        for i in np.flatnonzero(~flat.all(1)).tolist():
            first = int(flat[i].argmin())
            what = f"column {names[first]!r} is {x[i].reshape(-1)[first]}; expected a number" if names else WRONG
            bad.setdefault(i, what)
    if bad:
        x = np.array(x)
        x[list(bad)] = 0
    return Block(x, bad)
