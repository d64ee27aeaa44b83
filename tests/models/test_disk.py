"""Files that several processes write at once: whole, whoever is last."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dubito.models.disk import replace_by_draft
from dubito.service.engine.pass_cache import PassCache


def test_writers_of_one_process_number_do_not_meet(tmp_path: Path) -> None:
    """As two containers do, which share a folder: each writes as process 1."""
    contents = [bytes([i]) * 2_000_000 for i in range(8)]
    caches = [PassCache(tmp_path) for _ in contents]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda cache, content: cache.write("key", content), caches, contents):
            pass
    assert all(cache.folder is not None for cache in caches)  # none was disturbed by another
    assert PassCache(tmp_path).read("key") in contents
    assert [file.name for file in tmp_path.iterdir()] == ["key.pass"]


def test_a_full_disk_keeps_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_by_draft(tmp_path / "file", b"before")
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        replace_by_draft(tmp_path / "file", b"after")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"before"}
