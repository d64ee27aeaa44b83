"""How many processors a process may use, and how its threads wait for each other; asked before torch is imported."""

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

SPINS = {"x86_64": "2000", "AMD64": "2000"}  # about a tenth of a millisecond; 300,000 of them, as is usual, are 17
chosen: set[str] = set()  # variables that this process has set for itself, which its children may set anew


def available_cores(root: Path = Path("/")) -> int:
    """Those of the affinity, or fewer where a control group lends less time, as it does in a container with a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def before_torch() -> None:
    """Tell the libraries of this process, before they are imported, what its user has not told them.

    torch starts a thread for each core of the machine, whatever a container's limit is. Its threads spin while they
    wait for each other: where another process has one of the cores, that takes what is left of both turns.
    """
    if (cores := available_cores()) < (os.cpu_count() or 1):
        _choose("OMP_NUM_THREADS", str(cores))
    if platform.machine() in SPINS and "OMP_WAIT_POLICY" not in os.environ:
        _choose("GOMP_SPINCOUNT", SPINS[platform.machine()])


def _choose(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        chosen.add(name)


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that the control groups of this process have, in both versions of them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controllers or ".")
        inside = Path(group.lstrip("/"))
        for folder in (mounted / inside, *(mounted / parent for parent in inside.parents)):
            if not controllers:
                quota, _, period = _read(folder / "cpu.max").partition(" ")
            else:
                quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota.strip().isdigit() and period.strip().isdigit() and int(period):
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
