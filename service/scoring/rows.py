"""Rows to score, read by row number: arrays, tables and folders of pictures, none of which has to fit in memory."""

import glob
import hashlib
import os
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dubito.models.errors import InputError
from dubito.models.images import SUFFIXES, PixelLayout, is_shown, layout_of, prepare, read_pixels
from dubito.models.manifest import Input
from dubito.models.remote.address import Address, Place, place_of
from dubito.models.remote.cache import local_copy
from dubito.service.scoring.blocks import Block, ScoredRows, checked, fingerprint_of
from dubito.service.scoring.tables import CsvRows, ParquetRows

FILES = (".parquet", ".pq", ".csv", ".npy", ".npz")


def rows_of_input(given: str, declared: Input) -> ScoredRows:
    """The rows of a file (a path or an address), of a folder of pictures, or of all files that match a pattern.

    Pictures and files come in the order of their names. Raises InputError where they cannot be inputs of the model.
    """
    with local_copy(input_place(given)) as path:
        if path.is_dir():
            return PictureRows(path, declared)
        if path.exists():
            return _of_file(path, declared)
    names = sorted(glob.glob(given, recursive=True))
    if not names:
        raise InputError(f"there is no {given}; expected a file, a folder of pictures, or a pattern like 'day-*.csv'.")
    return SeveralRows([(name, _of_file(Path(name), declared)) for name in names])


def input_place(given: str) -> Place:
    """The path, or the address of one file."""
    place = place_of(given)
    if isinstance(place, Address) and place.suffix.lower() not in FILES:
        raise InputError(
            f"{place} came; expected the address of one file ({', '.join(FILES)}). Copy a folder of pictures, or the "
            "files of a pattern, to a folder here and score that."
        )
    return place


def _of_file(path: Path, declared: Input) -> ScoredRows:
    before = fingerprint_of(path)
    rows = _opened(path, declared)
    if rows.fingerprint() != before:  # lines were looked for in what is no longer there
        raise InputError(f"{path} was changed while it was opened: score it once nothing writes to it.")
    return rows


def _opened(path: Path, declared: Input) -> ScoredRows:
    match path.suffix.lower():
        case ".npy":
            return ArrayRows(path, _mapped(path), declared)
        case ".npz":
            return ArrayRows(path, ZippedArray(path), declared)
        case ".csv":
            return CsvRows(path, declared)
        case ".parquet" | ".pq":
            return ParquetRows(path, declared)
    raise InputError(f"{path} has an unknown kind; expected .parquet, .csv, .npy, .npz or a folder of pictures.")


class Lines(Protocol):
    """An array whose rows are read from a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, rows: slice) -> NDArray[Any]: ...


def _mapped(path: Path) -> Lines:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy raises many kinds, all of them about the file
        raise InputError(f"cannot read {path} as .npy: {error}") from None
    return array


class ZippedArray:
    """The array `x` of an .npz file, or its only one, unpacked as it is read."""

    def __init__(self, path: Path) -> None:
        try:
            with ExitStack() as opened:
                archive = opened.enter_context(zipfile.ZipFile(path))
                names = [name for name in archive.namelist() if name.endswith(".npy")]
                name = "x.npy" if "x.npy" in names else names[0] if len(names) == 1 else None
                if name is None:
                    held = ", ".join(names) or "no arrays"
                    raise InputError(f"{path} holds {held}; expected an array x, or one alone.")
                self.file: IO[bytes] = opened.enter_context(archive.open(name))
                version = np.lib.format.read_magic(self.file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                self.shape, fortran, self.dtype = read(self.file)
                self.opened = opened.pop_all()  # until rows cannot be read
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InputError(f"cannot read {path} as .npz: {error}") from None
        if fortran and len(self.shape) > 1:
            raise InputError(f"{path} holds columns one after the other; save it as np.ascontiguousarray(x).")
        self.path, self.begin = path, self.file.tell()
        self.row = self.dtype.itemsize * int(np.prod(self.shape[1:]))

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        try:
            self.file.seek(self.begin + rows.start * self.row)
            content = self.file.read((rows.stop - rows.start) * self.row)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            self.opened.close()
            raise InputError(f"cannot read rows {rows.start} to {rows.stop} of {self.path}: {error}") from None
        return np.frombuffer(content, self.dtype).reshape(rows.stop - rows.start, *self.shape[1:])


def _layout(path: Path, shape: tuple[int, ...], declared: Input) -> PixelLayout:
    try:
        return layout_of(shape, declared)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


class ArrayRows:
    """Rows of an array (N, ...): numbers in the model's input space, or uint8 pixels for a model of pictures."""

    def __init__(self, path: Path, array: Lines, declared: Input) -> None:
        self.path, self.array, self.declared = path, array, declared
        self.count = array.shape[0] if array.shape else 0
        self.pixels = array.dtype == np.uint8 and declared.image is not None
        if array.dtype.kind not in "fiub":
            raise InputError(f"{path} holds {array.dtype}; expected numbers.")
        if self.pixels:
            self.layout = _layout(path, array.shape, declared)
            self.count = 1 if self.layout.single else self.count
        elif array.shape[1:] != declared.shape or not self.count:
            own = ", ".join(map(str, declared.shape))
            raise InputError(f"{path} has shape {array.shape}; expected (N, {own}), N at least 1.")

    def fingerprint(self) -> str:
        return fingerprint_of(self.path)

    def read(self, start: int, stop: int) -> Block:
        if self.pixels:
            rows = slice(0, self.array.shape[0]) if self.layout.single else slice(start, stop)
            pictures = self.layout.pictures(self.array[rows])
            ready = [prepare(torch.from_numpy(np.array(picture)), self.declared) for picture in pictures]
            return Block(torch.stack(ready).numpy())
        with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which `checked` sees
            return checked(np.array(self.array[start:stop], np.float32), {})

    def files(self, start: int, stop: int) -> None:
        return None


class PictureRows:
    """The pictures in a folder and its subfolders, by name."""

    def __init__(self, folder: Path, declared: Input) -> None:
        if declared.image is None:
            raise InputError(f"{folder} is a folder; this model takes tensors of shape {declared.shape}, not pictures.")
        self.folder, self.declared = folder, declared
        every = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        self.names = [name for name in every if name.lower().endswith(SUFFIXES) and is_shown(name)]
        self.count = len(self.names)
        if not self.names:
            raise InputError(f"{folder} holds no pictures; expected files {', '.join(SUFFIXES)}.")
        self.pool = ThreadPoolExecutor(os.cpu_count(), "picture")

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            stat = (self.folder / name).stat()
            digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> Block:
        rows = list(self.pool.map(self._one, self.names[start:stop]))
        bad = {i: row for i, row in enumerate(rows) if isinstance(row, str)}
        zeros = np.zeros(self.declared.shape, np.float32)
        return Block(np.stack([zeros if isinstance(row, str) else row for row in rows]), bad)

    def _one(self, name: str) -> NDArray[np.float32] | str:
        image = self.declared.image
        assert image is not None
        try:
            pixels = read_pixels(self.folder / name, image.fitting)
            return prepare(torch.from_numpy(pixels), self.declared).numpy()
        except OSError as error:
            return f"cannot read {name}: {error.strerror}"
        except (ValueError, InputError) as error:
            return f"cannot read {name}: {error}"

    def files(self, start: int, stop: int) -> list[str]:
        return self.names[start:stop]


class SeveralRows:
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[tuple[str, ScoredRows]]) -> None:
        self.parts = parts
        self.ends = np.cumsum([rows.count for _, rows in parts]).tolist()
        self.count = self.ends[-1]

    def fingerprint(self) -> str:
        text = "\n".join(f"{name} {rows.fingerprint()}" for name, rows in self.parts)
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """File, first row and last row + 1 in it, of each file that has some of the rows."""
        spans, i = [], bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[i] - self.parts[i][1].count
            end = min(stop, self.ends[i])
            spans.append((i, start - begin, end - begin))
            start, i = end, i + 1
        return spans

    def read(self, start: int, stop: int) -> Block:
        blocks, bad, done = [], dict[int, str](), 0
        for i, first, last in self._spans(start, stop):
            name, rows = self.parts[i]
            block = rows.read(first, last)
            bad |= {done + row: f"{name}, its row {first + row}: {what}" for row, what in block.bad.items()}
            blocks.append(block.x)
            done += last - first
        return Block(blocks[0] if len(blocks) == 1 else np.concatenate(blocks), bad)

    def files(self, start: int, stop: int) -> list[str]:
        return [self.parts[i][0] for i, first, last in self._spans(start, stop) for _ in range(last - first)]
