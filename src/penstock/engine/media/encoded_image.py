"""An image file as its headers describe it: its size, the work of decoding it, and the bytes that its pixels need.

A file of a few bytes can cost a decoder much work: each scan of a JPEG passes over all pixels for 50 bytes, and
comments, profiles and EXIF directories are read, unpacked and joined. So the headers are walked first, in linear time
and without decoding, and the decoder gets a file with only the parts that pixels need. `image_processor` limits the
work, and Pillow decodes the pixels.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

MAX_PARTS = 1 << 16  # segments, chunks or blocks of a file: Pillow reads each in Python, some microseconds
PIECE = 1 << 20  # bytes that are searched before other threads have their turn
UPRIGHT = 1  # the orientation of EXIF that changes nothing; 2 to 8 turn and mirror


class EncodedImage(NamedTuple):
    """The first frame of an image file."""

    format: str  # as Pillow calls it
    width: int
    height: int
    scans: int  # over the pixels: 1, but for a JPEG
    work: int  # of decoding it: pixels, for each component of each scan
    orientation: int
    data: bytes  # a file of only what its pixels need

    @classmethod
    def parse(cls, raw: bytes) -> EncodedImage:
        """Walks the headers of a file. Raises ValueError with the defect of a malformed file."""
        for head, parse in _PARSERS.items():
            if head.match(raw):
                try:
                    encoded = parse(raw)
                except (struct.error, IndexError):
                    raise ValueError("the headers are cut off") from None
                if encoded.work == 0:
                    raise ValueError(f"the size is {encoded.width} x {encoded.height}, in {encoded.scans} scans")
                return encoded
        raise ValueError("its first bytes are of none of these formats")

    @classmethod
    def of_one_scan(cls, format: str, size: tuple[int, int], parts: list[bytes], orientation: int) -> EncodedImage:
        width, height = size
        return cls(format, width, height, 1, width * height, orientation, b"".join(parts))


def _too_many_parts() -> ValueError:
    return ValueError(f"it has more than {MAX_PARTS} parts")


# ── JPEG ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
DHT, EOI, SOS, DQT, DRI, APP0, APP1, APP14 = 0xC4, 0xD9, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE
FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive, by Huffman's code: what browsers show
OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # those with a length, and EOI; the data of a scan has none of them


def _parse_jpeg(raw: bytes) -> EncodedImage:
    parts = [raw[:2]]
    width = height = scans = work = 0
    orientation = UPRIGHT
    needed = {DHT, DQT, DRI, APP0, APP14}  # APP0 and APP14 say what the components are; the first of each counts
    at = 2
    for _ in range(MAX_PARTS):
        begin = _find_marker(raw, at)
        if begin == len(raw):  # no end marker: the decoder finds out whether the file is complete
            break
        marker = raw[begin + 1]
        if marker == EOI:
            parts.append(raw[begin : begin + 2])
            break
        (length,) = struct.unpack_from(">H", raw, begin + 2)
        at = begin + 2 + length
        if length < 2 or at > len(raw):
            raise ValueError("a segment is cut off")
        if marker in FRAMES:
            if width:
                raise ValueError("the JPEG has several frames")
            height, width = struct.unpack_from(">HH", raw, begin + 5)
        elif marker in OTHER_FRAMES:
            raise ValueError(
                "expected a baseline or progressive JPEG, got a lossless, hierarchical or arithmetically coded one"
            )
        elif marker == SOS:
            at = _find_marker(raw, at)
            scans += 1
            work += raw[begin + 4] * width * height
        elif marker in (APP0, APP14) and marker in needed:
            needed.remove(marker)
        elif marker not in needed:
            if marker == APP1 and raw.startswith(b"Exif\0\0", begin + 4):
                orientation = _orientation(raw[begin + 10 : at])
            continue
        parts.append(raw[begin:at])
    else:
        raise _too_many_parts()
    return EncodedImage("JPEG", width, height, scans, work, orientation, b"".join(parts))


def _find_marker(raw: bytes, at: int) -> int:
    """Returns the position of the next marker, or the length of the file if there is none."""
    for start in range(at, len(raw), PIECE):
        match = MARKER.search(raw, start, start + PIECE + 1)
        if match is not None:
            return match.start()
    return len(raw)


# ── PNG ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
IEND = b"\0\0\0\0IEND\xaeB\x60\x82"


def _parse_png(raw: bytes) -> EncodedImage:
    """Frames of an animation are chunks of their own."""
    if raw[12:16] != b"IHDR":
        raise ValueError("the first chunk is not IHDR")
    size = struct.unpack_from(">II", raw, 16)
    parts = [raw[:8]]
    orientation = UPRIGHT
    needed = {b"IHDR", b"PLTE", b"tRNS"}  # the first of each
    has_data = is_data_over = False
    at = 8
    for _ in range(MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", raw, at) if at + 12 <= len(raw) else (0, b"IEND")
        begin, at = at, at + 12 + length
        if kind == b"IEND":
            break
        if kind == b"IDAT" and not is_data_over:
            parts.append(raw[begin:at])  # a truncated chunk, too: the decoder reports it
            has_data = True
            continue
        is_data_over = has_data
        if kind in needed:
            needed.remove(kind)
            parts.append(raw[begin:at])
        elif kind == b"eXIf":
            orientation = _orientation(raw[begin + 8 : at - 4])
    else:
        raise _too_many_parts()
    return EncodedImage.of_one_scan("PNG", size, [*parts, IEND], orientation)


# ── GIF ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
EXTENSION, FRAME, TRAILER, GRAPHIC_CONTROL = 0x21, 0x2C, 0x3B, 0xF9


def _parse_gif(raw: bytes) -> EncodedImage:
    width, height, flags = struct.unpack_from("<HHB", raw, 6)
    at = 13 + _palette_nbytes(flags)
    parts = [raw[:at], b""]
    for _ in range(MAX_PARTS):
        begin, kind = at, raw[at]
        if kind == FRAME:
            left, top, across, down = struct.unpack_from("<HHHH", raw, at + 1)
            size = max(width, left + across), max(height, top + down)  # Pillow makes room for all of the frame
            return EncodedImage.of_one_scan("GIF", size, [*parts, raw[at:]], UPRIGHT)
        if kind == TRAILER:
            break
        at += 1
        if kind != EXTENSION:
            continue
        at = _end_of_blocks(raw, begin + 2)
        if raw[begin + 1] == GRAPHIC_CONTROL:  # the last one before the frame says which colour it lies on
            parts[1] = raw[begin:at]
    else:
        raise _too_many_parts()
    raise ValueError("the file has no frame")


def _palette_nbytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _end_of_blocks(raw: bytes, at: int) -> int:
    for _ in range(MAX_PARTS):
        length = raw[at]
        at += 1 + length
        if not length:
            return at
    raise _too_many_parts()


# ── WebP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _parse_webp(raw: bytes) -> EncodedImage:
    """Parses a file that begins with its only frame, or with the canvas of several."""
    parts: list[bytes] = []
    orientation = UPRIGHT
    needed = {b"VP8X", b"ANIM", b"ANMF", b"ALPH", b"VP8 ", b"VP8L"}  # the first of each
    at = 12
    for _ in range(MAX_PARTS):
        if at + 8 > len(raw):
            break
        kind, length = struct.unpack_from("<4sI", raw, at)
        begin, at = at, at + 8 + length + length % 2
        if kind in needed:
            needed.remove(kind)
            parts.append(raw[begin:at])
        elif kind == b"EXIF":
            orientation = _orientation(raw[begin + 8 : at])
    else:
        raise _too_many_parts()
    data = b"".join(parts)
    head = b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WEBP"
    return EncodedImage.of_one_scan("WEBP", _size_of_webp(data), [head, data], orientation)


def _size_of_webp(data: bytes) -> tuple[int, int]:
    kind = data[:4]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[12:15], "little"), 1 + int.from_bytes(data[15:18], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 9)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 14)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("the file has no frame")


# ── EXIF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _orientation(exif: bytes) -> int:
    """Returns the orientation in the first EXIF directory; UPRIGHT if it has none."""
    tiff = exif[6:] if exif.startswith(b"Exif\0\0") else exif
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return UPRIGHT
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
            if (tag, kind) == (0x0112, 3):  # a SHORT
                return value if 1 <= value <= 8 else UPRIGHT
    except struct.error:
        pass
    return UPRIGHT


_PARSERS = {
    re.compile(rb"\xff\xd8\xff"): _parse_jpeg,
    re.compile(rb"\x89PNG\r\n\x1a\n"): _parse_png,
    re.compile(rb"GIF8[79]a"): _parse_gif,
    re.compile(rb"RIFF.{4}WEBP", re.DOTALL): _parse_webp,
}
