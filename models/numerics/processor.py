"""What the system tells of this machine's CPU: what was timed or compiled on one is of no use on another."""

import platform
from functools import cache
from pathlib import Path

import torch

NAMES = ("model name", "CPU implementer", "CPU part")  # of x86-64; of ARM


def processor() -> str:
    """Its name, or the numbers that stand for it, and the instructions that torch uses."""
    known = ", ".join(filter(None, map(_line, NAMES))) or platform.processor() or platform.machine()
    return f"{known}, {torch.backends.cpu.get_cpu_capability()}"


def features() -> str:
    """The instructions that it has; empty where the system does not list them."""
    return _line("flags") or _line("Features")


@cache
def _lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []


def _line(name: str) -> str:
    """What stands behind this name for the first core."""
    pairs = (line.split(":", 1) for line in _lines() if ":" in line)
    return next((value.strip() for key, value in pairs if key.strip() == name), "")
