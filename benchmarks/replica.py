"""What one server (a pod, a replica) takes on this machine: memory, start, processor time of a request.

Each network is served by `dubito serve` on the CPU with one thread, first idle, then asked by 8 connections for 8
inputs each. Memory is that of the process and of its decoding processes, each page counted once (PSS).
"""

import argparse
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import Server, running
from dubito.models import bayesianize, build, load, save
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Input
from dubito.models.terminal import remark

OURS = {"digits": embedded("digits"), "clothes": embedded("clothes")}
NETWORKS = (*OURS, "resnet18-cifar")
ROWS, CONNECTIONS = 8, 8


@dataclass(frozen=True)
class Cost:
    name: str
    file: float  # MB, as are the next two
    idle: float
    busy: float  # the most that was seen
    start: float  # seconds
    cpu: float  # seconds of a request


def memory(server: Server) -> float:
    """In MB."""
    processes = (server.process, *server.process.children(recursive=True))
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def artifact(name: str, folder: Path) -> Path:
    if name in OURS:
        return OURS[name]
    torch.manual_seed(0)
    file = folder / f"{name}.safetensors"
    network = bayesianize(build(name), "ffg-u", inducing=64, start="prior")
    save(network, file, card=Card(input=Input(shape=(3, 32, 32))))
    return file


def cost(name: str, folder: Path, samples: int, requests: int) -> Cost:
    file = artifact(name, folder)
    declared = load(file).card.input
    assert declared is not None
    x = np.random.default_rng(0).normal(size=(ROWS, *declared.shape)).astype(np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = httpx.Request("POST", "http://x", json={"inputs": [tensor], "parameters": {"samples": samples}}).content
    body, headers = head + x.tobytes(), {"inference-header-content-length": str(len(head))}
    settings = ("plan_seconds=0", "buckets=1,8", "deadline_ms=600000")
    command = ["dubito", "serve", str(file), "--device", "cpu", *(f"--set={word}" for word in settings)]
    began = time.perf_counter()
    with running(command, folder / "log", "/readyz") as server:
        start, idle, peak = time.perf_counter() - began, memory(server), [0.0]
        url, stop = f"{server.url}/v2/models/{file.stem}/infer", threading.Event()

        def watch() -> None:
            while not stop.wait(0.05):
                peak[0] = max(peak[0], memory(server))

        def ask() -> None:
            with httpx.Client(timeout=600) as client:
                for _ in range(requests):
                    client.post(url, content=body, headers=headers).raise_for_status()

        threads = [threading.Thread(target=ask) for _ in range(CONNECTIONS)]
        watcher = threading.Thread(target=watch)
        before = server.cpu()
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        spent = (server.cpu() - before) / (CONNECTIONS * requests)
        stop.set()
        watcher.join()
    return Cost(name, file.stat().st_size / 1e6, idle, peak[0], start, spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2, help="of each connection")
    args = parser.parse_args()
    table = Table(
        title=f"{machine()}, one thread, K = {args.samples}, {CONNECTIONS} connections, {ROWS} inputs a request"
    )
    for column in ("network", "artifact, MB", "idle, MB", "busy, MB", "start, s", "CPU s a request"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks:
            one = cost(name, Path(folder), args.samples, args.requests)
            cells = (f"{one.file:.1f}", f"{one.idle:.0f}", f"{one.busy:.0f}", f"{one.start:.1f}", f"{one.cpu:.2f}")
            table.add_row(one.name, *cells)
            remark(f"{one.name}: {' '.join(cells)}")
    Console().print(table)


if __name__ == "__main__":
    main()
