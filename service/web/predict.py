"""The two hot paths, without a framework: `/v1/models/{name}/predict` and `/v2/models/{name}/infer`."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import orjson
import torch
from torch import Tensor

from dubito.models.predictions.answers import Columns, check_group, rows_of
from dubito.models.predictions.model import Model
from dubito.service.engine.engine import Answered, Ask
from dubito.service.problems import Late, Problem
from dubito.service.repository import Repository, Served
from dubito.service.settings import Settings
from dubito.service.web import oip
from dubito.service.web.codec import NPY, Codec, Inputs
from dubito.service.web.http import (
    WORTH_PACKING,
    ClientGone,
    Headers,
    Leaving,
    Pairs,
    Receive,
    Scope,
    json_object,
    pack,
    query_of,
    read_body,
)
from dubito.service.web.oip import DRAWS
from dubito.service.web.options import PARAMETERS, Options, read_options, said

V1 = re.compile(r"/v1/models/([^/]+)/predict")
V2 = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
SHORT = 4096  # bytes of a v2 header that is remembered
HEAVY = 1 << 16  # bytes of a body or reply that is worked on beside the event loop


@dataclass(slots=True)
class Asked:
    """A prediction under way."""

    scope: Scope
    receive: Receive
    headers: Headers
    began: float
    served: Served | None = None
    rows: int = 0
    parsed: float = 0.0  # when it was, and so on
    answered: float = 0.0
    waited: float = 0.0  # seconds, in the queue
    passes: Mapping[str, float] = field(default_factory=dict)  # seconds of their own stages

    def stages(self) -> dict[str, float]:
        """Seconds of each so far."""
        encode = time.monotonic() - self.answered
        return {"parse": self.parsed - self.began, "queue": self.waited, **self.passes, "encode": encode}

    def milliseconds(self) -> dict[str, float]:
        found = {stage: round(1000 * seconds, 3) for stage, seconds in self.stages().items()}
        return {**found, "total": round(1000 * (time.monotonic() - self.began), 3)}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the header of a v2 request asks for."""

    header: oip.Header
    options: Options
    keep: bool  # the draws themselves are wanted


class Predictor:
    """Each path takes a request and gives the body and the headers of its reply."""

    def __init__(self, settings: Settings, repository: Repository) -> None:
        self.settings, self.repository = settings, repository
        self.usual = read_options({}, settings)  # of a request that gives none
        self.remembered = lru_cache(maxsize=256)(self._wish)  # clients say the same again and again

    async def v1(self, asked: Asked, name: str) -> tuple[bytes, Pairs]:
        self._check_room(asked, name)
        body = await read_body(asked.headers, asked.receive, self.settings.body_bytes, self.settings.body_seconds)
        content_type = asked.headers.get(b"content-type", oip.JSON.encode()).decode("latin-1")
        kind = content_type.partition(";")[0].strip().lower()
        told = json_object(body, "; expected one with `inputs` or `images`") if kind == oip.JSON else {}
        given = {**query_of(asked.scope), **{k: v for k, v in told.items() if k not in ("inputs", "images")}}
        options = read_options(given, self.settings) if given else self.usual

        def read(codec: Codec) -> Inputs:
            if kind != oip.JSON:
                return codec.from_body(kind, body, content_type)
            if ("inputs" in told) == ("images" in told):
                raise Problem(400, "expected `inputs` (nested lists) or `images` (base64), and not both.")
            return codec.from_lists(told["inputs"]) if "inputs" in told else codec.from_base64(told["images"])

        light = len(body) <= HEAVY and ("inputs" in told or kind in NPY)
        served, x = await self._inputs(asked, name, options.version, read, light)
        found = await self._ask(asked, served, x, options, "samples" in options.returns)
        drawn = found.columns["samples"].tolist() if found.settled else None
        rows = rows_of(found.columns, found.rules, served.model.card, drawn)
        if found.outputs is not None:
            rows = [row | {"samples": mine} for row, mine in zip(rows, _draws(found, served).tolist(), strict=True)]
        if "probabilities" not in options.returns:
            rows = [{key: value for key, value in row.items() if key != "probabilities"} for row in rows]
        made = {
            "model": served.name,
            "version": served.version,
            "samples": found.samples,
            "seed": found.seed,
            "method": found.method,
            "predictions": rows,
            "timing_ms": asked.milliseconds(),
        }
        return await self._packed(asked, served, found, orjson.dumps(made), [oip.AS_JSON])

    async def v2(self, asked: Asked, name: str, version: str | None) -> tuple[bytes, Pairs]:
        self._check_room(asked, name)
        body = await read_body(asked.headers, asked.receive, self.settings.body_bytes, self.settings.body_seconds)
        stated, at = asked.headers.get(oip.SPLIT), 0
        if stated == b"0":
            shape = self.repository.get(name, version).declared.shape
            wish = Wish(oip.raw_header(len(body), shape), self.usual, keep=False)
        elif stated is None:
            wish, at = self._wish(body), len(body)
        else:
            at = oip.length_of(stated, len(body))
            wish = self.remembered(body[:at]) if at <= SHORT else self._wish(body[:at])
        header = wish.header
        values = oip.values_of(header.input, body, at)

        def read(codec: Codec) -> Inputs:
            return codec.from_bytes(values) if isinstance(values, list) else codec.from_array(values)

        light = isinstance(values, np.ndarray) and (len(body) <= HEAVY or values.dtype == np.float32)  # taken as it is
        served, x = await self._inputs(asked, name, version, read, light)
        declared = declared_outputs(served.model)
        for output in header.outputs or ():
            if output not in declared:
                raise Problem(400, f"this model has no output {output[:40]!r}; it has {', '.join(declared)}.")
        found = await self._ask(asked, served, x, wish.options, wish.keep)
        told = {"samples": found.samples, "seed": str(found.seed), "method": found.method}
        columns = columns_of(found, served)
        outputs = {output: columns[output] for output in declared if output in columns}
        for output in header.outputs or ():
            if output not in outputs:
                why = f"{found.samples} samples by {found.method}"
                raise Problem(400, f"the output {output!r} was not calibrated for {why}; it has {', '.join(outputs)}.")
        content, headers = oip.write(served.name, served.version, header, outputs, told)
        return await self._packed(asked, served, found, content, headers)

    def _wish(self, head: bytes) -> Wish:
        header = oip.header_of(json_object(head, "; expected one with `inputs`"))
        given = {key: value for key, value in header.parameters.items() if key in PARAMETERS}
        if header.parameters.get("timeout", 0) != 0:  # in microseconds, as the protocol's clients send it; 0: none
            given["timeout_ms"] = _milliseconds(header.parameters["timeout"])
        options = read_options(given, self.settings) if given else self.usual
        keep = header.outputs is not None and DRAWS in header.outputs
        if keep and options.method == "probit":
            raise Problem(400, f"the output {DRAWS!r} is asked for, but method is 'probit', which takes no draws.")
        if keep and options.samples == "auto":
            raise Problem(400, f'the output {DRAWS!r} is asked for, but samples is "auto": give a number.')
        return Wish(header, options, keep)

    def _check_room(self, asked: Asked, name: str) -> None:
        """Whoever would be refused is refused before its body is read."""
        asked.served = self.repository.get(name)
        asked.served.batcher.check_room(1, self.settings.max_deadline_ms / 1000)

    async def _inputs(
        self, asked: Asked, name: str, version: str | None, read: Callable[[Codec], Inputs], light: bool
    ) -> tuple[Served, Inputs]:
        """Read for the version that answers once they are read: it may have been switched meanwhile.

        What is not light is read beside the event loop; a picture may unpack to many times its size.
        """
        while True:
            served = asked.served = self.repository.get(name, version)
            codec = Codec(served.declared, self.settings.max_rows, self.settings.image_pixels)
            x = read(codec) if light else await asyncio.to_thread(read, codec)
            if not served.retired:
                asked.rows = x.shape[0]
                return served, x

    async def _ask(self, asked: Asked, served: Served, x: Inputs, options: Options, keep: bool) -> Answered:
        """No await stands between choosing the version and its queue, so none is missed when versions are switched."""
        if keep:
            self._check_values(x, options, served)
        asked.parsed = time.monotonic()
        closed = not keep and (options.method or served.method) == "probit"
        if closed and not served.model.manifest.closed_form:
            raise Problem(400, "method is 'probit', but this model has no closed form; expected 'sampling', or none.")
        group = options.group
        if group is not None:
            check_group(served.model.card.calibration, group)
        ask = Ask(x, options.samples, options.seed, options.max_samples, options.tolerance, keep, closed, group)
        left = asked.began + options.timeout_ms / 1000 - asked.parsed
        leaving = Leaving(asked.receive)  # looked for only once the answer takes a while: most are there before
        tickets = served.batcher.put(ask, left, leaving.start)
        leaving.leave = lambda: served.batcher.drop(tickets)
        try:
            found = await served.batcher.answered(tickets)
        except Late:
            raise Late(options.timeout_ms / 1000) from None  # as it was asked for, whatever reading took of it
        except asyncio.CancelledError:
            if leaving.gone:
                raise ClientGone from None
            raise
        finally:
            leaving.stop()
        asked.answered = time.monotonic()
        asked.waited = max(0.0, tickets[-1].ended - tickets[0].queued - sum(found.seconds.values()))
        asked.passes = found.seconds
        return found

    async def _packed(
        self, asked: Asked, served: Served, found: Answered, content: bytes, headers: Pairs
    ) -> tuple[bytes, Pairs]:
        """The reply, compressed where that is wanted; then the answer counts."""
        accepted = asked.headers.get(b"accept-encoding")
        if accepted is not None and len(content) >= WORTH_PACKING:
            told = content, accepted.decode("latin-1")
            content, more = pack(*told) if len(content) <= HEAVY else await asyncio.to_thread(pack, *told)
            headers += more
        served.series.answered(found, asked.stages())
        return content, headers

    def _check_values(self, x: Inputs, options: Options, served: Served) -> None:
        labels = served.model.card.labels
        width = 1 if labels is None else len(labels)
        count = len(x) * max(1, int(options.samples)) * width
        if count > self.settings.max_values:
            raise Problem(
                413,
                f"the draws of this request are {count:,} numbers; at most {self.settings.max_values:,} are listed.",
            )


def _milliseconds(microseconds: object) -> int:
    text = str(microseconds)
    if isinstance(microseconds, bool) or not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Problem(400, f"timeout is {said(microseconds)}; expected a whole number of microseconds.")
    return max(1, int(text) // 1000)


def _draws(found: Answered, served: Served) -> Tensor:
    """(B, K, ...): each draw's probabilities, or its means in the targets' own units."""
    assert found.outputs is not None
    outputs, task = found.outputs.float().transpose(0, 1), served.model.manifest.task
    if task.kind == "classification":
        return outputs.softmax(-1)
    return outputs[..., : task.outputs] * torch.tensor(task.scale) + torch.tensor(task.shift)


def columns_of(found: Answered, served: Served) -> Columns:
    """The named outputs in the types that metadata names; a calibration's where there is one."""
    columns = found.columns
    if found.outputs is not None:
        columns = {**columns, DRAWS: _draws(found, served).numpy()}
    if "interval" in columns:
        columns = {**columns, "interval": columns["interval"].astype(np.float32)}
    return columns


def declared_outputs(model: Model) -> Mapping[str, tuple[str, list[int]]]:
    """The named outputs of a model: datatype and shape, −1 where it varies."""
    card, task = model.card, model.manifest.task
    classes = -1 if card.labels is None else len(card.labels)
    width = classes if task.kind == "classification" else task.outputs
    return _declared(task.kind, width, card.calibration is not None)


@cache  # every request asks, and there are as many answers as kinds of model
def _declared(kind: str, width: int, calibrated: bool) -> Mapping[str, tuple[str, list[int]]]:
    if kind == "classification":
        found = {"probabilities": ("FP32", [-1, width]), "class": ("INT64", [-1])}
        names = ("max_probability", "entropy", "expected_entropy", "mutual_information")
        found |= {name: ("FP32", [-1]) for name in names}
        if calibrated:
            found["prediction_set"] = ("BOOL", [-1, width])
    else:
        found = {name: ("FP32", [-1, width]) for name in ("mean", "epistemic_variance", "aleatoric_variance")}
        if calibrated:
            found["interval"] = ("FP32", [-1, width, 2])
    if calibrated:
        found |= {"ood": ("BOOL", [-1]), "ood_score": ("FP32", [-1]), "ood_threshold": ("FP32", [-1])}
    return {**found, "samples": ("INT64", [-1]), DRAWS: ("FP32", [-1, -1, width])}
