"""Compiled passes in a folder, so that a server that starts again need not compile them."""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dubito.models.disk import replace_by_draft
from dubito.service.engine.plans import plan_file

log = logging.getLogger("dubito")
LARGEST = 1 << 29  # bytes of the folder


class PassCache:
    """Compiled passes in a folder, one file each, which begins with a checksum; with folder None nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """None where there is no such file, or it is damaged."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.pass"
        try:
            content = path.read_bytes()
            os.utime(path)  # files that were not read for longest are removed first
        except OSError:
            return None
        if content[:32] != hashlib.sha256(content[32:]).digest():
            log.warning("a compiled pass of the cache is damaged", extra={"file": str(path)})
            return None
        return content[32:]

    def write(self, key: str, content: bytes) -> None:
        if self.folder is None or len(content) > LARGEST:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_by_draft(self.folder / f"{key}.pass", hashlib.sha256(content).digest() + content)
            self._shrink()
        except OSError as error:
            log.warning("compiled passes cannot be kept", extra={"error": str(error)})
            self.folder = None

    def _shrink(self) -> None:
        """Remove the files that were not used for longest, beyond the limit of the folder."""
        held = 0
        for path, size in self._by_age():
            held += size
            if held > LARGEST:
                path.unlink(missing_ok=True)

    def _by_age(self) -> Iterator[tuple[Path, int]]:
        assert self.folder is not None
        files = []
        drafts = self.folder.glob("*.draft")  # of processes that were killed
        for path in (*self.folder.glob("*.pass"), *drafts):
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                files.append((path, path.stat()))
        return ((path, stat.st_size) for path, stat in sorted(files, key=lambda one: -one[1].st_mtime))


def pass_folder() -> Path:
    """The folder of compiled passes, in the user's cache folder."""
    return plan_file().with_name("passes")
