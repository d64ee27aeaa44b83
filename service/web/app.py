"""The server: one front before the raw prediction paths and FastAPI's routes; keys, ids, logs and errors pass here."""

import asyncio
import logging
import random
import re
import time
from typing import Any

import torch
from starlette.middleware.cors import CORSMiddleware

from dubito.models.numerics.proof import name_of
from dubito.service.engine.budget import KINDS
from dubito.service.engine.device import device_of, dtype_of, trusted
from dubito.service.logs import write_line
from dubito.service.metrics import Metrics, Sizes, device_bytes
from dubito.service.problems import Problem, problem_of
from dubito.service.repository import Repository
from dubito.service.settings import Settings
from dubito.service.web.http import ClientGone, Out, Pairs, Receive, Scope, Send, body_of
from dubito.service.web.predict import V1, V2, Asked, Predictor
from dubito.service.web.routes import routes
from dubito.service.web.security import EDGE, HEADERS, Guard

log = logging.getLogger("dubito")
SAFE = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
SAFE_AT_EDGE = [(name.encode(), value.encode()) for name, value in EDGE.items()]
CLOSE = (b"connection", b"close")
PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,100}")


class Server:
    """The ASGI application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.metrics.registry.register(Sizes(self._sizes))
        self.guard = Guard(settings)
        self.repository: Repository | None = None
        self.predictor: Predictor | None = None
        self.asked = torch.float32  # type of activations, before the device was tried
        self.started = self.draining = False
        self.under_way = 0  # predictions
        self.routes = routes(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # web sockets: there are none
            return
        path, headers = scope["path"], dict(scope["headers"])
        given = headers.get(b"x-request-id")
        id_ = given if given and PLAIN_ID.fullmatch(given) else b"%016x" % random.getrandbits(64)
        asked = Asked(scope, receive, headers, time.monotonic())
        out = Out(send, lambda: self._also(id_, path, asked))
        try:
            self.guard.admit(path, headers, (scope.get("client") or ("",))[0])
            if (hot := V2.fullmatch(path) or V1.fullmatch(path)) is None:
                await self.routes(scope, receive, out)
            else:
                content, pairs = await self._predict(asked, hot)
                await out.reply(200, content, pairs)
        except ClientGone:
            out.status = 499
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500 and not isinstance(error, Problem):
                log.exception("request failed", extra={"request": id_.decode()})
            if problem.reason:
                self.metrics.rejected.labels(problem.reason).inc()
            if not out.status:
                told, kind = body_of(problem, v2=path.startswith("/v2"))
                raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in problem.headers.items()]
                await out.reply(problem.status, told, [(b"content-type", kind.encode()), *raw])
        self._finish(asked, id_, out.status)

    def _also(self, id_: bytes, path: str, asked: Asked) -> Pairs:
        """Headers of every reply."""
        page = SAFE_AT_EDGE if path == "/edge" else SAFE
        safe = page if asked.served is None else SAFE[:1]  # a prediction is no page
        return [(b"x-request-id", id_), *safe, *([CLOSE] if self.draining else ())]

    async def _predict(self, asked: Asked, path: re.Match[str]) -> tuple[bytes, Pairs]:
        if asked.scope["method"] != "POST":
            raise Problem(405, "this path takes POST.", {"Allow": "POST"})
        if self.predictor is None:
            raise Problem(503, "the server is starting; /readyz says when it is ready.", {"Retry-After": "1"})
        if self.under_way >= self.settings.max_requests:
            raise Problem(429, f"{self.under_way} predictions are under way.", {"Retry-After": "1"}, "queue_full")
        self.under_way += 1
        try:
            return await (self.predictor.v2 if path.re is V2 else self.predictor.v1)(asked, *path.groups())
        finally:
            self.under_way -= 1

    def _finish(self, asked: Asked, id_: bytes, status: int) -> None:
        seconds = time.monotonic() - asked.began
        if asked.served is not None:
            outcome = "ok" if status < 400 else "gone" if status == 499 else "refused" if status < 500 else "failed"
            asked.served.series.request[outcome].observe(seconds)
        if log.isEnabledFor(logging.INFO):
            method, path = asked.scope["method"], asked.scope["path"][:200]
            told = {"message": "request", "request": id_.decode(), "method": method, "path": path}
            told |= {"status": status, "ms": round(1000 * seconds, 3)}
            if asked.served is not None:
                told |= {"model": asked.served.name, "version": asked.served.version, "rows": asked.rows}
            write_line(told)

    async def start(self) -> None:
        """Every model loaded and warmed; raises what is wrong with the first that cannot be."""
        device = device_of(self.settings.device)
        self.asked, why = dtype_of(self.settings.dtype, device)
        dtype, fault = await asyncio.to_thread(trusted, self.asked, device)
        self.repository = Repository(self.settings, device, dtype, self.metrics)
        told = {"device": str(device), "asked": name_of(self.asked), "dtype": name_of(dtype), "why": fault or why}
        log.log(logging.WARNING if fault else logging.INFO, "models run", extra=told)
        self.predictor = Predictor(self.settings, self.repository)
        await self.repository.load_all()
        self.started = True

    async def stop(self) -> None:
        """Answer what was accepted."""
        self.draining = True
        if self.repository is not None:
            await asyncio.wait_for(self.repository.close(), self.settings.drain_seconds)

    @property
    def ready(self) -> bool:
        found = self.repository
        return found is not None and self.started and found.ready and found.alive and not self.draining

    @property
    def missing(self) -> list[str]:
        """Expected models that do not answer yet."""
        return [] if self.repository is None else sorted(self.repository.expected - set(self.repository.served))

    @property
    def live(self) -> bool:
        return self.repository is None or self.repository.alive

    def _sizes(self) -> dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, ...], float]]:
        found = self.repository
        served = {} if found is None else dict(found.served)
        kinds = ("artifact", "resident", "deterministic")
        bytes_: dict[tuple[str, ...], float] = {
            (name, kind): one.bytes[kind] for name, one in served.items() for kind in kinds
        }
        bytes_ |= {(name, "bank"): one.engine.bank.bytes for name, one in served.items() if one.engine.bank is not None}
        memory = device_bytes(torch.device("cpu") if found is None else found.device)
        if found is not None:
            memory |= {kind: found.budget.held(kind) for kind in KINDS}
            memory |= {} if found.budget.limit is None else {"limit": found.budget.limit}
        return {
            ("dubito_queue_depth", "Requests that wait.", ("model",)): {
                (name,): one.batcher.depth for name, one in served.items()
            },
            (
                "dubito_model_bytes",
                "Bytes of a model: its file, in memory, as the plain network, and of draws made ahead.",
                ("model", "kind"),
            ): bytes_,
            (
                "dubito_device_proven",
                "1 where the device computes right in the type of numbers asked for; 0 where another is taken.",
                ("model", "device", "asked", "dtype"),
            ): {
                (name, str(one.model.device), name_of(self.asked), name_of(one.model.factors.dtype)): float(
                    one.model.factors.dtype == self.asked
                )
                for name, one in served.items()
            },
            ("dubito_ways_excluded", "Ways of computing a layer that gave wrong answers: not taken.", ("model",)): {
                (name,): len(one.engine.plans.wrong) for name, one in served.items()
            },
            ("dubito_factor_cache_bytes", "Bytes of a model's factors.", ("model",)): {
                (name,): one.bytes["factors"] for name, one in served.items()
            },
            (
                "dubito_device_memory_bytes",
                "Memory of the device that models run on: in all, of this process, and of its models by kind.",
                ("kind",),
            ): {(kind,): value for kind, value in memory.items()},
        }


def application(server: Server) -> Any:
    """The server, behind what lets other pages ask it, where settings say so."""
    origins = server.settings.cors_origins
    if not origins:
        return server
    allowed = ["Content-Type", "X-API-Key", "Authorization", "X-Request-ID", "Inference-Header-Content-Length"]
    return CORSMiddleware(server, origins, allow_methods=["GET", "POST"], allow_headers=allowed, max_age=600)
