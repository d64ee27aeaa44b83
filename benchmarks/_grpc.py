"""Calls of ModelInfer in a closed loop, and a bare grpc.aio server to compare with: `python -m benchmarks._grpc`."""

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import uvloop
from numpy.typing import NDArray

from dubito.service.grpc.protocol import SERVICE, message_class
from dubito.service.load import Load

METHOD = f"/{SERVICE}/ModelInfer"


@dataclass(frozen=True)
class GrpcTarget:
    """A server, and the message that is sent to it."""

    address: str
    message: bytes


def message_of(x: NDArray[np.float32], model: str) -> bytes:
    told = message_class("ModelInferRequest")(model_name=model, raw_input_contents=[x.tobytes()])
    told.inputs.add(name="input", datatype="FP32", shape=x.shape)
    message: bytes = told.SerializeToString()
    return message


def put(target: GrpcTarget, requests: int, connections: int) -> Load:
    """Each connection sends its next call when the one before is answered."""
    return asyncio.run(_put(target, requests, connections))


async def _put(target: GrpcTarget, requests: int, connections: int) -> Load:
    sent, ended = np.full(requests, np.nan), np.full(requests, np.nan)
    status = np.full(requests, 500)
    left = iter(range(requests))
    began = time.perf_counter()

    async def one() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share a connection
        async with grpc.aio.insecure_channel(target.address, options=options) as channel:
            method = channel.unary_unary(METHOD)
            for i in left:
                sent[i] = time.perf_counter() - began
                await method(target.message)
                ended[i] = time.perf_counter() - began
                status[i] = 200

    await asyncio.gather(*(one() for _ in range(connections)))
    return Load(0.0, np.zeros(requests), sent, sent, ended, status)


def main() -> None:
    """The least that a server on grpc.aio can do: read a message, send one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))  # the loop of our own server


async def _serve(port: int) -> None:
    reply = bytes(400)

    async def answer(message: bytes, _: Any) -> bytes:
        return reply

    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    main()
