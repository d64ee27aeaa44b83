"""The pages say what is so: commands parse, names exist, and tables list all that there is and nothing else."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from dubito.cli import app
from dubito.models.conversion.architectures import OURS
from dubito.models.conversion.options import known_options
from dubito.models.manifest import Precision, Predictive
from dubito.models.names import ARCHITECTURES, LAPLACE, METHODS
from dubito.models.posteriors.subnetwork import Selection
from dubito.service.settings import read_settings
from dubito.service.web.oip import PARAMETERS
from dubito.service.web.openapi import SCHEMAS, STATUSES
from dubito.service.web.options import KNOWN
from dubito.training.config import Laplace, Recipe, Section, read_recipe
from dubito.training.names import DATA, PARTS, recipes, shipped

REPO = Path(__file__).parents[1]
README, DOCS = REPO / "README.md", REPO / "docs"
PAGES = sorted([README, REPO / "CONTRIBUTING.md", *DOCS.rglob("*.md"), REPO / "benchmarks" / "RESULTS.md"])
SOURCES = ("*.py", "*.js", "*.toml", "*.yml", "*.yaml")  # where a name may come from
ROOMS = ("root", "models", "training", "service", "deploy", "benchmarks")


# reading a page


def code_blocks(page: str) -> list[str]:
    """Fenced and indented blocks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)
    return fenced + re.findall(r"(?:^ {4}.*\n)+", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M), re.M)


def inline_code(page: str) -> list[str]:
    """What stands between backticks, which may run over the end of a line."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]


def commands(page: str, program: str) -> Iterator[list[str]]:
    """The command lines of a program, in words: in blocks, and where inline code is one."""
    lines = [line.strip().removeprefix("$ ") for block in code_blocks(page) for line in block.splitlines()]
    for line in [*lines, *inline_code(page)]:
        if line.startswith("torchrun "):  # starts the program as a module
            line = f"dubito {line.partition(' -m dubito ')[2]}"
        if line.startswith(f"{program} "):
            yield shlex.split(line.removesuffix(" &"), comments=True)


def table(page: str, heading: str) -> dict[str, str]:
    """Names in the first column -> the rest of the row, of the table whose first row begins with `heading`."""
    found = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    assert found, f"no table {heading!r}"
    rows = (row.strip("| ").split(" | ", 1) for row in found[1].splitlines())
    return {name: rest for first, rest in rows for name in re.findall(r"`([^`]+)`", first)}


def text_of(name: str) -> str:
    return (REPO / name).read_text()


def test_a_page_is_read_as_it_should_be() -> None:
    blocks = "```console\n$ dubito a b &\nout\n```\nUse `dubito c\nd` or\n\n    dubito e  # f\n\n"
    page = blocks + "| x | y |\n|---|---|\n| `a`, `b` | `c` |\n"
    assert list(commands(page, "dubito")) == [["dubito", "a", "b"], ["dubito", "e"], ["dubito", "c", "d"]]
    assert table(page, "x") == {"a": "`c`", "b": "`c`"}


# links and settings


def check_reference(page: Path) -> int:
    script = (REPO / "docs" / "reference.py").read_text()
    (page.parent / "reference.py").write_text(script)
    return subprocess.run([sys.executable, page.parent / "reference.py", "--check"], capture_output=True).returncode


def test_the_table_of_settings_is_up_to_date(tmp_path: Path) -> None:
    text = (REPO / "docs" / "operations.md").read_text()
    page = tmp_path / "operations.md"
    page.write_text(text)
    assert check_reference(page) == 0
    page.write_text(text.replace("| `port` | `8000` |", "| `port` | `9000` |"))
    assert check_reference(page) == 1


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


# commands


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that these words name, and its arguments by name; nothing is run. Errors are those of the program."""
    command: Any = typer.main.get_command(app)
    name = "dubito"
    rest = words[1:]
    while isinstance(command, typer.core.TyperGroup):
        if rest == ["--help"]:
            return name, {}
        if command.invoke_without_command and not set(rest[:1]) & set(command.commands):
            return name, command.make_context(name, rest).params
        assert set(rest[:1]) & set(command.commands), f"{name} has no command {rest[:1]}"
        name, command = f"{name} {rest[0]}", command.commands[rest[0]]
        rest = rest[1:]
    if not rest or rest == ["--help"]:
        return name, {}  # a mention of the command
    return name, command.make_context(name, rest).params


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    """Their options exist and have arguments of the right kind; what `--set` sets is a key of a recipe or a setting."""
    for words in commands(page.read_text(), "dubito"):
        check(words, page.name)


def check(words: list[str], where: str) -> None:
    try:
        name, arguments = parsed(words)
        if name == "dubito train" and arguments and not arguments["recipe"].endswith(".toml"):
            read_recipe(arguments["recipe"], arguments["changes"])
        if name == "dubito serve" and arguments:
            read_settings(None, **dict(word.split("=", 1) for word in arguments["change"] or []))
    except Exception as error:
        raise AssertionError(f"{where}: {shlex.join(words)}: {error}") from error


def helps(command: Any, name: str = "dubito") -> Iterator[tuple[str, str]]:
    """The name and the help of each command."""
    if not isinstance(command, typer.core.TyperGroup):
        yield name, str(command.help)
    else:
        if command.invoke_without_command:
            yield name, str(command.help)
        for below, one in command.commands.items():
            yield from helps(one, f"{name} {below}")


def test_examples_of_help_texts_parse() -> None:
    for name, text in helps(typer.main.get_command(app)):
        lines = [line.strip().removeprefix("Try: ") for line in text.splitlines()]
        examples = [line for line in lines if line.startswith("dubito ")]
        assert examples, f"{name} --help has no example"
        for line in examples:
            assert line.startswith(f"{name} ")
            check(shlex.split(line), f"{name} --help")


def options(command: Any) -> Iterator[Any]:
    """The parameters of all commands."""
    if isinstance(command, typer.core.TyperGroup):
        for one in command.commands.values():
            yield from options(one)
    else:
        yield from command.params


def test_no_option_has_its_own_name_for_its_value() -> None:
    """typer 0.27 turns `rates: typer.Option(metavar="RATES")` into the option --RATES."""
    for option in options(typer.main.get_command(app)):
        assert option.metavar != str(option.name).upper() or "--" not in str(option.opts), option.name


@pytest.mark.parametrize("line", ["dubito bench http URL --speed 40", "dubito train digits --set fit.epoch=1"])
def test_a_wrong_command_is_seen(tmp_path: Path, line: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Try `{line}`.\n")
    with pytest.raises(AssertionError, match=re.escape(line.rpartition(" ")[2])):
        test_commands_parse(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_and_benchmarks_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    for words in commands(page.read_text(), "make"):
        assert words[1] in targets, f"{page.name}: {shlex.join(words)}"
    shared = text_of("benchmarks/_measure.py")
    for words in commands(page.read_text(), "python -m"):
        assert words[2].startswith("benchmarks."), f"{page.name}: {shlex.join(words)}"
        source = text_of(f"{words[2].replace('.', '/')}.py") + shared
        missing = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
        assert not missing, f"{page.name}: {shlex.join(words)}"


# names


def test_names_in_code_are_names_of_the_program() -> None:
    """snake_case words in inline code: settings, fields, options, functions, tests; and paths of files."""
    files = [file for room in ROOMS for pattern in SOURCES for file in (REPO / room).rglob(pattern)]
    known = {file.stem for file in files} | {word for file in files for word in re.findall(r"\w+", file.read_text())}
    known |= {
        name for file in (REPO / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for page in PAGES:
        for code in inline_code(page.read_text()):
            for word in re.findall(r"(?<![\w/.-])[a-z]+(?:_[a-z0-9]+)+(?![\w/-])", code):
                assert word in known, f"{page.name}: `{code}`"
            for path in re.findall(rf"(?<![\w/])(?:{'|'.join(ROOMS)}|docs|tests)/[\w./-]+\.\w+", code):
                assert (REPO / path).exists(), f"{page.name}: `{code}`"


# tables


def help_of(command: str, parameter: str) -> str:
    group: Any = typer.main.get_command(app)
    (found,) = (one for one in group.commands[command].params if one.name == parameter)
    return str(found.help)


def test_help_lists_all_that_there_is() -> None:
    def listed(command: str, parameter: str) -> set[str]:
        return set(re.split(r"[\s,;()]+", help_of(command, parameter).replace(".", " ")))

    assert set(recipes()) <= listed("train", "recipe")
    assert {*METHODS, LAPLACE} <= listed("count", "method")
    assert {*ARCHITECTURES, "torchvision/NAME"} <= listed("count", "architecture")
    for command in ("laplace", "calibrate", "evaluate"):
        assert set(DATA) <= listed(command, "data")
        assert set(get_args(Predictive)) <= listed(command, "method")
    for command in ("calibrate", "evaluate"):
        assert {*PARTS, "all"} <= listed(command, "part")
    assert set(get_args(Selection)) <= listed("laplace", "select")
    assert set(get_args(Precision)) <= listed("laplace", "precision")


def test_every_architecture_that_is_named_can_be_built() -> None:
    assert tuple(OURS) == ARCHITECTURES


def test_the_readme_lists_every_recipe_and_method() -> None:
    page = README.read_text()
    rows = table(page, "command")
    names = [name.removeprefix("dubito train ").split()[0] for name in rows]
    assert sorted(names) == sorted(recipes())
    assert {name.partition(":")[0] for name in names} == set(shipped())
    for name, row in zip(names, rows.values(), strict=True):
        assert row.endswith(f"`{read_recipe(name).posterior.method}`"), name
    assert sorted(table(page, "name")) == sorted([*METHODS, LAPLACE])


def test_training_lists_every_key_of_a_recipe() -> None:
    page = text_of("docs/training.md")
    kinds = {name: get_args(field.annotation) or (field.annotation,) for name, field in Recipe.model_fields.items()}
    sections = {name: one for name, some in kinds.items() for one in some if one in Section.__subclasses__()}
    assert {*table(page, "key"), *sections} == Recipe.model_fields.keys()
    for name, section in sections.items():
        assert table(page.partition(f"\n`[{name}]`")[2], "key").keys() == section.model_fields.keys(), name
    names = set(inline_code(table(page.partition("`[posterior]`")[2], "key")["method"]))
    assert names == {*METHODS, LAPLACE}
    assert set(inline_code(table(page.partition("`[data]`")[2], "key")["name"])) == set(DATA)
    options = set(inline_code(table(page.partition("`[posterior]`")[2], "key")["options"]))
    assert options >= known_options().keys() - {"M_out", "M_in"}
    of_whvi = table(page.partition("## Walsh–Hadamard VI")[2], "option")
    assert of_whvi.keys() <= {*known_options(), "spread"}
    architectures = inline_code(table(page.partition("`[network]`")[2], "key")["architecture"])
    assert architectures == [*ARCHITECTURES, "torchvision/NAME", "timm/NAME", "package.module:function"]


def test_laplace_lists_every_option() -> None:
    page = text_of("docs/laplace.md")
    assert table(page, "key of `posterior.options`").keys() == Laplace.model_fields.keys()
    assert set(inline_code(table(page, "key of `posterior.options`")["select"])) == set(get_args(Selection))


def test_serving_lists_every_option_field_and_status() -> None:
    page = text_of("docs/serving.md")
    assert table(page, "option").keys() == set(KNOWN)
    named = set(inline_code(page))
    for schema in ("Predicted", "Classified", "Regressed", "Ood", "Model"):
        assert SCHEMAS[schema]["properties"].keys() <= named, schema
    statuses = {
        int(status) for status in re.findall(r"^\| (\d{3})(?:, (\d{3}))? \|", page, re.M) for status in status if status
    }
    assert statuses == {*STATUSES, 405}
    of_v2 = set(inline_code(page.partition("## Open Inference Protocol")[2].partition("\n## ")[0]))
    assert set(PARAMETERS) <= of_v2


def required(file: Path) -> set[str]:
    """Arguments that a benchmark cannot do without."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            name = ast.literal_eval(node.args[0])
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            optional = options.get("nargs") == "'*'" if not name.startswith("-") else "required" not in options
            found |= set() if optional else {name}
    return found


def test_make_bench_runs_what_needs_nothing_else() -> None:
    lists = dict(re.findall(r"^(NEED_\w+) := (.*)$", (REPO / "Makefile").read_text(), re.M))
    with_data, others = lists["NEED_DATA"].split(), {*lists["NEED_FILES"].split(), *lists["NEED_EXTRAS"].split()}
    files = {file.stem: file for file in (REPO / "benchmarks").glob("[a-z]*.py")}
    assert {*with_data, *others} <= files.keys()
    for name in files.keys() - others:
        assert required(files[name]) <= ({"--data-root"} if name in with_data else set()), name
