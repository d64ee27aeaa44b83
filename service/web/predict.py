"""The prediction paths `/v1/models/{name}/predict` and `/v2/models/{name}/infer`, without a framework for speed."""

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.predictions.answers import CERTAINTIES, Columns, check_group, rows_of
from dubito.models.predictions.model import Model
from dubito.service.engine.engine import PredictRequest, PredictResult
from dubito.service.memory import give_back
from dubito.service.problems import Hopeless, Late, Problem, TooManyRequests
from dubito.service.repository import Repository, ServedModel
from dubito.service.settings import Settings
from dubito.service.web import oip, oip_replies
from dubito.service.web.bodies import inflate, json_object
from dubito.service.web.codec import KINDS, NPY, Codec, Inputs, limits_of
from dubito.service.web.decode import (
    MOST_HEAD,
    Piece,
    RequestLimits,
    decode,
    given_inputs,
    pictures_of,
    task_of,
)
from dubito.service.web.decoders import Decoders, Take
from dubito.service.web.http import (
    CODINGS,
    WORTH_PACKING,
    ClientGone,
    DisconnectWatch,
    Headers,
    Pairs,
    Receive,
    Scope,
    pack,
    query_of,
    read_packed,
)
from dubito.service.web.oip import DRAWS, PARAMETERS
from dubito.service.web.options import PredictOptions, read_options, shown
from dubito.service.web.pictures import light, plain
from dubito.service.web.replies import AT_ONCE, listed, rows_at_once

if TYPE_CHECKING:
    from dubito.service.traces import RequestTrace

V1 = re.compile(r"/v1/models/([^/]+)/predict")
V2 = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
SHORT = 4096  # bytes of the longest v2 header that is cached
HEAVY = 1 << 16  # bytes from which JSON is parsed in another process, and arrays and replies in a thread
LARGE = 1 << 23  # bytes of a request after which memory is given back to the system
SMALL = 1 << 18  # bytes of a request that are taken whatever others hold
QUICK = 1 << 18  # bytes up to which the JSON or form of a body is decoded beside small pictures


@dataclass(slots=True)
class RequestContext:
    """A request that is being answered, and the times of its stages."""

    scope: Scope
    receive: Receive
    headers: Headers
    began: float
    client: str = ""  # name of the key's owner, else the address
    came: float = 0.0  # time at which the body had come; the request's timeout begins here
    until: float = math.inf  # deadline of the transport itself, beside the request's timeout
    served: ServedModel | None = None
    held: int = 0  # bytes of the body and the inputs
    rows: int = 0
    parsed: float = 0.0  # time at which the body was parsed
    answered: float = 0.0  # time at which the model had answered
    waited: float = 0.0  # seconds in the queue
    passes: Mapping[str, float] = field(default_factory=dict)  # seconds on the device, by stage
    more: bool = False  # others that came with it may follow some turns of the event loop later
    trace: "RequestTrace | None" = None  # where requests are traced
    also: Sequence[tuple[bytes, bytes]] = ()  # further headers of the reply

    def __post_init__(self) -> None:
        self.came = self.began

    def left(self, timeout_ms: int) -> float:
        """Seconds until the first of both deadlines."""
        return min(self.came + timeout_ms / 1000, self.until) - time.monotonic()

    def late(self, timeout_ms: int) -> Late:
        """What to say once it has passed: name the timeout of the request, or the deadline of the call."""
        if self.until < self.came + timeout_ms / 1000:
            return Late(0.0, "no answer within the deadline of the call; ask for fewer samples or give it more time.")
        return Late(timeout_ms / 1000)

    def stages(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        encode = time.monotonic() - self.answered
        return {"parse": self.parsed - self.began, "queue": self.waited, **self.passes, "encode": encode}

    def milliseconds(self) -> dict[str, float]:
        stages = {stage: round(1000 * seconds, 3) for stage, seconds in self.stages().items()}
        return {**stages, "total": round(1000 * (time.monotonic() - self.began), 3)}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """The parsed JSON header of a v2 request."""

    header: oip.Header
    options: PredictOptions
    keep: bool  # return each draw's outputs too


@dataclass(frozen=True)
class Decode:
    """What is decoded outside of the event loop, most of it by another process."""

    kind: str
    body: bytes
    sizes: tuple[int, ...] = ()  # of the files in the body
    light: bool = False
    here: bool = False  # so little that a thread of the server decodes it: that is sooner done than sent
    content_type: str = ""
    coding: str = ""  # of a compressed body

    @classmethod
    def pictures(cls, files: Sequence[bytes]) -> "Decode":
        return cls("pictures", b"".join(files), tuple(map(len, files)), light(files), plain(files))

    def read(self, codec: Codec) -> None:
        """Decode in this process."""
        for piece in decode(self.kind, self.sizes, self.body, codec.limits, self.content_type):
            if isinstance(piece, Piece):
                codec.take(piece.array, piece.picture)


class Predictor:
    """Answers predictions: `v1` and `v2` return the body and headers of the reply."""

    def __init__(self, settings: Settings, repository: Repository, decoders: Decoders) -> None:
        self.settings, self.repository, self.decoders = settings, repository, decoders
        self.usual = read_options({}, settings)  # for requests without options
        self.cached = lru_cache(maxsize=256)(self._parse)  # clients repeat the same header
        self.held = 0  # bytes of the bodies and inputs of all requests under way
        self.held_by: dict[str, int] = {}  # by client
        self.giving_back = False  # what large requests took goes back to the system soon

    async def v1(self, context: RequestContext, name: str) -> tuple[bytes, Pairs]:
        limits = self.check_room(context, name)
        content_type = context.headers.get(b"content-type", oip.JSON.encode()).decode("latin-1")
        kind = content_type.partition(";")[0].strip().lower()
        if kind not in (oip.JSON, "multipart/form-data", *NPY) and not kind.startswith("image/"):
            curl = " (curl sends JSON with --json)" if kind == "application/x-www-form-urlencoded" else ""
            raise Problem(415, f"Content-Type is {kind[:60]!r}; expected {KINDS}{curl}.")
        if kind.startswith("image/") and not limits.pictures:
            raise Problem(415, f"this model takes tensors of shape {limits.declared()}, not pictures.")
        body, coding = await self._body(context, limits)
        if coding and kind in NPY:
            body, coding = await self._raw(context, limits, body, coding), ""
        coded, read, fields = self._v1_inputs(body, coding, kind, content_type, limits)
        given = {**query_of(context.scope), **fields}
        long = coded is not None and coded.kind == "v1"  # its options are known once it is decoded, and go before these
        options = self._to_decode(given) if long else self._options(given)
        quick = len(body) <= HEAVY and not (kind in NPY and limits.pictures)  # of small pictures that may be thousands
        served, x, rest = await self._inputs(context, name, options.version, options, coded, read, quick)
        if long:
            options = self._options(given | json_object(rest))
            if options.version is not None:
                self.repository.get(name, options.version)
        result = await self._answer(context, served, x, options, "samples" in options.returns)
        reply = {
            "model": served.name,
            "version": served.version,
            "samples": result.samples,
            "seed": result.seed,
            "method": result.predictive,
            "predictions": await self._rows(result, served, options),
            "timing_ms": context.milliseconds(),
        }
        return await self._packed(context, served, result, orjson.dumps(reply), [oip_replies.AS_JSON])

    def _to_decode(self, query: dict[str, Any]) -> PredictOptions:
        """Options for decoding a long body, which may change those of the query: the longer of both times."""
        try:
            asked = self._options({key: query[key] for key in ("timeout_ms",) if key in query})
        except Problem:
            return self.usual
        return max(asked, self.usual, key=lambda one: one.timeout_ms)

    def _options(self, given: dict[str, Any]) -> PredictOptions:
        return read_options(given, self.settings) if given else self.usual

    async def _rows(
        self, result: PredictResult, served: ServedModel, options: PredictOptions
    ) -> list[dict[str, Any]] | orjson.Fragment:
        """The predictions of a v1 reply."""
        columns, rows, draws = result.columns, len(result.rules), None
        if result.outputs is not None:
            draws = await asyncio.to_thread(_draws, result, served) if heavy(result.outputs) else _draws(result, served)

        of_a_row = 0 if draws is None else draws[0].numel()
        wide = of_a_row > AT_ONCE  # one row's draws are a list in parts

        def part(start: int, stop: int) -> list[dict[str, Any]]:
            few = {name: column[start:stop] for name, column in columns.items()}
            drawn = few["samples"].tolist() if result.settled else None
            made = rows_of(few, result.rules[start:stop], served.model.card, drawn)
            if draws is not None and not wide:
                made = [row | {"samples": own} for row, own in zip(made, draws[start:stop].tolist(), strict=True)]
            if "probabilities" not in options.returns:
                made = [{key: value for key, value in row.items() if key != "probabilities"} for row in made]
            return made

        if draws is not None and wide:
            few = rows_at_once(draws.shape[-1])
            each = [await listed(orjson.dumps(draw.tolist()) for draw in row.split(few)) for row in draws]
            return await listed(orjson.dumps([part(i, i + 1)[0] | {"samples": own}]) for i, own in enumerate(each))
        step = rows_at_once(of_a_row + sum(column.size for column in columns.values()) // rows)
        if rows <= step:
            return part(0, rows)
        return await listed(orjson.dumps(part(i, i + step)) for i in range(0, rows, step))

    def _v1_inputs(
        self, body: bytes, coding: str, kind: str, content_type: str, limits: RequestLimits
    ) -> tuple["Decode | None", Callable[[Codec], Inputs] | None, dict[str, Any]]:
        """How the inputs are read: by another process or by a function; and the options of a short JSON body."""
        match kind:
            case oip.JSON if coding or len(body) > HEAVY:
                return Decode("v1", body, light=not coding and len(body) <= QUICK, coding=coding), None, {}
            case oip.JSON:
                fields = json_object(body, "; expected one with `inputs` or `images`")
                inputs, images = given_inputs(fields)
                if images is not None:
                    return Decode.pictures(pictures_of(images, limits)), None, fields
                return None, lambda codec: codec.from_lists(inputs), fields
            case "multipart/form-data":
                light = not coding and len(body) <= QUICK
                return Decode("form", body, light=light, content_type=content_type, coding=coding), None, {}
            case _ if kind in NPY:
                return None, lambda codec: codec.from_npy(body), {}
        return (Decode("pictures", body, coding=coding) if coding else Decode.pictures([body])), None, {}

    async def v2(self, context: RequestContext, name: str, version: str | None) -> tuple[bytes, Pairs]:
        limits = self.check_room(context, name)
        body, coding = await self._body(context, limits)
        stated = context.headers.get(oip.SPLIT)
        if coding and stated is not None:
            body, coding = await self._raw(context, limits, body, coding), ""
        head = len(body)
        coded: Decode | None = None
        parsed: InferRequest | None = None
        values: oip.Values = []
        if stated == b"0":
            shape = self.repository.get(name, version).declared.shape
            parsed, head = InferRequest(oip.raw_header(len(body), shape), self.usual, keep=False), 0
        elif stated is not None:
            head = oip.length_of(stated, len(body))
            if head > MOST_HEAD and head < len(body):
                raise Problem(413, f"the JSON before binary data has {head:,} bytes; at most {MOST_HEAD:,} are taken.")
        if parsed is None and head <= HEAVY and not coding:
            parsed = self.cached(body[:head]) if head <= SHORT else self._parse(body[:head])
        if parsed is None:
            coded = Decode("v2", body, light=not coding and len(body) <= QUICK, coding=coding)
        else:
            if (spec := parsed.header.input).kind == "BYTES":
                limits.check_rows(math.prod(spec.shape))
                self._check_work(parsed.options, math.prod(spec.shape))
            values = oip.values_of(spec, body, head)
            if isinstance(values, list):
                coded = Decode.pictures(values)

        def read(codec: Codec) -> Inputs:
            assert isinstance(values, np.ndarray)
            return codec.from_array(values)

        quick = isinstance(values, np.ndarray) and soon_read(values, len(body), limits)
        options = self.usual if parsed is None else parsed.options
        served, x, rest = await self._inputs(context, name, version, options, coded, read, quick)
        if parsed is None:
            parsed = self._parse(rest)
        result, outputs = await self._outputs(context, served, x, parsed)
        content, headers = await oip_replies.write(
            served.name, served.version, parsed.header, outputs, parameters_of(result)
        )
        return await self._packed(context, served, result, content, headers)

    async def infer(
        self,
        context: RequestContext,
        name: str,
        version: str | None,
        parsed: InferRequest,
        values: oip.Values,
        quick: bool,
    ) -> tuple[ServedModel, PredictResult, Columns]:
        """For another transport: the model that answers the values of its one input, its result, and the outputs."""
        if quick and isinstance(values, np.ndarray):
            context.served = served = self.repository.get(name, version)
            check = partial(self._check_work, parsed.options)
            x = Codec(served.declared, self._limits(served), check).from_array(values)
            context.rows = len(x)
        else:
            if isinstance(values, list):
                self._check_work(parsed.options, len(values))
            coded = Decode.pictures(values) if isinstance(values, list) else None

            def read(codec: Codec) -> Inputs:
                assert isinstance(values, np.ndarray)
                return codec.from_array(values)

            served, x, _ = await self._inputs(context, name, version, parsed.options, coded, read, quick)
        return served, *await self._outputs(context, served, x, parsed)

    async def _outputs(
        self, context: RequestContext, served: ServedModel, x: Inputs, parsed: InferRequest
    ) -> tuple[PredictResult, Columns]:
        """The result, and the named outputs that the request asks for."""
        if served.outputs is None:
            served.outputs = declared_outputs(served.model)
        declared, wanted = served.outputs, parsed.header.outputs or ()
        for output in wanted:
            if output not in declared:
                raise Problem(400, f"this model has no output {output[:40]!r}; it has {', '.join(declared)}.")
        result = await self._answer(context, served, x, parsed.options, parsed.keep)
        large = result.outputs is not None and heavy(result.outputs)
        columns = await asyncio.to_thread(columns_of, result, served) if large else columns_of(result, served)
        outputs = {output: columns[output] for output in declared if output in columns}
        for output in wanted:
            if output not in outputs:
                why = f"{result.samples} samples by {result.predictive}"
                raise Problem(400, f"the output {output!r} was not calibrated for {why}; it has {', '.join(outputs)}.")
        return result, outputs

    def _parse(self, head: bytes) -> InferRequest:
        return self.checked(json_object(head, "; expected one with `inputs`"))

    def checked(self, request: dict[str, Any]) -> InferRequest:
        """The header of a v2 request and its options."""
        header = oip.header_of(request)
        given = {key: value for key, value in header.parameters.items() if key in PARAMETERS}
        if header.parameters.get("timeout", 0) not in (0, "0"):  # microseconds, as the protocol defines it; 0: none
            given["timeout_ms"] = _milliseconds(header.parameters["timeout"])
        options = self._options(given)
        keep = header.outputs is not None and DRAWS in header.outputs
        if keep and options.predictive == "probit":
            raise Problem(400, f"the output {DRAWS!r} is asked for, but method is 'probit', which takes no draws.")
        if keep and options.samples == "auto":
            raise Problem(400, f'the output {DRAWS!r} is asked for, but samples is "auto": give a number.')
        return InferRequest(header, options, keep)

    def check_room(self, context: RequestContext, name: str) -> RequestLimits:
        """Refuse the request before its body is read, if the model is unknown or its queue is full; else its limits."""
        context.served = served = self.repository.get(name)
        served.batcher.check_room(1, self.settings.max_deadline_ms / 1000, context.client)
        return self._limits(served)

    def _limits(self, served: ServedModel) -> RequestLimits:
        if served.limits is None:
            one = self.settings
            served.limits = limits_of(served.declared, one.max_rows, one.input_bytes, one.image_pixels, one.image_scans)
        limits: RequestLimits = served.limits
        return limits

    async def _body(self, context: RequestContext, limits: RequestLimits) -> tuple[bytes, str]:
        """The body and, where it is compressed and long, how: another process unpacks it then."""
        most, seconds = limits.body_bytes(self.settings.body_bytes), self.settings.body_seconds
        hold = partial(self.hold, context)
        body, coding = await read_packed(context.headers, context.receive, most, seconds, hold)
        context.came = time.monotonic()
        if context.trace is not None:
            context.trace.body_came()
        if coding and (len(body) <= HEAVY or coding not in CODINGS):
            try:
                return inflate(body, coding, min(HEAVY, most)), ""
            except Problem as problem:
                if problem.status != 413 or most <= HEAVY:
                    raise
        return body, coding

    async def _raw(self, context: RequestContext, limits: RequestLimits, body: bytes, coding: str) -> bytes:
        """A long compressed body, unpacked."""
        coded = Decode("raw", body, coding=coding)
        unpacked = await self._decode(context, limits, coded, self.usual.timeout_ms, lambda array, picture: None)
        self.hold(context, len(unpacked))
        return unpacked

    async def _decode(
        self, context: RequestContext, limits: RequestLimits, coded: "Decode", timeout_ms: int, take: Take
    ) -> bytes:
        """What another process says of a body, within the request's time."""
        left = context.left(timeout_ms)
        most = limits.body_bytes(self.settings.body_bytes)
        task = task_of(coded.kind, coded.sizes, limits, coded.content_type, coded.coding, most)
        watch = DisconnectWatch(context.receive)
        where: dict[str, Any] = {"light": coded.light, "client": context.client, "watch": watch}
        try:
            return await self.decoders.run(task, coded.body, take, seconds=max(0.0, left), **where)
        except Late:
            raise context.late(timeout_ms) from None

    def hold(self, context: RequestContext, more: int) -> None:
        """Count bytes that the request keeps until it is answered. Small requests are never refused for them: their
        number is limited. A client that has less than its share finds room where others have filled it."""
        total, most = self.held + more, self.settings.held_bytes
        if total > most and context.held + more > SMALL:
            mine = self.held_by.get(context.client, 0)
            clients = len(self.held_by) + (context.client not in self.held_by)
            if self.held > context.held and (mine + more > most // clients or total > 2 * most):
                detail = f"the requests under way hold {self.held:,} bytes, of at most {most:,}."
                raise TooManyRequests(detail, 1.0, "bytes")
        context.held += more
        self.held += more
        self.held_by[context.client] = self.held_by.get(context.client, 0) + more

    def release(self, context: RequestContext) -> None:
        """The request has ended."""
        if context.held > LARGE and not self.giving_back:
            self.giving_back = True
            asyncio.get_running_loop().call_later(1.0, self._give_back)
        self.held -= context.held
        left = self.held_by.pop(context.client, 0) - context.held
        if left > 0:
            self.held_by[context.client] = left
        context.held = 0

    def _give_back(self) -> None:
        self.giving_back = False
        asyncio.get_running_loop().run_in_executor(None, give_back)

    async def _inputs(
        self,
        context: RequestContext,
        name: str,
        version: str | None,
        options: PredictOptions,
        body: "Decode | None",
        read: Callable[[Codec], Inputs] | None,
        quick: bool,
    ) -> tuple[ServedModel, Inputs, bytes]:
        """The model, its inputs, and what a long JSON body has beside them; read again if another version was switched
        to meanwhile.
        """
        known = body is None or body.kind == "pictures"  # else the body has options of its own
        check = partial(self._check_work, options) if known else lambda rows: None
        while True:
            served = context.served = self.repository.get(name, version)
            limits = self._limits(served)
            codec, rest = Codec(served.declared, limits, check), b""
            if body is not None and body.here:
                await asyncio.to_thread(body.read, codec)
                x = codec.taken()
            elif body is not None:
                rest = await self._decode(context, limits, body, options.timeout_ms, codec.take)
                x = codec.taken()
            elif read is not None:
                x = read(codec) if quick else await asyncio.to_thread(read, codec)
            if not served.retired:
                context.rows = x.shape[0]
                if body is not None:
                    self.hold(context, x.nbytes)
                return served, x, rest

    async def _answer(
        self, context: RequestContext, served: ServedModel, x: Inputs, options: PredictOptions, keep: bool
    ) -> PredictResult:
        """Queue the request and wait for its result.

        No await may stand between choosing the version and queueing: a retired version must not get requests.
        """
        self._check_work(options, len(x))
        if keep:
            self._check_values(x, options, served)
        context.parsed = time.monotonic()
        closed = not keep and (options.predictive or served.predictive) == "probit"
        if closed and not served.model.manifest.closed_form:
            raise Problem(400, "method is 'probit', but this model has no closed form; expected 'sampling', or none.")
        group = options.group
        if group is not None:
            check_group(served.model.card.calibration, group)
        request = PredictRequest(
            x, options.samples, options.seed, options.max_samples, options.tolerance, keep, closed, group
        )
        if (left := context.left(options.timeout_ms)) <= 0:
            raise context.late(options.timeout_ms)
        client = DisconnectWatch(context.receive)  # started only if the answer is slow: most are there before
        tickets = served.batcher.put(request, left, client.start, context.client, context.trace, context.more)
        client.leave = lambda: served.batcher.drop(tickets)
        try:
            result = await served.batcher.result(tickets)
        except Hopeless:
            raise
        except Late:
            raise context.late(options.timeout_ms) from None
        except asyncio.CancelledError:
            if client.gone:
                raise ClientGone from None
            raise
        finally:
            client.stop()
        context.answered = time.monotonic()
        context.waited = max(0.0, tickets[-1].ended - tickets[0].queued - sum(result.seconds.values()))
        context.passes = result.seconds
        return result

    async def _packed(
        self, context: RequestContext, served: ServedModel, result: PredictResult, content: bytes, headers: Pairs
    ) -> tuple[bytes, Pairs]:
        """The reply, compressed if the client accepts that; the result is counted in the metrics."""
        accepted = context.headers.get(b"accept-encoding")
        if accepted is not None and len(content) >= WORTH_PACKING:
            coding = accepted.decode("latin-1")
            heavy = len(content) > HEAVY
            content, more = await asyncio.to_thread(pack, content, coding) if heavy else pack(content, coding)
            headers += more
        served.series.add(result, context.stages())
        return content, headers

    def _check_work(self, options: PredictOptions, rows: int) -> None:
        draws = options.max_samples if options.samples == "auto" else max(1, options.samples)
        if (work := rows * draws) > (most := self.settings.request_work):
            raise Problem(
                413,
                f"{rows:,} inputs with up to {draws:,} draws each are {work:,} rows × draws; at most {most:,} are "
                "taken in one request. Send fewer inputs at a time, or ask for fewer samples.",
                reason="work",
            )

    def _check_values(self, x: Inputs, options: PredictOptions, served: ServedModel) -> None:
        labels = served.model.card.labels
        width = 1 if labels is None else len(labels)
        count = len(x) * max(1, int(options.samples)) * width
        if count > self.settings.max_values:
            raise Problem(
                413,
                f"the draws of this request are {count:,} numbers; at most {self.settings.max_values:,} are listed.",
            )


def soon_read(values: NDArray[Any], size: int, limits: RequestLimits) -> bool:
    """Whether an array of a body of `size` bytes is read in a moment: float32 is used uncopied, and pictures are fitted
    to the model's inputs, which may be far larger."""
    if values.dtype == np.uint8 and limits.pictures and values.ndim:
        return size <= HEAVY and len(values) * math.prod(limits.shape) <= HEAVY
    return size <= HEAVY or values.dtype == np.float32


def heavy(outputs: Tensor) -> bool:
    """Whether draws are so many that their probabilities take a while."""
    return outputs.numel() * 4 > HEAVY


def _milliseconds(microseconds: object) -> int:
    text = str(microseconds)
    if isinstance(microseconds, bool) or not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Problem(400, f"timeout is {shown(microseconds)}; expected a whole number of microseconds.")
    return max(1, int(text) // 1000)


def _draws(result: PredictResult, served: ServedModel) -> Tensor:
    """Each draw's outputs, (B, K, ...): probabilities, or means in the targets' own units."""
    assert result.outputs is not None
    outputs, task = result.outputs.float().transpose(0, 1), served.model.manifest.task
    if task.kind == "classification":
        return outputs.softmax(-1)
    return outputs[..., : task.outputs] * torch.tensor(task.scale) + torch.tensor(task.shift)


def columns_of(result: PredictResult, served: ServedModel) -> Columns:
    """The named outputs, in the datatypes that the metadata declares."""
    columns = result.columns
    if result.outputs is not None:
        columns = {**columns, DRAWS: _draws(result, served).numpy()}
    if "interval" in columns:
        columns = {**columns, "interval": columns["interval"].astype(np.float32)}
    return columns


def parameters_of(result: PredictResult) -> dict[str, int | str]:
    """Parameters of a v2 reply."""
    return {"samples": result.samples, "seed": str(result.seed), "method": result.predictive}


def declared_outputs(model: Model) -> Mapping[str, tuple[str, list[int]]]:
    """The named outputs of a model: datatype and shape, −1 where it varies."""
    card, task = model.card, model.manifest.task
    classes = -1 if card.labels is None else len(card.labels)
    width = classes if task.kind == "classification" else task.outputs
    return _declared(task.kind, width, card.calibration is not None)


@cache  # called for every request, with few distinct arguments
def _declared(kind: str, width: int, calibrated: bool) -> Mapping[str, tuple[str, list[int]]]:
    if kind == "classification":
        outputs = {"probabilities": ("FP32", [-1, width]), "class": ("INT64", [-1])}
        outputs |= {name: ("FP32", [-1]) for name in CERTAINTIES}
        if calibrated:
            outputs["prediction_set"] = ("BOOL", [-1, width])
    else:
        outputs = {name: ("FP32", [-1, width]) for name in ("mean", "epistemic_variance", "aleatoric_variance")}
        if calibrated:
            outputs["interval"] = ("FP32", [-1, width, 2])
    if calibrated:
        outputs |= {"ood": ("BOOL", [-1]), "ood_score": ("FP32", [-1]), "ood_threshold": ("FP32", [-1])}
    return {**outputs, "samples": ("INT64", [-1]), DRAWS: ("FP32", [-1, -1, width])}
