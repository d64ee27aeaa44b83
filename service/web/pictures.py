"""What it costs to decode a picture, by the bytes of its file, before anything opens it.

A JPEG is decoded over all its pixels once for each of its scans. And Pillow looks at the parts of a file (chunks,
markers, comments, bytes that are none of these) one after the other, and at each entry of its EXIF, in Python: a file
of a few pixels may take seconds.
"""

import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from dubito.service.problems import Problem

MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # of a JPEG, in the data of a scan
MARK = re.compile(rb"\xff[^\x00\xff]")  # of a JPEG, before its first scan
LIGHT = 1 << 20  # cost of the pictures of a light request, in pixels × scans: some 20 ms
PLAIN, PLAIN_BYTES, MOST_PARTS = 1 << 17, 1 << 18, 32  # of pictures that the server decodes itself
MOST_SAID = 1 << 13  # bytes of the metadata of such a JPEG
PNG_PARTS = frozenset(b"IHDR PLTE IDAT IEND tRNS gAMA pHYs sRGB cHRM bKGD sBIT tIME eXIf".split())
MOST_PLAIN = 16  # such pictures of a request: each takes a tenth of a millisecond, however small
UNKNOWN = 1 << 62  # cost of a picture of which the header says nothing
MOST_WALKED = 1 << 16  # parts of the pictures of a request: some 0.3 s
MOST_METADATA = 1 << 22  # bytes of their metadata: some 1.2 s where all of it is EXIF
PER_PART, PER_BYTE = 256, 16  # pixels that cost as much as a part, and as a byte of metadata
OF_PIXELS = frozenset((b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"IEND"))  # chunks of a PNG


@dataclass
class Beside:
    """What files have beside their pixels."""

    parts: int = 0
    metadata: int = 0  # bytes

    def __iadd__(self, other: "Beside") -> "Beside":
        self.parts, self.metadata = self.parts + other.parts, self.metadata + other.metadata
        return self

    @property
    def cost(self) -> int:
        return PER_PART * self.parts + PER_BYTE * self.metadata

    def check(self) -> None:
        if self.parts > MOST_WALKED:
            said = f"the files of the pictures have more than {MOST_WALKED:,} parts, which is what a request may have."
            raise Problem(413, said, reason="picture")
        if self.metadata > MOST_METADATA:
            said = f"the pictures have {self.metadata:,} bytes of metadata; a request may have {MOST_METADATA:,}."
            raise Problem(413, said, reason="picture")


def beside_pixels(file: bytes) -> Beside:
    """What a file has beside its pixels; of parts, no more than one above what is taken are counted."""
    if file.startswith(b"\x89PNG\r\n\x1a\n"):
        return _beside_png(file)
    if file.startswith(b"\xff\xd8"):
        return _beside_jpeg(file)
    if file[:6] in (b"GIF87a", b"GIF89a"):
        return _beside_gif(file)
    return Beside()


def _beside_png(png: bytes) -> Beside:
    found, place = Beside(), 8
    while place + 8 <= len(png) and found.parts <= MOST_WALKED:
        length, kind = struct.unpack_from(">I4s", png, place)
        found.parts += 1
        if kind not in OF_PIXELS:
            found.metadata += min(length, len(png) - place)
        if kind == b"IEND":
            break
        place += 12 + length
    return found


def _beside_jpeg(jpeg: bytes) -> Beside:
    """Up to the first scan: what follows is looked at by libjpeg, which is quick."""
    found, place = Beside(), 2
    while found.parts <= MOST_WALKED:
        mark = MARK.search(jpeg, place)
        found.parts += (len(jpeg) if mark is None else mark.start()) - place  # Pillow looks at each of these bytes
        if mark is None:
            break
        kind, place = jpeg[mark.end() - 1], mark.end()
        found.parts += 1
        if kind in (0xD9, 0xDA) or place + 2 > len(jpeg):
            break
        if kind != 0x01 and not 0xD0 <= kind <= 0xD8:  # the others have a length
            length = max(2, struct.unpack_from(">H", jpeg, place)[0])
            found.metadata += length if kind >= 0xE0 else 0
            place += length
    return found


def _beside_gif(gif: bytes) -> Beside:
    """Up to the first frame, the only one that is decoded."""
    found, place = Beside(), 13
    if len(gif) > 10 and gif[10] & 0x80:  # its palette
        place += 3 << (gif[10] & 7) + 1
    while place < len(gif) and found.parts <= MOST_WALKED:
        kind, place = gif[place], place + 1
        found.parts += 1
        if kind in b",;":
            break
        if kind == 0x21:  # an extension: its label, and blocks of up to 255 bytes
            place += 1
            while place < len(gif) and (size := gif[place]) and found.parts <= MOST_WALKED:
                found.parts += 1
                found.metadata += size
                place += 1 + size
            place += 1
    return found


def scans_of(jpeg: bytes) -> int:
    """Number of scans of a JPEG: each is decoded over the whole picture."""
    scans, place = 0, 2
    while (found := MARKER.search(jpeg, place)) is not None:
        place = found.end()
        kind = jpeg[place - 1]
        if kind == 0xD9:
            break
        if kind not in (0x01, 0xD8):  # the others have a length
            (length,) = struct.unpack_from(">H", jpeg, place) if place + 2 <= len(jpeg) else (2,)
            place += max(2, length)
        scans += kind == 0xDA
    return scans


def cost_of(picture: bytes) -> int:
    """Pixels × scans by the first bytes of a file, before it is opened; UNKNOWN where these say nothing."""
    with suppress(struct.error):
        if picture.startswith(b"\x89PNG\r\n\x1a\n"):
            return _area(*struct.unpack_from(">II", picture, 16))
        if picture[:6] in (b"GIF87a", b"GIF89a"):
            return _area(*struct.unpack_from("<HH", picture, 6))
        if picture.startswith(b"BM"):
            return _area(*struct.unpack_from("<ii", picture, 18))
        if picture.startswith(b"\xff\xd8"):
            return _jpeg_cost(picture)
    return UNKNOWN


def _area(width: int, height: int) -> int:
    return abs(width * height)  # a BMP upside down has a negative height


def _jpeg_cost(jpeg: bytes) -> int:
    """By the parts before its first scan, which follow each other without a gap."""
    place, parts = 2, 0
    while parts < MOST_PARTS and (found := MARKER.match(jpeg, place)) is not None:
        place, parts = found.end(), parts + 1
        kind = jpeg[place - 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the frame's header
            return max(1, jpeg.count(b"\xff\xda")) * _area(*struct.unpack_from(">HH", jpeg, place + 3))
        if kind not in (0x01, 0xD8):
            place += struct.unpack_from(">H", jpeg, place)[0]
    return UNKNOWN


def light(pictures: Sequence[bytes]) -> bool:
    """Whether pictures cost little by their first bytes; to look for the scans of more bytes would take long."""
    if sum(map(len, pictures)) > LIGHT:
        return False
    costs = accumulate(map(cost_of, pictures))
    return all(cost <= LIGHT for cost in costs)


def plain(pictures: Sequence[bytes]) -> bool:
    """Whether pictures are so small and ordinary that to decode them takes a few milliseconds, whatever is in them."""
    if len(pictures) > MOST_PLAIN or sum(map(len, pictures)) > PLAIN_BYTES:
        return False
    cost = sum(cost_of(picture) if _ordinary(picture) else UNKNOWN for picture in pictures)
    return cost <= PLAIN


def _ordinary(picture: bytes) -> bool:
    """A PNG or JPEG of few parts, none of which unpacks to more than its pixels, and of little metadata."""
    place, parts = 8, 0
    try:
        if picture.startswith(b"\x89PNG\r\n\x1a\n") and picture[28] == 0:  # not interlaced
            while parts < MOST_PARTS and place < len(picture):
                length, chunk = struct.unpack_from(">I4s", picture, place)
                if chunk not in PNG_PARTS:
                    return False
                place, parts = place + 12 + length, parts + 1
        elif picture.startswith(b"\xff\xd8"):
            place, said = 2, 0
            while parts < MOST_PARTS and (kind := picture[place + 1]) != 0xDA:
                (length,) = struct.unpack_from(">H", picture, place + 2)
                said += length if kind >= 0xE0 else 0
                if picture[place] != 0xFF or said > MOST_SAID:
                    return False
                place, parts = place + 2 + length, parts + 1
        else:
            return False
    except (struct.error, IndexError):
        return False
    return parts < MOST_PARTS
