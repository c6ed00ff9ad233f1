"""The native writer of rows that get texts of the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine._native import TableWriter

TEXTS = [b"a", b'"', b"\xe2", b""]  # of ids 0 to 2, and of unknown ids
QUOTED = [b"a", b'\\"', b"", b""]
IS_WHOLE = np.array([True, True, False, True] * 3)
MASKS = np.array([1, 2, 4, 0] * 3, np.uint64)


class Scene:
    def __init__(self, *frames: tuple[bytes, ...] | None) -> None:
        slots = len(frames)
        self.frames = [*frames]
        self.servers, self.samples = np.zeros(slots, np.uint16), np.zeros(slots, np.uint16)
        self.firsts, self.marks = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self.generated = np.zeros(slots, np.int32)
        self.columns: dict[str, Any] = {
            "frames": self.frames,
            "bases": np.zeros(slots, np.int32),
            "firsts": self.firsts,
            "marks": self.marks,
            "servers": self.servers,
            "requests": np.arange(100, 100 + slots, dtype=np.int32),
            "samples": self.samples,
            "generated": self.generated,
        }
        self.tables: dict[str, Any] = {"texts": TEXTS * 3, "quoted": QUOTED * 3, "is_whole": IS_WHOLE, "masks": MASKS}

    def write(self, *ids: int, slots: tuple[int, ...] | None = None) -> tuple[int, list[int], bytes, list[int]] | None:
        writer = TableWriter(**self.tables, **self.columns)
        rows = np.array(range(len(ids)) if slots is None else slots, np.intp)
        written = writer.write(rows, np.array(ids, np.int32))
        if written is None:
            return None
        server, numbers, text, samples = written
        of_samples = [] if samples is None else np.frombuffer(samples, np.uint16).tolist()
        return server, np.frombuffer(numbers, np.int32).tolist(), text, of_samples


def test_rows_are_written_as_they_are_or_in_their_frames() -> None:
    scene = Scene((), (b"<", b">"), (b"[", b"|", b"]"))
    written = scene.write(0, 1, 1)
    assert written == (0, [100, 101, 102, 1, 4, 7, 0, 1, 1], b'a<\\">[\\"|\\"]', [])
    assert scene.generated.tolist() == [1, 1, 1]


def test_unknown_ids_have_no_text() -> None:
    assert Scene((), ()).write(99, -1) == (0, [100, 101, 0, 0, 99, -1], b"", [])


def test_rows_name_their_slots_and_samples() -> None:
    scene = Scene(None, (), ())
    scene.samples[2] = 3
    scene.servers[:] = 0, 5, 5
    assert scene.write(0, 1, slots=(2, 1)) == (5, [102, 101, 1, 1, 0, 1], b'a"', [3, 0])
    assert scene.generated.tolist() == [0, 1, 1]


@pytest.mark.parametrize("reason", ["closed", "part of a character", "no text", "stop string", "mark", "two servers"])
def test_nothing_changes_if_a_row_is_no_text_of_the_tables(reason: str) -> None:
    scene, token_id = Scene((), (b"<", b">")), 0
    if reason == "closed":
        scene.frames[1] = None
    elif reason == "part of a character":
        token_id = 2
    elif reason == "no text":
        token_id = 3
    elif reason == "stop string":
        scene.firsts[1] = 1
    elif reason == "mark":
        scene.marks[1] = 1
    else:
        scene.servers[1] = 1
    assert scene.write(0, token_id) is None
    assert scene.generated.tolist() == [0, 0]


def test_misfits_are_refused() -> None:
    scene = Scene((), ())
    with pytest.raises(ValueError, match="expected 2 ids, got 1"):
        scene.write(0, slots=(0, 1))
    for slot in (2, -1):
        with pytest.raises(ValueError, match="expected a slot below 2"):
            scene.write(0, slots=(slot,))
    scene.columns["bases"] = np.array([12, 12], np.int32)
    with pytest.raises(ValueError, match="expected a base below 12"):
        scene.write(0)
    scene.columns["bases"] = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="columns of one size"):
        scene.write(0)


@pytest.mark.parametrize("frame", [[b"<", b">"], ("<", ">")])
def test_frames_are_tuples_of_bytes(frame: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        Scene(frame).write(0)
