"""Pixels of pictures, without torch: processes that only decode pictures start sooner and stay small."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def pixels_of(picture: "Picture", *, exif: bool) -> NDArray[np.uint8]:
    """Pixels: (H, W) if grey, else (H, W, 3); `exif`: turned as the EXIF orientation says."""
    if exif:
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floats of no known range; give them as .npy")
    if picture.mode.startswith("I"):  # 16 bits; Pillow's own conversion would cut them off at 255
        return (np.array(picture).clip(0, 65535) >> 8).astype(np.uint8)
    return np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
