"""Who may import what: `service -> models <- training`, `deploy -> service, models`, no pickle, no needless seconds."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
MAY_IMPORT = {
    "models": {"models"},
    "training": {"training", "models"},
    "service": {"service", "models"},
    "deploy": {"deploy", "service", "models"},
    "root": {"models", "training", "service", "deploy"},
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "torch.save"}
FILES = [file.relative_to(REPO) for room in MAY_IMPORT for file in sorted((REPO / room).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted name of each import, wherever in the file it stands: `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(tree: ast.AST) -> set[str]:
    """`import dubito.models.errors` and `from dubito import models` both give `models`."""
    parts = [name.split(".") for name in imported(tree)]
    return {part[1] for part in parts if part[0] == "dubito" and len(part) > 1 and part[1] in MAY_IMPORT}


def pickles_used(tree: ast.AST) -> set[str]:
    """The imports and attributes, such as `torch.load`, that read or write pickles, and `allow_pickle` unless False."""
    names = set(imported(tree)) | {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keywords = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    }
    return keywords | {name for name in names if any(f"{name}.".startswith(f"{banned}.") for banned in PICKLES)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_run_in_one_direction(file: Path) -> None:
    assert rooms_imported(ast.parse((REPO / file).read_text())) <= MAY_IMPORT[file.parts[0]]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_pickle(file: Path) -> None:
    assert pickles_used(ast.parse((REPO / file).read_text())) == set()


def test_the_checks_see_what_they_should() -> None:
    code = (
        "import dubito.models.errors\nfrom dubito import service\ndef f():\n    from dubito.training.fit.fit import fit"
    )
    assert rooms_imported(ast.parse(code)) == {"models", "service", "training"}
    code = "from pickle import loads\nfrom torch import load\ntorch.save(x)\nnp.load(x, allow_pickle=True)\nz.load(x)"
    assert pickles_used(ast.parse(code)) == {"pickle.loads", "torch.load", "torch.save", "allow_pickle=True"}
    assert pickles_used(ast.parse("np.load(x, allow_pickle=False)\nloads(x)\ntorch.loader")) == set()


WITHOUT_COMPILER = """
import sys
from contextlib import nullcontext
from dubito.models import load
from dubito.models.embedded import embedded
from dubito.service.engine.budget import Budget
from dubito.service.engine.engine import Engine

model = load(embedded())
assert model.card.input is not None
Engine(model, [1, 2], share=Budget(1 << 30).share()).warm(4, nullcontext())
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_neither_loading_nor_serving_imports_the_compiler() -> None:
    """Two seconds of every command: arithmetic on the meta device would, where a file is checked, and so would modes
    that see every operator, where a device proves itself and memory is measured."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
