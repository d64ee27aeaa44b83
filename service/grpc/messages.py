"""Reads ModelInferRequest and writes ModelInferResponse, without copies of their tensors.

Parsing a message may take many times its size in memory, for a repeated field can be two bytes for each element. So the
tensors are cut out first, in time linear in a bounded number of fields, and only the rest, which is short, is parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from dubito.service.grpc.protocol import message_class
from dubito.service.problems import Problem
from dubito.service.web.decode import MOST_HEAD, RequestLimits
from dubito.service.web.oip import DTYPES, KINDS, MOST_REMEMBERED, MOST_TEXT, Header, Spec, Values, values_of

Request, Response = message_class("ModelInferRequest"), message_class("ModelInferResponse")
Output, Contents = message_class("ModelInferResponse.InferOutputTensor"), message_class("InferTensorContents")

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
ID, INPUTS, RAW = (number << 3 | BYTES for number in (3, 5, 7))  # of ModelInferRequest
CONTENTS = 5 << 3 | BYTES  # of its inputs, and of the outputs of the reply
PARAMETERS, OUTPUTS, RAW_OUTPUTS = (number << 3 | BYTES for number in (4, 5, 6))  # of ModelInferResponse
KEY, VALUE = (number << 3 | BYTES for number in (1, 2))  # of an entry of a map
INT64_PARAM, STRING_PARAM = 2 << 3 | VARINT, 3 << 3 | BYTES  # of InferParameter
MOST_FIELDS = 256  # of a message, apart from the elements of a tensor
MOST_ALONE = 4096  # numbers of a tensor with a field each: proto3 packs them into one
WIDEST = 10  # bytes of a number: a negative integer takes as many
BLOCK = 1 << 16  # bytes of integers that are decoded together
LONG_NUMBERS = "an integer of the message has more than 10 bytes."
FIELDS = {  # datatype -> number and wire type of the field of InferTensorContents that holds its elements
    "BOOL": (1, VARINT),
    **dict.fromkeys(("INT8", "INT16", "INT32"), (2, VARINT)),
    "INT64": (3, VARINT),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), (4, VARINT)),
    "UINT64": (5, VARINT),
    "FP32": (6, FIXED32),
    "FP64": (7, FIXED64),
    "BYTES": (8, BYTES),
}
NAMES = {field.number: field.name for field in Contents.DESCRIPTOR.fields}
Span = tuple[int, int]
Field = tuple[int, int, int, int]  # where it begins, its key (number and wire type), where its value begins and ends


@dataclass(slots=True)
class CutMessage:
    """A ModelInferRequest, cut up."""

    message: bytes
    head: bytes  # what is left without id and tensors
    id: str
    raw: list[memoryview]
    contents: list[list[Span]]  # of each input, where its `contents` lie
    ends_raw: bool = False  # the last field is a raw tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """A message whose last field is its one raw tensor of numbers. Any message of the same length that begins with the
    same bytes has the same fields, so it is not cut up again."""

    prefix: bytes  # all before the tensor's numbers
    id: str
    spec: Spec  # of the tensor
    count: int  # of its numbers

    def values(self, message: bytes, most: int) -> NDArray[Any]:
        """The tensor, of at most `most` numbers, of a message of the same length and beginning."""
        _check_elements(self.spec, self.count, most)
        return np.ndarray(self.spec.shape, DTYPES[self.spec.kind], message, len(self.prefix))


def layout_of(parts: CutMessage, spec: Spec) -> Layout | None:
    """The layout of a message whose tensor `tensor_of` has read; None where it has another form."""
    if not parts.ends_raw or len(parts.raw) != 1 or spec.kind == "BYTES":
        return None
    prefix = parts.message[: len(parts.message) - len(parts.raw[0])]
    return Layout(prefix, parts.id, spec, prod(spec.shape))


def most_bytes(limits: RequestLimits, most: int) -> int:
    """Largest message for a model: the most inputs at their widest, or `most` where it may hold pictures."""
    return most if limits.pictures else min(most, MOST_HEAD + WIDEST * limits.numbers)


def split(message: bytes) -> CutMessage:
    """Cut the tensors out of a message."""
    raw, kept, id_, begun = [], [], "", 0
    found = fields_of(message, 0, len(message), MOST_FIELDS)
    for start, key, begin, stop in found:
        if key in (RAW, ID):
            kept.append(message[begun:start])
            begun = stop
            if key == RAW:
                raw.append(memoryview(message)[begin:stop])
            else:
                id_ = _text(message[begin:stop])
    if raw:
        return CutMessage(message, _bounded([*kept, message[begun:]]), id_, raw, [], found[-1][1] == RAW)
    kept, contents = [], []
    for start, key, begin, stop in found:
        if key == INPUTS:
            inner = fields_of(message, begin, stop, MOST_FIELDS)
            contents.append([(at, end) for _, key, at, end in inner if key == CONTENTS])
            rest = b"".join([message[at:end] for at, key, _, end in inner if key != CONTENTS])
            kept.append(framed(INPUTS, rest))
        elif key != ID:
            kept.append(message[start:stop])
    return CutMessage(message, _bounded(kept), id_, [], contents)


def _bounded(kept: list[bytes]) -> bytes:
    head = b"".join(kept)
    if len(head) > MOST_HEAD:
        detail = f"the message has {len(head):,} bytes besides its tensors; at most {MOST_HEAD:,} are taken."
        raise Problem(413, detail, reason="body")
    return head


def _text(value: bytes) -> str:
    """The id, which is sent back: no longer than over HTTP."""
    try:
        if len(value) <= 4 * MOST_TEXT and len(text := value.decode()) <= MOST_TEXT:
            return text
    except UnicodeDecodeError:
        raise Problem(400, "the id is no UTF-8.") from None
    raise Problem(400, f"the id has more than {MOST_TEXT} characters.")


def fields_of(data: bytes, at: int, end: int, most: int) -> list[Field]:
    """The fields of a message between two offsets; what is nested in them is not looked at."""
    found: list[Field] = []
    while at < end:
        start, key = at, data[at]
        if key < 0x80:
            at += 1
        else:
            key, at = _varint(data, at, end)
        kind = key & 7
        if kind == BYTES:
            if at < end and (size := data[at]) < 0x80:
                at += 1
            else:
                size, at = _varint(data, at, end)
            stop = at + size
        elif kind == VARINT:
            stop = _varint(data, at, end)[1]
        elif kind == FIXED32:
            stop = at + 4
        elif kind == FIXED64:
            stop = at + 8
        else:
            raise _broken()
        if stop > end or key < 8:
            raise _broken()
        found.append((start, key, at, stop))
        if len(found) > most:
            raise Problem(413, f"the message has more than {most:,} fields, which is what is taken.", reason="body")
        at = stop
    return found


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An integer and the offset after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _broken()


def _broken() -> Problem:
    return Problem(400, "the message is no ModelInferRequest: its bytes are no fields of a protobuf message.")


def request_of(head: bytes) -> tuple[str, str | None, dict[str, Any]]:
    """Model, version and the rest in the form that the JSON of the protocol has, where the same checks are made."""
    try:
        request = Request.FromString(head)
    except DecodeError:
        raise _broken() from None
    if any(one.HasField("contents") for one in request.inputs):
        raise Problem(400, "the message has both contents and raw_input_contents; expected one of them.")
    inputs = [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": list(one.shape),
            "parameters": parameters_in(one.parameters),
        }
        for one in request.inputs
    ]
    outputs = [{"name": one.name, "parameters": parameters_in(one.parameters)} for one in request.outputs]
    fields: dict[str, Any] = {"inputs": inputs, "parameters": parameters_in(request.parameters)}
    fields["parameters"].setdefault("binary_data_output", True)
    if outputs:
        fields["outputs"] = outputs
    return request.model_name, request.model_version or None, fields


def parameters_in(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name; None where an entry has none."""
    chosen = {key: entry.WhichOneof("parameter_choice") for key, entry in entries.items()}
    return {key: None if choice is None else getattr(entries[key], choice) for key, choice in chosen.items()}


def tensor_of(parts: CutMessage, spec: Spec, most: int) -> Values:
    """The values of the request's one input, of at most `most` elements."""
    count = prod(spec.shape)
    _check_elements(spec, count, most)
    if parts.raw:
        if len(parts.raw) != 1:
            raise Problem(400, f"raw_input_contents has {len(parts.raw)} tensors; expected one for the one input.")
        raw = parts.raw[0]
        return values_of(Spec(spec.name, spec.kind, spec.shape, len(raw), None), raw, 0)
    return _typed(parts.message, parts.contents[0], spec, count)


def _check_elements(spec: Spec, count: int, most: int) -> None:
    if count > most:
        raise Problem(413, f"input {spec.name[:40]!r} has shape {spec.shape}; at most {most:,} elements are taken.")


def _typed(message: bytes, spans: list[Span], spec: Spec, count: int) -> Values:
    name, kind = spec.name[:40], spec.kind
    if kind not in FIELDS:
        raise Problem(400, f"input {name!r}: {kind} has no typed contents; send raw_input_contents.")
    number, wire = FIELDS[kind]
    chunks = []
    alone = count if kind == "BYTES" else min(count, MOST_ALONE)
    for span in spans:
        for _, key, begin, stop in fields_of(message, *span, alone + MOST_FIELDS):
            if key >> 3 != number:
                came = NAMES.get(key >> 3, f"field {key >> 3}")
                raise Problem(400, f"input {name!r} has its elements in {came}; {kind} is in {NAMES[number]}.")
            if key & 7 not in (wire, BYTES):
                raise _broken()
            chunks.append(memoryview(message)[begin:stop])
    if kind == "BYTES":
        elements = [bytes(chunk) for chunk in chunks]
        _check_count(name, len(elements), spec, "elements")
        return elements
    data = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
    if wire != VARINT:
        if len(data) % DTYPES[kind].itemsize:
            raise _broken()
        _check_count(name, len(data) // DTYPES[kind].itemsize, spec)
        return np.ndarray(spec.shape, DTYPES[kind], data)
    last = np.frombuffer(data, np.uint8) < 0x80  # the last byte of an integer
    _check_count(name, int(np.count_nonzero(last)), spec)
    if not last[-1]:
        raise _broken()
    return integers(data, kind, count).reshape(spec.shape)


def _check_count(name: str, came: int, spec: Spec, what: str = "numbers") -> None:
    if came != prod(spec.shape):
        raise Problem(400, f"input {name!r} has {came} {what}; its shape {spec.shape} takes {prod(spec.shape)}.")


def integers(data: memoryview, kind: str, count: int) -> NDArray[Any]:
    """Decode integers of variable length: seven bits a byte, the lowest first; the last byte is below 128."""
    whole, at, filled = np.empty(count, DTYPES[kind]), 0, 0
    while at < len(data):
        block = np.frombuffer(data[at : at + BLOCK], np.uint8)
        ends = np.flatnonzero(block < 0x80)
        if not len(ends):
            raise Problem(400, LONG_NUMBERS)
        begins = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - begins + 1
        longest = int(lengths.max())
        if longest > WIDEST:
            raise Problem(400, LONG_NUMBERS)
        values = np.zeros(len(ends), np.uint64)
        for i in range(longest):
            rows = np.flatnonzero(lengths > i)
            values[rows] |= (block[begins[rows] + i] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * i)
        given = values.view(np.int64) if kind.startswith("INT") else values
        part = whole[filled : filled + len(ends)]
        part[:] = given.astype(part.dtype)  # of a BOOL: whether it is not 0
        if kind != "BOOL" and (part != given).any():
            raise Problem(400, f"the contents are no array of {kind}: a number is too large.")
        filled += len(ends)
        at += int(ends[-1]) + 1
    return whole


def reply_of(
    name: str,
    version: str,
    id_: str,
    header: Header,
    outputs: Mapping[str, NDArray[Any]],
    parameters: Mapping[str, int | str],
) -> bytes:
    """A ModelInferResponse: raw, unless the request asks for typed contents."""
    wanted = outputs if header.outputs is None else {output: outputs[output] for output in header.outputs}
    raw = header.binary if header.outputs is None else any(header.outputs.values())  # a message has one form for all
    tensors = _tensors(tuple([(output, array.dtype.char, array.shape) for output, array in wanted.items()]))
    parts = [_named(name, version)]
    for key, value in parameters.items():
        parts.append(_parameter(key, value))
    if id_:
        parts.append(framed(ID, id_.encode()))
    if raw:
        parts.append(tensors.described)
        for prefix, array in zip(tensors.prefixes, wanted.values(), strict=True):
            parts += (prefix, array.tobytes())
    else:
        for one, array in zip(tensors.each, wanted.values(), strict=True):
            parts.append(framed(OUTPUTS, one + framed(CONTENTS, _contents(array))))
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The outputs of a reply without their values."""

    each: list[bytes]  # InferOutputTensor
    described: bytes  # all of them as fields of the reply
    prefixes: list[bytes]  # before the raw values of each


@lru_cache(MOST_REMEMBERED)
def _tensors(outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Tensors:
    """Names, numpy's characters for datatypes, and shapes; cached, for they depend only on the model and the rows."""
    known = [(name, np.dtype(char), shape) for name, char, shape in outputs]
    each = [Output(name=name, datatype=KINDS[dtype], shape=shape).SerializeToString() for name, dtype, shape in known]
    sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in known]
    return Tensors(each, b"".join(framed(OUTPUTS, one) for one in each), [_prefix(RAW_OUTPUTS, n) for n in sizes])


@lru_cache(MOST_REMEMBERED)
def _named(name: str, version: str) -> bytes:
    named: bytes = Response(model_name=name, model_version=version).SerializeToString()
    return named


@lru_cache(MOST_REMEMBERED)
def _parameter(key: str, value: int | str) -> bytes:
    """An entry of the reply's map of parameters."""
    choice = framed(STRING_PARAM, value.encode()) if isinstance(value, str) else _prefix(INT64_PARAM, value)
    return framed(PARAMETERS, framed(KEY, key.encode()) + framed(VALUE, choice))


def _contents(array: NDArray[Any]) -> bytes:
    """InferTensorContents of an array."""
    number, wire = FIELDS[kind := KINDS[array.dtype]]
    if wire == VARINT and kind != "BOOL":  # a BOOL is one byte, as it is in memory
        packed: bytes = Contents(**{NAMES[number]: array.reshape(-1).tolist()}).SerializeToString()
        return packed
    return framed(number << 3 | BYTES, array.tobytes())


def framed(key: int, value: bytes) -> bytes:
    """A field of a message."""
    return _prefix(key, len(value)) + value


def _prefix(key: int, size: int) -> bytes:
    """Key and length of a field, or key and value of an integer."""
    if size < 0x80:
        return bytes((key, size))
    length = bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((key, *length, size))
