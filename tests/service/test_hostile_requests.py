"""Requests that would cost a server more than they should: each is refused, bounded or ended, and others are answered.

No test measures time. A client's timeout of some seconds stands for "at once": without the limits each of these took
ten times as long.
"""

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from benchmarks import _hostile as hostile
from dubito.models.embedded import embedded
from dubito.service.web.decode import NICE
from dubito.service.web.pictures import UNKNOWN, cost_of, light, plain
from tests.service.conftest import TWO_DECODERS

Fixture = Any  # the types of conftest.py
V1, V2 = "/v1/models/digits/predict", "/v2/models/digits/infer"
ZEROS = {"inputs": np.zeros((1, 1, 8, 8)).tolist()}
SOON = 10.0  # seconds in which the server says no, on a busy machine
JPEG = {"content-type": "image/jpeg"}
PNG = {"content-type": "image/png"}
PACKED = {"content-encoding": "gzip"}


@pytest.fixture(scope="module")
def plants(make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("m") / "plants.safetensors")


@pytest.fixture(scope="module")
def server(serve: Fixture, small_digits: Path, plants: Path) -> Fixture:
    return serve(small_digits, plants, "--set", "buckets=1,2,16", "--set", "repository_api=true", **TWO_DECODERS)


@pytest.fixture
def http(server: Fixture) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SOON) as client:
        yield client
        assert client.post(V1, json=ZEROS).status_code == 200  # whatever was sent, the next request is answered


def said(reply: httpx.Response, *statuses: int) -> str:
    assert reply.status_code in statuses, (reply.status_code, reply.text[:300])
    body = reply.json()
    text: str = body["detail"] if "detail" in body else body["error"]
    assert len(text) < 400
    return text


def resident(pid: int) -> int:
    return sum(one.memory_info().rss for one in (psutil.Process(pid), *psutil.Process(pid).children()))


def counted(http: httpx.Client, series: str) -> float:
    line = re.search(rf"^{re.escape(series)} (\S+)$", http.get("/metrics").text, re.M)
    assert line is not None, series
    return float(line[1])


# 1: work before bounds


@pytest.mark.parametrize("count", [60_000, 400])
def test_inputs_of_one_name_without_end(http: httpx.Client, count: int) -> None:
    reply = http.post(V2, content=hostile.packed(hostile.many_inputs(count)), headers=PACKED)
    text = said(reply, 400, 413)
    assert "entries; at most 64" in text or "values and lists" in text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (partial(hostile.many_lists, 30 << 20), "values and lists"),
        (partial(hostile.many_numbers, 30 << 20), "values and lists"),
        (partial(hostile.many_lists, 1 << 20), "values and lists"),
        (lambda: b'{"inputs":' + b"[" * 200_000 + b"]" * 200_000 + b"}", ""),
        (partial(hostile.deep, 900, "inputs"), "no array of numbers"),
        (partial(hostile.deep, 900, "samples"), "samples is a list of 1"),
        (partial(hostile.deep, 900, "return"), "return is a list of 1"),
        (partial(hostile.deep, 900, "group"), "group is a list of 1"),
        (partial(hostile.many_keys, 100_000), "options of the body"),
        (partial(hostile.many_keys, 500), "there is no option"),
        (lambda: b'{"inputs":[[0]],"seed":"' + b"9" * 10_000_000 + b'"}', "options of the body"),
    ],
)
def test_json_that_is_larger_than_any_request(http: httpx.Client, body: Callable[[], bytes], expected: str) -> None:
    content = hostile.packed(body())
    assert expected in said(http.post(V1, content=content, headers=PACKED), 400, 413)
    said(http.post(V2, content=content, headers=PACKED), 400, 413)


def test_a_body_is_no_larger_than_the_models_inputs_can_be(http: httpx.Client) -> None:
    """4096 rows of four numbers are half a megabyte as JSON, whatever `body_bytes` allows others."""
    for body in (bytes(1 << 20), hostile.packed(bytes(1 << 20))):
        headers = PACKED if len(body) < 1 << 20 else {}
        assert "589,824" in said(http.post("/v1/models/plants/predict", content=body, headers=headers), 413)
    widest = [[-1.2345678901234567e-300] * 4] * 4096
    reply = http.post("/v1/models/plants/predict", json={"inputs": widest, "samples": 0}, timeout=60)
    assert len(reply.json()["predictions"]) == 4096


def test_bodies_of_numbers_leave_no_memory_behind(server: Fixture, http: httpx.Client) -> None:
    """Of eight at once the server keeps the bytes, and one process at a time what they are parsed to."""
    body = hostile.packed(hostile.many_numbers(30 << 20))
    http.post(V1, content=body, headers=PACKED)
    before, peak = resident(server.pid), 0

    async def all_at_once() -> None:
        nonlocal peak
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asks = [asyncio.create_task(client.post(V1, content=body, headers=PACKED)) for _ in range(8)]
            while not all(ask.done() for ask in asks):
                peak = max(peak, resident(server.pid))
                await asyncio.sleep(0.02)
            assert {(await ask).status_code for ask in asks} <= {413, 429, 504}  # 504: on a machine that is busy

    asyncio.run(all_at_once())
    assert peak - before < 600e6
    for _ in range(100):  # a second later the server gives memory back
        if resident(server.pid) - before < 100e6:
            return
        time.sleep(0.1)
    raise AssertionError(f"{resident(server.pid) - before:,} bytes are left behind")


def test_a_form_of_many_lines(http: httpx.Client) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    said(http.post(V1, content=hostile.long_form(3_000_000), headers=headers, timeout=60), 400, 413)
    parts = b"".join(b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\nx\r\n' for _ in range(5000))
    assert "at most 4096" in said(http.post(V1, content=parts + b"--b--\r\n", headers=headers), 413)


def test_tiny_pictures_do_not_become_gigabytes(
    serve: Fixture, make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    """The inputs of a request are bounded as the network takes them, not as they came."""
    small = serve(make_artifact(tmp_path / "m.safetensors", kind="image"), "--set", "input_bytes=7680")  # ten inputs
    with httpx.Client(base_url=small.url, timeout=SOON) as client:
        one = base64.b64encode(hostile.picture(1)).decode()
        path = "/v1/models/m/predict"
        assert "11 inputs came; at most 10" in said(client.post(path, json={"images": [one] * 11}), 413)
        assert client.post(path, json={"images": [one] * 10}).status_code == 200


def test_requests_that_hold_much_leave_room_for_small_ones(serve: Fixture, small_digits: Path) -> None:
    held = serve(small_digits, "--set", "held_bytes=3000000", "--set", "buckets=1")
    host, port = held.address.split(":")
    head = f"POST {V1} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000001\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as half, httpx.Client(base_url=held.url, timeout=SOON) as client:
        half.sendall(head + bytes(2_000_000))
        while counted(client, "dubito_held_bytes") < 2_000_000:
            time.sleep(0.01)
        assert "bytes, of at most 3,000,000" in said(client.post(V1, content=bytes(2_000_000)), 429)
        assert client.post(V1, json=ZEROS).status_code == 200
        assert counted(client, 'dubito_rejected_total{reason="bytes"}') == 1


# 2: decoding without an end


def test_a_picture_of_many_scans(http: httpx.Client) -> None:
    assert "500 scans; at most 32" in said(http.post(V1, content=hostile.scan_bomb(), headers=JPEG), 413)
    body = {"images": [base64.b64encode(hostile.scan_bomb(256, 100)).decode()]}
    assert "100 scans" in said(http.post(V1, json=body), 413)
    assert http.post(V1, content=hostile.scan_bomb(256, 20), headers=JPEG).status_code == 200


def test_pictures_whose_headers_have_no_end(server: Fixture, http: httpx.Client) -> None:
    """What the server itself reads of a picture is little: 33 MB of markers took it 13 s, on its event loop."""
    one = b"\xff\xd8" + b"\xff\x01" * 131_068
    assert http.post(V1, content=one, headers=JPEG).status_code == 413
    blob = (len(one).to_bytes(4, "little") + one) * 120
    tensor = {"name": "input", "shape": [120], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"samples": 1}}).encode()
    lengths = {"inference-header-content-length": str(len(head))}
    assert "65,536 parts" in said(http.post(V2, content=head + blob, headers=lengths, timeout=60), 413)


def test_the_first_bytes_of_a_picture_tell_what_it_costs() -> None:
    jpeg, png = hostile.picture(64, "JPEG"), hostile.picture(64)
    assert cost_of(png) == cost_of(jpeg) == 64 * 64
    assert cost_of(b"\xff\xd8" + b"\xff\x01" * 40 + jpeg[2:]) == UNKNOWN  # too many parts before the frame's header
    assert cost_of(b"\xff\xd8\x00" + jpeg[2:]) == UNKNOWN  # they do not follow each other
    assert light([png] * 200)
    assert not light([png] * 300)  # 1,228,800 pixels
    assert not light([png, bytes(1 << 20)])
    assert plain([png] * 16)
    assert not plain([png] * 17)


def test_many_small_pictures_are_refused_before_they_are_fitted(http: httpx.Client) -> None:
    """And in other ways answered: pictures of one size are fitted together."""
    x = np.zeros((4096, 1, 5), np.uint8)
    for shape, kind, data in ((x.shape, "UINT8", x.tobytes()), ((4096,), "BYTES", b"\x01\x00\x00\x00x" * 4096)):
        tensor = {"name": "input", "shape": shape, "datatype": kind, "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [tensor], "parameters": {"samples": 1024}}).encode()
        lengths = {"inference-header-content-length": str(len(head))}
        assert "rows × draws" in said(http.post(V2, content=head + data, headers=lengths), 413)
    file = io.BytesIO()
    np.save(file, x)
    headers = {"content-type": "application/x-npy"}
    url = f"{V1}?samples=1024"
    assert "rows × draws" in said(http.post(url, content=file.getvalue(), headers=headers), 413)
    reply = http.post(f"{V1}?samples=0", content=file.getvalue(), headers=headers, timeout=60)
    assert len(reply.json()["predictions"]) == 4096


@pytest.mark.parametrize(
    ("content", "statuses"),
    [
        (partial(hostile.interlaced_png, 512), (200,)),
        (partial(hostile.interlaced_png, 6000), (413,)),
        (partial(hostile.texts_png, 200), (400,)),
        (partial(hostile.frames, 200, 64, "GIF"), (200,)),
        (partial(hostile.frames, 50, 64, "WEBP"), (200,)),
        (partial(hostile.frames, 50, 64, "PNG"), (200,)),
        (partial(hostile.picture, 64, "TIFF"), (400,)),
        (partial(hostile.picture, 64, "PPM"), (400,)),
        (partial(hostile.picture, 64, "ICO"), (400,)),
    ],
    ids=["interlaced", "interlaced, large", "texts", "GIF", "WebP", "APNG", "TIFF", "PPM", "ICO"],
)
def test_odd_pictures(http: httpx.Client, content: Callable[[], bytes], statuses: tuple[int, ...]) -> None:
    """Of those that move, the first frame is taken."""
    assert http.post(V1, content=content(), headers=PNG).status_code in statuses


@pytest.fixture(scope="module")
def patient(serve: Fixture, small_digits: Path) -> Fixture:
    """A server that lets pictures take long: as if there were a kind of them that no limit knows."""
    limits = ["image_scans=100000", "decode_seconds=60", "drain_seconds=2", "linger_seconds=0", "buckets=1"]
    limits += ["request_work=1000"]
    return serve(small_digits, *(word for limit in limits for word in ("--set", limit)), **TWO_DECODERS)


def test_the_work_of_a_long_body_is_that_of_its_own_options(patient: Fixture) -> None:
    """Which are not known before it is parsed: 900 rows with the usual twenty draws would be too many."""
    x = np.zeros((900, 1, 8, 8))
    with httpx.Client(base_url=patient.url, timeout=60) as http:
        reply = http.post(V1, json={"inputs": x.tolist(), "samples": 1})
        assert len(reply.json()["predictions"]) == 900
        assert "18,000 rows × draws" in said(http.post(V1, json={"inputs": x.tolist()}), 413)
        tensor = {"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}
        reply = http.post(V2, json={"inputs": [tensor], "parameters": {"samples": 1}})
        assert reply.json()["outputs"][0]["shape"][0] == 900


def test_decoding_ends_with_the_deadline_or_the_client(patient: Fixture) -> None:
    bomb = hostile.scan_bomb(4096, 3000)
    host, port = patient.address.split(":")
    with httpx.Client(base_url=patient.url, timeout=SOON) as http:
        assert "no answer within 0.3" in said(http.post(f"{V1}?timeout_ms=300", content=bomb, headers=JPEG), 504)
        head = f"POST {V1} HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(bomb)}\r\n\r\n"
        for _ in range(6):  # clients that go at once
            with socket.create_connection((host, int(port))) as gone:
                gone.sendall(head.encode() + bomb)
        large = hostile.picture(1200, "JPEG")  # not so small that the server decodes it itself
        for content in (hostile.picture(), large):
            assert http.post(V1, content=content, headers=PNG).status_code == 200
        while counted(http, 'dubito_decoded_total{outcome="gone"}') < 1:
            time.sleep(0.05)
        assert counted(http, 'dubito_decoded_total{outcome="late"}') == 1


def test_a_stop_does_not_wait_for_pictures(patient: Fixture) -> None:
    """The last test of this server. Six bombs of minutes each, two seconds to drain."""
    bomb = hostile.scan_bomb(4096, 3000)
    host, port = patient.address.split(":")
    head = f"POST {V1} HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(bomb)}\r\n\r\n"
    asks = [socket.create_connection((host, int(port))) for _ in range(6)]
    for ask in asks:
        ask.sendall(head.encode() + bomb)
    with httpx.Client(base_url=patient.url, timeout=SOON) as http:
        while counted(http, "dubito_decode_depth") < 4:
            time.sleep(0.02)
    children = psutil.Process(patient.pid).children()
    began = time.monotonic()
    assert patient.stop(signal.SIGTERM) == 1  # they were accepted, and not answered
    assert time.monotonic() - began < 20  # minutes, if it waited
    for ask in asks:
        ask.close()
    end(children)


def end(processes: list[psutil.Process]) -> None:
    """Wait until they have ended; what nobody has asked after is then a zombie."""

    def runs(one: psutil.Process) -> bool:
        try:
            return one.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    limit = time.monotonic() + SOON
    while any(map(runs, processes)):
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_decoding_gives_way_to_predictions(server: Fixture, http: httpx.Client) -> None:
    """The processes that decode, and the server's threads that resize what they have decoded."""
    assert http.post(V1, content=hostile.picture(2000), headers=PNG).status_code == 200  # starts the second process
    usual = os.getpriority(os.PRIO_PROCESS, server.pid)
    lower = min(19, usual + NICE)
    threads = [os.getpriority(os.PRIO_PROCESS, one.id) for one in psutil.Process(server.pid).threads()]
    assert set(threads) == {usual, lower}
    assert threads.count(lower) >= 2  # and those that torch starts for them
    children = psutil.Process(server.pid).children()
    assert [os.getpriority(os.PRIO_PROCESS, one.pid) for one in children] == [lower] * len(children) != []


def test_a_process_that_dies_is_replaced(server: Fixture, http: httpx.Client) -> None:
    content = hostile.picture(700, "JPEG")
    expected = http.post(f"{V1}?seed=1", content=content, headers=JPEG).json()["predictions"]
    children = psutil.Process(server.pid).children()
    for child in children:
        child.kill()
    end(children)
    assert http.post(f"{V1}?seed=1", content=content, headers=JPEG).json()["predictions"] == expected


# 3: one request takes all


@pytest.fixture(scope="module")
def slow(serve: Fixture) -> Fixture:
    """A server whose digits take long enough for others to come meanwhile."""
    return serve(embedded("digits"), "--set", "buckets=1,2,16", "--set", "batch_work=512")


def test_rows_times_draws_are_capped(http: httpx.Client) -> None:
    body = {"inputs": np.zeros((4096, 1, 8, 8)).tolist(), "samples": 1024}
    assert "4,194,304 rows × draws; at most 131,072" in said(http.post(V1, json=body), 413)
    assert "4096 inputs" in said(http.post(V1, json=body | {"samples": "auto", "max_samples": 33}), 413).replace(
        ",", ""
    )
    x = np.zeros((4096, 1, 8, 8), np.float32)
    tensor = {"name": "input", "shape": x.shape, "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"samples": 33}}).encode()
    lengths = {"inference-header-content-length": str(len(head))}
    assert "rows × draws" in said(http.post(V2, content=head + x.tobytes(), headers=lengths), 413)


def test_what_cannot_be_in_time_is_refused_at_once(slow: Fixture) -> None:
    body = {"inputs": np.zeros((12, 1, 8, 8)).tolist(), "samples": 1024, "timeout_ms": 50}
    assert "is possible: this request takes about" in said(httpx.post(slow.url + V1, json=body, timeout=SOON), 504)


def test_a_long_request_takes_turns_with_short_ones(slow: Fixture) -> None:
    """Short ones that come after it are answered before it; of a single row with many draws as well."""

    async def beside(long: dict[str, Any]) -> None:
        async with httpx.AsyncClient(base_url=slow.url, timeout=120) as client:
            await client.post(V1, json=ZEROS)
            begun = await passes(client)
            task = asyncio.create_task(client.post(V1, json=long))
            while await passes(client) == begun:
                await asyncio.sleep(0.01)
            alone = asyncio.create_task(client.post(V1, json=ZEROS))
            done, _ = await asyncio.wait({task, alone}, return_when=asyncio.FIRST_COMPLETED)
            assert alone in done
            assert alone.result().status_code == 200
            assert (await task).status_code == 200
            assert len((await task).json()["predictions"]) == len(long["inputs"])

    async def passes(client: httpx.AsyncClient) -> list[str]:
        return re.findall(r'^dubito_batch_size_count{model="digits".*$', (await client.get("/metrics")).text, re.M)

    patient = {"timeout_ms": 300_000}
    asyncio.run(beside({"inputs": np.zeros((24, 1, 8, 8)).tolist(), "samples": 60, **patient}))
    asyncio.run(beside({"inputs": np.zeros((3, 1, 8, 8)).tolist(), "samples": 512, **patient}))
    asyncio.run(beside({"inputs": np.zeros((1024, 1, 8, 8)).tolist(), "samples": 1, **patient}))


def test_a_flood_on_another_model_is_in_turns_with_this_one(serve: Fixture, plants: Path) -> None:
    """While one plant is asked for, at most one batch of the flood is computed on average, however many wait."""
    server = serve(embedded("digits"), plants, "--set", "buckets=1,2")
    digits = json.dumps({**ZEROS, "samples": 64}).encode()  # longer than it takes to ask again
    kind = {"content-type": "application/json"}
    limits = httpx.Limits(max_connections=64)

    async def go() -> tuple[float, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def flood() -> None:
                while True:
                    await client.post(V1, content=digits, headers=kind)

            floods = [asyncio.create_task(flood()) for _ in range(16)]
            with httpx.Client(base_url=server.url, timeout=120) as metrics:
                batches = partial(asyncio.to_thread, counted, metrics, 'dubito_batch_size_count{model="digits"}')
                while await batches() < 3:
                    await asyncio.sleep(0.01)
                before = await batches()
                for _ in range(6):
                    reply = await client.post("/v1/models/plants/predict", json={"inputs": [[1, 2, 3, 4]]})
                    assert reply.status_code == 200
                after = await batches()
            waiting = sum(not task.done() for task in floods)
            for task in floods:
                task.cancel()
            return after - before, waiting

    computed, waiting = asyncio.run(go())
    assert waiting == 16
    assert computed <= 6 + 2  # two more while the metrics are read


# 9: protocol


def infer(http: httpx.Client, data: Any = None, **fields: Any) -> httpx.Response:
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64 if data is None else data}
    return http.post(V2, json={"inputs": [tensor | fields.pop("tensor", {})], **fields})


@pytest.mark.parametrize("value", [None, {}, {"a": 1}, [], [1]])
def test_parameters_are_strings_numbers_or_booleans(http: httpx.Client, value: object) -> None:
    expected = "expected a short string, a number or a boolean"
    assert expected in said(infer(http, parameters={"mine": value}), 400)
    assert expected in said(infer(http, tensor={"parameters": {"mine": value}}), 400)
    assert expected in said(infer(http, outputs=[{"name": "class", "parameters": {"mine": value}}]), 400)
    for allowed in ("text", 1, 1.5, True):
        assert infer(http, parameters={"mine": allowed}).status_code == 200


@pytest.mark.parametrize("odd", ["0.5", True, False, None, [0.5], {}])
def test_only_numbers_are_numbers(http: httpx.Client, odd: object) -> None:
    for place in (0, 63):
        data: list[Any] = [0.25] * 64
        data[place] = odd
        assert "are no array of FP32" in said(infer(http, data), 400)
        assert "no array of numbers" in said(http.post(V1, json={"inputs": data}), 400)
    assert infer(http, [1] * 64).status_code == 200


def test_load_refuses_what_it_would_ignore(http: httpx.Client) -> None:
    for verb in ("load", "unload"):
        path = f"/v2/repository/models/plants/{verb}"
        for parameters in ({"config": "{}"}, {"config": 5}, {"file:1/model.onnx": "AAAA"}):
            name = next(iter(parameters))
            reply = said(http.post(path, json={"parameters": parameters}), 400)
            assert f"{verb} takes no parameter {name[:40]!r}" in reply or "expected a short string" in reply
        wrongs: tuple[object, ...] = ([], "text", 5, None)
        for wrong in wrongs:
            assert "are no object" in said(http.post(path, json={"parameters": wrong}), 400)
        assert "'config'" in said(http.post(path, json={"config": "{}"}), 400)
        said(http.post(path, content=bytes(1 << 17)), 413)
    assert "no boolean" in said(http.post(path, json={"parameters": {"unload_dependents": "no"}}), 400)
    assert http.post(path, json={"parameters": {"unload_dependents": False}}).status_code == 200
    assert http.post("/v2/repository/models/plants/load", json={"parameters": {}}).status_code == 200


# 7: plans


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": 3}', "[" * 100_000, '{"cpu": {"x": [1]}}', "\udcff", '{"a": {"b": {"c": {}}}}'],
    ids=lambda text: repr(text)[:16],
)
def test_damaged_plans_do_not_stop_the_start(text: str, tmp_path: Path) -> None:
    import torch

    from dubito.service.engine.plans import PlanCache

    file = tmp_path / "plans.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    cache = PlanCache(file, torch.device("cpu"))
    assert cache.executions == {}
    cache.save()
    assert json.loads(file.read_text()) != text


def test_a_server_starts_beside_damaged_plans(
    serve: Fixture, make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "dubito").mkdir()
    (tmp_path / "dubito" / "plans.json").write_text("[" * 100_000)
    settings = {"XDG_CACHE_HOME": str(tmp_path), "DUBITO_PLAN_SECONDS": "5"}  # executions are measured, as usual
    one = serve(make_artifact(tmp_path / "m.safetensors"), "--set", "buckets=1", **settings)
    assert httpx.get(f"{one.url}/readyz").status_code == 200
    assert json.loads((tmp_path / "dubito" / "plans.json").read_text())
