"""What can go wrong between an artifact and a device."""

from importlib.util import find_spec

from dubito.models.errors import DubitoError


class ExportError(DubitoError):
    """A model that cannot be written as ONNX as asked."""


class OnnxError(DubitoError):
    """A file that is not an export of ours, is damaged, or belongs to another artifact."""


def need(*packages: str) -> None:
    """Refuse in words where the extra is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ExportError(f"{' and '.join(missing)} not installed; install them with: pip install 'dubito[edge]'")
