"""Bodies that cost a server more than they should: for `benchmarks.attacks` and the service's tests."""

import gzip
import io
import json
import struct
import zlib

import numpy as np
from PIL import Image

HEAD = b'{"name":"input","shape":[1,1,8,8],"datatype":"FP32","data":[]}'


def scan_bomb(side: int = 4096, scans: int = 500) -> bytes:
    """A progressive JPEG of one grey, whose last scan is repeated: each is decoded over all pixels."""
    file = io.BytesIO()
    Image.new("L", (side, side), 77).save(file, "JPEG", progressive=True)
    jpeg = file.getvalue()
    last, end = jpeg.rindex(b"\xff\xda"), len(jpeg) - 2  # the last scan, and the end of the picture
    return jpeg[:end] + jpeg[last:end] * (scans - jpeg.count(b"\xff\xda")) + jpeg[end:]


def interlaced_png(side: int) -> bytes:
    """One grey, in seven passes; Pillow writes none."""
    rows = b"".join(bytes(1 + w) * h for w, h in _passes(side))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 1)), (b"IDAT", zlib.compress(rows, 9))]
    return _png([*parts, (b"IEND", b"")])


def _passes(side: int) -> list[tuple[int, int]]:
    starts = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    return [(-(-(side - x) // dx), -(-(side - y) // dy)) for x, y, dx, dy in starts]


def turned_jpeg(side: int) -> bytes:
    """One grey, which its EXIF data turn by a right angle."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (side, side), 77).save(file, "JPEG", exif=exif)
    return file.getvalue()


def texts_png(count: int) -> bytes:
    """An 8 × 8 PNG with compressed texts of a megabyte each."""
    text = b"a\x00\x00" + zlib.compress(bytes(1_000_000), 9)
    pixels = zlib.compress(bytes(9) * 8)
    head = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    return _png([(b"IHDR", head), *[(b"zTXt", text)] * count, (b"IDAT", pixels), (b"IEND", b"")])


def _png(parts: list[tuple[bytes, bytes]]) -> bytes:
    chunks = (struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def frames(count: int, side: int, kind: str) -> bytes:
    """A picture that moves: GIF, WEBP or PNG."""
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8)) for _ in range(count)]
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:])
    return file.getvalue()


def picture(side: int = 8, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (side, side), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def many_inputs(count: int) -> bytes:
    """A v2 request with inputs of one name."""
    return b'{"inputs":[' + b",".join([HEAD] * count) + b"]}"


def many_lists(size: int) -> bytes:
    """A v1 request with empty lists, of so many bytes."""
    return b'{"inputs":[' + b"[]," * (size // 3 - 5) + b"[]]}"


def many_numbers(size: int) -> bytes:
    return b'{"inputs":[' + b"0.1," * (size // 4 - 5) + b"0.1]}"


def many_keys(count: int) -> bytes:
    return json.dumps({"inputs": [[0.0]], **{f"key{i}": i for i in range(count)}}).encode()


def deep(levels: int, where: str) -> bytes:
    """A v1 request with lists in lists, as its inputs or as an option."""
    lists = b"[" * levels + b"]" * levels
    if where == "inputs":
        return b'{"inputs":' + lists + b"}"
    return b'{"inputs":[[[[0,0,0,0,0,0,0,0]]]],"%b":%b}' % (where.encode(), lists)


def long_form(headers: int) -> bytes:
    """A form of one file with many header lines."""
    return b"--b\r\n" + b"a: b\r\n" * headers + b"\r\nx\r\n--b--\r\n"


def packed(body: bytes) -> bytes:
    return gzip.compress(body, 9)
