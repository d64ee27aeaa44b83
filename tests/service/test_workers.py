"""Several processes behind one port: the same answers, one view of the metrics, changes for all, no request lost."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dubito.models.embedded import embedded
from dubito.service.metrics import merged
from dubito.service.rates import OwnRates, Rates, SharedRates
from tests.service.conftest import Live, Serve

ZEROS = {"inputs": [[[[0.0] * 8] * 8]], "samples": 4, "seed": 1}
QUICK = ["--set", "plan_seconds=0", "--set", "buckets=[1,4]"]
PREDICT = "/v1/models/digits/predict"


BURST = 50  # requests that a caller of `two` has
callers = count()


@pytest.fixture(scope="module")
def two(serve: Serve, small_digits: Path) -> Live:
    """Who comes from one address may ask a few times, and no more."""
    rates = ["--set", "rate_per_second=0.001", "--set", f"burst={BURST}"]
    return serve(small_digits, "--workers", "2", "--grpc-port", "0", *QUICK, *rates)


def client(live: Live) -> httpx.Client:
    """From another address of this machine than all before."""
    high, low = divmod(next(callers), 200)
    return httpx.Client(
        base_url=live.url, timeout=60, transport=httpx.HTTPTransport(local_address=f"127.1.{high}.{low + 1}")
    )


def ask(live: Live, path: str = PREDICT, json: Any = ZEROS) -> httpx.Response:
    """By a connection of its own, which any worker may take."""
    with client(live) as one:
        return one.post(path, json=json)


def values(live: Live) -> dict[str, float]:
    with client(live) as one:
        text = one.get("/metrics").text
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def workers_of(live: Live) -> list[int]:
    """Their process ids: children of the server that run Python's own command."""
    children = Path(f"/proc/{live.pid}/task/{live.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"workers import work" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def until(check: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_workers_answer_alike_and_their_metrics_are_one_view(two: Live, serve: Serve, small_digits: Path) -> None:
    assert len(workers_of(two)) == 2
    one = serve(small_digits, *QUICK)
    expected = ask(one).json()["predictions"]
    before = values(two)
    with ThreadPoolExecutor(8) as pool:
        replies = [*pool.map(lambda _: ask(two), range(60))]
    assert all(reply.json()["predictions"] == expected for reply in replies)
    after = values(two)
    counted = 'dubito_request_seconds_count{"model": "digits", "outcome": "ok"}'
    assert after[counted] - before[counted] == 60
    assert after['dubito_inputs_total{"model": "digits"}'] - before['dubito_inputs_total{"model": "digits"}'] == 60
    assert after["dubito_workers{}"] == 2
    assert (
        after['dubito_device_memory_bytes{"kind": "total"}']
        == values(one)['dubito_device_memory_bytes{"kind": "total"}']
    )


def test_gRPC_is_served_by_all_of_them_on_one_port(two: Live) -> None:
    pytest.importorskip("grpc")
    from tritonclient.grpc import InferenceServerClient

    for _ in range(8):  # channels of their own
        channel = InferenceServerClient(two.grpc)
        assert channel.is_server_ready()
        assert channel.is_model_ready("digits")
        channel.close()


def test_a_model_is_changed_in_every_worker(two: Live) -> None:
    assert ask(two, "/v2/repository/models/digits/unload", {}).status_code == 200
    assert {ask(two).status_code for _ in range(12)} == {404}
    assert ask(two, "/v2/repository/models/digits/load", {}).status_code == 200
    assert {ask(two).status_code for _ in range(12)} == {200}


def test_both_take_connections(two: Live) -> None:
    """Sixteen connections at once, each of which stays with its worker."""
    with ThreadPoolExecutor(16) as pool:
        clients = [client(two) for _ in range(16)]
        try:
            replies = [*pool.map(lambda one: one.post(PREDICT, json=ZEROS), clients)]
            assert {reply.status_code for reply in replies} == {200}
            assert values(two)["dubito_connections{}"] >= 16
            held = [sum("socket" in os.readlink(file) for file in _files(pid)) for pid in workers_of(two)]
            assert min(held) > 4, held
        finally:
            for one in clients:
                one.close()


def _files(pid: int) -> list[Path]:
    return [*Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.slow
def test_a_model_is_changed_in_every_worker_and_stays_so_after_a_crash_until_all_stop(serve: Serve) -> None:
    live = serve(embedded("digits"), "--workers", "2", *QUICK)
    assert ask(live, "/v2/repository/models/digits/unload", {}).status_code == 200
    assert {ask(live).status_code for _ in range(12)} == {404}
    first, *_ = old = workers_of(live)
    os.kill(first, signal.SIGKILL)
    until(lambda: first not in workers_of(live) and len(workers_of(live)) == 2)
    until(lambda: values(live).get("dubito_workers{}") == 2)
    assert {ask(live).status_code for _ in range(12)} == {404}
    assert ask(live, "/v2/repository/models/digits/load", {}).status_code == 200
    assert {ask(live).status_code for _ in range(12)} == {200}
    assert set(old) != set(workers_of(live))
    assert "a worker has ended, and is started again" in live.log.read_text()
    _stops_well(live)


def test_a_killed_worker_costs_what_it_was_answering_and_no_more(two: Live) -> None:
    """Requests with one retry: none is lost while the worker is gone and comes back."""

    answered: list[int] = []

    def steady(_: int) -> int:
        for _ in range(3):
            try:
                answered.append(ask(two).status_code)
                return answered[-1]
            except httpx.TransportError:
                continue
        return 0

    victim = workers_of(two)[0]
    with ThreadPoolExecutor(4) as pool:
        running = pool.map(steady, range(200))
        while len(answered) < 20:
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)
        assert len(answered) < 200  # others come while it is gone
        assert set(running) == {200}
    until(lambda: len(workers_of(two)) == 2 and victim not in workers_of(two))


def _stops_well(live: Live) -> None:
    """What was accepted is answered, and no process is left."""
    rows: Any = ZEROS["inputs"]
    long = {**ZEROS, "inputs": rows * 200, "samples": 64, "timeout_ms": 300_000}
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(ask, live, PREDICT, long) for _ in range(6)]
        until(lambda: values(live).get('dubito_queue_depth{"model": "digits"}', 0) > 0 or running[0].done(), 30)
        pids = workers_of(live)
        assert live.stop() == 0
        assert {one.result().status_code for one in running} == {200}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_rate_is_that_of_all_workers_which_end_with_the_process_that_started_them(two: Live) -> None:
    """The last test of this server."""
    until(lambda: values(two)["dubito_workers{}"] == 2)
    caller = "127.2.0.1"  # connections of one address, each of which any worker may take
    codes = []
    for _ in range(BURST + 20):
        with httpx.Client(transport=httpx.HTTPTransport(local_address=caller)) as one:
            codes.append(one.get(f"{two.url}/v1/models").status_code)
    assert codes == [200] * BURST + [429] * 20
    pids = workers_of(two)
    assert len(pids) == 2
    two.send(signal.SIGKILL)
    until(lambda: not any(_runs(pid) for pid in pids))


@pytest.mark.parametrize("words", [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)], ids=["one", "two"])
def test_a_model_that_cannot_be_served_ends_the_server_in_one_line(
    words: list[str], serve: Serve, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nothing")
    with pytest.raises(AssertionError, match="it has 7 bytes; expected a dubito artifact"):
        serve(bad, *words)


# parts


def test_metrics_of_workers_are_sums_but_of_what_they_share() -> None:
    text = """# HELP dubito_inputs_total Inputs answered.
# TYPE dubito_inputs_total counter
dubito_inputs_total{model="a"} %d
# TYPE dubito_batch_size histogram
dubito_batch_size_bucket{model="a",le="1.0"} %d
dubito_batch_size_bucket{model="a",le="+Inf"} %d
dubito_batch_size_count{model="a"} %d
dubito_batch_size_sum{model="a"} %d
# TYPE dubito_device_memory_bytes gauge
dubito_device_memory_bytes{kind="total"} %d
dubito_device_memory_bytes{kind="resident"} %d
# TYPE process_start_time_seconds gauge
process_start_time_seconds %d
"""
    other = '# TYPE dubito_inputs_total counter\ndubito_inputs_total{model="b"} 5\n'
    found = merged([text % (1, 2, 3, 3, 9, 100, 7, 50), text % (10, 20, 30, 30, 90, 100, 70, 40), other]).decode()
    for line in (
        'dubito_inputs_total{model="a"} 11.0',
        'dubito_inputs_total{model="b"} 5.0',
        'dubito_batch_size_bucket{le="1.0",model="a"} 22.0',
        'dubito_batch_size_bucket{le="+Inf",model="a"} 33.0',
        'dubito_batch_size_sum{model="a"} 99.0',
        'dubito_device_memory_bytes{kind="total"} 100.0',
        'dubito_device_memory_bytes{kind="resident"} 77.0',
        "process_start_time_seconds 40.0",
        "# TYPE dubito_batch_size histogram",
    ):
        assert line in found.splitlines(), found


def test_a_shared_table_counts_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    one, other = SharedRates(tmp_path / "rates"), SharedRates(tmp_path / "rates")  # of two workers
    alone: Rates = OwnRates()
    for i in range(2000):
        now[0] += 0.01 * (i % 7)
        caller = f"caller {i * i % 23}"
        expected = alone.left(caller, 2.0, 5.0)
        assert (one, other)[i % 2].left(caller, 2.0, 5.0) == pytest.approx(expected, abs=1e-9)
    for i in range(30_000):  # twice as many as there are places
        one.left(str(i), 2.0, 5.0)
    assert (tmp_path / "rates").stat().st_size == 1 << 19  # it does not grow
