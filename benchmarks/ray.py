"""Ray Serve on two nodes under load: a replica killed, a setting rolled out, a node removed; and what the hop costs.

Clients send one prediction after the other, with a fixed seed, and send a request that fails once more. Beside it, the
same artifact in one process (`dubito serve`), asked by one client at a time. Needs the extra ray.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import free_port, running
from dubito.deploy.ray.application import NAME, ReplicaOptions, application_of, prepare_environment
from dubito.models import bayesianize, build, save
from dubito.models.manifest import Card, Input
from dubito.service.settings import Settings, read_settings

BODY = json.dumps({"inputs": [[0.5] * 16], "samples": 8, "seed": 1}).encode()
HEADERS = {"content-type": "application/json"}
REPLICA = f"ray::ServeReplica:{NAME}:{NAME}"


@dataclass
class Tally:
    """What clients saw in one phase."""

    name: str
    sent: int = 0
    once: int = 0  # failed without a retry
    twice: int = 0  # failed with one
    why: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)  # predictions, as JSON
    seconds: list[float] = field(default_factory=list)


class Clients:
    """Threads that ask for predictions until they are stopped; `phase` collects what they see."""

    def __init__(self, port: int, model: str, number: int) -> None:
        self.port, self.path, self.phase, self.stopped = port, f"/v1/models/{model}/predict", Tally("warm-up"), False
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(number)]

    def __enter__(self) -> "Clients":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join()

    def begin(self, name: str) -> Tally:
        with self.lock:
            self.phase = Tally(name)
        return self.phase

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stopped:
            phase, failures = self.phase, list[str]()
            began = time.perf_counter()
            for _ in range(2):
                answer, why = ask(connection, self.path)
                if not why:
                    break
                failures.append(why)
                connection.close()
            with self.lock:
                phase.sent += 1
                phase.once += len(failures) > 0
                phase.twice += len(failures) > 1
                phase.why |= set(failures)
                phase.seconds.append(time.perf_counter() - began)
                phase.answers |= {answer} if answer else set()


def ask(connection: http.client.HTTPConnection, path: str) -> tuple[str, str]:
    """The predictions, or why there are none."""
    try:
        connection.request("POST", path, BODY, HEADERS)
        reply = connection.getresponse()
        content = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return "", type(error).__name__
    return (json.dumps(json.loads(content)["predictions"]), "") if reply.status == 200 else ("", str(reply.status))


def alone(port: int, model: str, seconds: float) -> tuple[list[float], str]:
    """Latencies of one client, and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    path, times, end = f"/v1/models/{model}/predict", list[float](), time.perf_counter() + seconds
    for _ in range(20):
        answer, why = ask(connection, path)
        assert not why, why
    while time.perf_counter() < end:
        began = time.perf_counter()
        ask(connection, path)
        times.append(time.perf_counter() - began)
    return times, answer


def replicas() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(REPLICA)]


def wait_for(number: int, seconds: float = 120.0) -> None:
    """Until so many replicas answer."""
    from ray import serve

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        if states == {"RUNNING": number} and len(replicas()) == number:
            return
        time.sleep(0.5)
    raise TimeoutError(f"{number} replicas do not run: {states}")


@dataclass(frozen=True)
class Outcome:
    phases: list[Tally]
    through_ray: list[float]  # seconds, one client
    one_process: list[float]
    answers: set[str]  # of both


def measure(seconds: float, clients: int) -> Outcome:
    prepare_environment()
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.safetensors"
        net = build("mlp", inputs=16, hidden=[64], outputs=4)
        save(bayesianize(net, "ffg-u", inducing=16), file, card=Card(input=Input(shape=(16,))))
        command = [
            "dubito",
            "serve",
            str(file),
            "--device",
            "cpu",
            "--set",
            "plan_seconds=0",
            "--set",
            "log_level=error",
        ]
        with running(command, Path(folder) / "log", "/readyz") as server:
            plain, answer = alone(int(server.url.rpartition(":")[2]), "small", seconds)
        port = free_port()
        known = read_settings(None, models=[file], device="cpu", plan_seconds=0.0, port=port, log_level="error")
        os.environ["OMP_NUM_THREADS"] = "1"
        node = {"node_ip_address": "127.0.0.1", "num_cpus": 2}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        second = cluster.add_node(**node)
        try:
            ray.init(address=cluster.address, namespace=NAME, log_to_driver=False)
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            deploy(known)
            wait_for(3)
            hop, through = alone(port, "small", seconds)
            phases = []
            with Clients(port, "small", clients) as load:
                time.sleep(1)
                phases.append(load.begin("steady"))
                time.sleep(seconds)
                phases.append(load.begin("a replica killed (kill -9)"))
                os.kill(replicas()[0], 9)
                time.sleep(2)
                wait_for(3)
                phases.append(load.begin("a setting rolled out"))
                deploy(known.model_copy(update={"deadline_ms": known.deadline_ms + 1}))
                wait_for(3)
                phases.append(load.begin("a node removed"))
                cluster.remove_node(second)
                time.sleep(seconds)
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()
    return Outcome(phases, hop, plain, {answer, through, *(a for phase in phases for a in phase.answers)})


def deploy(settings: Settings) -> None:
    from ray import serve

    serve.run(application_of(settings, ReplicaOptions(least=3, most=3)), name=NAME, route_prefix="/")


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99, in ms."""
    ordered = sorted(seconds)
    return 1000 * statistics.median(ordered), 1000 * ordered[int(0.99 * (len(ordered) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase that does not end by itself")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print counts as one JSON object instead")
    args = parser.parse_args()
    outcome = measure(args.seconds, args.clients)
    if args.json:
        phases = {phase.name: [phase.sent, phase.once, phase.twice] for phase in outcome.phases}
        print(json.dumps({"phases": phases, "answers": len(outcome.answers)}))
        return
    table = Table(title=f"{machine()}, 2 nodes, 3 replicas, {args.clients} clients")
    for name in ("phase", "sent", "failed", "failed with one retry", "p50 ms", "p99 ms", "why"):
        table.add_column(name)
    for phase in outcome.phases:
        p50, p99 = quantiles(phase.seconds)
        cells = (phase.sent, phase.once, phase.twice, f"{p50:.2f}", f"{p99:.2f}", ", ".join(sorted(phase.why)))
        table.add_row(phase.name, *map(str, cells))
    console = Console()
    console.print(table)
    for name, times in (("one process", outcome.one_process), ("through Ray", outcome.through_ray)):
        p50, p99 = quantiles(times)
        console.print(f"{name}, one client: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(times):,} requests")
    console.print(f"different answers to the one request with its seed: {len(outcome.answers)}")


if __name__ == "__main__":
    main()
