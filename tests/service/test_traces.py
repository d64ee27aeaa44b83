"""Traces: spans of the stages of predictions on real servers, in memory and through the console exporter."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from dubito.models.errors import DubitoError
from dubito.service.settings import Settings
from dubito.service.traces import Tracer, from_environment
from dubito.service.web.app import Server
from dubito.service.web.state import State
from tests import forked
from tests.service.conftest import Serve

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
X = [[[[0.0] * 8] * 8]]
PREDICT, INFER = "/v1/models/digits/predict", "/v2/models/digits/infer"
Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


@dataclass(frozen=True)
class Seen:
    """The spans that were exported."""

    spans: Sequence[ReadableSpan]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    @property
    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.kind is SpanKind.SERVER]

    def stages(self, request: ReadableSpan) -> list[ReadableSpan]:
        mine = [span for span in self.spans if span.parent is not None and span.parent == request.context]
        return sorted(mine, key=lambda span: span.start_time or 0)


Traced = Callable[..., Seen]


def number(span: ReadableSpan, name: str) -> int:
    value = (span.attributes or {})[name]
    assert isinstance(value, int)
    return value


@pytest.fixture
def traced(small_digits: Path) -> Traced:
    """What the real application, with digits, exports while it is asked."""

    def go(ask: Ask, sampler: Sampler = ALWAYS_ON, **settings: Any) -> Seen:
        memory = InMemorySpanExporter()

        async def inside() -> None:
            state = State(Settings(models=(small_digits,), device="cpu", buckets=(1, 4), plan_seconds=0, **settings))
            state.tracer = Tracer(memory, sampler)
            await state.start()
            try:
                transport = httpx.ASGITransport(app=Server(state))
                async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                    await ask(client)
            finally:
                await state.stop(60)

        asyncio.run(inside())
        return Seen(memory.get_finished_spans())

    return go


def test_a_span_for_each_stage_with_the_clients_context(traced: Traced) -> None:
    replies: list[httpx.Response] = []

    async def ask(client: httpx.AsyncClient) -> None:
        given = {"traceparent": SAMPLED, "tracestate": "vendor=1", "x-request-id": "mine"}
        # one input: on a slow machine, more may go in parts
        replies.append(await client.post(PREDICT, json={"inputs": X}, headers=given))
        await client.get("/v1/models")  # no prediction: no span
        await client.get("/metrics")

    seen = traced(ask)
    (request,) = seen.requests
    assert request.name == "POST /v1/models/{name}/predict"
    assert request.context is not None
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert request.context.trace_state["vendor"] == "1"
    assert replies[0].headers["traceresponse"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    stages = seen.stages(request)
    assert [span.name for span in stages] == ["receive", "decode", "queue", "compute", "reply"]
    times = [(span.start_time or 0, span.end_time or 0) for span in stages]
    assert all(begin <= end for begin, end in times)
    slack = 1_000  # ns: a clock's seconds as a float64 resolve less
    for (_, end), (begin, _) in pairwise(times):
        assert begin >= end - slack  # one after the other
    assert (request.start_time or 0) <= times[0][0] + slack
    assert times[-1][1] <= (request.end_time or 0) + slack
    about = dict(request.attributes or {})
    assert about["dubito.request"] == "mine"
    assert (about["dubito.model"], about["dubito.version"], about["dubito.rows"]) == ("digits", "1", 1)
    assert about["http.response.status_code"] == 200


def test_a_batch_links_to_its_requests_and_they_to_it(traced: Traced) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(client.post(PREDICT, json={"inputs": X}) for _ in range(12)))

    seen = traced(ask, slice_ms=10_000)  # on a slow machine too, a batch holds more than one
    assert len(seen.requests) == 12
    batches = seen.named("batch")
    linked = [link.context for batch in batches for link in batch.links]
    assert sorted(one.span_id for one in linked) == sorted(one.context.span_id for one in seen.requests if one.context)
    assert sum(number(batch, "dubito.requests") for batch in batches) == 12
    assert max(len(batch.links) for batch in batches) > 1
    by_id = {batch.context.span_id: batch for batch in batches if batch.context}
    for request in seen.requests:
        (compute,) = [span for span in seen.stages(request) if span.name == "compute"]
        batch = by_id[compute.links[0].context.span_id]
        assert request.context in [link.context for link in batch.links]
        assert (compute.start_time, compute.end_time) == pytest.approx((batch.start_time, batch.end_time), abs=1e6)
        assert batch.parent is None


def test_a_large_request_has_a_compute_span_for_each_part(traced: Traced) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        await client.post(PREDICT, json={"inputs": X * 64, "samples": 20})

    seen = traced(ask, batch_work=320)
    (request,) = seen.requests
    parts = [span for span in seen.stages(request) if span.name == "compute"]
    assert len(parts) > 1
    assert sum(number(span, "dubito.rows") for span in parts) == 64


def test_sampling_follows_the_client_and_the_sampler(traced: Traced) -> None:
    """A batch is recorded if one of its requests is."""
    replies: list[httpx.Response] = []

    async def ask(client: httpx.AsyncClient) -> None:
        replies.append(await client.post(PREDICT, json={"inputs": X}, headers={"traceparent": UNSAMPLED}))
        replies.append(await client.post(PREDICT, json={"inputs": X}))
        replies.append(await client.post(PREDICT, json={"inputs": X}, headers={"traceparent": SAMPLED}))

    seen = traced(ask, ParentBased(TraceIdRatioBased(0.0)))
    flags = [int(reply.headers["traceresponse"][-2:], 16) for reply in replies]
    assert [flag & 1 for flag in flags] == [0, 0, 1]  # the next bit says that the id is random
    assert len(seen.requests) == len(seen.named("batch")) == 1
    assert [reply.headers["traceresponse"][3:35] == TRACE for reply in replies] == [True, False, True]


def test_refused_requests_end_their_spans(traced: Traced) -> None:
    cases: list[tuple[dict[str, Any], int, list[str]]] = [
        ({"inputs": [[1.0]]}, 400, ["receive", "decode"]),
        ({"inputs": X, "samples": -1}, 400, ["receive", "decode"]),
        ({"inputs": X * 64, "samples": 1000, "timeout_ms": 1}, 504, ["receive", "decode", "queue"]),
    ]

    async def ask(client: httpx.AsyncClient) -> None:
        for body, status, _ in cases:
            assert (await client.post(PREDICT, json=body)).status_code == status

    seen = traced(ask)
    for request, (_, status, stages) in zip(seen.requests, cases, strict=True):
        assert [span.name for span in seen.stages(request)] == stages
        assert (request.attributes or {})["http.response.status_code"] == status
        assert request.status.status_code is (StatusCode.ERROR if status >= 500 else StatusCode.UNSET)


def test_a_wrong_context_begins_a_trace_of_its_own(traced: Traced) -> None:
    headers = ["", "00", f"00-{'0' * 32}-{PARENT}-01", "ff-" + SAMPLED[3:], "x" * 5000, "é"]

    async def ask(client: httpx.AsyncClient) -> None:
        for header in headers:
            given = {"traceparent": header.encode()}
            reply = await client.post(PREDICT, json={"inputs": X}, headers=given)  # type: ignore[arg-type]
            assert reply.status_code == 200, header

    requests = traced(ask).requests
    assert [request.parent for request in requests] == [None] * len(headers)
    assert len({request.context.trace_id for request in requests if request.context}) == len(headers)


# in processes of their own


def documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects, one after the other."""
    while text := text.lstrip():
        document, end = json.JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


def test_a_server_exports_by_the_standard_variables(serve: Serve, small_digits: Path) -> None:
    """By the console exporter to standard output, over HTTP and gRPC; the log names the trace, too."""
    from tests.service.grpc_clients import Bare, request

    environment = {"DUBITO_TRACES": "true", "OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "mine"}
    live = serve(small_digits, "--grpc-port", "0", **environment)
    x, other = np.zeros((1, 1, 8, 8), np.float32), f"{TRACE[:-1]}d"
    body = {"inputs": [{"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}]}
    reply = httpx.post(f"{live.url}{INFER}", json=body, headers={"traceparent": SAMPLED})
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE}-")
    with Bare(live.grpc, [("traceparent", SAMPLED.replace(TRACE, other))]) as client:
        _, call = client.method("ModelInfer").with_call(request(x), metadata=client.metadata)
        with pytest.raises(grpc.RpcError) as refused:
            client.infer(request(x, samples=-1))
    for metadata in (call.trailing_metadata(), refused.value.trailing_metadata()):
        assert dict(metadata)["traceresponse"].startswith(f"00-{other}-")
    assert {line.get("trace") for line in live.logged(other)} >= {TRACE, other}
    assert live.stop() == 0
    spans = list(documents(live.stdout.read()))
    assert {span["resource"]["attributes"]["service.name"] for span in spans} == {"mine"}
    for name, trace in (
        ("POST /v2/models/{name}/infer", TRACE),
        ("inference.GRPCInferenceService/ModelInfer", other),
    ):
        answered = [span for span in spans if span["name"] == name and span["attributes"].get("dubito.rows") == 1]
        (root,) = answered
        assert (root["context"]["trace_id"], root["parent_id"]) == (f"0x{trace}", f"0x{PARENT}")
        mine = [span["name"] for span in spans if span["parent_id"] == root["context"]["span_id"]]
        assert sorted(mine) == ["compute", "decode", "queue", "receive", "reply"]
        linked = [link["context"]["span_id"] for span in spans if span["name"] == "batch" for link in span["links"]]
        assert root["context"]["span_id"] in linked


def test_otlp_arrives_at_a_collector(serve: Serve, small_digits: Path) -> None:
    """As protobuf over HTTP, which the extra's exporter speaks."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="NOT CHECKED: OTLP, for its exporter is not installed (pip install 'dubito[otel]')",
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with socket.create_server(("127.0.0.1", 0)) as collector:
        address = f"http://127.0.0.1:{collector.getsockname()[1]}"
        live = serve(small_digits, DUBITO_TRACES="true", OTEL_EXPORTER_OTLP_ENDPOINT=address)
        assert httpx.post(f"{live.url}{PREDICT}", json={"inputs": X}).status_code == 200
        collector.settimeout(60)
        connection, _ = collector.accept()
        with connection, connection.makefile("rb") as stream:
            assert stream.readline() == b"POST /v1/traces HTTP/1.1\r\n"
            headers = dict(line.lower().split(b": ", 1) for line in iter(stream.readline, b"\r\n"))
            body = stream.read(int(headers[b"content-length"]))
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        live.stop()
    told = ExportTraceServiceRequest.FromString(body)
    names = {span.name for one in told.resource_spans for scope in one.scope_spans for span in scope.spans}
    assert {"POST /v1/models/{name}/predict", "compute", "batch"} <= names


def test_a_collector_that_does_not_answer_keeps_no_server_from_ending(serve: Serve, small_digits: Path) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="NOT CHECKED: a stuck collector, for the OTLP exporter is not installed (pip install 'dubito[otel]')",
    )
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        live = serve(small_digits, DUBITO_TRACES="true", OTEL_EXPORTER_OTLP_ENDPOINT=address)
        assert httpx.post(f"{live.url}{PREDICT}", json={"inputs": X}).status_code == 200
        assert live.stop() == 0


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin9")
    with pytest.raises(DubitoError, match=r"'zipkin9', and no exporter zipkin9 is installed; there are: .*console"):
        from_environment()


def test_off_imports_nothing() -> None:
    code = (
        "import sys; from dubito.service.settings import Settings; from dubito.service.web.state import State\n"
        "import dubito.service.run, dubito.service.grpc.server; state = State(Settings())\n"
        "print(state.tracer, [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'dubito.service.traces'))])"
    )
    done = forked.run(code=code)  # what it has imported besides does not import them either
    assert done.stdout == "None []\n", done.stderr
