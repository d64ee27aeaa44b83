"""Pictures as their files say that they lie. Pillow's own reading is the oracle."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from dubito.models.pixels import pixels_of


def picture(kind: str, colour: bool = True, **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3) if colour else (5, 7), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def agree(file: bytes) -> None:
    with Image.open(io.BytesIO(file)) as ours, Image.open(io.BytesIO(file)) as theirs:
        upright = ImageOps.exif_transpose(theirs)
        np.testing.assert_array_equal(pixels_of(ours, exif=True), pixels_of(upright, exif=False))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("colour", [True, False])
def test_pictures_are_turned_as_exif_says(kind: str, colour: bool) -> None:
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x010F], exif[0x0112] = "a camera", orientation
        agree(picture(kind, colour, exif=exif))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [3, 4])  # numbers of two bytes, and of four
def test_either_order_of_bytes(order: str, kind: int) -> None:
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((6, 0) if kind == 3 else (6,)))
    tag = struct.pack(order + "HHI", 0x0112, kind, 1) + value
    exif = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1) + tag + bytes(4)
    whole = picture("JPEG", exif=b"Exif\0\0" + exif)
    agree(whole)
    with Image.open(io.BytesIO(whole)) as one:
        assert pixels_of(one, exif=True).shape == (7, 5, 3)


def test_xmp_where_there_is_no_exif() -> None:
    for text in (b'<x tiff:Orientation="8"/>', b"<tiff:Orientation>3</tiff:Orientation>", b"<x/>"):
        agree(picture("JPEG", xmp=text))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's
@pytest.mark.parametrize("exif", [b"II*\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\x05\0\x12", b"nothing of it"])
def test_exif_that_is_cut_off_says_nothing(exif: bytes) -> None:
    with Image.open(io.BytesIO(picture("JPEG", exif=b"Exif\0\0" + exif))) as one:
        assert pixels_of(one, exif=True).shape == (5, 7, 3)
