"""Errors of export and check."""

from dubito.models.errors import DubitoError


class ExportError(DubitoError):
    """A model that cannot be exported with these options."""


class OnnxError(DubitoError):
    """A file that is not an export of ours, is damaged, or belongs to another artifact."""
