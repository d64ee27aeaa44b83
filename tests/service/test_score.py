"""`dubito score`: every row once, with the values of an uninterrupted run, whatever kills it."""

import csv
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models.artifact.artifact import load
from dubito.models.errors import DubitoError, InputError
from dubito.models.manifest import Calibration, Input, Regression
from dubito.models.predictions.answers import Rulebook, answers, columns_of, rows_of
from dubito.service.scoring.parts import ScoreError
from dubito.service.scoring.replies import reply_columns, schema_of
from dubito.service.scoring.rows import rows_of_input
from dubito.service.scoring.score import Scored, Scoring, score
from dubito.service.scoring.tables import CHUNK, TableRows
from tests import forked
from tests.small_models import bayesian_mlp, stored

NAMES = ("age", "height", "weight, kg")
SMALL = (  # parts of a few batches, and the same sums in every process
    "import torch; torch.set_num_threads(1); import dubito.service.scoring.score as s; s.SECONDS = 0.005; "
)


class Silent:
    """No progress."""

    def __init__(self, left: int) -> None: ...

    def __enter__(self) -> Any:
        return lambda rows: None

    def __exit__(self, *_: object) -> None: ...


def scored(file: Path, rows: Path | str, output: Path, **options: Any) -> list[dict[str, Any]]:
    score(Scoring(file, str(rows), output, **options), ["cpu"], False, Silent)
    answered: list[dict[str, Any]] = pq.read_table(output).to_pylist()
    return answered


@pytest.fixture(scope="module")
def table_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of rows with three named columns."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("score") / "table.safetensors"
    network = bayesian_mlp((3, 8, 3), "ffg-u", inducing=4)
    stored(network, file, input=Input(shape=(3,), columns=NAMES), labels=("a", "b", "c"), calibration=calibration())
    return file


def calibration() -> Calibration:
    thresholds, quantiles = {"entropy": {1: 0.9, 4: 0.95}}, {1: 0.5, 4: 0.6}
    return Calibration.model_validate(
        {"false_positive_rate": 0.05, "coverage": 0.9, "measure": "entropy", "thresholds": thresholds}
        | {"quantiles": quantiles}
    )


def numbers(count: int) -> Any:
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


def kill_and_go_on(command: list[str | Path], folder: Path, output: Path, code: str, rng: np.random.Generator) -> int:
    """Kill the command at a random moment of the first third of what is left; returns how many parts there are then."""
    logs = folder / f"logs{time.monotonic_ns()}"
    logs.mkdir()
    process = forked.begin(code + forked.DUBITO, command, folder, logs)
    parts = output.with_name(output.name + ".parts")
    before, share, end = len(list(parts.glob("part-*"))), float(rng.uniform(0, 1 / 3)), time.monotonic() + 300
    while process.runs and time.monotonic() < end:
        if (parts / "job.json").exists():
            job = json.loads((parts / "job.json").read_text())
            left = -(-job["rows"] // job["part"]) - before
            if len(list(parts.glob("part-*"))) >= before + int(share * left):
                time.sleep(float(rng.uniform(0, 0.02)))
                break
        time.sleep(0.005)
    process.send(signal.SIGKILL)
    ended = process.end()
    assert ended.returncode == -signal.SIGKILL, ended.stderr or "it had ended before it was killed"
    return len(list(parts.glob("part-*")))


@pytest.mark.parametrize("rows", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_three_kills_leave_every_row_once_and_the_same_values(rows: int, table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(rows))
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))  # any moment will do
    command: list[str | Path] = [
        "score",
        table_model,
        "x.npy",
        tmp_path / "killed.parquet",
        "--samples",
        "4",
        "--batch",
        "64",
    ]
    whole = forked.begin(
        SMALL + forked.DUBITO, [*command[:3], tmp_path / "whole.parquet", *command[4:]], tmp_path, tmp_path
    )
    assert whole.end().returncode == 0, (tmp_path / "stderr").read_text()
    counts = [kill_and_go_on(command, tmp_path, tmp_path / "killed.parquet", SMALL, rng) for _ in range(3)]
    assert not (tmp_path / "killed.parquet").exists()
    last = forked.begin(SMALL + forked.DUBITO, command, tmp_path, tmp_path).end()
    assert last.returncode == 0, last.stderr
    assert counts == sorted(counts)
    assert not (tmp_path / "killed.parquet.parts").exists()
    killed, uninterrupted = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("killed", "whole"))
    assert killed["row"].to_numpy().tolist() == list(range(rows))
    assert killed.equals(uninterrupted)


# the processes start as copies, which have imported all: to begin anew takes each of them seconds
COPIES = "import multiprocessing as m; get = m.get_context; m.get_context = lambda _: get('fork'); "


@pytest.mark.parametrize("code", [COPIES, pytest.param("", marks=pytest.mark.slow)], ids=["copies", "anew"])
def test_two_processes_write_what_one_writes(code: str, table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(1000))
    command: list[str | Path] = ["score", table_model, "x.npy"]
    one = forked.begin(SMALL + forked.DUBITO, [*command, "one.parquet"], tmp_path, tmp_path).end()
    assert one.returncode == 0, one.stderr
    two = forked.begin(
        code + forked.DUBITO,
        [*command, "two.parquet", "--device", "cpu,cpu"],
        tmp_path,
        tmp_path,
        {"OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
    ).end()
    assert two.returncode == 0, two.stderr
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "two.parquet"))


def written(folder: Path, x: Any) -> dict[str, Path]:
    """The same rows in every kind of file."""
    wide = {name: x[:, i] for i, name in enumerate(NAMES)}
    np.save(folder / "x.npy", x)
    np.savez(folder / "stored.npz", x=x, y=np.zeros(len(x)))
    np.savez_compressed(folder / "packed.npz", x)
    pq.write_table(pa.table({"id": np.arange(len(x)), **wide}), folder / "wide.parquet", row_group_size=777)
    with (folder / "x.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["note", NAMES[2], NAMES[0], NAMES[1]])  # in another order, beside a text of two lines
        for a, b, c in x.tolist():
            out.writerow(['two\n"lines"', c, a, b])
            file.write("\r\n" if a > 2 else "")
    half = len(x) // 2
    np.save(folder / "part-1.npy", x[:half])
    np.save(folder / "part-2.npy", x[half:])
    names = ("x.npy", "stored.npz", "packed.npz", "wide.parquet", "x.csv", "part-*.npy")
    return {name: folder / name for name in names}


def test_every_kind_of_file_gives_the_same_rows(table_model: Path, tmp_path: Path) -> None:
    x = numbers(2 * CHUNK + 5)
    declared = load(table_model).card.input
    assert declared is not None
    for name, path in written(tmp_path, x).items():
        rows = rows_of_input(str(path), declared)
        assert rows.count == len(x), name
        for start, stop in ((0, 10), (CHUNK - 3, CHUNK + 3), (770, 1560), (len(x) - 7, len(x)), (3, 5)):
            block = rows.read(start, stop)
            assert not block.bad, name
            assert np.array_equal(block.x, x[start:stop]), (name, start)


def test_nulls_in_parquet_are_bad_rows_whatever_the_columns_type(tmp_path: Path) -> None:
    """A list of fixed size has places for its null's numbers; an integer above 2⁵³ has no exact real number."""
    lists = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"inputs": lists}), tmp_path / "lists.parquet")
    whole = pa.array([2**53 + 1, None, 4], pa.int64())
    pq.write_table(pa.table({"a": whole, "b": pa.array([2.0, 2.0, 4.0])}), tmp_path / "whole.parquet")
    for name, columns, first in (("lists", None, 1.0), ("whole", ("a", "b"), 2.0**53)):
        declared = Input(shape=(2,), columns=columns)
        block = rows_of_input(str(tmp_path / f"{name}.parquet"), declared).read(0, 3)
        assert list(block.bad) == [1], name
        assert block.x[0].tolist() == [first, 2.0]
        assert block.x[2, 1] == 4.0


@pytest.mark.parametrize("line", ['1,2" pipe', "1,2\r3,4", "   "])
def test_lines_that_csv_readers_take_in_different_ways_are_one_clear_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(f"a,b\n1,2\n{line}\n3,4\n5,6\n7,8\n".encode())
    rows = rows_of_input(str(tmp_path / "x.csv"), Input(shape=(2,), columns=("a", "b")))
    with pytest.raises(InputError, match=r"from line 2 on quotes .* bare carriage return .* spaces"):
        rows.read(0, 5)


def test_lists_in_parquet_are_inputs(tmp_path: Path) -> None:
    declared = Input(shape=(2, 3))
    x = np.random.default_rng(1).normal(size=(5, 2, 3)).astype(np.float32)
    for name, rows in (("flat", x.reshape(5, 6).tolist()), ("nested", x.tolist())):
        pq.write_table(pa.table({"inputs": rows}), tmp_path / f"{name}.parquet")
        block = rows_of_input(str(tmp_path / f"{name}.parquet"), declared).read(1, 5)
        assert np.array_equal(block.x, x[1:])
    pq.write_table(
        pa.table({"inputs": [[1.0] * 6, [1.0] * 5, None, [1.0, None, 3, 4, 5, 6]]}), tmp_path / "bad.parquet"
    )
    block = rows_of_input(str(tmp_path / "bad.parquet"), declared).read(0, 4)
    assert {row: what.partition(";")[0] for row, what in block.bad.items()} == {
        1: "column 'inputs' has 5 numbers",
        2: "column 'inputs' has 0 numbers",
        3: "it holds NaN, infinity or a number too large for float32",
    }


def test_a_row_says_what_a_prediction_says(table_model: Path, tmp_path: Path) -> None:
    """Against `Model.predict`, which knows neither batches nor parts: 1e-5 for sums in another order."""
    x = numbers(100)
    np.save(tmp_path / "x.npy", x)
    model = load(table_model)
    for samples in (4, "auto"):
        rows = scored(table_model, tmp_path / "x.npy", tmp_path / f"{samples}.parquet", samples=samples, seed=3)
        expected = answers(model.predict(torch.from_numpy(x), samples, 3), model.card)
        for i, (row, one) in enumerate(zip(rows, expected, strict=True)):
            assert row.pop("row") == i
            assert row.pop("samples") == one.pop("samples", 4)
            assert row.keys() == one.keys()
            assert row["label"] == one["label"]
            assert row["prediction_set"] == one["prediction_set"]
            assert row["probabilities"] == pytest.approx(one["probabilities"], abs=1e-5)
            assert row["ood"] == pytest.approx(one["ood"], abs=1e-5)


@pytest.mark.parametrize("targets", [None, ("price", "rent")])
def test_values_have_the_fields_of_a_reply(targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    """The columns of replies against `rows_of`, field by field."""
    torch.manual_seed(1)
    task = Regression(kind="regression", outputs=2, shift=(1.0, 2.0), scale=(3.0, 4.0))
    network = bayesian_mlp((3, 8, 2), "ffg-u", inducing=4, task=task)
    model = stored(network, tmp_path / "m.safetensors", input=Input(shape=(3,)), targets=targets)
    prediction = model.predict(torch.from_numpy(numbers(7)), 4, 0)
    rules = Rulebook(None).of(prediction)
    columns = columns_of(prediction.summary, rules)
    expected = rows_of(columns, rules, model.card)
    made = reply_columns(columns | {"samples": np.full(7, 4)}, rules, model.card, np.zeros(7, bool))
    names = [name for name in schema_of(model.card, False, False, False).names if name not in ("row", "samples")]
    assert names == list(expected[0])
    assert [{name: made[name][i].as_py() for name in names} for i in range(7)] == expected


def test_pictures_go_by_their_names(tmp_path: Path, small_digits: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "b").mkdir(parents=True)
    rng = np.random.default_rng(2)
    for name in ("b/2.png", "a.png", "10.jpg"):
        Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    rows = scored(small_digits, folder, tmp_path / "o.parquet", samples=2, seed=1)
    assert [row["file"] for row in rows] == ["10.jpg", "a.png", "b/2.png"]
    said = CliRunner().invoke(
        app,
        [
            "predict",
            str(small_digits),
            *(str(folder / row["file"]) for row in rows),
            "--samples",
            "2",
            "--seed",
            "1",
            "--json",
        ],
    )
    expected = json.loads(said.stdout)["predictions"]
    assert [row["probabilities"] for row in rows] == [pytest.approx(one["probabilities"], abs=1e-5) for one in expected]
    (folder / "c.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"row 3: cannot read c.png: no picture"):
        scored(small_digits, folder, tmp_path / "p.parquet", samples=2)
    rows = scored(small_digits, folder, tmp_path / "q.parquet", samples=2, seed=1, on_bad="null")
    assert [row["label"] is None for row in rows] == [False, False, False, True]
    assert rows[3]["error"].startswith("cannot read c.png")
    assert (rows[3]["ood"], rows[0]["error"]) == (None, None)


def test_another_job_is_refused(table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(300))
    output = tmp_path / "o.parquet"
    scored(table_model, tmp_path / "x.npy", output, seed=1)
    assert score(Scoring(table_model, str(tmp_path / "x.npy"), output, seed=1), ["cpu"], False, Silent).before == 300
    for options, what in (({"seed": 2}, "seed 1, now it is 2"), ({"seed": 1, "samples": 3}, "samples 20, now it is 3")):
        with pytest.raises(ScoreError, match=what):
            scored(table_model, tmp_path / "x.npy", output, **options)
    np.save(tmp_path / "x.npy", numbers(301))
    with pytest.raises(ScoreError, match="another input"):
        scored(table_model, tmp_path / "x.npy", output, seed=1)
    (tmp_path / "other.parquet").write_text("mine")
    with pytest.raises(ScoreError, match="is no output of"):
        scored(table_model, tmp_path / "x.npy", tmp_path / "other.parquet")
    assert (tmp_path / "other.parquet").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "o.parquet", "other.parquet"}


@pytest.mark.parametrize("change", ["rewritten", "gone"])
def test_an_input_that_changes_meanwhile_is_no_output(change: str, table_model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "x.npy", tmp_path / "o.parquet"
    np.save(file, numbers(300))
    then = file.stat().st_mtime_ns

    @contextmanager
    def progress(left: int) -> Iterator[Callable[[int], None]]:
        yield lambda rows: file.unlink(missing_ok=True) if change == "gone" else np.save(file, -numbers(300))

    asked = Scoring(table_model, str(file), output, samples=4, batch=64)
    with pytest.raises(ScoreError, match=r"x\.npy was changed while it was scored.* so nothing is kept"):
        score(asked, ["cpu"], False, progress)
    assert [one.name for one in tmp_path.iterdir()] == ([] if change == "gone" else ["x.npy"])
    np.save(file, numbers(300))
    os.utime(file, ns=(then, then))  # as if it had never changed
    assert score(asked, ["cpu"], False, Silent) == Scored(300, 0)


def test_an_input_that_grows_while_it_is_opened_is_refused(
    table_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is written to: its lines were counted before."""
    file = tmp_path / "x.csv"
    file.write_text("\n".join([",".join(f'"{name}"' for name in NAMES), "1,2,3"]))
    begin = TableRows.__init__

    def grown(rows: TableRows, path: Path, *more: Any) -> None:
        begin(rows, path, *more)
        with path.open("a") as lines:
            lines.write("\n4,5,6")

    with monkeypatch.context() as patch:
        patch.setattr(TableRows, "__init__", grown)
        with pytest.raises(InputError, match=r"x\.csv was changed while it was opened"):
            scored(table_model, file, tmp_path / "o.parquet")
    assert len(scored(table_model, file, tmp_path / "o.parquet")) == 2


def test_parts_of_another_job_are_not_gone_on_with(table_model: Path, tmp_path: Path) -> None:
    """A CSV whose last row is bad leaves parts behind."""
    lines = [",".join(f'"{name}"' for name in NAMES), *(f"{a},{b},{c}" for a, b, c in numbers(300).tolist())]
    output = tmp_path / "o.parquet"
    for none in ("1_0", "\uff11"):  # numbers for Python alone
        (tmp_path / "y.csv").write_text("\n".join([lines[0], f"1,{none},3"]))
        with pytest.raises(InputError, match=f"column 'height' is '{none}'; expected a number"):
            scored(table_model, tmp_path / "y.csv", tmp_path / f"{ord(none[0])}.parquet")
    (tmp_path / "x.csv").write_text("\n".join([*lines, "1,x,3"]))
    with pytest.raises(InputError, match=r"row 300: line 302, column 'height' is 'x'; expected a number"):
        scored(table_model, tmp_path / "x.csv", output, batch=64)
    with pytest.raises(ScoreError, match=r"o.parquet.parts holds parts of another job \(seed 0, now it is 5\)"):
        scored(table_model, tmp_path / "x.csv", output, batch=64, seed=5)
    other = tmp_path / "other.safetensors"
    stored(bayesian_mlp((3, 8, 3), "ffg-u", inducing=4), other, input=Input(shape=(3,), columns=NAMES))
    with pytest.raises(ScoreError, match="another artifact"):
        scored(other, tmp_path / "x.csv", output, batch=64)
    (tmp_path / "x.csv").write_text("\n".join([*lines, "1,2,3"]))
    with pytest.raises(ScoreError, match="another input"):
        scored(table_model, tmp_path / "x.csv", output, batch=64)
    asked = Scoring(table_model, str(tmp_path / "x.csv"), output, batch=64)
    assert score(asked, ["cpu"], True, Silent).rows == 301


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("age,height\n1,2\n", "has no column 'weight, kg'"),
        ('age,height,"weight, kg",age\n1,2,3,4\n', "two columns 'age'"),
        ('age,height,"weight, kg"\n', "has no rows"),
        ("", "has no column"),
        ('age,height,"weight, kg"\n1,2,3\n1,2\n', "row 1: line 3 has 2 fields; the header has 3"),
        ('age,height,"weight, kg"\n1,2,3\n\n1,nan,3\n', "row 1: column 'height' is nan"),
        ('age,height,"weight, kg"\n1,2,3\n1,,3\n', "row 1: line 3, column 'height' is ''"),
        ('age,height,"weight, kg"\n1,1e300,3\n', "row 0: column 'height' is inf"),
    ],
)
def test_bad_tables_are_named(text: str, what: str, table_model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DubitoError, match=what):
        scored(table_model, tmp_path / "x.csv", tmp_path / "o.parquet", samples=2)


def test_bad_rows_become_nulls_where_asked_and_change_no_other_row(table_model: Path, tmp_path: Path) -> None:
    x = numbers(200)
    np.save(tmp_path / "x.npy", x)
    x[[3, 130], 1] = np.nan, np.inf
    np.save(tmp_path / "bad.npy", x)
    fine = scored(table_model, tmp_path / "x.npy", tmp_path / "fine.parquet", samples=4)
    rows = scored(table_model, tmp_path / "bad.npy", tmp_path / "bad.parquet", samples=4, on_bad="null")
    for i, (row, one) in enumerate(zip(rows, fine, strict=True)):
        error = row.pop("error")
        assert (error is None) == (i not in (3, 130))
        assert row == (one if error is None else {**dict.fromkeys(one), "row": i})


def test_devices_are_named_or_refused(table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers(3))
    words = ["score", str(table_model), str(tmp_path / "x.npy"), str(tmp_path / "o.parquet"), "--device", "cuda:99"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InputError)
    assert "names 'cuda:99'" in str(result.exception)


def test_a_card_without_labels_names_classes_by_number(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    stored(bayesian_mlp((3, 8, 3), "deterministic"), file, input=Input(shape=(3,)))
    np.save(tmp_path / "x.npy", numbers(3))
    for row in scored(file, tmp_path / "x.npy", tmp_path / "o.parquet", samples=2):
        assert row["label"] == str(row["class"])
        assert (row["prediction_set"], row["ood"]) == (None, None)


def test_the_input_and_the_model_are_not_overwritten(table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3), np.float32))
    before = (tmp_path / "x.npy").read_bytes(), table_model.read_bytes()
    for output in (tmp_path / "x.npy", table_model):
        with pytest.raises(InputError, match="which is read; expected another file"):
            score(Scoring(table_model, str(tmp_path / "x.npy"), output), ["cpu"], True, Silent)
    assert ((tmp_path / "x.npy").read_bytes(), table_model.read_bytes()) == before


def test_hidden_pictures_are_not_scored(tmp_path: Path, small_digits: Path) -> None:
    """As in training."""
    for name in ("a.png", "._a.png", ".ipynb_checkpoints/a.png", "__MACOSX/b.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "p" / name)
    assert [row["file"] for row in scored(small_digits, tmp_path / "p", tmp_path / "o.parquet", samples=1)] == ["a.png"]


def test_a_full_disk_is_said_and_leaves_no_drafts(table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2000, 3), np.float32))
    output = tmp_path / "o.parquet"
    words: list[str | Path] = ["score", table_model, tmp_path / "x.npy", output]
    small = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"  # Python ignores the signal
    for _ in range(2):
        told = forked.run(*words, code=f"{small}; {forked.DUBITO}")
        assert told.returncode == 2
        assert f"cannot write {output}: File too large. Finished parts are kept" in told.stderr
        assert "Traceback" not in told.stderr
        assert not list(tmp_path.rglob("*.draft"))
    assert forked.run(*words).returncode == 0


def test_a_damaged_archive_is_said(table_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=np.random.default_rng(0).random((50_000, 3), np.float32))
    whole = file.read_bytes()
    for at, said in ((200, "cannot read .*x.npz as .npz"), (300_000, "cannot read rows|it holds NaN")):
        file.write_bytes(whole[:at] + b"\xff" * 100 + whole[at + 100 :])
        with pytest.raises(InputError, match=said):
            scored(table_model, file, tmp_path / "o.parquet")


def test_a_batch_is_no_larger_than_the_rows(table_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 3), np.float32))
    assert len(scored(table_model, tmp_path / "x.npy", tmp_path / "o.parquet", batch=10**9)) == 5
