"""Seconds of one request after another through HTTP, on one connection: median, least and 99th percentile.

    python -m benchmarks.latency [--model zoo:digits] [--samples 20] [--requests 2000] [--rounds 4]

`dubito serve` in a process of its own, with the threads that it takes by itself; one random input in each request, by
the Open Inference Protocol with binary tensors, from a client that asks again as soon as it has its answer. The pace of
the machine stands beside them: seconds of ten million additions in Python, which differ fourfold between machines.
"""

import argparse
import http.client
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import running
from dubito.service.client import infer_body

ADDITIONS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:digits")
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--requests", type=int, default=2000, help="in each round")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    table = Table("p50, ms", "least", "p99", title=f"{args.model}, one input, K = {args.samples}, one connection")
    cores = str(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        command = ("dubito", "serve", args.model)
        with running(command, Path(folder) / "log", "/readyz", OMP_NUM_THREADS=cores) as server:
            name = httpx.get(server.url + "/v1/models").json()["models"][0]["name"]
            shape = httpx.get(f"{server.url}/v2/models/{name}").json()["inputs"][0]["shape"]
            x = np.random.default_rng(0).random((1, *shape[1:]), dtype=np.float32)
            body, headers = infer_body(x, {"samples": args.samples})
            for _ in range(args.rounds):
                seconds = sorted(_asked(server.url, f"/v2/models/{name}/infer", body, headers, args.requests))
                late = seconds[int(0.99 * len(seconds))]
                table.add_row(*(f"{1000 * s:.2f}" for s in (statistics.median(seconds), seconds[0], late)))
    Console().print(table)
    print(f"{ADDITIONS:,} additions: {_pace():.2f} s; {machine()}")


def _asked(url: str, path: str, body: bytes, headers: dict[str, str], requests: int) -> list[float]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    for _ in range(requests):
        began = time.perf_counter()
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        content = reply.read()
        seconds.append(time.perf_counter() - began)
        if reply.status != 200:
            raise SystemExit(f"the server answered {reply.status}: {content[:300]!r}")
    connection.close()
    return seconds


def _pace() -> float:
    began, total = time.perf_counter(), 0
    for number in range(ADDITIONS):
        total += number
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
