"""How many processors a process takes itself to have."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dubito.models.numerics.cores import SPINS, available_cores

MINE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(root: Path, groups: str, **files: str) -> Path:
    """The part of a machine's files that tells of control groups."""
    for path, text in {"proc/self/cgroup": groups, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, MINE),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, MINE),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, min(MINE, 99)),
        ("0::/pod/box\n", {"sys/fs/cgroup/pod/cpu.max": "20000 100000", "sys/fs/cgroup/pod/box/cpu.max": "max 1"}, 1),
        (
            "4:cpuset:/\n3:cpu,cpuacct:/docker/1\n0::/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            "3:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            MINE,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "what 0"}, MINE),
    ],
)
def test_a_limit_of_the_control_group_counts(groups: str, files: dict[str, str], cores: int, tmp_path: Path) -> None:
    assert available_cores(machine(tmp_path, groups, **files)) == cores


def test_machines_without_control_groups(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == MINE


@pytest.mark.skipif(MINE < 2 or not hasattr(os, "sched_setaffinity"), reason="one processor: nothing can be taken away")
def test_a_command_tells_torch_before_it_is_imported() -> None:
    """In a process of its own that has one processor of several; what a user has said stays."""
    code = (
        "import os, sys; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "from dubito.cli import main; sys.argv = ['dubito', '--version']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, os.environ.get('OMP_NUM_THREADS'), os.environ.get('GOMP_SPINCOUNT'))"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}

    def told(**given: str) -> list[str]:
        words = [sys.executable, "-c", code]
        run = subprocess.run(words, env=clean | given, capture_output=True, text=True, check=True, timeout=120)
        return run.stdout.splitlines()[-1].split()

    imported, threads, spins = told()
    assert (imported, threads) == ("False", "1")
    assert spins == SPINS.get(platform.machine(), "None")
    assert told(OMP_NUM_THREADS="3", OMP_WAIT_POLICY="active") == ["False", "3", "None"]
    assert told(GOMP_SPINCOUNT="7")[2] == "7"
