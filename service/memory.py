"""Gives freed memory back to the system: glibc keeps what large bodies took, in one arena for each thread."""

import ctypes
import sys

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt


def give_back() -> None:
    """Return free pages of all arenas. Takes milliseconds, without the interpreter's lock."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def keep_nothing(size: int) -> None:
    """From now on, blocks from `size` bytes on go back as soon as they are freed."""
    if (option := _glibc("mallopt")) is not None:
        option(MMAP_THRESHOLD, size)


def _glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
