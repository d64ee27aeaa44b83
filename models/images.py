"""Converts pictures to the input that a model declares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.manifest import Fitting, Input
from dubito.models.pixels import pixels_of

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
CHANNELS = (1, 2, 3, 4)  # of a picture: grey and colour, each without and with transparency
LARGEST_RESIZED = 1 << 25  # pixels, before the middle is cut out
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")  # of files in folders
AT_ONCE = 1 << 24  # numbers of pictures that are prepared at a time: in float32 they take four times the bytes


def read_pixels(file: str | Path | IO[bytes], fitting: Fitting | None = None) -> NDArray[np.uint8]:
    """Pixels of a picture file: (H, W) if grey, else (H, W, 3); raises ValueError or OSError."""
    from PIL import Image  # slow to import, and not needed for tensors

    try:
        with Image.open(file) as picture:
            return pixels_of(picture, exif=fitting is not None and fitting.exif)
    except OSError as error:  # UnidentifiedImageError is one
        if error.strerror is not None:
            raise
        raise ValueError("no picture that can be read; expected PNG, JPEG and the like") from None
    except ValueError:
        raise
    except Exception as error:  # Pillow raises many kinds, all of them about the file
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class PixelLayout:
    """How an array of pixels holds its pictures."""

    single: bool  # one picture, without a batch axis
    first: bool = False  # the channels come before height and width

    def pictures(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The batch (B, H, W) or, with the channels last, (B, H, W, channels)."""
        array = np.moveaxis(array, -3, -1) if self.first else array
        return array[None] if self.single else array


def layout_of(shape: Sequence[int], declared: Input, *, several: bool = False) -> PixelLayout:
    """How an array of this shape holds pictures for the model; with `several`, its first axis is known to count them.

    The axis of the channels is told by its length. Three axes are one picture where one of them can be its channels,
    (H, W, channels) or as many in front as the model has, and else grey pictures. Where both ends can be, the model's
    own height and width decide.
    """
    channels, height, width = declared.shape
    shape, numbers = tuple(shape), {*CHANNELS, channels}
    single = len(shape) in (2, 3) and not several
    first = last = False
    if 0 not in shape and (len(shape) == 4 or (len(shape) == 3 and single)):
        first = shape[-3] == channels or (shape[-3] in numbers and not single)
        last = shape[-1] in numbers
        if first and last and (height, width) in (shape[-2:], shape[-3:-1]):
            first = shape[-2:] == (height, width)
            last = not first
    if first and last:
        raise InputError(
            f"pixels have shape {shape}, of which the channels may be first or last; expected pictures of the model's "
            f"own {height} × {width} pixels, or other sides."
        )
    if 0 in shape or not 2 + several <= len(shape) <= 4 or (len(shape) == 4 and not first and not last):
        raise InputError(
            f"pixels have shape {shape}; expected (H, W), (H, W, channels), (channels, H, W) or several of them."
        )
    return PixelLayout(single and (first or last or len(shape) == 2), first)


def pictures_in(array: NDArray[np.uint8], declared: Input) -> tuple[NDArray[np.uint8], bool]:
    """A batch of pictures, channels last, and whether the array was a single picture."""
    layout = layout_of(array.shape, declared)
    return layout.pictures(array), layout.single


def prepare(pixels: Tensor, declared: Input) -> Tensor:
    """The model's input (channels, height, width) in float32 from a picture, uint8 (H, W) or (H, W, channels)."""
    return prepare_all(pixels[None], declared)[0]


def prepare_all(pixels: Tensor, declared: Input) -> Tensor:
    """The model's inputs (B, channels, height, width) from pictures of one size: uint8, (B, H, W) or with channels."""
    if declared.image is None:
        raise InputError(
            f"this model takes tensors of shape {declared.shape}, not pictures: give a .npy file of that shape."
        )
    if pixels.dtype != torch.uint8 or pixels.dim() not in (3, 4) or 0 in pixels.shape:
        raise _no_picture(pixels.shape[1:], pixels.dtype)
    if pixels.dim() == 3:
        pixels = pixels[..., None]
    mean, std = (torch.tensor(v)[:, None, None] for v in (declared.image.mean, declared.image.std))
    parts = []
    for part in pixels.split(_rows_at_once(pixels.shape)):
        x = fitted(part.permute(0, 3, 1, 2).float().div_(255), declared.shape, declared.image.fitting or Fitting())
        parts.append((x - mean) / std)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def prepare_array(pictures: NDArray[np.uint8], declared: Input) -> Tensor:
    """The same of an array, which may be a mapped file, and read-only: a part of it is copied at a time."""
    rows = _rows_at_once(pictures.shape)
    parts = [pictures[i : i + rows] for i in range(0, max(1, len(pictures)), rows)]
    return torch.cat([prepare_all(torch.from_numpy(np.array(part)), declared) for part in parts])


def _rows_at_once(shape: Sequence[int]) -> int:
    return max(1, AT_ONCE // max(1, math.prod(shape[1:])))


def _no_picture(shape: Sequence[int], dtype: torch.dtype) -> InputError:
    return InputError(f"a picture came as {dtype} of shape {tuple(shape)}; expected uint8 (height, width, channels).")


def is_shown(path: str) -> bool:
    """Whether no part of a path is hidden, as `.ipynb_checkpoints`, `__MACOSX` and `._1.jpg` are."""
    return not any(part.startswith((".", "__MACOSX")) for part in Path(path).parts)


def fitted(x: Tensor, shape: tuple[int, ...], fitting: Fitting) -> Tensor:
    """A picture (c, h, w), or several (B, c, h, w), with the channels, height and width of `shape`.

    Values are in [0, 1] or, as data sets are kept, uint8, which rounding changes by a step at most.
    """
    x = with_channels(x, shape[0])
    height, width = x.shape[-2:]
    sides, (top, left) = fitting.box(height, width, shape)
    if sides[0] * sides[1] > max(LARGEST_RESIZED, shape[1] * shape[2]):
        raise InputError(f"a picture of {height} × {width} pixels is too long to cut the middle out of.")
    if (height, width) != sides:
        whole = F.interpolate(x.reshape(-1, *x.shape[-3:]), sides, mode=fitting.interpolation, antialias=True)
        x = whole.reshape(*x.shape[:-2], *sides)
        if fitting.interpolation == "bicubic" and x.is_floating_point():
            x = x.clamp(0, 1)  # beside edges it goes beyond
    return x[..., top : top + shape[1], left : left + shape[2]]


def with_channels(x: Tensor, channels: int) -> Tensor:
    """A picture (c, h, w), or several, with the model's number of channels; transparency is dropped."""
    if x.shape[-3] in (2, 4):
        x = x[..., :-1, :, :]  # drop transparency
    if (came := x.shape[-3]) == channels:
        return x
    if came == 1:
        return x.expand(*x.shape[:-3], channels, -1, -1)
    if came == 3 and channels == 1:
        grey = (x * torch.tensor(LUMINANCE)[:, None, None]).sum(-3, keepdim=True)
        return grey if x.is_floating_point() else grey.round().to(x.dtype)
    raise InputError(f"a picture has {came} channels; this model takes {channels}.")
