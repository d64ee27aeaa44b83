"""Inputs of a request from what its body holds: lists, arrays, and pixels of pictures."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.images import pictures_in, prepare, prepare_all
from dubito.models.manifest import Input
from dubito.service.problems import Problem
from dubito.service.web.decode import RequestLimits, numbers, read_npy

Inputs = NDArray[np.float32]  # (B, ...), possibly a view of the body

TOGETHER = 1 << 18  # pixels that are fitted at once
PIXELS, NUMBERS = np.dtype(np.uint8), np.dtype(np.float32)
NPY = ("application/x-npy", "application/octet-stream")
KINDS = "application/json, application/x-npy, image/png, image/jpeg or multipart/form-data"


def limits_of(declared: Input, max_rows: int, input_bytes: int, max_pixels: int, max_scans: int) -> RequestLimits:
    """What a request for a model may have."""
    rows = min(max_rows, max(1, input_bytes // (4 * math.prod(declared.shape))))
    image = declared.image
    exif = image is not None and image.fitting is not None and image.fitting.exif
    return RequestLimits(declared.shape, image is not None, exif, rows, max_pixels, max_scans)


@dataclass
class Codec:
    """Collects the inputs of one request for one model, within its limits."""

    declared: Input
    limits: RequestLimits
    check: Callable[[int], None]  # raises where so many rows are more work than a request may be
    parts: list[Inputs] = field(default_factory=list)  # (B, ...) each, of a body that was decoded elsewhere
    rows: int = 0  # of these parts

    def take(self, array: NDArray[Any], picture: bool) -> None:
        """Add a decoded array: the pixels of one picture, or numbers."""
        part = self._prepared(array)[None] if picture else self.from_array(array)
        self.rows += len(part)
        self._check_rows(self.rows)
        self.parts.append(part)

    def taken(self) -> Inputs:
        if not self.parts:
            raise Problem(400, "no pictures came; expected at least one.")
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def from_lists(self, value: object) -> Inputs:
        """Nested lists (B, ...), or one input without the batch axis."""
        return self.from_array(numbers(value, self.limits))

    def from_npy(self, body: bytes) -> Inputs:
        return self.from_array(read_npy(body))

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
            shape = self.limits.declared()
            raise Problem(400, f"inputs have shape {array.shape}; expected {shape}, at least one row.")
        self._check_rows(len(array))
        if array.dtype == NUMBERS:
            return array
        with np.errstate(over="ignore"):
            return array.astype(NUMBERS)

    def from_pixels(self, array: NDArray[np.uint8]) -> Inputs:
        """One picture, grey or with its channels first or last, or several."""
        try:
            pictures, _ = pictures_in(array, self.declared)
        except InputError as error:
            raise Problem(400, str(error)) from None
        self._check_rows(len(pictures))
        if (size := pictures.shape[1] * pictures.shape[2]) > self.limits.max_pixels:
            raise Problem(413, f"a picture has {size:,} pixels; at most {self.limits.max_pixels:,} are taken.")
        if pictures.ndim == 3:  # grey
            pictures = pictures[..., None]
        together = max(1, TOGETHER // max(size, math.prod(self.declared.shape)))
        blocks = [pictures[i : i + together] for i in range(0, len(pictures), together)]
        return np.concatenate([self._prepared(np.array(block), prepare_all) for block in blocks])

    def _prepared(self, pixels: NDArray[np.uint8], prepare: Callable[[Tensor, Input], Tensor] = prepare) -> Inputs:
        try:
            return prepare(torch.from_numpy(pixels), self.declared).numpy()
        except InputError as error:
            raise Problem(400, str(error)) from None

    def _check_rows(self, rows: int) -> None:
        self.limits.check_rows(rows)
        self.check(rows)
