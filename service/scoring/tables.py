"""Rows of CSV and Parquet tables, chunk by chunk."""

import csv
import io
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dubito.models.errors import InputError
from dubito.models.manifest import Input
from dubito.models.numerics.text import number_in
from dubito.service.scoring.blocks import Block, checked, fingerprint_of

CHUNK = 4096  # lines of a CSV file that are parsed together
SCANNED = 1 << 24  # bytes of a CSV file that are looked at together
INPUTS = "inputs"  # column whose lists are whole inputs, as in a request
QUOTE, NEWLINE, RETURN = b'"\n\r'


class TableRows:
    """Rows in chunks, of which the last one read is kept."""

    def __init__(self, path: Path, bounds: list[int], declared: Input) -> None:
        """Chunk i holds the rows from `bounds[i]` up to `bounds[i + 1]`."""
        self.path, self.bounds, self.declared = path, bounds, declared
        self.count = bounds[-1]
        if not self.count:
            raise InputError(f"{path} has no rows; expected at least one.")
        self.kept: tuple[int, Block] | None = None

    def fingerprint(self) -> str:
        return fingerprint_of(self.path)

    def read(self, start: int, stop: int) -> Block:
        parts, bad, row = [], dict[int, str](), start
        while row < stop:
            i = bisect_right(self.bounds, row) - 1
            first, last = row - self.bounds[i], min(stop, self.bounds[i + 1]) - self.bounds[i]
            if self.kept is None or self.kept[0] != i:
                self.kept = i, self.chunk(i)
            block = self.kept[1]
            parts.append(block.x[first:last])
            bad |= {row - start + at - first: what for at, what in block.bad.items() if first <= at < last}
            row += last - first
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Block(x.reshape(len(x), *self.declared.shape), bad)

    def files(self, start: int, stop: int) -> None:
        return None

    def chunk(self, i: int) -> Block:
        raise NotImplementedError


def chosen_columns(path: Path, header: list[str], declared: Input) -> list[str]:
    """The columns that hold a row's numbers: those that the model names, else all of them."""
    if twice := {name for name in header if header.count(name) > 1}:
        raise InputError(f"{path} has two columns {min(twice)!r}; expected one.")
    if declared.columns is not None:
        if missing := [name for name in declared.columns if name not in header]:
            shown = ", ".join(map(repr, missing[:5]))
            raise InputError(f"{path} has no column {shown}; the model takes {', '.join(declared.columns)}.")
        return list(declared.columns)
    if len(declared.shape) != 1 or len(header) != declared.shape[0]:
        raise InputError(
            f"{path} has {len(header)} columns, and the model does not name its own; expected one for each number of "
            f"an input of shape {declared.shape}, or in Parquet a column {INPUTS!r} of lists."
        )
    return header


class ParquetRows(TableRows):
    """A Parquet file by its row groups."""

    def __init__(self, path: Path, declared: Input) -> None:
        try:
            self.file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"cannot read {path} as Parquet: {error}") from None
        schema, groups = self.file.schema_arrow, self.file.metadata
        self.lists = declared.columns is None and INPUTS in schema.names
        self.columns = [INPUTS] if self.lists else chosen_columns(path, schema.names, declared)
        for name in self.columns:
            kind = schema.field(name).type
            while self.lists and _is_list(kind):
                kind = kind.value_type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise InputError(f"{path}: column {name!r} holds {schema.field(name).type}; expected numbers.")
        sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        super().__init__(path, [0, *np.cumsum(sizes, dtype=int).tolist()], declared)

    def chunk(self, i: int) -> Block:
        try:
            table = self.file.read_row_group(i, columns=self.columns, use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"cannot read row group {i} of {self.path}: {error}") from None
        with np.errstate(over="ignore"):
            if self.lists:
                return self._from_lists(table.column(INPUTS).combine_chunks())
            x = np.empty((len(table), len(self.columns)), np.float32)
            for j, name in enumerate(self.columns):
                column = table.column(name)
                x[:, j] = (column.cast(pa.float64(), safe=False) if column.null_count else column).to_numpy()
        return checked(x, {}, self.columns)

    def _from_lists(self, array: Any) -> Block:
        """Lists of an input's numbers, flat or nested."""
        width = int(np.prod(self.declared.shape))
        ends = np.arange(len(array) + 1)
        while _is_list(array.type):
            if pa.types.is_fixed_size_list(array.type):  # whose nulls have places among the numbers
                array = array.cast(pa.list_(array.type.value_type))
            if array.null_count:
                array = array.fill_null([])
            inner = array.flatten()
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            ends = np.concatenate([[0], np.cumsum(lengths)])[ends]
            array = inner
        counts = np.diff(ends)
        values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
        wrong = np.flatnonzero(counts != width).tolist()
        bad = {i: f"column {INPUTS!r} has {counts[i]} numbers; expected {width}" for i in wrong}
        if not bad:
            return checked(values.reshape(-1, width), bad)
        x = np.zeros((len(counts), width), np.float32)
        for i in np.flatnonzero(counts == width).tolist():
            x[i] = values[ends[i] : ends[i + 1]]
        return checked(x, bad)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


class CsvRows(TableRows):
    """A CSV file with a header, in chunks of lines whose places are found first."""

    def __init__(self, path: Path, declared: Input) -> None:
        try:
            with path.open("rb") as file:
                records, self.places, self.lines = _places(file)
                file.seek(0)
                head = file.read(self.places[0]).decode("utf-8-sig") if records else ""
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from None
        self.header = [name.strip() for name in next(csv.reader([head.strip()], skipinitialspace=True), [])]
        self.columns = chosen_columns(path, self.header, declared)
        super().__init__(path, [*range(0, records - 1, CHUNK), records - 1] if records > 1 else [0], declared)

    def chunk(self, i: int) -> Block:
        with self.path.open("rb") as file:
            file.seek(self.places[i])
            text = file.read(self.places[i + 1] - self.places[i])
        rows = self.bounds[i + 1] - self.bounds[i]
        numbers = dict.fromkeys(self.columns, pa.float64())
        convert = pa_csv.ConvertOptions(include_columns=self.columns, column_types=numbers)
        read = pa_csv.ReadOptions(column_names=self.header, use_threads=False, block_size=len(text) + 1)
        parse = pa_csv.ParseOptions(newlines_in_values=True)
        try:
            table = pa_csv.read_csv(io.BytesIO(text), read, parse, convert)
        except pa.ArrowInvalid:  # it says neither the line nor the column
            return self._carefully(text, self.lines[i], rows)
        if table.num_rows != rows or any(column.null_count for column in table.columns):
            return self._carefully(text, self.lines[i], rows)
        with np.errstate(over="ignore"):
            x = np.stack([column.to_numpy() for column in table.columns], 1).astype(np.float32)
        return checked(x, {}, self.columns)

    def _carefully(self, text: bytes, line: int, rows: int) -> Block:
        """Line by line, so that a bad one can be named."""
        x, bad = np.zeros((rows, len(self.columns)), np.float32), dict[int, str]()
        places = [self.header.index(name) for name in self.columns]
        reader = csv.reader(io.StringIO(text.decode(errors="replace"), newline=""), skipinitialspace=True)
        records = [(reader.line_num, cells) for cells in reader if len(cells) > 1 or (cells and cells[0].strip())]
        if len(records) != rows:
            raise InputError(
                f"{self.path}: from line {line} on quotes are not closed or stand within a field, a line ends in a "
                "bare carriage return or holds nothing but spaces, or the file has changed meanwhile. Write it anew."
            )
        for i, (number, cells) in enumerate(records):
            where = f"line {line + number - 1}"
            if len(cells) != len(self.header):
                bad[i] = f"{where} has {len(cells)} fields; the header has {len(self.header)}"
            else:
                x[i] = self._numbers([cells[place].strip() for place in places], where, i, bad)
        return checked(x, bad, self.columns)

    def _numbers(self, cells: list[str], where: str, i: int, bad: dict[int, str]) -> NDArray[np.float64]:
        values = np.zeros(len(cells))
        for j, (name, text) in enumerate(zip(self.columns, cells, strict=True)):
            if (value := number_in(text)) is None:
                bad[i] = f"{where}, column {name!r} is {text[:40]!r}; expected a number"
                break
            values[j] = value
        return values


def _places(file: Any) -> tuple[int, list[int], list[int]]:
    """The number of records that are not blank, header included; and the place and line at which each chunk begins."""
    place, quoted, lines, records = 0, False, 0, 0
    places, numbers = list[int](), list[int]()
    tail = 0  # bytes of the current record that are more than a line's end
    while content := file.read(SCANNED):
        text = np.frombuffer(content, np.uint8)
        inside = np.logical_xor.accumulate(text == QUOTE) ^ quoted
        quoted = bool(inside[-1])
        newlines = np.flatnonzero(text == NEWLINE)
        ends = newlines[~inside[newlines]]
        solid = np.concatenate([[0], np.cumsum((text != NEWLINE) & (text != RETURN))])
        filled = np.diff(np.concatenate([[0], solid[ends + 1]]))
        if len(ends):
            filled[0] += tail
            tail = int(solid[-1] - solid[ends[-1] + 1])
        else:
            tail += int(solid[-1])
        ordinal = np.cumsum(filled > 0) + records  # records up to each end
        for k in np.flatnonzero((filled > 0) & ((ordinal - 1) % CHUNK == 0)).tolist():
            places.append(place + int(ends[k]) + 1)  # after the header, and after each CHUNK rows
            numbers.append(lines + int(np.searchsorted(newlines, ends[k])) + 2)
        records = int(ordinal[-1]) if len(ends) else records
        place, lines = place + len(content), lines + len(newlines)
    if tail:
        records += 1
        if records == 1:
            places.append(place)
            numbers.append(lines + 1)
    if not places or places[-1] != place:
        places.append(place)
    return records, places, numbers
