"""Ray Serve on two nodes under load, with one client's request in flight on each connection all the time.

Phases: replicas added by the autoscaler, one killed, a version rolled out, a node removed, replicas taken away by the
autoscaler. Clients send a request that fails once more, after a second. Beside them: what the hop costs against one
process (`dubito serve`) of the same artifacts, a burst beyond the queues, and what `/metrics` counts. Needs the extra
ray.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from benchmarks._server import free_port, running
from dubito.deploy.ray.application import NAME, ReplicaOptions, application_of, prepare_environment
from dubito.models import bayesianize, build, save
from dubito.models.manifest import Card, Input
from dubito.service.settings import Settings, read_settings


def body(rows: int, samples: int) -> bytes:
    return json.dumps(
        {"inputs": [[0.5] * 16] * rows, "samples": samples, "seed": 1, "return": ["probabilities"]}
    ).encode()


LONG_ROWS, PAUSE = 64, 1.0  # inputs of a long request; seconds before a request that failed is sent once more
SHORT, LONG, LONGEST = body(1, 8), body(LONG_ROWS, 256), body(256, 512)  # the last asks for all that a request may
HEADERS = {"content-type": "application/json"}
REPLICA = f"ray::ServeReplica:{NAME}:{NAME}"
MODEL = "small"
AT_ONCE = 40  # requests of the burst
SOON = {  # seconds
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",  # between two reports of a replica's load; Ray: 10
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # for which a replica that is to end lives on; Ray: 30
}


@dataclass(frozen=True)
class Reply:
    """What one request got; without an answer, why."""

    why: str = ""
    version: str = ""
    predictions: str = ""  # as JSON
    retry_after: bool = False

    @property
    def answered(self) -> bool:
        return not self.why


@dataclass
class Tally:
    """What clients saw in one phase."""

    name: str
    sent: int = 0
    once: int = 0  # failed without a retry
    twice: int = 0  # failed with one
    why: set[str] = field(default_factory=set)
    answers: set[Reply] = field(default_factory=set)  # to short requests
    seconds: list[float] = field(default_factory=list)  # of short requests
    most: int = 0  # replicas that ran at one time


class Clients:
    """Threads that ask for predictions, every other one for long ones; `phase` collects what they see."""

    def __init__(self, port: int) -> None:
        self.port, self.phase, self.lock = port, Tally("warm-up"), threading.Lock()
        self.threads: list[threading.Thread] = []
        self.wanted = self.rows = 0  # clients, and inputs that were answered

    def number(self, wanted: int) -> None:
        """Let so many ask from now on."""
        self.wanted = wanted
        for i in range(len(self.threads), wanted):
            self.threads.append(threading.Thread(target=self._ask, args=(i,), daemon=True))
            self.threads[i].start()
        for thread in self.threads[wanted:]:
            thread.join()
        del self.threads[wanted:]

    def begin(self, name: str) -> Tally:
        with self.lock:
            self.phase = Tally(name)
        return self.phase

    def _ask(self, number: int) -> None:
        connection, short = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60), number % 2 == 0
        while number < self.wanted:
            failures = list[str]()
            began = time.perf_counter()
            while not (reply := ask(connection, SHORT if short else LONG)).answered and not failures:
                failures.append(reply.why)
                connection.close()
                time.sleep(PAUSE)
            failures += [] if reply.answered else [reply.why]
            with self.lock:
                phase = self.phase
                phase.sent += 1
                self.rows += (1 if short else LONG_ROWS) * reply.answered
                phase.once += len(failures) > 0
                phase.twice += len(failures) > 1
                phase.why |= set(failures)
                if short:
                    phase.seconds.append(time.perf_counter() - began)
                    phase.answers |= {reply} if reply.answered else set()


def ask(connection: http.client.HTTPConnection, content: bytes, model: str = MODEL) -> Reply:
    try:
        connection.request("POST", f"/v1/models/{model}/predict", content, HEADERS)
        reply = connection.getresponse()
        content = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return Reply(type(error).__name__)
    if reply.status != 200:
        return Reply(str(reply.status), retry_after="retry-after" in reply.headers)
    known = json.loads(content)
    return Reply("", known["version"], json.dumps(known["predictions"]))


def alone(port: int, seconds: float) -> tuple[list[float], int]:
    """Latencies of one client, and how many inputs it sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times, end = list[float](), time.perf_counter() + seconds
    for _ in range(20):
        assert not (reply := ask(connection, SHORT)).why, reply
    while time.perf_counter() < end:
        began = time.perf_counter()
        ask(connection, SHORT)
        times.append(time.perf_counter() - began)
    return times, 20 + len(times)


def burst(port: int) -> Counter[str]:
    """Statuses of many requests at once, of as much work as a request may ask for."""

    def one() -> None:
        reply = ask(http.client.HTTPConnection("127.0.0.1", port, timeout=120), LONGEST)
        statuses.append(f"{reply.why or 200}{' with Retry-After' if reply.retry_after else ''}")

    statuses: list[str] = []
    threads = [threading.Thread(target=one) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(statuses)


def counted(port: int) -> tuple[int, int]:
    """Of `/metrics`: how many replicas it has, and how many inputs they have answered together."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    families = text_string_to_metric_families(connection.getresponse().read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == "dubito_inputs_total"]
    return len({sample.labels["replica"] for sample in samples}), int(sum(sample.value for sample in samples))


def replicas() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(REPLICA)]


def wait_for(number: int, tally: Tally | None = None, seconds: float = 180.0) -> None:
    """Until so many replicas run, and no others end; some may wait for a node."""
    from ray import serve

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = {str(k): v for k, v in serve.status().applications[NAME].deployments[NAME].replica_states.items()}
        running = states.get("RUNNING", 0)
        if tally is not None:
            tally.most = max(tally.most, running)
        if running == number and len(replicas()) == number:
            return
        time.sleep(0.5)
    raise TimeoutError(f"{number} replicas do not run: {states}")


@dataclass
class Outcome:
    phases: list[Tally]
    one_process: list[float]  # seconds, one client
    expected: set[Reply]  # what one process answers in each version
    through_ray: list[float]
    counted: tuple[int, int]  # by /metrics: replicas, inputs
    sent: int  # inputs, before /metrics was read
    burst: Counter[str]

    @property
    def wrong(self) -> int:
        """Answers that one process does not give."""
        return len({answer for phase in self.phases for answer in phase.answers} - self.expected)


def artifact(file: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    net = build("mlp", inputs=16, hidden=[64], outputs=4)
    save(bayesianize(net, "ffg-u", inducing=16), file, card=Card(input=Input(shape=(16,))))
    return file


def by_one_process(folder: Path, seconds: float) -> tuple[list[float], set[Reply]]:
    """Latencies of one client of `dubito serve`, and the answers of both versions."""
    times, answers = list[float](), set[Reply]()
    for version in ("1", "2"):
        command = ["dubito", "serve", str(folder / version), "--device", "cpu"]
        command += ["--set", "plan_seconds=0", "--set", "log_level=error"]
        with running(command, folder / "log", "/readyz") as server:
            port = int(server.url.rpartition(":")[2])
            answers.add(ask(http.client.HTTPConnection("127.0.0.1", port, timeout=60), SHORT))
            times += alone(port, seconds)[0] if version == "1" else []
    return times, answers


def measure(seconds: float, clients: int) -> Outcome:
    prepare_environment()
    os.environ |= SOON | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in (1, 2):
            artifact(folder / str(version) / MODEL / str(version) / "model.safetensors", version)
        one_process, expected = by_one_process(folder, seconds)
        port = free_port()
        settings = read_settings(
            None, models=[folder / "1"], device="cpu", plan_seconds=0.0, port=port, log_level="error"
        )
        with TwoNodes(port) as nodes:
            phases, hop, seen, sent, statuses = _phases(nodes, Clients(port), settings, folder, seconds, clients)
    return Outcome(phases, one_process, expected, hop, seen, sent, statuses)


class TwoNodes:
    """A cluster on this machine, with Serve's proxy on the first node."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> "TwoNodes":
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        node = {"node_ip_address": "127.0.0.1", "num_cpus": 2}
        self.cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self.second = self.cluster.add_node(**node)
        ray.init(address=self.cluster.address, namespace=NAME, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()

    def lose_one(self) -> None:
        self.cluster.remove_node(self.second)


def _phases(
    nodes: TwoNodes, load: Clients, settings: Settings, folder: Path, seconds: float, clients: int
) -> tuple[list[Tally], list[float], tuple[int, int], int, Counter[str]]:
    """Phases, latencies of one client, what /metrics counted and what was sent by then, and statuses of the burst."""
    phases, options = [], ReplicaOptions(least=1, most=3, target=2.0, up_seconds=1.0, down_seconds=2.0)

    def phase(name: str, change: Callable[[], Any], until: int, after: float = 0.0) -> None:
        phases.append(load.begin(name))
        change()
        time.sleep(after)
        wait_for(until, phases[-1])

    deploy(settings, options)
    wait_for(1)
    hop, sent = alone(nodes.port, seconds)
    phase("load comes: the autoscaler adds replicas", lambda: load.number(clients), 3)
    load.number(0)
    time.sleep(3)  # replicas report every two
    seen, sent = counted(nodes.port), sent + load.rows
    load.number(clients)
    phase("steady", lambda: time.sleep(seconds), 3)
    phase("a replica ended by `kill -9`", lambda: os.kill(replicas()[0], 9), 3, 2)
    second = settings.model_copy(update={"models": (folder / "2",)})
    phase("version 2 rolled out in place of 1", lambda: deploy(second, options), 3)
    phase("a node removed, with its replicas", nodes.lose_one, 2, max(seconds, 10.0))
    phase("load goes: the autoscaler takes replicas away", lambda: load.number(2), 1)
    load.number(0)
    return phases, hop, seen, sent, burst(nodes.port)


def deploy(settings: Settings, options: ReplicaOptions) -> None:
    from ray import serve

    serve.run(application_of(settings, options), name=NAME, route_prefix="/")


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99, in ms."""
    ordered = sorted(seconds)
    return 1000 * statistics.median(ordered), 1000 * ordered[int(0.99 * (len(ordered) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase that does not end by itself")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print counts as one JSON object instead")
    args = parser.parse_args()
    outcome = measure(args.seconds, args.clients)
    if args.json:
        print(json.dumps(_counts(outcome)))
        return
    table = Table(title=f"{machine()}, 2 nodes, {args.clients} clients, every other one with long requests")
    for name in ("phase", "sent", "failed", "failed with one retry", "p50 ms", "p99 ms", "most replicas", "why"):
        table.add_column(name)
    for phase in outcome.phases:
        p50, p99 = quantiles(phase.seconds)
        cells = (phase.sent, phase.once, phase.twice, f"{p50:.2f}", f"{p99:.2f}", phase.most, ", ".join(phase.why))
        table.add_row(phase.name, *map(str, cells))
    console = Console()
    console.print(table)
    for name, times in (("one process", outcome.one_process), ("through Ray", outcome.through_ray)):
        p50, p99 = quantiles(times)
        console.print(f"{name}, one client: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(times):,} requests")
    console.print(f"answers to a request with a seed that one process does not give: {outcome.wrong}")
    console.print(f"/metrics: {outcome.counted[0]} replicas, {outcome.counted[1]} inputs; sent: {outcome.sent}")
    said = ", ".join(f"{number} × {status}" for status, number in sorted(outcome.burst.items()))
    console.print(f"{AT_ONCE} requests at once, of {256 * 512:,} rows × draws each: {said}")


def _counts(outcome: Outcome) -> dict[str, Any]:
    names = ("sent", "once", "twice", "most")
    return {
        "phases": [
            {name: getattr(phase, name) for name in names} | {"why": sorted(phase.why)} for phase in outcome.phases
        ],
        "versions": [sorted({answer.version for answer in phase.answers}) for phase in outcome.phases],
        "wrong": outcome.wrong,
        "counted": outcome.counted,
        "sent": outcome.sent,
        "burst": outcome.burst,
    }


if __name__ == "__main__":
    main()
