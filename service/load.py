"""An open-loop load generator. Requests are sent at their due times, whether or not earlier ones were answered, and
latency counts from the due time: a server that stalls delays all requests that come due meanwhile."""

import asyncio
import re
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dubito.models.errors import DubitoError
from dubito.models.extras import need
from dubito.service.client import Client, checked, infer_body

CONNECTIONS = 512  # most connections; further requests wait for one, which counts in their latency
PATIENCE = 30.0  # seconds to wait for replies after the last request
MOST_REQUESTS = 5_000_000
LATE = 0.005  # seconds that the generator may be late before its figures are doubtful
UNANSWERED, BROKEN = 0, 1  # in place of an HTTP status: no reply in time, no connection
WORDS = {UNANSWERED: "no reply", BROKEN: "no connection"}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
PLOTS = (".png", ".svg", ".pdf")

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)

Floats = NDArray[np.float64]


class LoadError(DubitoError):
    """Options of a load that cannot be used."""


@dataclass(frozen=True)
class Target:
    """A server, and the request that is sent to it."""

    host: str
    port: int
    tls: bool
    request: bytes


@dataclass(frozen=True)
class Load:
    """The outcome of each request that came due; times are seconds from the start."""

    rate: float  # requests per second that were to be sent
    due: Floats
    left: Floats  # when the generator handled it
    sent: Floats  # when it was written to a connection; NaN: never
    ended: Floats  # when the last byte of the reply came; NaN: never
    status: NDArray[np.int64]
    stopped: bool = False  # by Ctrl-C

    @property
    def latency(self) -> Floats:
        return self.ended - self.due

    @property
    def late(self) -> Floats:
        """Delay caused by the generator, not by the server."""
        return self.left - self.due

    @property
    def seconds(self) -> float:
        return float(max(np.nanmax(self.ended, initial=0.0), self.due.max(initial=0.0)))

    def achieved(self, status: int = 200) -> float:
        """Replies per second."""
        return float((self.status == status).sum() / self.seconds) if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        kinds = sorted((int(status) for status in np.unique(self.status)), key=lambda kind: (kind in WORDS, kind))
        return {
            "rate": self.rate,
            "seconds": round(self.seconds, 3),
            "due": len(self.due),
            "achieved_rate": round(self.achieved(), 2),
            "statuses": {WORDS.get(kind, str(kind)): int((self.status == kind).sum()) for kind in kinds},
            "latency_ms": {str(kind): spread(self.latency[self.status == kind]) for kind in kinds if kind not in WORDS},
            "late_ms": spread(self.late),
            "stopped": self.stopped,
        }


def spread(seconds: Floats) -> dict[str, float]:
    """Percentiles in milliseconds; each is an observed value."""
    if not len(seconds):
        return {}
    return {name: round(1000 * float(np.quantile(seconds, q, method="higher")), 3) for name, q in QUANTILES.items()}


def poisson(rate: float, seconds: float, seed: int = 0) -> Floats:
    """Arrival times of a Poisson process, in seconds."""
    for name, value in (("rate", rate), ("seconds", seconds)):
        if not 0 < value < float("inf"):
            raise LoadError(f"{name} is {value:g}; expected a number above 0.")
    if rate * seconds > MOST_REQUESTS:
        raise LoadError(f"{rate:g} requests a second for {seconds:g} s are more than {MOST_REQUESTS:,} in all.")
    rng = np.random.default_rng(seed)
    due = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
    if not len(due):
        raise LoadError(f"at {rate:g} requests a second none came due in {seconds:g} s; take more of either.")
    return due


def post(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> Target:
    """A target that POSTs the body to a path below the URL."""
    parts = urlsplit(checked(url))
    assert parts.hostname is not None
    tls = parts.scheme == "https"
    lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"host: {parts.netloc}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if not (head := "\r\n".join(lines)).isascii() or head.count("\n") != len(lines) - 1:
        raise LoadError("an address or a key holds characters that a request cannot carry; expected plain letters.")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, f"{head}\r\n\r\n".encode() + body)


def predictions(url: str, model: str | None, rows: int, samples: str | None, key: str | None) -> tuple[str, Target]:
    """Name of the model (the first, if None), and a request with normally distributed inputs as a binary tensor."""
    with Client(url, key) as client:
        description = client.model(model) if model is not None else next(iter(client.models()), None)
    if description is None:
        raise LoadError(f"{url} serves no model.")
    if rows < 1:
        raise LoadError(f"rows is {rows}; expected at least 1.")
    if samples is not None and samples != "auto" and not samples.isdecimal():
        raise LoadError(f"samples is {samples!r}; expected a whole number, or auto.")
    x = np.random.default_rng(0).standard_normal((rows, *description["input"]["shape"]), dtype=np.float32)
    options = {} if samples is None else {"samples": samples if samples == "auto" else int(samples)}
    body, headers = infer_body(x, options)
    who = {} if key is None else {"x-api-key": key}
    return description["name"], post(url, f"/v2/models/{description['name']}/infer", body, {**headers, **who})


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection, one request at a time; `done` is called with the status of the reply, or BROKEN."""

    def __init__(self, done: "Callable[[Connection, int], None]") -> None:
        self.done = done
        self.buffer = bytearray()
        self.status = self.whole = 0  # whole: bytes of the reply, once its head was read
        self.busy = self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> None:
        self.busy = True
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.whole:
            self._read_head()
        if self.whole and len(self.buffer) >= self.whole:
            self.buffer.clear()
            self.whole, self.busy = 0, False
            self.done(self, self.status)

    def _read_head(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[: end + 2])
        status, length = STATUS.match(head), LENGTH.search(head)
        if status is None or length is None:  # not HTTP, or a reply without content-length
            self.transport.abort()
            return
        self.status, self.whole = int(status[1]), end + 4 + int(length[1])
        if CLOSE.search(head):
            self.lost = True  # not to be used after this reply

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.busy:
            self.busy = False
            self.done(self, BROKEN)


class LoadRun:
    """Sends the requests of one load, and opens a connection when none is idle."""

    def __init__(self, target: Target, due: Floats, connections: int, tick: Callable[[int], None]) -> None:
        self.target, self.due, self.most, self.tick = target, due, connections, tick
        n = len(due)
        self.left, self.sent, self.ended = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
        self.status = np.full(n, UNANSWERED)
        self.gone = self.back = self.open = 0  # number of requests sent, of requests settled, of connections
        self.idle: list[Connection] = []
        self.waiting: deque[int] = deque()
        self.carries: dict[Connection, int] = {}
        self.opening: set[asyncio.Task[None]] = set()
        self.all_settled = asyncio.Event()

    async def run(self, rate: float) -> Load:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        ticking = asyncio.ensure_future(self._tick())
        self.began = self.now()
        stopped = False
        try:
            await self._send_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self.all_settled.wait()
        except asyncio.CancelledError:  # Ctrl-C
            stopped = True
        for task in (ticking, *self.opening):
            task.cancel()
        for connection in (*self.idle, *self.carries):
            connection.busy = False
            connection.transport.abort()
        cut = slice(self.gone)
        return Load(rate, self.due[cut], self.left[cut], self.sent[cut], self.ended[cut], self.status[cut], stopped)

    async def _send_due(self) -> None:
        while self.gone < len(self.due):
            now = self.now() - self.began
            while self.gone < len(self.due) and self.due[self.gone] <= now:
                self.left[self.gone] = now
                self._dispatch(self.gone)
                self.gone += 1
            if self.gone < len(self.due):
                await asyncio.sleep(max(0.0, self.began + self.due[self.gone] - self.now()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.tick(self.gone)

    def _dispatch(self, i: int) -> None:
        while self.idle:
            connection = self.idle.pop()
            if not connection.lost:
                self._send(i, connection)
                return
            self.open -= 1
        if self.open >= self.most:
            self.waiting.append(i)
            return
        self.open += 1
        task = asyncio.ensure_future(self._open(i))
        self.opening.add(task)
        task.add_done_callback(self.opening.discard)

    async def _open(self, i: int) -> None:
        loop, to = asyncio.get_running_loop(), self.target
        try:
            _, connection = await loop.create_connection(
                partial(Connection, self._done), to.host, to.port, ssl=to.tls or None
            )
        except OSError:
            self.open -= 1
            self._settle(i, BROKEN)
        else:
            self._send(i, connection)

    def _send(self, i: int, connection: Connection) -> None:
        self.sent[i] = self.now() - self.began
        self.carries[connection] = i
        connection.send(self.target.request)

    def _done(self, connection: Connection, status: int) -> None:
        i = self.carries.pop(connection)
        if connection.lost:
            connection.transport.abort()
            self.open -= 1
        else:
            self.idle.append(connection)
        self._settle(i, status)

    def _settle(self, i: int, status: int) -> None:
        self.status[i] = status
        if status != BROKEN:
            self.ended[i] = self.now() - self.began
        self.back += 1
        if self.waiting:
            self._dispatch(self.waiting.popleft())
        elif self.back == len(self.due):
            self.all_settled.set()


def put(
    target: Target,
    due: Floats,
    *,
    rate: float = float("nan"),
    connections: int = CONNECTIONS,
    tick: Callable[[int], None] = lambda gone: None,
) -> Load:
    """Send requests at the times `due`. All at 0: a closed loop, in which a connection sends again when answered."""

    async def send() -> Load:
        return await LoadRun(target, due, connections, tick).run(rate)

    # select() wakes within microseconds of a time; epoll, which the default loops use, only within a millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(send())


def rates_of(rate: float | None, rates: str | None) -> list[float]:
    """The rates of the options --rate and --rates, without duplicates."""
    if rate is not None and rates is not None:
        raise LoadError("both --rate and --rates came; expected one of them.")
    if rates is None:
        return [50.0 if rate is None else rate]
    try:
        return list(dict.fromkeys(float(word) for word in rates.replace(",", " ").split()))
    except ValueError:
        raise LoadError(f"rates are {rates!r}; expected numbers such as 50,100,200.") from None


def address_in(words: list[str], rates: str | None) -> tuple[str, str | None]:
    """The server's address, and the rates with the numbers that stand apart: `--rates 10 20 40` gives two of them."""
    addresses = [word for word in words if not _number(word)]
    numbers = [word for word in words if _number(word)]
    if len(addresses) != 1 or (numbers and rates is None):
        came = ", ".join(words)
        raise LoadError(f"{came} came; expected one address, such as http://localhost:8000, and rates after --rates.")
    return addresses[0], " ".join([rates, *numbers]) if rates is not None else None


def _number(word: str) -> bool:
    with suppress(ValueError):
        float(word)
        return True
    return False


def put_each(target: Target, plans: Mapping[float, Floats]) -> list[Load]:
    """Run one rate after the other, with a progress bar on a terminal; Ctrl-C ends the series."""
    loads: list[Load] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("asking", total=sum(map(len, plans.values())))
        before = 0
        for rate, due in plans.items():

            def tick(gone: int, before: int = before) -> None:
                progress.update(task, completed=before + gone, refresh=True)

            loads.append(put(target, due, rate=rate, tick=tick))
            before += len(due)
            if loads[-1].stopped:
                break
    return loads


def table(loads: list[Load], title: str) -> Table:
    rows = Table(title=title, caption="latencies in ms; late: the generator itself")
    for column in ("rate/s", "200/s", "reply", "count", *QUANTILES, "late p99"):
        rows.add_column(column, justify="left" if column == "reply" else "right")
    for load in loads:
        summary = load.summary()
        late = short(summary["late_ms"]["p99"]) if summary["late_ms"] else ""
        first = (f"{load.rate:g}", f"{load.achieved():.1f}")
        for word, count in summary["statuses"].items():
            values = summary["latency_ms"].get(word, {})
            shown = [short(values[name]) if values else "" for name in QUANTILES]
            rows.add_row(*first, word, str(count), *shown, late)
            first, late = ("", ""), ""
    return rows


def short(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def doubts(loads: list[Load]) -> list[str]:
    """Warnings about figures that are doubtful."""
    warnings = []
    for load in loads:
        late = spread(load.late).get("p99", 0.0)
        if late > 1000 * LATE:
            warnings.append(
                f"at {load.rate:g}/s the generator itself was late (p99 {late:.1f} ms), and latencies hold that too: "
                "run it on another machine, or at a lower rate."
            )
        if lost := int(np.isnan(load.ended).sum()):
            warnings.append(f"at {load.rate:g}/s {lost} requests got no reply; percentiles do not count them.")
        if load.stopped:
            warnings.append(f"stopped: at {load.rate:g}/s {len(load.due)} requests had left.")
    return warnings


def check_plot(path: Path) -> None:
    """Check the plot's path, and that plots can be made, before the load is run."""
    need("train", "matplotlib")
    if path.suffix.lower() not in PLOTS:
        raise LoadError(f"{path} is no name for a plot; expected one that ends in {', '.join(PLOTS)}.")
    if not path.parent.is_dir():
        raise LoadError(f"there is no folder {path.parent}; make it, or write the plot elsewhere.")


def plot(loads: list[Load], path: Path, title: str) -> None:
    """Plot the latencies: their distribution for one rate, percentiles by rate for several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    good = [1000 * np.sort(load.latency[load.status == 200]) for load in loads]
    if len(loads) == 1:
        axes.plot(good[0], np.arange(1, len(good[0]) + 1) / max(1, len(good[0])))
        axes.set(xscale="log", xlabel="latency from the due time, ms", ylabel="share of answered requests")
    else:
        seen = [(load.rate, spread(values / 1000)) for load, values in zip(loads, good, strict=True) if len(values)]
        for name in ("p50", "p90", "p99"):
            axes.plot([rate for rate, _ in seen], [values[name] for _, values in seen], marker="o", label=name)
        axes.set(yscale="log", xlabel="requests per second", ylabel="latency from the due time, ms")
        axes.legend()
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize="medium")
    figure.savefig(path)
