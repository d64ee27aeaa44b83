"""Every attack of `benchmarks.attacks`, two at a time and in random order, beside honest requests: none is lost."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.attacks import ATTACKS, HonestClient, Target, be_hostile, resident
from dubito.models.embedded import embedded

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
QUIET = 10.0  # seconds before the first attack
EACH = 6.0  # seconds of an attack
TIMES = 3.0  # the 99th percentile of honest requests may be so many times what it is without attacks
GROWTH = 100.0  # MB that the second half may add: less than any one body


@pytest.mark.soak
def test_honest_clients_lose_nothing(serve: Any, tmp_path: Path) -> None:
    """`CHAOS_SECONDS=60` for less. Attackers have a core of their own; the others share what is left."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("attackers need a core of their own")
    own, theirs = set(cores[:-1]), {cores[-1]}
    server = serve(embedded("digits"), embedded("clothes"))
    for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children()):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, own)
    spawn = multiprocessing.get_context("spawn")
    host, port = server.address.split(":")
    honest = HonestClient(host, int(port), own)
    rng = random.Random(0)
    names = [name for name, one in ATTACKS.items() if not one.stuck_log and not one.settings]
    target = Target(host, int(port), server.pid)
    memory: list[float] = []
    try:
        time.sleep(QUIET)
        begin = time.monotonic()
        hostile: list[Any] = []
        order: list[str] = []
        while time.monotonic() < begin + SECONDS:
            hostile = [one for one in hostile if one.is_alive()]
            while len(hostile) < 2:
                order = order or rng.sample(names, len(names))
                hostile.append(spawn.Process(target=be_hostile, args=(order.pop(), target, theirs, EACH)))
                hostile[-1].start()
            memory.append(resident(server.pid))
            time.sleep(0.5)
        for one in hostile:
            one.join(60)
        end = time.monotonic()
        time.sleep(3)
    finally:
        seen = honest.end()
    quiet, _ = seen.between(begin - QUIET, begin)
    during, lost = seen.between(begin, end)
    half = len(memory) // 2
    said = f"p99 {quiet:.1f} ms, beside attacks {during:.1f} ms; {lost} lost; MB {memory[half]:.0f}, {memory[-1]:.0f}"
    print(said)
    assert server.process.exitcode is None, server.log.read_text()[-2000:]
    assert lost == 0, said
    assert during < TIMES * quiet, said
    assert min(memory[-half // 4 :]) < min(memory[half : half + half // 4]) + GROWTH, said
