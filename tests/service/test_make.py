"""`make serve` is the first thing that anybody does."""

import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

REPO = Path(__file__).parents[2]


def test_make_serve_answers_its_first_prediction() -> None:
    ready = REPO / ".venv" / ".ready"
    if not ready.exists() or ready.stat().st_mtime < (REPO / "pyproject.toml").stat().st_mtime:
        pytest.skip("`make serve` would install everything first: run `make setup`, then this test")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUBITO_", "MAKE", "MFLAGS"))}
    # the settings let it start sooner
    command = ["make", "--directory", str(REPO), "serve", "ARGS=--port 0 --set buckets=1 --set plan_seconds=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not (found := re.search(r"console (http://\S+/)", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            assert "dubito serves clothes (version 1), digits (version 1) on " in said
            assert "text/html" in httpx.get(found[1]).headers["content-type"]
            reply = httpx.post(f"{found[1]}v1/models/digits/predict", json={"inputs": [[[0.0] * 8] * 8]})
            assert len(reply.json()["predictions"][0]["probabilities"]) == 10
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
