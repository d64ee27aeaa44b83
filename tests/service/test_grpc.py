"""The gRPC port of a live server, by Triton's own client, KServe's, and a bare channel: it answers as HTTP does."""

import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflected
from grpc_tools import protoc
from tritonclient.utils import InferenceServerException

from dubito import __version__
from dubito.service.grpc.messages import CONTENTS, INPUTS, fields_of, framed, integers
from dubito.service.grpc.protocol import FILE, SERVICE, described, message_class
from dubito.service.web.oip import DRAWS, DTYPES
from dubito.service.web.security import hash_key
from tests import forked
from tests.service.conftest import Live, Serve, Starter
from tests.service.grpc_clients import (
    Array,
    Bare,
    input_of,
    output_of,
    request,
    triton,
    triton_aio,
    triton_messages,
)
from tests.service.test_failures import codes
from tests.service.test_kserve import kserve

Code = grpc.StatusCode
KINDS = ["BOOL", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, small_digits: Path) -> Iterator[Live]:
    """One server of digits for all tests that leave it as it is."""
    starter = Starter(tmp_path_factory.mktemp("grpc"))
    yield starter(small_digits, "--grpc-port", "0")
    starter.close()


@pytest.fixture(scope="module")
def unusual(serve: Serve, small_digits: Path) -> Live:
    """The same with other settings, for tests that ask about one of them each."""
    changes = {"grpc_compression": "true", "body_seconds": "1.5", "repository_api": "false"}
    words = (word for name, value in changes.items() for word in ("--set", f"{name}={value}"))
    return serve(small_digits, "--grpc-port", "0", *words)


@pytest.fixture(scope="module")
def client(served: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(served.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def http(served: Live) -> Iterator[Any]:
    with triton_http.InferenceServerClient(served.address) as found:
        yield found


@pytest.fixture(scope="module")
def bare(served: Live) -> Iterator[Bare]:
    with Bare(served.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def x() -> Array:
    return np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)


def over_http(http: Any, x: Array, kind: str = "FP32", model: str = "digits", **parameters: Any) -> Any:
    tensor = triton_http.InferInput("input", list(x.shape), kind).set_data_from_numpy(x)
    return http.infer(model, [tensor], parameters=parameters)


def refusal(ask: Callable[[], object]) -> tuple[Any, str]:
    """Code and text of a bare call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    error: Any = caught.value
    return error.code(), error.details()


def eventually(found: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not (yes := found()) and time.monotonic() < until:
        time.sleep(0.02)
    return yes


# the definition


def file_of(module: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def test_the_definition_is_read_as_protoc_reads_it(tmp_path: Path) -> None:
    folder = files("dubito.service.grpc")
    out = tmp_path / "set"
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={out}", FILE]) == 0
    (theirs,) = FileDescriptorSet.FromString(out.read_bytes()).file

    def without_json(message: DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            without_json(nested)

    for message in theirs.message_type:
        without_json(message)
    assert described(folder.joinpath(FILE).read_text()) == theirs


def flat(messages: Any, prefix: str = "") -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """Message, field, and number, type and label."""
    for message in messages:
        for field in message.field:
            yield f"{prefix}{message.name}", field.name, (field.number, field.type, field.label)
        yield from flat(message.nested_type, f"{prefix}{message.name}.")


@pytest.mark.parametrize("whose", ["triton", "kserve"])
def test_names_and_numbers_are_those_of_the_published_protocol(whose: str) -> None:
    kserve()
    theirs = triton_messages if whose == "triton" else import_module("kserve.protocol.grpc.grpc_predict_v2_pb2")
    ours = {(message, field): what for message, field, what in flat(file_of_ours().message_type)}
    found = {(message, field): what for message, field, what in flat(file_of(theirs).message_type)}
    shared = ours.keys() & found.keys()
    different = {key for key in shared if ours[key] != found[key]}
    in_load = {(f"RepositoryModel{what}Request", "model_name") for what in ("Load", "Unload")}
    assert different == (in_load if whose == "kserve" else set())  # there KServe and Triton differ: `model_in`
    missing = {key for key in found.keys() - shared if key[0].partition(".")[0] in {name for name, _ in ours}}
    assert missing == set()
    assert len(shared) > 40


def file_of_ours() -> FileDescriptorProto:
    return described(files("dubito.service.grpc").joinpath(FILE).read_text())


def test_integers_are_decoded_as_protobuf_does() -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, 127, 128, 300, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
    numbers = np.array([*edges, *(int(n) >> int(s) for n, s in rng.integers(0, 64, (60_000, 2), np.uint64))], np.uint64)
    numbers[len(edges) :] = rng.integers(0, 1 << 63, 60_000, np.uint64) >> rng.integers(0, 64, 60_000, np.uint64)
    message = message_class("InferTensorContents")(uint64_contents=numbers.tolist()).SerializeToString()
    size = len(message_class("InferTensorContents").FromString(message).uint64_contents)
    packed = message[4:]  # key, and a length of three bytes
    assert (size, len(packed) >> 14 > 0) == (len(numbers), True)
    np.testing.assert_array_equal(integers(memoryview(packed), "UINT64", len(numbers)), numbers)


# the same answers as HTTP


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert (server.name, server.version) == ("dubito", __version__)
    assert "model_repository" in server.extensions


def test_metadata_is_that_of_http(client: Any, http: Any) -> None:
    theirs = http.get_model_metadata("digits")
    mine = client.get_model_metadata("digits", as_json=True)
    tensors = {key: [t | {"shape": [int(n) for n in t["shape"]]} for t in mine[key]] for key in ("inputs", "outputs")}
    assert {**mine, **tensors} == theirs


def test_answers_are_those_of_http_to_the_bit(client: Any, http: Any, x: Array) -> None:
    for given in ({"samples": 20, "seed": 5}, {"samples": "auto", "seed": 5}, {"samples": 0}, {"seed": 7}):
        mine = client.infer("digits", [input_of(x)], parameters=given, request_id="my own")
        theirs = over_http(http, x, **given)
        reply = mine.get_response()
        assert (reply.id, reply.model_name, reply.model_version) == ("my own", "digits", "1")
        names = [output.name for output in reply.outputs]
        assert names == [output["name"] for output in theirs.get_response()["outputs"]]
        for name in names:
            np.testing.assert_array_equal(mine.as_numpy(name), theirs.as_numpy(name), strict=True)
        said = theirs.get_response()["parameters"]
        assert reply.parameters["samples"].int64_param == said["samples"]
        assert reply.parameters["method"].string_param == said["method"]
        if "seed" in given:
            assert reply.parameters["seed"].string_param == said["seed"] == str(given["seed"])


@pytest.mark.parametrize("kind", KINDS)
def test_each_datatype_raw_and_typed(bare: Bare, http: Any, kind: str) -> None:
    dtype = DTYPES[kind]
    x = (np.arange(128).reshape(2, 1, 8, 8) % 5).astype(dtype)
    if dtype.kind == "i":
        x = (x - 2).astype(dtype)
    if dtype.kind == "f":
        x = (x / 3).astype(dtype)
    theirs = over_http(http, x, kind, samples=4, seed=1).as_numpy("probabilities")
    mine = output_of(bare.infer(request(x, kind, samples=4, seed=1)), "probabilities")
    np.testing.assert_array_equal(mine, theirs, strict=True)
    if kind != "FP16":
        typed = output_of(bare.infer(request(x, kind, raw=False, samples=4, seed=1)), "probabilities")
        np.testing.assert_array_equal(typed, theirs, strict=True)
        return
    told = request(x, kind)
    del told.raw_input_contents[:]
    assert refusal(lambda: bare.infer(told)) == (
        Code.INVALID_ARGUMENT,
        "input 'input': FP16 has no typed contents; send raw_input_contents.",
    )


def test_elements_that_are_not_packed(bare: Bare, x: Array) -> None:
    """proto3 packs numbers; a reader must take them one by one too."""
    told = request(x[:1], raw=False, samples=2, seed=1)
    contents = b"".join(b"\x35" + number.tobytes() for number in x[:1].reshape(-1))
    tensor = told.inputs[0]
    tensor.ClearField("contents")
    inner = tensor.SerializeToString() + b"\x2a" + _length(contents) + contents
    told.ClearField("inputs")
    loose = told.SerializeToString() + b"\x2a" + _length(inner) + inner
    expected = output_of(bare.infer(request(x[:1], samples=2, seed=1)), "probabilities")
    np.testing.assert_array_equal(output_of(bare.infer(loose), "probabilities"), expected)


def test_messages_of_one_length_are_told_apart(bare: Bare, x: Array) -> None:
    """The server remembers where the tensor of a message lies: another one of the same length must not be read so."""
    numbers = np.zeros_like(x[:1])  # so that its bytes occur elsewhere, too
    told = request(numbers, samples=2, seed=1)
    told.id = "one"
    usual = told.SerializeToString()
    fields = [usual[start:stop] for start, _, _, stop in fields_of(usual, 0, len(usual), 100)]
    raw_first = b"".join([fields[-1], *fields[:-1]])
    told.id = "two"
    other_id = told.SerializeToString()
    told.parameters["seed"].int64_param = 2
    other_seed = told.SerializeToString()
    told.raw_input_contents[0] = x[:1].tobytes()
    other_numbers = told.SerializeToString()
    messages = [usual, raw_first, other_id, other_seed, other_numbers]
    assert len(set(map(len, messages))) == 1
    replies = [bare.infer(message) for message in (*messages, *messages, *reversed(messages))]
    replies[10:] = reversed(replies[10:])
    for turn in (0, 5, 10):
        found = replies[turn : turn + 5]
        assert [reply.id for reply in found] == ["one", "one", "two", "two", "two"]
        assert [reply.parameters["seed"].string_param for reply in found] == ["1", "1", "1", "2", "2"]
        for reply, numbers_, seed in zip(found, [numbers] * 4 + [x[:1]], (1, 1, 1, 2, 2), strict=True):
            expected = bare.infer(request(numbers_, raw=False, samples=2, seed=seed))
            np.testing.assert_array_equal(output_of(reply, "probabilities"), output_of(expected, "probabilities"))
    cut = usual[:-1]  # one byte of the tensor is missing
    assert refusal(lambda: bare.infer(cut))[0] is Code.INVALID_ARGUMENT


def _length(value: bytes) -> bytes:
    size, out = len(value), bytearray()
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


def test_typed_outputs_where_asked(bare: Bare, x: Array) -> None:
    raw = bare.infer(request(x, samples=20, seed=5))
    typed = bare.infer(request(x, samples=20, seed=5, binary_data_output=False))
    assert (len(raw.raw_output_contents), len(typed.raw_output_contents)) == (len(raw.outputs), 0)
    assert not any(output.HasField("contents") for output in raw.outputs)
    for output in raw.outputs:
        np.testing.assert_array_equal(output_of(typed, output.name), output_of(raw, output.name), strict=True)


def test_chosen_outputs_come_in_their_order(client: Any, http: Any, x: Array) -> None:
    names = ["entropy", DRAWS, "class", "ood"]
    wanted = [triton.InferRequestedOutput(name) for name in names]
    result = client.infer("digits", [input_of(x)], outputs=wanted, parameters={"samples": 6, "seed": 2})
    assert [output.name for output in result.get_response().outputs] == names
    assert result.as_numpy(DRAWS).shape == (3, 6, 10)
    everything = over_http(http, x, samples=6, seed=2)
    np.testing.assert_array_equal(result.as_numpy("entropy"), everything.as_numpy("entropy"))
    mean = result.as_numpy(DRAWS).mean(1)
    np.testing.assert_allclose(mean, everything.as_numpy("probabilities"), atol=1e-5)


def test_pictures(bare: Bare, client: Any) -> None:
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (8, 8), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    pictures = np.array([file.getvalue()] * 2, object)
    raw = client.infer("digits", [input_of(pictures, "BYTES")], parameters={"samples": 0}).as_numpy("probabilities")
    told = request(np.zeros(0), "BYTES", samples=0)
    del told.raw_input_contents[:]
    told.inputs[0].shape[:] = [2]
    told.inputs[0].contents.bytes_contents.extend(pictures.tolist())
    np.testing.assert_array_equal(output_of(bare.infer(told), "probabilities"), raw)
    of_pixels = client.infer("digits", [input_of(pixels[None], "UINT8")], parameters={"samples": 0})
    np.testing.assert_allclose(raw[:1], of_pixels.as_numpy("probabilities"), atol=1e-6)


def too_large() -> Any:
    """41 MB, of at most 34."""
    return request(np.zeros((160_000, 1, 8, 8), np.float32))


def test_compression_where_it_is_asked_for(unusual: Live, client: Any, x: Array) -> None:
    given: dict[str, Any] = {"parameters": {"samples": 20, "seed": 5}}
    plain = client.infer("digits", [input_of(x)], **given)
    with triton.InferenceServerClient(unusual.grpc) as asked:
        for coding in ("gzip", "deflate"):
            packed = asked.infer("digits", [input_of(x)], compression_algorithm=coding, **given)
            np.testing.assert_allclose(packed.as_numpy("probabilities"), plain.as_numpy("probabilities"), atol=1e-6)
            with pytest.raises(InferenceServerException, match=r"(?i)compression algorithm.*disabled"):
                client.infer("digits", [input_of(x)], compression_algorithm=coding, **given)
    with Bare(unusual.grpc) as bare:
        code, text = refusal(partial(bare.infer, too_large(), compression=grpc.Compression.Gzip))
        assert (code, "larger than max" in text) == (Code.RESOURCE_EXHAUSTED, True)


def test_an_id_is_no_longer_than_over_http(bare: Bare, x: Array) -> None:
    """It is sent back."""
    told = request(x, samples=1)
    told.id = "é" * 4096
    assert bare.infer(told).id == told.id
    for id_ in ("é" * 4097, "a" * 1_000_000):
        told.id = id_
        code, text = refusal(lambda: bare.infer(told))
        assert (code, text) == (Code.INVALID_ARGUMENT, "the id has more than 4096 characters.")


def test_numbers_with_a_field_each_are_limited(bare: Bare) -> None:
    """Each would become an object of the server's, of a hundred times its two bytes."""
    pixels = 2_000_000
    told = request(np.zeros(0), "UINT8", samples=0)
    del told.raw_input_contents[:]
    told.inputs[0].shape[:] = [1, pixels // 1000, 1000]
    one = framed(CONTENTS, b"\x20\x01" * pixels)  # uint_contents, not packed
    inner = told.inputs[0].SerializeToString() + one
    told.ClearField("inputs")
    code, text = refusal(lambda: bare.infer(told.SerializeToString() + framed(INPUTS, inner)))
    assert code == Code.RESOURCE_EXHAUSTED
    assert "more than 4,352 fields" in text


def test_many_small_pictures_are_refused_before_they_are_fitted(bare: Bare) -> None:
    code, text = refusal(lambda: bare.infer(request(np.zeros((4096, 1, 5), np.uint8), "UINT8", samples=1024)))
    assert code == Code.RESOURCE_EXHAUSTED
    assert "rows × draws" in text


def test_asyncio_client(served: Live, client: Any, x: Array) -> None:
    expected = client.infer("digits", [input_of(x)], parameters={"samples": 20, "seed": 5}).as_numpy("probabilities")

    async def ask() -> None:
        async with triton_aio.InferenceServerClient(served.grpc) as other:
            assert await other.is_server_ready()
            asks = [other.infer("digits", [input_of(x)], parameters={"samples": 20, "seed": 5}) for _ in range(20)]
            for result in await asyncio.gather(*asks):
                np.testing.assert_array_equal(result.as_numpy("probabilities"), expected)

    asyncio.run(ask())


def test_kserve_client(served: Live, http: Any, x: Array) -> None:
    """KServe's `InferenceGRPCClient`, unchanged."""
    types, expected = kserve().protocol.infer_type, over_http(http, x, samples=20, seed=9)

    async def ask(binary: bool) -> Any:
        inside = kserve().inference_client.InferenceGRPCClient(served.grpc)
        tensor = types.InferInput("input", list(x.shape), "FP32", data=None if binary else x.reshape(-1).tolist())
        if binary:
            tensor.set_data_from_numpy(x, binary_data=True)
        told = types.InferRequest("digits", [tensor], request_id="mine", parameters={"samples": 20, "seed": 9})
        assert await inside.is_server_live()
        assert await inside.is_server_ready()
        assert await inside.is_model_ready("digits")
        reply = await inside.infer(told)
        await inside.close()
        return reply

    for binary in (True, False):
        reply = asyncio.run(ask(binary))
        assert (reply.id, reply.model_name, reply.model_version) == ("mine", "digits", "1")
        for output in reply.outputs:
            np.testing.assert_array_equal(output.as_numpy(), expected.as_numpy(output.name))


# refusals

ERRORS: dict[str, tuple[Callable[[Any, Array], object], str]] = {
    "unknown model": (lambda c, x: c.infer("nobody", [input_of(x)]), "NOT_FOUND] no such model is served"),
    "unknown version": (lambda c, x: c.infer("digits", [input_of(x)], "7"), "NOT_FOUND] .*it is in version 1"),
    "metadata": (lambda c, x: c.get_model_metadata("nobody"), "NOT_FOUND] no such model"),
    "unknown input": (lambda c, x: c.infer("digits", [input_of(x, name="x")]), "INVALID_ARGUMENT] inputs are 'x'"),
    "two inputs": (
        lambda c, x: c.infer("digits", [input_of(x), input_of(x, name="y")]),
        "INVALID_ARGUMENT] inputs are 'input, y'",
    ),
    "one twice": (lambda c, x: c.infer("digits", [input_of(x), input_of(x)]), "INVALID_ARGUMENT] .*twice"),
    "shape": (lambda c, x: c.infer("digits", [input_of(x[:, :, :7])]), r"INVALID_ARGUMENT] .*\(3, 1, 7, 8\).*8, 8\)"),
    "no rows": (lambda c, x: c.infer("digits", [input_of(x[:0])]), r"INVALID_ARGUMENT] .*expected at least one row"),
    "NaN": (lambda c, x: c.infer("digits", [input_of(x * np.nan)]), "INVALID_ARGUMENT] input 0 holds NaN"),
    "output": (
        lambda c, x: c.infer("digits", [input_of(x)], outputs=[triton.InferRequestedOutput("logits")]),
        "INVALID_ARGUMENT] this model has no output 'logits'; it has probabilities",
    ),
    "samples": (
        lambda c, x: c.infer("digits", [input_of(x)], parameters={"samples": -1}),
        "INVALID_ARGUMENT] samples is -1; expected",
    ),
    "rows": (lambda c, x: c.infer("digits", [input_of(np.zeros((5000, 1, 8, 8), "f"))]), "RESOURCE_EXHAUSTED] input"),
    "timeout": (
        lambda c, x: c.infer("digits", [input_of(x)], parameters={"samples": 1024}, timeout=1000),
        r"DEADLINE_EXCEEDED] no answer within 0.00\d s",
    ),
    "loading": (lambda c, x: c.load_model("nobody"), "NOT_FOUND] no such model in the repository"),
    "unloading": (lambda c, x: c.unload_model("nobody"), "NOT_FOUND] no such model is served"),
    "no such method": (lambda c, x: c.get_model_config("digits"), "UNIMPLEMENTED] "),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_read_by_the_client(client: Any, x: Array, case: str) -> None:
    ask, said = ERRORS[case]
    with pytest.raises(InferenceServerException) as caught:
        ask(client, x)
    assert re.match(rf"\[StatusCode\.{said}", str(caught.value)), str(caught.value)


def wrongs(x: Array) -> dict[str, tuple[Any, str]]:
    plain, empty = request(x), message_class("ModelInferRequest")(model_name="digits")
    kind, twice, both, short, none, other = (message_class("ModelInferRequest")() for _ in range(6))
    for one in (kind, twice, both, short, none, other):
        one.CopyFrom(plain)
    kind.inputs[0].datatype = "FP8"
    twice.raw_input_contents.append(b"")
    both.inputs[0].contents.fp32_contents.append(1.0)
    short.raw_input_contents[0] = short.raw_input_contents[0][:-4]
    del none.raw_input_contents[:]
    del other.raw_input_contents[:]
    other.inputs[0].contents.fp64_contents.extend([0.0] * 192)
    small = request((np.arange(192) % 3).reshape(3, 1, 8, 8).astype(np.int64), "INT64", raw=False)
    small.inputs[0].datatype = "INT8"
    large = request(np.full((3, 1, 8, 8), 300), "INT32", raw=False)
    large.inputs[0].datatype = "INT8"
    unset = request(x)
    unset.parameters["samples"].SetInParent()
    return {
        "no inputs": (empty, "inputs is empty"),
        "datatype": (kind, "datatype 'FP8'; expected BOOL, UINT8"),
        "two raw tensors": (twice, "raw_input_contents has 2 tensors; expected one"),
        "raw and typed": (both, "both contents and raw_input_contents"),
        "too few bytes": (short, r"says 764 bytes; its shape \[3, 1, 8, 8\] of FP32 takes 768"),
        "no numbers": (none, r"has 0 numbers; its shape \[3, 1, 8, 8\] takes 192"),
        "numbers in another field": (other, "in fp64_contents; FP32 is in fp32_contents"),
        "integers in another field": (small, "in int64_contents; INT8 is in int_contents"),
        "a number too large": (large, "are no array of INT8"),
        "no value": (unset, "the parameter 'samples' of the request is null"),
        "no message": (b"\xff\xff\xff", "no fields of a protobuf message"),
        "cut short": (plain.SerializeToString()[:-1], "no fields of a protobuf message"),
        "a group": (b"\x0b\x0c", "no fields of a protobuf message"),
        "no text": (b"\x0a\x02\xff\xfe", "no fields of a protobuf message"),
        "an endless integer": (b"\x08" + b"\xff" * 30, "no fields of a protobuf message"),
    }


@pytest.mark.parametrize("case", wrongs(np.zeros((3, 1, 8, 8), np.float32)))
def test_wrong_messages(bare: Bare, x: Array, case: str) -> None:
    told, said = wrongs(x)[case]
    code, text = refusal(lambda: bare.infer(told))
    assert code == Code.INVALID_ARGUMENT
    assert re.search(said, text), text


def test_many_small_things_are_refused_at_once(bare: Bare, served: Live) -> None:
    """Messages that would take many times their size in memory, or more than linear time, once parsed."""
    name, million = b"\x0a\x06digits", 1_000_000
    shape = b"\x2a" + _length(b"\x1a" + _length(b"\x01" * million) + b"\x01" * million)
    many = {
        "inputs": name + b"\x2a\x00" * million,
        "named inputs": name + b"\x2a\x07\x0a\x05input" * 60_000,
        "outputs": name + b"\x32\x00" * million,
        "parameters": name + b"\x22\x00" * million,
        "unknown fields": name + b"\x78\x00" * million,
        "raw contents": name + b"\x3a\x00" * million,
        "shape": name + shape + b"\x1a" + _length(b"\x01" * million) + b"\x01" * million,
    }
    before = memory_of(served)
    for what, message in many.items():
        code, text = refusal(partial(bare.infer, message))
        assert code == Code.RESOURCE_EXHAUSTED, what
        assert re.search("more than 256 fields|bytes besides its tensors", text), what
    assert memory_of(served) - before < 64 << 20
    typed = b"\x2a" + _length(b"\x42\x00" * million) + b"\x42\x00" * million  # a million empty elements
    tensor = b"\x0a\x05input\x12\x05BYTES\x1a\x01\x02" + typed
    code, _ = refusal(lambda: bare.infer(name + b"\x2a" + _length(tensor) + tensor))
    assert code == Code.RESOURCE_EXHAUSTED


def memory_of(live: Live) -> int:
    import psutil

    found: int = psutil.Process(live.pid).memory_info().rss
    return found


def test_too_large_messages(served: Live, serve: Serve, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    """Beyond body_bytes grpc itself refuses; beyond what the model can take, we do."""
    with Bare(served.grpc) as bare:
        code, text = refusal(partial(bare.infer, too_large()))
        assert (code, "larger than max" in text) == (Code.RESOURCE_EXHAUSTED, True)
    server = serve(make_artifact(tmp_path / "m.safetensors"), "--grpc-port", "0", "--set", "max_rows=8")
    with Bare(server.grpc) as bare:
        assert len(bare.infer(request(np.zeros((8, 4), np.float32), model="m")).outputs) > 3
        code, text = refusal(lambda: bare.infer(request(np.zeros((40_000, 4), np.float32), model="m")))
        assert (code, "for this model at most 65,856 are taken" in text) == (Code.RESOURCE_EXHAUSTED, True)
        code, text = refusal(lambda: bare.infer(request(np.zeros((9, 4), np.float32), model="m")))
        assert (code, "at most 32 elements" in text) == (Code.RESOURCE_EXHAUSTED, True)


def test_nothing_of_the_inside_is_shown(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, "--grpc-port", "0", **environment)
    told = request(np.array([[codes.FAILS, 0, 0, 1]], np.float32), model="fragile")
    with Bare(server.grpc, [("x-request-id", "my-own-1")]) as bare, pytest.raises(grpc.RpcError) as caught:
        bare.infer(told)
    error: Any = caught.value
    assert error.code() == Code.INTERNAL
    assert "the server's log has the reason" in error.details()
    assert dict(error.trailing_metadata())["x-request-id"] == "my-own-1"
    assert eventually(lambda: '"message":"request"' in server.log.read_text())
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (failed,) = (line for line in lines if line["message"] == "request failed")
    assert (failed["request"], "a secret in /some/path" in failed["exception"]) == ("my-own-1", True)
    (logged,) = (line for line in lines if line["message"] == "request")
    assert (logged["method"], logged["path"], logged["status"]) == ("gRPC", f"/{SERVICE}/ModelInfer", 500)
    assert (logged["model"], logged["version"], logged["rows"]) == ("fragile", "1", 1)


def test_metrics_count_both(served: Live, client: Any, http: Any, x: Array) -> None:
    def count() -> float:
        text = httpx.get(f"{served.url}/metrics").text
        found = re.search(r'dubito_request_seconds_count{model="digits",outcome="ok"} (\S+)', text)
        assert found is not None
        return float(found[1])

    before = count()
    client.infer("digits", [input_of(x)])
    over_http(http, x)
    assert count() == before + 2


# deadlines, cancellation, limits


def work_of(server: Live) -> float:
    found = re.search(r"dubito_queue_depth{.*} (\S+)", httpx.get(f"{server.url}/metrics").text)
    assert found is not None
    return float(found[1])


def slow(model: str = "fragile", samples: int = 20) -> Any:
    return request(np.array([[codes.SLOW, 0, 0, 1]], np.float32), model=model, samples=samples)


def test_deadlines_and_cancellations_reach_the_queue(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, "--grpc-port", "0", "--set", "batch_work=20", **environment)  # one request a batch
    with Bare(server.grpc) as bare:
        first = bare.method("ModelInfer").future(slow(), timeout=60)
        assert eventually(lambda: "dubito_queue_depth" in httpx.get(f"{server.url}/metrics").text)
        waiting = [bare.method("ModelInfer").future(slow(), timeout=60) for _ in range(6)]
        assert eventually(lambda: work_of(server) >= 4)
        for one in waiting:
            one.cancel()
        assert eventually(lambda: work_of(server) == 0)
        assert len(first.result().outputs) > 3
        late = [bare.method("ModelInfer").future(slow(), timeout=0.3) for _ in range(8)]
        ends = {one.code() for one in late}
        assert Code.DEADLINE_EXCEEDED in ends
        assert ends <= {Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.OK}
        assert eventually(lambda: work_of(server) == 0)
        zeros = request(np.zeros((1, 4), np.float32), model="fragile")
        assert len(bare.infer(zeros).outputs) > 3
    assert eventually(lambda: server.log.read_text().count('"status":499') >= 6)
    logged = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert not [line for line in logged if line["level"] not in ("info", "warning")]


def test_so_many_at_once_and_no_more(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    server = serve(path, "--grpc-port", "0", "--set", "max_requests=2", **environment)
    with Bare(server.grpc) as bare:
        calls = [bare.method("ModelInfer").future(slow(), timeout=60) for _ in range(8)]
        ended = {one.code() for one in calls}
        assert ended == {Code.OK, Code.RESOURCE_EXHAUSTED}
        (refused, *_) = (one for one in calls if one.code() == Code.RESOURCE_EXHAUSTED)
        assert dict(refused.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


def test_a_message_that_does_not_come(unusual: Live) -> None:
    """Half calls are ended; those of one address beyond a few at once, and none keeps others from an answer."""
    done = threading.Event()

    def nothing() -> Iterator[bytes]:
        done.wait(30)
        yield b""

    with Bare(unusual.grpc) as bare:
        method = bare.channel.stream_unary(f"/{SERVICE}/ModelInfer")
        calls = [method.future(nothing(), timeout=60) for _ in range(40)]
        assert len(bare.infer(request(np.zeros((1, 1, 8, 8), np.float32))).outputs) > 3
        ended = [one.code() for one in calls]
        done.set()
    assert ended.count(Code.RESOURCE_EXHAUSTED) == 32
    assert ended.count(Code.DEADLINE_EXCEEDED) == 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call_over_http2(stream: int, message: bytes) -> bytes:
    """HEADERS and DATA of a call, in the simplest encoding."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/ModelInfer", ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    literal = b"".join(bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    return frame(1, 4, stream, literal) + frame(0, 1, stream, b"\0" + len(message).to_bytes(4, "big") + message)


def test_who_does_not_take_replies_gets_no_more(serve: Serve, small_digits: Path) -> None:
    """A client of HTTP/2 with a window of nothing: its replies pile up to a bound, and go when it goes."""
    server = serve(small_digits, "--grpc-port", "0", "--set", "body_bytes=100000", "--set", "max_rows=64")
    told = request(np.zeros((20, 1, 8, 8), np.float32), samples=0)  # 5 kB, answered by 2 kB
    size = len(told.SerializeToString())
    host, port = server.grpc.split(":")
    with Bare(server.grpc) as bare, socket.create_connection((host, int(port))) as stuck:
        reply = len(bare.infer(told).SerializeToString())
        stuck.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"\x00\x04\0\0\0\0"))
        many = 100_000 // reply + 5
        assert many * reply > 100_000 > 10 * size
        for i in range(many):
            stuck.sendall(call_over_http2(2 * i + 1, told.SerializeToString()))
            time.sleep(0.01)  # within the window of the connection
        assert eventually(lambda: is_refused(bare, told))
        stuck.close()
        assert eventually(lambda: not is_refused(bare, told))


def is_refused(bare: Bare, told: Any) -> bool:
    try:
        bare.infer(told)
    except grpc.RpcError as error:
        found: Any = error
        return found.code() == Code.RESOURCE_EXHAUSTED and "replies are not taken yet" in found.details()
    return False


# keys, TLS, health, reflection


def test_keys_are_those_of_http(serve: Serve, x: Array, small_digits: Path) -> None:
    keys = json.dumps({"alice": hash_key("secret of alice")})
    server = serve(small_digits, "--grpc-port", "0", DUBITO_API_KEYS=keys)
    wrong: list[tuple[str, str]] = [("authorization", "Bearer wrong"), ("authorization", hash_key("secret of alice"))]
    for metadata in ([], *([one] for one in wrong)):
        with Bare(server.grpc, metadata) as bare:
            for name in ("ModelMetadata", "ServerMetadata", "ModelReady", "RepositoryIndex", "RepositoryModelUnload"):
                assert refusal(partial(bare.call, name))[0] == Code.UNAUTHENTICATED
            code, text = refusal(lambda: bare.infer(request(x)))
            assert (code, "no API key came" in text) == (Code.UNAUTHENTICATED, True)
            assert bare.call("ServerLive").live
            assert bare.call("ServerReady").ready
            assert health(bare.channel) == "SERVING"
    for metadata in ([("authorization", "Bearer secret of alice")], [("x-api-key", "secret of alice")]):
        with Bare(server.grpc, metadata) as bare:
            assert len(bare.infer(request(x)).outputs) > 3
            assert bare.call("ModelReady", message_class("ModelReadyRequest")(name="digits")).ready
    with triton.InferenceServerClient(server.grpc) as client:
        headers = {"authorization": "Bearer secret of alice"}
        assert client.infer("digits", [input_of(x)], headers=headers).as_numpy("class").shape == (3,)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*made, "-keyout", key, "-out", chain, *names], check=True, capture_output=True)
    return chain, key


def test_tls(serve: Serve, certificate: tuple[Path, Path], x: Array, small_digits: Path) -> None:
    chain, key = certificate
    files = ("--set", f"grpc_certificate={chain}", "--set", f"grpc_key={key}")
    server = serve(small_digits, "--grpc-port", "0", *files)
    trusting = grpc.ssl_channel_credentials(chain.read_bytes())
    with Bare("", channel=grpc.secure_channel(server.grpc, trusting)) as bare:
        assert len(bare.infer(request(x)).outputs) > 3
    with triton.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(chain)) as client:
        assert client.is_server_ready()
    with Bare(server.grpc) as bare:
        assert refusal(lambda: bare.call("ServerLive", timeout=5))[0] == Code.UNAVAILABLE


@pytest.mark.parametrize("given", [("grpc_certificate=chain.pem",), ("grpc_key=key.pem",)])
def test_tls_needs_both_files(given: tuple[str, ...]) -> None:
    answer = forked.run("serve", "--grpc-port", "0", "--port", "0", *(w for one in given for w in ("--set", one)))
    assert answer.returncode == 2
    assert "grpc_certificate and grpc_key belong together" in answer.stderr


def health(channel: Any, service: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_health(bare: Bare) -> None:
    assert health(bare.channel) == health(bare.channel, SERVICE) == "SERVING"
    assert refusal(lambda: health(bare.channel, "nobody"))[0] == Code.NOT_FOUND
    watch = health_pb2_grpc.HealthStub(bare.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    watch = health_pb2_grpc.HealthStub(bare.channel).Watch(health_pb2.HealthCheckRequest(service="x"), timeout=60)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_streams_are_few(bare: Bare) -> None:
    stub = health_pb2_grpc.HealthStub(bare.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(16)]
    assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.SERVING] * 16
    one_more = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert refusal(lambda: next(one_more))[0] == Code.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()
    assert eventually(lambda: next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)).status == 1)


def test_reflection(bare: Bare) -> None:
    database = reflected.ProtoReflectionDescriptorDatabase(bare.channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    assert database.FindFileContainingSymbol(SERVICE) == file_of_ours()
    assert database.FindFileContainingSymbol("inference.ModelInferRequest").name == FILE
    newer = bare.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    replies = list(newer(iter([b"\x3a\x00"]), timeout=60))  # list_services
    assert SERVICE.encode() in replies[0]


# models and the life of the server


def test_repository(serve: Serve, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "models"
    make_artifact(root / "plants" / "1" / "model.safetensors")
    make_artifact(root / "prices" / "3" / "model.safetensors", kind="regression")
    keys = json.dumps({"alice": hash_key("secret")})
    server = serve(root, "--grpc-port", "0", "--set", "repository_api=true", DUBITO_API_KEYS=keys)
    headers = {"authorization": "Bearer secret"}
    x = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    with triton.InferenceServerClient(server.grpc) as client:
        rows = client.get_model_repository_index(headers).models
        assert [(r.name, r.version, r.state) for r in rows] == [("plants", "1", "READY"), ("prices", "3", "READY")]
        client.unload_model("plants", headers)
        assert not client.is_model_ready("plants", headers=headers)
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            client.infer("plants", [input_of(x)], headers=headers)
        make_artifact(root / "plants" / "2" / "model.safetensors", seed=1)
        client.load_model("plants", headers)
        assert client.is_model_ready("plants", "2", headers=headers)
        assert client.infer("plants", [input_of(x)], "2", headers=headers).get_response().model_version == "2"
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*load takes no parameter 'config'"):
            client.load_model("plants", headers, config="{}")
        broken = root / "plants" / "10" / "model.safetensors"
        broken.parent.mkdir()
        broken.write_bytes(b"no artifact")
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*cannot be loaded: plants/10/") as caught:
            client.load_model("plants", headers)
        assert str(tmp_path) not in str(caught.value)
        (reason,) = (r.reason for r in client.get_model_repository_index(headers).models if r.version == "10")
        assert reason
        outputs = [triton.InferRequestedOutput(name) for name in ("mean", "interval", DRAWS)]
        given: dict[str, Any] = {"outputs": outputs, "parameters": {"samples": 8, "seed": 1}, "headers": headers}
        result = client.infer("prices", [input_of(x)], **given)
        assert (result.as_numpy(DRAWS).shape, result.as_numpy("interval").shape) == ((2, 8, 2), (2, 2, 2))
    with Bare(server.grpc, [("authorization", "Bearer secret")]) as bare:  # in KServe's messages the name is field 1
        assert bare.call("RepositoryModelUnload", b"\x0a\x06prices").isUnloaded
        assert not bare.call("ModelReady", message_class("ModelReadyRequest")(name="prices")).ready
        assert bare.call("RepositoryModelLoad", b"\x0a\x06prices").isLoaded
        index = message_class("RepositoryIndexRequest")(ready=True)
        assert {row.name for row in bare.call("RepositoryIndex", index).models} == {"plants", "prices"}


def test_a_repository_that_may_not_be_changed(unusual: Live) -> None:
    with triton.InferenceServerClient(unusual.grpc) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="repository_api"):
                change("digits")
        assert client.is_model_ready("digits")


def test_a_switch_of_versions_under_load(serve: Serve, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    """Every call is answered by one version, to the bit as that version answers alone."""
    root = tmp_path / "models"
    make_artifact(root / "m" / "1" / "model.safetensors", seed=1)
    keys = json.dumps({"alice": hash_key("secret")})
    server = serve(root, "--grpc-port", "0", "--set", "repository_api=true", DUBITO_API_KEYS=keys)
    x = np.random.default_rng(3).normal(size=(2, 4)).astype(np.float32)
    told, stop = request(x, model="m", samples=8, seed=3), threading.Event()
    with Bare(server.grpc, [("authorization", "Bearer secret")]) as bare, ThreadPoolExecutor(6) as pool:
        alone = {"1": output_of(bare.infer(told), "probabilities")}

        def ask() -> list[tuple[str, Array]]:
            found = []
            while not stop.is_set():
                reply = bare.infer(told)
                found.append((reply.model_version, output_of(reply, "probabilities")))
            return found

        asking = [pool.submit(ask) for _ in range(6)]
        for version in ("2", "3"):
            make_artifact(root / "m" / version / "model.safetensors", seed=int(version))
            bare.call("RepositoryModelLoad", message_class("RepositoryModelLoadRequest")(model_name="m"))
            alone[version] = output_of(bare.infer(told), "probabilities")
        stop.set()
        replies = [reply for one in asking for reply in one.result()]
    assert {version for version, _ in replies} == {"1", "2", "3"}
    for version, probabilities in replies:
        np.testing.assert_array_equal(probabilities, alone[version])


def test_sigterm_drains(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    """Health turns first, what was accepted is answered, and the exit code says so."""
    path, environment = fragile
    server = serve(path, "--grpc-port", "0", "--set", "linger_seconds=1", **environment)
    with Bare(server.grpc) as bare:
        watch = health_pb2_grpc.HealthStub(bare.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        calls = [bare.method("ModelInfer").future(slow(), timeout=60) for _ in range(6)]
        assert eventually(lambda: server.log.read_text() != "" and work_of(server) >= 0)
        server.send(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not bare.call("ServerReady").ready
        assert [one.code() for one in calls] == [Code.OK] * 6
    assert server.wait() == 0


def test_who_is_cut_off_shows_in_the_exit_code(serve: Serve, fragile: tuple[Path, dict[str, str]]) -> None:
    path, environment = fragile
    limits = ("--set", "linger_seconds=0", "--set", "drain_seconds=0.2", "--set", "batch_work=20")
    server = serve(path, "--grpc-port", "0", *limits, **environment)
    with Bare(server.grpc) as bare:
        calls = [bare.method("ModelInfer").future(slow(), timeout=60) for _ in range(12)]  # 0.25 s each
        assert eventually(lambda: work_of(server) >= 8)
        server.send(signal.SIGTERM)
        ends = {one.code() for one in calls}
        assert ends & {Code.CANCELLED, Code.UNAVAILABLE}
        assert ends <= {Code.CANCELLED, Code.UNAVAILABLE, Code.OK}
    assert server.wait() == 1


# the command


def test_one_line_without_the_extra(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['grpc_reflection'] = None; {forked.DUBITO}"
    answer = forked.run("serve", "--grpc-port", "0", "--port", "0", code=code)
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert line.endswith("grpc_reflection is not installed; install the extra grpc: pip install 'dubito[grpc]'")


def test_a_port_that_is_taken(served: Live) -> None:
    port = served.grpc.rpartition(":")[2]
    answer = forked.run("serve", "--grpc-port", port, "--port", "0")
    assert answer.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}, for gRPC; take another --grpc-port" in answer.stderr


def test_without_the_flag_grpc_is_not_even_imported() -> None:
    code = f"import sys\ntry:\n    {forked.DUBITO}\nfinally:\n    print('grpc' in sys.modules)"
    assert forked.run("serve", "--print-settings", code=code).stdout.splitlines()[-1] == "False"
