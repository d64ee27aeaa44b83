"""Errors that a user can act on: each says what came, what was expected and what to do."""


class DubitoError(Exception):
    """Base of every error that dubito raises on purpose; a command prints it as one line."""


class ArtifactError(DubitoError):
    """A file that is not an artifact, is damaged, or has a format that this version does not read."""


class ArchitectureError(DubitoError):
    """An architecture name or argument that cannot be built."""


class ConversionError(DubitoError):
    """A network that cannot be converted with these options."""


class PredictionError(DubitoError):
    """A network whose outputs are not finite numbers, one row per input."""


class InputError(DubitoError):
    """Inputs or options of a prediction that do not fit the model."""


class NumericsError(DubitoError):
    """A device that computes wrongly in the requested dtype."""


def first_line(error: BaseException) -> str:
    """Of its message, without a full stop; its name where it says nothing. torch adds its own stack below."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
