"""Writes replies of the Open Inference Protocol v2, which processes that decode start sooner without."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dubito.service.web.http import Pairs
from dubito.service.web.oip import DTYPES, JSON, KINDS, MOST_REMEMBERED, OCTETS, SPLIT, Header
from dubito.service.web.replies import numbers

AS_JSON, AS_OCTETS = (b"content-type", JSON.encode()), (b"content-type", OCTETS.encode())


async def write(
    name: str, version: str, header: Header, outputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]
) -> tuple[bytes, Pairs]:
    """Body and headers of the reply."""
    described: Any
    if header.outputs is None and header.binary:  # the usual case, so its description is cached
        blobs = [array.tobytes() for array in outputs.values()]
        described = _all_binary(tuple((output, KINDS[array.dtype], array.shape) for output, array in outputs.items()))
    else:
        binary = dict.fromkeys(outputs, False) if header.outputs is None else header.outputs
        blobs = [outputs[output].tobytes() for output, packed in binary.items() if packed]
        described = [await _entry(output, outputs[output], packed) for output, packed in binary.items()]
    reply: dict[str, Any] = {
        "model_name": name,
        "model_version": version,
        "outputs": described,
        "parameters": parameters,
    }
    if header.id is not None:
        reply["id"] = header.id
    head = orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
    if not blobs:
        return head, [AS_JSON]
    return b"".join([head, *blobs]), [AS_OCTETS, (SPLIT, b"%d" % len(head))]


@lru_cache(MOST_REMEMBERED)
def _all_binary(outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> orjson.Fragment:
    """Names, datatypes and shapes as JSON, cached: they depend only on the model and the number of rows."""
    return orjson.Fragment(orjson.dumps([_binary_entry(*output) for output in outputs]))


async def _entry(name: str, array: NDArray[Any], binary: bool) -> dict[str, Any]:
    kind = KINDS[array.dtype]
    if binary:
        return _binary_entry(name, kind, array.shape)
    data = await numbers(np.ascontiguousarray(array).reshape(-1))
    return {"name": name, "shape": array.shape, "datatype": kind, "data": data}


def _binary_entry(name: str, kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    size = {"binary_data_size": prod(shape) * DTYPES[kind].itemsize}
    return {"name": name, "shape": shape, "datatype": kind, "parameters": size}
