"""The fingerprint of a model: equal for copies, different for another fine-tune, and what it does not see."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.engine.cluster.model_fingerprint import PAGE, ModelFiles, model_fingerprint

SMALL, LARGE = 3 * PAGE, 64 * PAGE  # bytes of a tensor: of the one, all are read


def weights(tensors: Mapping[str, bytes]) -> bytes:
    described, at = {}, 0
    for name, values in tensors.items():
        described[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [at, at + len(values)]}
        at += len(values)
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def noise(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def write_model(path: Path, seed: int = 0, shards: Sequence[str] = ("model.safetensors",)) -> Path:
    """Writes a model with a small and a large tensor in each shard."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text('{"model": {}}')
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards):
        tensors = {f"small {number}": noise(seed + number, SMALL), f"large {number}": noise(~seed - number, LARGE)}
        (path / shard).write_bytes(weights(tensors))
        file_of |= dict.fromkeys(tensors, shard)
    if len(shards) > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return path


def change_byte(path: Path, at: int) -> None:
    """`at`: from the end of the file if it is negative."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("shards", [("model.safetensors",), ("a.safetensors", "b.safetensors")])
def test_copies_and_links_of_a_model_have_one_fingerprint(tmp_path: Path, shards: Sequence[str]) -> None:
    model = write_model(tmp_path / "model", shards=shards)
    copy, links = tmp_path / "copy", tmp_path / "links"
    shutil.copytree(model, copy)
    links.mkdir()
    for path in copy.iterdir():  # as in the cache of Hugging Face's hub
        blob = tmp_path / f"blob of {path.name}"
        path.rename(blob)
        (links / path.name).symlink_to(os.path.relpath(blob, links))
    assert model_fingerprint(model) == model_fingerprint(links)
    assert model_fingerprint(model).word == model_fingerprint(links).word != 0


def test_another_fine_tune_of_the_shape_differs_in_its_weights_alone(tmp_path: Path) -> None:
    first, second = (model_fingerprint(write_model(tmp_path / str(seed), seed)) for seed in (0, 9))
    assert (first.config, first.tokenizer) == (second.config, second.tokenizer)
    assert first.weights != second.weights and first.word != second.word


CHANGES: list[Callable[[Path], object]] = [
    lambda model: (model / "config.json").write_text('{"model_type": "qwen2"}'),
    lambda model: (model / "tokenizer.json").write_text('{"model": {"a": 1}}'),
    lambda model: (model / "tokenizer.json").unlink(),
    lambda model: change_byte(model / "model.safetensors", -1),
    lambda model: change_byte(model / "model.safetensors", -LARGE),
    lambda model: change_byte(model / "model.safetensors", -LARGE - 1),
    lambda model: change_byte(model / "model.safetensors", -LARGE - SMALL // 2),
    lambda model: (model / "model.safetensors").write_bytes(
        (model / "model.safetensors").read_bytes().replace(b"small 0", b"sma11 0")
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_each_byte_that_it_covers(tmp_path: Path, change: Callable[[Path], object]) -> None:
    model = write_model(tmp_path / "model")
    before = model_fingerprint(model)
    change(model)
    assert before != model_fingerprint(model) and before.word != model_fingerprint(model).word


def test_four_pages_of_a_large_tensor_are_covered_and_no_more(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path, before = model / "model.safetensors", model_fingerprint(model)
    pages = 0
    for page in range(LARGE // PAGE):
        at = path.stat().st_size - LARGE + page * PAGE + PAGE // 2
        change_byte(path, at)
        pages += model_fingerprint(model) != before
        change_byte(path, at)
    assert 3 <= pages <= 4
    assert model_fingerprint(model) == before


def test_each_shard_counts_and_a_file_beside_them_does_not(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=("a.safetensors", "b.safetensors"))
    before = model_fingerprint(model)
    (model / "consolidated.safetensors").write_bytes(weights({"more": b"1"}))
    assert model_fingerprint(model) == before
    change_byte(model / "b.safetensors", -1)
    assert model_fingerprint(model) != before


def test_a_large_model_costs_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sparse file of 64 GiB."""
    model = write_model(tmp_path / "model")
    nbytes = 1 << 31
    described = {
        f"layer {number}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [number * nbytes, (number + 1) * nbytes]}
        for number in range(32)
    }
    header = json.dumps(described).encode()
    path = model / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 32 * nbytes)
    read: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(file, size, at)

    monkeypatch.setattr(os, "pread", counted)
    model_fingerprint(model)
    assert len(read) == 4 * 32 and sum(read) <= 4 * 32 * PAGE


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_changes_while_a_worker_loads_is_noticed(tmp_path: Path, name: str, is_replaced: bool) -> None:
    model = write_model(tmp_path / "model")
    files = ModelFiles(model)
    files.require_unchanged()
    path = model / name
    if is_replaced:  # by a file of the same size, and the same time
        about, new = path.stat(), tmp_path / "new"
        shutil.copy2(path, new)
        new.rename(path)
        assert path.stat().st_mtime_ns == about.st_mtime_ns
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match=f"{path} was written or replaced while the model was loaded"):
        files.require_unchanged()


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    os.truncate(model / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"model\.safetensors is cut off"):
        model_fingerprint(model)
