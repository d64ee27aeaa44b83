"""Training data at addresses: the same examples as from a path, verified and cached as artifacts are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from dubito.training.data.sources import read_data
from tests import forked, stores

pytestmark = stores.OPEN
READ = (
    "import sys; from dubito.training.data.sources import read_data\n"
    "for name in sys.argv[1:]: print(read_data(name).hash())"
)
SAFELY = (
    "import sys; from dubito.models.errors import DubitoError\n"
    "from dubito.training.data.sources import read_data\n"
    "for name in sys.argv[1:]:\n"
    "    try: read_data(name)\n"
    "    except DubitoError as error: print(error)\n"
)


@dataclass(frozen=True)
class Places:
    folder: Path  # with a.npz and a.csv
    s3: str  # of that folder
    https: str
    web: stores.Web
    environment: dict[str, str]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, 3)).astype(np.float32), rng.integers(0, 2, 600)
    np.savez(folder / "a.npz", x=x, y=y)
    lines = [f"{a},{b},{c},{'yes' if label else 'no'}" for (a, b, c), label in zip(x.tolist(), y.tolist(), strict=True)]
    (folder / "a.csv").write_text("\n".join(["one,two,three,bought", *lines]))
    authority, server = stores.make_certificate(folder)
    with stores.web(server) as web, stores.s3() as port:
        fs = stores.file_system("s3", port)
        for name in ("a.npz", "a.csv"):
            fs.put_file(str(folder / name), f"bucket/{name}")
            web.files[f"/{name}"] = (folder / name).read_bytes()
        web.files["/bad.csv"] = b"one,two\n1\n"
        known = stores.s3_environment(port) | {"SSL_CERT_FILE": str(authority), "DUBITO_CACHE": str(folder / "cache")}
        yield Places(folder, "s3://bucket", f"https://{stores.HOST}:{web.port}", web, known)


def test_examples_are_those_of_the_file(places: Places) -> None:
    names = [f"{kind}:{root}/a.{kind}" for kind in ("npz", "csv") for root in (places.s3, places.https)]
    pinned = f"npz:{places.https}/a.npz#sha256={sha256((places.folder / 'a.npz').read_bytes()).hexdigest()}"
    ended = forked.run(*names, pinned, code=READ, environment=places.environment)
    assert ended.returncode == 0, ended.stderr
    npz, csv = (read_data(f"{kind}:{places.folder}/a.{kind}").hash() for kind in ("npz", "csv"))
    assert ended.stdout.split() == [npz, npz, csv, csv, npz]


def test_what_cannot_be_data_is_one_line_with_the_address(places: Places) -> None:
    said = {
        f"folder:{places.s3}/pictures": "is an address; expected a folder here. Copy it first, or save its pictures",
        f"csv:{places.https}/a.csv?X-Amz-Signature=s3cr3t": "has a query, which the artifact would record",
        f"csv:{places.https}/bad.csv": f"{places.https}/bad.csv: line 2 has 1 fields; the header has 2.",
        f"npz:{places.https}/bad.csv": f"{places.https}/bad.csv is no .npz file",
        f"csv:{places.https}/none.csv": "there is no such file; expected a file in",
        "csv:http://host/a.csv": "http:// came; expected a path, or an address",
    }
    ended = forked.run(*said, code=SAFELY, environment=places.environment)
    assert ended.returncode == 0, ended.stderr
    for line, expected in zip(ended.stdout.splitlines(), said.values(), strict=True):
        assert expected in line
        assert "s3cr3t" not in line


@pytest.mark.slow
def test_training_and_evaluation_by_address_find_what_paths_find(places: Places, tmp_path: Path) -> None:
    """The artifact records the address and the data's hash."""
    few = ["--set", "fit.epochs=2", "--set", "fit.pretrain_epochs=0", "--set", "data.test=0.2", "--device", "cpu"]
    figures = []
    for root, name in ((str(places.folder), "path"), (places.https, "address")):
        file = tmp_path / f"{name}.safetensors"
        ended = forked.run("train", f"csv:{root}/a.csv", *few, "--out", file, environment=places.environment)
        assert ended.returncode == 0, ended.stderr
        words = ("evaluate", file, "--data", f"csv:{root}/a.csv", "--json")
        ended = forked.run(*words, environment=places.environment)
        assert ended.returncode == 0, ended.stderr
        known = json.loads(ended.stdout)
        figures.append({key: known[key] for key in known if isinstance(known[key], float)})
        inspected = json.loads(forked.run("inspect", file, "--json").stdout)
        assert f"csv:{root}/a.csv" in json.dumps(inspected)
    assert figures[0]
    assert figures[0] == figures[1]


def test_a_prediction_of_a_file_at_an_address(places: Places, tmp_path: Path) -> None:
    from dubito.models.embedded import embedded

    pixels = np.random.default_rng(1).integers(0, 255, (2, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    places.web.files["/x.npy"] = (tmp_path / "x.npy").read_bytes()
    both = []
    for where in (str(tmp_path / "x.npy"), f"{places.https}/x.npy"):
        words = ("predict", embedded("digits"), where, "--samples", "2", "--seed", "1", "--json")
        ended = forked.run(*words, environment=places.environment)
        assert ended.returncode == 0, ended.stderr
        rows = json.loads(ended.stdout)["predictions"]
        assert [row.pop("input") for row in rows] == [f"{where}[0]", f"{where}[1]"]
        both.append(rows)
    assert both[0] == both[1]
