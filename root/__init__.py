"""dubito: a model server that says how far its own answers can be trusted."""

__version__: str


def __getattr__(name: str) -> str:
    """The version, looked up where it is asked for: that takes longer than most of what is imported beside it."""
    if name != "__version__":
        raise AttributeError(f"module 'dubito' has no attribute {name!r}")
    from importlib.metadata import version

    return version("dubito")
