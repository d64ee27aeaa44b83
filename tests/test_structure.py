"""Who may import what: `service -> models <- training`, `deploy -> service, models`, the folders of a room in one
direction, no circles, public names, no pickle, no needless seconds."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
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
FOLDER_IMPORTS = {  # the other folders of its room that a folder imports
    "models/numerics": set(),
    "models/posteriors": {"models/numerics"},
    "models/network": {"models/numerics", "models/posteriors"},
    "models/predictions": {"models/numerics", "models/network"},
    "models/conversion": {"models/numerics", "models/posteriors", "models/network", "models/predictions"},
    "models/tracing": {"models/network"},
    "models/remote": set(),
    "models/artifact": {
        "models/remote",
        "models/numerics",
        "models/network",
        "models/predictions",
        "models/conversion",
        "models/tracing",
    },
    "service/engine": set(),
    "service/scoring": {"service/engine"},
    "service/web": {"service/engine"},
    "service/grpc": {"service/web"},
    "training/data": set(),
    "training/fit": {"training/data"},
    "training/evaluation": {"training/data"},
    "deploy/edge": set(),
    "deploy/ray": set(),
}
EXPORTED = {  # by the rooms themselves
    "dubito.models": {"bayesianize", "build", "ensemble", "load", "predict", "save"},
    "dubito.service": set(),
    "dubito.training": set(),
}
PUBLIC = {  # in modules that README and docs name, or that the arguments and errors of exported names come from
    "dubito": {"__version__"},
    "dubito.models.embedded": {"embedded"},
    "dubito.models.errors": {"ArtifactError", "ConversionError", "DubitoError", "InputError", "PredictionError"},
    "dubito.models.jacobian": {"chosen_of"},
    "dubito.models.manifest": {"Card", "Classification", "Input", "Regression"},
    "dubito.models.pruning": {"prune"},
    "dubito.service.client": {"AsyncClient", "Client"},
}
NAMED_IN = {  # a method, or classes of it: the only files of models/, service/ and deploy/ with its name
    "(?i)whvi": {
        "models/posteriors/whvi.py",
        "models/posteriors/dictionary.py",
        "deploy/edge/whvi.py",
        "deploy/edge/writers.py",
    },
    r"Inducing(Layer|Factors)|\bInducing\b": {
        "models/posteriors/inducing.py",
        "models/posteriors/inducing_factors.py",
        "models/posteriors/inducing_together.py",
        "models/posteriors/dictionary.py",
        "deploy/edge/inducing.py",
    },
    r"Subnetwork(Factors|Entry)?\b|LinearisedFactors": {
        "models/posteriors/subnetwork.py",
        "models/posteriors/dictionary.py",
        "models/network/linearised.py",
        "models/network/joint.py",
        "deploy/edge/linear.py",
    },
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "torch.save"}
FILES = [file.relative_to(REPO) for room in MAY_IMPORT for file in sorted((REPO / room).rglob("*.py"))]


Nodes = Sequence[ast.AST]


def nodes_of(code: str) -> Nodes:
    return tuple(ast.walk(ast.parse(code)))


@cache
def parsed(file: Path) -> Nodes:
    return nodes_of((REPO / file).read_text())


@cache
def imported(nodes: Nodes) -> tuple[str, ...]:
    """The dotted name of each import, wherever in the file it stands: `from a import b` gives `a.b`."""
    return tuple(_imported(nodes))


def _imported(nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(nodes: Nodes) -> set[str]:
    """`import dubito.models.errors` and `from dubito import models` both give `models`."""
    parts = [name.split(".") for name in imported(nodes)]
    return {part[1] for part in parts if part[0] == "dubito" and len(part) > 1 and part[1] in MAY_IMPORT}


@cache
def file_of(name: str) -> Path | None:
    """The file of ours that an imported name stands in: `dubito.models.errors.DubitoError` -> models/errors.py."""
    first, *parts = name.split(".")
    if first != "dubito":
        return None
    if not parts or parts[0] not in MAY_IMPORT:
        parts = ["root", *parts]
    for n in range(len(parts), 0, -1):
        path = Path(*parts[:n])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (REPO / file).is_file():
                return file
    return None


@cache
def import_graph() -> dict[Path, set[Path]]:
    """Every file of ours -> those that it imports, under TYPE_CHECKING and inside functions too."""
    graph = {}
    for file in FILES:
        found = {file_of(name) for name in imported(parsed(file))}
        graph[file] = {other for other in found if other is not None and other != file}
    return graph


def folder_of(file: Path) -> Path:
    """The folder inside a room, or the file itself where it stands beside the folders."""
    return Path(*file.parts[:2])


def folder_graph() -> dict[Path, set[Path]]:
    graph: dict[Path, set[Path]] = {}
    for file, others in import_graph().items():
        folder = folder_of(file)
        graph.setdefault(folder, set()).update({folder_of(other) for other in others} - {folder})
    return graph


def circle(graph: dict[Path, set[Path]]) -> list[str]:
    """One circle of the graph, from a file or folder back to itself; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [path.as_posix() for path in error.args[1]]
    return []


def dotted(node: ast.expr) -> str:
    """`a.b.c` for the attribute of an attribute of a name; empty for attributes of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{of}.{node.attr}" if (of := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def pickles_used(nodes: Nodes) -> set[str]:
    """The imports and attributes, such as `torch.load`, that read or write pickles, and `allow_pickle` unless False."""
    names = {*imported(nodes), *(dotted(node) for node in nodes if isinstance(node, ast.Attribute))}
    keywords = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    }
    return keywords | {name for name in names if any(f"{name}.".startswith(f"{banned}.") for banned in PICKLES)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_run_in_one_direction(file: Path) -> None:
    assert rooms_imported(parsed(file)) <= MAY_IMPORT[file.parts[0]]


def test_no_two_files_import_each_other_in_a_circle() -> None:
    assert circle(import_graph()) == []


def test_no_two_folders_import_each_other_in_a_circle() -> None:
    assert circle(folder_graph()) == []


def test_folders_of_a_room_import_the_ones_listed_and_no_others() -> None:
    folders = {folder: others for folder, others in folder_graph().items() if (REPO / folder / "__init__.py").is_file()}
    within = {
        folder.as_posix(): {o.as_posix() for o in others if o in folders and o.parts[0] == folder.parts[0]}
        for folder, others in folders.items()
    }
    assert within == FOLDER_IMPORTS


@pytest.mark.parametrize("room", EXPORTED)
def test_rooms_export_the_names_listed_and_no_others(room: str) -> None:
    module = import_module(room)
    assert set(getattr(module, "__all__", ())) == EXPORTED[room]
    assert all(hasattr(module, name) for name in EXPORTED[room])


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay_where_they_are(module: str) -> None:
    assert all(hasattr(import_module(module), name) for name in PUBLIC[module])


@pytest.mark.parametrize("name", NAMED_IN)
def test_a_method_is_named_in_its_own_files_and_in_the_dictionary_only(name: str) -> None:
    found = {file.as_posix() for file in FILES if re.search(name, (REPO / file).read_text())}
    assert {file for file in found if not file.startswith("training/")} == NAMED_IN[name]


def test_a_name_of_a_class_names_one_class() -> None:
    classes = [node.name for file in FILES for node in parsed(file) if isinstance(node, ast.ClassDef)]
    assert {name for name in classes if classes.count(name) > 1} == set()


READS_WEIGHTS = Path("training/weights.py")  # the one exception: torch.load by torch's restricted unpickler


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_pickle(file: Path) -> None:
    assert pickles_used(parsed(file)) == ({"torch.load"} if file == READS_WEIGHTS else set())


def test_weights_are_read_by_the_restricted_unpickler_and_never_by_the_server() -> None:
    calls = [node for node in parsed(READS_WEIGHTS) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert [{k.arg: ast.unparse(k.value) for k in call.keywords}["weights_only"] for call in loads] == ["True"]
    reached = {file for file in FILES if file.parts[0] in ("service", "deploy", "models")}
    while more := {other for file in reached for other in import_graph()[file]} - reached:
        reached |= more
    assert READS_WEIGHTS not in reached


def test_the_checks_see_what_they_should() -> None:
    code = (
        "import dubito.models.errors\nfrom dubito import service\ndef f():\n    from dubito.training.recipe import run"
    )
    assert rooms_imported(nodes_of(code)) == {"models", "service", "training"}
    assert file_of("dubito.models.errors.DubitoError") == Path("models/errors.py")
    assert file_of("dubito.models.network.layers") == Path("models/network/layers.py")
    assert file_of("dubito.models.load") == Path("models/__init__.py")
    assert (file_of("dubito.__version__"), file_of("torch.nn")) == (Path("root/__init__.py"), None)
    code = "if TYPE_CHECKING:\n    from dubito.models.network import plan"
    assert [file_of(name) for name in imported(nodes_of(code))] == [Path("models/network/plan.py")]
    a, b, c = Path("a"), Path("b"), Path("c")
    assert circle({a: {b}, b: {c}, c: {b}}) in (["b", "c", "b"], ["c", "b", "c"])
    assert circle({a: {b, c}, b: {c}}) == []
    code = "from pickle import loads\nfrom torch import load\ntorch.save(x)\nnp.load(x, allow_pickle=True)\nz.load(x)"
    assert pickles_used(nodes_of(code)) == {"pickle.loads", "torch.load", "torch.save", "allow_pickle=True"}
    assert pickles_used(nodes_of("np.load(x, allow_pickle=False)\nloads(x)\ntorch.loader")) == set()
