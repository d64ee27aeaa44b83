"""The image of the CPU target, built and started for real without a Docker engine, on a base of Debian's own packages.

Needs root, buildah and mmdebstrap (Debian's packages), and what pip, npm and apt need to reach their packages: settings
that the machine has go in as build arguments, local files that they name as mounts.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

REPO = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
PORT = 18457

pytestmark = pytest.mark.slow


def settings_here() -> dict[str, str]:
    """What pip and npm are told on this machine about where packages are."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {}
    for name in ("index-url", "extra-index-url", "find-links", "cert"):
        if line := re.search(rf"^(?:global|:env:)\.{name}='(.*)'$", told.stdout, re.M):
            found[f"PIP_{name.replace('-', '_').upper()}"] = line[1]
    return found | {
        name: os.environ[name] for name in ("NPM_CONFIG_REGISTRY", "NODE_EXTRA_CA_CERTS") if name in os.environ
    }


def mounts(settings: dict[str, str]) -> list[str]:
    """Local files and folders that the settings name, at the same place inside; folders with what they link to."""
    words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    paths = {path.parent if path.name == "simple" else path for path in map(Path, words) if path.is_absolute()}
    return [f"--volume={path}:{path}:ro" for path in sorted(paths) if path.exists()]


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = ["--storage-driver=vfs", f"--root={folder / 'store'}", f"--runroot={folder / 'run'}"]

    def __call__(self, *words: str, timeout: float = 1800) -> str:
        command = ["buildah", *self.store, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, str]]:
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here: apt install buildah mmdebstrap builds the image without an engine")
    if os.geteuid() != 0:
        pytest.skip("building without an engine needs root here")
    folder = tmp_path_factory.mktemp("image")
    buildah = Builder(folder)
    tar = folder / "base.tar"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tar)], check=True
    )
    scratch = buildah("from", "scratch")
    buildah("add", scratch, str(tar), "/")
    buildah("commit", "--rm", scratch, BASE)
    tar.unlink()
    settings = settings_here()
    began = time.monotonic()
    buildah(
        "build",
        "--isolation=chroot",
        "--format=docker",
        "--pull=never",
        "--target=cpu",
        "--tag=dubito:cpu",
        "--build-arg=LOCK=deploy/requirements.lock",  # the CPU's own index may be out of reach
        "--build-arg=TORCH_INDEX=",
        *(f"--build-arg={name}={value}" for name, value in settings.items()),
        *mounts(settings),
        ".",
    )
    print(f"built in {time.monotonic() - began:.0f} s")
    yield buildah, "dubito:cpu"
    shutil.rmtree(folder / "store", ignore_errors=True)


def test_the_image_serves_as_its_unprivileged_user(image: tuple[Builder, str]) -> None:
    buildah, name = image
    container = buildah("from", "--pull=never", name)
    root = Path(buildah("mount", container))
    size = int(subprocess.run(["du", "-sbx", str(root)], capture_output=True, text=True, check=True).stdout.split()[0])
    print(f"the image's files: {size / 1e9:.2f} GB")
    command = ["buildah", *buildah.store, "run", "--isolation=chroot", container, "--"]
    began = time.monotonic()
    server = subprocess.Popen(
        [*command, "dubito", "serve", "--device", "cpu", "--port", str(PORT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        print(f"{time.monotonic() - began:.1f} s to: {said.strip()}")
        assert "dubito serves clothes (version 1), digits (version 1) on cpu" in said
        reply = httpx.post(
            f"http://127.0.0.1:{PORT}/v1/models/digits/predict", json={"inputs": [[[0.0] * 8] * 8]}, timeout=60
        )
        assert reply.status_code == 200
        assert len(reply.json()["predictions"][0]["probabilities"]) == 10
        owners = {
            Path(f"/proc/{pid}").stat().st_uid
            for pid in (entry for entry in os.listdir("/proc") if entry.isdigit())
            if _command(pid).startswith(("/opt/dubito/bin/python3", "python3 /opt/dubito"))
        }
        assert owners == {10001}
    finally:
        for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
            if f"--port {PORT}" in _command(pid) and "buildah" not in _command(pid):
                os.kill(int(pid), 15)
        code = server.wait(60)
        server.stdout.close()  # type: ignore[union-attr]
    assert code == 0


def test_nothing_of_the_build_is_kept(image: tuple[Builder, str]) -> None:
    """Neither package indexes nor certificates, nor anything that the unprivileged user could change."""
    buildah, name = image
    told = subprocess.run(["buildah", *buildah.store, "inspect", name], capture_output=True, text=True, check=True)
    settings = settings_here()
    config = told.stdout
    environment = re.search(r'"Env": \[(.*?)\]', config, re.S)
    assert environment is not None
    assert not re.search("PIP_|NPM_|NODE_", environment[1])
    for value in settings.values():
        assert value not in environment[1]
    container = buildah("from", "--pull=never", name)
    root = Path(buildah("mount", container))
    assert not (root / "etc/pip.conf").exists()
    owned_or_open = ["(", "-uid", "10001", "-o", "-perm", "-o+w", ")", "-not", "-type", "l"]
    find = ["find", str(root / "opt"), str(root / "models"), *owned_or_open]
    writable = subprocess.run(find, capture_output=True, text=True, check=True)
    assert writable.stdout == ""


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has just ended
        return ""
