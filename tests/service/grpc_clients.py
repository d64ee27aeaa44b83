"""Clients of the gRPC port: Triton's, and a bare channel with the messages of our own `inference.proto`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pool
from numpy.typing import NDArray

from dubito.service.grpc.protocol import SERVICE, message_class
from dubito.service.web.oip import DTYPES

Array = NDArray[Any]
LIMIT = 60.0  # seconds for one call on a busy machine


@contextmanager
def _own_pool() -> Iterator[None]:
    """Stubs of Triton and KServe define the same names, so that one process can import both only into two pools."""
    default = descriptor_pool.Default
    pool = descriptor_pool.DescriptorPool()
    descriptor_pool.Default = lambda: pool
    try:
        yield
    finally:
        descriptor_pool.Default = default


with _own_pool():
    import tritonclient.grpc as triton
    import tritonclient.grpc.aio as triton_aio
    from tritonclient.grpc import service_pb2 as triton_messages

__all__ = ["Bare", "input_of", "output_of", "triton", "triton_aio", "triton_messages"]

FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def input_of(x: Array, kind: str = "FP32", name: str = "input") -> Any:
    return triton.InferInput(name, list(x.shape), kind).set_data_from_numpy(x)


def output_of(reply: Any, name: str) -> Array:
    """An output of a bare reply, raw or typed."""
    i = [output.name for output in reply.outputs].index(name)
    output = reply.outputs[i]
    if reply.raw_output_contents:
        values = np.frombuffer(reply.raw_output_contents[i], DTYPES[output.datatype])
    else:
        values = np.array(list(getattr(output.contents, FIELDS[output.datatype])), DTYPES[output.datatype])
    return values.reshape(tuple(output.shape))


class Bare:
    """Calls methods by their name."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = (), channel: Any = None) -> None:
        self.channel = channel or grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self.metadata = tuple(metadata)

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def method(self, name: str) -> Any:
        return self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            message_class(f"{name}Response").FromString,
        )

    def call(self, name: str, message: Any = b"", timeout: float = LIMIT, **more: Any) -> Any:
        return self.method(name)(message, timeout=timeout, metadata=self.metadata, **more)

    def infer(self, request: Any, timeout: float = LIMIT, **more: Any) -> Any:
        return self.call("ModelInfer", request, timeout, **more)


def request(
    x: Array, kind: str = "FP32", *, raw: bool = True, model: str = "digits", outputs: Sequence[str] = (), **given: Any
) -> Any:
    """A ModelInferRequest of one input, with the given parameters."""
    told = message_class("ModelInferRequest")(model_name=model)
    tensor = told.inputs.add(name="input", datatype=kind, shape=x.shape)
    if raw:
        told.raw_input_contents.append(x.tobytes())
    else:
        getattr(tensor.contents, FIELDS[kind]).extend(x.reshape(-1).tolist())
    for name in outputs:
        told.outputs.add(name=name)
    for key, value in given.items():
        choice = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(told.parameters[key], choice, value)
    return told
