"""The gRPC server: it asks the same predictor as HTTP, on the same event loop, with the same keys, limits and logs.

Every method but the two streams reads its one message itself (`stream_unary` in grpc's words, which is the same on the
wire), so that a key is checked before the message is read, and a message that does not come holds nothing for long.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from dubito import __version__
from dubito.models.errors import DubitoError
from dubito.service.grpc.messages import (
    CutMessage,
    Layout,
    layout_of,
    most_bytes,
    parameters_in,
    reply_of,
    request_of,
    split,
    tensor_of,
)
from dubito.service.grpc.protocol import POOL, SERVICE, message_class
from dubito.service.problems import Problem, TooManyRequests
from dubito.service.settings import Settings
from dubito.service.web.app import PLAIN_ID, Server
from dubito.service.web.decode import MOST_HEAD
from dubito.service.web.http import Headers, Message
from dubito.service.web.oip import Values, check_control
from dubito.service.web.predict import (
    HEAVY,
    SHORT,
    InferRequest,
    Predictor,
    RequestContext,
    parameters_of,
    soon_read,
)
from dubito.service.web.routes import EXTENSIONS, check_changeable, metadata_of, repository_of

log = logging.getLogger("dubito")
Call = Any  # grpc.aio.ServicerContext, which ships no types
Head = tuple[str, str | None, InferRequest]  # of a message: name and version of the model, and what is asked of it
MOST_LAYOUTS = 256
HEALTH, REFLECTION_V1 = "grpc.health.v1.Health", REFLECTION.replace("v1alpha", "v1")
NAMES = (SERVICE, HEALTH, REFLECTION)
INFER = f"/{SERVICE}/ModelInfer"
METADATA = frozenset({"authorization", "x-api-key", "x-request-id", "traceparent", "tracestate"})
INTERVAL = 0.05  # seconds between checks of messages that have not come yet
WATCH = 0.25  # seconds between checks of what a health stream tells
MOST_STREAMS, STREAMS_OF_ONE = 64, 16  # of health and reflection: in all, and of one address
MOST_SLOW, SLOW_OF_ONE = 32, 8  # messages that take longer than INTERVAL to come: in all, and of one address
SMALL = 1024  # bytes of replies that are not counted while they wait for clients: the number of calls is limited
STREAMS = 256  # calls of one connection at once
PLAIN_ONLY, ALL_CODINGS = 0b1, 0b111  # none; none, deflate and gzip
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(eq=False, slots=True)
class Awaited:
    """A call whose message has not come yet."""

    task: "asyncio.Task[Any]"
    address: str  # "" for a trusted proxy, behind which many clients are
    began: float
    slow: bool = False
    refusal: Problem | None = None  # why it was ended


class GrpcServer:
    """Listens, answers and drains; made on the event loop."""

    def __init__(self, server: Server) -> None:
        self.server, self.state, self.settings = server, server.state, server.state.settings
        self.cached = lru_cache(maxsize=256)(self._parse)  # clients repeat the same head
        self.layouts: dict[int, tuple[Layout, Head]] = {}  # of messages, by their length
        self.reading: dict[Awaited, None] = {}  # the oldest first
        self.slow: Counter[str] = Counter()  # those of them that count as slow, by address
        self.unsent: Counter[str] = Counter()  # bytes of replies that clients have not taken, by address
        self.streams: Counter[str] = Counter()  # of health and reflection, by address
        self.look: asyncio.TimerHandle | None = None  # next check of `reading`
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self.reflection = ReflectionServicer(NAMES, POOL)
        self.aio = grpc.aio.server(options=_options(self.settings), maximum_concurrent_rpcs=_most_calls(self.settings))
        self.aio.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, self._methods()),
                grpc.method_handlers_generic_handler(HEALTH, self._health_methods()),
                *(
                    grpc.method_handlers_generic_handler(name, self._reflection())
                    for name in (REFLECTION, REFLECTION_V1)
                ),
            )
        )

    async def start(self) -> int:
        """Listen; returns the port."""
        host, port = self.settings.host, self.settings.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            credentials = _credentials(self.settings)
            if credentials is None:
                bound: int = self.aio.add_insecure_port(address)
            else:
                bound = self.aio.add_secure_port(address, credentials)
        except RuntimeError:
            raise DubitoError(
                f"cannot listen on {host}, port {port}, for gRPC; take another --grpc-port (0 finds a free one)."
            ) from None
        await self.aio.start()
        return bound

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, and answer the accepted ones for at most `seconds`."""
        self.stopping = True
        await self.aio.stop(seconds)
        if self.look is not None:
            self.look.cancel()

    # ModelInfer

    async def infer(self, _: object, call: Call) -> bytes:
        began, headers, address = time.monotonic(), headers_of(call), address_of(call.peer())
        context = RequestContext({"method": "gRPC", "path": INFER}, _never, headers, began)
        if (left := call.time_remaining()) is not None:
            context.until = began + left
        id_, counted = id_of(headers), self.state.limits.address_of(address)
        try:
            context.client = self.server.guard.admit(INFER, headers, address)
            if self.state.tracer is not None:
                self.server.trace(context, INFER[1:])
                call.set_trailing_metadata(tuple((key.decode(), value.decode()) for key, value in context.also))
            if counted and self.unsent[counted] > self.settings.body_bytes:
                raise TooManyRequests(f"{self.unsent[counted]:,} bytes of replies are not taken yet.")
            reply = await self._predict(call, context, counted)
        except asyncio.CancelledError:  # the client has cancelled, its deadline is over, or the server ends
            self.state.limits.cancelled += self.stopping
            self.server.finish(context, id_, 499)
            raise
        except Exception as error:
            problem = self.server.refuse(error, id_).with_traceback(None)  # its frames refer to the message
        else:
            self.server.finish(context, id_, 200)
            if len(reply) > SMALL:
                self._count_unsent(counted, len(reply))
            return reply
        self.server.finish(context, id_, problem.status)
        return await _abort(call, problem, id_, context.also)

    async def _predict(self, call: Call, context: RequestContext, counted: str) -> bytes:
        predictor = self.server.predictor()
        message = await self._read(call, counted, context.began)
        context.came = time.monotonic()
        context.more = True  # a call and its message come in several turns of the loop, as do those beside it
        if context.trace is not None:
            context.trace.body_came()
        self.server.enter()
        try:
            predictor.hold(context, len(message))
            return await self._answer(predictor, context, message)
        finally:
            self.server.under_way -= 1
            predictor.release(context)

    async def _answer(self, predictor: Predictor, context: RequestContext, message: bytes) -> bytes:
        known = self.layouts.get(len(message))
        if known is not None and message.startswith(known[0].prefix):
            parts, head = None, known[1]
        else:
            parts = split(message)
            head = (self.cached if len(parts.head) <= SHORT else self._parse)(parts.head)
        name, version, parsed = head
        limits, spec = predictor.check_room(context, name), parsed.header.input
        if len(message) > (most := most_bytes(limits, self.settings.body_bytes)):
            detail = f"the message has {len(message):,} bytes; for this model at most {most:,} are taken."
            raise Problem(413, detail, reason="body")
        if spec.kind == "BYTES":
            limits.check_rows(prod(spec.shape))
        sized = limits.pictures and spec.kind in ("UINT8", "BYTES")  # pictures have any size
        elements = self.settings.body_bytes if sized else limits.numbers
        light = len(message) <= HEAVY
        values: Values
        if parts is None and known is not None:
            values, id_ = known[0].values(message, elements), known[0].id
        elif parts is not None:
            if light or (parts.raw and spec.kind != "BYTES"):  # raw numbers are used where they lie
                values = tensor_of(parts, spec, elements)
            else:
                values = await asyncio.to_thread(tensor_of, parts, spec, elements)
            self._remember(parts, head)
            id_ = parts.id
        quick = not isinstance(values, list) and soon_read(values, len(message), limits)
        served, result, outputs = await predictor.infer(context, name, version, parsed, values, quick)
        reply = reply_of(served.name, served.version, id_, parsed.header, outputs, parameters_of(result))
        served.series.add(result, context.stages())
        return reply

    def _remember(self, parts: CutMessage, head: Head) -> None:
        """Keep the layout of a message, by its length: clients repeat the same one."""
        layout = layout_of(parts, head[2].header.input)
        if layout is not None and len(layout.prefix) <= SHORT:
            if len(self.layouts) >= MOST_LAYOUTS:
                self.layouts.clear()
            self.layouts[len(parts.message)] = layout, head

    def _parse(self, head: bytes) -> Head:
        name, version, fields = request_of(head)
        return name, version, self.server.predictor().checked(fields)

    def _count_unsent(self, counted: str, size: int) -> None:
        """Count a reply against its client until it is taken, which is when grpc's task for the call ends."""
        self.unsent[counted] += size

        def taken(_: object) -> None:
            self.unsent[counted] -= size
            if not self.unsent[counted]:
                del self.unsent[counted]

        _task().add_done_callback(taken)

    # messages that have not come yet

    async def _read(self, call: Call, address: str, began: float) -> bytes:
        """The call's message."""
        one = Awaited(_task(), address, began)
        self.reading[one] = None
        if self.look is None:
            self.look = self.loop.call_later(INTERVAL, self._look)
        try:
            message = await call.read()
        except asyncio.CancelledError:
            if one.refusal is not None:
                raise one.refusal from None
            raise
        finally:
            del self.reading[one]
            if one.slow:
                self.slow[address] -= 1
                if not self.slow[address]:
                    del self.slow[address]
        if message is grpc.aio.EOF:
            raise Problem(400, "the call ended without a message; expected one.")
        whole: bytes = message
        return whole

    def _look(self) -> None:
        """End calls whose message does not come in time, and those of an address that has too many slow ones."""
        now = time.monotonic()
        for one in list(self.reading):
            if now - one.began < INTERVAL:
                break
            if now - one.began > self.settings.body_seconds:
                detail = f"the message did not come within {self.settings.body_seconds:g} s."
                self._end(one, Problem(408, detail, reason="body"))
            elif not one.slow:
                one.slow = True
                self.slow[one.address] += 1
                if self.slow.total() > MOST_SLOW or (one.address and self.slow[one.address] > SLOW_OF_ONE):
                    self._end(one, TooManyRequests(f"{self.slow.total()} messages are on their way.", reason="body"))
        self.look = self.loop.call_later(INTERVAL, self._look) if self.reading else None

    def _end(self, one: Awaited, why: Problem) -> None:
        if one.refusal is None:
            one.refusal = why
            one.task.cancel()

    # all the other methods

    def _methods(self) -> dict[str, Any]:
        methods = {
            "ServerLive": (self._live, True),
            "ServerReady": (self._ready, True),
            "ModelReady": (self._model_ready, False),
            "ServerMetadata": (self._metadata, False),
            "ModelMetadata": (self._model_metadata, False),
            "RepositoryIndex": (self._index, False),
            "RepositoryModelLoad": (self._load, False),
            "RepositoryModelUnload": (self._unload, False),
        }
        handlers = {
            name: self._unary(f"/{SERVICE}/{name}", message_class(f"{name}Request"), answer, open_)
            for name, (answer, open_) in methods.items()
        }
        return handlers | {"ModelInfer": grpc.stream_unary_rpc_method_handler(self.infer)}

    def _unary(self, path: str, request: Any, answer: Callable[[Any], Awaitable[Any]], open_: bool) -> Any:
        """A handler for a method with one short message; one that is `open_` needs no key."""

        async def handle(_: object, call: Call) -> bytes:
            began, headers, address = time.monotonic(), headers_of(call), address_of(call.peer())
            context, id_ = RequestContext({"method": "gRPC", "path": path}, _never, headers, began), id_of(headers)
            try:
                if not open_:
                    self.server.guard.admit(path, headers, address)
                message = await self._read(call, self.state.limits.address_of(address), began)
                reply: bytes = (await answer(parsed(request, message))).SerializeToString()
            except asyncio.CancelledError:
                self.server.finish(context, id_, 499)
                raise
            except Exception as error:
                problem = self.server.refuse(error, id_).with_traceback(None)
            else:
                self.server.finish(context, id_, 200)
                return reply
            self.server.finish(context, id_, problem.status)
            return await _abort(call, problem, id_)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _live(self, _: Any) -> Any:
        return message_class("ServerLiveResponse")(live=self.state.live)

    async def _ready(self, _: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self.state.ready)

    async def _model_ready(self, request: Any) -> Any:
        try:
            repository_of(self.state).get(request.name, request.version or None)
        except Problem as problem:
            if problem.status not in (404, 503):
                raise
            return message_class("ModelReadyResponse")(ready=False)
        return message_class("ModelReadyResponse")(ready=True)

    async def _metadata(self, _: Any) -> Any:
        return message_class("ServerMetadataResponse")(name="dubito", version=__version__, extensions=EXTENSIONS)

    async def _model_metadata(self, request: Any) -> Any:
        served = repository_of(self.state).get(request.name, request.version or None)
        return message_class("ModelMetadataResponse")(**metadata_of(served))

    async def _index(self, request: Any) -> Any:
        repository = repository_of(self.state)
        await repository.look()
        rows = repository.index(ready_only=request.ready)
        return message_class("RepositoryIndexResponse")(models=rows)

    async def _load(self, request: Any) -> Any:
        name = model_in(request)
        check_changeable(self.state, {})
        check_control({"parameters": parameters_in(request.parameters)}, "load", ())
        await self.state.change("load", name)
        return message_class("RepositoryModelLoadResponse")(model_name=name, isLoaded=True)

    async def _unload(self, request: Any) -> Any:
        name = model_in(request)
        check_changeable(self.state, {})
        check_control({"parameters": parameters_in(request.parameters)}, "unload", ("unload_dependents",))
        await self.state.change("unload", name)
        return message_class("RepositoryModelUnloadResponse")(model_name=name, isUnloaded=True)

    # health and reflection

    def _health_methods(self) -> dict[str, Any]:
        check = self._unary(f"/{HEALTH}/Check", HealthCheckRequest, self._check, True)
        return {"Check": check, "Watch": grpc.stream_stream_rpc_method_handler(self._watch)}

    async def _check(self, request: Any) -> Any:
        if request.service not in ("", *NAMES):
            raise Problem(404, f"there is no service {request.service[:40]!r}; there are: {', '.join(NAMES)}.")
        return HealthCheckResponse(status=self._status(request.service))

    def _status(self, service: str) -> int:
        kinds = HealthCheckResponse.ServingStatus
        if service not in ("", *NAMES):
            unknown: int = kinds.Value("SERVICE_UNKNOWN")
            return unknown
        status: int = kinds.Value("SERVING" if self.state.ready else "NOT_SERVING")
        return status

    async def _watch(self, _: object, call: Call) -> None:
        async def follow(address: str) -> None:
            message = await self._read(call, address, time.monotonic())
            service = parsed(HealthCheckRequest, message).service
            told = None
            while not self.stopping:
                if (status := self._status(service)) != told:
                    await call.write(HealthCheckResponse(status=status).SerializeToString())
                    told = status
                await asyncio.sleep(WATCH)

        await self._stream(call, follow)

    def _reflection(self) -> dict[str, Any]:
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect)}

    async def _reflect(self, _: object, call: Call) -> None:
        async def follow(address: str) -> None:
            while True:
                async with asyncio.timeout(self.settings.body_seconds):  # also the longest pause between questions
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                questions = iter([parsed(ServerReflectionRequest, message)])
                for answer in self.reflection.ServerReflectionInfo(questions, call):
                    await call.write(answer.SerializeToString())

        await self._stream(call, follow)

    async def _stream(self, call: Call, follow: Callable[[str], Awaitable[None]]) -> None:
        """Answer a stream, which needs no key, within the number of streams that may be open."""
        address, id_ = self.state.limits.address_of(address_of(call.peer())), id_of(headers_of(call))
        self.streams[address] += 1
        try:
            if self.streams.total() > MOST_STREAMS or (address and self.streams[address] > STREAMS_OF_ONE):
                raise TooManyRequests(f"{self.streams.total()} streams are open.")
            await follow(address)
            return
        except TimeoutError:
            problem = Problem(408, f"nothing came for {self.settings.body_seconds:g} s.")
        except Exception as error:
            problem = self.server.refuse(error, id_).with_traceback(None)
        finally:
            self.streams[address] -= 1
            if not self.streams[address]:
                del self.streams[address]
        await _abort(call, problem, id_)


def parsed(request: Any, message: bytes) -> Any:
    """A short message of the given class."""
    if len(message) > MOST_HEAD:
        raise Problem(413, f"the message has {len(message):,} bytes; at most {MOST_HEAD:,} are taken.", reason="body")
    try:
        return request.FromString(message)
    except Exception:  # protobuf's DecodeError; its text is about its own inside
        raise Problem(400, f"the message is no {request.DESCRIPTOR.name}.") from None


def model_in(request: Any) -> str:
    """The model to load or unload: KServe's clients send its name where Triton's send that of a repository."""
    name: str = request.model_name or request.repository_name
    return name


def headers_of(call: Call) -> Headers:
    """The metadata that we read, as HTTP has its headers."""
    return {
        key.encode(): value if isinstance(value, bytes) else value.encode()
        for key, value in call.invocation_metadata() or ()
        if key in METADATA
    }


def id_of(headers: Headers) -> bytes:
    id_ = headers.get(b"x-request-id")
    return id_ if id_ and PLAIN_ID.fullmatch(id_) else b"%016x" % random.getrandbits(64)


@lru_cache(maxsize=4096)  # all calls of a connection have the same
def address_of(peer: str) -> str:
    """`ipv4:127.0.0.1:50412` -> `127.0.0.1`, `ipv6:%5B::1%5D:50412` -> `::1`"""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


async def _abort(call: Call, problem: Problem, id_: bytes, also: Sequence[tuple[bytes, bytes]] = ()) -> NoReturn:
    code = CODES.get(problem.status, grpc.StatusCode.INTERNAL)
    more = [("x-request-id", id_.decode()), *((key.decode(), value.decode()) for key, value in also)]
    if (wait := problem.headers.get("Retry-After")) is not None:
        more += [("retry-after", wait), ("grpc-retry-pushback-ms", str(1000 * int(wait)))]
    try:
        await call.abort(code, problem.detail, tuple(more))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:  # the client has gone meanwhile; grpc would log it with a traceback
        pass
    raise asyncio.CancelledError


async def _never() -> Message:
    """Where HTTP would tell of a client that has gone, grpc cancels the task of the call."""
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")


def _task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


def _most_calls(settings: Settings) -> int:
    return settings.max_requests + MOST_SLOW + MOST_STREAMS


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(settings.workers > 1)),  # else a port that another server has is an error
        ("grpc.max_receive_message_length", settings.body_bytes),  # before and after decompression
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", ALL_CODINGS if settings.grpc_compression else PLAIN_ONLY),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_metadata_size", settings.header_bytes),
        ("grpc.absolute_max_metadata_size", settings.header_bytes),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_idle_ms", int(1000 * settings.idle_seconds)),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.header_seconds)),
        ("grpc.keepalive_time_ms", int(1000 * settings.idle_seconds)),  # ask clients whether they are still there
        ("grpc.keepalive_timeout_ms", int(1000 * settings.header_seconds)),
    ]


def _credentials(settings: Settings) -> Any:
    """For TLS; None without."""
    certificate, key = settings.grpc_certificate, settings.grpc_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise DubitoError("grpc_certificate and grpc_key belong together; one of them is not set.")
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    except OSError as error:
        raise DubitoError(f"{error.filename} cannot be read: {error.strerror}; expected a file in PEM.") from None
