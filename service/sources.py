"""Where the files of models lie: the versions at the paths given, and why a folder of a repository is not one."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dubito.models.errors import ArtifactError

FILE = "model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
VERSION = re.compile(r"[0-9]{1,18}")

Key = tuple[str, str]  # name and version


@dataclass(frozen=True)
class Source:
    """The file of a version, not yet read. A file that was overwritten is another source."""

    name: str
    version: str
    path: Path
    stamp: tuple[int, int, int]  # inode, time of modification, size


@dataclass
class Scan:
    sources: dict[Key, Source] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)  # folders of a repository that cannot be served, and why
    faults: list[str] = field(default_factory=list)  # of the paths given

    def checked(self) -> "Scan":
        """For the paths of a command line: raises the first fault."""
        if self.faults:
            raise ArtifactError(self.faults[0])
        return self


def find(paths: Sequence[Path]) -> Scan:
    """The versions at the paths: an artifact is version 1, named after its file; a repository has NAME/VERSION/FILE.

    A folder that cannot be served leaves the others as they are. Hidden folders are no models.
    """
    scan = Scan()
    for path in paths:
        if path.is_file():
            _add(scan, path.stem, "1", path)
        elif path.is_dir():
            _add_repository(scan, path)
        else:
            scan.faults.append(f"there is no {path}; expected an artifact or a model repository.")
    return scan


def _add_repository(scan: Scan, root: Path) -> None:
    here = Scan()
    for name, version, place in _places(root, here):
        if fault := _fault(root, place, name, version):
            here.refused[_readable(name), _readable(version)] = _readable(fault)
        else:
            _add(here, name, version, root / place)
    if not here.sources:
        why = next(iter(here.refused.values()), f"expected NAME/VERSION/{FILE} with a whole number for a version.")
        scan.faults.append(f"{root} holds no model: {why}")
    for source in here.sources.values():
        _add(scan, source.name, source.version, source.path)
    scan.refused |= here.refused


def _places(root: Path, scan: Scan) -> Iterator[tuple[str, str, Path]]:
    """Each NAME/VERSION/FILE below the root, links that lead nowhere included, and NAME/FILE with no version."""
    for name in _folders(root, Path(), scan):
        if os.path.lexists(root / name / FILE):
            yield name, "", Path(name, FILE)
        for version in _folders(root, Path(name), scan):
            if os.path.lexists(root / name / version / FILE):
                yield name, version, Path(name, version, FILE)


def _folders(root: Path, below: Path, scan: Scan) -> list[str]:
    try:
        with os.scandir(root / below) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        scan.refused[_readable(str(below)), ""] = f"the folder cannot be read: {error.strerror}."
        return []


def _fault(root: Path, place: Path, name: str, version: str) -> str:
    """Why a file of a repository is not the version of a model; empty if it is."""
    if not NAME.fullmatch(name):
        return f"the folder {name!r} is no name for a model; expected letters, digits, '.', '_' and '-'."
    if not version:
        return f"{place} lies in no folder of a version; move it to {name}/1/{FILE}."
    if not VERSION.fullmatch(version):
        return f"{place}: {version!r} is no version; expected a whole number: {name}/1/{FILE}."
    try:
        if not (root / place).is_file():
            return f"{place} is no file, or a link to none; expected an artifact."
        if not (root / place).resolve().is_relative_to(root.resolve()):
            return f"{place} leads out of the repository; put a copy there."
    except OSError as error:
        return f"{place} cannot be read: {error.strerror}."
    return ""


def _add(scan: Scan, name: str, version: str, path: Path) -> None:
    if not NAME.fullmatch(name):
        scan.faults.append(
            f"{path}: {name!r} is no name for a model; expected letters, digits, '.', '_' and '-' before .safetensors."
        )
    elif (name, version) in scan.sources:
        scan.faults.append(f"two artifacts are called {name!r} in version {version}; give them other names.")
    else:
        try:
            stat = path.stat()
        except OSError as error:  # it was there a moment ago
            scan.refused[name, version] = f"the file cannot be read: {error.strerror}."
            return
        scan.sources[name, version] = Source(name, version, path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


def _readable(text: str) -> str:
    """As UTF-8, which names of files need not be."""
    return text.encode(errors="replace").decode()
