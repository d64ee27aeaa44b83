"""A reader who pastes the README gets what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import write_scripts

REPO = Path(__file__).parents[1]
SHORT = (
    "--set fit.pretrain_epochs=1 --set fit.epochs=1 --set fit.likelihood_epochs=0 --set fit.warmup_epochs=1 "
    "--set network.arguments.width=4 --set network.arguments.hidden=16"
)


def script(readme: str, workdir: Path) -> str:
    """The README as a bash script of as many lines, so that bash reports the README's line numbers.

    Of a ```console block it keeps the lines after the prompt `$ `, and their continuations after `> ` where a line
    ends in a backslash. `make test` would run this test again: a `make` line is only a dry run in the repository, which
    fails if there is no such target. A ```python block is saved in `workdir` and run in a process of its own.
    """
    lines, block, continues, code = [], "", False, Path()
    for number, line in enumerate(readme.splitlines(), start=1):
        command = ""
        if line.startswith("```"):
            block = "" if block else line.removeprefix("```").strip() or "text"
            if block == "python":
                code = workdir / f"readme_line_{number}.py"
                code.touch()
                command = f"python {code.name}"
        elif block == "python":
            code.write_text(code.read_text() + line + "\n")
        elif block == "console" and line.startswith("> " if continues else "$ "):
            command = line[2:]
            continues = command.endswith("\\")
            if command.startswith("make "):
                command = f"make --directory '{REPO}' --dry-run {command.removeprefix('make ')}"
        lines.append(command)
    return "\n".join(lines)


def shown(readme: str) -> list[str]:
    """What the README shows as output: the lines of its ```console blocks that are no commands."""
    blocks = re.findall(r"^```console\n(.*?)^```", readme, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("$ ", "> "))]


def check(folder: Path, commands: str, readme: str, **more: str) -> None:
    """Runs them in one shell and one folder, so that a command finds what the one before it wrote."""
    assert commands.strip(), "the README has no commands"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | more
    environment["PATH"] = f"{folder / '.venv' / 'bin'}:{environment['PATH']}"
    # shares the script's first line; a server that the README starts ends with it
    trap = (
        """trap 'echo "README.md, line $LINENO: $BASH_COMMAND" >&2' ERR; trap 'kill $(jobs -p) 2>&- || wait' EXIT; """
    )
    command = ["bash", "-euo", "pipefail", "-c", trap + commands]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for line in shown(readme):
        assert line in answer.stdout, f"the README shows {line!r}, which its commands do not print: {answer.stdout}"
    page = (folder / "report" / "index.html").read_text()
    assert "ROC against npz:noise.npz" in page, "the README promises a ROC curve"


@pytest.mark.slow
def test_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    readme = (REPO / "README.md").read_text()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    check(tmp_path, script(readme, tmp_path), readme)


def test_readme_runs_with_a_short_training(tmp_path: Path) -> None:
    """Each command in a process that need not import torch; calibrations, evaluations, the server's start and the load
    on it are short too."""
    readme = (REPO / "README.md").read_text()
    commands = script(readme, tmp_path)
    shorter = {
        "dubito train digits --out": f"dubito train digits {SHORT} --out",
        "--keep 0.5 --epochs 2": "--keep 0.5 --epochs 1",
        "do sleep 1;": "do sleep 0.1;",
        "--rate 20 --seconds 3": "--rate 20 --seconds 1",
    }
    for command, short in shorter.items():
        assert command in commands
        commands = commands.replace(command, short)
    write_scripts(tmp_path / ".venv" / "bin")
    check(tmp_path, commands, readme, DUBITO_BUCKETS="1", DUBITO_PLAN_SECONDS="0")


def test_script_keeps_order_and_line_numbers(tmp_path: Path) -> None:
    readme = [
        "```console",
        "$ make test",
        "$ dubito a \\",
        "> --b",
        "wrote it",
        "```",
        "```python",
        "x = 1",
        "```",
        "$ no",
    ]
    kept = {2: f"make --directory '{REPO}' --dry-run test", 3: "dubito a \\", 4: "--b", 7: "python readme_line_7.py"}
    assert script("\n".join(readme), tmp_path).split("\n") == [kept.get(n, "") for n in range(1, len(readme) + 1)]
    assert (tmp_path / "readme_line_7.py").read_text() == "x = 1\n"
    assert shown("\n".join(readme)) == ["wrote it"]
