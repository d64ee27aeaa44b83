"""From pixels to the input that a model declares."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.manifest import Input

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def prepare(pixels: Tensor, declared: Input) -> Tensor:
    """One picture, uint8 (H, W) or (H, W, channels), -> the input (channels, height, width) in float32."""
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
        x = x[:-1]  # transparency says nothing about the picture
    if len(x) == channels:
        return x
    if len(x) == 1:
        return x.expand(channels, -1, -1)
    if len(x) == 3 and channels == 1:
        return (x * torch.tensor(LUMINANCE)[:, None, None]).sum(0, keepdim=True)
    raise InputError(f"a picture has {len(x)} channels; this model takes {channels}.")
