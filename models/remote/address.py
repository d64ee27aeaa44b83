"""Addresses of remote files: a scheme, a path, and the file's SHA-256 where the address states it."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from dubito.models import zoo
from dubito.models.errors import DubitoError

FORMS = {
    "s3": "s3://BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "az": "az://CONTAINER/PATH",
    "https": "https://HOST/PATH",
    "hf": "hf://OWNER/NAME or hf://OWNER/NAME/PATH",
}
DIGITS = re.compile("[0-9a-f]{64}")  # of a SHA-256
KINDS = ("models", "datasets", "spaces")  # of the hub's repositories, before the owner


class AddressError(DubitoError):
    """An address that cannot be one of a file."""


@dataclass(frozen=True, repr=False)
class Address:
    """As text it shows no query, which may hold a signature: safe in messages and logs."""

    url: str
    sha256: str | None = None  # that the file must have

    def __str__(self) -> str:
        path, mark, _ = self.url.partition("?")
        return f"{path}?…" if mark else path

    __repr__ = __str__

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def signed(self) -> bool:
        """It has a query, as addresses with a signature do."""
        return "?" in self.url

    @property
    def parts(self) -> list[str]:
        path = self.url.partition("://")[2].partition("?")[0]
        return [part for part in path.split("/") if part]

    @property
    def _of_root(self) -> int:
        if self.scheme != "hf":
            return 1
        return 3 if self.parts[:1] and self.parts[0] in KINDS else 2

    @property
    def root(self) -> str:
        """The bucket, the container, the host, or the hub's repository."""
        return "/".join(self.parts[: self._of_root])

    @property
    def below(self) -> str:
        """The path inside the root."""
        return "/".join(self.parts[self._of_root :])

    @property
    def name(self) -> str:
        """Of the file; of a whole repository of the hub: its own, without a revision."""
        last = self.parts[-1] if self.below else self.parts[-1].partition("@")[0]
        return unquote(last) if self.scheme == "https" else last

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __truediv__(self, below: str) -> "Address":
        """Another file of the same store, whose hash is not known."""
        return Address(f"{self.url.rstrip('/')}/{below}")

    def beside(self, ending: str) -> "Address":
        """The file whose name is this one's and an ending."""
        return Address(f"{self.url}{ending}")


Place = Path | Address


def listed() -> str:
    """How addresses begin."""
    return ", ".join(f"{name}://" for name in FORMS)


def place_of(text: str | Place) -> Place:
    """The path or the address that the text is; `zoo:NAME` is that of a model of the zoo. No store is asked."""
    if not isinstance(text, str):
        return text
    if text.startswith(zoo.PREFIX):
        return place_of_zoo(text.removeprefix(zoo.PREFIX))
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Path(text)
    scheme = scheme.lower()
    if scheme not in FORMS:
        why = " (over http:// anybody on the way could change the file)" if scheme == "http" else ""
        raise AddressError(f"{scheme[:20]}:// came; expected a path, or an address that begins with {listed()}{why}.")
    rest, sharp, sha256 = rest.partition("#sha256=")
    address = Address(f"{scheme}://{rest}", sha256 or None)
    if scheme == "https" and address.parts and "@" in address.parts[0]:
        host = address.parts[0].rpartition("@")[2]
        raise AddressError(
            f"https://…@{host} holds credentials; expected them in the file that the variable NETRC names (machine "
            f"{host} login … password …), or an address with a signature."
        )
    if sharp and not DIGITS.fullmatch(sha256):
        raise AddressError(f"{address}#sha256={sha256[:70]} came; expected 64 digits in 0-9 and a-f after the '='.")
    if len(address.parts) < address._of_root + (scheme == "https"):
        raise AddressError(f"{address} came; expected {FORMS[scheme]}.")
    return address


def place_of_zoo(name: str, release: str | None = None) -> Place:
    """The path or the address of a model of the zoo; `release` is the address of the folder to take it from."""
    found = zoo.place(name, release)
    if isinstance(found, Path):
        return found
    if "://" not in found:
        raise AddressError(f"the release is at {found.rpartition('/')[0]}; expected an address: {listed()}.")
    return place_of(found)
