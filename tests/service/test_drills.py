"""Failure drills of docs/operations.md that need no cluster: two servers, and clients that go where `/readyz` says."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked
from tests.service.conftest import Live, Serve

pytestmark = pytest.mark.slow
Make = Callable[..., Path]
ASK = {"inputs": [[1, 2, 3, 4]], "seed": 0, "samples": 4}
CHECKS = 0.2  # seconds between two looks of the balancer at a server
QUICK = ("--set", "linger_seconds=2", "--set", "repository_api=true")


@dataclass
class Balanced:
    """Clients of several servers: each request goes to the next one that is ready, and a failed one once more."""

    servers: list[Live]
    outcomes: Counter[str] = field(default_factory=Counter)  # ok, again (failed once), lost (failed twice)
    versions: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    stopped: bool = False
    ready: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.ready = [server.url for server in self.servers]
        self.threads = [threading.Thread(target=self._look)]
        self.threads += [threading.Thread(target=self._ask, args=(i,)) for i in range(4)]

    def __enter__(self) -> "Balanced":
        for thread in self.threads:
            thread.start()
        self.more(50)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join()

    def more(self, number: int) -> None:
        """Wait for so many answers more."""
        wanted, end = self.outcomes["ok"] + number, time.monotonic() + 120
        while self.outcomes["ok"] < wanted:
            assert time.monotonic() < end, self.outcomes
            time.sleep(0.01)

    def _look(self) -> None:
        while not self.stopped:
            self.ready = [one.url for one in self.servers if status(f"{one.url}/readyz") == 200]
            time.sleep(CHECKS)

    def _ask(self, turn: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.stopped:
                failed = 0
                while failed < 2:
                    turn, known = turn + 1, self.ready
                    try:
                        reply = client.post(f"{known[turn % len(known)]}/v1/models/tab/predict", json=ASK)
                        if reply.status_code == 200:
                            break
                        self.faults.append(f"{reply.status_code}: {reply.text}")
                    except httpx.HTTPError as error:
                        self.faults.append(repr(error))
                    failed += 1
                    time.sleep(2 * CHECKS * (failed == 1))  # by then the balancer knows
                with self.lock:
                    self.outcomes[("ok", "again", "lost")[failed]] += 1
                    if failed < 2:
                        self.versions[reply.json()["version"]] += 1


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.HTTPError:
        return 0


@pytest.fixture
def two(serve: Serve, make_artifact: Make, tmp_path: Path) -> tuple[Path, list[Live]]:
    """A repository, and two servers of it."""
    make_artifact(tmp_path / "models" / "tab" / "1" / "model.safetensors", seed=1)
    return tmp_path / "models", [serve(tmp_path / "models", *QUICK) for _ in range(2)]


def test_a_server_that_is_asked_to_end_fails_no_request(two: Any) -> None:
    _, servers = two
    with Balanced(servers) as load:
        assert servers[0].stop(signal.SIGTERM) == 0
        load.more(50)
    assert load.outcomes.keys() == {"ok"}, load.faults
    assert servers[0].logged("stopped")


def test_a_server_that_is_killed_fails_no_request_that_is_sent_once_more(two: Any) -> None:
    _, servers = two
    with Balanced(servers) as load:
        assert servers[0].stop(signal.SIGKILL) == -signal.SIGKILL
        load.more(50)
    assert load.outcomes["lost"] == 0, load.faults


def test_a_version_is_rolled_out_rolled_back_and_refused_where_it_is_cut_off(two: Any, make_artifact: Make) -> None:
    """On each server by its own address, as docs/operations.md says; no request fails."""
    root, servers = two
    first = root / "tab" / "1" / "model.safetensors"

    def load_everywhere() -> set[int]:
        url = "{}/v2/repository/models/tab/load"
        return {httpx.post(url.format(server.url), timeout=60).status_code for server in servers}

    with Balanced(servers) as load:
        make_artifact(root / "tab" / "2" / "incoming.safetensors", seed=2)
        (root / "tab" / "2" / "incoming.safetensors").rename(root / "tab" / "2" / "model.safetensors")
        assert load_everywhere() == {200}
        load.versions.clear()
        load.more(20)
        (root / "tab" / "3").mkdir()
        (root / "tab" / "3" / "model.safetensors").write_bytes(first.read_bytes()[:-1])
        assert load_everywhere() == {400}
        load.more(20)
        rolled_out = load.versions["2"]
        for version in ("3", "2"):
            (root / "tab" / version / "model.safetensors").unlink()
        assert load_everywhere() == {200}
        load.versions.clear()
        load.more(20)
    assert load.outcomes.keys() == {"ok"}, load.faults
    assert rolled_out >= 30
    assert load.versions["1"] >= 10


def test_settings_that_do_not_exist_end_the_server_before_it_serves(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("no_such = 1\nport = 0\nneither = 2\n")
    ended = forked.run("serve", "--settings", tmp_path / "settings.toml")
    assert ended.returncode == 2
    assert "no_such" in ended.stderr
