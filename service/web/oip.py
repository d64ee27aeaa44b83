"""Reads requests of the Open Inference Protocol v2: JSON tensors and the binary tensor extension."""

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.service.problems import Problem
from dubito.service.web.arrays import array_of

TYPES: dict[str, str] = {
    "BOOL": "?",
    **{f"UINT{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)},
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
MOST_ELEMENTS = 1 << 16  # of BYTES
MOST_REMEMBERED = 256
MOST_ENTRIES = 64  # inputs, outputs, or parameters
MOST_TEXT = 4096  # characters of an id or a parameter
WIDEST = 32  # bytes of a number as JSON: sign, 17 digits, point, exponent, comma and some white space
DTYPES = {name: np.dtype(code) for name, code in TYPES.items()}
KINDS = {dtype: name for name, dtype in DTYPES.items()}
INPUT = "input"
PARAMETERS = ("samples", "seed", "max_samples", "tolerance", "timeout_ms", "method", "group")  # options of a request
DRAWS = "sample_outputs"  # an output that is returned only on request
LARGEST = 1 << 40  # largest size of a tensor's dimension that a header may state
LENGTH = "inference-header-content-length"
JSON, OCTETS = "application/json", "application/octet-stream"
SPLIT = LENGTH.encode()

Values = NDArray[Any] | list[bytes]  # the elements of a BYTES tensor, else an array


@dataclass(slots=True)
class Spec:
    """The input tensor that a request describes."""

    name: str
    kind: str
    shape: list[int]
    size: int | None  # bytes after the header; None: the values are in `data`
    data: Any


@dataclass(slots=True)
class Header:
    """The JSON of an inference request, checked; its input not yet read."""

    id: str | None
    parameters: Mapping[str, Any]
    input: Spec
    outputs: dict[str, bool] | None  # name -> binary; None: all of them
    binary: bool  # default for outputs


def header_of(request: dict[str, Any]) -> Header:
    """Check the JSON of a request."""
    parameters = _parameters(request, "the request")
    inputs = [_spec(entry) for entry in _entries(request, "inputs")]
    if not inputs:
        raise Problem(400, "inputs is empty; expected a list of tensors.")
    names = [spec.name[:40] for spec in inputs]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):  # of at most MOST_ENTRIES
        raise Problem(400, f"input {twice!r} comes twice.")
    if names != [INPUT]:
        raise Problem(400, f"inputs are {', '.join(names)[:60]!r}; this model takes one, called {INPUT!r}.")
    binary = _flag(parameters.get("binary_data_output"), "binary_data_output") or False
    outputs: dict[str, bool] = {}
    for entry in _entries(request, "outputs") if request.get("outputs") is not None else ():
        flag = _flag(_parameters(entry, "an output").get("binary_data"), "binary_data")
        outputs[entry["name"]] = binary if flag is None else flag
    id_ = request.get("id")
    if id_ is not None and (not isinstance(id_, str) or len(id_) > MOST_TEXT):
        raise Problem(400, f"id is no string, or one of more than {MOST_TEXT} characters.")
    return Header(id_, parameters, inputs[0], outputs or None, binary)


def check_control(request: dict[str, Any], call: str, known: tuple[str, ...]) -> None:
    """The body of a call that loads or unloads a model: no parameters but booleans of `known`."""
    for key in request:
        if key != "parameters":
            raise Problem(400, f"{call} came with {key[:40]!r}; expected no body, or one with `parameters` alone.")
    if "parameters" in request and not isinstance(request["parameters"], dict):
        raise Problem(400, f"the parameters of {call} are no object.")
    for name, value in _parameters(request, call).items():
        if name not in known:
            why = "an artifact says itself how it is served, and comes from the repository alone"
            raise Problem(400, f"{call} takes no parameter {name[:40]!r}: {why}.")
        if not isinstance(value, bool):
            raise Problem(400, f"the parameter {name!r} of {call} is no boolean.")


def raw_header(size: int, shape: tuple[int, ...]) -> Header:
    """The header for a body that is only the FP32 numbers of one input; all outputs are returned as binary."""
    if size != 4 * prod(shape):
        raise Problem(400, f"the raw body has {size} bytes; one FP32 input of shape {shape} takes {4 * prod(shape)}.")
    return Header(None, {}, Spec(INPUT, "FP32", [1, *shape], size, None), None, True)


def values_of(spec: Spec, body: bytes | memoryview, offset: int) -> Values:
    """The input tensor: from the header's JSON, or from the bytes of the body after it.

    Lengths are checked against the body before they are used.
    """
    size, left = spec.size or 0, len(body) - offset
    if size > left:
        raise Problem(400, f"input {spec.name!r} says {size} bytes; {left} are left in the body.")
    if size < left:
        raise Problem(400, f"{left - size} bytes follow the last binary tensor; expected none.")
    if spec.size is None:
        return _from_json(spec)
    count = prod(spec.shape)
    if spec.kind == "BYTES":
        return _elements(memoryview(body)[offset:], spec.name, count)
    dtype = DTYPES[spec.kind]
    if size != (expected := count * dtype.itemsize):
        raise Problem(
            400, f"input {spec.name!r} says {size} bytes; its shape {spec.shape} of {spec.kind} takes {expected}."
        )
    return np.ndarray(spec.shape, dtype, body, offset)


def length_of(stated: bytes, size: int) -> int:
    """Length of the JSON header, checked against the size of the body."""
    n = int(stated) if stated.isdigit() and len(stated) < 16 else -1
    if not 0 < n <= size:
        said = stated[:20].decode("latin-1")
        raise Problem(400, f"Inference-Header-Content-Length is {said!r}, but the body has {size} bytes.")
    return n


def _entries(request: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = request.get(key)
    if not isinstance(entries, list):
        others = ", ".join(repr(name[:40]) for name in list(request)[:4] if name != key)
        instead = f" The request has {others}." if others and key not in request else ""
        raise Problem(400, f"{key} is missing or no list; expected a list of tensors.{instead}")
    if len(entries) > MOST_ENTRIES:
        raise Problem(400, f"{key} has {len(entries):,} entries; at most {MOST_ENTRIES} are taken.")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            form = f'{{"name": "{INPUT}", "shape": [...], "datatype": "FP32", "data": [...]}}'
            lists = "; plain nested lists go to /v1/models/NAME/predict" if isinstance(entry, list) else ""
            raise Problem(400, f"an entry of {key} is no object with a name; expected {form}{lists}.")
    return entries


def _parameters(entry: dict[str, Any], whose: str) -> dict[str, Any]:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise Problem(400, f"the parameters of {whose} are no object.")
    if len(parameters) > MOST_ENTRIES:
        raise Problem(400, f"{whose} has {len(parameters):,} parameters; at most {MOST_ENTRIES} are taken.")
    for name, value in parameters.items():
        if not isinstance(value, str | int | float) or (isinstance(value, str) and len(value) > MOST_TEXT):
            came = "null" if value is None else "an object" if isinstance(value, dict) else "a list"
            came = f"a string of {len(value):,} characters" if isinstance(value, str) else came
            raise Problem(
                400,
                f"the parameter {name[:40]!r} of {whose} is {came}; expected a short string, a number or a boolean.",
            )
    return parameters


def _flag(value: object, name: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise Problem(400, f"{name} is no boolean.")


def _spec(entry: dict[str, Any]) -> Spec:
    name, shape, kind = entry["name"][:40], entry.get("shape"), entry.get("datatype")
    if not isinstance(kind, str) or (kind not in TYPES and kind != "BYTES"):
        came = f"datatype {kind[:40]!r}" if isinstance(kind, str) else "no datatype"
        raise Problem(400, f"input {name!r} has {came}; expected {', '.join(TYPES)} or BYTES.")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < LARGEST for n in shape):
        raise Problem(400, f"input {name!r} has no shape; expected a list of sizes.")
    if 0 in shape:
        raise Problem(400, f"input {name!r} has shape {shape}; expected at least one row.")
    size = _parameters(entry, "an input").get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise Problem(400, f"input {name!r} says {str(size)[:20]} bytes; expected how many follow the header.")
    if size is not None and "data" in entry:
        raise Problem(400, f"input {name!r} has both data and binary_data_size.")
    return Spec(entry["name"], kind, shape, size, entry.get("data"))


def _elements(raw: memoryview, name: str, count: int) -> list[bytes]:
    """Elements of a BYTES tensor: each is a length in four bytes, then that many bytes."""
    if count > MOST_ELEMENTS:
        raise Problem(413, f"input {name!r} has {count} elements; at most {MOST_ELEMENTS:,} are taken.")
    elements: list[bytes] = []
    offset = 0
    while offset + 4 <= len(raw) and len(elements) < count:
        (size,) = struct.unpack_from("<I", raw, offset)
        if offset + 4 + size > len(raw):
            break
        elements.append(bytes(raw[offset + 4 : offset + 4 + size]))
        offset += 4 + size
    if offset != len(raw) or len(elements) != count:
        raise Problem(
            400, f"input {name!r}: {len(raw)} bytes are not {count} elements, each with its length before it."
        )
    return elements


def _from_json(spec: Spec) -> Values:
    name, kind, shape, data = spec.name[:40], spec.kind, spec.shape, spec.data
    if not isinstance(data, list):
        raise Problem(400, f"input {name!r} has no data; expected a list, or binary_data_size.")
    if kind == "FP16":
        raise Problem(400, f"input {name!r}: FP16 has no JSON form; send it as binary data.")
    if kind == "BYTES":
        return _decoded(data, name, prod(shape))
    dtype = DTYPES[kind]
    try:
        if kind == "BOOL":
            array = np.array(data)
            if array.dtype.kind not in "bi":  # true and false, or 0 and 1
                raise ValueError
            array = array.astype(np.float64)
        else:
            array = array_of(data, dtype if dtype.kind == "f" else np.dtype(np.float64))
    except (ValueError, TypeError, OverflowError):
        numbers = (
            "" if kind == "BOOL" else "; expected numbers: no strings, booleans or null, and lists of equal length"
        )
        raise Problem(400, f"the data of input {name!r} are no array of {kind}{numbers}.") from None
    if dtype.kind != "f":
        with np.errstate(invalid="ignore"):
            given, array = array, array.astype(dtype)
        if dtype.itemsize == 8 and (edge := given == np.float64(most := np.iinfo(dtype).max)).any():
            exact = np.array(data, object).reshape(-1)  # as the largest number is rounded up
            array = np.where(edge & (exact <= most).reshape(edge.shape), most, array)
        if (given != array).any():  # a fraction, or too large
            raise Problem(400, f"the data of input {name!r} are no array of {kind}.")
    if array.size != prod(shape):
        raise Problem(400, f"input {name!r} has {array.size} numbers; its shape {shape} takes {prod(shape)}.")
    return array.reshape(shape)


def _decoded(data: list[Any], name: str, count: int) -> list[bytes]:
    """Elements of a BYTES tensor in JSON, where they are base64."""
    flat = [text for part in data for text in (part if isinstance(part, list) else [part])]
    try:
        elements = [base64.b64decode(text, validate=True) for text in flat]
    except (binascii.Error, ValueError, TypeError):
        raise Problem(400, f"the data of input {name!r} are no base64.") from None
    if len(elements) != count:
        raise Problem(400, f"input {name!r} has {len(elements)} elements; its shape says {count}.")
    return elements
