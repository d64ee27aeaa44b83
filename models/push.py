"""Uploads an artifact to a store, with its hash beside it, and reads back what was written; to the hub with a card."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dubito.models.artifact.artifact import examine
from dubito.models.errors import DubitoError
from dubito.models.extras import need
from dubito.models.manifest import Manifest
from dubito.models.modelcard import model_card
from dubito.models.remote.address import FORMS, KINDS, Address, place_of
from dubito.models.remote.cache import FILE, hash_of
from dubito.models.remote.faults import ExistsError, MissingError, explained
from dubito.models.remote.store import SIDE, download, remove, stat, upload

CARD = "README.md"


class PushError(DubitoError):
    """An artifact that cannot be uploaded there."""


@dataclass(frozen=True)
class Pushed:
    address: str  # that can be served
    sha256: str  # of the file
    bytes: int
    said: list[str]


def push(file: Path, url: str, *, force: bool = False, license: str = "unknown") -> Pushed:
    """Upload an artifact; another file that is there already stays, unless `force`."""
    target = destination(url, file)
    manifest, _ = examine(file)
    sha256, size = hash_of(file), file.stat().st_size
    there = _hash_there(target, size)
    if there not in (None, sha256) and not force:
        raise _other(target)
    if target.scheme == "hf":
        said = _commit(file, target, manifest, there == sha256, force=force, license=license)
    else:
        said = _put(file, target, sha256, there)
    if (read := _hash_there(target, size)) != sha256:
        raise PushError(
            f"{target} holds something else than was written (SHA-256 {read or 'not known'}); expected {sha256}. "
            "Somebody else writes there, or the store is at fault: push it again."
        )
    return Pushed(_served(target), sha256, size, [*said, f"{target}: {size:,} bytes, SHA-256 {sha256} (read back)"])


def destination(url: str, file: Path) -> Address:
    """The address of the file to write."""
    address = place_of(url)
    if not isinstance(address, Address) or address.scheme == "https" or address.signed:
        forms = ", ".join(form for scheme, form in FORMS.items() if scheme != "https")
        raise PushError(f"URL is {address}; expected an address that can be written to: {forms}.")
    if address.sha256 is not None:
        raise PushError(f"URL is {address} with a hash; expected it without: the hash is that of FILE.")
    if address.scheme == "hf" and (address.below or address.parts[0] in KINDS):
        raise PushError(f"URL is {address}; expected hf://OWNER/NAME: the file is called {FILE} there.")
    if address.scheme == "hf":
        return address / FILE
    if url.endswith("/"):
        return address / file.name
    if not address.below or address.suffix != ".safetensors":
        raise PushError(f"URL is {address}; expected it to end in .safetensors, or in / for the file's own name.")
    return address


def _served(target: Address) -> str:
    """The shortest address that serves it: on the hub, that of the repository."""
    return f"hf://{target.root}" if target.scheme == "hf" else str(target)


def _other(target: Address) -> PushError:
    return PushError(
        f"{target} holds another file; expected none there. Push to another version, or replace it with --force."
    )


def _hash_there(target: Address, size: int) -> str | None:
    """Of the file that the store holds; None: it holds none. One of another size is not read: empty."""
    try:
        file = stat(target)
    except MissingError:
        return None
    if file.sha256 is not None:
        return file.sha256
    if file.size != size:
        return ""
    with TemporaryDirectory() as folder:
        download(target, file.size, Path(folder, FILE))
        return hash_of(Path(folder, FILE))


def _put(file: Path, target: Address, sha256: str, there: str | None) -> list[str]:
    side = target.beside(SIDE)
    if there != sha256:
        if there is not None:
            remove(side)  # so that no reader compares the new file with the old hash
        try:
            upload(target, file, replace=there is not None)
        except ExistsError:  # it came in the meantime
            raise _other(target) from None
    with TemporaryDirectory() as folder:
        text = Path(folder, "hash")
        text.write_text(f"{sha256}  {target.name}\n")
        upload(side, text, replace=True)
    return [f"{target} holds it already"] if there == sha256 else []


def _commit(file: Path, target: Address, manifest: Manifest, present: bool, *, force: bool, license: str) -> list[str]:
    """One commit with the artifact and its card. A card that somebody wrote stays, unless `force`."""
    need("remote", "huggingface_hub")
    from huggingface_hub import CommitOperationAdd, HfApi

    repository, _, revision = target.root.partition("@")
    where: dict[str, Any] = {"revision": revision or None}
    said = [f"{target} holds it already"] if present else []
    with explained(target, "write"):
        api = HfApi()
        if not api.repo_exists(repository):
            api.create_repo(repository, private=True)
            said.append(f"made the private repository {repository}; the hub's settings of it can make it public")
        operations = [] if present else [CommitOperationAdd(FILE, str(file))]
        if force or not api.file_exists(repository, CARD, **where):
            card = model_card(manifest, repository, license=license)
            operations.append(CommitOperationAdd(CARD, card.encode()))
        else:
            said.append(f"{CARD} is there already and stays as it is (--force replaces it)")
        if operations:
            api.create_commit(repository, operations, commit_message=f"Push {target.name} by dubito", **where)
    return said
