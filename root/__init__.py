"""dubito: a model server that says how far its own answers can be trusted."""

from importlib.metadata import version

__version__ = version("dubito")
