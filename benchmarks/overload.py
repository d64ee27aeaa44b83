"""Twice what the server can do: how many requests are refused, how fast, and what those who are accepted wait.

The capacity is measured first, by a closed loop that the queue can hold. Then requests come at twice that rate,
whatever becomes of them. Refusals should take the server less than 5 ms; what is under way, an accepted request itself
included, is bounded, so it waits at most for that work over the rate at which work is done. Times are given as the
client sees them, from when each request was due, and as the server logs them; on few cores the client takes time from
the server.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import Server, running
from dubito.service.load import Floats, Load, doubts, poisson, predictions, put, short, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait")
    parser.add_argument("--batch", type=int, default=16, help="requests that are answered together")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--times", type=float, default=2.0, help="the capacity")
    args = parser.parse_args()
    K = args.samples
    flags = (f"queue_work={args.queue * K}", f"batch_work={args.batch * K}")
    command = ["dubito", "serve", *(word for flag in flags for word in ("--set", flag))]
    console = Console()
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log", "/readyz") as server:
        _, target = predictions(server.url, "digits", 1, str(K), None)
        put(target, np.zeros(200), connections=args.queue)
        requests = int(args.seconds * put(target, np.zeros(200), connections=args.queue).achieved())
        alone = put(target, np.zeros(requests), connections=args.queue)
        capacity = alone.achieved()
        seen = len(server.log.read_text())
        rate = round(args.times * capacity)
        found = put(target, poisson(rate, args.seconds), rate=rate)
        logged = log_lines(server, seen)
    console.print(f"capacity: {capacity:.0f} requests a second (closed loop, {args.queue} connections, K = {K})")
    console.print(report(found, logged, f"{args.times:g} times the capacity, {rate}/s for {args.seconds:g} s"))
    refused = float((found.status == 429).mean())
    bound = args.queue / found.achieved()
    console.print(f"refused: {100 * refused:.1f} % of {len(found.due)}; answered: {found.achieved():.0f} a second")
    console.print(f"bound for accepted requests: {args.queue} requests / that = {1000 * bound:.0f} ms")
    for doubt in doubts([found]):
        console.print(doubt)
    console.print(machine())


def log_lines(server: Server, seen: int) -> dict[int, Floats]:
    """Seconds of each request by status, as the server measured them."""
    found: dict[int, list[float]] = {}
    for line in server.log.read_text()[seen:].splitlines():
        told = json.loads(line) if line.startswith("{") else {}
        if told.get("message") == "request":
            found.setdefault(told["status"], []).append(told["ms"] / 1000)
    return {status: np.array(values) for status, values in found.items()}


def report(found: Load, logged: dict[int, Floats], title: str) -> Table:
    table = Table(title=title)
    for column in ("reply", "measured by", "count", "p50, ms", "p99, ms", "max, ms"):
        table.add_column(column, justify="left" if column in ("reply", "measured by") else "right")
    for status in sorted(logged):
        mine = found.latency[found.status == status]
        for who, values in (("server", logged[status]), ("client", mine)):
            told = spread(values)
            shown = [short(told[name]) if told else "" for name in ("p50", "p99", "max")]
            table.add_row(str(status), who, str(len(values)), *shown)
    return table


if __name__ == "__main__":
    main()
