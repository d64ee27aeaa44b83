"""The root command in processes of its own: it starts light, and it fails in one line."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dubito.cli import app
from tests.files import installed_command


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def run_as_command(body: str) -> subprocess.CompletedProcess[str]:
    """Runs `dubito try-it`, a command of this body joined to the real app."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return run(
        sys.executable,
        "-c",
        "import os, signal, sys\n"
        "from dubito import cli\n"
        "from dubito.models.errors import DubitoError\n"
        f"@cli.app.command()\ndef try_it() -> None:\n{indented}\n"
        "sys.argv = ['dubito', 'try-it']\n"
        "cli.main()\n",
    )


def test_version_of_the_installed_command() -> None:
    assert run(installed_command(), "--version").stdout == f"dubito {version('dubito')}\n"


def test_version_of_the_module() -> None:
    assert run(sys.executable, "-m", "dubito", "--version").stdout == f"dubito {version('dubito')}\n"


def test_help_answers_without_torch() -> None:
    """Each room's commands are listed, and nothing heavy was imported to list them."""
    code = (
        "import atexit, sys\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'scipy', 'PIL', 'safetensors'}\n"
        "atexit.register(lambda: print('imported:', sorted(heavy & set(sys.modules))))\n"
        "sys.argv = ['dubito', '--help']\n"
        "from dubito.cli import main\n"
        "main()\n"
    )
    answer = run(sys.executable, "-c", code)
    assert answer.returncode == 0, answer.stderr
    assert "inspect" in answer.stdout
    assert answer.stdout.endswith("imported: []\n")


def test_every_command_has_a_help() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    assert group.commands
    for name, command in group.commands.items():
        assert command.help, f"`dubito {name}` has no docstring"
        answer = CliRunner().invoke(app, [name, "--help"])
        assert answer.exit_code == 0
        assert answer.stdout.startswith(f"Usage: dubito {name}")


def test_our_error_is_one_line_and_exit_code_2() -> None:
    answer = run_as_command("raise DubitoError('the file is cut short.\\nTrain again.')")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "error: the file is cut short. Train again.\n"


def test_another_error_keeps_its_traceback() -> None:
    answer = run_as_command("raise RuntimeError('a bug')")
    assert answer.returncode == 1
    assert "Traceback" in answer.stderr


def test_ctrl_c_exits_130_without_traceback() -> None:
    # a shell that runs the tests in the background has its children ignore Ctrl-C
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    answer = run_as_command(f"{heed}; os.kill(os.getpid(), signal.SIGINT)")
    assert answer.returncode == 130
    assert "Traceback" not in answer.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    answer = run(installed_command(), "no-such-command")
    assert answer.returncode == 2
    assert "no-such-command" in answer.stderr


def written_to(stdout: int, *command: str | Path, unbuffered: bool) -> tuple[int, str]:
    """Exit code and stderr."""
    env = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, env=env)
    return done.returncode, done.stderr


SAYING = [  # a table, a few characters of JSON, more than a buffer holds, typer's own words
    ("zoo",),
    ("count", "lenet", "--method", "ffg-u", "--json"),
    ("zoo", "--json"),
    ("--help",),
]


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", SAYING, ids=" ".join)
def test_a_reader_that_has_read_enough_ends_a_command_quietly(command: tuple[str, ...], unbuffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert written_to(writer, installed_command(), *command, unbuffered=unbuffered) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", SAYING, ids=" ".join)
def test_a_full_disk_under_the_output_is_one_line(command: tuple[str, ...], unbuffered: bool) -> None:
    with open("/dev/full", "w") as full:
        code, said = written_to(full.fileno(), installed_command(), *command, unbuffered=unbuffered)
    assert (code, said) == (2, "error: cannot write: No space left on device. Make room, or write to another disk.\n")


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    failed = run_as_command("open('/nowhere/at/all')")
    assert "Traceback" in failed.stderr
    assert "FileNotFoundError" in failed.stderr
