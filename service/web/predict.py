"""The prediction paths `/v1/models/{name}/predict` and `/v2/models/{name}/infer`, without a framework for speed."""

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from dubito.models.predictions.answers import CERTAINTIES, Columns, check_group, rows_of
from dubito.models.predictions.model import Model
from dubito.service.engine.engine import PredictRequest, PredictResult
from dubito.service.problems import Late, Problem
from dubito.service.repository import Repository, ServedModel
from dubito.service.settings import Settings
from dubito.service.web import oip
from dubito.service.web.codec import NPY, Codec, Inputs
from dubito.service.web.http import (
    WORTH_PACKING,
    ClientGone,
    DisconnectWatch,
    Headers,
    Pairs,
    Receive,
    Scope,
    json_object,
    pack,
    query_of,
    read_body,
)
from dubito.service.web.oip import DRAWS, PARAMETERS
from dubito.service.web.options import KNOWN, PredictOptions, read_options, shown

V1 = re.compile(r"/v1/models/([^/]+)/predict")
V2 = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
SHORT = 4096  # bytes of the longest v2 header that is cached
HEAVY = 1 << 16  # bytes from which a body or reply is processed in a thread, not on the event loop


@dataclass(slots=True)
class RequestContext:
    """A request that is being answered, and the times of its stages."""

    scope: Scope
    receive: Receive
    headers: Headers
    began: float
    until: float = math.inf  # deadline of the transport itself, beside the request's timeout
    served: ServedModel | None = None
    rows: int = 0
    parsed: float = 0.0  # time at which the body was parsed
    answered: float = 0.0  # time at which the model had answered
    waited: float = 0.0  # seconds in the queue
    passes: Mapping[str, float] = field(default_factory=dict)  # seconds on the device, by stage

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


class Predictor:
    """Answers predictions: `v1` and `v2` return the body and headers of the reply."""

    def __init__(self, settings: Settings, repository: Repository) -> None:
        self.settings, self.repository = settings, repository
        self.usual = read_options({}, settings)  # for requests without options
        self.cached = lru_cache(maxsize=256)(self._parse)  # clients repeat the same header

    async def v1(self, context: RequestContext, name: str) -> tuple[bytes, Pairs]:
        self.check_room(context, name)
        body = await read_body(context.headers, context.receive, self.settings.body_bytes, self.settings.body_seconds)
        content_type = context.headers.get(b"content-type", oip.JSON.encode()).decode("latin-1")
        kind = content_type.partition(";")[0].strip().lower()
        fields = json_object(body, "; expected one with `inputs` or `images`") if kind == oip.JSON else {}
        if kind == oip.JSON and ("inputs" in fields) == ("images" in fields):
            raise Problem(400, _no_inputs(fields))
        given = {**query_of(context.scope), **{k: v for k, v in fields.items() if k not in ("inputs", "images")}}
        options = read_options(given, self.settings) if given else self.usual

        def read(codec: Codec) -> Inputs:
            if kind != oip.JSON:
                return codec.from_body(kind, body, content_type)
            return codec.from_lists(fields["inputs"]) if "inputs" in fields else codec.from_base64(fields["images"])

        light = len(body) <= HEAVY and ("inputs" in fields or kind in NPY)
        served, x = await self._inputs(context, name, options.version, read, light)
        result = await self._answer(context, served, x, options, "samples" in options.returns)
        drawn = result.columns["samples"].tolist() if result.settled else None
        rows = rows_of(result.columns, result.rules, served.model.card, drawn)
        if result.outputs is not None:
            rows = [row | {"samples": mine} for row, mine in zip(rows, _draws(result, served).tolist(), strict=True)]
        if "probabilities" not in options.returns:
            rows = [{key: value for key, value in row.items() if key != "probabilities"} for row in rows]
        reply = {
            "model": served.name,
            "version": served.version,
            "samples": result.samples,
            "seed": result.seed,
            "method": result.predictive,
            "predictions": rows,
            "timing_ms": context.milliseconds(),
        }
        return await self._packed(context, served, result, orjson.dumps(reply), [oip.AS_JSON])

    async def v2(self, context: RequestContext, name: str, version: str | None) -> tuple[bytes, Pairs]:
        self.check_room(context, name)
        body = await read_body(context.headers, context.receive, self.settings.body_bytes, self.settings.body_seconds)
        stated, head = context.headers.get(oip.SPLIT), 0
        if stated == b"0":
            shape = self.repository.get(name, version).declared.shape
            parsed = InferRequest(oip.raw_header(len(body), shape), self.usual, keep=False)
        elif stated is None:
            parsed, head = self._parse(body), len(body)
        else:
            head = oip.length_of(stated, len(body))
            parsed = self.cached(body[:head]) if head <= SHORT else self._parse(body[:head])
        header = parsed.header
        values = oip.values_of(header.input, body, head)

        light = len(body) <= HEAVY
        served, result, outputs = await self.infer(context, name, version, parsed, values, light)
        content, headers = oip.write(served.name, served.version, header, outputs, parameters_of(result))
        return await self._packed(context, served, result, content, headers)

    async def infer(
        self,
        context: RequestContext,
        name: str,
        version: str | None,
        parsed: InferRequest,
        values: oip.Values,
        light: bool,
    ) -> tuple[ServedModel, PredictResult, Columns]:
        """The model that answered, its result, and the named outputs that the request asks for."""

        def read(codec: Codec) -> Inputs:
            return codec.from_bytes(values) if isinstance(values, list) else codec.from_array(values)

        light = isinstance(values, np.ndarray) and (light or values.dtype == np.float32)  # float32 is used uncopied
        served, x = await self._inputs(context, name, version, read, light)
        declared, wanted = declared_outputs(served.model), parsed.header.outputs or ()
        for output in wanted:
            if output not in declared:
                raise Problem(400, f"this model has no output {output[:40]!r}; it has {', '.join(declared)}.")
        result = await self._answer(context, served, x, parsed.options, parsed.keep)
        columns = columns_of(result, served)
        outputs = {output: columns[output] for output in declared if output in columns}
        for output in wanted:
            if output not in outputs:
                why = f"{result.samples} samples by {result.predictive}"
                raise Problem(400, f"the output {output!r} was not calibrated for {why}; it has {', '.join(outputs)}.")
        return served, result, outputs

    def _parse(self, head: bytes) -> InferRequest:
        return self.checked(json_object(head, "; expected one with `inputs`"))

    def checked(self, request: dict[str, Any]) -> InferRequest:
        """The header of a v2 request and its options."""
        header = oip.header_of(request)
        given = {key: value for key, value in header.parameters.items() if key in PARAMETERS}
        if header.parameters.get("timeout", 0) != 0:  # microseconds, as the protocol defines it; 0: none
            given["timeout_ms"] = _milliseconds(header.parameters["timeout"])
        options = read_options(given, self.settings) if given else self.usual
        keep = header.outputs is not None and DRAWS in header.outputs
        if keep and options.predictive == "probit":
            raise Problem(400, f"the output {DRAWS!r} is asked for, but method is 'probit', which takes no draws.")
        if keep and options.samples == "auto":
            raise Problem(400, f'the output {DRAWS!r} is asked for, but samples is "auto": give a number.')
        return InferRequest(header, options, keep)

    def check_room(self, context: RequestContext, name: str) -> None:
        """Refuse the request before its body is read, if the model is unknown or its queue is full."""
        context.served = self.repository.get(name)
        context.served.batcher.check_room(1, self.settings.max_deadline_ms / 1000)

    async def _inputs(
        self, context: RequestContext, name: str, version: str | None, read: Callable[[Codec], Inputs], light: bool
    ) -> tuple[ServedModel, Inputs]:
        """The model and its inputs, read again if another version was switched to meanwhile.

        What is not `light` is read in a thread: a picture may unpack to many times its size.
        """
        while True:
            served = context.served = self.repository.get(name, version)
            codec = Codec(served.declared, self.settings.max_rows, self.settings.image_pixels)
            x = read(codec) if light else await asyncio.to_thread(read, codec)
            if not served.retired:
                context.rows = x.shape[0]
                return served, x

    async def _answer(
        self, context: RequestContext, served: ServedModel, x: Inputs, options: PredictOptions, keep: bool
    ) -> PredictResult:
        """Queue the request and wait for its result.

        No await may stand between choosing the version and queueing: a retired version must not get requests.
        """
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
        left = min(context.began + options.timeout_ms / 1000, context.until) - context.parsed
        client = DisconnectWatch(context.receive)  # started only if the answer is slow: most are there before
        tickets = served.batcher.put(request, left, client.start)
        client.leave = lambda: served.batcher.drop(tickets)
        try:
            result = await served.batcher.result(tickets)
        except Late:
            raise Late(options.timeout_ms / 1000) from None  # name the timeout of the request, reading included
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

    def _check_values(self, x: Inputs, options: PredictOptions, served: ServedModel) -> None:
        labels = served.model.card.labels
        width = 1 if labels is None else len(labels)
        count = len(x) * max(1, int(options.samples)) * width
        if count > self.settings.max_values:
            raise Problem(
                413,
                f"the draws of this request are {count:,} numbers; at most {self.settings.max_values:,} are listed.",
            )


def _no_inputs(fields: Mapping[str, object]) -> str:
    """The body has neither inputs nor images, or both: name what came instead."""
    other = next((key for key in fields if key not in KNOWN and key not in ("inputs", "images")), None)
    came = "the body has both `inputs` and `images`" if "inputs" in fields else "the body has no `inputs`"
    instead = "" if other is None or "inputs" in fields else f", but a key {other[:40]!r}"
    return f"{came}{instead}; expected `inputs` (nested lists) or `images` (base64), and not both."


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
