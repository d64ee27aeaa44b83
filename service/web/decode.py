"""Decodes bodies that may cost far more than their bytes: pictures, forms, long JSON. Runs in processes of its own.

`python -m dubito.service.web.decode` is such a process; `decoders.py` starts and ends it. It imports no torch.
"""

import base64
import binascii
import gc
import io
import logging
import math
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import CDLL
from dataclasses import asdict, dataclass
from functools import cached_property
from traceback import format_exc
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dubito.models.pixels import pixels_of
from dubito.service.memory import keep_nothing
from dubito.service.problems import Problem
from dubito.service.web import oip
from dubito.service.web.arrays import array_of
from dubito.service.web.bodies import inflate, json_object
from dubito.service.web.pictures import LIGHT, Beside, beside_pixels, scans_of

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF")
TOGETHER = 16  # all pictures of a request may have this many times the pixels that one may have
MOST_HEAD = 1 << 16  # bytes of a request's JSON without its inputs
NPY_MAGIC = b"\x93NUMPY"
FRAME = struct.Struct("<II")  # bytes of the JSON of a frame, and of what follows it
MOST_LOGGED = 10  # warnings of libraries about one body
HANDLER = logging.Handler(logging.WARNING)
NICE = 10  # decoding gives way to predictions
PARENT_DIES = 1  # PR_SET_PDEATHSIG


class Heavier(Exception):
    """A body costs more than the process takes that is kept free for light ones."""


@dataclass(frozen=True)
class RequestLimits:
    """What a model and the settings allow a request to have."""

    shape: tuple[int, ...]  # of one input
    pictures: bool  # the model takes pictures
    exif: bool  # pictures are turned by their EXIF orientation
    max_rows: int
    max_pixels: int  # of one picture
    max_scans: int  # of a JPEG
    light: bool = False  # only pictures that cost little: of others, `Heavier` is raised

    @cached_property
    def numbers(self) -> int:
        """Most numbers of the inputs."""
        return self.max_rows * math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Most commas and opening brackets of a body: those of `max_rows` inputs as nested lists, and some options."""
        lists = sum(math.prod(self.shape[: n + 1]) for n in range(len(self.shape)))
        return self.max_rows * (1 + lists) + 1000

    def body_bytes(self, most: int) -> int:
        """Largest body: the most inputs as JSON at its widest, or `most` where the body may hold pictures."""
        widest = MOST_HEAD + oip.WIDEST * self.numbers
        return most if self.pictures else min(most, widest)

    def check_rows(self, rows: int) -> None:
        if rows > self.max_rows:
            raise Problem(413, f"{rows} inputs came; at most {self.max_rows} are taken in one request.")

    def declared(self) -> str:
        return f"(B, {', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Piece:
    """A decoded part of the inputs: the pixels of one picture, or an array."""

    array: NDArray[Any]
    picture: bool = False


def decode(
    kind: str, sizes: Sequence[int], body: bytes, limits: RequestLimits, content_type: str
) -> Iterator[Piece | bytes]:
    """The inputs of a body, one after the other; then, of JSON, what it has beside them."""
    if kind == "raw":
        yield body
    elif kind == "pictures":
        yield from Pictures(limits).read(_split(body, sizes or (len(body),)))
    elif kind == "form":
        pictures = Pictures(limits)
        for file in files_of(body, content_type, limits.check_rows):
            yield Piece(read_npy(file)) if file.startswith(NPY_MAGIC) else pictures.pixels(file)
    else:
        yield from (_v1 if kind == "v1" else _v2)(body, limits)


def _split(body: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield body[start : start + size]
        start += size


def _v1(body: bytes, limits: RequestLimits) -> Iterator[Piece | bytes]:
    fields = parse(body, limits, "; expected one with `inputs` or `images`")
    inputs, images = given_inputs(fields)
    rest = _head(fields)
    if images is None:
        yield Piece(numbers(inputs, limits))
    else:
        yield from Pictures(limits).read(pictures_of(images, limits))
    yield rest


def given_inputs(fields: dict[str, Any]) -> tuple[Any, Any]:
    """The inputs and the images of a body, of which one is None; taken out of its fields."""
    inputs, images = fields.pop("inputs", None), fields.pop("images", None)
    if (inputs is None) == (images is None):
        raise Problem(400, _no_inputs(fields, both=inputs is not None))
    return inputs, images


def _no_inputs(fields: dict[str, Any], *, both: bool) -> str:
    """The body has neither inputs nor images, or both: name what came instead."""
    known = (*oip.PARAMETERS, "return", "version", "inputs", "images")
    other = next((key for key in fields if key not in known), None)
    came = "the body has both `inputs` and `images`" if both else "the body has no `inputs`"
    instead = "" if other is None or both else f", but a key {other[:40]!r}"
    return f"{came}{instead}; expected `inputs` (nested lists) or `images` (base64), and not both."


def _v2(body: bytes, limits: RequestLimits) -> Iterator[Piece | bytes]:
    request = parse(body, limits, "; expected one with `inputs`")
    header = oip.header_of(request)
    values = oip.values_of(header.input, body, len(body))
    request["inputs"] = [{"name": oip.INPUT, "datatype": header.input.kind, "shape": header.input.shape, "data": []}]
    rest = _head(request)
    if isinstance(values, list):
        yield from Pictures(limits).read(values)
    else:
        yield Piece(values)
    yield rest


def _head(fields: dict[str, Any]) -> bytes:
    rest = orjson.dumps(fields)
    if len(rest) > MOST_HEAD:
        raise Problem(413, f"the options of the body have {len(rest):,} bytes; at most {MOST_HEAD:,} are taken.")
    return rest


def parse(body: bytes, limits: RequestLimits, expected: str) -> dict[str, Any]:
    """The JSON object of a long body; its commas and brackets are counted before anything is built from them."""
    text = np.frombuffer(body, np.uint8)
    count = sum(int(np.count_nonzero(text == mark)) for mark in b",[{")
    if count > limits.elements:
        rows = f"{limits.max_rows} inputs of shape {limits.shape}"
        raise Problem(413, f"the body has {count:,} values and lists; {rows} take fewer.", reason="body")
    return json_object(body, expected)


def numbers(value: object, limits: RequestLimits) -> NDArray[np.float32]:
    """An array from nested lists (B, ...), or of one input without the batch axis."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | list):
            raise ValueError
        return array_of(value, np.dtype(np.float32)) if isinstance(value, list) else np.array(value, np.float32)
    except (ValueError, OverflowError):
        tensors = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        elsewhere = " Tensors with name and datatype go to /v2/models/NAME/infer." if tensors else ""
        said = f"inputs are no array of numbers; expected nested lists of shape {limits.declared()}.{elsewhere}"
        raise Problem(400, said) from None


def pictures_of(images: object, limits: RequestLimits) -> list[bytes]:
    """The files of a list of base64 strings."""
    if not isinstance(images, list) or not images:
        raise Problem(400, "images is no list; expected base64 strings, one for each picture.")
    limits.check_rows(len(images))
    return [_base64(text, f"images[{i}]") for i, text in enumerate(images)]


def _base64(text: object, whose: str) -> bytes:
    if not isinstance(text, str):
        raise Problem(400, f"{whose} is no string; expected base64.")
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(400, f"{whose} is no base64.") from None


class Pictures:
    """Decodes the pictures of one request."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.seen = self.cost = 0  # pixels of the pictures so far, and what they cost
        self.beside = Beside()

    def read(self, files: Iterator[bytes] | Sequence[bytes]) -> Iterator[Piece]:
        for file in files:
            yield self.pixels(file)

    def pixels(self, body: bytes) -> Piece:
        """Pixels of a PNG, JPEG or other picture file, of its first frame."""
        from PIL import Image

        if not self.limits.pictures:
            raise Problem(415, f"this model takes tensors of shape {self.limits.declared()}, not pictures.")
        self.beside += beside_pixels(body)
        self.beside.check()
        try:
            with Image.open(io.BytesIO(body), formats=FORMATS) as picture:
                self._check(*picture.size)
                scans = scans_of(body) if body.startswith(b"\xff\xd8") else 1
                if scans > (most := self.limits.max_scans):
                    raise Problem(413, f"a JPEG has {scans} scans; at most {most} are taken.", reason="picture")
                self.cost += picture.width * picture.height * max(1, scans)
                if self.limits.light and self.cost + self.beside.cost > LIGHT:
                    raise Heavier
                return Piece(pixels_of(picture, exif=self.limits.exif), picture=True)
        except (Problem, Heavier, MemoryError):
            raise
        except Image.DecompressionBombError:  # Pillow's own limit, checked before ours
            most = self.limits.max_pixels
            raise Problem(
                413, f"a picture has too many pixels; at most {most:,} are taken.", reason="picture"
            ) from None
        except Exception:  # Pillow raises many kinds, all of them about the body
            raise Problem(400, f"the picture cannot be read; expected {', '.join(FORMATS)}.") from None

    def _check(self, width: int, height: int) -> None:
        most = self.limits.max_pixels
        if width * height > most:
            said = f"a picture has {width} × {height} pixels; at most {most:,} are taken."
            raise Problem(413, said, reason="picture")
        self.seen += width * height
        if self.seen > TOGETHER * most:
            said = f"the pictures have more than {TOGETHER * most:,} pixels, which is what a request may have."
            raise Problem(413, said, reason="picture")


def read_npy(body: bytes) -> NDArray[Any]:
    """The array of a .npy file, whose length must agree with its header."""
    try:
        file = io.BytesIO(body)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        left = len(body) - file.tell()
        fits = not dtype.hasobject and math.prod(shape) * dtype.itemsize == left
        array: NDArray[Any] | None = np.load(io.BytesIO(body), allow_pickle=False) if fits else None
    except Exception:  # numpy raises many kinds, all about the body; their messages would reveal server internals
        raise Problem(400, "the .npy file cannot be read; expected one of numbers, as numpy.save writes it.") from None
    if array is None:
        raise Problem(400, f"the .npy file has {left} bytes of numbers, which is not what its header says.")
    return array


def files_of(body: bytes, content_type: str, check_count: Callable[[int], None]) -> list[bytes]:
    """The files of a multipart form."""
    from python_multipart.multipart import FormParser, parse_options_header

    files: list[bytes] = []
    ended: list[bool] = []

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        files.append(file.file_object.read())
        file.close()
        check_count(len(files))

    def on_field(field: Any) -> None:
        name = field.field_name.decode("latin-1")[:40]
        raise Problem(400, f"the form has a field {name!r}; expected files, and options in the query.")

    try:
        _, parameters = parse_options_header(content_type)
        parser = FormParser(
            "multipart/form-data",
            on_field,
            on_file,
            lambda: ended.append(True),
            parameters[b"boundary"],
            config={"MAX_MEMORY_FILE_SIZE": len(body) + 1},
        )
        parser.write(body)
        parser.finalize()
    except (Problem, MemoryError):
        raise
    except Exception:  # the parser raises many kinds, all of them about the body
        raise Problem(400, "the form cannot be read; expected multipart/form-data with a boundary.") from None
    if not ended:
        raise Problem(400, "the form breaks off before its last boundary.")
    if not files:
        raise Problem(400, "the form holds no files; expected pictures or .npy files.")
    return files


# frames between the server and a decoding process


def send(peer: socket.socket, fields: dict[str, Any], content: bytes | memoryview = b"") -> None:
    head = orjson.dumps(fields)
    peer.sendall(FRAME.pack(len(head), len(content)) + head)
    if len(content):
        peer.sendall(content)


def receive(peer: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next frame; raises EOFError where the other side has ended."""
    head, content = FRAME.unpack(_exactly(peer, FRAME.size))
    return orjson.loads(_exactly(peer, head)), _exactly(peer, content)


def _exactly(peer: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, start = memoryview(buffer), 0
    while start < count:
        if not (got := peer.recv_into(view[start:])):
            raise EOFError
        start += got
    return buffer


def main() -> None:
    """Decode what comes on standard input, a socket, until the server closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    if sys.platform == "linux":
        CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if sys.platform != "linux":  # there the thread that starts this process has given way already
        os.nice(NICE)
    keep_nothing(1 << 20)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (most := int(sys.argv[1])) > 0:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    from PIL import Image

    Image.init()  # imports the formats' modules
    gc.freeze()
    gc.disable()  # to look through millions of lists again and again takes longer than to parse them
    logging.getLogger().addHandler(HANDLER)
    server = socket.socket(fileno=0)
    send(server, {"ready": True})
    with suppress(EOFError, ConnectionError):
        while True:
            task, body = receive(server)
            serve(server, task, bytes(body))


def serve(server: socket.socket, task: dict[str, Any], body: bytes) -> None:
    limits = RequestLimits(**{**task["limits"], "shape": tuple(task["limits"]["shape"])})
    logged: list[str] = []
    HANDLER.emit = lambda record: logged.append(record.getMessage()[:200])  # type: ignore[method-assign]
    try:
        rest = b""
        if task["coding"]:
            body = inflate(body, task["coding"], task["most"])
        for piece in decode(task["kind"], task["sizes"], body, limits, task["content_type"]):
            if isinstance(piece, bytes):
                rest = piece
                continue
            array = np.ascontiguousarray(piece.array)
            what = {"dtype": array.dtype.str, "shape": piece.array.shape, "picture": piece.picture}
            send(server, what, array.reshape(-1).view(np.uint8).data)
        send(server, {"end": True, "logged": logged[:MOST_LOGGED]}, rest)
    except Problem as problem:
        refusal = {"status": problem.status, "detail": problem.detail, "reason": problem.reason}
        send(server, refusal | {"logged": logged[:MOST_LOGGED]})
    except Heavier:
        send(server, {"heavier": True})
    except MemoryError:
        said = "the body takes more memory to decode than a request may have; send less at a time."
        send(server, {"status": 413, "detail": said, "reason": "picture"})
    except Exception:
        send(server, {"fault": format_exc()[-4000:]})


def task_of(
    kind: str, sizes: Sequence[int], limits: RequestLimits, content_type: str, coding: str, most: int
) -> dict[str, Any]:
    """`coding`: how the body is compressed; it may unpack to `most` bytes."""
    one = {"kind": kind, "sizes": sizes, "limits": asdict(limits), "content_type": content_type}
    return one | {"coding": coding, "most": most}


if __name__ == "__main__":
    main()
