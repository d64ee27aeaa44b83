"""The command `dubito`: joins the commands of the rooms and turns their errors into one line."""

import errno
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from dubito import __version__
from dubito.models.errors import DubitoError
from dubito.models.numerics.cores import before_torch

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without space for more
ROOMS = ("models", "training", "service", "deploy")  # the order of their commands in --help

app = typer.Typer(
    name="dubito",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: [Ritter21] in a help text is no markup, and rich is slow to import
    pretty_exceptions_enable=False,
)


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dubito {__version__}")
        raise typer.Exit


@app.callback()
def dubito(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Bayesian networks that say how far their answers can be trusted."""


for room in ROOMS:
    if find_spec(f"dubito.{room}"):
        app.add_typer(import_module(f"dubito.{room}.cli").app)


def main() -> None:
    """The script's entry point. Typer itself turns Ctrl-C in a command into exit code 130."""
    before_torch()
    try:
        _run()
    except OSError as error:
        if error.errno not in (errno.EPIPE, *FULL):
            raise
        if sys.stdout is not None:  # what is left in it can go nowhere, and would be a traceback at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read the output wants no more of it
            sys.exit(1)
        where = f" to {error.filename}" if error.filename is not None else ""
        typer.echo(f"error: cannot write{where}: {error.strerror}. Make room, or write to another disk.", err=True)
        sys.exit(2)


def _run() -> None:
    """The command, up to the last of its output."""
    try:
        app()
    except DubitoError as error:
        typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
        sys.exit(2)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
