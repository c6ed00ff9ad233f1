"""Headers of image files: what they say of the work, what is left out for the decoder, and what is refused."""

import functools
import io
import random
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest

pillow = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'penstock[engine]'")

from PIL import ImageOps, PngImagePlugin  # noqa: E402

from penstock.engine.media.encoded_image import MAX_PARTS, EncodedImage  # noqa: E402

ORIENTATION = 0x0112
COMMENT = b"nothing that pixels need" * 40


def saved(format: str, mode: str = "RGB", size: tuple[int, int] = (37, 22), **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 4), np.uint8)
    picture = pillow.fromarray(noise).convert("RGB").convert(mode)
    raw = io.BytesIO()
    if options.pop("frames", 1) > 1:
        options |= {"save_all": True, "append_images": [picture.rotate(180), picture.rotate(90)]}
    picture.save(raw, format, **options)
    return raw.getvalue()


def exif(orientation: int) -> bytes:
    exif = pillow.Exif()
    exif[0x010E] = "a picture"  # comes before it
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def text() -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "text", zip=True)
    return info


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def scans_of_nothing(scans: int, side: int = 2000) -> bytes:
    """A progressive JPEG that is grey: its scans say of all blocks that nothing is in them."""
    blocks, bits = ((side + 7) // 8) ** 2, ""
    while blocks > 0:
        run = max(1 << 14, min(blocks, (1 << 15) - 1))
        bits, blocks = bits + f"0{run - (1 << 14):014b}", blocks - run
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    head = segment(0xDB, bytes([0] + [1] * 64)) + segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    codes = segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\xe0")
    return b"\xff\xd8" + head + codes + (segment(0xDA, b"\1\1\0\1\x3f\0") + data) * scans + b"\xff\xd9"


FILES = {
    "jpeg": lambda: saved("JPEG"),
    "jpeg, grey": lambda: saved("JPEG", "L"),
    "jpeg of four colours": lambda: saved("JPEG", "CMYK"),
    "jpeg, progressive": lambda: saved("JPEG", progressive=True),
    "jpeg with restarts": lambda: saved("JPEG", size=(200, 90), restart_marker_blocks=3),
    "jpeg with a comment and a profile": lambda: saved("JPEG", comment=COMMENT, icc_profile=COMMENT),
    "jpeg, not subsampled": lambda: saved("JPEG", subsampling=0, quality=100),
    "jpeg that fills before markers": lambda: saved("JPEG").replace(b"\xff\xda", b"\xff\xff\xff\xda"),
    "jpeg and more behind it": lambda: saved("JPEG") + b"\xff\xda" + COMMENT,
    "several jpegs": lambda: saved("MPO", frames=3),
    **{f"jpeg, turned {way}": functools.partial(saved, "JPEG", exif=exif(way)) for way in range(1, 9)},
    "png": lambda: saved("PNG"),
    "png of a palette": lambda: saved("PNG", "P"),
    "png, translucent": lambda: saved("PNG", "RGBA"),
    "png of 1 bit": lambda: saved("PNG", "1"),
    "png of 16 bits": lambda: saved("PNG", "I;16"),
    "png with transparency": lambda: saved("PNG", "P", transparency=3),
    "png with text and a profile": lambda: saved("PNG", pnginfo=text(), icc_profile=COMMENT),
    "png, turned": lambda: saved("PNG", exif=exif(6)),
    "png, animated": lambda: saved("PNG", frames=3),
    "png in many chunks": lambda: in_many_chunks(saved("PNG")),
    "png without its end": lambda: saved("PNG")[:-12],
    "gif": lambda: saved("GIF", "P"),
    "gif with a comment": lambda: saved("GIF", "P", comment=COMMENT),
    "gif, animated": lambda: saved("GIF", "P", frames=3, loop=0, disposal=2),
    "gif with transparency": lambda: saved("GIF", "P", transparency=3),
    "webp": lambda: saved("WEBP"),
    "webp, lossless": lambda: saved("WEBP", lossless=True),
    "webp, translucent": lambda: saved("WEBP", "RGBA"),
    "webp, animated": lambda: saved("WEBP", frames=3),
    "webp with a profile, turned": lambda: saved("WEBP", icc_profile=COMMENT, exif=exif(8)),
}


def in_many_chunks(raw: bytes) -> bytes:
    begin = raw.index(b"IDAT") - 4
    (length,) = struct.unpack_from(">I", raw, begin)
    data = raw[begin + 8 : begin + 8 + length]
    chunks = b"".join(chunk(b"IDAT", data[at : at + 10]) for at in range(0, length, 10))
    return raw[:begin] + chunks + chunk(b"IEND")


@pytest.mark.parametrize("name", FILES)
def test_trimmed_jpeg_decodes_to_the_same_picture(name: str) -> None:
    raw = FILES[name]()
    encoded = EncodedImage.parse(raw)
    before, after = pillow.open(io.BytesIO(raw)), pillow.open(io.BytesIO(encoded.data))
    assert after.size == (encoded.width, encoded.height) and after.format == encoded.format
    assert ImageOps.exif_transpose(before).convert("RGB").tobytes() == upright(after, encoded.orientation).tobytes()
    assert COMMENT not in encoded.data and not set(after.info) & {"exif", "comment", "icc_profile", "Text", "mp"}
    assert getattr(after, "n_frames", 1) == 1 or encoded.format == "GIF"  # GIF frames are read by number


def upright(picture: Any, orientation: int) -> Any:
    exif = pillow.Exif()
    exif[ORIENTATION] = orientation
    picture = picture.convert("RGB")
    picture.info["exif"] = exif.tobytes()
    return ImageOps.exif_transpose(picture)


def test_the_scans_of_a_jpeg_are_its_work() -> None:
    baseline, progressive = EncodedImage.parse(saved("JPEG")), EncodedImage.parse(saved("JPEG", progressive=True))
    assert (baseline.scans, baseline.work) == (1, 3 * 37 * 22)
    assert (progressive.scans, progressive.work) == (10, 14 * 37 * 22)  # two of them of all three components
    many = EncodedImage.parse(scans_of_nothing(500))
    assert (many.scans, many.work) == (500, 500 * 2000 * 2000)
    assert EncodedImage.parse(saved("PNG")).work == 37 * 22


def test_a_scan_within_what_is_not_needed_is_not_counted() -> None:
    raw = saved("JPEG", comment=saved("JPEG", progressive=True, size=(50, 50)))
    assert EncodedImage.parse(raw).scans == 1


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "first bytes are of none of these formats"),
        (b"BM" + bytes(100), "first bytes are of none of these formats"),
        (b"\xff\xd8\xff\xe0", "headers are cut off"),
        (b"\xff\xd8" + segment(0xE0, b"")[:3] + b"\xff", "a segment is cut off"),
        (b"\xff\xd8" + segment(0xC0, bytes(9)) * 2, "size is 0 x 0, in 0 scans"),
        (saved("JPEG").replace(b"\xff\xc0", b"\xff\xc9"), "lossless, hierarchical or arithmetically coded"),
        (b"\xff\xd8" + segment(0xFE, b"") * (MAX_PARTS + 1), "more than 65536 parts"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT") * 2, "first chunk is not IHDR"),
        (saved("PNG")[:33] + chunk(b"tEXt") * MAX_PARTS, "more than 65536 parts"),
        (b"GIF89a" + bytes(7) + b"!\xfe\1x" * 3, "headers are cut off"),
        (b"GIF89a" + bytes(7) + b";", "no frame"),
        (b"GIF89a" + bytes(7) + b"!\xfe" + b"\1x" * MAX_PARTS, "more than 65536 parts"),
        (b"GIF89a" + bytes(7) + b"!\xfe\0" * MAX_PARTS, "more than 65536 parts"),
        (b"RIFF\0\0\0\0WEBP", "no frame"),
        (b"RIFF\0\0\0\0WEBP" + b"ABCD\0\0\0\0" * MAX_PARTS, "more than 65536 parts"),
    ],
)
def test_invalid_image_file_is_refused_with_the_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EncodedImage.parse(raw)


@pytest.mark.parametrize("name", FILES)
def test_damaged_image_file_is_parsed_or_refused_without_growing(name: str) -> None:
    chance, raw = random.Random(name), FILES[name]()
    refused = 0
    for _ in range(300):
        broken = bytearray(raw[: chance.choice([len(raw), chance.randrange(len(raw))])])
        for _ in range(chance.randrange(4)):
            if broken:
                at = chance.randrange(min(len(broken), chance.choice([64, len(broken)])))
                broken[at : at + chance.choice([0, 1, 1, 4])] = chance.randbytes(chance.choice([0, 1, 2, 4]))
        try:
            encoded = EncodedImage.parse(bytes(broken))
        except ValueError:
            refused += 1
            continue
        assert len(encoded.data) <= len(broken) + 12
        assert 1 <= encoded.orientation <= 8 and encoded.width > 0 and encoded.height > 0
    assert 0 < refused < 300


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xd8" + b"\xff\x00" * 2_000_000,
        b"\xff\xd8" + b"\xff" * 4_000_000,
        scans_of_nothing(1) + bytes(4_000_000),
        scans_of_nothing(1)[:-2] + b"\xff\xd0" * 2_000_000,
        b"\xff\xd8" + segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0" + b"\xff\xff" + bytes(60_000)) * 60,
        b"GIF89a" + bytes(7) + b"!\xfe\xff" + bytes(4_000_000),
        b"GIF89a" + bytes(7) + b"x" * 4_000_000,
    ],
    ids=["escapes", "fill", "a tail", "restarts", "directories", "a comment", "nothing"],
)
def test_parsing_takes_no_longer_than_a_few_looks_at_each_byte(raw: bytes) -> None:
    began = time.process_time()
    try:
        EncodedImage.parse(raw)
    except ValueError:
        pass
    assert time.process_time() - began < 10  # it takes less than 0.2 s; a walk that is quadratic takes hours
