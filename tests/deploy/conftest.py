"""A real server, and the page of our own that asks the dashboard's queries."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

LIMIT = 90.0  # seconds to start on a busy machine
DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `dubito serve` with the embedded model."""
    folder = tmp_path_factory.mktemp("served")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    command = [sys.executable, "-m", "dubito", "serve", "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean, cwd=folder)
    assert process.stdout is not None
    watchdog = threading.Timer(LIMIT, process.kill)
    watchdog.start()
    try:
        greeting = next(
            (found for line in process.stdout if (found := re.search(r"console (http://\S+)/", line))), None
        )
        assert greeting, f"the server did not start: {(folder / 'log').read_text()}"
        watchdog.cancel()
        yield greeting[1]
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", DEPLOY / "grafana" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module
