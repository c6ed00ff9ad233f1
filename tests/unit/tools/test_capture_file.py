"""Recordings: what was written is read, what was cut off is said, what is foreign is refused."""

from pathlib import Path

import pytest

from penstock.tools.capture.capture_file import Entry, Recorder, Recording, Source
from penstock.tools.capture.measure_error import NotARecording

SOURCES = [Source("steps", "broadcast", b'{"x": 1}'), Source("done", "inbox", b"")]
ENTRIES = [
    Entry(0, 0, 0, 17, b"first"),
    Entry(1, 3, 2**40, 18, b""),
    Entry(0, 0, 0, 0, None, missed=12),
    Entry(0, 0, 13, 20, None),
    Entry(1, 3, 2**40 + 1, 2**60, bytes(range(256)) * 300),
]


def recorded(path: Path) -> bytes:
    recorder = Recorder(path, SOURCES)
    for entry in ENTRIES:
        recorder.write(entry)
    recorder.close()
    return path.read_bytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    recorded(tmp_path / "x")
    recording = Recording(tmp_path / "x")
    assert recording.sources == SOURCES
    assert list(recording) == ENTRIES
    assert list(recording) == ENTRIES, "a second time"
    assert recording.left_over == 0


def test_a_file_that_was_cut_off_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "x")
    ends = [len(whole)]
    for entry in reversed(ENTRIES):
        ends.append(ends[-1] - 32 - len(entry.frame or b""))
    ends.reverse()  # of the head, and of each entry
    for nbytes in [*range(ends[0], ends[4] + 40), len(whole) - 1]:
        (tmp_path / "y").write_bytes(whole[:nbytes])
        recording = Recording(tmp_path / "y")
        entries = sum(nbytes >= end for end in ends[1:])
        assert list(recording) == ENTRIES[:entries], f"cut off at {nbytes}"
        assert recording.left_over == nbytes - ends[entries]


def test_a_file_without_a_whole_head_is_no_recording(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "x")
    head = whole.index(b"\n", whole.index(b"\n") + 1)
    for nbytes in range(head):
        (tmp_path / "y").write_bytes(whole[:nbytes])
        with pytest.raises(NotARecording):
            Recording(tmp_path / "y")


def test_a_head_nested_too_deep_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "deep"
    path.write_bytes(b"penstock recording 1\n" + b"[" * 200_000 + b"\n")
    with pytest.raises(NotARecording, match="a head that cannot be read"):
        Recording(path)


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "x")
    (tmp_path / "y").write_bytes(whole.replace(b"penstock recording 1\n", b"penstock recording 12\n", 1))
    with pytest.raises(NotARecording, match=r"of version '12'; penstock .* reads version 1"):
        Recording(tmp_path / "y")


def test_something_else_is_no_recording(tmp_path: Path) -> None:
    for text in (b"", b"\x7fELF" + bytes(1000), b"penstock recording 1\n[]\n", b"penstock recording 1\n{}\n",
                 b'penstock recording 1\n{"channels": [{"name": "x", "kind": "ring", "schema": "?"}]}\n'):  # fmt: skip
        (tmp_path / "y").write_bytes(text)
        with pytest.raises(NotARecording):
            Recording(tmp_path / "y")


def test_bytes_that_are_no_entry_are_said_with_their_place(tmp_path: Path) -> None:
    whole = bytearray(recorded(tmp_path / "x"))
    second = len(whole) - sum(32 + len(entry.frame or b"") for entry in ENTRIES[1:])
    for at, byte in ((second, 9), (second + 4, 3)):  # a channel, a kind of entry that there is not
        damaged = bytearray(whole)
        damaged[at] = byte
        (tmp_path / "y").write_bytes(damaged)
        with pytest.raises(NotARecording, match=f"no entry at byte {second}"):
            list(Recording(tmp_path / "y"))
