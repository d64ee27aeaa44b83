"""Cost of a request beyond the device time: `dubito serve` on a GPU, asked for K draws over HTTP.

    python -m benchmarks.gpu_http [--architecture resnet50-cifar] [--inducing 64] [--samples 20]

Device time is that of one graph with its draws, in this process, by the device's clock. Then a server of the
same artifact gets OIP binary requests from clients in processes of their own: one at a time (p50 beside the device time
of one input), and from 64 connections that each send their next request when they have a reply, with one input and
with several in each (inputs a second beside back-to-back full batches of the largest bucket). Beside each: the mean
milliseconds of the server's stages, inputs of a batch, and processors that the server was busy on.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import Server, running
from benchmarks.gpu_predict import DEVICE, HALF, median_ms, network_of, ours
from benchmarks.http_overhead import drive
from dubito.models import load, save
from dubito.models.manifest import Card, Input
from dubito.models.predictions.resident import reside
from dubito.service.client import infer_body
from dubito.service.engine.engine import Engine
from dubito.service.engine.plans import PlanCache, plan_file
from dubito.service.load import Target, post
from dubito.service.metrics import STAGES
from dubito.service.settings import Settings

SHAPE = (3, 32, 32)
CONNECTIONS = 64


def device_ms(artifact: Path, batches: list[int], K: int) -> dict[int, float]:
    """Milliseconds of one pass of each size."""
    engine = Engine(reside(load(artifact), DEVICE, HALF), batches, PlanCache(plan_file(), DEVICE), 120.0)
    engine.warm(K, nullcontext())
    with torch.inference_mode():
        runs = {str(B): ours(engine, torch.randn(B, *SHAPE, device=DEVICE, dtype=HALF), K) for B in batches}
        return {int(B): ms for B, ms in median_ms(runs, 31, budget=2.0).items()}


def ask(clients: list[ProcessPoolExecutor], target: Target, requests: int, connections: int) -> tuple[float, float]:
    """p50 in milliseconds and replies per second, of connections divided among processes: a single one would be slower
    than the server."""
    some = clients[: min(len(clients), connections)]
    share = max(1, requests // len(some))
    began = time.monotonic()
    begun = [client.submit(drive, target, share, connections // len(some)) for client in some]
    loads = [one.result() for one in begun]
    rate = share * len(some) / (time.monotonic() - began)
    for one in loads:
        if not (one.status == 200).all():
            raise SystemExit(f"not every request was answered: {one.summary()['statuses']}")
    return 1000 * float(np.median(np.concatenate([one.ended - one.sent for one in loads]))), rate


def counters_of(server: Server) -> dict[str, float]:
    return {**server.metrics(), "cpu": server.cpu(), "wall": time.monotonic()}


def between(before: dict[str, float], after: dict[str, float]) -> str:
    more = {name: after[name] - before.get(name, 0.0) for name in after}
    each = {stage: 1000 * more[stage] / more["dubito_samples_count"] for stage in STAGES}
    stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in each.items())
    rows = more["dubito_batch_size_sum"] / more["dubito_batch_size_count"]
    return f"{stages}; {rows:.1f} inputs a batch; {more['cpu'] / more['wall']:.2f} processors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="resnet50-cifar")
    parser.add_argument("--inducing", type=int, default=64, help="M")
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--full", type=int, default=64, help="the largest bucket")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="inputs of a request")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8, help="processes that ask")
    args = parser.parse_args()
    if args.clients < 1 or CONNECTIONS % args.clients:
        raise SystemExit(f"{args.clients} clients cannot share {CONNECTIONS} connections alike; take 1, 2, 4, 8 or 16.")
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; this benchmark measures one.")
    spawn = multiprocessing.get_context("spawn")
    table = Table(title=f"{args.architecture}, M = {args.inducing}, K = {args.samples}, through HTTP")
    for column in ("connections", "inputs each", "device", "through HTTP", ""):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = [stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for _ in range(args.clients)]
        artifact = Path(folder) / "net.safetensors"
        save(network_of(args.architecture, args.inducing, False, SHAPE), artifact, card=Card(input=Input(shape=SHAPE)))
        device = device_ms(artifact, [1, args.full], args.samples)
        most = args.full / device[args.full] * 1000
        command = ["dubito", "serve", str(artifact), "--device", "cuda", "--set", f"samples={args.samples}"]
        buckets = [size for size in Settings().buckets if size < args.full] + [args.full]
        command += ["--set", f"buckets={','.join(map(str, buckets))}", "--set", "log_level=warning"]
        with running(command, Path(folder) / "server.log", "/readyz") as server:
            for connections, rows in [(1, 1), *((CONNECTIONS, rows) for rows in args.rows)]:
                x = np.random.default_rng(0).standard_normal((rows, *SHAPE), dtype=np.float32)
                target = post(server.url, "/v2/models/net/infer", *infer_body(x, {}))
                busy = most / rows if connections > 1 else 1000 / (device[1] + 1)
                requests = max(connections, round(args.seconds * busy))
                ask(clients, target, min(requests, 200), connections)
                before = counters_of(server)
                runs = [ask(clients, target, requests, connections) for _ in range(args.rounds)]
                stages = between(before, counters_of(server))
                if connections == 1:
                    ms = statistics.median(ms for ms, _ in runs)
                    cells = (f"{device[1]:.3f} ms", f"{ms:.3f} ms", f"+ {ms - device[1]:.3f} ms")
                else:
                    rate = rows * statistics.median(rate for _, rate in runs)
                    cells = (f"{most:,.0f} /s", f"{rate:,.0f} /s", f"{rate / most:.2f}")
                table.add_row(str(connections), str(rows), *cells)
                print(connections, rows, *cells, stages, sep="  ", flush=True)
    Console(width=100).print(table)
    print(machine(), torch.cuda.get_device_name(), sep=", ")


if __name__ == "__main__":
    main()
