"""Converts pictures to the input that a model declares."""

from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.manifest import Input

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def read_pixels(file: str | Path | IO[bytes]) -> NDArray[np.uint8]:
    """Pixels of a picture file: (H, W) if grey, else (H, W, 3); raises ValueError or OSError."""
    from PIL import Image  # slow to import, and not needed for tensors

    try:
        with Image.open(file) as picture:
            return pixels_of(picture)
    except OSError as error:  # UnidentifiedImageError is one
        if error.strerror is not None:
            raise
        raise ValueError("no picture that can be read; expected PNG, JPEG and the like") from None
    except ValueError:
        raise
    except Exception as error:  # Pillow raises many kinds, all of them about the file
        raise ValueError(str(error)) from None


def pixels_of(picture: "Picture") -> NDArray[np.uint8]:
    """Pixels: (H, W) if grey, else (H, W, 3)."""
    if picture.mode == "F":
        raise ValueError("its pixels are floats of no known range; give them as .npy")
    if picture.mode.startswith("I"):  # 16 bits; Pillow's own conversion would cut them off at 255
        return (np.array(picture).clip(0, 65535) >> 8).astype(np.uint8)
    return np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))


def pictures_in(array: NDArray[np.uint8], declared: Input) -> tuple[NDArray[np.uint8], bool]:
    """A batch of pictures, channels last, and whether the array was a single picture, (H, W) or (H, W, channels).

    An array with the declared shape, as the network takes it, has its channels first.
    """
    if array.shape[-3:] == declared.shape:
        array = np.moveaxis(array, -3, -1)
    single = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
    return (array[None] if single else array), single


def prepare(pixels: Tensor, declared: Input) -> Tensor:
    """The model's input (channels, height, width) in float32 from a picture, uint8 (H, W) or (H, W, channels)."""
    if declared.image is None:
        raise InputError(
            f"this model takes tensors of shape {declared.shape}, not pictures: give a .npy file of that shape."
        )
    channels, height, width = declared.shape
    if pixels.dtype != torch.uint8 or pixels.dim() not in (2, 3) or 0 in pixels.shape:
        raise InputError(
            f"a picture came as {pixels.dtype} of shape {tuple(pixels.shape)}; "
            "expected uint8 (height, width, channels)."
        )
    x = (pixels[..., None] if pixels.dim() == 2 else pixels).permute(2, 0, 1).float() / 255
    x = _with_channels(x, channels)
    if x.shape[1:] != (height, width):
        x = F.interpolate(x[None], (height, width), mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(v)[:, None, None] for v in (declared.image.mean, declared.image.std))
    return (x - mean) / std


def _with_channels(x: Tensor, channels: int) -> Tensor:
    if len(x) in (2, 4):
        x = x[:-1]  # drop transparency
    if len(x) == channels:
        return x
    if len(x) == 1:
        return x.expand(channels, -1, -1)
    if len(x) == 3 and channels == 1:
        return (x * torch.tensor(LUMINANCE)[:, None, None]).sum(0, keepdim=True)
    raise InputError(f"a picture has {len(x)} channels; this model takes {channels}.")
