"""Dockerfile, compose file and lock files, checked without an engine; each check is seen to fail on a broken copy."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LOCK, CPU_LOCK = REPO / "deploy" / "requirements.lock", REPO / "deploy" / "requirements-cpu.lock"
CUDA = re.compile(r"^(nvidia-|cuda-|triton==)")


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def lint(dockerfile: Path) -> str:
    return run(BIN / "hadolint", "--no-color", dockerfile).stdout


def validate(compose: Path) -> int:
    return run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", compose).returncode


def changed(tmp_path: Path, name: str, old: str, new: str) -> Path:
    text = (REPO / name).read_text()
    assert old in text
    copy = tmp_path / name
    copy.write_text(text.replace(old, new, 1))
    return copy


def test_the_dockerfile_is_clean() -> None:
    assert lint(REPO / "Dockerfile") == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("WORKDIR /src", "WORKDIR src", "DL3000"),
        ("--no-install-recommends ", "", "DL3015"),
        ('CMD ["dubito", "serve"]', "CMD dubito serve", "DL3025"),
        ("FROM system AS gpu", "FROM system:latest AS gpu", "DL3007"),
    ],
)
def test_the_linter_sees_what_is_wrong(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in lint(changed(tmp_path, "Dockerfile", old, new))


def test_the_compose_file_is_valid() -> None:
    assert validate(REPO / "docker-compose.yml") == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("restart: unless-stopped", "restarts: unless-stopped"),
        ("read_only: true", "read_only: [1]"),
        ("build:", "biuld:"),
    ],
)
def test_the_schema_sees_what_is_wrong(tmp_path: Path, old: str, new: str) -> None:
    assert validate(changed(tmp_path, "docker-compose.yml", old, new)) != 0


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPO / "docker-compose.yml").read_text())
    return found


def test_what_compose_names_is_there(compose: dict[str, Any]) -> None:
    """Files that are mounted, targets that are built, volumes and secrets that are declared."""
    targets = re.findall(r"^FROM .* AS (\S+)$", (REPO / "Dockerfile").read_text(), re.M)
    for name, service in compose["services"].items():
        if "build" in service:
            assert service["build"]["target"] in targets, name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (REPO / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        for secret in service.get("secrets", []):
            assert (REPO / compose["secrets"][secret]["file"]).is_file()


def test_one_profile_starts_one_server_and_the_eyes_on_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for profile, server in (("gpu", "dubito"), ("cpu", "dubito-cpu")):
        started = {name for name, service in services.items() if profile in service["profiles"]}
        assert started == {server, "prometheus", "grafana"}
        assert services[server]["networks"]["default"]["aliases"] == ["dubito"]  # what Prometheus scrapes
    assert (REPO / ".env").read_text().splitlines()[-1] == "COMPOSE_PROFILES=gpu"
    devices = services["dubito"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "reservations" not in services["dubito-cpu"]["deploy"]["resources"]


def test_every_container_is_held_small(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["restart"] == "unless-stopped", name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    assert compose["services"]["dubito"]["read_only"] is True


def pins(lock: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        name, _, rest = line.partition("==")
        found.setdefault(name, []).append(rest)
    return found


def needed(*extras: str) -> set[str]:
    """Names of the dependencies, and of what the extras bring."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    more = [text for extra in extras for text in project["optional-dependencies"][extra]]
    names = {re.split(r"[\[<>=~! ;]", text)[0].lower().replace("_", "-") for text in (*project["dependencies"], *more)}
    return names - {"dubito"}


def test_the_locks_hold_what_the_project_needs() -> None:
    """Every dependency, and what the extras of the image and of development bring, pinned; the CPU's lock is the
    image's without CUDA."""
    made = dict(re.findall(r"\(COMPILE\) (\S+) (.*)", (REPO / "Makefile").read_text()))
    assert set(made) == {"deploy/requirements.lock", "deploy/requirements-dev.lock"}
    for lock, options in made.items():
        extras = re.findall(r"--extra (\w+)", options)
        assert extras
        assert needed(*extras) <= pins(REPO / lock).keys()
        assert all(version for versions in pins(REPO / lock).values() for version in versions)
    lines = LOCK.read_text().splitlines()
    assert CPU_LOCK.read_text().splitlines() == [line for line in lines if not CUDA.match(line)]
    assert len(lines) > len(CPU_LOCK.read_text().splitlines())


def test_the_dockerfile_copies_every_room() -> None:
    """A room that the wheel needs and the image's build does not see would be found out only there."""
    rooms = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    copied = re.findall(r"^COPY (\S+) \1$", (REPO / "Dockerfile").read_text(), re.M)
    assert set(rooms) == set(copied)
    allowed = (REPO / ".dockerignore").read_text().split()
    assert {f"!{room}" for room in rooms} <= set(allowed)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28"])
def test_the_lock_resolves_for_both_kinds_of_machine(platform: str, tmp_path: Path) -> None:
    """Each pin has a wheel for it; asks the package index, and downloads none of the gigabytes."""
    words = ["pip", "install", "--dry-run", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    found = run(BIN / "uv", *words, f"--python-platform={platform}", "--target", tmp_path, "--requirement", LOCK)
    assert found.returncode == 0, found.stderr
    assert "torch==2.15.0" in found.stderr
