"""Parses bodies into inputs: JSON lists, pictures (raw, base64, multipart form), .npy files."""

import base64
import binascii
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dubito.models.errors import InputError
from dubito.models.images import pictures_in, pixels_of, prepare
from dubito.models.manifest import Input
from dubito.service.problems import Problem

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF")
TOGETHER = 16  # all pictures of a request may have this many times the pixels that one may have
Inputs = NDArray[np.float32]  # (B, ...), possibly a view of the body

PIXELS, NUMBERS = np.dtype(np.uint8), np.dtype(np.float32)
NPY = ("application/x-npy", "application/octet-stream")
NPY_MAGIC = b"\x93NUMPY"


@dataclass
class Codec:
    """Reads the inputs of one request for one model, within its limits."""

    declared: Input
    max_rows: int
    max_pixels: int  # of one picture
    pixels: int = 0  # of the pictures read so far

    def from_body(self, kind: str, body: bytes, content_type: str) -> Inputs:
        """Inputs of a body that is not JSON."""
        match kind:
            case _ if kind in NPY:
                return self.from_npy(body)
            case "multipart/form-data":
                return self.from_form(body, content_type)
            case _ if kind.startswith("image/"):
                return self.from_picture(body)[None]
        known = "application/json, application/x-npy, image/png, image/jpeg or multipart/form-data"
        curl = " (curl sends JSON with --json)" if kind == "application/x-www-form-urlencoded" else ""
        raise Problem(415, f"Content-Type is {kind[:60]!r}; expected {known}{curl}.")

    def from_lists(self, value: object) -> Inputs:
        """Nested lists (B, ...), or one input without the batch axis."""
        try:
            array = np.array(value, dtype=np.float32)
        except (ValueError, TypeError, OverflowError):
            tensors = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
            elsewhere = " Tensors with name and datatype go to /v2/models/NAME/infer." if tensors else ""
            raise Problem(
                400, f"inputs are no array of numbers; expected nested lists of shape {self.shape}.{elsewhere}"
            ) from None
        return self.from_array(array)

    def from_array(self, array: NDArray[Any]) -> Inputs:
        """Check an array of inputs; uint8 is pixels if the model takes pictures.

        The engine checks that they are finite: doing it here would block the event loop.
        """
        if array.dtype == PIXELS and self.declared.image is not None:
            return self.from_pixels(array)
        if array.dtype.kind not in "fiub":
            raise Problem(400, f"inputs hold {array.dtype}; expected numbers.")
        if array.shape == self.declared.shape:
            array = array[None]
        if array.shape[1:] != self.declared.shape or array.ndim == 0 or len(array) == 0:
            raise Problem(400, f"inputs have shape {array.shape}; expected {self.shape}, at least one row.")
        self._check_rows(len(array))
        if array.dtype == NUMBERS:
            return array
        with np.errstate(over="ignore"):
            return array.astype(NUMBERS)

    def from_npy(self, body: bytes) -> Inputs:
        """Inputs of a .npy file, whose length must agree with its header."""
        try:
            file = io.BytesIO(body)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            left = len(body) - file.tell()
            fits = not dtype.hasobject and math.prod(shape) * dtype.itemsize == left
            array = np.load(io.BytesIO(body), allow_pickle=False) if fits else None
        except Exception:  # numpy raises many kinds, all about the body; their messages would reveal server internals
            raise Problem(
                400, "the .npy file cannot be read; expected one of numbers, as numpy.save writes it."
            ) from None
        if array is None:
            raise Problem(400, f"the .npy file has {left} bytes of numbers, which is not what its header says.")
        return self.from_array(array)

    def from_pixels(self, array: NDArray[np.uint8]) -> Inputs:
        """One picture (H, W) or (H, W, C), or several; or several with channels first, as the network takes them."""
        pictures, _ = pictures_in(array, self.declared)
        if pictures.ndim not in (3, 4) or 0 in pictures.shape:
            raise Problem(
                400, f"pixels have shape {array.shape}; expected (H, W), (H, W, channels) or several of them."
            )
        self._check_rows(len(pictures))
        self._check_pixels(pictures.shape[2], pictures.shape[1])
        return np.stack([self._prepared(np.array(p)) for p in pictures])

    def from_picture(self, body: bytes) -> Inputs:
        """One input from a PNG, JPEG or other picture file."""
        from PIL import Image

        if self.declared.image is None:
            raise Problem(415, f"this model takes tensors of shape {self.shape}, not pictures.")
        try:
            with Image.open(io.BytesIO(body), formats=FORMATS) as picture:
                self._check_pixels(*picture.size)
                pixels = pixels_of(picture, self.declared.image.fitting)
        except Problem:
            raise
        except Image.DecompressionBombError:  # Pillow's own limit, checked before ours
            raise Problem(413, f"a picture has too many pixels; at most {self.max_pixels:,} are taken.") from None
        except Exception:  # Pillow raises many kinds, all of them about the body
            raise Problem(400, f"the picture cannot be read; expected {', '.join(FORMATS)}.") from None
        return self._prepared(pixels)

    def from_base64(self, pictures: object) -> Inputs:
        if not isinstance(pictures, list) or not pictures:
            raise Problem(400, "images is no list; expected base64 strings, one for each picture.")
        self._check_rows(len(pictures))
        return np.stack([self.from_picture(_base64(text, f"images[{i}]")) for i, text in enumerate(pictures)])

    def from_bytes(self, elements: list[bytes]) -> Inputs:
        """Inputs from picture files, one per element."""
        if not elements:
            raise Problem(400, "no pictures came; expected at least one.")
        self._check_rows(len(elements))
        return np.stack([self.from_picture(element) for element in elements])

    def from_form(self, body: bytes, content_type: str) -> Inputs:
        """Inputs from the files of a multipart form, each a picture or a .npy file, in order."""
        files = _files(body, content_type, self._check_rows)
        parts = [self.from_npy(f) if f.startswith(NPY_MAGIC) else self.from_picture(f)[None] for f in files]
        x = np.concatenate(parts)
        self._check_rows(len(x))
        return x

    @property
    def shape(self) -> str:
        return f"(B, {', '.join(map(str, self.declared.shape))})"

    def _prepared(self, pixels: NDArray[np.uint8]) -> Inputs:
        try:
            return prepare(torch.from_numpy(pixels), self.declared).numpy()
        except InputError as error:
            raise Problem(400, str(error)) from None

    def _check_rows(self, rows: int) -> None:
        if rows > self.max_rows:
            raise Problem(413, f"{rows} inputs came; at most {self.max_rows} are taken in one request.")

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise Problem(413, f"a picture has {width} × {height} pixels; at most {self.max_pixels:,} are taken.")
        self.pixels += width * height
        if self.pixels > TOGETHER * self.max_pixels:
            most = TOGETHER * self.max_pixels
            raise Problem(413, f"the pictures have more than {most:,} pixels, which is what a request may have.")


def _base64(text: object, whose: str) -> bytes:
    if not isinstance(text, str):
        raise Problem(400, f"{whose} is no string; expected base64.")
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(400, f"{whose} is no base64.") from None


def _files(body: bytes, content_type: str, check_count: Callable[[int], None]) -> list[bytes]:
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
    except Problem:
        raise
    except Exception:  # the parser raises many kinds, all of them about the body
        raise Problem(400, "the form cannot be read; expected multipart/form-data with a boundary.") from None
    if not ended:
        raise Problem(400, "the form breaks off before its last boundary.")
    if not files:
        raise Problem(400, "the form holds no files; expected pictures or .npy files.")
    return files
