"""What Prometheus sees; label values are names of models that are served, and a few words of ours."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from torch import Tensor

from dubito.models.model import Model
from dubito.models.prediction import Prediction
from dubito.models.uncertainty import Classified

SECONDS = tuple(0.0005 * 2**i for i in range(16))  # 0.5 ms to 16 s
ROWS = tuple(2**i for i in range(11))
NATS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
STAGES = ("parse", "queue", "sample", "forward", "summarise", "encode")
OUTCOMES = ("ok", "refused", "failed", "gone")
REASONS = ("queue_full", "deadline", "rate", "key", "body", "gone")


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def histogram(name: str, what: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, labels, buckets=buckets, registry=registry)

        self.request = histogram("dubito_request_seconds", "Predictions, whole.", ["model", "outcome"], SECONDS)
        self.stage = histogram("dubito_stage_seconds", "Stages of predictions.", ["model", "stage"], SECONDS)
        self.rows = histogram("dubito_batch_size", "Rows that went to the device together.", ["model"], ROWS)
        self.samples = histogram("dubito_samples", "Posterior draws of a request.", ["model"], ROWS)
        self.rejected = Counter("dubito_rejected", "Requests refused.", ["reason"], registry=registry)
        self.ood = Counter("dubito_ood", "Inputs flagged as out of distribution.", ["model"], registry=registry)
        self.inputs = Counter("dubito_inputs", "Inputs answered.", ["model"], registry=registry)
        self.entropy = histogram("dubito_entropy", "Predictive entropy, in nats.", ["model"], NATS)
        for reason in REASONS:
            self.rejected.labels(reason)

    def of(self, model: str) -> "Series":
        return Series(self, model)

    def forget(self, model: str) -> None:
        """An unloaded model leaves no series behind."""
        for metric in (self.rows, self.samples, self.ood, self.inputs, self.entropy):
            with suppress(KeyError):
                metric.remove(model)
        for stage in STAGES:
            with suppress(KeyError):
                self.stage.remove(model, stage)
        for outcome in OUTCOMES:
            with suppress(KeyError):
                self.request.remove(model, outcome)


class Series:
    """One model's, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.request = {outcome: metrics.request.labels(model, outcome) for outcome in OUTCOMES}
        self.stage = {stage: metrics.stage.labels(model, stage) for stage in STAGES}
        self.rows, self.samples = metrics.rows.labels(model), metrics.samples.labels(model)
        self.ood, self.inputs = metrics.ood.labels(model), metrics.inputs.labels(model)
        self.entropy = metrics.entropy.labels(model)

    def answered(self, prediction: Prediction, flags: int, seconds: Mapping[str, float]) -> None:
        for stage, spent in seconds.items():
            self.stage[stage].observe(spent)
        summary = prediction.summary
        self.samples.observe(prediction.samples)
        if isinstance(summary, Classified):
            for value in summary.entropy.tolist():
                self.entropy.observe(value)
        self.inputs.inc(len(next(iter(vars(summary).values()))))
        if flags:
            self.ood.inc(flags)


class Sizes(Collector):
    """Bytes and queues, read when somebody asks: (name, what it is, label names) to values by labels."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str, tuple[str, ...]], Mapping[tuple[str, ...], float]]]):
        self.read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for (name, what, labels), rows in self.read().items():
            family = GaugeMetricFamily(name, what, labels=labels)
            for values, number in rows.items():
                family.add_metric(values, number)
            yield family


def bytes_of(value: object, seen: set[int] | None = None) -> int:
    """Of all tensors in a value, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(value, Mapping):
        return sum(bytes_of(v, seen) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(bytes_of(v, seen) for v in value)
    return sum(bytes_of(v, seen) for v in vars(value).values()) if hasattr(value, "__dataclass_fields__") else 0


def model_bytes(model: Model, artifact: int, deterministic: int) -> dict[str, int]:
    """The file, the tensors in memory, the factors among them, and the plain network in float32."""
    seen: set[int] = set()
    own = bytes_of([*model.network.parameters(), *model.network.buffers()], seen)
    factors = bytes_of(model.factors, seen)
    return {"artifact": artifact, "resident": own + factors, "factors": factors, "deterministic": 4 * deterministic}


def device_bytes(device: torch.device) -> dict[str, int]:
    """What this process has of the device's memory, and what is in use in all."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mine = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        return {**mine, "used": total - free, "total": total}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux
        return {}
    told = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, mine_now = told["MemTotal"], pages * os.sysconf("SC_PAGE_SIZE")
    return {"allocated": mine_now, "used": total - told["MemAvailable"], "total": total}
