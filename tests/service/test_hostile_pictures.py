"""Pictures of a few pixels whose files would take long: of many parts, and of much metadata."""

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import _hostile as hostile
from dubito.service.web.pictures import MOST_METADATA, MOST_WALKED, beside_pixels, plain
from tests.service.conftest import TWO_DECODERS

Fixture = Any  # the types of conftest.py
V1 = "/v1/models/digits/predict"
MANY = MOST_WALKED + 1
JPEG, PNG = hostile.picture(8, "JPEG"), hostile.picture(8)


@pytest.fixture(scope="module")
def http(serve: Fixture, small_digits: Path) -> Iterator[httpx.Client]:
    server = serve(small_digits, "--set", "buckets=1,2", **TWO_DECODERS)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def jpeg(*parts: bytes) -> bytes:
    return JPEG[:2] + b"".join(parts) + JPEG[2:]


def part(kind: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(content) + 2) + content


def exif(tags: int) -> bytes:
    """EXIF of so many tags, in parts of a JPEG, which are read as one."""
    entries = b"".join(struct.pack("<HHII", i, 3, 1, 6) for i in range(tags))
    whole = b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries
    return b"".join(part(0xE1, b"Exif\0\0" + whole[i : i + 65_000]) for i in range(0, len(whole), 65_000))


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """With chunks before its pixels."""
    framed = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return PNG[:33] + b"".join(framed) + PNG[33:]


def gif(*blocks: bytes) -> bytes:
    whole = hostile.picture(8, "GIF")
    begin = 13 + (3 << (whole[10] & 7) + 1 if whole[10] & 0x80 else 0)
    return whole[:begin] + b"".join(blocks) + whole[begin:]


PARTS = {
    "comments of a JPEG": jpeg(part(0xFE, b"") * MANY),
    "bytes between the parts of a JPEG": jpeg(b"\x00" * MANY),
    "padding of a JPEG": jpeg(b"\xff" * MANY),
    "texts of a PNG": png(*[(b"tEXt", b"a\0b")] * MANY),
    "empty pieces of a PNG": png(*[(b"IDAT", b"")] * MANY),
    "comments of a GIF": gif(b"!\xfe\x01a\x00" * MANY),
    "blocks of a comment of a GIF": gif(b"!\xfe" + b"\x01a" * MANY + b"\x00"),
    "bytes between the blocks of a GIF": gif(b"\x00" * MANY),
}


@pytest.mark.parametrize("kind", PARTS)
def test_files_of_many_parts_are_not_opened(http: httpx.Client, kind: str) -> None:
    reply = http.post(V1, content=PARTS[kind], headers={"content-type": f"image/{kind.rpartition(' ')[2].lower()}"})
    assert reply.status_code == 413
    assert "more than 65,536 parts" in reply.json()["detail"]


def test_parts_are_counted_over_all_pictures_of_a_request(http: httpx.Client) -> None:
    one = base64.b64encode(png(*[(b"tEXt", b"a\0b")] * (MOST_WALKED // 2))).decode()
    assert http.post(V1, json={"images": [one]}).status_code == 200
    reply = http.post(V1, json={"images": [one, one]})
    assert (reply.status_code, "parts" in reply.json()["detail"]) == (413, True)


def test_metadata_are_bounded(http: httpx.Client) -> None:
    reply = http.post(V1, content=jpeg(exif(60_000) * 6), headers={"content-type": "image/jpeg"})
    assert reply.status_code == 413
    assert f"a request may have {MOST_METADATA:,}" in reply.json()["detail"]


@pytest.mark.parametrize(
    "content",
    [
        jpeg(exif(50)),
        jpeg(exif(5_000), part(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))),
        png((b"tEXt", b"a\0" + bytes(9))),
    ],
)
def test_what_cameras_and_programs_add_is_taken(http: httpx.Client, content: bytes) -> None:
    kind = "jpeg" if content.startswith(b"\xff") else "png"
    assert http.post(V1, content=content, headers={"content-type": f"image/{kind}"}).status_code == 200


def test_the_server_itself_opens_only_pictures_that_say_little() -> None:
    assert plain([jpeg(exif(50))])
    assert not plain([jpeg(exif(5_000))])


def test_lengths_that_lie_end_the_walk() -> None:
    assert beside_pixels(PNG[:33] + struct.pack(">I4s", 0xFFFFFFFF, b"tEXt")).parts == 2
    for file in (JPEG, PNG, gif(b"!\xfe\x01a\x00")):
        for end in range(len(file)):
            assert beside_pixels(file[:end]).parts <= end
