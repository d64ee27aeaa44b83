"""Where the output goes: a path, or an address to which the whole file is uploaded."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dubito.models.errors import DubitoError
from dubito.models.remote.address import Address, place_of
from dubito.models.remote.cache import cache_folder, hash_of
from dubito.models.remote.faults import ExistsError, MissingError, NoRootError
from dubito.models.remote.store import RemoteFile, download, stat, upload
from dubito.service.scoring.parts import ScoreError

WRITABLE = ("s3", "gs", "az")
OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".feather", ".xlsx")  # which would mislead


@contextmanager
def delivered(output: str, *, fresh: bool) -> Iterator[Path]:
    """The path to write to. For an address it lies in the cache, with its parts, until the file is uploaded.

    A file that is there already is fetched first, so that the caller sees whether it is the output of the same job.
    """
    target = place_of(output)
    if output.lower().endswith(OTHERS):
        raise ScoreError(
            f"OUTPUT is {target}, and scores are written as Parquet: name it so ({Path(output).stem}.parquet)."
        )
    if isinstance(target, Path):
        yield target
        return
    if target.scheme not in WRITABLE or target.signed or target.sha256 or not target.below or output.endswith("/"):
        forms = ", ".join(f"{scheme}://…/NAME.parquet" for scheme in WRITABLE)
        raise ScoreError(f"OUTPUT is {target}; expected a path, or an address that can be written to: {forms}.")
    folder = cache_folder() / "scores" / hashlib.sha256(target.url.encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    local = folder / target.name
    there = _file_at(target)
    before = None if fresh or there is None else _fetch(target, there, local)
    try:
        yield local
    except DubitoError as error:
        if before is not None:
            local.unlink(missing_ok=True)
        raise type(error)(str(error).replace(str(local), str(target))) from None
    if hash_of(local) != before:
        _put(target, local, replace=fresh)
    local.unlink()
    with suppress(OSError):  # another run has begun there
        folder.rmdir()


def _file_at(target: Address) -> RemoteFile | None:
    """What the address holds; raises where there is no such bucket, before the work."""
    try:
        return stat(target)
    except NoRootError:
        raise
    except MissingError:
        return None


def _fetch(target: Address, there: RemoteFile, local: Path) -> str:
    """Make what the address holds the local output; returns its hash."""
    draft = local.with_name(f".{local.name}")
    download(target, there.size, draft)
    draft.replace(local)
    return hash_of(local)


def _put(target: Address, local: Path, *, replace: bool) -> None:
    try:
        upload(target, local, replace=replace)
    except ExistsError:
        raise ScoreError(
            f"{target} came to hold a file while this ran; the output is {local}: copy it to another address."
        ) from None
    if (size := stat(target).size) != local.stat().st_size:
        raise ScoreError(f"{target} has {size} bytes after the upload; expected {local.stat().st_size}. Try again.")
