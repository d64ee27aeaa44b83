"""Server CPU of one request at concurrency 16: ours over HTTP and gRPC, FastAPI with a pydantic body, and LitServe;
and beside a bare grpc.aio server that answers 400 bytes without a model.

All serve the same small network on one 3 × 32 × 32 float32 image. Processor time is that of the server's whole process
tree over many requests, from a client in a process of its own; medians over rounds in which the servers take turns.
"Beyond the model" takes off what the model costs: ours by the processor time that the server itself counts for its
engine (`dubito_engine_cpu_seconds_total`), the others by the plain network on one image. All run torch on one thread,
and none logs its requests.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import _grpc
from benchmarks._grpc import GrpcTarget, message_of
from benchmarks._measure import machine
from benchmarks._server import Server, free_port, running
from benchmarks._tiny import CLASSES, SHAPE, answer, network
from dubito.models import bayesianize, save
from dubito.models.manifest import Card, Input
from dubito.service.client import infer_body
from dubito.service.load import Load, Target, post, put

JSON = {"content-type": "application/json"}


@dataclass
class Rival:
    """One server and one kind of request."""

    name: str
    server: Server
    target: Target | GrpcTarget
    ours: bool
    computes: bool = True  # runs the network
    cpu: list[float] = field(default_factory=list)  # seconds per request, each round
    rows: list[float] = field(default_factory=list)  # mean batch, each round
    model: list[float] = field(default_factory=list)  # seconds per request, each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        artifact = write_artifact(Path(folder) / "tiny.safetensors")
        rivals = start(stack, artifact, Path(folder), console)
        measure(rivals, args.requests, args.rounds, args.concurrency)
        console.print(compare(rivals, args.concurrency))
    console.print(machine())


def start(stack: ExitStack, artifact: Path, folder: Path, console: Console) -> list[Rival]:
    x = np.random.default_rng(0).standard_normal((1, *SHAPE), dtype=np.float32)
    rpc_port = free_port()
    command = ["dubito", "serve", str(artifact), "--set", "samples=1", "--set", "log_level=warning"]
    command += ["--grpc-port", str(rpc_port)]
    ours = stack.enter_context(running(command, folder / "ours.log", "/readyz"))
    binary, headers = infer_body(x, {})
    infer, nested = "/v2/models/tiny/infer", orjson.dumps({"inputs": x}, option=orjson.OPT_SERIALIZE_NUMPY)
    rivals = [
        Rival("dubito, OIP binary", ours, post(ours.url, infer, binary, headers), True),
        Rival("dubito, OIP JSON", ours, post(ours.url, infer, flat(x), JSON), True),
        Rival("dubito, v1 JSON", ours, post(ours.url, "/v1/models/tiny/predict", nested, JSON), True),
        Rival("dubito, gRPC", ours, GrpcTarget(f"127.0.0.1:{rpc_port}", message_of(x, "tiny")), True),
    ]
    bare = stack.enter_context(running(["benchmarks._grpc"], folder / "grpc.log", None))
    address = bare.url.removeprefix("http://")
    rivals.append(Rival("bare grpc.aio", bare, GrpcTarget(address, message_of(x, "tiny")), False, computes=False))
    others = {"fastapi": ("FastAPI, pydantic body, JSON", "/docs"), "litserve": ("LitServe, JSON", "/health")}
    for kind, (name, health) in others.items():
        if find_spec(kind) is None:
            console.print(f"{kind} is not installed (pip install '.[bench]'): left out.")
            continue
        server = stack.enter_context(running([f"benchmarks._rival_{kind}"], folder / f"{kind}.log", health))
        rivals.append(Rival(name, server, post(server.url, "/predict", nested, JSON), False))
    return rivals


def flat(x: NDArray[np.float32]) -> bytes:
    tensor = {"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.reshape(-1)}
    return orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)


def measure(rivals: list[Rival], requests: int, rounds: int, concurrency: int) -> None:
    """Measure all in turn, so that noise on the machine affects all; the first round is not counted."""
    spawn = multiprocessing.get_context("spawn")
    plain = network_cpu()
    with (
        ProcessPoolExecutor(1, mp_context=spawn) as client,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("measuring", total=(rounds + 1) * len(rivals))
        for turn in range(rounds + 1):
            for rival in rivals:
                met, before = counters_of(rival), rival.server.cpu()
                load: Load = client.submit(drive, rival.target, requests, concurrency).result()
                spent = rival.server.cpu() - before
                if not (load.status == 200).all():
                    raise SystemExit(f"{rival.name}: not every request was answered: {load.summary()['statuses']}")
                if turn:
                    rival.cpu.append(spent / requests)
                    count, rows, engine = (after - b for after, b in zip(counters_of(rival), met, strict=True))
                    rival.rows.append(rows / count if count else 1.0)
                    rival.model.append(engine / requests if rival.ours else plain if rival.computes else 0.0)
                bar.advance(task)


def drive(target: Target | GrpcTarget, requests: int, concurrency: int) -> Load:
    """A closed loop, in the client's process."""
    if isinstance(target, GrpcTarget):
        return _grpc.put(target, requests, concurrency)
    return put(target, np.zeros(requests), connections=concurrency)


def counters_of(rival: Rival) -> tuple[float, ...]:
    """Batches, rows and seconds of the engine that our server has counted."""
    names = ("dubito_batch_size_count", "dubito_batch_size_sum", "dubito_engine_cpu_seconds_total")
    if not rival.ours:
        return (0.0, 0.0, 0.0)
    metrics = rival.server.metrics()
    return tuple(metrics[name] for name in names)


def compare(rivals: list[Rival], concurrency: int) -> Table:
    table = Table(title=f"server CPU per request, concurrency {concurrency}, one 3 × 32 × 32 image")
    for column in ("", "whole, ms", "mean batch", "model, ms", "beyond the model, ms", "rounds from, to"):
        table.add_column(column, justify="left" if not column else "right")
    for rival in rivals:
        beyond = [1000 * (whole - model) for whole, model in zip(rival.cpu, rival.model, strict=True)]
        whole, model = (1000 * statistics.median(values) for values in (rival.cpu, rival.model))
        values = (f"{whole:.3f}", f"{statistics.median(rival.rows):.1f}", f"{model:.3f}")
        table.add_row(rival.name, *values, f"{statistics.median(beyond):.3f}", f"{min(beyond):.3f}, {max(beyond):.3f}")
    return table


def network_cpu() -> float:
    net, x = network().eval(), torch.randn(1, *SHAPE)
    return processor_time(lambda: answer(net, x))


def processor_time(run: Callable[[], object], rounds: int = 7, times: int = 200) -> float:
    """Processor time of one call, over all threads: the median of several rounds after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        before = time.process_time()
        for _ in range(times):
            run()
        seconds.append((time.process_time() - before) / times)
    return statistics.median(seconds[1:])


def write_artifact(path: Path) -> Path:
    card = Card(input=Input(shape=SHAPE), labels=tuple(map(str, range(CLASSES))))
    save(bayesianize(network(), "deterministic"), path, card=card)
    return path


if __name__ == "__main__":
    main()
