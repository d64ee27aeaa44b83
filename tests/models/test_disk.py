"""Files that several processes write at once: whole, whoever is last."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dubito.models.disk import draft_of
from dubito.service.engine.pass_cache import PassCache


def test_writers_of_one_process_number_do_not_meet(tmp_path: Path) -> None:
    """As two containers do, which share a folder: each writes as process 1."""
    contents = [bytes([i]) * 2_000_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda content: PassCache(tmp_path).write("key", content), contents):
            pass
    assert PassCache(tmp_path).read("key") in contents
    assert [file.name for file in tmp_path.iterdir()] == ["key.pass"]
    assert draft_of(tmp_path / "key.pass") != draft_of(tmp_path / "key.pass")
