"""`dubito score` of addresses: what is read and written there is what paths give."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dubito.models.manifest import Input
from tests import forked, stores
from tests.small_models import bayesian_mlp, stored

pytestmark = stores.OPEN
ONE_THREAD = "import torch; torch.set_num_threads(1); "
SMALL = ONE_THREAD + "import dubito.service.scoring.score as s; s.SECONDS = 0.005; "


@dataclass(frozen=True)
class Bucket:
    fs: Any
    environment: dict[str, str]
    folder: Path  # with m.safetensors, x.npy, and one.parquet, the scores of a run with paths alone

    def run(self, *words: str, code: str = ONE_THREAD) -> forked.Ended:
        return forked.begin(code + forked.DUBITO, words, self.folder, self.folder, self.environment).end()

    def table(self, path: str) -> Any:
        with self.fs.open(path) as file:
            return pq.read_table(file)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("score")
    stored(bayesian_mlp((3, 8, 3), "ffg-u", inducing=4), folder / "m.safetensors", input=Input(shape=(3,)))
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(3000, 3)).astype(np.float32))
    with stores.s3() as port:
        fs = stores.file_system("s3", port)
        for name in ("m.safetensors", "x.npy"):
            fs.put_file(str(folder / name), f"bucket/{name}")
        known = stores.s3_environment(port) | {"DUBITO_CACHE": str(folder / "cache")}
        one = Bucket(fs, known | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}, folder)
        ended = one.run("score", "m.safetensors", "x.npy", "one.parquet", "--samples", "4")
        assert ended.returncode == 0, ended.stderr
        yield one


def test_model_input_and_output_at_addresses(bucket: Bucket) -> None:
    words = ("score", "s3://bucket/m.safetensors", "s3://bucket/x.npy", "s3://bucket/out/o.parquet", "--samples", "4")
    ended = bucket.run(*words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "wrote s3://bucket/out/o.parquet: 3,000 rows\n"
    table, expected = bucket.table("bucket/out/o.parquet"), pq.read_table(bucket.folder / "one.parquet")
    assert table.equals(expected)
    assert json.loads(table.schema.metadata[b"dubito"])["model"] == "m"
    assert not list((bucket.folder / "cache" / "scores").iterdir())


@pytest.mark.slow
def test_an_output_that_is_there_is_compared_or_replaced(bucket: Bucket) -> None:
    words = ("score", "m.safetensors", "x.npy", "s3://bucket/out/o.parquet", "--samples", "4")
    assert bucket.run(*words, "--fresh").returncode == 0
    expected = pq.read_table(bucket.folder / "one.parquet")
    again = bucket.run(*words)
    assert again.stdout == "wrote s3://bucket/out/o.parquet: 3,000 rows, 3,000 of them by earlier runs\n"
    other = bucket.run(*words, "--seed", "1")
    assert other.returncode == 2
    assert "s3://bucket/out/o.parquet holds other predictions (seed 0, now it is 1)" in other.stderr
    assert bucket.table("bucket/out/o.parquet").equals(expected)
    fresh = bucket.run(*words, "--seed", "1", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert not bucket.table("bucket/out/o.parquet").equals(expected)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_uploads_whole_files_only(bucket: Bucket, tmp_path: Path) -> None:
    """The input is fetched anew in between, which leaves it the same input."""
    words = ("score", "m.safetensors", "s3://bucket/x.npy", "s3://bucket/killed.parquet", "--samples", "4")
    begun = forked.begin(SMALL + forked.DUBITO, list(words), bucket.folder, tmp_path, bucket.environment)
    end = time.monotonic() + 60
    while not list((bucket.folder / "cache" / "scores").glob("*/*.parts/part-*")):
        assert begun.runs, begun.end()
        assert time.monotonic() < end
        time.sleep(0.001)
    begun.send(signal.SIGKILL)
    assert begun.end().returncode == -signal.SIGKILL
    assert not bucket.fs.exists("bucket/killed.parquet")
    for copy in (bucket.folder / "cache" / "files").glob("*.npy"):
        copy.unlink()
    ended = bucket.run(*words, code=SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "of them by earlier runs" in ended.stdout
    whole = bucket.run("score", "m.safetensors", "x.npy", "whole.parquet", "--samples", "4", code=SMALL)
    assert whole.returncode == 0, whole.stderr
    assert bucket.table("bucket/killed.parquet").equals(pq.read_table(bucket.folder / "whole.parquet"))


@pytest.mark.parametrize(
    ("rows", "output", "said"),
    [
        ("s3://bucket/pictures/", "o.parquet", "s3://bucket/pictures/ came; expected the address of one file"),
        ("s3://bucket/day-*.csv", "o.parquet", "s3://bucket/day-*.csv cannot be read: there is no such file"),
        ("s3://bucket/none.csv", "o.parquet", "there is no such file; expected none.csv in bucket"),
        ("s3://bucket/bad.npy", "o.parquet", "cannot read s3://bucket/bad.npy as .npy"),
        ("x.npy", "https://host/o.parquet", "OUTPUT is https://host/o.parquet; expected a path, or an address"),
        ("x.npy", "scores.csv", "OUTPUT is scores.csv, and scores are written as Parquet: name it so (scores.parquet)"),
        ("x.npy", "s3://bucket/", "OUTPUT is s3://bucket/; expected a path, or an address"),
        ("x.npy", "s3://bucket/theirs.txt", "s3://bucket/theirs.txt is no output of `dubito score`"),
        ("x.npy", "s3://nowhere/o.parquet", "there is no bucket nowhere; expected one"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(bucket: Bucket, rows: str, output: str, said: str) -> None:
    bucket.fs.pipe_file("bucket/bad.npy", b"no array")
    bucket.fs.pipe_file("bucket/theirs.txt", b"mine")
    ended = bucket.run("score", "m.safetensors", rows, output, "--samples", "4")
    assert ended.returncode == 2, ended.stdout
    assert said in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert bucket.fs.cat_file("bucket/theirs.txt") == b"mine"
    assert not list((bucket.folder / "cache" / "scores").glob("*/*"))  # none of them had begun
