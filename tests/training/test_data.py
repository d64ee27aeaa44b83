"""Data sets come as they were written, or not at all: each fault gives one error that names the file and the fault."""

import csv
import hashlib
import io
import os
import pickle
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.manifest import Image, Input
from dubito.models.numerics.text import number_in
from dubito.training.data import sources as module
from dubito.training.data.data import DataError, DataSet, Examples, divide, enter, input_of
from dubito.training.data.sources import count_pictures, numbered, read_data
from tests.examples import at_most

REAL = Path(__file__).parents[3] / "shared" / "data"
DIGITS = "d55db3fe6b109614"  # how their hash begins: another one orphans every artifact trained on them
Array = NDArray[Any]
rng = np.random.default_rng


def complaint(name: str, *arguments: Any, **options: Any) -> str:
    """Of one line."""
    with pytest.raises(DataError) as caught:
        read_data(name, *arguments, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert not said.endswith("..")
    return said


def pixels(*shape: int, seed: int = 0) -> Array:
    return rng(seed).integers(0, 256, shape, dtype=np.uint8)


# the embedded digits


def test_the_embedded_digits() -> None:
    data = read_data("digits")
    assert (len(data.train), data.test, data.labels) == (1797, None, tuple("0123456789"))
    assert (data.train.x.dtype, data.train.x.shape) == (torch.uint8, (1797, 1, 8, 8))
    assert data.train.y.dtype == torch.int64
    assert data.train.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    with files("dubito.training").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        raw = arrays["x"]  # 0 … 16
    assert (raw.min(), raw.max()) == (0, 16)
    assert data.train.x.unique().tolist() == [n * 255 // 16 for n in range(17)]
    assert ((data.train.x[:, 0].int().numpy() + 15) // 16 == raw).all()  # nothing is lost
    assert data.hash().startswith(DIGITS)
    assert read_data("digits").hash() == data.hash()


@pytest.mark.parametrize("name", ["digit", "", "npz", "zip:x.zip", "uci", "MNIST", ":", "digits:"])
def test_an_unknown_name_is_told_the_known_ones(name: str) -> None:
    said = complaint(name)
    assert f"no data set {name!r}; there are: digits, mnist, fashion-mnist, cifar10" in said
    assert "npz:PATH" in said


@pytest.mark.parametrize("kind", ["npz", "csv", "folder"])
@pytest.mark.parametrize("place", ["", "none/such", "x" * 300, "~nobody-of-this-name/x"])
def test_a_path_that_is_not_there(kind: str, place: str) -> None:
    assert f"there is no file or folder {place!r}; expected {kind}:PATH" in complaint(f"{kind}:{place}")


def test_a_path_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.csv").write_text("a,b\n1,0\n2,1\n")
    assert len(read_data("csv:~/a.csv").train) == 2


# npz


@pytest.fixture
def npz(tmp_path: Path) -> Callable[..., str]:
    def write(**arrays: Any) -> str:
        np.savez(tmp_path / "a.npz", **arrays)
        return f"npz:{tmp_path / 'a.npz'}"

    return write


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5, 3, 6, 7), None),
        ((5, 1, 6, 7), None),
        ((5, 6, 7, 3), (0, 3, 1, 2)),
        ((5, 6, 7, 1), (0, 3, 1, 2)),
        ((5, 3, 4, 3), None),
    ],
)
def test_pictures_come_channels_first(npz: Callable[..., str], shape: tuple[int, ...], axes: Any) -> None:
    x = pixels(*shape)
    data = read_data(npz(x=x, y=[0, 1, 2, 1, 0]))
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.is_contiguous()
    assert np.array_equal(data.train.x.numpy(), x if axes is None else x.transpose(axes))
    assert (data.train.y.tolist(), data.train.y.dtype) == ([0, 1, 2, 1, 0], torch.int64)
    assert (data.labels, data.test) == (("0", "1", "2"), None)


def test_grey_pictures_get_a_channel(npz: Callable[..., str]) -> None:
    x = pixels(4, 6, 7)
    assert np.array_equal(read_data(npz(x=x, y=np.zeros(4, int))).train.x.numpy(), x[:, None])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f8", "int32", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 2, 3, 2), (4, 2, 1, 2, 2)])
def test_other_inputs_are_floats_as_they_are(npz: Callable[..., str], dtype: str, shape: tuple[int, ...]) -> None:
    x = (rng(0).integers(0, 50, shape) / 4).astype(dtype)
    found = read_data(npz(x=x, y=np.arange(4))).train.x
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), x.astype(np.float32))


def test_rows_of_bytes_are_features(npz: Callable[..., str]) -> None:
    assert read_data(npz(x=pixels(4, 9), y=np.arange(4))).train.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("y", "regression", "expected", "labels"),
    [
        ([0, 2, 1], None, [0, 2, 1], 3),
        (np.array([0, 2, 1], np.uint8), None, [0, 2, 1], 3),
        ([False, True, True], None, [0, 1, 1], 2),
        ([[0], [2], [1]], None, [0, 2, 1], 3),  # a column of classes
        ([0.0, 2.0, 1.0], False, [0, 2, 1], 3),
        ([0.0, 2.0, 1.0], None, [[0], [2], [1]], None),
        ([0, 2, 1], True, [[0], [2], [1]], None),
        ([[0.5], [2], [1]], None, [[0.5], [2], [1]], None),
        ([[0.5, 1], [2, -3], [1, 7]], None, [[0.5, 1], [2, -3], [1, 7]], None),
        ([[0, 1], [2, 3], [1, 7]], None, [[0, 1], [2, 3], [1, 7]], None),
    ],
)
def test_targets(npz: Callable[..., str], y: Any, regression: bool | None, expected: Any, labels: int | None) -> None:
    data = read_data(npz(x=np.zeros((3, 2)), y=y), regression=regression)
    assert data.train.y.tolist() == expected
    assert data.train.y.dtype == (torch.int64 if labels else torch.float32)
    assert data.labels == (None if labels is None else tuple(map(str, range(labels))))


def test_an_npz_with_a_test_part(npz: Callable[..., str]) -> None:
    x = pixels(6, 8, 8, 3)
    name = npz(x=x[:4], y=[0, 1, 0, 1], x_test=x[4:].transpose(0, 3, 1, 2), y_test=[3.0, 1.0], more=["words"])
    data = read_data(name)
    assert data.test is not None
    assert np.array_equal(data.test.x.numpy(), x[4:].transpose(0, 3, 1, 2))
    assert data.test.y.tolist() == [3, 1]
    assert data.labels == ("0", "1", "2", "3")  # of both parts
    assert read_data(name, regression=True).labels is None


@settings(deadline=None, max_examples=at_most(20))
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    outputs=st.integers(1, 3),
    dtype=st.sampled_from(["f4", "f8", "i4", "u1"]),
    seed=st.integers(0, 9),
)
def test_what_is_written_is_read(shape: list[int], outputs: int, dtype: str, seed: int) -> None:
    x = rng(seed).integers(0, 200, shape).astype(dtype)
    y = rng(seed).normal(size=(len(x), outputs)).astype(np.float32)
    pictures = dtype == "u1" and len(shape) > 2
    if pictures and len(shape) == 4 and not {shape[1], shape[3]} & {1, 3}:
        return  # refused
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "a.npz", x=x, y=y)
        found = read_data(f"npz:{folder}/a.npz").train
    assert np.array_equal(found.y.numpy(), y)
    assert found.x.dtype == (torch.uint8 if pictures else torch.float32)
    if pictures:
        x = x[:, None] if x.ndim == 3 else x if x.shape[1] in (1, 3) else np.moveaxis(x, 3, 1)
    assert np.array_equal(found.x.numpy(), x)


X = np.zeros((3, 2))
Y = np.arange(3)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "holds nothing; expected arrays x and y"),
        ({"x": X}, "holds x; expected arrays x and y"),
        ({"a": X, "b": Y}, "holds a, b; expected arrays x and y"),
        ({"x": X, "y": Y, "x_test": X}, "holds x, y, x_test; expected arrays x and y (and x_test, y_test)"),
        ({"x": X, "y": Y[:2]}, "x has shape (3, 2) and y (2,)"),
        ({"x": X[:0], "y": Y[:0]}, "x has shape (0, 2) and y (0,)"),
        ({"x": X[:, :0], "y": Y}, "x has shape (3, 0)"),
        ({"x": X[:, 0], "y": Y}, "x has shape (3,)"),
        ({"x": X, "y": 3}, "y ()"),
        ({"x": X, "y": X[:, :0]}, "y (3, 0)"),
        ({"x": np.zeros((3, 1, 1, 1, 1, 1)), "y": Y}, "of one to four axes each"),
        ({"x": X, "y": np.array([object()] * 3)}, "Object arrays cannot be loaded when allow_pickle=False"),
        ({"x": np.array([["a"], ["b"], ["c"]]), "y": Y}, "x holds <U1 and y int64; expected numbers"),
        ({"x": X, "y": ["a", "b", "c"]}, "y <U1; expected numbers"),
        ({"x": X * 1j, "y": Y}, "x holds complex128"),
        ({"x": X + np.nan, "y": Y}, "x holds NaN, infinity"),
        ({"x": X, "y": [0.5, np.inf, 1]}, "y holds NaN, infinity"),
        ({"x": X + 1e39, "y": Y}, "x holds NaN, infinity or numbers beyond float32"),
        ({"x": X, "y": Y - 1}, "values from -1 to 1; expected classes 0, 1, 2, …"),
        ({"x": X, "y": Y + (1 << 40)}, "expected classes 0, 1, 2, … of shape (N,). To predict numbers: --set task=reg"),
        ({"x": X, "y": Y.astype(np.uint64) + np.uint64(2**63)}, "expected classes"),
        ({"x": pixels(3, 8, 8, 4), "y": Y}, "expected pictures with 1 or 3 channels, first or last"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, "x_test float64 (3, 1)"),
        ({"x": X, "y": X, "x_test": X, "y_test": Y}, "y_test int64 (3,)"),
        ({"x": pixels(3, 8, 8), "y": Y, "x_test": np.zeros((3, 1, 8, 8)), "y_test": Y}, "of one kind and shape"),
        ({"x": X, "y": Y, "x_test": X, "y_test": [0.5, 1, 2]}, "values from 0.5 to 2.0; expected classes"),
    ],
)
def test_arrays_that_are_no_examples(npz: Callable[..., str], arrays: dict[str, Any], said: str) -> None:
    name = npz(**arrays)
    found = complaint(name)
    assert said in found
    assert name.removeprefix("npz:") in found


@pytest.mark.parametrize("y", [[0.5, 1, 2], [-1.0, 0, 1], [[0, 1], [1, 0], [1, 0]], [np.nan, 0, 1]])
def test_numbers_that_are_no_classes(npz: Callable[..., str], y: Any) -> None:
    assert re.search("expected (classes|finite)", complaint(npz(x=X, y=y), regression=False))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x,y\n1,2\n", pickle.dumps(X), "npy", "truncated"])
def test_a_file_that_is_no_npz(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "a.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, X)
    else:
        np.savez(path, x=np.zeros((100, 20)), y=np.zeros(100))
        path.write_bytes(path.read_bytes()[:-50])
    assert "a.npz is no .npz file, or a damaged one; write it with numpy.savez" in complaint(f"npz:{path}")


def test_a_directory_is_no_npz_and_no_csv(tmp_path: Path) -> None:
    assert "is no .npz file" in complaint(f"npz:{tmp_path}")
    assert "Is a directory" in complaint(f"csv:{tmp_path}")


def npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + body


@pytest.mark.parametrize(
    "member",
    [
        b"no array",
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }"),
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2), }", b"short"),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", pickle.dumps([1, 2, 3])),
        npy(b"__import__('os')"),
    ],
)
def test_members_that_lie(tmp_path: Path, member: bytes) -> None:
    buffer = io.BytesIO()
    np.save(buffer, Y)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", buffer.getvalue())
    complaint(f"npz:{tmp_path / 'a.npz'}")


@settings(deadline=None, max_examples=at_most(20))
@given(at=st.integers(0, 10_000), by=st.integers(1, 255))
def test_a_flipped_byte_is_noticed_or_does_no_harm(at: int, by: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        np.savez(path, x=np.arange(6.0).reshape(3, 2), y=Y)
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= by
        path.write_bytes(content)
        try:
            found = read_data(f"npz:{path}").train
        except DataError:
            return
    assert found.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert found.y.tolist() == [0, 1, 2]


# csv


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., str]:
    def write(text: str | bytes) -> str:
        (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"csv:{tmp_path / 'a.csv'}"

    return write


@pytest.mark.parametrize(
    ("targets", "regression", "expected", "labels"),
    [
        (["owl", "cat", "owl"], None, [1, 0, 1], ("cat", "owl")),
        (["10", "9", "10"], None, [1, 0, 1], ("9", "10")),
        (["-1", "1", "1"], None, [0, 1, 1], ("-1", "1")),
        (["b", "2", "10"], None, [2, 0, 1], ("2", "10", "b")),
        (["2.0", "1.0", "2.0"], False, [1, 0, 1], ("1", "2")),  # as spreadsheets write them
        (["²", "x", "²"], None, [1, 0, 1], ("x", "²")),
        (["2.0", "1.0", "2.0"], None, [[2], [1], [2]], None),
        (["1.5", "2", "-3e1"], None, [[1.5], [2], [-30]], None),
        (["1", "2", "3"], True, [[1], [2], [3]], None),
    ],
)
def test_csv_targets(
    table: Callable[..., str], targets: list[str], regression: bool | None, expected: Any, labels: Any
) -> None:
    name = table("a,b,c\n" + "".join(f"{i},{i / 2},{t}\n" for i, t in enumerate(targets)))
    data = read_data(name, regression=regression)
    assert data.train.x.tolist() == [[0, 0], [1, 0.5], [2, 1]]
    assert (data.train.y.tolist(), data.labels, data.test) == (expected, labels, None)


def test_a_target_column_by_name(table: Callable[..., str]) -> None:
    name = table("kind,a,b\ncat,1,2\ndog,3,4\n")
    data = read_data(name, target="kind")
    assert (data.train.x.tolist(), data.train.y.tolist(), data.labels) == ([[1, 2], [3, 4]], [0, 1], ("cat", "dog"))
    assert (data.columns, data.targets) == (("a", "b"), ("kind",))
    assert "has no column 'species'; its columns are: kind, a, b" in complaint(name, target="species")


def test_a_group_column_by_name(table: Callable[..., str]) -> None:
    name = table("a,where,b,y\n1,north,2,0\n3,south,4,1\n")
    data = read_data(name, group="where")
    assert (data.train.x.tolist(), data.train.y.tolist(), data.columns) == ([[1, 2], [3, 4]], [0, 1], ("a", "b"))
    assert data.train.group is not None
    assert data.train.group.tolist() == ["north", "south"]
    assert "has no column 'place'; its columns are: a, where, b, y" in complaint(name, group="place")
    assert "column 'y' is both data.group and the target" in complaint(name, group="y")


def test_a_csv_as_others_write_it(table: Callable[..., str]) -> None:
    """With a byte order mark, Windows' line ends, blank lines, spaces and quotes."""
    name = table('\ufeffa, b, "c, in m"\r\n\r\n"the cat", 1 , 2\r\n   \r\ndog,3,\t4\r\n\r\n')
    data = read_data(name, target="a")
    assert (data.train.x.tolist(), data.train.y.tolist()) == ([[1, 2], [3, 4]], [1, 0])
    assert data.labels == ("dog", "the cat")


def test_numbers_may_name_the_features(table: Callable[..., str]) -> None:
    assert read_data(table("0,1,label\n5,6,cat\n7,8,dog\n")).train.x.tolist() == [[5, 6], [7, 8]]


@settings(deadline=None, max_examples=at_most(20))
@given(data=st.data(), columns=st.integers(1, 4))
def test_a_written_table_is_read(data: st.DataObject, columns: int) -> None:
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    word = st.text("ab \"',é-", min_size=1).map(str.strip).filter(bool)
    rows = data.draw(st.lists(st.tuples(*[number] * columns, word), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "a.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*(f"column {i}" for i in range(columns)), "target"], *rows])
        found = read_data(f"csv:{folder}/a.csv")
    assert found.labels is not None
    assert found.train.x.tolist() == [list(row[:-1]) for row in rows]
    assert [found.labels[i] for i in found.train.y] == [row[-1] for row in rows]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 lines; expected a header and examples"),
        ("a,b\n", "has 1 lines; expected a header and examples"),
        ("a\n1\n2\n", "has one column, 'a'; expected features and a target, divided by commas"),
        ("a;b\n1;2\n", "has one column, 'a;b'"),
        ("a;b\n1;2\n", "It seems to be divided by semicolons: save it with commas."),
        ("a\tb\n1\t2\n", "divided by tabs"),
        ("a,b,a,c\n1,2,3,4\n", "has 2 columns 'a'; expected a name for each column"),
        ("a,b,c\n1,2,3\n\n1,2\n", "line 4 has 2 fields; the header has 3"),
        ("a,b\n1,2\n1,2,3\n", "line 3 has 3 fields; the header has 2"),
        ("5.1,3.5,setosa\n4.9,3,setosa\n7,3.2,virginica\n", "begins with 5.1, 3.5, setosa; expected a header"),
        ("1,2,3\n4,5,6\n", "begins with 1, 2, 3; expected a header that names the columns"),
        ("a,b\nx,1\n", "line 2, column 'a' is 'x'; expected a number. Write words as numbers"),
        ("a,b\n1_0,1\n", "line 2, column 'a' is '1_0'; expected a number"),
        ("a,b\n\uff11,1\n", "line 2, column 'a' is '\uff11'; expected a number"),
        ('a,b\n1,1\n"",1\n', "line 3, column 'a' is ''; expected a number. Fill it"),
        ('"a\nb",c\n\n1,1\nx,1\n', "line 5, column 'a\\nb' is 'x'; expected a number"),
        ("a,b\nnan,1\n2,1\n", "x holds NaN"),
        ("a,b\n1,inf\n2,1.5\n", "y holds NaN, infinity"),
        ("a,b\n1e39,1\n", "numbers beyond float32"),
        ("a,b\n1,cat\n2,\n", "line 3 has nothing in the target column 'b'"),
        ("a,b\n1,cat\n2,1.5\n", "line 2, column 'b' is 'cat'; expected a number"),
        ('a,b\n1,"cat\n', "unexpected end of data"),
        ('a,b\n1,"cat"s\n', "',' expected after '\"'"),
        (b"a,b\n1,caf\xe9\n", "is not in UTF-8; expected a table of text"),
        (b"a,b\n1\0,1\n", r"column 'a' is '1\x00'; expected a number"),
        (b"\xff\xfea\0,\0b\0", "is not in UTF-8; expected a table of text"),
    ],
)
def test_a_csv_that_is_no_table(table: Callable[..., str], text: str | bytes, said: str) -> None:
    name = table(text)
    found = complaint(name)
    assert said in found
    assert name.removeprefix("csv:") in found


@pytest.mark.parametrize("target", ["1.5", "nan", "inf", "-0.5"])
def test_fractions_are_no_classes(table: Callable[..., str], target: str) -> None:
    name = table(f"a,b\n1,1\n2,{target}\n")
    assert f"line 3 has the target {target}; expected classes. To predict numbers" in complaint(name, regression=False)


def test_words_are_no_numbers(table: Callable[..., str]) -> None:
    assert "line 2, column 'b' is 'x'" in complaint(table("a,b\n1,x\n2,1\n"), regression=True)


def test_a_target_that_stands_there_twice(table: Callable[..., str]) -> None:
    assert "has 2 columns 'b'" in complaint(table("a,b,b\n1,2,3\n"), target="b")


# folders of pictures


def picture(path: Path, array: Array, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Pillow.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path)


def test_a_folder_of_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = pixels(6, 7, 3, seed=1), pixels(6, 7, 3, seed=2)
    picture(tmp_path / "dog" / "a.png", second)
    picture(tmp_path / "cat" / "b.png", first)
    picture(tmp_path / "cat" / "deeper" / "c.png", second)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    data = read_data(f"folder:{tmp_path}")
    assert (data.labels, data.test) == (("cat", "dog"), None)
    assert data.train.y.tolist() == [0, 0, 1]
    expected = np.stack([first, second, second]).transpose(0, 3, 1, 2)
    assert np.array_equal(data.train.x.numpy(), expected)
    assert read_data(f"folder:{tmp_path}").hash() == data.hash()
    assert capfd.readouterr() == ("", "")  # the progress bar is for terminals


def test_hidden_folders_and_files_are_no_classes_and_no_pictures(tmp_path: Path) -> None:
    for name in ("cat/a.png", "dog/b.png"):
        picture(tmp_path / name, pixels(6, 7, 3, seed=1))
    for name in (".ipynb_checkpoints/a.png", "__MACOSX/cat/a.png", "cat/._a.png", "dog/.thumbs/small/b.png"):
        picture(tmp_path / name, pixels(2, 2, 3, seed=1))
    data = read_data(f"folder:{tmp_path}")
    assert (data.labels, data.train.y.tolist()) == (("cat", "dog"), [0, 1])
    assert count_pictures(tmp_path) == (2, 0, (6, 7), 2)


def test_classes_are_told_apart_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    def known_as(*names: str) -> list[int]:
        return numbered(data, "these", names).train.y.tolist()

    data = DataSet(Examples(torch.zeros(3, 1), torch.tensor([0, 1, 2])), None, ("cat", "dog", "owl"))
    assert known_as("owl", "cat", "dog") == [1, 2, 0]
    assert known_as("owl", "cat", "dog", "hen") == [1, 2, 0]
    assert known_as("0", "1", "2") == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert known_as("Katze", "Hund", "Eule") == [0, 1, 2]
    assert "taken in order, cat for Katze, dog for Hund, owl for Eule" in capsys.readouterr().err
    with pytest.raises(DataError, match="only cat, dog are the same"):
        known_as("dog", "cat", "hen")
    with pytest.raises(DataError, match="has 3 classes"):
        known_as("Katze", "Hund", "Eule", "Huhn")


def test_an_npz_that_lacks_classes_says_so(npz: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    read_data(npz(x=np.zeros((4, 2)), y=np.array([0, 1, 2, 1])))
    assert capsys.readouterr().err == ""
    read_data(npz(x=np.zeros((4, 2)), y=np.array([0, 7, 7, 0])))
    assert "y goes up to 7, but has no example of class 1, 2, 3, 4, 5, …" in capsys.readouterr().err


def test_pictures_of_every_mode_become_red_green_and_blue(tmp_path: Path) -> None:
    grey = pixels(5, 5)
    colour = pixels(5, 5, 3)
    alpha = np.concatenate([colour, pixels(5, 5, 1, seed=3)], 2)
    picture(tmp_path / "a" / "0.png", colour)
    picture(tmp_path / "a" / "1.png", grey)
    picture(tmp_path / "a" / "2.png", alpha)
    picture(tmp_path / "a" / "3.png", grey.astype(np.uint16) * 256 + 77)  # 16 bits
    picture(tmp_path / "a" / "4.png", (grey > 99).astype(np.uint8) * 255, "1")
    picture(tmp_path / "a" / "5.png", grey, "P")
    picture(tmp_path / "a" / "6.png", np.stack([grey, grey[::-1]], 2))  # grey with transparency
    black = (grey > 99).astype(np.uint8) * 255
    x = read_data(f"folder:{tmp_path}").train.x.numpy()
    assert x.shape == (7, 3, 5, 5)
    for i, expected in enumerate([colour, grey, colour, grey, black, grey, grey]):
        assert np.array_equal(x[i].transpose(1, 2, 0), np.broadcast_to(expected.reshape(5, 5, -1), (5, 5, 3)))


def test_pictures_are_resized_to_the_first_or_as_asked(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png", np.full((4, 6, 3), 40, np.uint8))
    picture(tmp_path / "a" / "1.png", np.full((9, 3, 3), 200, np.uint8))
    halves = np.repeat(np.array([[0, 255]], np.uint8), 8, 0).repeat(8, 1)  # (8, 16): black, then white
    picture(tmp_path / "b" / "2.png", halves)
    x = read_data(f"folder:{tmp_path}").train.x
    assert x.shape == (3, 3, 4, 6)
    assert x[:2].float().mean((1, 2, 3)).tolist() == [40, 200]
    x = read_data(f"folder:{tmp_path}", size=(4, 8)).train.x
    assert x.shape == (3, 3, 4, 8)
    black, white = x[2].float().split(4, dim=-1)
    assert black[..., :3].eq(0).all()
    assert white[..., 1:].eq(255).all()


def test_resizing_agrees_with_what_a_model_does_on_its_own(tmp_path: Path) -> None:
    """Up to rounding to whole pixels, once per axis; else a model would meet other pictures than in training."""
    large = pixels(20, 14, 3)
    picture(tmp_path / "a" / "0.png", large)
    declared = Input(shape=(3, 8, 8), image=Image(mean=(0, 0, 0), std=(1, 1, 1)))
    inside = enter(read_data(f"folder:{tmp_path}", size=(8, 8)).train.x, declared)
    outside = enter(torch.from_numpy(large).permute(2, 0, 1)[None], declared)
    assert (inside - outside).abs().max() <= 1.01 / 255


def test_folders_for_training_and_test(tmp_path: Path) -> None:
    for part, n in (("train", 3), ("test", 2)):
        for i in range(n):
            picture(tmp_path / part / "ab"[i % 2] / f"{i}.png", pixels(n + 4, n + 4, 3, seed=i))
    data = read_data(f"folder:{tmp_path}")
    assert data.test is not None
    assert data.labels == ("a", "b")
    assert (data.train.x.shape, data.test.x.shape) == ((3, 3, 7, 7), (2, 3, 7, 7))  # the first training picture's size
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 0, 1], [0, 1])
    picture(tmp_path / "test" / "c" / "x.png", pixels(4, 4, 3))
    assert "train has the classes a, b, but test a, b, c; expected the same" in complaint(f"folder:{tmp_path}")


def test_a_training_folder_alone_is_undivided(tmp_path: Path) -> None:
    for name in "ab":
        picture(tmp_path / "train" / name / "x.png", pixels(4, 4, 3))
    data = read_data(f"folder:{tmp_path}")
    assert (data.labels, data.test) == (("a", "b"), None)
    picture(tmp_path / "val" / "a" / "x.png", pixels(4, 4, 3))
    assert "has the folders train, val; expected train and test" in complaint(f"folder:{tmp_path}")


def test_trains_are_a_class(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        picture(tmp_path / name / "x.png", pixels(4, 4, 3))
    assert read_data(f"folder:{tmp_path}").labels == ("bus", "train")


def test_pictures_without_classes_in_train_and_test(tmp_path: Path) -> None:
    for name in ("test", "train"):
        picture(tmp_path / name / "x.png", pixels(4, 4, 3))
    assert "it has no folders" in complaint(f"folder:{tmp_path}")


def test_a_folder_without_classes(tmp_path: Path) -> None:
    assert "expected one folder of pictures per class" in complaint(f"folder:{tmp_path}")
    picture(tmp_path / "x.png", pixels(4, 4, 3))
    assert "it has no folders" in complaint(f"folder:{tmp_path}")
    assert "Not a directory; expected one folder" in complaint(f"folder:{tmp_path / 'x.png'}")
    picture(tmp_path / "a" / "x.png", pixels(4, 4, 3))
    (tmp_path / "empty").mkdir()
    assert "Found no valid file for the classes empty" in complaint(f"folder:{tmp_path}")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.png", pixels(4, 4, 3))
    (tmp_path / "a").chmod(0)
    try:
        complaint(f"folder:{tmp_path}")
    finally:
        (tmp_path / "a").chmod(0o700)


@pytest.mark.parametrize("fault", ["text", "empty", "truncated", "header", "floats"])
def test_a_picture_that_cannot_be_read(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "a" / ("x.tiff" if fault == "floats" else "x.png")
    picture(path, pixels(40, 40).astype(np.float32) if fault == "floats" else pixels(40, 40, 3))
    good = path.read_bytes()
    bad = {"text": b"words", "empty": b"", "truncated": good[: len(good) // 2], "header": good[:30] + b"\0" * 99}
    path.write_bytes(bad.get(fault, good))
    assert f"cannot read {path}: " in complaint(f"folder:{tmp_path}")


def test_pictures_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        picture(tmp_path / "a" / f"{i}.png", pixels(8, 9, 3))
    monkeypatch.setattr(module, "MOST_BYTES", 600)
    said = complaint(f"folder:{tmp_path}")
    assert "3 pictures of 8 × 9, the size of the first" in said
    assert "Set data.size, such as [224, 224]" in said
    assert len(read_data(f"folder:{tmp_path}", size=(20, 20)).train) == 3


# torchvision's sets


def idx(path: Path, array: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def raw(root: Path, name: str = "MNIST", n: tuple[int, int] = (12, 5)) -> dict[str, tuple[Array, Array]]:
    """A tiny set in the layout of MNIST."""
    parts = {
        "train": (pixels(n[0], 28, 28), np.arange(n[0]) % 10),
        "t10k": (pixels(n[1], 28, 28, seed=1), np.arange(n[1])),
    }
    for part, (x, y) in parts.items():
        idx(root / name / "raw" / f"{part}-images-idx3-ubyte", x)
        idx(root / name / "raw" / f"{part}-labels-idx1-ubyte", y)
    return parts


@pytest.mark.parametrize(
    ("name", "folder", "last"), [("mnist", "MNIST", "9"), ("fashion-mnist", "FashionMNIST", "boot")]
)
def test_sets_in_the_layout_of_mnist(tmp_path: Path, name: str, folder: str, last: str) -> None:
    written = raw(tmp_path, folder)
    data = read_data(name, tmp_path)
    assert data.test is not None
    for part, (x, y) in zip((data.train, data.test), written.values(), strict=True):
        assert np.array_equal(part.x.numpy(), x[:, None])
        assert part.y.tolist() == y.tolist()
        assert (part.x.dtype, part.y.dtype) == (torch.uint8, torch.int64)
    assert data.labels is not None
    assert len(data.labels) == 10
    assert last in data.labels[9]
    assert read_data(name, tmp_path, download=True).hash() == data.hash()  # nothing to fetch


def test_cifar10_in_its_published_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torchvision's checksums replaced by those of a tiny set."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    x, y = pixels(6, 3072), [0, 9, 3, 1, 2, 2]

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    batches = [write(f"data_batch_{i}", {"data": x[2 * i : 2 * i + 2], "labels": y[2 * i : 2 * i + 2]}) for i in (0, 1)]
    meta = write("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", batches)
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", {"data": x[4:], "labels": y[4:]})])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    data = read_data("cifar10", tmp_path)
    assert data.test is not None
    assert np.array_equal(data.train.x.numpy(), x[:4].reshape(4, 3, 32, 32))
    assert np.array_equal(data.test.x.numpy(), x[4:].reshape(2, 3, 32, 32))
    assert (data.train.y.tolist(), data.test.y.tolist()) == (y[:4], y[4:])
    assert data.labels == tuple(f"class {i}" for i in range(10))
    (folder / "test_batch").write_bytes(b"something else")
    assert "cifar10 is not in" in complaint("cifar10", tmp_path)


def test_svhn_in_its_published_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    x, y = pixels(32, 32, 3, 5), np.array([1, 10, 3, 9, 2])  # (H, W, C, N), and 10 for the digit 0
    sums = {}
    for part, where in (("train", slice(0, 3)), ("test", slice(3, 5))):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x[..., where], "y": y[where, None]})
        content = (tmp_path / f"{part}_32x32.mat").read_bytes()
        sums[part] = ["", f"{part}_32x32.mat", hashlib.md5(content).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", sums)
    data = read_data("svhn", tmp_path)
    assert data.test is not None
    assert np.array_equal(data.train.x.numpy(), x[..., :3].transpose(3, 2, 0, 1))
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([1, 0, 3], [9, 2])
    assert data.labels == tuple("0123456789")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert "svhn cannot be read: import of scipy.io halted" in complaint("svhn", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn"])
def test_a_set_that_is_not_there(tmp_path: Path, name: str) -> None:
    assert f"{name}: say where the data lies with --data-root" in complaint(name)
    said = complaint(name, tmp_path)
    assert f"{name} is not in {tmp_path}, or is damaged; pass --download to fetch it there" in said
    assert not list(tmp_path.iterdir())


def test_a_set_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["file:///nowhere/"])
    said = complaint("mnist", tmp_path, download=True)
    assert f"mnist cannot be read from {tmp_path}: Error downloading" in said
    assert "pass --download" not in said


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("keep", [0, 3, 10, -1])
def test_truncated_files(tmp_path: Path, file: str, keep: int) -> None:
    raw(tmp_path)
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:keep])
    assert "mnist cannot be read from" in complaint("mnist", tmp_path)


def test_files_of_different_sets(tmp_path: Path) -> None:
    raw(tmp_path)
    idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.arange(7))
    assert "x has shape (12, 28, 28) and y (7,)" in complaint("mnist", tmp_path)
    idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.arange(12))
    assert "labels beyond its 10 classes" in complaint("mnist", tmp_path)


# uci


@pytest.fixture
def uci(tmp_path: Path) -> Path:
    """Five rows of four columns, the target among them; two splits."""
    folder = tmp_path / "UCI" / "standard" / "tiny" / "data"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.arange(20).reshape(5, 4) / 2)
    lists = {
        "features": [0, 1, 3],
        "target": [2],
        "train_0": [4, 0, 1],
        "test_0": [3, 2],
        "train_1": [2],
        "test_1": [0],
    }
    for name, entries in lists.items():
        np.savetxt(folder / f"index_{name}.txt", entries)
    return folder


def test_a_set_in_the_uci_layout(tmp_path: Path, uci: Path) -> None:
    data = read_data("uci/tiny", tmp_path)
    assert data.test is not None
    assert data.labels is None
    assert data.train.x.tolist() == [[8, 8.5, 9.5], [0, 0.5, 1.5], [2, 2.5, 3.5]]
    assert data.train.y.tolist() == [[9], [1], [3]]
    assert (data.test.x.tolist(), data.test.y.tolist()) == ([[6, 6.5, 7.5], [4, 4.5, 5.5]], [[7], [5]])
    other = read_data("uci/tiny", tmp_path, split=1)
    assert (other.train.x.tolist(), other.train.y.tolist()) == ([[4, 4.5, 5.5]], [[5]])
    np.savetxt(uci / "index_features.txt", [1])
    assert read_data("uci/tiny", tmp_path).train.x.tolist() == [[8.5], [0.5], [2.5]]


def test_a_set_with_a_gap_has_the_table_of_the_standard_one(tmp_path: Path, uci: Path) -> None:
    assert "there is no uci-gap/tiny in" in complaint("uci-gap/tiny", tmp_path)
    folder = tmp_path / "UCI" / "gap" / "tiny" / "data"
    folder.mkdir(parents=True)
    for part, rows in {"train": [0, 4], "test": [2]}.items():
        np.savetxt(folder / f"index_{part}_0.txt", rows)
    data = read_data("uci-gap/tiny", tmp_path)
    assert data.test is not None
    assert data.train.x.tolist() == [[0, 0.5, 1.5], [8, 8.5, 9.5]]
    assert data.test.y.tolist() == [[5]]
    assert "uci-gap/tiny has the splits 0 to 0, not 1" in complaint("uci-gap/tiny", tmp_path, split=1)


def test_a_uci_set_that_is_not_there(tmp_path: Path, uci: Path) -> None:
    assert "uci/tiny: say with --data-root which folder holds UCI/standard/tiny/data/" in complaint("uci/tiny")
    assert "there is no uci/boston in" in complaint("uci/boston", tmp_path)
    assert "there are: uci/tiny" in complaint("uci/", tmp_path)
    assert f"there is no {tmp_path / 'x' / 'UCI' / 'standard'}" in complaint("uci/tiny", tmp_path / "x").replace(
        "there is no uci/tiny", "", 1
    )
    for split in (2, -1):
        assert f"uci/tiny has the splits 0 to 1, not {split}" in complaint("uci/tiny", tmp_path, split=split)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("data.txt", "", "data.txt is empty"),
        ("data.txt", "1 2 3 4\n1 2\n", "number of columns"),
        ("data.txt", "a b c d\n", "could not convert string 'a'"),
        ("data.txt", "1 nan 3 4\n" * 5, "x holds NaN"),
        ("data.txt", None, "data.txt not found"),
        ("index_features.txt", "0 1 4", "index_features.txt must hold whole numbers from 0 to 3"),
        ("index_target.txt", "-1", "index_target.txt must hold whole numbers from 0 to 3"),
        ("index_target.txt", None, "index_target.txt not found"),
        ("index_train_0.txt", "5", "index_train_0.txt must hold whole numbers from 0 to 4"),
        ("index_train_0.txt", "0.5", "index_train_0.txt must hold whole numbers"),
        ("index_test_0.txt", "nan", "index_test_0.txt must hold whole numbers"),
        ("index_test_0.txt", "", "index_test_0.txt is empty"),
        ("index_test_0.txt", "0 1\n2 3\n", "index_test_0.txt must hold"),
        ("index_test_0.txt", None, "index_test_0.txt not found"),
    ],
)
def test_uci_files_that_lie(tmp_path: Path, uci: Path, file: str, content: str | None, said: str) -> None:
    (uci / file).unlink()
    if content is not None:
        (uci / file).write_text(content)
    assert said in complaint("uci/tiny", tmp_path)


# dividing, and telling examples apart


def examples(n: int, seed: int = 0) -> Examples:
    """No two alike."""
    x = torch.arange(n)[:, None] * torch.ones(3) + torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) / 2
    return Examples(x, torch.arange(n) % 3)


@settings(deadline=None, max_examples=at_most(20))
@given(
    n=st.integers(4, 300),
    shares=st.tuples(*[st.floats(0.01, 0.6)] * 3),
    seed=st.integers(0, 2**31 - 1),
    divided=st.booleans(),
)
def test_the_parts_are_disjoint_and_complete(
    n: int, shares: tuple[float, float, float], seed: int, divided: bool
) -> None:
    whole = DataSet(examples(n), examples(7, 1) if divided else None, ("a", "b", "c"))
    kept = n if divided else n - max(1, round(shares[2] * n))
    sizes = [max(1, round(share * kept)) for share in shares[:2]]
    if sum(sizes) >= kept:
        with pytest.raises(DataError, match=f"{n} examples are too few"):
            divide(whole, *shares, seed)
        return
    parts = divide(whole, *shares, seed)
    assert [len(p) for p in (parts.validation, parts.calibration)] == sizes
    assert len(parts.train) == kept - sum(sizes)
    mine = [parts.train, parts.validation, parts.calibration, *([] if divided else [parts.test])]
    prints = [f for part in mine for f in part.fingerprints()]
    assert sorted(prints) == sorted(whole.train.fingerprints())  # each once, and every one
    assert len(set(prints)) == n
    for part in mine:
        assert torch.equal(part.y, part.x[:, 0].floor().long() % 3)  # targets stay with their inputs
    if divided:
        assert parts.test is whole.test
    assert (parts.labels, parts.hash) == (whole.labels, whole.hash())


def test_a_division_hangs_on_the_seed_alone() -> None:
    whole = read_data("digits")
    one, again, other = (divide(whole, 0.05, 0.1, 0.2, seed) for seed in (0, 0, 1))
    assert [len(p) for p in (one.train, one.validation, one.calibration, one.test)] == [1222, 72, 144, 359]
    for part in ("train", "validation", "calibration", "test"):
        first, second, third = (getattr(parts, part) for parts in (one, again, other))
        assert torch.equal(first.x, second.x)
        assert torch.equal(first.y, second.y)
        assert not torch.equal(first.y, third.y)
    assert one.hash == other.hash == whole.hash()


def test_too_few_examples() -> None:
    assert len(divide(DataSet(examples(4), None, None), 0.05, 0.1, 0.2, 0).train) == 1
    for n in (1, 2, 3):
        with pytest.raises(DataError, match=f"{n} examples are too few: .* 0.2 for test nothing is left to train on"):
            divide(DataSet(examples(n), None, None), 0.05, 0.1, 0.2, 0)
    with pytest.raises(DataError, match=r"10 examples are too few: .* 0.5 for calibration nothing is left"):
        divide(DataSet(examples(10), examples(3), None), 0.5, 0.5, 0.2, 0)


def test_fingerprints_follow_the_input_alone() -> None:
    whole = examples(50)
    prints = whole.fingerprints()
    assert len(set(prints)) == 50
    assert all(re.fullmatch("[0-9a-f]{10}", p) for p in prints)
    order = torch.randperm(50)
    assert Examples(whole.x[order], whole.y).fingerprints() == [prints[i] for i in order]
    strided = Examples(whole.x.T.contiguous().T, whole.y)
    assert not strided.x.is_contiguous()
    assert strided.fingerprints() == prints
    assert whole[:0].fingerprints() == []
    assert len(whole[torch.tensor([1, 3])]) == 2


@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_a_fingerprint_changes_with_any_number(kind: str) -> None:
    x = torch.from_numpy(pixels(1, 3, 4, 4)) if kind == "pictures" else torch.rand(1, 3, 4, 4)
    seen = {Examples(x, torch.zeros(1)).fingerprints()[0]}
    for i in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[i] = 255 - changed.view(-1)[i] if kind == "pictures" else changed.view(-1)[i] * (1 + 1e-6)
        seen.add(Examples(changed, torch.zeros(1)).fingerprints()[0])
    assert len(seen) == x.numel() + 1


def test_the_hash_changes_with_every_element() -> None:
    def sets() -> Iterator[DataSet]:
        train, test = examples(4), examples(3, 1)
        yield DataSet(train, test, None)
        yield DataSet(train, None, None)
        yield DataSet(test, train, None)
        yield DataSet(Examples(train.x.double(), train.y), test, None)
        yield DataSet(Examples(train.x.reshape(4, 3, 1), train.y), test, None)
        yield DataSet(train[torch.tensor([1, 0, 2, 3])], test, None)
        for part in (train, test):
            for tensor in (part.x, part.y):
                for i in range(tensor.numel()):
                    before = tensor.view(-1)[i].clone()
                    tensor.view(-1)[i] += 1
                    yield DataSet(train, test, None)
                    tensor.view(-1)[i] = before

    hashes = [data.hash() for data in sets()]
    assert len(set(hashes)) == len(hashes) == 6 + 4 * 4 + 3 * 4
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)
    assert next(sets()).hash() == hashes[0]


# what the network takes


def test_pictures_enter_with_mean_zero_and_deviation_one() -> None:
    x = torch.from_numpy(pixels(40, 3, 6, 5) // np.array([1, 2, 5], np.uint8)[:, None, None])
    declared = input_of(Examples(x, torch.zeros(40)))
    assert declared.shape == (3, 6, 5)
    assert declared.image is not None
    for c in range(3):
        values = [v / 255 for v in x[:, c].flatten().tolist()]
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        assert declared.image.mean[c] == pytest.approx(mean, rel=1e-9)
        assert declared.image.std[c] == pytest.approx(std, rel=1e-9)
        entered = enter(x, declared)[:, c]
        assert entered.dtype == torch.float32
        assert entered.double().mean().abs() < 1e-6
        assert entered.double().std(correction=0) == pytest.approx(1, abs=1e-6)
    expected = (x[7, 2, 4, 1].item() / 255 - declared.image.mean[2]) / declared.image.std[2]
    assert enter(x, declared)[7, 2, 4, 1].item() == pytest.approx(expected, rel=1e-5)


def test_a_flat_channel_does_not_explode() -> None:
    x = torch.full((3, 1, 4, 4), 7, dtype=torch.uint8)
    declared = input_of(Examples(x, torch.zeros(3)))
    assert declared.image == Image(mean=(7 / 255,), std=(1e-3,))
    assert enter(x, declared).abs().max() < 1e-3


def test_features_enter_as_they_are() -> None:
    x = examples(5).x
    declared = input_of(Examples(x, torch.zeros(5)))
    assert declared == Input(shape=(3,))
    assert torch.equal(enter(x, declared), x)
    assert torch.equal(enter(x.to(torch.uint8), declared), x.to(torch.uint8).float())
    with pytest.raises(DataError, match=re.escape("examples have shape (2,); this model takes (3,)")):
        enter(x[:, :2], declared)


def test_floats_enter_a_model_of_pictures_as_they_are() -> None:
    declared = Input(shape=(1, 4, 4), image=Image(mean=(0.5,), std=(0.1,)))
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(enter(x, declared), x)
    with pytest.raises(DataError, match=re.escape("examples have shape (1, 5, 4); this model takes (1, 4, 4)")):
        enter(torch.rand(2, 1, 5, 4), declared)


GREY = Input(shape=(1, 4, 4), image=Image(mean=(0.4,), std=(0.2,)))
COLOUR = Input(shape=(3, 4, 4), image=Image(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))


def flat(colour: tuple[int, ...], side: int) -> Tensor:
    return torch.tensor(colour, dtype=torch.uint8)[None, :, None, None].expand(2, -1, side, side + 1)


def test_pictures_from_outside_are_fitted() -> None:
    """Flat ones, of which resizing changes nothing but the size; other channels by luminance or by copying."""
    found = enter(flat((200, 100, 50), 9), GREY)
    assert found.shape == (2, 1, 4, 4)
    luminance = (0.299 * 200 + 0.587 * 100 + 0.114 * 50) / 255
    torch.testing.assert_close(found, torch.full_like(found, (luminance - 0.4) / 0.2))
    for colour, side in (((90,), 3), ((90,), 4), ((10, 20, 30), 17)):
        found = enter(flat(colour, side), COLOUR)
        assert found.shape == (2, 3, 4, 4)
        for c, (mean, std) in enumerate(((0.4, 0.2), (0.5, 0.3), (0.6, 0.4))):
            value = (colour[c % len(colour)] / 255 - mean) / std
            torch.testing.assert_close(found[:, c], torch.full((2, 4, 4), value))


def test_halving_a_picture_takes_means() -> None:
    """Against the triangle filter of twice the pixel's width, written out: 1, 3, 3, 1 eighths."""
    x = torch.from_numpy(pixels(1, 1, 8, 8))
    w = np.array([1, 3, 3, 1]) / 8
    expected = sum(
        w[i] * w[j] * x[0, 0, 1 + i :: 2, 1 + j :: 2][:2, :2].double() for i in range(4) for j in range(4)
    )  # the inner pixels, whose filter stays inside
    found = enter(x, GREY)[0, 0, 1:3, 1:3]
    torch.testing.assert_close(found.double(), (expected / 255 - 0.4) / 0.2, rtol=0, atol=1e-5)


def test_pictures_with_other_channels_are_refused() -> None:
    with pytest.raises(InputError, match="a picture has 5 channels; this model takes 3"):
        enter(flat((1, 2, 3, 4, 5), 4), COLOUR)


# the real thing


@pytest.mark.skipif(not (REAL / "FashionMNIST").is_dir(), reason=f"no {REAL / 'FashionMNIST'}: real data is not tested")
def test_the_real_fashion_mnist() -> None:
    data = read_data("fashion-mnist", REAL)
    assert data.test is not None
    for part, n in ((data.train, 60_000), (data.test, 10_000)):
        assert part.x.shape == (n, 1, 28, 28)
        assert part.y.bincount().tolist() == [n // 10] * 10
    image = input_of(data.train).image
    assert image is not None
    assert (image.mean[0], image.std[0]) == pytest.approx((0.2860, 0.3530), abs=1e-4)  # as published


@pytest.mark.skipif(not (REAL / "UCI").is_dir(), reason=f"no {REAL / 'UCI'}: real data is not tested")
def test_the_real_boston_housing() -> None:
    tests = []
    for split in range(20):
        data = read_data("uci/boston", REAL, split=split)
        assert data.test is not None
        assert (data.train.x.shape, data.test.x.shape) == ((455, 13), (51, 13))
        whole = DataSet(
            Examples(torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])), None, None
        )
        assert len(set(whole.train.fingerprints())) == 506
        assert whole.train.y.mean().item() == pytest.approx(22.5328, abs=1e-3)
        tests.append(data.test.fingerprints())
    assert len(set(map(tuple, tests))) == 20
    assert "uci/boston has the splits 0 to 19, not 20" in complaint("uci/boston", REAL, split=20)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.5", 1.5),
        (" -2e3 ", -2000.0),
        ("1.5\u00a0", 1.5),
        ("1_0", None),
        ("\uff11", None),
        ("1\u00a02", None),
        ("", None),
    ],
)
def test_numbers_as_people_write_them(text: str, number: float | None) -> None:
    assert number_in(text) == number
