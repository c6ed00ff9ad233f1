"""Mutated files of weights: a file is accepted exactly if safetensors accepts it, and else refused by its name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.cluster.weight_files import read_header
from tests import tiers

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors")

Tensors = dict[str, Any]


def tensors_file(chance: random.Random) -> bytes:
    from safetensors.numpy import save

    dtypes = (np.float32, np.float16, np.int64, np.uint8, np.bool_)
    shapes = [[chance.randrange(5) for _ in range(chance.randrange(4))] for _ in range(chance.randrange(7))]
    tensors = {f"layer.{number}": np.zeros(shape, chance.choice(dtypes)) for number, shape in enumerate(shapes)}
    return bytes(save(tensors, {"format": "pt"} if chance.random() < 0.5 else None))


def split(raw: bytes) -> tuple[Tensors, bytes]:
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def joined(tensors: Any, data: bytes) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + data


# ── mutations ────────────────────────────────────────────────────────────────────────────────────────────────────────
def flip_byte(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]


def cut(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.randrange(len(raw))]


def lengthen(raw: bytes, chance: random.Random) -> bytes:
    return raw + bytes(chance.randrange(1, 9))


def change_length(raw: bytes, chance: random.Random) -> bytes:
    nbytes = int.from_bytes(raw[:8], "little")
    lengths = (0, 1, nbytes - 1, nbytes + 1, nbytes + 64, 100 << 20, (100 << 20) + 1, 1 << 63, (1 << 64) - 1)
    return chance.choice(lengths).to_bytes(8, "little") + raw[8:]


def change_tensor(raw: bytes, chance: random.Random) -> bytes:
    """Changes a field of one tensor, or gives a tensor the fields of another one, or drops it."""
    tensors, data = split(raw)
    names = [name for name in tensors if name != "__metadata__"]
    if not names:
        return joined({"a": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}, data)
    name = chance.choice(names)
    tensor = tensors[name]
    shift = chance.choice((-8, -1, 1, 4, 8, 1 << 40, -(1 << 40), 1 << 62))
    changes: list[Callable[[], Any]] = [
        lambda: tensor.update(data_offsets=[offset + shift for offset in tensor["data_offsets"]]),
        lambda: tensor["data_offsets"].__setitem__(chance.randrange(2), chance.randrange(0, len(data) + 2)),
        lambda: tensor["data_offsets"].reverse(),
        lambda: tensor["data_offsets"].append(0),
        lambda: tensor["shape"].append(chance.choice((0, 1, 2, -1, 1 << 40, 1 << 63, 1.0, "1", None))),
        lambda: tensor["shape"].clear(),
        lambda: tensor.update(dtype=chance.choice(("F32", "F16", "F4", "U8", "C64", "f32", "", None, 4))),
        lambda: tensor.pop(chance.choice(("dtype", "shape", "data_offsets"))),
        lambda: tensors.pop(name),
        lambda: tensors.update({name: tensors[chance.choice(names)]}),
        lambda: tensors.update({"more": tensor}),
        lambda: tensors.update({name: chance.choice(([], None, 1, {}))}),
        lambda: tensors.update(__metadata__=chance.choice((None, {}, {"a": "b"}, {"a": 1}, [], "a"))),
    ]
    chance.choice(changes)()
    return joined(tensors, data)


def move_data(raw: bytes, chance: random.Random) -> bytes:
    tensors, data = split(raw)
    return joined(tensors, data + bytes(4) if chance.random() < 0.5 else data[4:])


OF_HEADER, OF_BYTES = (change_tensor, change_tensor, move_data), (flip_byte, cut, lengthen, change_length)


def is_accepted_by_library(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="np"):
            return True
    except Exception:  # the library has an error of its own, and others
        return False


def is_stricter(error: str) -> bool:
    """Returns whether `read_header` alone refuses a file for this reason."""
    return "comes twice" in error or "Expected `int` <= 9223372036854775807" in error


def test_a_mutated_file_is_accepted_as_by_safetensors(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "model.safetensors"
    accepted = 0
    for _ in range(tiers.WEIGHT_MUTATIONS):
        raw = tensors_file(chance)
        for mutations in (OF_HEADER, OF_BYTES):
            if chance.random() < 0.6:
                raw = chance.choice(mutations)(raw, chance)
        path.write_bytes(raw)
        expected = is_accepted_by_library(path)
        try:
            read_header(path)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            assert not expected or is_stricter(str(error)), f"{error}\n{raw!r}"
        else:
            assert expected, raw
            accepted += 1
    assert 0 < accepted < tiers.WEIGHT_MUTATIONS
