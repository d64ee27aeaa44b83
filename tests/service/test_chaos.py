"""The attacks of `benchmarks.attacks` in random order, one or two at a time, beside honest requests: none is lost."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attacks import (
    ATTACKS,
    FORKS,
    HonestClient,
    Target,
    Watch,
    be_hostile,
    prepare_attackers,
    resident,
    start,
    wait_ready,
)
from dubito.models.embedded import embedded

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
QUIET = 10.0  # seconds before the first attack
EACH = 6.0  # seconds of an attack
TIMES = {1: 3.0, 2: 5.0}  # what the 99th percentile of honest requests may be of that without attacks: delays add up
GROWTH = 100.0  # MB that the second half may add: less than any one body


@pytest.mark.soak
@pytest.mark.parametrize("at_once", TIMES)
def test_honest_clients_lose_nothing(at_once: int, tmp_path: Path) -> None:
    """`CHAOS_SECONDS=60` for less. Attackers have a core of their own; the others share what is left.

    Where the machine itself stands still, what was under way then does not count (see `benchmarks.attacks`).
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("attackers need a core of their own")
    own, theirs = set(cores[:-1]), {cores[-1]}
    models = [str(embedded(name)) for name in ("digits", "clothes")]
    prepare_attackers()
    log = tmp_path / "log"
    with log.open("wb") as file:
        server, port = start([sys.executable, "-m", "dubito", "serve", *models], own, file.fileno(), tmp_path)
    try:
        wait_ready(server, port, own)
        _attack(at_once, server, port, own, theirs)
        assert server.poll() is None, log.read_text()[-2000:]
    finally:
        server.kill()
        server.wait()


def _attack(at_once: int, server: "subprocess.Popen[bytes]", port: int, own: set[int], theirs: set[int]) -> None:
    host = "127.0.0.1"
    honest, watch = HonestClient(host, port, own), Watch(own)
    rng = random.Random(0)
    names = [name for name, one in ATTACKS.items() if not one.stuck_log and not one.settings]
    target = Target(host, port, server.pid)
    memory: list[float] = []
    try:
        time.sleep(QUIET)
        begin = time.monotonic()
        hostile: list[Any] = []
        order: list[str] = []
        while time.monotonic() < begin + SECONDS:
            hostile = [one for one in hostile if one.is_alive()]
            while len(hostile) < at_once:
                order = order or rng.sample(names, len(names))
                hostile.append(FORKS.Process(target=be_hostile, args=(order.pop(), target, theirs, EACH)))
                hostile[-1].start()
            memory.append(resident(server.pid))
            time.sleep(0.5)
        for one in hostile:
            one.join(60)
        end = time.monotonic()
        time.sleep(3)
    finally:
        seen, stalls = honest.end(), watch.end()
    quiet, during = (seen.between(*span, stalls or []) for span in ((begin - QUIET, begin), (begin, end)))
    half = len(memory) // 2
    said = f"{quiet}; beside attacks {during}; MB {memory[half]:.0f}, {memory[-1]:.0f}"
    print(said)
    assert during.lost == 0, said
    assert during.p99 < TIMES[at_once] * quiet.p99, said
    assert min(memory[-half // 4 :]) < min(memory[half : half + half // 4]) + GROWTH, said
