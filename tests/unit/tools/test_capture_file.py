"""Recordings: what was written is read, what was cut off is said, what is foreign is refused."""

from pathlib import Path

import pytest

from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry, CaptureFile, CaptureWriter
from penstock.tools.capture.measure_error import NotACaptureFile

SOURCES = [CapturedChannel("steps", "broadcast", b'{"x": 1}'), CapturedChannel("done", "inbox", b"")]
ENTRIES = [
    CaptureEntry(0, 0, 0, 17, b"first"),
    CaptureEntry(1, 3, 2**40, 18, b""),
    CaptureEntry(0, 0, 0, 0, None, missed=12),
    CaptureEntry(0, 0, 13, 20, None),
    CaptureEntry(1, 3, 2**40 + 1, 2**60, bytes(range(256)) * 300),
]


def recorded(path: Path) -> bytes:
    writer = CaptureWriter(path, SOURCES)
    for entry in ENTRIES:
        writer.write(entry)
    writer.close()
    return path.read_bytes()


def test_capture_file_is_equal_after_a_round_trip(tmp_path: Path) -> None:
    recorded(tmp_path / "x")
    recording = CaptureFile(tmp_path / "x")
    assert recording.sources == SOURCES
    assert list(recording) == ENTRIES
    assert list(recording) == ENTRIES, "a second time"
    assert recording.left_over == 0


def test_cut_off_capture_file_has_its_whole_entries(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "x")
    ends = [len(whole)]
    for entry in reversed(ENTRIES):
        ends.append(ends[-1] - 32 - len(entry.frame or b""))
    ends.reverse()  # of the head, and of each entry
    for nbytes in [*range(ends[0], ends[4] + 40), len(whole) - 1]:
        (tmp_path / "y").write_bytes(whole[:nbytes])
        recording = CaptureFile(tmp_path / "y")
        entries = sum(nbytes >= end for end in ends[1:])
        assert list(recording) == ENTRIES[:entries], f"cut off at {nbytes}"
        assert recording.left_over == nbytes - ends[entries]


def test_a_file_without_a_whole_head_is_no_recording(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "x")
    head = whole.index(b"\n", whole.index(b"\n") + 1)
    for nbytes in range(head):
        (tmp_path / "y").write_bytes(whole[:nbytes])
        with pytest.raises(NotACaptureFile):
            CaptureFile(tmp_path / "y")


def test_a_head_nested_too_deep_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "deep"
    path.write_bytes(b"penstock recording 1\n" + b"[" * 200_000 + b"\n")
    with pytest.raises(NotACaptureFile, match="a head that cannot be read"):
        CaptureFile(path)


def test_something_else_is_no_recording(tmp_path: Path) -> None:
    for text in (b"", b"\x7fELF" + bytes(1000), b"penstock recording 1\n[]\n", b"penstock recording 1\n{}\n",
                 b'penstock recording 1\n{"channels": [{"name": "x", "kind": "ring", "schema": "?"}]}\n'):  # fmt: skip
        (tmp_path / "y").write_bytes(text)
        with pytest.raises(NotACaptureFile):
            CaptureFile(tmp_path / "y")


def test_damaged_capture_entry_is_reported_with_its_offset(tmp_path: Path) -> None:
    whole = bytearray(recorded(tmp_path / "x"))
    second = len(whole) - sum(32 + len(entry.frame or b"") for entry in ENTRIES[1:])
    for at, byte in ((second, 9), (second + 4, 3)):  # a channel, a kind of entry that there is not
        damaged = bytearray(whole)
        damaged[at] = byte
        (tmp_path / "y").write_bytes(damaged)
        with pytest.raises(NotACaptureFile, match=f"no entry at byte {second}"):
            list(CaptureFile(tmp_path / "y"))
