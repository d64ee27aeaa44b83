"""Traces by OpenTelemetry: a span for each prediction and each of its stages, and one for each batch, with links.

Imported only where the setting `traces` is on. Where spans go, and which share of them, say the standard variables:
OTEL_TRACES_EXPORTER (otlp, console, none), OTEL_EXPORTER_OTLP_..., OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and others.
Times are taken while a request is answered; its spans are made when it has ended, and none where it is not sampled.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as SpanMaker
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from dubito import __version__
from dubito.models.errors import DubitoError
from dubito.service.engine.worker import Batch

CARRIED = (b"traceparent", b"tracestate")  # headers of W3C Trace Context
LAST = 2.0  # seconds for the last spans to leave when the server ends
propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True)
class TracedPart:
    """When a request, or a part of a large one, was queued and computed, and in which batch."""

    queued: float
    began: float
    ended: float
    rows: int
    batch: SpanContext


class LinkedSampler(Sampler):
    """A span with links and no parent, which is that of a batch, is recorded if one of the linked requests is."""

    def __init__(self, others: Sampler) -> None:
        self.others = others

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if not links or get_current_span(parent_context).get_span_context().is_valid:
            return self.others.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        sampled = any(link.context.trace_flags.sampled for link in links)
        return SamplingResult(Decision.RECORD_AND_SAMPLE if sampled else Decision.DROP, attributes)

    def get_description(self) -> str:
        return f"LinkedSampler({self.others.get_description()})"


class Tracer:
    """Makes spans and exports them from a thread of its own."""

    def __init__(self, exporter: SpanExporter | None, sampler: Sampler | None = None) -> None:
        """Without a sampler: that of OTEL_TRACES_SAMPLER."""
        ours = Resource({"service.name": "dubito", "service.version": __version__})
        self.provider = TracerProvider(sampler, ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self.provider.sampler = LinkedSampler(self.provider.sampler)
        if exporter is not None:
            self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("dubito", __version__)

    def start(self, name: str, headers: Mapping[bytes, bytes], began: float) -> "RequestTrace":
        """The span of a request, which continues the trace that its headers name."""
        carrier = {key.decode(): headers[key].decode("latin-1") for key in CARRIED if key in headers}
        parent = propagator.extract(carrier, Context())
        zero = time.time_ns() - time.monotonic_ns()
        span = self.tracer.start_span(name, parent, SpanKind.SERVER, start_time=zero + int(1e9 * began))
        return RequestTrace(self.tracer, span, began, zero)

    def batch(self, batch: Batch, ended: float) -> None:
        """The span of a batch, with a link to each of its requests; called by the inference thread."""
        zero = time.time_ns() - time.monotonic_ns()
        traced = [(t, t.trace) for t in batch.wanted if isinstance(t.trace, RequestTrace)]
        links = [Link(trace.context) for _, trace in traced]
        rows = sum(ticket.request.rows for ticket in batch.wanted)
        attributes = {"dubito.requests": len(batch.wanted), "dubito.rows": rows}
        span = self.tracer.start_span(
            "batch", Context(), links=links, attributes=attributes, start_time=zero + int(1e9 * batch.began)
        )
        if batch.failed is not None:
            span.set_status(StatusCode.ERROR, type(batch.failed).__name__)
        span.end(zero + int(1e9 * ended))
        for ticket, trace in traced:
            trace.parts.append(
                TracedPart(ticket.queued, batch.began, ended, ticket.request.rows, span.get_span_context())
            )

    def close(self) -> None:
        """Export what is left, as far as the collector takes it in time."""
        last = threading.Thread(target=self.provider.shutdown, daemon=True)
        last.start()
        last.join(LAST)


class RequestTrace:
    """The span of a request, and what its stages are made from."""

    def __init__(self, tracer: SpanMaker, span: Span, began: float, zero: int) -> None:
        self.tracer, self.span, self.began, self.zero = tracer, span, began, zero
        self.context = span.get_span_context()
        self.received = 0.0  # time at which the body had come whole
        self.parts: list[TracedPart] = []  # appended by the inference thread before it delivers the answer

    @property
    def id(self) -> str:
        return f"{self.context.trace_id:032x}"

    @property
    def response(self) -> bytes:
        """Value of the reply's header `traceresponse`: the trace, and the server's span in it."""
        return f"00-{self.id}-{self.context.span_id:016x}-{int(self.context.trace_flags):02x}".encode()

    def body_came(self) -> None:
        self.received = time.monotonic()

    def end(self, status: int, parsed: float, answered: float, attributes: Mapping[str, str | int]) -> None:
        """End the span with those of its stages; `parsed` and `answered` are 0 where it did not come so far."""
        if not self.span.is_recording():
            return
        now = time.monotonic()
        self._stage("receive", self.began, self.received or now)
        if self.received:
            self._stage("decode", self.received, parsed or now)
        for part in self.parts:
            self._stage("queue", part.queued, part.began)
            self._stage("compute", part.began, part.ended, [Link(part.batch)], {"dubito.rows": part.rows})
        if parsed and not self.parts:  # refused by the queue, or late in it
            self._stage("queue", parsed, now)
        if answered:
            self._stage("reply", answered, now)
        self.span.set_attributes({**attributes, "http.response.status_code": status})
        if status >= 500:
            self.span.set_status(StatusCode.ERROR)
        self.span.end(self._at(now))

    def _stage(
        self, name: str, begin: float, end: float, links: Sequence[Link] = (), attributes: Attributes = None
    ) -> None:
        context = set_span_in_context(self.span, Context())
        span = self.tracer.start_span(name, context, links=links, attributes=attributes, start_time=self._at(begin))
        span.end(self._at(end))

    def _at(self, monotonic: float) -> int:
        return self.zero + int(1e9 * monotonic)


def from_environment() -> Tracer:
    """A tracer with the exporter that OTEL_TRACES_EXPORTER names, by default OTLP over HTTP."""
    asked = os.environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if asked == "none":
        return Tracer(None)
    name = asked
    if asked == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL"))
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    known = {one.name: one for one in entry_points(group="opentelemetry_traces_exporter")}
    if name not in known:
        raise DubitoError(
            f"OTEL_TRACES_EXPORTER is {asked!r}, and no exporter {name} is installed; there are: "
            f"{', '.join(sorted(known)) or 'none'}. pip install 'dubito[otel]' brings otlp_proto_http and console."
        )
    return Tracer(known[name].load()())
