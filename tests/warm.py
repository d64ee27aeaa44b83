"""`dubito` and `python` for a shell, each a process forked from one that has imported torch, which takes seconds."""

from pathlib import Path

from tests import forked
from tests.forking import PYTHON, write_script

SHORT = """
import pytest
from dubito.training.evaluation import evaluate
from tests.few import few
few(patch := pytest.MonkeyPatch())
patch.setattr(evaluate, "SHIFTED", 20)
"""


def write_scripts(folder: Path) -> None:
    """Both scripts into a new folder. They calibrate and evaluate in short."""
    folder.mkdir(parents=True)
    for name, code in {"dubito": forked.DUBITO, "python": PYTHON}.items():
        write_script(folder / name, forked.address(), SHORT + code)
