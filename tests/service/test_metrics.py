"""What Prometheus sees after what happened."""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from dubito.models import load
from dubito.models.embedded import embedded
from dubito.service.engine.budget import KINDS
from dubito.service.metrics import OUTCOMES, REASONS, STAGES

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
WORDED = ("outcome", "stage", "reason", "kind")
Fixture = Any  # the types of conftest.py
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Series:
    """Name and labels -> value."""
    text = httpx.get(f"{url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def predict(url: str, rows: int, **more: object) -> httpx.Response:
    inputs = [[[[0.1 * i] * 8] * 8] for i in range(rows)]
    return httpx.post(f"{url}/v1/models/digits/predict", json={"inputs": inputs, **more})


@pytest.fixture(scope="module")
def server(serve: Fixture) -> Fixture:
    return serve(embedded("digits"), "--set", "slice_ms=60000")  # on a slow machine a request might go in parts


def test_what_happened_is_counted(server: Fixture) -> None:
    before = scrape(server.url)
    replies = [predict(server.url, rows, samples=K).json() for rows, K in ((1, 20), (5, 64), (3, 0))]
    after = scrape(server.url)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("dubito_request_seconds_count", model="digits", outcome="ok") == 3
    for stage in ("parse", "queue", "sample", "forward", "summarise", "encode"):
        assert more("dubito_stage_seconds_count", model="digits", stage=stage) == 3
    assert more("dubito_inputs_total", model="digits") == 9
    assert more("dubito_batch_size_count", model="digits") == 3
    assert more("dubito_batch_size_sum", model="digits") == 9
    assert more("dubito_samples_sum", model="digits") == 20 + 64
    rows = [row for reply in replies for row in reply["predictions"]]
    assert more("dubito_ood_total", model="digits") == sum(row["ood"]["flag"] for row in rows)
    assert more("dubito_entropy_count", model="digits") == 9
    assert more("dubito_entropy_sum", model="digits") == pytest.approx(sum(row["entropy"] for row in rows), abs=1e-5)
    whole = more("dubito_request_seconds_sum", model="digits", outcome="ok")
    assert (
        0
        < sum(
            more("dubito_stage_seconds_sum", model="digits", stage=s) for s in ("parse", "queue", "forward", "encode")
        )
        <= whole
    )


def test_sizes_are_those_of_the_model(server: Fixture) -> None:
    found, model = scrape(server.url), load(embedded("digits"))
    assert value(found, "dubito_model_bytes", model="digits", kind="artifact") == os.path.getsize(embedded("digits"))
    assert value(found, "dubito_model_bytes", model="digits", kind="deterministic") == 4 * 19226
    folded = sum(2 * 4 * m.num_features for m in model.network.modules() if isinstance(m, nn.BatchNorm2d))
    factors = value(found, "dubito_factor_cache_bytes", model="digits")
    assert value(found, "dubito_model_bytes", model="digits", kind="resident") == folded + factors
    assert factors > 0
    memory = {kind: value(found, "dubito_device_memory_bytes", kind=kind) for kind in ("resident", "draws", "bank")}
    assert memory["resident"] == folded + factors
    assert memory["draws"] >= 20 * 4 * model.factors.normals  # of the largest pass: all buckets were warmed
    assert memory["bank"] == 0
    assert value(found, "dubito_queue_depth", model="digits") == 0
    proven = {"device": "cpu", "asked": "float32", "dtype": "float32"}
    assert value(found, "dubito_device_proven", model="digits", **proven) == 1
    assert value(found, "dubito_ways_excluded", model="digits") == 0
    assert value(found, "dubito_device_memory_bytes", kind="total") > value(
        found, "dubito_device_memory_bytes", kind="used"
    )
    status = Path(f"/proc/{server.pid}/status").read_text()
    resident = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    assert value(found, "process_resident_memory_bytes") == pytest.approx(resident, rel=0.1)


def test_refusals_are_counted_by_reason(serve: Fixture, small_digits: Path) -> None:
    settings = ("buckets=1", "body_bytes=1000", "rate_per_second=0.0001", "burst=6")
    server = serve(small_digits, *(word for setting in settings for word in ("--set", setting)))
    before = scrape(server.url)
    assert predict(server.url, 1, samples=1, timeout_ms=1).status_code in (200, 504)
    assert predict(server.url, 64).status_code == 413
    assert value(before, "dubito_rejected_total", reason="body") == 0
    after = scrape(server.url)
    assert value(after, "dubito_rejected_total", reason="body") == 1
    while httpx.get(f"{server.url}/v1/models").status_code != 429:
        pass
    end = time.monotonic() + 30
    while '"status":429' not in server.log.read_text():  # a line is written soon after the reply
        assert time.monotonic() < end
        time.sleep(0.01)


def test_junk_names_add_no_series(server: Fixture) -> None:
    """Two thousand of them, over one connection."""
    predict(server.url, 1)
    httpx.post(f"{server.url}/v1/models/junk/predict", json={})
    before = scrape(server.url).keys()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        reader = connection.makefile("rb")
        for start in range(0, 2_000, 50):
            requests = [
                f"POST /v1/models/junk-{i}/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}"
                if i % 2
                else f"GET /v2/models/junk-{i}/ready HTTP/1.1\r\nHost: x\r\n\r\n"
                for i in range(start, start + 50)
            ]
            connection.sendall("".join(requests).encode())
            for _ in requests:
                assert b" 404 " in reader.readline()
                length = 0
                while (line := reader.readline()) not in (b"\r\n", b""):
                    name, _, text = line.partition(b":")
                    length = int(text) if name.lower() == b"content-length" else length
                reader.read(length)
        reader.close()
    assert scrape(server.url).keys() == before


def test_an_unloaded_model_leaves_no_series(serve: Fixture, small_digits: Path) -> None:
    server = serve(small_digits, "--set", "buckets=1")
    predict(server.url, 1)
    assert httpx.post(f"{server.url}/v2/repository/models/digits/unload").status_code == 200
    assert not [key for key in scrape(server.url) if ("model", "digits") in key[1]]
    assert httpx.post(f"{server.url}/v2/repository/models/digits/load", timeout=60).status_code == 200
    predict(server.url, 1)
    assert value(scrape(server.url), "dubito_inputs_total", model="digits") == 1


def test_the_docs_name_every_metric_its_labels_and_their_words(server: Fixture) -> None:
    predict(server.url, 1)
    exported: dict[str, set[str]] = {}
    words: dict[str, set[str]] = {}  # of labels whose words are ours, by metric
    for name, labels in scrape(server.url):
        metric = re.sub(r"_(bucket|count|sum)$", "", name)
        if metric.startswith("dubito_") and not metric.endswith("_created"):  # the library's own, beside each counter
            exported[metric] = {label for label, _ in labels} - {"le"}
            words.setdefault(metric, set()).update(word for label, word in labels if label in WORDED)
    rows = re.findall(r"^\| `(dubito_\w+)(?:\{([\w,]+)\})?` \| (.*) \|$", SERVING.read_text(), re.M)
    assert {name: set(filter(None, labels.split(","))) for name, labels, _ in rows} == exported
    beside = {  # what this server does not export: its device is a CPU, without a limit and without a bank
        "dubito_model_bytes": {"bank"},
        "dubito_device_memory_bytes": {"reserved", "limit", *KINDS},
        "dubito_request_seconds": set(OUTCOMES),
        "dubito_stage_seconds": set(STAGES),
        "dubito_rejected_total": set(REASONS),
    }
    for name, _, meaning in rows:
        if words[name]:
            named = set(re.findall(r"`(\w+)`", meaning))
            assert named == words[name] | beside.get(name, set()), name
