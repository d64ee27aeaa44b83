"""Where the files of models lie: the versions at the paths and addresses given, and why a folder of a repository is
not one."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dubito.models.errors import ArtifactError, DubitoError
from dubito.models.remote.address import Address, Place
from dubito.models.remote.store import RemoteFile, listed, stat

FILE = "model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
VERSION = re.compile(r"[0-9]{1,18}")

Key = tuple[str, str]  # name and version


@dataclass(frozen=True)
class Source:
    """The file of a version, not yet read. A file that was overwritten is another source."""

    name: str
    version: str
    path: Place
    stamp: tuple[object, ...]  # inode, time of modification, size; of an address what the store says of the file
    root: Place  # the path or address given


@dataclass
class Scan:
    sources: dict[Key, Source] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)  # folders of a repository that cannot be served, and why
    faults: list[str] = field(default_factory=list)  # of the paths given
    unread: set[Place] = field(default_factory=set)  # addresses whose store did not answer as it should

    def checked(self) -> "Scan":
        """For the paths of a command line: raises the first fault."""
        if self.faults:
            raise ArtifactError(self.faults[0])
        return self


def find(paths: Sequence[Place]) -> Scan:
    """The versions at the paths: an artifact is version 1, named after its file; a repository has NAME/VERSION/FILE.

    A folder that cannot be served leaves the others as they are. Hidden folders are no models. Of an address the store
    is asked what is there; nothing is downloaded.
    """
    scan = Scan()
    for path in paths:
        if isinstance(path, Address):
            try:
                _add_address(scan, path)
            except DubitoError as error:
                scan.faults.append(str(error))
                scan.unread.add(path)
        elif path.is_file():
            _add(scan, path.stem, "1", path, path)
        elif path.is_dir():
            _add_repository(scan, path)
        else:
            scan.faults.append(f"there is no {path}; expected an artifact or a model repository.")
    return scan


def _add_address(scan: Scan, address: Address) -> None:
    """An artifact, a repository of the hub with one at its top, or a model repository."""
    if address.scheme == "https" or address.suffix == ".safetensors":
        return _add(scan, address.stem, "1", address, address, stat(address))
    files = listed(address)
    if address.scheme == "hf" and not address.below and FILE in files:
        return _add(scan, address.name, "1", address, address, files[FILE])
    here = Scan()
    for path, file in sorted(files.items()):
        *folders, last = path.split("/")
        if last != FILE or not 1 <= len(folders) <= 2 or any(folder.startswith(".") for folder in folders):
            continue
        name, version = folders[0], "".join(folders[1:])
        if fault := _misnamed(Path(path), name, version):
            here.refused[name, version] = fault
        else:
            _add(here, name, version, address / path, address, file)
    _join(scan, here, address)


def _add_repository(scan: Scan, root: Path) -> None:
    here = Scan()
    for name, version, place in _places(root, here):
        if fault := _fault(root, place, name, version):
            here.refused[_readable(name), _readable(version)] = _readable(fault)
        else:
            _add(here, name, version, root / place, root)
    _join(scan, here, root)


def _join(scan: Scan, here: Scan, root: Place) -> None:
    """Add what one repository holds."""
    if not here.sources:
        why = next(iter(here.refused.values()), f"expected NAME/VERSION/{FILE} with a whole number for a version.")
        scan.faults.append(f"{root} holds no model: {why}")
    for source in here.sources.values():
        _enter(scan, source)
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
    if fault := _misnamed(place, name, version):
        return fault
    try:
        if not (root / place).is_file():
            return f"{place} is no file, or a link to none; expected an artifact."
        if not (root / place).resolve().is_relative_to(root.resolve()):
            return f"{place} leads out of the repository; put a copy there."
    except OSError as error:
        return f"{place} cannot be read: {error.strerror}."
    return ""


def _misnamed(place: Path, name: str, version: str) -> str:
    if not NAME.fullmatch(name):
        return f"the folder {name!r} is no name for a model; expected letters, digits, '.', '_' and '-'."
    if not version:
        return f"{place} lies in no folder of a version; move it to {name}/1/{FILE}."
    if not VERSION.fullmatch(version):
        return f"{place}: {version!r} is no version; expected a whole number: {name}/1/{FILE}."
    return ""


def _add(scan: Scan, name: str, version: str, path: Place, root: Place, remote: RemoteFile | None = None) -> None:
    """Add a version; an address comes with what its store says of the file."""
    if isinstance(path, Path):
        try:
            stat = path.stat()
        except OSError as error:  # it was there a moment ago
            scan.refused[name, version] = f"the file cannot be read: {error.strerror}."
            return
        stamp: tuple[object, ...] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    else:
        stamp = (remote,)
    _enter(scan, Source(name, version, path, stamp, root))


def _enter(scan: Scan, source: Source) -> None:
    name, version = source.name, source.version
    if not NAME.fullmatch(name):
        scan.faults.append(
            f"{source.path}: {name!r} is no name for a model; expected letters, digits, '.', '_' and '-' before "
            ".safetensors."
        )
    elif (name, version) in scan.sources:
        scan.faults.append(f"two artifacts are called {name!r} in version {version}; give them other names.")
    else:
        scan.sources[name, version] = source


def _readable(text: str) -> str:
    """As UTF-8, which names of files need not be."""
    return text.encode(errors="replace").decode()
