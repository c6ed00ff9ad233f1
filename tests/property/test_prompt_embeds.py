"""Files of prompt embeddings, mutated: each is read as NumPy and safetensors read it, or refused with a ValueError."""

from __future__ import annotations

import io
import json
import random
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.server.embeds.embeds_file import parse_embeds
from tests import tiers

load = pytest.importorskip("safetensors.numpy").load

# Pieces of headers: that they are put in the wrong places finds more than single bytes do.
PIECES = [
    *(b"\x93NUMPY\x01\x00", b"'descr': ", b"'<f4'", b"'<f2'", b"'|O'", b"'fortran_order': True", b"'shape': "),
    *(b"(3, 4)", b"(4, 3)", b"(1, 3, 4)", b"(-1, 4)", b"(12,)", b"()", b"999999999, ", b"9" * 400, b", ", b"}\n", b"{"),
    *(
        b'"dtype":',
        b'"F32"',
        b'"BF16"',
        b'"F16"',
        b'"F64"',
        b'"shape":',
        b"[3,4]",
        b"[]",
        b"[-3,-4]",
        b'"__metadata__":',
    ),
    *(b'"data_offsets":', b"[0,48]", b"[48,0]", b"[0,1e1]", b"null", b"1e400", b'"x":', b"[" * 50, b"\xff\xff\xff\xff"),
    *(b"PK\x03\x04", b"\x80\x04\x95", b"\x7f\x80\x00\x00", b"\x00" * 9),
]


def small_files() -> list[bytes]:
    files = []
    for dtype, name, array in (
        (np.float32, "F32", np.arange(12).reshape(3, 4)),
        (np.float16, "F16", np.arange(12).reshape(3, 4)),
        (np.float32, "F32", np.arange(6).reshape(1, 3, 2)),
        (np.int16, "BF16", np.arange(8).reshape(2, 4)),
    ):
        numbers = np.ascontiguousarray(array, dtype)
        header: dict[str, Any] = {"x": {"dtype": name, "shape": array.shape, "data_offsets": [0, numbers.nbytes]}}
        for more in ({}, {"__metadata__": {"format": "pt"}}):
            head = json.dumps(more | header).encode()
            files.append(len(head).to_bytes(8, "little") + head + numbers.tobytes())
        for written in (numbers, numbers.T):
            file = io.BytesIO()
            np.save(file, written)
            files.append(file.getvalue())
    return files


def mutated(chance: random.Random, file: bytes) -> bytes:
    raw = bytearray(file)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(raw) + 1)
        match chance.randrange(6):
            case 0:
                raw[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                raw[at : at + 1] = bytes([raw[min(at, len(raw) - 1)] ^ 1 << chance.randrange(8)]) if raw else b""
            case 2:
                del raw[at : at + chance.choice((1, 2, 8, len(raw)))]
            case 3:
                raw[at:at] = chance.choice(PIECES)
            case 4:
                piece = chance.choice(PIECES)
                raw[at : at + len(piece)] = piece
            case 5:
                begin = chance.randrange(len(raw) + 1)
                raw[at:at] = raw[begin : begin + 8]
    return bytes(raw)


def as_the_library_reads_it(raw: bytes) -> npt.NDArray[Any]:
    """Without its check of pickles: no file that we read has one."""
    if raw.startswith(b"\x93NUMPY"):
        loaded: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
        return loaded
    head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    (name,) = head.keys() - {"__metadata__"}
    if head[name]["dtype"] == "BF16":  # of which NumPy has no word
        raw = raw.replace(b'"BF16"', b'"I16" ', 1)
    return np.asarray(load(raw)[name])


def test_a_mutated_file_is_refused_or_read_as_its_library_reads_it() -> None:
    files = small_files()
    read = 0
    for seed in range(tiers.EMBEDS_MUTATIONS):
        chance = random.Random(seed)
        raw = mutated(chance, chance.choice(files))
        try:
            embeds = parse_embeds(raw)
        except ValueError as error:
            assert len(str(error)) < 400, seed
            continue
        read += 1
        assert embeds.ndim == 2 and embeds.dtype in (np.float32, np.float16, np.int16), seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy, about the shape of a header
            expected = as_the_library_reads_it(raw)
        np.testing.assert_array_equal(embeds, expected.reshape(embeds.shape), err_msg=f"seed {seed}")
    assert read > tiers.EMBEDS_MUTATIONS / 100, "hardly any file was still one"
