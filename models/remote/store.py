"""The stores behind the addresses, through fsspec: what is there, reading and writing whole files.

Credentials are those that each store's own library finds in the environment.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dubito.models.extras import need
from dubito.models.remote.address import DIGITS, Address
from dubito.models.remote.faults import DeniedError, MissingError, RemoteError, explained, no_root
from dubito.models.terminal import bar

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "https": "aiohttp", "hf": "huggingface_hub"}
LOUD = ("gcsfs", "azure", "huggingface_hub")  # libraries that log what they raise too
SILENCE = 60.0  # seconds without a byte, after which a server has no answer
CONNECT = 15.0
SHOWN = 1 << 24  # bytes of a download from which on its progress is shown
LARGEST = 1 << 38  # bytes of a file whose size no store states
SIDE = ".sha256"  # ending of the file with the hash, as `sha256sum` writes it
SIDE_BYTES = 4096
VERSIONS = ("generation", "ETag", "etag", "md5Hash", "Last-Modified", "blob_id")  # of what stores say about a file


@dataclass(frozen=True)
class RemoteFile:
    size: int | None  # None: the server does not say
    version: str | None  # changes with the content; None: the server does not say
    sha256: str | None  # as the store itself knows it


def _open(address: Address) -> tuple[Any, str]:
    """The file system of an address, without what it remembers, and the path in it."""
    need("remote", "fsspec", PACKAGES[address.scheme])
    import fsspec

    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    fs = fsspec.filesystem(address.scheme, **_options(address.scheme))
    fs.invalidate_cache()
    return fs, address.url if address.scheme == "https" else "/".join(address.parts)


def _options(scheme: str) -> dict[str, Any]:
    match scheme:
        case "s3":
            tries = {"total_max_attempts": 2}  # of botocore; s3fs tries five times itself
            return {"config_kwargs": {"connect_timeout": CONNECT, "read_timeout": SILENCE, "retries": tries}}
        case "gs":
            from aiohttp import ClientTimeout

            return {"requests_timeout": ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)}
        case "az":
            return {"connection_timeout": int(CONNECT), "read_timeout": int(SILENCE)}
        case "https":
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)
            # proxies and .netrc of the environment; compressed files would not have the size that is stated
            return {
                "client_kwargs": {"timeout": timeout, "trust_env": True},
                "headers": {"Accept-Encoding": "identity"},
            }
    return {}


def stat(address: Address) -> RemoteFile:
    """What the store says of a file."""
    with explained(address):
        fs, path = _open(address)
        try:
            info = fs.info(path)
        except FileNotFoundError:
            if address.scheme in ("s3", "gs", "az") and not fs.exists(address.root):
                raise no_root(address) from None
            raise
    if info.get("type") == "directory":
        raise MissingError(f"{address} is a folder; expected a file. Add the file's name.")
    if str(info.get("url", "")).startswith("http:"):
        raise RemoteError(f"{address} leads to an address that is not encrypted; expected https:// all the way.")
    return _described(info)


def listed(address: Address) -> dict[str, RemoteFile]:
    """Every file below an address, by its path from there."""
    if address.scheme == "https":
        raise RemoteError(f"{address}: https:// has no folders; expected an artifact, or a repository elsewhere.")
    with explained(address):
        fs, path = _open(address)
        found = fs.find(path, detail=True)
        if not found and address.scheme == "az" and not fs.exists(address.root):
            raise no_root(address)
    files = {name: info for name, info in found.items() if info.get("type") == "file"}
    start = len(path.rstrip("/")) + 1
    return {name[start:]: _described(info) for name, info in files.items() if len(name) > start}


def _described(info: dict[str, Any]) -> RemoteFile:
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), None)
    lfs = info.get("lfs")  # of the hub
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return RemoteFile(info.get("size"), sha256 or version, sha256)


def download(address: Address, size: int | None, to: Path) -> None:
    """Copy the whole file; what a failure leaves of it is the caller's to remove."""
    with explained(address):
        fs, path = _open(address)
        with _watched(address, size) as callback:
            fs.get_file(path, str(to), callback=callback)
    came = to.stat().st_size
    if size is not None and came != size:
        raise RemoteError(
            f"{address} cannot be read: {came:,} bytes came; expected {size:,}. It was cut off, or changed meanwhile; "
            "nothing of it is kept. Try again."
        )


@contextmanager
def _watched(address: Address, size: int | None) -> Iterator[Any]:
    """Shows the progress of a large download; ends one whose size the server did not state if it exceeds any artifact.

    A size that is known is compared afterwards: a library that tries again counts bytes twice.
    """
    from fsspec.callbacks import Callback

    def check(size: int | None, value: int, **_: object) -> None:
        if value > LARGEST:
            raise RemoteError(f"{address} cannot be read: more than {LARGEST:,} bytes came; expected no more.")

    if size is None:
        yield Callback(hooks={"most": check})
    elif size < SHOWN:
        yield Callback()
    else:
        with bar(f"downloading {address.name}", size) as advance:
            came = 0

            def show(size: int | None, value: int, **_: object) -> None:
                nonlocal came
                advance(value - came)
                came = value

            yield Callback(hooks={"bar": show})


def stated_hash(address: Address) -> str | None:
    """The SHA-256 in the file beside this one; None where there is none."""
    if address.signed or address.scheme == "hf":  # a signature is for one file; the hub knows the hash itself
        return None
    side = address.beside(SIDE)
    try:
        size = stat(side).size
        if size is None or size > SIDE_BYTES:
            return None
        with explained(side):
            fs, path = _open(side)
            text = fs.cat_file(path).decode(errors="replace")
    except (MissingError, DeniedError):  # S3 denies what is not there to those who may not list
        return None
    words = text.split()
    if words and DIGITS.fullmatch(words[0].lower()):
        return str(words[0].lower())
    if address.scheme == "https":  # some servers answer every path with a page
        return None
    raise RemoteError(f"{side} does not begin with a SHA-256; expected what `sha256sum` writes: push the file again.")


def upload(address: Address, file: Path, *, replace: bool) -> None:
    """Write a file whole; without `replace` it must not be there yet."""
    with explained(address, "write"):
        fs, path = _open(address)
        only = {"overwrite": replace} if address.scheme == "az" else {"mode": "overwrite" if replace else "create"}
        fs.put_file(str(file), path, **only)


def remove(address: Address) -> None:
    """Of a file that may not be there."""
    with suppress(MissingError), explained(address, "write"):
        fs, path = _open(address)
        fs.rm_file(path)
