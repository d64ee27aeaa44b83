"""Packages that only some commands need: the extras of `pip install 'dubito[...]'`."""

from importlib.util import find_spec

from dubito.models.errors import DubitoError


class MissingPackageError(DubitoError):
    """A command needs an extra that is not installed."""


def need(extra: str, *packages: str) -> None:
    """Raise if one of an extra's packages is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        what = "are" if len(missing) > 1 else "is"
        raise MissingPackageError(
            f"{', '.join(missing)} {what} not installed; install the extra {extra}: pip install 'dubito[{extra}]'"
        )
