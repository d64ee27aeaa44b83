"""The ASGI application: request ids, API keys, logs and errors, then the raw prediction paths or FastAPI's routes."""

import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware

from dubito.service.logs import write_line
from dubito.service.problems import Problem, TooManyRequests, problem_of
from dubito.service.web.http import ClientGone, Message, Pairs, Receive, Reply, Scope, Send, body_of
from dubito.service.web.predict import V1, V2, Predictor, RequestContext
from dubito.service.web.routes import check_changeable, routes, without_parameters
from dubito.service.web.security import EDGE, HEADERS, Guard, check_target
from dubito.service.web.state import State

if TYPE_CHECKING:
    from dubito.service.traces import RequestTrace

log = logging.getLogger("dubito")
SAFE = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
SAFE_AT_EDGE = [(name.encode(), value.encode()) for name, value in EDGE.items()]
SHOWN = ("X-Request-ID", "Inference-Header-Content-Length", "Retry-After", "Traceresponse")  # to pages of other origins
CLOSE = (b"connection", b"close")
V1_ROUTE, V2_ROUTE = "/v1/models/{name}/predict", "/v2/models/{name}/infer"  # names of spans
CHANGES = re.compile(
    r"/v2/repository/models/[^/]+/(?:load|unload)"
)  # who may ask is checked before FastAPI's machinery
PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,100}")


class Server:
    """The ASGI application."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.guard = Guard(state.settings, state.rates)
        self.under_way = 0  # predictions that are being answered
        self.routes = routes(state)
        self.simple = without_parameters(self.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        client_id = headers.get(b"x-request-id")
        id_ = client_id if client_id and PLAIN_ID.fullmatch(client_id) else b"%016x" % random.getrandbits(64)
        context = RequestContext(scope, receive, headers, time.monotonic())
        out = Reply(send, lambda: self._common_headers(id_, path, context))
        try:
            check_target(scope["raw_path"], headers)
            context.client = self.guard.admit(path, headers, (scope.get("client") or ("",))[0])
            if scope["method"] == "POST" and CHANGES.match(path):
                check_changeable(self.state, headers)
            if (hot := V2.fullmatch(path) or V1.fullmatch(path)) is None:
                if scope["method"] == "HEAD":  # the connection leaves out the body
                    scope = {**scope, "method": "GET"}
                if scope["method"] == "GET" and (simple := self.simple.get(path)) is not None:
                    response = await simple()
                    await response(scope, receive, out)
                else:
                    await self.routes(scope, receive, out)
            else:
                content, pairs = await self._predict(context, hot)
                await out.reply(200, content, pairs)
        except ClientGone:
            out.status = 499
        except Exception as error:
            problem = self.refuse(error, id_)
            if not out.status:
                content, kind = body_of(problem, v2=path.startswith("/v2"))
                raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in problem.headers.items()]
                await out.reply(problem.status, content, [(b"content-type", kind.encode()), *raw])
            del problem  # its traceback refers to this frame: the body would be kept until a garbage collection
        self.finish(context, id_, out.status)

    def refuse(self, error: Exception, id_: bytes) -> Problem:
        """The problem to show to the client, logged where the fault is the server's, and counted."""
        problem = problem_of(error)
        if problem.status >= 500 and not isinstance(error, Problem):
            log.error("request failed", extra={"request": id_.decode()}, exc_info=error)
        if problem.reason:
            self.state.metrics.rejected.labels(problem.reason).inc()
        return problem

    def _common_headers(self, id_: bytes, path: str, context: RequestContext) -> Pairs:
        """Headers that every reply gets."""
        page = SAFE_AT_EDGE if path == "/edge" else SAFE
        safe = page if context.served is None else SAFE[:1]  # a prediction needs no headers for browsers' pages
        return [(b"x-request-id", id_), *safe, *context.also, *([CLOSE] if self.state.draining else ())]

    async def _predict(self, context: RequestContext, path: re.Match[str]) -> tuple[bytes, Pairs]:
        if context.scope["method"] != "POST":
            raise Problem(405, "this path takes POST.", {"Allow": "POST"})
        if self.state.tracer is not None:
            self.trace(context, f"POST {V2_ROUTE if path.re is V2 else V1_ROUTE}")
        predictor = self.predictor()
        slot = Slot(self, context.receive)
        context.receive = slot.receive
        try:
            return await (predictor.v2 if path.re is V2 else predictor.v1)(context, *path.groups())
        finally:
            self.under_way -= slot.held
            predictor.release(context)

    def trace(self, context: RequestContext, name: str) -> None:
        """Begin the trace of a prediction; its reply names it."""
        assert self.state.tracer is not None
        context.trace = self.state.tracer.start(name, context.headers, context.began)
        context.also = [(b"traceresponse", context.trace.response)]

    def predictor(self) -> Predictor:
        if self.state.predictor is None:
            raise Problem(503, "the server is starting; /readyz says when it is ready.", {"Retry-After": "1"})
        return self.state.predictor

    def enter(self) -> None:
        """Count a prediction whose body has come as under way; who calls this takes it off `under_way` at its end."""
        if self.under_way >= self.state.settings.max_requests:
            raise TooManyRequests(f"{self.under_way} predictions are under way.")
        self.under_way += 1

    def finish(self, context: RequestContext, id_: bytes, status: int) -> None:
        """Count the request in the metrics, and log it."""
        seconds = time.monotonic() - context.began
        if context.served is not None:
            outcome = "ok" if status < 400 else "gone" if status == 499 else "refused" if status < 500 else "failed"
            context.served.series.request[outcome].observe(seconds)
        if context.trace is not None:
            self._end_trace(context, context.trace, id_, status)
        if log.isEnabledFor(logging.INFO):
            method, path = context.scope["method"], context.scope["path"][:200]
            fields = {"message": "request", "request": id_.decode(), "method": method, "path": path}
            fields |= {"status": status, "ms": round(1000 * seconds, 3)}
            if context.served is not None:
                fields |= {"model": context.served.name, "version": context.served.version, "rows": context.rows}
            if context.trace is not None:
                fields["trace"] = context.trace.id
            write_line(fields)

    def _end_trace(self, context: RequestContext, trace: "RequestTrace", id_: bytes, status: int) -> None:
        about: dict[str, str | int] = {"dubito.request": id_.decode(), "dubito.rows": context.rows}
        about |= {"http.request.method": context.scope["method"], "url.path": context.scope["path"][:200]}
        if context.served is not None:
            about |= {"dubito.model": context.served.name, "dubito.version": context.served.version}
        trace.end(status, context.parsed, context.answered, about)


class Slot:
    """One of the predictions under way, taken when the body has come whole: half bodies hold none."""

    def __init__(self, server: Server, receive: Receive) -> None:
        self.server, self._receive, self.held = server, receive, False

    async def receive(self) -> Message:
        message = await self._receive()
        if not self.held and message["type"] == "http.request" and not message.get("more_body", False):
            self.server.enter()
            self.held = True
        return message


def application(server: Server) -> Any:
    """The server, behind CORS middleware where settings allow other origins."""
    origins = server.state.settings.cors_origins
    if not origins:
        return server
    allowed = ["Content-Type", "Content-Encoding", "X-API-Key", "Authorization", "Traceparent", "Tracestate", *SHOWN]
    return CORSMiddleware(
        server, origins, allow_methods=["GET", "POST"], allow_headers=allowed, expose_headers=[*SHOWN], max_age=600
    )
