"""Load of twice the server's capacity: share and speed of refusals, and latency of accepted requests.

The capacity is measured first, by a closed loop. The queue is then made as long as the sizing rule of
docs/operations.md says for a latency that is wanted (two fifths of what the node does in that time), and requests come
at twice the capacity, whatever becomes of them. Refusals should take the server less than 5 ms, and 99 % of accepted
requests should be answered in the time that was wanted. Times are given as the client sees them, from when each request
was due, and as the server logs them; on few cores the client takes time from the server.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import Server, running
from dubito.models.embedded import embedded
from dubito.service.load import Floats, Load, doubts, poisson, predictions, put, short, spread

HEADROOM = 2.5  # the rate is a mean, and refusing the others takes time, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--bound", type=float, default=250, help="ms in which accepted requests are to be answered")
    parser.add_argument("--batch", type=int, default=16, help="requests that are answered together")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--times", type=float, default=2.0, help="the capacity")
    args = parser.parse_args()
    K, console = args.samples, Console()
    with serving(K, args.batch, args.batch * 16) as server:
        capacity = closed_loop(server, K, args.seconds, connections=4 * args.batch)
    queue = max(1, int(args.bound / 1000 * capacity / HEADROOM))
    with serving(K, args.batch, queue) as server:
        _, target = predictions(server.url, "digits", 1, str(K), None)
        put(target, np.zeros(200), connections=min(queue, args.batch))
        seen = len(server.log.read_text())
        rate = round(args.times * capacity)
        load = put(target, poisson(rate, args.seconds), rate=rate)
        logged = log_lines(server, seen)
    console.print(f"capacity: {capacity:.0f} requests a second (closed loop, K = {K}); room for {queue} under way")
    console.print(report(load, logged, f"{args.times:g} times the capacity, {rate}/s for {args.seconds:g} s"))
    refused = float((load.status == 429).mean())
    in_time = float((load.latency[load.status == 200] <= args.bound / 1000).mean())
    console.print(f"refused: {100 * refused:.1f} % of {len(load.due)}; answered: {load.achieved():.0f} a second")
    console.print(f"accepted and answered within {args.bound:g} ms, as the client sees it: {100 * in_time:.2f} %")
    for doubt in doubts([load]):
        console.print(doubt)
    console.print(machine())


@contextmanager
def serving(K: int, batch: int, queue: int) -> Iterator[Server]:
    """A server of the embedded digits; `batch` and `queue` are its limits, in rows × draws."""
    flags = (f"queue_work={queue * K}", f"batch_work={batch * K}")
    command = ["dubito", "serve", str(embedded("digits")), *(word for flag in flags for word in ("--set", flag))]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log", "/readyz") as server:
        yield server


def closed_loop(server: Server, K: int, seconds: float, connections: int) -> float:
    """Requests a second."""
    _, target = predictions(server.url, "digits", 1, str(K), None)
    put(target, np.zeros(200), connections=connections)
    requests = int(seconds * put(target, np.zeros(200), connections=connections).achieved())
    return put(target, np.zeros(requests), connections=connections).achieved()


def log_lines(server: Server, seen: int) -> dict[int, Floats]:
    """Seconds of each request by status, from the server's log."""
    by_status: dict[int, list[float]] = {}
    for line in server.log.read_text()[seen:].splitlines():
        fields = json.loads(line) if line.startswith("{") else {}
        if fields.get("message") == "request":
            by_status.setdefault(fields["status"], []).append(fields["ms"] / 1000)
    return {status: np.array(values) for status, values in by_status.items()}


def report(load: Load, logged: dict[int, Floats], title: str) -> Table:
    table = Table(title=title)
    for column in ("reply", "measured by", "count", "p50, ms", "p99, ms", "max, ms"):
        table.add_column(column, justify="left" if column in ("reply", "measured by") else "right")
    for status in sorted(logged):
        mine = load.latency[load.status == status]
        for who, values in (("server", logged[status]), ("client", mine)):
            percentiles = spread(values)
            shown = [short(percentiles[name]) if percentiles else "" for name in ("p50", "p99", "max")]
            table.add_row(str(status), who, str(len(values)), *shown)
    return table


if __name__ == "__main__":
    main()
