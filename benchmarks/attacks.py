"""Attacks on a running server beside honest requests: how slow those get, how much memory it takes, how long it lasts.

For each attack a server of the embedded digits is started. An honest client asks for predictions at a fixed rate, each
second one on a connection of its own, first alone and then beside the attack. The table has the 99th percentile of its
latency before and during the attack, honest requests that were not answered with 200, connections of the attackers that
are open in the last second, the memory of the server's processes (before, at its highest, and some seconds after), the
time from the end of the attack until honest requests take no longer than three times the quiet percentile, and how long
SIGTERM then takes, with the exit code. Attackers run on the last core, everything else on the others; they have the
honest client's address, by which nobody can tell them apart, or `--source`. `--python` names the interpreter of another
installation, to measure what was before.

A virtual machine stands still now and then, whatever runs on it, and a percentile of a few hundred requests is then the
machine's. So a process of real-time priority, which nothing of ours can delay, wakes every two milliseconds: where it
is late by more than eight, the machine stood still, and requests under way then are left out of the percentiles and
counted. Real-time priority needs root; without it all requests count, and the column says so.

    python -m benchmarks.attacks --only idle
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import _hostile as hostile
from benchmarks._measure import machine
from benchmarks._server import LIMIT, free_port
from dubito.models.embedded import embedded

RATE = 40.0  # honest requests a second
WARM = 40  # requests that are not counted
QUIET, AFTER = 15.0, 3.0  # seconds before the attack, and after it
TICK, LATE = 0.002, 0.008  # seconds between looks at the clock, and how late one may be
COLUMNS = (
    "attack",
    "p99 quiet, ms",
    "during, ms",
    "left out",
    "lost",
    "open",
    "MB before, peak, after",
    "recovers, s",
    "stops, s (code)",
)
BODY = json.dumps({"inputs": np.zeros((1, 1, 8, 8)).tolist()}).encode()
HONEST = (
    b"POST /v1/models/digits/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    pid: int  # of the server
    source: str | None = None  # the attacker's address; by default that of the honest client

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        local = None if self.source is None else (self.source, 0)
        return await asyncio.open_connection(self.host, self.port, local_addr=local)


@dataclass(frozen=True)
class Attack:
    name: str
    point: int  # of the list in issue 22 by which the rows are grouped
    run: Callable[[Target], Awaitable[None]]
    seconds: float
    settings: tuple[str, ...]
    stuck_log: bool
    beside: tuple[Literal["clothes"], ...]  # embedded models that are served, too
    repository: bool  # whether the model is served from a folder, beside models that cannot be served


ATTACKS: dict[str, Attack] = {}
FORKS = multiprocessing.get_context("forkserver")


def attack(
    point: int,
    *settings: str,
    seconds: float = 8.0,
    stuck_log: bool = False,
    beside: tuple[Literal["clothes"], ...] = (),
    repository: bool = False,
) -> Callable[[Callable[[Target], Awaitable[None]]], Callable[[Target], Awaitable[None]]]:
    """Enter an attack: a coroutine that is cancelled after so many seconds."""

    def enter(run: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Awaitable[None]]:
        name = run.__name__.replace("_", " ")
        ATTACKS[name] = Attack(name, point, run, seconds, settings, stuck_log, beside, repository)
        return run

    return enter


# 1 to 3: requests


async def ask_all(
    target: Target, request: Callable[[int], bytes], *, number: int = 8, leave: float | None = None
) -> None:
    """Send requests without end, `number` at a time; with `leave`, go after so many seconds without the reply."""
    count = itertools.count()

    async def one() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await target.connect()
                try:
                    while True:
                        writer.write(request(next(count)))
                        await writer.drain()
                        if leave is not None:
                            await asyncio.sleep(leave)
                            break
                        reply = await reader.readuntil(b"\r\n\r\n")
                        await reader.readexactly(length_in(reply))
                finally:
                    writer.close()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(number)))


def request_of(path: str, body: bytes, *headers: str, host: str = "localhost") -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def send_all(
    target: Target, path: str, body: bytes, *headers: str, number: int = 8, leave: float | None = None
) -> None:
    """Send one request again and again."""
    sent = request_of(path, body, *headers)
    await ask_all(target, lambda _: sent, number=number, leave=leave)


V1, V2, CLOTHES = "/v1/models/digits/predict", "/v2/models/digits/infer", "/v1/models/clothes/predict"
JSON, JPEG, PACKED = "Content-Type: application/json", "Content-Type: image/jpeg", "Content-Encoding: gzip"


def rows(count: int, shape: tuple[int, ...] = (1, 8, 8), **options: object) -> bytes:
    return json.dumps({"inputs": np.zeros((count, *shape)).tolist(), **options}).encode()


@attack(1)
async def sixty_thousand_inputs_of_one_name(target: Target) -> None:
    await send_all(target, V2, hostile.packed(hostile.many_inputs(60_000)), PACKED, number=2)


@attack(1)
async def lists_of_nothing(target: Target) -> None:
    await send_all(target, V1, hostile.packed(hostile.many_lists(32_000_000)), PACKED, JSON)


@attack(1)
async def eight_bodies_of_numbers(target: Target) -> None:
    await send_all(target, V1, hostile.packed(hostile.many_numbers(32_000_000)), PACKED, JSON)


@attack(1)
async def a_million_keys(target: Target) -> None:
    """A variant: an object instead of lists."""
    await send_all(target, V1, hostile.packed(hostile.many_keys(1_000_000)), PACKED, JSON)


@attack(1)
async def a_form_of_many_lines(target: Target) -> None:
    """A variant: another parser."""
    kind = "Content-Type: multipart/form-data; boundary=b"
    await send_all(target, V1, hostile.packed(hostile.long_form(5_000_000)), PACKED, kind)


@attack(1)
async def lists_as_large_as_is_allowed(target: Target) -> None:
    """A variant: what the model's limits let through."""
    await send_all(target, V1, hostile.packed(hostile.many_lists(900_000)), PACKED, JSON)


@attack(1)
async def thousands_of_tiny_pictures(target: Target) -> None:
    """20 kB, which are 4096 inputs of any size once they are fitted."""
    tensor = {"name": "input", "shape": [4096, 1, 5], "datatype": "UINT8", "parameters": {"binary_data_size": 20480}}
    head = json.dumps({"inputs": [tensor], "parameters": {"samples": 1024}}).encode()
    await send_all(target, V2, head + bytes(20480), f"Inference-Header-Content-Length: {len(head)}")


@attack(1)
async def replies_that_list_many_draws(target: Target) -> None:
    """A variant: what is written, not what is read: 320,000 numbers each, whose draws are soon made."""
    await send_all(target, f"{V1}?return=samples", rows(2000, samples=16), JSON, number=2)


@attack(2)
async def headers_of_pictures_without_end(target: Target) -> None:
    await send_all(target, V1, b"\xff\xd8" + b"\xff\x01" * 131_000, JPEG, number=2)


@attack(2)
async def progressive_scans(target: Target) -> None:
    await send_all(target, V1, hostile.packed(hostile.scan_bomb()), PACKED, JPEG, number=6)


@attack(2)
async def progressive_scans_whose_clients_go(target: Target) -> None:
    await send_all(target, V1, hostile.packed(hostile.scan_bomb()), PACKED, JPEG, number=6, leave=0.2)


@attack(2)
async def scans_as_many_as_are_allowed(target: Target) -> None:
    """A variant: what the limits let through."""
    await send_all(target, V1, hostile.packed(hostile.scan_bomb(4096, 32)), PACKED, JPEG, number=6)


@attack(2)
async def interlaced_pictures_of_16_megapixels(target: Target) -> None:
    """A variant: another format."""
    await send_all(target, V1, hostile.interlaced_png(4096), "Content-Type: image/png", number=6)


@attack(3)
async def all_rows_and_all_draws(target: Target) -> None:
    await send_all(target, V1, rows(4096, samples=1024), JSON, number=2)


@attack(3)
async def as_many_rows_and_draws_as_are_allowed(target: Target) -> None:
    """A variant: just below the limit."""
    await send_all(target, V1, rows(4000, samples=32), JSON, number=2)


@attack(3)
async def many_rows_with_one_draw(target: Target) -> None:
    """A variant: work that cannot go in parts of draws."""
    await send_all(target, V1, rows(1024, samples=1), JSON, number=1)


@attack(3)
async def one_row_with_all_draws(target: Target) -> None:
    """A variant: work that cannot go in parts of rows."""
    await send_all(target, V1, rows(1, samples=1024), JSON, number=2)


@attack(3, beside=("clothes",))
async def a_flood_on_another_model(target: Target) -> None:
    await send_all(target, CLOTHES, rows(1, (1, 28, 28)), JSON, number=32)


@attack(3, beside=("clothes",))
async def long_requests_on_another_model(target: Target) -> None:
    """A variant."""
    await send_all(target, CLOTHES, rows(20, (1, 28, 28)), JSON, number=8)


# 4: connections


async def hold(target: Target, number: int, first: bytes, dribble: bytes = b"", every: float = 1.0) -> None:
    """Open connections, send something, and something more again and again; open new ones for those that are closed."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await target.connect()
                try:
                    writer.write(first)
                    while not reader.at_eof():
                        with suppress(TimeoutError):
                            async with asyncio.timeout(every):
                                if not await reader.read(1 << 16):
                                    break
                        if dribble:
                            writer.write(dribble)
                            await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(number)))


@attack(4, seconds=15.0)
async def five_hundred_idle_connections(target: Target) -> None:
    await hold(target, 500, b"")


@attack(4, seconds=15.0)
async def slow_loris(target: Target) -> None:
    """A header line each second."""
    await hold(target, 500, b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n")


@attack(4, seconds=15.0)
async def slow_loris_that_never_begins(target: Target) -> None:
    """Empty lines, which may precede a request."""
    await hold(target, 500, b"\r\n", b"\r\n")


async def pour(target: Target, first: bytes, more: bytes, pieces: int) -> None:
    """Six connections that send something, and then pieces of something that does not end, without reading."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await target.connect()
                try:
                    writer.write(first)
                    for _ in range(pieces):
                        writer.write(more)
                        await writer.drain()
                finally:
                    writer.close()

    await asyncio.gather(*(one() for _ in range(6)))


@attack(4)
async def headers_of_600_MB(target: Target) -> None:
    """Six connections, each with one header that does not end."""
    await pour(target, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a" * (1 << 16), 1600)


@attack(4)
async def headers_without_end(target: Target) -> None:
    """Millions of short ones."""
    await pour(target, b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"a:\r\n" * (1 << 14), 1600)


CHUNKED = b"POST /v1/models/digits/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@attack(4)
async def chunks_of_one_byte(target: Target) -> None:
    await pour(target, CHUNKED, b"1\r\n \r\n" * (1 << 14), 400)


@attack(4)
async def trailers_without_end(target: Target) -> None:
    """Behind a body that is large enough for them to be allowed by its size."""
    await pour(target, CHUNKED + b"800000\r\n" + bytes(1 << 23) + b"\r\n0\r\nX-A: ", b"a" * 2000, 4000)


@attack(4, seconds=15.0)
async def half_bodies_behind_another_request(target: Target) -> None:
    head = b"POST /v1/models/digits/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    await hold(target, 700, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + head)


@attack(4, seconds=15.0)
async def half_bodies_in_2048_connections(target: Target) -> None:
    head = b"POST /v1/models/digits/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    await hold(target, 2048, head)


async def read_slowly(target: Target, number: int, path: str) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError), socket.socket() as plain:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                plain.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(plain, (target.host, target.port))
                await loop.sock_sendall(plain, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                while await loop.sock_recv(plain, 512):
                    await asyncio.sleep(0.5)
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(number)))


@attack(4, seconds=15.0)
async def sixty_slow_readers_of_a_static_file(target: Target) -> None:
    await read_slowly(target, 60, "/console/wasm/ort-wasm-simd-threaded.wasm")


@attack(4, seconds=15.0)
async def slow_readers_of_sixty_thousand_small_replies(target: Target) -> None:
    """Pipelined requests of a page, whose replies nobody reads."""
    await hold(target, 60, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, b"", 60.0)


@attack(4)
async def connections_that_come_and_go(target: Target) -> None:
    """As fast as one core can."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await target.connect()
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(16)))


# 5: logs


@attack(5, seconds=8.0, stuck_log=True)
async def a_log_that_nobody_reads(target: Target) -> None:
    """The honest requests alone fill its pipe; here come more of them."""
    while True:
        with suppress(OSError):
            reader, writer = await target.connect()
            for _ in range(1000):
                writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(length_in(head))


@attack(5, seconds=8.0, stuck_log=True)
async def a_log_of_long_lines_that_nobody_reads(target: Target) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await target.connect()
            for _ in range(1000):
                writer.write(b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 20_000))
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(length_in(head))


# 6: models that come and go


LOAD, UNLOAD = "/v2/repository/models/{}/load", "/v2/repository/models/{}/unload"


@attack(6, "repository_api=true", repository=True)
async def loads_beside_a_badly_named_folder(target: Target) -> None:
    """Each goes through the whole repository."""
    await send_all(target, LOAD.format("digits"), b"{}", JSON, number=2)


@attack(6, "repository_api=true", repository=True)
async def loads_of_a_damaged_file(target: Target) -> None:
    """A variant: what is read in vain."""
    await send_all(target, LOAD.format("damaged"), b"{}", JSON, number=2)


@attack(6)
async def models_that_are_not_there(target: Target) -> None:
    """A variant: a new name in each request."""
    await ask_all(target, lambda n: request_of(f"/v1/models/none-{n}/predict", BODY, JSON))


@attack(6)
async def requests_whose_clients_go(target: Target) -> None:
    """A variant: accepted, and cancelled."""
    await send_all(target, V1, rows(64), JSON, number=2, leave=0.01)


# 7: odd clients


@attack(7)
async def requests_to_upgrade_to_http_2(target: Target) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    await send_all(target, V1, BODY, JSON, *upgrade, number=2)


@attack(7)
async def requests_to_upgrade_to_a_web_socket(target: Target) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    await send_all(target, "/", b"", *upgrade, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")


@attack(7)
async def gzip_of_many_members(target: Target) -> None:
    """A variant: fifty thousand streams, each with nothing in it."""
    await send_all(target, V1, hostile.packed(b"") * 50_000 + hostile.packed(BODY), PACKED, JSON)


@attack(7)
async def pictures_that_are_turned(target: Target) -> None:
    """A variant: 16 megapixels that their EXIF data turn."""
    await send_all(target, V1, hostile.turned_jpeg(4000), JPEG, number=6)


# 8: the browser


@attack(8)
async def pages_that_unload_models(target: Target) -> None:
    page = ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site")
    await send_all(target, UNLOAD.format("digits"), b"{}", "Content-Type: text/plain", *page)


@attack(8, "repository_api=true")
async def names_that_lead_to_this_server(target: Target) -> None:
    """A variant: DNS rebinding, a new name each time, where models may be changed."""
    await ask_all(target, lambda n: request_of(UNLOAD.format("digits"), b"{}", JSON, host=f"a{n}.evil.example"))


@attack(8, "rate_per_second=50")
async def a_new_address_in_each_request(target: Target) -> None:
    """Where each address has a rate: what a client says of its own is not believed."""

    def forwarded(n: int) -> bytes:
        return request_of(V1, BODY, JSON, f"X-Forwarded-For: 10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}")

    await ask_all(replace(target, source="127.0.0.2"), forwarded)


@attack(8)
async def paths_in_disguise(target: Target) -> None:
    await send_all(target, "/v2%2Frepository%2Fmodels%2Fdigits%2Funload", b"{}", JSON)


# 9: the protocol


@attack(9)
async def parameters_that_are_objects(target: Target) -> None:
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}
    odd: dict[str, object] = {f"p{n}": {"a": {"b": None}} for n in range(64)}
    body = json.dumps({"inputs": [tensor | {"parameters": odd}], "parameters": odd}).encode()
    await send_all(target, V2, body, JSON)


@attack(9)
async def strings_for_numbers(target: Target) -> None:
    """As many as the model's limits let through."""
    tensor = {"name": "input", "shape": [4096, 1, 8, 8], "datatype": "FP32", "data": ["1"] * (64 * 4096)}
    await send_all(target, V2, json.dumps({"inputs": [tensor]}).encode(), JSON)


@attack(9, "repository_api=true")
async def loads_with_a_configuration(target: Target) -> None:
    """A variant: of a megabyte."""
    body = json.dumps({"parameters": {"config": "{" + '\\"a\\":1,' * 100_000 + "}"}}).encode()
    await send_all(target, LOAD.format("digits"), body, JSON)


# what measures them


def length_in(head: bytes) -> int:
    return int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])


@dataclass
class Honest:
    """Requests of the honest client: when each was due, its seconds, its status (0: none)."""

    due: list[float]
    seconds: list[float]
    status: list[int]

    def between(self, begin: float, end: float, stalls: list[tuple[float, float]]) -> "Seen":
        rows = [row for row in self._rows() if begin <= row[0] < end]
        awake = [(due, s) for due, s, _ in rows if not any(a < due + s and due < b for a, b in stalls)]
        p99 = 1000 * float(np.quantile([s for _, s in awake], 0.99)) if awake else float("nan")
        return Seen(p99, len(rows), len(rows) - len(awake), sum(status != 200 for *_, status in rows))

    def recovered(self, end: float, bound: float) -> float:
        """Seconds from the attack's end until requests are answered within the bound for half a second."""
        bad = [due + s for due, s, status in self._rows() if due + s > end and (status != 200 or s > bound)]
        return max(0.0, max(bad, default=end) - end)

    def _rows(self) -> "zip[tuple[float, float, int]]":
        return zip(self.due, self.seconds, self.status, strict=True)


@dataclass(frozen=True)
class Seen:
    """Of honest requests in some seconds."""

    p99: float  # ms of latency, where the machine did not stand still
    number: int
    left_out: int  # under way while the machine stood still
    lost: int  # not answered with 200


def be_awake(cores: set[int], stop: Any, out: Any) -> None:
    """In a process of its own, before all others: note when the machine stood still; None without the right to."""
    os.sched_setaffinity(0, cores)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        out.put(None)
        return
    stalls, last = list[tuple[float, float]](), time.monotonic()
    while not stop.is_set():
        time.sleep(TICK)
        now = time.monotonic()
        if now - last > TICK + LATE:
            stalls.append((last, now))
        last = now
    out.put(stalls)


def be_honest(host: str, port: int, cores: set[int], warm: Any, stop: Any, out: Any) -> None:
    """In a process of its own: ask at the fixed rate until told to stop, then hand over what was seen."""
    os.sched_setaffinity(0, cores)
    rows: list[tuple[float, float, int]] = []

    async def ask(due: float, kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], fresh: bool) -> None:
        status = 0
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(30):
                for attempt in range(2):
                    reused = bool(kept) and not fresh and attempt == 0
                    reader, writer = kept.pop() if reused else await asyncio.open_connection(host, port)
                    try:
                        writer.write(HONEST)
                        head = await reader.readuntil(b"\r\n\r\n")
                    except (OSError, asyncio.IncompleteReadError):
                        writer.close()
                        if reused:  # a connection that was idle may be closed: any client tries again
                            continue
                        raise
                    length = next(
                        int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"
                    )
                    await reader.readexactly(length)
                    status = int(head[9:12])
                    if fresh or b"connection: close" in head.lower():
                        writer.close()
                    else:
                        kept.append((reader, writer))
                    break
        rows.append((due, time.monotonic() - due, status))
        if len(rows) == WARM:
            warm.set()

    async def go() -> None:
        kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        tasks, due, n = set[asyncio.Task[None]](), time.monotonic(), 0
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(ask(due, kept, n % 2 == 0))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due, n = due + 1 / RATE, n + 1
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        for task in tasks:
            task.cancel()

    asyncio.run(go())
    out.put(rows)


class Watch:
    """Notes the machine's own stalls from a process of its own."""

    def __init__(self, cores: set[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.stop, self.out = spawn.Event(), spawn.Queue()
        self.process = spawn.Process(target=be_awake, args=(cores, self.stop, self.out), daemon=True)
        self.process.start()

    def end(self) -> list[tuple[float, float]] | None:
        self.stop.set()
        stalls: list[tuple[float, float]] | None = self.out.get(timeout=60)
        self.process.join()
        return stalls


class HonestClient:
    """Asks from a process of its own; made once it is warm."""

    def __init__(self, host: str, port: int, cores: set[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        warm, self.stop, self.out = spawn.Event(), spawn.Event(), spawn.Queue()
        self.process = spawn.Process(target=be_honest, args=(host, port, cores, warm, self.stop, self.out))
        self.process.start()
        warm.wait(LIMIT)

    def end(self) -> Honest:
        self.stop.set()
        rows = self.out.get(timeout=120)
        self.process.join()
        return Honest(*map(list, zip(*rows, strict=True)))


def prepare_attackers() -> None:
    """Start the process that attackers are forked from: if each imported torch first, that would take seconds, in turns
    with the server."""
    FORKS.set_forkserver_preload(["dubito.models.embedded", "httpx", "rich.table"])
    first = FORKS.Process(target=time.time)
    first.start()
    first.join()


def be_hostile(name: str, target: Target, cores: set[int], seconds: float) -> None:
    os.sched_setaffinity(0, cores)

    async def go() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ATTACKS[name].run(target)

    asyncio.run(go())
    os._exit(0)  # connections end with the process, at once


def resident(pid: int) -> float:
    """MB of the process and its children."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 1e6


@dataclass
class Row:
    attack: Attack
    quiet: Seen
    during: Seen
    watched: bool  # the machine's stalls are known
    open: int  # connections of the attackers, at the most in the last second of the attack
    before: float
    peak: float
    after: float
    recovered: float
    stopped: float  # seconds that SIGTERM took
    code: int


def measure(attack: Attack, python: str, folder: Path, source: str | None = None, settings: Sequence[str] = ()) -> Row:
    cores = sorted(os.sched_getaffinity(0))
    own, theirs = set(cores[:-1]) or set(cores), {cores[-1]}
    digits = repository(folder) if attack.repository else embedded("digits")
    models = [digits, *(embedded(name) for name in attack.beside)]
    words = [word for setting in (*attack.settings, *settings) for word in ("--set", setting)]
    reader, writer = os.pipe()
    log = writer if attack.stuck_log else os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    server, port = start([python, "-m", "dubito", "serve", *map(str, models), *words], own, log, folder)
    try:
        wait_ready(server, port, own)
        honest, watch = HonestClient("127.0.0.1", port, own), Watch(own)
        time.sleep(QUIET)
        before, begin = resident(server.pid), time.monotonic()
        target = Target("127.0.0.1", port, server.pid, source)
        hostile = FORKS.Process(target=be_hostile, args=(attack.name, target, theirs, attack.seconds))
        hostile.start()
        peak, connections, files = before, [0], psutil.Process(server.pid).num_fds()
        while hostile.is_alive():
            peak = max(peak, resident(server.pid))
            if time.monotonic() > begin + attack.seconds - 1:
                connections.append(psutil.Process(server.pid).num_fds() - files)
            time.sleep(0.1)
        end = time.monotonic()
        time.sleep(AFTER)
        after = resident(server.pid)
        seen, stalls = honest.end(), watch.end()
        quiet, during = (seen.between(*span, stalls or []) for span in ((begin - QUIET, begin), (begin, end)))
        asked = time.monotonic()
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        stopped, code = time.monotonic() - asked, server.poll()
        recovered = seen.recovered(end, 3 * quiet.p99 / 1000)
        return Row(
            attack,
            quiet,
            during,
            stalls is not None,
            max(connections),
            before,
            peak,
            after,
            recovered,
            stopped,
            -9 if code is None else code,
        )
    finally:
        server.kill()
        server.wait()
        for file in {reader, writer, log}:
            os.close(file)


def repository(folder: Path) -> Path:
    """The digits, a folder whose name is none for a model, and a damaged file."""
    whole, root = embedded("digits").read_bytes(), folder / "models"
    for name, content in (("digits", whole), ("no name", whole), ("damaged", whole[:-3])):
        path = root / name / "1" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return root


def start(words: list[str], cores: set[int], log: int, folder: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """A server on some cores alone, and its port. One thread computes: it has hardly more than a core."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUBITO_")}
    clean |= {"OMP_NUM_THREADS": "1"}
    words = [*words, "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, env=clean, cwd=folder)
    os.sched_setaffinity(server.pid, cores)
    return server, port


def wait_ready(server: Any, port: int, cores: set[int]) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and server.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200:
                for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children()):
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, cores)
                return
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--point", type=int, help="attacks of this point")
    parser.add_argument("--python", default=sys.executable, help="whose dubito is attacked")
    parser.add_argument("--source", help="the attackers' address, such as 127.0.0.2; without it, the honest client's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the server: workers=2")
    args = parser.parse_args()
    chosen = [one for one in ATTACKS.values() if args.only in one.name and args.point in (None, one.point)]
    if not chosen:
        raise SystemExit(f"no attack is called {args.only!r}; there are: {', '.join(ATTACKS)}.")
    table = Table(title="attacks")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "attack" else "right")
    console = Console(width=160)
    prepare_attackers()
    for one in chosen:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(one, args.python, Path(folder), args.source, args.set)
        memory = f"{row.before:.0f}, {row.peak:.0f}, {row.after:.0f}"
        stopped = f"{row.stopped:.1f} ({row.code})"
        both = (row.quiet, row.during)
        out = ", ".join(f"{s.left_out}/{s.number}" for s in both) if row.watched else "not known"
        values = [*(f"{s.p99:.1f}" for s in both), out, str(row.during.lost), str(row.open), memory]
        values += [f"{row.recovered:.1f}", stopped]
        table.add_row(f"{one.point}: {one.name}", *values)
        console.print(f"{one.point}: {one.name}", *values, sep=" | ")
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
