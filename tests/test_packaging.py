"""The folders of the repository arrive under the import name `dubito`: wheel, requirements, editable install, types and
lint. `pip install dubito` brings what serving needs, and the rest says how to get it."""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dubito.models.zoo import MOST_BYTES
from dubito.service.doctor import CLAUSE

REPO = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PACKAGE_DIR: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
STANDARD = set(sys.stdlib_module_names)
ROOMS = ("models", "training", "service", "deploy")


def modules_on_disk() -> set[str]:
    """Every module of ours as a path from the import root: `models/errors.py` is `dubito/models/errors.py`."""
    return {
        f"{package.replace('.', '/')}/{file.relative_to(REPO / folder).as_posix()}"
        for package, folder in PACKAGE_DIR.items()
        for file in (REPO / folder).rglob("*.py")
    }


def import_from(where: Path, load: str = "", **environment: str) -> Path:
    """The file of `dubito.models` as a fresh process in `where` finds it, once it has run `load`."""
    code = f"import dubito.models as m\n{load}\nprint(m.__file__)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=where, env=os.environ | environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return Path(answer.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no earlier build leaks in and the checkout stays as it is."""
    copy = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPO / file, copy)
    for folder in PACKAGE_DIR.values():
        shutil.copytree(REPO / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return path


def test_wheel_holds_every_module_and_no_other(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == modules_on_disk()
    assert "dubito/py.typed" in names


def test_wheel_holds_the_data_that_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"dubito/training/recipes/{file.name}" for file in (REPO / "training/recipes").iterdir()}
    console = {f"dubito/service/console/{file.name}" for file in (REPO / "service/console").iterdir() if file.is_file()}
    zoo = {f"dubito/models/zoo/{file.name}" for file in (REPO / "models/zoo").iterdir()}
    assert {f"dubito/models/zoo/{name}" for name in ("clothes.safetensors", "digits.safetensors", "index.json")} <= zoo
    assert {*recipes, *console, *zoo, "dubito/training/digits.npz", "dubito/training/zoo.toml"} <= names


def test_the_zoo_in_the_wheel_is_small_and_as_listed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    sizes = {info.filename: info.file_size for info in archive.infolist() if "/zoo/" in info.filename}
    listed = json.loads(archive.read("dubito/models/zoo/index.json"))
    shipped = {f"dubito/models/zoo/{one['name']}.safetensors": one["bytes"] for one in listed if one["shipped"]}
    assert {name: size for name, size in sizes.items() if name.endswith(".safetensors")} == shipped
    assert sum(shipped.values()) <= MOST_BYTES
    assert wheel.stat().st_size < MOST_BYTES + 6_000_000  # the rest: code, console, digits


def test_wheel_installs_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(archive.read(name).decode())
    assert dict(entry_points["console_scripts"]) == {"dubito": "dubito.cli:main"}


def test_wheel_is_importable_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    load = "import dubito.cli, dubito.models.manifest"  # neither needs torch, whose import takes seconds
    assert import_from(tmp_path, load, PYTHONPATH=str(tmp_path / "site")) == (
        tmp_path / "site/dubito/models/__init__.py"
    )


BESIDE = {  # imported by name, and brought by a requirement of ours
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "triton": "torch",
}
OPTIONAL = {  # used where it is installed; a copy of runtime.py stands beside the example on a device
    "tensorboard": "training/fit/log.py",
    "runtime": "deploy/edge/example.py",
}
OF_EXTRA = {  # files, or folders of them, that may import what an extra brings
    "edge": ("deploy/edge/", *(f"service/engine/{name}.py" for name in ("division", "lowering", "sessions"))),
    "grpc": ("service/grpc/",),
    "otel": ("service/traces.py",),
    "ray": ("deploy/ray/",),
    "remote": ("models/remote/store.py", "models/push.py"),
    "score": ("service/scoring/",),
    "timm": (),  # imported by its name in a string
    "train": ("training/evaluation/plots.py", "service/load.py"),
}


def dependencies(extra: str | None = None) -> set[str]:
    """Names of the distributions that pyproject.toml lists for everybody, or for an extra."""
    lines = PROJECT["project"]["dependencies" if extra is None else "optional-dependencies"]
    return {re.split(r"[\[<>=~! ;]", line)[0].lower() for line in (lines if extra is None else lines[extra])}


def imports() -> dict[str, set[str]]:
    """Third-party modules that our files import, wherever it stands in them -> the files."""
    found: dict[str, set[str]] = {}
    for folder in PACKAGE_DIR.values():
        for file in (REPO / folder).rglob("*.py"):
            for node in statements(ast.parse(file.read_text()).body):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in {name.partition(".")[0] for name in names} - {"dubito", "__future__"} - STANDARD:
                    found.setdefault(name, set()).add(file.relative_to(REPO).as_posix())
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """With those inside of them; `ast.walk` looks at every expression as well."""
    for node in body:
        yield node
        inside = [node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())]
        for part, name in product(inside, ("body", "orelse", "finalbody")):
            yield from statements(getattr(part, name, []))


def tops(name: str) -> set[str]:
    """The files and folders of a distribution in site-packages; none of one that is not installed."""
    try:
        return {Path(str(file)).parts[0] for file in distribution(name).files or []} - {"..", "__pycache__"}
    except PackageNotFoundError:
        return set()


def test_what_is_imported_is_required_and_no_more() -> None:
    """Each import comes from a dependency, or from an extra in the files that are the extra's business."""
    known = dependencies().union(*(dependencies(extra) for extra in OF_EXTRA))
    owners = BESIDE | {Path(top).stem: name for name in known for top in tops(name)}
    unused = dependencies() - {"uvicorn", "python-multipart"}  # fastapi and uvicorn load these by name
    for module, files in imports().items():
        name = owners.get(module, module)
        unused -= {name}
        for file in files:
            extra = next((extra for extra, where in OF_EXTRA.items() if file.startswith(where)), None)
            allowed = dependencies() | (dependencies(extra) if extra else set())
            assert name in allowed or OPTIONAL.get(module) == file, f"{file} imports {module}, which nothing brings"
    assert not unused, "nothing imports these: they are no dependencies"


def test_extras_are_those_whose_feature_exists() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras.keys() == {"bench", "dev", *OF_EXTRA}
    (own,) = (line for line in extras["dev"] if line.startswith("dubito["))
    ours = set(own[len("dubito[") : -1].split(","))  # what the tests need, `make setup` installs
    assert ours == OF_EXTRA.keys() - {"ray"}  # that, `make test-slow`
    for line in (*PROJECT["project"]["dependencies"], *(line for extra in OF_EXTRA for line in extras[extra])):
        clause = re.sub(r"^[A-Za-z0-9._-]+(\[[\w,]+\])?", "", line)
        assert re.fullmatch(rf"({CLAUSE.pattern})?", clause), f"`dubito doctor` cannot read {line!r}"


def closure(names: set[str]) -> set[str]:
    """The distributions that pip would install for these, by what is installed here."""
    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop()
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # for another system or another version of Python
            continue
        found.add(name)
        lines = [line for line in needed if "extra ==" not in line or (name == "uvicorn" and "standard" in line)]
        left |= {re.split(r"[\[<>=~! ;(]", line)[0].lower().replace("_", "-") for line in lines} - found
    return found


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel, installed by pip, and its dependencies, linked from here."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in closure(dependencies()):
        for top in tops(name):
            if not (site / top).is_symlink():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    done = subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


ASK = """
import contextlib, importlib.util, io, json, sys
import numpy as np
from dubito.cli import main
from dubito.models.embedded import embedded
from dubito.service.client import Client

def run(*words):
    sys.argv = ["dubito", *words]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return [code, out.getvalue(), err.getvalue()]

url, digits = sys.argv[1], str(embedded("digits"))
with Client(url) as client:
    reply = client.predict("digits", np.zeros((3, 1, 8, 8), np.float32), samples=4, seed=0)
np.save("x.npy", np.zeros((3, 1, 8, 8), np.float32))
heavy = {"onnx", "onnxruntime", "matplotlib"}
print(json.dumps({
    "here": [name for name in [*heavy, "pytest", "scipy"] if importlib.util.find_spec(name)],
    "doctor": run("doctor", "--json"),
    "told": run("doctor"),
    "loaded": sorted((heavy | {"torchvision"}) & set(sys.modules)),
    "served": reply["probabilities"].tolist(),
    "predict": run("predict", digits, "x.npy", "--samples", "4", "--seed", "0", "--json"),
    "export": run("export", digits, "digits.onnx"),
    "report": run("evaluate", digits, "--data", "digits", "--report", "report"),
    "plot": run("bench", "http", url, "--seconds", "0.1", "--plot", "load.png"),
}))
"""


@pytest.mark.slow
def test_a_fresh_environment_serves_and_predicts(fresh: Path, tmp_path: Path) -> None:
    """From the wheel and what it requires: nothing of development, no extra; what needs one says so in one line."""
    check_environment(fresh, tmp_path)


@pytest.mark.slow
def test_pip_install_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """As a user does, from the package index."""
    folder = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    command = [str(folder / "bin" / "pip"), "install", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    (tmp_path / "work").mkdir()
    check_environment(folder / "bin", tmp_path / "work")


def check_environment(bin_: Path, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    serve = [str(bin_ / "dubito"), "serve", "--port", "0", "--set", "buckets=4", "--set", "plan_seconds=0"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(serve, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            addresses = (re.search(r"console (http://\S+)/", line) for line in server.stdout)
            address = next(filter(None, addresses), None)
            assert address is not None, (folder / "log").read_text()
            ask = [str(bin_ / "python"), "-c", ASK, address[1]]
            answer = subprocess.run(ask, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
            assert answer.returncode == 0, answer.stderr
        finally:
            server.terminate()
    said = json.loads(answer.stdout)
    assert said["here"] == []
    code, out, _ = said["doctor"]
    facts = json.loads(out)
    assert (code, facts["serving"]) == (0, {"works": True, "reasons": []})
    assert facts["packages"].keys() == dependencies()
    assert {extra: part["installed"] for extra, part in facts["extras"].items()} == dict.fromkeys(OF_EXTRA, False)
    assert said["told"][1].endswith("serving works\n")
    assert "get it with: pip install 'dubito[edge]'" in said["told"][1]
    assert said["loaded"] == []  # a doctor needs none of these
    assert np.allclose(said["served"], 0.1, atol=0.9)
    rows = json.loads(said["predict"][1])["predictions"]
    assert np.allclose([row["probabilities"] for row in rows], said["served"], atol=1e-5)
    for name, extra, missing in (("export", "edge", "onnx"), ("report", "train", "matplotlib"), ("plot", "train", "m")):
        code, out, err = said[name]
        assert (code, out) == (2, ""), said[name]
        assert re.fullmatch(rf"error: {missing}.* not installed; .* pip install 'dubito\[{extra}\]'\n", err), err


def test_editable_install_imports_the_checkout() -> None:
    """From the root of the checkout too, where a folder of our name would come first."""
    assert import_from(REPO) == REPO / "models/__init__.py"


def test_every_room_is_packaged() -> None:
    folders = {"root", *(room for room in ROOMS if (REPO / room / "__init__.py").exists())}
    assert set(PACKAGE_DIR.values()) == folders


def test_type_checkers_see_every_room_and_root_file() -> None:
    root_files = {file.name: file for file in (REPO / "root").iterdir() if file.is_file()}
    rooms = {folder: REPO / folder for folder in PACKAGE_DIR.values() if folder != "root"}
    links = list((REPO / ".types/dubito").iterdir())
    assert all(link.is_symlink() and not link.readlink().is_absolute() for link in links)
    assert {link.name: link.resolve() for link in links} == root_files | rooms


LINES = ("import {}", "import {}.errors", "from {} import errors", "from {}.errors import E")
BARE = [line.format(name) for name in ("root", *ROOMS) for line in LINES]


@pytest.fixture(scope="module")
def banned() -> str:
    """What ruff says of all lines at once."""
    return ruff("\n".join(BARE))


@pytest.mark.parametrize("line", BARE)
def test_lint_bans_the_bare_names(line: str, banned: str) -> None:
    assert re.search(rf":{BARE.index(line) + 1}:\d+: TID251 ", banned), banned


def test_lint_allows_our_import_name_and_the_letters_of_the_papers() -> None:
    assert ruff("from dubito.models.errors import DubitoError\n\nZ_r, Ψ = 0, DubitoError  # σ² − λ\n") == ""


def ruff(code: str) -> str:
    """What ruff, set up as for a file of this repository, says about the code."""
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise"]
    command += ["--stdin-filename", "tests/test_lint.py", "-"]
    return subprocess.run(command, cwd=REPO, input=code, capture_output=True, text=True, timeout=60).stdout
