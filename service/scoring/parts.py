"""The folder of a job that is under way: what it is made from, and the parts that are finished."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dubito.models.disk import draft_of, put_in_place
from dubito.models.errors import DubitoError

KEY = b"dubito"  # of the metadata of a Parquet file
DICTIONARIES = ["label", "file", "prediction_set.list.element", "ood.measure"]  # columns of few values


class ScoreError(DubitoError):
    """Predictions that cannot be written, or gone on with, as asked."""


@dataclass(frozen=True)
class ScoringJob:
    """What decides about every value that is written. It is recorded before the first part."""

    given: dict[str, Any]  # artifact, input, seed and options: a job that goes on must have the same
    rows: int
    batch: int  # rows of a batch: batch i holds the rows from i × batch on, in every run
    part: int  # rows of a part, whole batches
    threads: int  # of the CPU: sums depend on it by a rounding

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part)

    def span(self, i: int) -> tuple[int, int]:
        """First row of part i, and its last row + 1."""
        return i * self.part, min(self.rows, (i + 1) * self.part)

    def rows_of(self, parts: Iterable[int]) -> int:
        return sum(stop - start for start, stop in map(self.span, parts))


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs first between two jobs, in words; empty where nothing does."""
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            shown = name in ("artifact", "input")  # hashes say nothing to a reader
            return f"another {name}" if shown else f"{name} {before.get(name)}, now it is {now.get(name)}"
    return ""


class PartsFolder:
    """`OUTPUT.parts`. A part appears under its name when it is whole, so the names alone say what is finished."""

    def __init__(self, output: Path) -> None:
        self.output, self.path = output, output.with_name(f"{output.name}.parts")

    @contextmanager
    def alone(self, name: str = "lock", wait: bool = False) -> Iterator[None]:
        """One process at a time; a killed one leaves no lock behind."""
        self.path.mkdir(exist_ok=True)
        with (self.path / name).open("a") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                raise ScoreError(f"another process writes {self.output}; wait for its end.") from None
            yield

    def job(self) -> ScoringJob | None:
        """The job whose parts these are; None where none has begun."""
        try:
            return ScoringJob(**json.loads((self.path / "job.json").read_text()))
        except FileNotFoundError:
            return None

    def begin(self, job: ScoringJob) -> None:
        path = self.path / "job.json"
        draft = draft_of(path)
        with self._writing(draft):
            draft.write_text(json.dumps(asdict(job)))
            put_in_place(draft, path)

    def clear(self) -> None:
        """Forget the job and its parts."""
        (self.path / "job.json").unlink(missing_ok=True)  # first: parts without it are nobody's
        for file in self.path.iterdir():
            if file.name != "lock":
                file.unlink()

    def remove(self) -> None:
        self.clear()
        (self.path / "lock").unlink(missing_ok=True)
        self.path.rmdir()

    def finished(self, job: ScoringJob) -> set[int]:
        """The parts that are whole. Others, which a crash of the machine may leave, are made again."""
        return {i for i in range(job.parts) if self._whole(i, job)}

    def _file(self, i: int) -> Path:
        return self.path / f"part-{i:06d}.arrow"

    def _whole(self, i: int, job: ScoringJob) -> bool:
        start, stop = job.span(i)
        try:
            return bool(self._read(i).num_rows == stop - start)
        except (OSError, pa.ArrowInvalid):
            return False

    def write(self, i: int, table: pa.Table) -> None:
        """As Arrow has it in memory: Parquet, which takes longer to make, is made once, of all parts."""
        draft = draft_of(self._file(i))
        with self._writing(draft):
            with pa.ipc.new_file(draft, table.schema) as writer:
                writer.write_table(table)
            put_in_place(draft, self._file(i))

    @contextmanager
    def _writing(self, draft: Path) -> Iterator[None]:
        """A full disk is said, and leaves no half of a file."""
        try:
            yield
        except OSError as error:
            raise ScoreError(
                f"cannot write {self.output}: {os.strerror(error.errno) if error.errno else error}. Finished parts are "
                "kept: the same command goes on."
            ) from None
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def _read(self, i: int) -> pa.Table:
        with pa.memory_map(str(self._file(i))) as file:
            return pa.ipc.open_file(file).read_all()

    def assemble(self, job: ScoringJob, about: dict[str, Any]) -> None:
        """All parts in order as the output, which appears when it is whole; the folder goes."""
        draft = self.path / ".output"
        schema = self._read(0).schema.with_metadata({KEY: json.dumps(about | {"job": job.given})})
        with self._writing(draft):
            with pq.ParquetWriter(draft, schema, use_dictionary=DICTIONARIES) as writer:
                for i in range(job.parts):
                    writer.write_table(self._read(i).replace_schema_metadata(schema.metadata))
            put_in_place(draft, self.output)
        self.remove()


def job_of(output: Path) -> dict[str, Any] | None:
    """What a finished output was made from; None where we did not write it."""
    try:
        known = (pq.read_schema(output).metadata or {}).get(KEY)
        given: dict[str, Any] = json.loads(known or b"")["job"]
        return given
    except (OSError, pa.ArrowInvalid, ValueError, TypeError, KeyError):
        return None
