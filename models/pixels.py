"""Pixels of pictures, without torch: processes that only decode pictures start sooner and stay small."""

import re
import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ORIENTATION, LONG = 0x0112, 4  # a tag of EXIF, and the type of numbers of four bytes
MOST_TAGS = 1024  # that are looked through: Pillow takes seconds for as many as a file may have
XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


def pixels_of(picture: "Picture", *, exif: bool) -> NDArray[np.uint8]:
    """Pixels: (H, W) if grey, else (H, W, 3); `exif`: turned as the EXIF orientation says."""
    picture.load()  # a PNG may have its EXIF after its pixels
    if picture.mode == "F":
        raise ValueError("its pixels are floats of no known range; give them as .npy")
    if picture.mode.startswith("I"):  # 16 bits; Pillow's own conversion would cut them off at 255
        pixels = (np.array(picture).clip(0, 65535) >> 8).astype(np.uint8)
    else:
        pixels = np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    return turned(pixels, orientation_of(picture)) if exif else pixels


def orientation_of(picture: "Picture") -> int:
    """How its EXIF, or else its XMP, says that a loaded picture lies, 1 to 8; 1, upright, where neither says it.

    A TIFF is turned by Pillow as it is loaded.
    """
    if picture.format == "TIFF":
        return 1
    said = _by_exif(picture.info.get("exif", b"").removeprefix(b"Exif\0\0"))
    if said is None:
        xmp = picture.info.get("XML:com.adobe.xmp") or picture.info.get("xmp", b"")
        found = XMP.search(xmp.encode() if isinstance(xmp, str) else xmp)
        said = 1 if found is None else int(found[1])
    return said if 1 <= said <= 8 else 1


def _by_exif(exif: bytes) -> int | None:
    """The orientation among the first tags; None where it is not there."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    try:
        if order is not None:
            (start,) = struct.unpack_from(order + "I", exif, 4)
            (count,) = struct.unpack_from(order + "H", exif, start)
            for at in range(start + 2, start + 2 + 12 * min(count, MOST_TAGS), 12):
                tag, kind = struct.unpack_from(order + "HH", exif, at)
                if tag == ORIENTATION:
                    value: int = struct.unpack_from(order + ("I" if kind == LONG else "H"), exif, at + 8)[0]
                    return value
    except struct.error:  # it is cut off
        pass
    return None


def turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Pixels that lie so, upright."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows, columns = (slice(None, None, -1 if orientation in those else 1) for those in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(pixels[rows, columns])
