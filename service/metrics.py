"""Metrics for Prometheus; label values are names of served models and fixed words, so their number is bounded."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import bytes_of
from dubito.service.engine.engine import PredictResult

SECONDS = tuple(0.0005 * 2**i for i in range(16))  # 0.5 ms to 16 s
ROWS = tuple(2**i for i in range(11))
NATS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
STAGES = ("parse", "queue", "sample", "forward", "summarise", "encode")
OUTCOMES = ("ok", "refused", "failed", "gone")
REASONS = ("queue_full", "deadline", "rate", "key", "body", "work", "bytes", "picture", "gone")
FEW = 16  # values that are sooner counted one by one


class HistogramSeries:
    """One series of a histogram; the library's own takes a lock, and several times as long."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: NDArray[np.floating]) -> None:
        if len(values) < FEW:
            for value in values.tolist():
                self.observe(value)
            return
        places, counts = np.unique(np.searchsorted(self.bounds, values), return_counts=True)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            self.counts[place] += count
        self.sum += float(values.sum(dtype=np.float64))


class Total:
    """One series of a counter, written by one thread; the library's own takes a lock."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, more: float) -> None:
        self.value += more


class Totals(Collector):
    """A counter with one series per model."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        self.series: dict[str, Total] = {}

    def of(self, model: str) -> Total:
        return self.series.setdefault(model, Total())

    def forget(self, model: str) -> None:
        self.series.pop(model, None)

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self.name, self.what, labels=["model"])
        for model, total in list(self.series.items()):
            family.add_metric([model], total.value)
        yield family


class Histograms(Collector):
    """A histogram with one series per combination of labels. Each series is written by one thread only."""

    def __init__(self, name: str, what: str, labels: list[str], bounds: tuple[float, ...]) -> None:
        self.name, self.what, self.labels, self.bounds = name, what, labels, bounds
        self.series: dict[tuple[str, ...], HistogramSeries] = {}

    def of(self, *values: str) -> HistogramSeries:
        return self.series.setdefault(values, HistogramSeries(self.bounds))

    def forget(self, model: str) -> None:
        for values in [values for values in self.series if values[0] == model]:
            del self.series[values]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.what, labels=self.labels)
        for values, counts in list(self.series.items()):
            below = accumulate(counts.counts)
            ends = [*map(floatToGoString, self.bounds), "+Inf"]
            family.add_metric(values, list(zip(ends, below, strict=True)), counts.sum)
        yield family


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.request = Histograms("dubito_request_seconds", "Predictions, whole.", ["model", "outcome"], SECONDS)
        self.stage = Histograms("dubito_stage_seconds", "Stages of predictions.", ["model", "stage"], SECONDS)
        self.rows = Histograms("dubito_batch_size", "Rows that went to the device together.", ["model"], ROWS)
        self.samples = Histograms("dubito_samples", "Posterior draws of a request.", ["model"], ROWS)
        self.entropy = Histograms("dubito_entropy", "Predictive entropy, in nats.", ["model"], NATS)
        self.ood = Totals("dubito_ood", "Inputs flagged as out of distribution.")
        self.inputs = Totals("dubito_inputs", "Inputs answered.")
        self.cpu = Totals("dubito_engine_cpu_seconds", "Processor time of inference.")
        self.by_model = [metric for metric in vars(self).values() if isinstance(metric, Histograms | Totals)]
        for metric in self.by_model:
            registry.register(metric)
        self.rejected = Counter("dubito_rejected", "Requests refused.", ["reason"], registry=registry)
        for reason in REASONS:
            self.rejected.labels(reason)

    def of(self, model: str) -> "Series":
        return Series(self, model)

    def forget(self, model: str) -> None:
        """Remove the series of an unloaded model."""
        for metric in self.by_model:
            metric.forget(model)


class Series:
    """The series of one model, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.request = {outcome: metrics.request.of(model, outcome) for outcome in OUTCOMES}
        self.stage = {stage: metrics.stage.of(model, stage) for stage in STAGES}
        self.rows, self.samples = metrics.rows.of(model), metrics.samples.of(model)
        self.ood, self.inputs = metrics.ood.of(model), metrics.inputs.of(model)
        self.entropy, self.cpu = metrics.entropy.of(model), metrics.cpu.of(model)

    def batch(self, rows: int, cpu: float) -> None:
        self.rows.observe(rows)
        self.cpu.inc(cpu)

    def add(self, result: PredictResult, seconds: Mapping[str, float]) -> None:
        """Count an answered request and the seconds of its stages."""
        for stage, spent in seconds.items():
            self.stage[stage].observe(spent)
        self.samples.observe(result.samples)
        columns = result.columns
        if "entropy" in columns:
            self.entropy.observe_all(columns["entropy"])
        self.inputs.value += len(result.rules)
        if "ood" in columns and (flags := int(np.count_nonzero(columns["ood"]))):
            self.ood.inc(flags)


class Sizes(Collector):
    """Gauges that are read at each scrape: (name, description, label names) -> values by labels."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str, tuple[str, ...]], Mapping[tuple[str, ...], float]]]):
        self.read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for (name, what, labels), rows in self.read().items():
            family = GaugeMetricFamily(name, what, labels=labels)
            for values, number in rows.items():
                family.add_metric(values, number)
            yield family


class Counts(Collector):
    """Counters that are read at each scrape: (name, description, label names) -> values by labels."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str, tuple[str, ...]], Mapping[tuple[str, ...], float]]]):
        self.read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        for (name, what, labels), rows in self.read().items():
            family = CounterMetricFamily(name, what, labels=labels)
            for values, number in rows.items():
                family.add_metric(values, number)
            yield family


def model_bytes(copies: Sequence[Model], artifact: int, deterministic: int) -> dict[str, int]:
    """Bytes of the file, of the tensors in memory, of the factors among them, and of the plain network."""
    seen: set[int] = set()
    own = sum(bytes_of(model.network, seen) for model in copies)
    factors = sum(bytes_of(model.factors, seen) for model in copies)
    plain = deterministic * copies[0].factors.dtype.itemsize
    return {"artifact": artifact, "resident": own + factors, "factors": factors, "deterministic": plain}


def device_bytes(device: torch.device) -> dict[str, int]:
    """Device memory of this process, in use in all, and in total."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mine = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        return {**mine, "used": total - free, "total": total}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return {}
    meminfo = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, mine_now = meminfo["MemTotal"], pages * os.sysconf("SC_PAGE_SIZE")
    return {"allocated": mine_now, "used": total - meminfo["MemAvailable"], "total": total}


# of several workers

SMALLEST = ("process_start_time_seconds", "dubito_device_proven")
OF_ALL = {"dubito_device_memory_bytes": ("total", "used"), "dubito_model_bytes": ("artifact", "deterministic")}


class Merged(Collector):
    """The metrics of several workers as one: sums, but of what is the same for all of them."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.families: dict[str, Metric] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                self._add(family)

    def _add(self, family: Metric) -> None:
        before = self.families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = {(one.name, tuple(one.labels.items())): i for i, one in enumerate(before.samples)}
        for sample in family.samples:
            place = known.get((sample.name, tuple(sample.labels.items())))
            if place is None:
                before.samples.append(sample)
            else:
                value = joined(sample.name, sample.labels, before.samples[place].value, sample.value)
                before.samples[place] = before.samples[place]._replace(value=value)

    def collect(self) -> Iterable[Metric]:
        return self.families.values()


def joined(name: str, labels: Mapping[str, str], one: float, other: float) -> float:
    if name in SMALLEST or name.endswith("_created"):
        return min(one, other)
    if labels.get("kind") in OF_ALL.get(name, ()):
        return max(one, other)
    return one + other


def merged(texts: Sequence[str]) -> bytes:
    """Prometheus' texts of several workers as one."""
    registry = CollectorRegistry()
    registry.register(Merged(texts))
    return generate_latest(registry)
