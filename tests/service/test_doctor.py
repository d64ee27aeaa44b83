"""`dubito doctor` where something is wrong: it says what and how to mend it, and never fails itself.

`tests/test_packaging.py` asks it in a fresh environment, where all is well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dubito.service.doctor import fits
from tests import forked


def claim(site: Path, *requirements: str) -> dict[str, str]:
    """The environment in which the installed dubito says that it requires these."""
    info = site / "dubito-0.1.0.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        "Name: dubito",
        "Version: 0.1.0",
        *(f"Requires-Dist: {one}" for one in requirements),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": str(site)}


def test_what_is_missing_or_too_old(tmp_path: Path) -> None:
    environment = claim(tmp_path, "orjson>=99", "no-such-thing~=2.1", "numpy", "absent>=1; extra == 'edge'")
    answer = forked.run("doctor", "--json", environment=environment)
    facts = json.loads(answer.stdout)
    assert answer.returncode == 1
    assert facts["serving"]["works"] is False
    assert facts["serving"]["reasons"][1] == "no-such-thing is missing"
    assert facts["serving"]["reasons"][0].endswith("expected >=99")
    assert facts["packages"]["orjson"]["how"] == "pip install 'orjson>=99'"
    assert facts["packages"]["numpy"]["state"] == "ok"
    assert (facts["extras"]["edge"]["installed"], facts["extras"]["edge"]["how"]) == (
        False,
        "pip install 'dubito[edge]'",
    )
    assert facts["devices"][0]["device"] == "cpu"
    said = forked.run("doctor", environment=environment)
    assert said.returncode == 1
    assert "no-such-thing is missing; get it with: pip install 'no-such-thing~=2.1'" in said.stdout
    assert "extra edge: absent missing; get it with: pip install 'dubito[edge]'" in said.stdout
    assert "serving does not work: orjson is " in said.stdout.splitlines()[-1]
    assert said.stderr == ""


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            "raise OSError('libcudart.so.13: cannot open\\nshared object')",
            "torch: OSError: libcudart.so.13: cannot open",
        ),
        ("raise SystemExit(3)", "torch: SystemExit"),
        ("x = 1", "torch: "),  # another package of that name
    ],
)
def test_a_torch_that_is_damaged_is_no_traceback(tmp_path: Path, torch: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(torch)
    command = [sys.executable, "-c", forked.DUBITO, "doctor"]
    before = os.environ.get("PYTHONPATH")  # of a tree that is not installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *([before] if before else [])])}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert f"serving does not work: {said}" in answer.stdout.splitlines()[-1]
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("found", "wanted", "fit"),
    [
        ("2.15.0+cu132", ">=2.11", True),
        ("2.9", ">=2.11", False),
        ("0.54.3", "~=0.54.0", True),
        ("0.55.0", "~=0.54.0", False),
        ("3", "~=2.1", False),
        ("2.9", "~=2.1", True),
        ("1.0rc1", ">=1.0", True),
        ("0.0.9", "", True),
        ("5.0", ">=2,==4.0", False),
    ],
)
def test_versions(found: str, wanted: str, fit: bool) -> None:
    assert fits(found, wanted) is fit
