"""Verified copies of remote files in a folder that several processes may share.

    files/SHA256.safetensors   a copy, named after its content
    addresses/KEY.json         which content an address had, and the store's version of it
    addresses/KEY.lock         held while somebody downloads it
    parts/KEY.….part           a download under way; those without a holder of the lock are swept

A copy gets its name when it is complete and verified, so a process that is killed leaves nothing that looks like one.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dubito.models.disk import put_in_place
from dubito.models.errors import DubitoError
from dubito.models.remote.address import Address, Place, place_of
from dubito.models.remote.faults import RemoteError
from dubito.models.remote.store import RemoteFile, download, stat, stated_hash

VARIABLE = "DUBITO_CACHE"
FILE = "model.safetensors"  # of a repository on the hub that is named without a file
TRIES = 3  # downloads of a file that is overwritten meanwhile
OLD = 24 * 3600.0  # seconds, after which a part is nobody's, where files cannot be locked


class CacheError(DubitoError):
    """The folder of the cache cannot be used."""


def cache_folder() -> Path:
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dubito"


def fetched(where: str | Place) -> Path:
    """The file itself; of an address: a verified copy, downloaded unless the cache has the store's present version.

    An address that states its hash is not even looked up where the cache has that content.
    """
    address = place_of(where)
    if isinstance(address, Path):
        return address
    if address.scheme == "hf" and not address.below:
        address = Address(f"{address.url.rstrip('/')}/{FILE}", address.sha256)
    cache = cache_folder()
    if address.sha256 is not None and (copy := _copy(cache, address, address.sha256)):
        return copy
    key = hashlib.sha256(address.url.encode()).hexdigest()
    try:
        for name in ("files", "addresses", "parts"):
            (cache / name).mkdir(parents=True, exist_ok=True)
        with _locked(cache / "addresses" / f"{key}.lock") as alone:
            _sweep(cache, key if alone else None)
            return _fetch(cache, key, address)
    except OSError as error:
        raise CacheError(
            f"the cache cannot be written: {cache}: {error.strerror or error}; expected a folder that may be written "
            f"to: name one in {VARIABLE}."
        ) from None


@contextmanager
def local_copy(where: str | Place) -> Iterator[Path]:
    """The file, or a verified copy, to read inside: errors that name the copy name its address instead."""
    place, path = place_of(where), fetched(where)
    try:
        yield path
    except DubitoError as error:
        if isinstance(place, Path) or str(path) not in str(error):
            raise
        raise type(error)(str(error).replace(str(path), str(place))) from None


def _fetch(cache: Path, key: str, address: Address) -> Path:
    entry = cache / "addresses" / f"{key}.json"
    for _ in range(TRIES):
        there = stat(address)
        if copy := _known(cache, entry, address, there):
            return copy
        stated = address.sha256 or there.sha256
        source = "address" if address.sha256 else "hub"
        if stated is None and (stated := stated_hash(address)):
            source = "file beside it"
        _check_room(cache, address, there.size)
        part = cache / "parts" / f"{key}.{secrets.token_hex(8)}.part"
        try:
            download(address, there.size, part)
            sha256 = hash_of(part)
            wrong = stated is not None and sha256 != stated
            if stat(address) != there or (wrong and source == "file beside it" and stated_hash(address) != stated):
                continue  # overwritten meanwhile
            if wrong:
                raise RemoteError(
                    f"{address} cannot be trusted: its SHA-256 is {sha256}; the {source} says {stated}. It was changed "
                    "or damaged; nothing of it is kept. Push it again, or correct the hash."
                )
            copy = _path(cache, address, sha256)
            put_in_place(part, copy)
        finally:
            part.unlink(missing_ok=True)
        if there.version is not None and (there.size is not None or stated is not None):
            _write_entry(entry, address, there, sha256)
        return copy
    raise RemoteError(f"{address} changed during each of {TRIES} downloads; expected it to stay as it is. Try again.")


def _path(cache: Path, address: Address, sha256: str) -> Path:
    return cache / "files" / f"{sha256}{address.suffix}"


def _copy(cache: Path, address: Address, sha256: str) -> Path | None:
    """The copy with this content, if it is there and still has it."""
    path = _path(cache, address, sha256)
    with suppress(OSError):
        if hash_of(path) == sha256:
            return path
    return None


def _known(cache: Path, entry: Path, address: Address, there: RemoteFile) -> Path | None:
    """The copy of what the store has now, if it is known which content that is."""
    try:
        known = json.loads(entry.read_text())
        same = (known["version"], known["size"]) == (there.version, there.size)
        sha256 = str(known["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not same or (address.sha256 or sha256) != sha256:
        return None
    return _copy(cache, address, sha256)


def _write_entry(entry: Path, address: Address, there: RemoteFile, sha256: str) -> None:
    text = json.dumps({"address": str(address), "version": there.version, "size": there.size, "sha256": sha256})
    draft = entry.with_suffix(f".{secrets.token_hex(8)}")
    draft.write_text(text)
    os.replace(draft, entry)


def _check_room(cache: Path, address: Address, size: int | None) -> None:
    if size is not None and size > (free := shutil.disk_usage(cache).free):
        raise CacheError(
            f"{address} has {size:,} bytes, but {cache} has room for {free:,}; expected enough: name another folder in "
            f"{VARIABLE}, or remove old files of this one."
        )


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether this process alone has the lock; a file system without locks gives none, and downloads may be doubled."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EWOULDBLOCK, errno.ENOSYS, errno.EINVAL):
                raise
            yield False
        else:
            yield True


def _sweep(cache: Path, key: str | None) -> None:
    """Remove the parts that nobody writes: of the address whose lock we hold, and of others whose lock is free."""
    for part in (cache / "parts").glob("*.part"):
        owner = part.name.partition(".")[0]
        with suppress(OSError):
            if owner == key or time.time() - part.stat().st_mtime > OLD:
                part.unlink()
            elif key is not None:
                with _locked(cache / "addresses" / f"{owner}.lock", wait=False) as dead:
                    if dead:
                        part.unlink()
