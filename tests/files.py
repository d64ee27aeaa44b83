"""Files that tests look for."""

import sys
from pathlib import Path

import pytest


def files_in(folder: Path) -> set[str]:
    """What lies in a folder, less the logs that are written where tensorboard is installed."""
    return {file.name for file in folder.iterdir() if file.suffix != ".tensorboard"}


def installed_command() -> Path:
    """The script `dubito` beside this Python. Skips where the package is only on PYTHONPATH."""
    script = Path(sys.executable).with_name("dubito")
    if not script.exists():
        pytest.skip(f"the package is not installed: there is no {script}")
    return script
