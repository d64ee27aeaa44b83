"""The folders of the repository arrive under the import name `dubito`: wheel, editable install, types and lint."""

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PACKAGE_DIR: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
ROOMS = ("models", "training", "service", "deploy")


def modules_on_disk() -> set[str]:
    """Every module of ours as a path from the import root: `models/errors.py` is `dubito/models/errors.py`."""
    return {
        f"{package.replace('.', '/')}/{file.relative_to(REPO / folder).as_posix()}"
        for package, folder in PACKAGE_DIR.items()
        for file in (REPO / folder).rglob("*.py")
    }


def import_from(where: Path, load: str = "", **environment: str) -> Path:
    """The file of `dubito.models` as a fresh process in `where` finds it, once a name of it has really been loaded."""
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
    embedded = {f"dubito/models/{name}.safetensors" for name in ("clothes", "digits")}
    assert {*recipes, *console, *embedded, "dubito/training/digits.npz"} <= names


def test_wheel_installs_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(archive.read(name).decode())
    assert dict(entry_points["console_scripts"]) == {"dubito": "dubito.cli:main"}


def test_wheel_is_importable_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert import_from(tmp_path, "m.bayesianize", PYTHONPATH=str(tmp_path / "site")) == (
        tmp_path / "site/dubito/models/__init__.py"
    )


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


@pytest.mark.parametrize("line", ["import {}", "import {}.errors", "from {} import errors", "from {}.errors import E"])
@pytest.mark.parametrize("name", ["root", *ROOMS])
def test_lint_bans_the_bare_names(line: str, name: str) -> None:
    assert "TID251" in ruff(line.format(name))


def test_lint_allows_our_import_name_and_the_letters_of_the_papers() -> None:
    assert ruff("from dubito.models.errors import DubitoError\n\nZ_r, Ψ = 0, DubitoError  # σ² − λ\n") == ""


def ruff(code: str) -> str:
    """What ruff, set up as for a file of this repository, says about the code."""
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise"]
    command += ["--stdin-filename", "tests/test_lint.py", "-"]
    return subprocess.run(command, cwd=REPO, input=code, capture_output=True, text=True, timeout=60).stdout
