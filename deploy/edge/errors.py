"""Errors of export and check."""

from importlib.util import find_spec

from dubito.models.errors import DubitoError


class ExportError(DubitoError):
    """A model that cannot be exported with these options."""


class OnnxError(DubitoError):
    """A file that is not an export of ours, is damaged, or belongs to another artifact."""


def need(*packages: str) -> None:
    """Raise ExportError if packages of the extra `edge` are missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ExportError(f"{' and '.join(missing)} not installed; install them with: pip install 'dubito[edge]'")
