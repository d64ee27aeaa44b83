"""Bodies that lie, break off, burst or make no sense: each is refused in words, and the next good one is answered."""

import base64
import gzip
import io
import json
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.examples import at_most
from tests.service.conftest import Live, Serve

V1, V2 = "/v1/models/digits/predict", "/v2/models/digits/infer"
LENGTH = "inference-header-content-length"
X = np.linspace(-1, 1, 64, dtype="<f4").reshape(1, 1, 8, 8)
HUGE = (1 << 40) - 1
many = settings(
    max_examples=at_most(50), derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
few = settings(many, max_examples=at_most(20))
PLACES = [place for place in map(str, (sys.prefix, Path.cwd(), Path.home(), tempfile.gettempdir())) if len(place) > 1]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    """One connection, kept; at the end the server still answers."""
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client
        check_good(client)
        assert client.get("/v2/health/live").json() == {"live": True}


def check_good(client: httpx.Client) -> None:
    good = client.post(V2, content=framed(header(), X.tobytes())[0], headers={LENGTH: str(len(dumped(header())))})
    assert good.status_code == 200
    again = client.post(V1, json={"inputs": X.tolist(), "samples": 2})
    assert again.status_code == 200
    assert len(again.json()["predictions"]) == 1


def header(**changes: Any) -> Json:
    """Of a good binary request, with changes to the fields of the request or of its tensor."""
    tensor: Json = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": 256}
    tensor |= {key: value for key, value in changes.items() if key in ("name", "shape", "datatype", "data")}
    if "size" in changes:
        tensor["parameters"] = {"binary_data_size": changes["size"]}
    rest: Json = {key: changes[key] for key in ("id", "parameters", "outputs") if key in changes}
    told: Json = {"inputs": [tensor], "parameters": {"samples": 1}, **rest}
    if "inputs" in changes:
        told["inputs"] = changes["inputs"]
    return told


def dumped(told: object) -> bytes:
    """With NaN and Infinity, as Python's own JSON writes them."""
    return json.dumps(told).encode()


def framed(told: object, blob: bytes) -> tuple[bytes, dict[str, str]]:
    head = dumped(told)
    return head + blob, {LENGTH: str(len(head))}


def answered(reply: httpx.Response, *statuses: int) -> str:
    """What an error says: in one sentence or two, without paths and tracebacks, as each protocol has it."""
    assert reply.status_code < 500, reply.text
    if statuses:
        assert reply.status_code in statuses, f"{reply.status_code}: {reply.text[:300]}"
    if reply.status_code == 200:
        return ""
    told = reply.json()
    if reply.request.url.path.startswith("/v2"):
        assert list(told) == ["error"]
        said = told["error"]
    else:
        assert reply.headers["content-type"] == "application/problem+json"
        assert list(told) == ["type", "title", "status", "detail"]
        assert told["status"] == reply.status_code
        said = told["detail"]
    assert isinstance(said, str)
    assert 10 < len(said) < 500
    assert not any(word in said for word in ("Traceback", "File ", ".py", "object at 0x", *PLACES))
    return said


def post(client: httpx.Client, told: object, blob: bytes = b"", *statuses: int) -> str:
    body, headers = framed(told, blob)
    return answered(client.post(V2, content=body, headers=headers), *statuses)


# The binary framing of /v2

GOOD = dumped(header())


@many
@given(
    length=st.one_of(st.integers(-10, 400).map(str), st.text("0123456789+-.xeE٣", max_size=25)),
    cut=st.integers(0, 300),
)
def test_header_lengths_that_lie(http: httpx.Client, length: str, cut: int) -> None:
    body = GOOD + X.tobytes()[:cut]
    reply = http.post(V2, content=body, headers={LENGTH.encode(): length.encode()})
    true = length.strip() == str(len(GOOD)) and cut == 256
    answered(reply, 200 if true else 400)


@many
@given(at=st.integers(0, len(GOOD) + 255))
def test_truncated_bodies(http: httpx.Client, at: int) -> None:
    body = (GOOD + X.tobytes())[:at]
    answered(http.post(V2, content=body, headers={LENGTH: str(len(GOOD))}), 400)


@many
@given(more=st.binary(min_size=1, max_size=300))
def test_bodies_with_more_behind(http: httpx.Client, more: bytes) -> None:
    said = answered(http.post(V2, content=GOOD + X.tobytes() + more, headers={LENGTH: str(len(GOOD))}), 400)
    assert f"{len(more)} bytes follow" in said


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(-2, 1 << 66), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=2),
)
sizes = st.one_of(st.integers(0, 8), st.sampled_from([HUGE, HUGE + 1, 1 << 32, (1 << 63) - 1, 1 << 64, -1]))
shapes = st.lists(sizes, max_size=9)
kinds = st.sampled_from(["BOOL", "UINT8", "INT8", "UINT64", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16", "fp32"])


@many
@given(shape=shapes, kind=kinds, size=st.integers(-1, 600), blob=st.binary(max_size=600))
def test_shapes_and_sizes_that_lie(http: httpx.Client, shape: list[int], kind: str, size: int, blob: bytes) -> None:
    told = header(shape=shape, datatype=kind, size=size)
    post(http, told, blob)
    post(http, told, bytes(max(0, size)))


@pytest.mark.parametrize(
    "shape",
    [
        [HUGE, HUGE],
        [HUGE] * 8,
        [1 << 32, 1 << 32],
        [0, HUGE],
        [0, HUGE, HUGE],
        [1, 1, 8, 8, 0],
        [],
        [64],
        [1] * 9,
        [-1, 1, 8, 8],
        [1.0, 1, 8, 8],
        [True, 1, 8, 8],
        ["1", 1, 8, 8],
        [[1], 1, 8, 8],
        [None],
        None,
        "1,1,8,8",
        {"0": 1},
        64,
    ],
    ids=str,
)
def test_absurd_shapes(http: httpx.Client, shape: Any) -> None:
    post(http, header(shape=shape), X.tobytes(), 400)
    told = header(shape=shape, data=X.ravel().tolist())
    del told["inputs"][0]["parameters"]
    answered(http.post(V2, content=dumped(told)), 400)
    post(http, header(shape=shape, size=0), b"", 400)
    told["inputs"][0]["data"] = []
    answered(http.post(V2, content=dumped(told)), 400)
    for size in (0, 256):
        post(http, header(shape=shape, datatype="BYTES", size=size), bytes(size), 400, 413)


FIELDS = ("id", "parameters", "outputs", "inputs", "name", "shape", "datatype", "data", "size")


@many
@given(field=st.sampled_from(FIELDS), value=odd)
def test_wrong_types_in_every_field(http: httpx.Client, field: str, value: Any) -> None:
    post(http, header(**{field: value}), X.tobytes())


@many
@given(
    key=st.sampled_from(["samples", "seed", "max_samples", "tolerance", "timeout", "timeout_ms", "binary_data_output"]),
    value=odd,
)
def test_wrong_types_in_every_parameter(http: httpx.Client, key: str, value: Any) -> None:
    if key.startswith("timeout"):  # a short one is no error of the request
        if isinstance(value, int):
            value = -value if value > 0 else value
        elif isinstance(value, str) and value.strip().isdecimal():
            value = f"-{value}"
    post(http, header(parameters={"samples": 1, key: value}), X.tobytes())
    flag = {"name": "class", "parameters": {"binary_data": value}}
    post(http, header(outputs=[flag]), X.tobytes())


tree = st.recursive(odd, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@many
@given(data=tree, kind=kinds)
def test_data_that_are_no_tensor(http: httpx.Client, data: Any, kind: str) -> None:
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": kind, "data": data}
    answered(http.post(V2, content=dumped({"inputs": [tensor]})), 400)
    answered(http.post(V1, content=dumped({"inputs": data}), headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("UINT8", 1.5), ("UINT8", -1), ("UINT8", 256), ("INT8", 128), ("INT64", 0.1), ("BOOL", 2), ("BOOL", "yes"),
     ("INT32", None), ("FP32", "x"), ("FP32", None), ("FP32", 1e39), ("FP64", 1e300), ("FP16", 0)],
)  # fmt: skip
def test_numbers_that_are_none_of_their_datatype(http: httpx.Client, kind: str, wrong: Any) -> None:
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": kind, "data": [0] * 63 + [wrong]}
    assert "input" in answered(http.post(V2, json={"inputs": [tensor]}), 400)


@pytest.mark.parametrize("kind", ["INT64", "UINT64", "INT32", "UINT8"])
def test_the_largest_numbers_of_a_datatype(http: httpx.Client, kind: str) -> None:
    """Also those that float64 rounds."""
    limits = np.iinfo(kind.lower())
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": kind}
    for number in (int(limits.min), int(limits.max)):
        answered(http.post(V2, json={"inputs": [tensor | {"data": [0] * 63 + [number]}]}), 200, 422)
    for beyond in (1, 999, int(limits.max)):
        far = tensor | {"data": [0] * 63 + [int(limits.max) + beyond]}
        assert f"no array of {kind}" in answered(http.post(V2, json={"inputs": [far]}), 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "1e39", "null"])
def test_numbers_that_are_not_finite(http: httpx.Client, value: str) -> None:
    numbers = ",".join(["0"] * 63 + [value])
    text = '{"inputs":[{"name":"input","shape":[1,1,8,8],"datatype":"FP32","data":[' + numbers + "]}]}"
    answered(http.post(V2, content=text), 400)
    rows = f"[[{','.join('[' + ','.join(['0'] * 7 + [value]) + ']' for _ in range(8))}]]"
    answered(http.post(V1, content='{"inputs":' + rows + "}"), 400)
    number = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}.get(value, np.nan)
    body, headers = framed(header(), np.full((1, 1, 8, 8), number, "<f4").tobytes())
    assert "NaN, infinity" in answered(http.post(V2, content=body, headers=headers), 400)
    body, headers = framed(header(datatype="FP64", size=512), np.full((1, 1, 8, 8), 1e300, "<f8").tobytes())
    assert "too large for float32" in answered(http.post(V2, content=body, headers=headers), 400)


def test_duplicated_inputs(http: httpx.Client) -> None:
    tensor = header()["inputs"][0]
    assert "comes twice" in post(http, header(inputs=[tensor, tensor]), X.tobytes() * 2, 400)
    body = GOOD.replace(b'"name": "input"', b'"name": "other", "name": "input"')  # the last of two keys counts
    answered(http.post(V2, content=body + X.tobytes(), headers={LENGTH: str(len(body))}), 200)
    wrong: list[Any] = [[], None, {}, [tensor, None], [[tensor]], [tensor | {"data": [0.0] * 64}]]
    for inputs in wrong:
        post(http, header(inputs=inputs), X.tobytes(), 400)


@many
@given(
    elements=st.lists(
        st.tuples(st.integers(0, 1 << 32).map(lambda n: n % (1 << 32)), st.binary(max_size=40)), max_size=5
    ),
    count=sizes,
)
def test_elements_that_lie_about_their_length(
    http: httpx.Client, elements: list[tuple[int, bytes]], count: int
) -> None:
    blob = b"".join(struct.pack("<I", size) + raw for size, raw in elements)
    post(http, header(shape=[count], datatype="BYTES", size=len(blob)), blob, 400, 413)


def test_millions_of_empty_elements(http: httpx.Client) -> None:
    n = 4 << 20
    said = post(http, header(shape=[n], datatype="BYTES", size=4 * n), bytes(4 * n), 413)
    assert f"{n} inputs came; at most 4096" in said


@many
@given(seed=st.integers(0, 1 << 32))
def test_flipped_bytes(http: httpx.Client, seed: int) -> None:
    rng = random.Random(seed)
    body = bytearray(GOOD + X.tobytes())
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    answered(http.post(V2, content=bytes(body), headers={LENGTH: str(len(GOOD))}))


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_nested_without_end(http: httpx.Client, depth: int, pair: str) -> None:
    start = "[" if pair == "[]" else '{"a":'
    deep = start * depth + "1" + pair[1] * depth
    for told in (
        deep,
        '{"inputs":' + deep + "}",
        '{"inputs":[{"name":"input","shape":[1],"datatype":"FP32","data":' + deep + "}]}",
        '{"inputs":[],"parameters":' + deep + "}",
    ):
        answered(http.post(V2, content=told), 400)
        answered(http.post(V1, content=told, headers={"content-type": "application/json"}), 400)


@many
@given(body=st.one_of(st.binary(max_size=200), tree.map(dumped)), length=st.sampled_from([None, "0", "1", "5"]))
def test_any_bytes_at_all(http: httpx.Client, body: bytes, length: str | None) -> None:
    answered(http.post(V2, content=body, headers={} if length is None else {LENGTH: length}), 400)


# Bodies of /v1


def send(client: httpx.Client, body: bytes, kind: str, *statuses: int, **headers: str) -> str:
    return answered(client.post(V1, content=body, headers={"content-type": kind, **headers}), *statuses)


def npy(array: Any, **changes: Any) -> bytes:
    file = io.BytesIO()
    head = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, head | changes)
    blob: bytes = array.tobytes()
    return file.getvalue() + blob


@few
@given(shape=shapes.map(tuple), descr=st.sampled_from(["<f4", ">f8", "|O", "|u1", "<U3", "<c8", "|V4", "<M8[s]", "x"]))
def test_npy_headers_that_lie(http: httpx.Client, shape: tuple[int, ...], descr: str) -> None:
    send(http, npy(X, shape=shape, descr=descr), "application/x-npy", 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00" + bytes(100),
        npy(X)[:-1],
        npy(X) + b"\0",
        npy(X)[:60],
        npy(X, shape=(HUGE, HUGE)),
        npy(X, shape=(-1, -64)),
        npy(X, shape=(-1, 1, 8, 8)),
        npy(X, shape=(1.0, 64)),
        npy(X, shape=(True, 1, 8, 8)),
        npy(X, shape=[1, 1, 8, 8]),
        npy(X, shape=()),
        npy(X[:0], shape=(0, HUGE)),
        npy(X, descr="|O"),
        npy(X, descr=[("a", "<f4")]),
        npy(X, descr="(" * 500),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535,
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b"{" * 1000,
        b"\x93NUMPY\x01\x00\x10\x00" + b"__import__('os')",
        b"PK\x03\x04" + bytes(200),
        b"\x80\x04\x95" + bytes(40),
    ],
    ids=range(22),
)
def test_npy_that_is_none(http: httpx.Client, body: bytes) -> None:
    send(http, body, "application/x-npy", 400)
    send(http, body, "application/octet-stream", 400)
    send(http, form(body), "multipart/form-data; boundary=b", 400)


def test_npy_in_another_order_or_kind_is_the_same(http: httpx.Client) -> None:
    x = np.arange(128, dtype="<f4").reshape(2, 1, 8, 8) / 64
    expected = http.post(V1, json={"inputs": x.tolist(), "samples": 0}).json()["predictions"]
    for array in (
        x,
        np.asfortranarray(x),
        x.astype(">f4"),
        x.astype("<f8"),
        x.astype("<f2"),
        x[:, :, ::-1][:, :, ::-1],
    ):
        file = io.BytesIO()
        np.save(file, array)
        reply = http.post(
            V1, content=file.getvalue(), headers={"content-type": "application/x-npy"}, params={"samples": 0}
        )
        found = reply.json()["predictions"]
        for mine, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(mine["probabilities"], other["probabilities"], atol=1e-5)


@few
@given(seed=st.integers(0, 1 << 32))
def test_npy_with_flipped_bytes(http: httpx.Client, seed: int) -> None:
    rng, body = random.Random(seed), bytearray(npy(X))
    for _ in range(rng.randint(1, 3)):
        body[rng.randrange(80)] = rng.randrange(256)
    send(http, bytes(body), "application/x-npy")


def picture(mode: str = "L", kind: str = "PNG", size: tuple[int, int] = (8, 8), **more: Any) -> bytes:
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    if mode == "I;16":
        made = Image.fromarray(rng.integers(0, 65536, size[::-1], dtype=np.uint16))
    else:
        made = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).convert(mode)
    made.save(file, kind, **more)
    return file.getvalue()


PICTURES = {
    "grey": picture(),
    "colour": picture("RGB"),
    "alpha": picture("RGBA"),
    "grey and alpha": picture("LA"),
    "palette": picture("P"),
    "one bit": picture("1"),
    "16 bits": picture("I;16"),
    "JPEG": picture("RGB", "JPEG"),
    "CMYK": picture("CMYK", "JPEG"),
    "BMP": picture("RGB", "BMP"),
    "GIF": picture("P", "GIF"),
    "animated": picture("P", "GIF", save_all=True, append_images=[Image.new("P", (8, 8), 3)] * 3),
    "WEBP": picture("RGB", "WEBP"),
    "wide": picture("RGB", size=(500, 3)),
    "one pixel": picture(size=(1, 1)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_every_kind(http: httpx.Client, name: str) -> None:
    """Raw, as base64 and in a form, all the same; a part of one is refused."""
    body = PICTURES[name]
    query = {"samples": "3", "seed": "7"}
    raw = http.post(V1, content=body, headers={"content-type": "image/png"}, params=query)
    answered(raw, 200)
    text = base64.b64encode(body).decode()
    coded = http.post(V1, json={"images": [text, f"data:image/png;base64,{text}"], "samples": 3, "seed": 7})
    formed = http.post(V1, files=[("file", ("x.png", body))], params=query)
    (mine,) = raw.json()["predictions"]
    for other in (*coded.json()["predictions"], *formed.json()["predictions"]):
        np.testing.assert_allclose(mine["probabilities"], other["probabilities"], atol=1e-5)
    for part in (body[:20], body[: len(body) // 2], body[1:]):
        send(http, part, "image/png", 400)


def test_16_bits_are_not_cut_off(http: httpx.Client) -> None:
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    replies = []
    for pixels in (levels, (levels >> 8).astype(np.uint8)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        reply = http.post(V1, content=file.getvalue(), headers={"content-type": "image/png"}, params={"samples": 0})
        replies.append(reply.json()["predictions"])
    assert replies[0] == replies[1]


def png_of(width: int, height: int, idat: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(50_000, 50_000), (1 << 31, 1 << 31), (5000, 5000), (1, 1 << 25), (10_000, 10_000)])
def test_pictures_that_would_burst(http: httpx.Client, size: tuple[int, int]) -> None:
    bomb = png_of(*size, zlib.compress(bytes(1 << 20)))
    send(http, bomb, "image/png", 413, 400 if size[0] >= 1 << 31 else 413)
    answered(http.post(V1, json={"images": [base64.b64encode(bomb).decode()]}), 413, 400)
    send(http, form(bomb), "multipart/form-data; boundary=b", 413, 400)
    blob = struct.pack("<I", len(bomb)) + bomb
    post(http, header(shape=[1], datatype="BYTES", size=len(blob)), blob, 413, 400)


@few
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(sorted(PICTURES)))
def test_pictures_with_flipped_bytes(http: httpx.Client, seed: int, name: str) -> None:
    rng, body = random.Random(seed), bytearray(PICTURES[name])
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    send(http, bytes(body), "image/png")


@few
@given(
    images=st.one_of(
        odd, st.lists(st.one_of(odd, st.binary(max_size=9).map(lambda b: base64.b64encode(b).decode())), max_size=3)
    )
)
def test_base64_garbage(http: httpx.Client, images: Any) -> None:
    answered(http.post(V1, content=dumped({"images": images}), headers={"content-type": "application/json"}), 400)


def form(*files: bytes, boundary: str = "b", name: str = 'name="file"; filename="x"') -> bytes:
    parts = [f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + f + b"\r\n" for f in files]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


GREY = PICTURES["grey"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(GREY), "multipart/form-data"),
        (form(GREY), "multipart/form-data; boundary="),
        (form(GREY), "multipart/form-data; boundary=other"),
        (form(GREY), 'multipart/form-data; boundary="'),
        (form(GREY), f"multipart/form-data; boundary={'b' * 5000}"),
        (b"", "multipart/form-data; boundary=b"),
        (b"--b--\r\n", "multipart/form-data; boundary=b"),
        (form(GREY, GREY)[:-5], "multipart/form-data; boundary=b"),
        (form(GREY, GREY)[:-40], "multipart/form-data; boundary=b"),
        (form(GREY, b""), "multipart/form-data; boundary=b"),
        (form(b"3", name='name="samples"'), "multipart/form-data; boundary=b"),
        (form(GREY, name='filename="x"'), "multipart/form-data; boundary=b"),
        (form(GREY, name=""), "multipart/form-data; boundary=b"),
        (b"--b\r\n" * 1000, "multipart/form-data; boundary=b"),
    ],
    ids=range(14),
)
def test_forms_that_are_none(http: httpx.Client, body: bytes, kind: str) -> None:
    send(http, body, kind, 400)


@few
@given(seed=st.integers(0, 1 << 32))
def test_forms_with_flipped_bytes(http: httpx.Client, seed: int) -> None:
    rng, body = random.Random(seed), bytearray(form(GREY, npy(X)))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    send(http, bytes(body), "multipart/form-data; boundary=b")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded", "", ";", "é", "application/jsonx"]
)
def test_other_content_types(http: httpx.Client, kind: str) -> None:
    reply = http.post(V1, content=b"{}", headers={b"content-type": kind.encode()})
    assert "expected application/json" in answered(reply, 415)


def test_json_without_a_content_type(http: httpx.Client) -> None:
    body = dumped({"inputs": X.tolist(), "samples": 1})
    assert http.post(V1, content=body).status_code == 200
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        send(http, body, kind, 200)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body),
    "deflate": lambda body: zlib.compress(body),
    "raw deflate": lambda body: zlib.compress(body, wbits=-15),
}


@pytest.mark.parametrize("path", [V1, V2])
@pytest.mark.parametrize("coding", PACKERS)
def test_packed_bodies(http: httpx.Client, path: str, coding: str) -> None:
    tensor = header()["inputs"][0] | {"data": X.ravel().tolist(), "parameters": {}}
    told = {"inputs": X.tolist(), "samples": 1} if path == V1 else {"inputs": [tensor]}
    body = dumped(told)
    pack = PACKERS[coding]
    headers = {"content-encoding": coding.split()[-1], "content-type": "application/json"}
    good = pack(body)
    answered(http.post(path, content=good, headers=headers), 200)
    bomb = pack(bytes(40 << 20))
    assert len(bomb) < 1 << 16
    assert "unpacks to more than" in answered(http.post(path, content=bomb, headers=headers), 413)
    for wrong in (good[:-1], good[:20], b"", body, good + b"more", good + good):
        answered(http.post(path, content=wrong, headers=headers), 400)
    for name in ("br", "gzip, gzip", "zstd", "é"):
        said = answered(http.post(path, content=good, headers={b"content-encoding": name.encode()}), 415)
        assert "expected gzip, deflate" in said


@pytest.mark.parametrize(
    "query",
    [
        "a=1",
        "samples=1&samples=2",
        "&".join(f"a{i}=1" for i in range(200)),
        "samples=%ff%fe",
        "=&=&=",
        "samples=",
        "%00=1",
    ],
)
def test_odd_queries(http: httpx.Client, query: str) -> None:
    answered(http.post(f"{V1}?{query}", json={"inputs": X.tolist()}), 400)


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "%2F", "..%2Fdigits", "a" * 5000, "%00", "digits%20", "%ff", "{name}"]
)
def test_odd_names(http: httpx.Client, name: str) -> None:
    for path in (f"/v1/models/{name}/predict", f"/v2/models/{name}/infer", f"/v2/models/digits/versions/{name}/infer"):
        reply = http.post(path, content=orjson.dumps({}))
        assert reply.status_code in (400, 404, 405), reply.text
        answered(reply)


def test_bodies_over_the_limit(serve: Serve, small_digits: Path) -> None:
    limits = {"body_bytes": 8000, "max_rows": 20, "max_samples": 50, "image_pixels": 1000, "buckets": 1}
    server = serve(small_digits, *(word for key, value in limits.items() for word in ("--set", f"{key}={value}")))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path in (V1, V2, "/v2/repository/index", "/v2/repository/models/digits/load"):
            for content in (bytes(8001), iter([bytes(6000), bytes(6000)])):
                said = answered(client.post(path, content=content), 413)
                assert "at most 8,000" in said or "more than 8,000" in said
        packed = client.post(V1, content=gzip.compress(bytes(8001)), headers={"content-encoding": "gzip"})
        assert "unpacks to more than 8,000" in answered(packed, 413)
        rows = npy(np.zeros((21, 1, 8, 8), "<f4"))
        assert "21 inputs came; at most 20" in send(client, rows, "application/x-npy", 413)
        assert "at most 20" in answered(client.post(V1, json={"images": [""] * 21}), 413)
        assert "at most 20" in answered(client.post(V1, files=[("f", ("x", GREY))] * 21), 413)
        assert "from 0 to 50" in answered(client.post(V1, json={"inputs": [], "samples": 51}), 400)
        large = base64.b64encode(png_of(30, 30, zlib.compress(bytes(30 * 31)))).decode()
        answered(client.post(V1, json={"images": [large] * 17}), 200)
        assert "more than 16,000 pixels" in answered(client.post(V1, json={"images": [large] * 18}), 413)
        check_good(client)
