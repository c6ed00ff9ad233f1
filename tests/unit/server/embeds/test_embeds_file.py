"""Prompt embeddings as files: which are read, which are refused, and in which words."""

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.server.embeds.embeds_file import MAX_HEADER, parse_embeds

pytest.importorskip("safetensors")
from safetensors.numpy import save

NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


def npy_of(array: npt.NDArray[Any], **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npy_with(header: bytes, data: bytes = NUMBERS.tobytes(), version: int = 1) -> bytes:
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


def safetensors_of(**tensors: tuple[str, list[int], bytes]) -> bytes:
    """A file of tensors by name: dtype, shape and bytes. The library writes no bfloat16 without torch."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data


def bfloat16_of(array: npt.NDArray[Any]) -> bytes:
    """The bytes of numbers that bfloat16 has exactly."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def refusal(raw: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        parse_embeds(raw)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("write", [npy_of, lambda array: bytes(save({"any name": array}))], ids=["npy", "safetensors"])
def test_an_array_is_read_as_it_was_written(write: Any, dtype: Any) -> None:
    numbers = NUMBERS.astype(dtype)
    for array in (numbers, numbers[None]):
        embeds = parse_embeds(write(array))
        assert embeds.dtype == dtype
        np.testing.assert_array_equal(embeds, numbers)


def test_bfloat16_is_read_as_its_bits() -> None:
    raw = bfloat16_of(NUMBERS)
    embeds = parse_embeds(safetensors_of(x=("BF16", [3, 4], raw)))
    assert (embeds.dtype, embeds.shape, embeds.tobytes()) == (np.int16, (3, 4), raw)


def test_a_transposed_array_keeps_its_numbers() -> None:
    raw = npy_of(NUMBERS.T)
    assert b"'fortran_order': True" in raw
    np.testing.assert_array_equal(parse_embeds(raw), NUMBERS.T)


def test_metadata_and_later_versions_of_npy_are_no_defect() -> None:
    np.testing.assert_array_equal(parse_embeds(bytes(save({"x": NUMBERS}, metadata={"by": "me"}))), NUMBERS)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n"
    for version in (1, 2, 3):
        np.testing.assert_array_equal(parse_embeds(npy_with(header, version=version)), NUMBERS)


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickle.dumps(0))
    return file.getvalue()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (archive(), "a zip archive, as torch.save and numpy.savez write it"),
        (pickle.dumps([1.0], 2), "a pickle, as torch.save writes it"),
        (pickle.dumps([1.0], 5), "may hold code: safetensors.torch.save and numpy.save write files without"),
        (npy_of(np.array([[object()]]), allow_pickle=True), "'<f4' or '<f2'), got b'|O'"),
        (npy_of(NUMBERS.astype(">f4")), "got b'>f4': npy has no bfloat16"),
        (npy_of(NUMBERS.astype(np.float64)), "got b'<f8'"),
        (npy_of(np.array([[1, 2]])), "got b'<i8'"),
        (npy_of(NUMBERS[0]), "expected a shape of [tokens, hidden size], got [4]"),
        (npy_of(NUMBERS.reshape(3, 2, 2)), "got [3, 2, 2]"),
        (npy_of(NUMBERS[None, None]), "got [1, 1, 3, 4]"),
        (npy_of(NUMBERS[:0]), "got [0, 4]"),
        (npy_of(NUMBERS)[:-1], "expected 48 bytes for a shape of [3, 4], got 47"),
        (npy_of(NUMBERS) + b"\0", "got 49"),
        (npy_of(NUMBERS)[:40], "the header is cut off"),
        (b"\x93NUMPY", "expected npy of version 1, 2 or 3, got b''"),
        (b"\x93NUMPY\x09\0", "got b'\\t\\x00'"),
        (npy_with(b"{'shape': __import__('os').abort()}"), "expected the header that numpy.save writes"),
        (npy_with(b" " * (MAX_HEADER + 1)), f"expected a header of at most {MAX_HEADER} bytes, got one of 4097"),
        (npy_of(np.array([[np.nan]], np.float32)), "a number is NaN or infinite"),
        (npy_of(np.array([[np.inf]], np.float16)), "a number is NaN or infinite"),
        (safetensors_of(x=("BF16", [1, 2], b"\0\0\x80\xff")), "a number is NaN or infinite"),
        (safetensors_of(x=("F64", [1, 1], bytes(8))), "expected F32, BF16 or F16, got 'F64' in the tensor 'x'"),
        (safetensors_of(), "expected one tensor, got 0"),
        (safetensors_of(x=("F32", [1, 1], bytes(4)), y=("F32", [1, 1], bytes(4))), "expected one tensor, got 2: x, y"),
        (safetensors_of(x=("F32", [1, 1], bytes(4))) + b"\0", "expected data_offsets of [0, 5], got [0, 4]"),
        ((1 << 40).to_bytes(8, "little") + b"{", "expected a header of at most 4096 bytes, got one of 1099511627776"),
        ((2).to_bytes(8, "little") + b"{]", "the header of safetensors is invalid"),
        ((9).to_bytes(8, "little") + b'{"x": {}}', "missing required field `dtype`"),
        (b"", "its first bytes b'' are of neither format"),
        (b"GIF89a", "its first bytes b'GIF89a' are of neither format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_is_refused_in_words(raw: bytes, words: str) -> None:
    assert words in refusal(raw)
