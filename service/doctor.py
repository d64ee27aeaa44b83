"""`dubito doctor`: versions, devices, what is missing and how to get it. No check of it may raise."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from dubito import __version__

REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*?\bextra\s*==\s*['\"]([^'\"]+)['\"])?")
CLAUSE = re.compile(r"(>=|~=|==)\s*([0-9.]+)")
DEVELOPMENT = ("dev", "bench")  # extras of those who work on dubito itself
COMPILERS = ("cc", "gcc", "clang")


def examine() -> dict[str, Any]:
    """What is here, as JSON has it. `serving.works` says whether `dubito serve` can answer."""
    packages, extras = _packages()
    reasons = [f"{name} {one['state']}" for name, one in packages.items() if one["state"] != "ok"]
    devices: list[dict[str, Any]] = []
    notes: list[str] = []
    if not packages:
        notes.append("dubito itself is not installed as a package, so its requirements are not known")
    if fault := _failure(lambda: devices.extend(_devices(notes))):
        reasons.append(f"torch: {fault}")
    elif not reasons and (fault := _failure(_answer)):
        reasons.append(fault)
    return {
        "dubito": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "serving": {"works": not reasons, "reasons": reasons},
        "devices": devices,
        "packages": packages,
        "extras": extras,
        "notes": notes,
    }


def _packages() -> tuple[dict[str, dict[str, str | None]], dict[str, dict[str, Any]]]:
    """Those that serving needs, and the extras, by what the installed package says of itself."""
    packages: dict[str, dict[str, str | None]] = {}
    extras: dict[str, dict[str, Any]] = {}
    for name, wanted, extra in _requirements():
        if extra is None:
            packages[name] = _package(name, wanted)
        elif extra not in DEVELOPMENT:
            part = extras.setdefault(
                extra, {"installed": True, "packages": {}, "how": f"pip install 'dubito[{extra}]'"}
            )
            part["packages"][name] = _package(name, wanted)
            part["installed"] &= part["packages"][name]["state"] == "ok"
    return packages, extras


def _requirements() -> Iterator[tuple[str, str, str | None]]:
    """Name, versions and extra (None: always needed) of each requirement."""
    try:
        lines = requires("dubito") or []
    except PackageNotFoundError:
        return
    for line in lines:
        if match := REQUIREMENT.match(line):
            yield match[1], match[2].strip(), match[3]


def _package(name: str, wanted: str) -> dict[str, str | None]:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return {"version": None, "wanted": wanted, "state": "is missing", "how": f"pip install '{name}{wanted}'"}
    if fits(installed, wanted):
        return {"version": installed, "wanted": wanted, "state": "ok", "how": None}
    state = f"is {installed}, expected {wanted}"
    return {"version": installed, "wanted": wanted, "state": state, "how": f"pip install '{name}{wanted}'"}


def fits(installed: str, wanted: str) -> bool:
    """Whether a version is one of those wanted, by the kinds of clauses that our own requirements have."""
    have = _numbers(installed)
    for kind, text in CLAUSE.findall(wanted):
        least = _numbers(text)
        if have < least or (kind == "==" and have != least):
            return False
        if kind == "~=" and have[: len(least) - 1] != least[:-1]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """2.15.0+cu132 -> (2, 15, 0)"""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _devices(notes: list[str]) -> Iterator[dict[str, Any]]:
    """CPU and GPUs, and what would make more of them."""
    import torch

    from dubito.models.numerics.processor import processor
    from dubito.models.numerics.proof import name_of
    from dubito.service.engine.device import device_of, dtype_of

    yield {"device": "cpu", "name": processor(), "cores": os.cpu_count()}
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        yield {"device": f"cuda:{i}", "name": facts.name, "bytes": facts.total_memory}
    device = device_of("auto")
    dtype, why = dtype_of("auto", device)
    notes.append(f"models run on {device.type} in {name_of(dtype)}: {why}")
    if device.type == "cpu" and shutil.which("nvidia-smi"):
        build = "was built without CUDA" if torch.version.cuda is None else f"finds none with CUDA {torch.version.cuda}"
        notes.append(
            f"a driver for NVIDIA GPUs is here, but torch {torch.__version__} {build}: see https://pytorch.org"
        )
    if device.type == "cuda" and not any(map(shutil.which, COMPILERS)):
        notes.append("no C compiler: the fastest kernels cannot be built; on Debian: apt install gcc libc6-dev")


def _answer() -> None:
    """What the server imports, and an answer of the embedded digits."""
    import torch

    from dubito.models.artifact.artifact import load
    from dubito.models.embedded import embedded

    import_module("dubito.service.run")
    model = load(embedded("digits"))
    model.predict(torch.zeros(1, 1, 8, 8), 1, 0)


def _failure(check: Callable[[], object]) -> str:
    """In one line, why a check failed; empty if it passed. A damaged package may raise anything as it is imported."""
    try:
        check()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def lines(report: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"dubito {report['dubito']}, Python {report['python']}, {report['platform']}"
    for one in report["devices"]:
        size = f"{one['bytes'] / 1e9:.0f} GB" if "bytes" in one else f"{one['cores']} cores"
        yield f"device {one['device']}: {one['name']}, {size}"
    yield from report["notes"]
    yield "packages: " + ", ".join(f"{name} {one['version'] or 'missing'}" for name, one in report["packages"].items())
    for name, one in report["packages"].items():
        if one["how"] is not None:
            yield f"{name} {one['state']}; get it with: {one['how']}"
    for extra, part in report["extras"].items():
        names = ", ".join(f"{name} {one['version'] or 'missing'}" for name, one in part["packages"].items())
        yield f"extra {extra}: {names}" + ("" if part["installed"] else f"; get it with: {part['how']}")
    serving = report["serving"]
    yield "serving works" if serving["works"] else f"serving does not work: {'; '.join(serving['reasons'])}"
