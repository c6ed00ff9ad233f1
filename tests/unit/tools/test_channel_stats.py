"""Counting what was seen: what is compared with what, what is missing, and what the tables and lines then say."""

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.codec import Catalogue, FrameEncoder
from penstock.tools import tables
from penstock.tools.capture import channel_report
from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry
from penstock.tools.capture.channel_stats import ChannelStats, Distribution


class Step(msgspec.Struct, array_like=True, frozen=True):
    number: int
    rows: NDArray[np.int32]


class Stop(msgspec.Struct, array_like=True, frozen=True):
    reason: str


CATALOGUE = Catalogue(Step, Stop)
PLAIN = CapturedChannel("plain", "ring", b"")
TYPED = CapturedChannel("steps", "broadcast", CATALOGUE.schema.encode())


def frame_of(message: msgspec.Struct) -> bytes:
    encoded = FrameEncoder(CATALOGUE).encode(message)
    return b"".join(map(bytes, encoded)) if isinstance(encoded, list) else bytes(encoded)


def stats_of(source: CapturedChannel, *frames: bytes | int | None, lane: int = 0) -> ChannelStats:
    """A number is a gap of that length."""
    stats = ChannelStats(source, is_live=False)
    sequence = 0
    for frame in frames:
        if isinstance(frame, int):
            sequence += frame
            stats.add(CaptureEntry(0, lane, 0, 0, None, missed=frame))
        else:
            stats.add(CaptureEntry(0, lane, sequence, 1000 + sequence, frame))
            sequence += 1
    return stats


def test_consecutive_messages_are_compared() -> None:
    item = stats_of(PLAIN, b"hello world", b"hello w0rld", b"hello w0rld").classes["bytes"]
    assert (item.nbytes.count, item.nbytes.total) == (3, 33)
    assert (item.edits.count, item.edits.total) == (2, 1)
    assert item.repeated_share == 21 / 22


def test_messages_after_a_gap_are_not_compared() -> None:
    stats = stats_of(PLAIN, b"aaaa", 5, b"bbbb", b"bbbb", None, b"cccc")
    item = stats.classes["bytes"]
    assert (item.nbytes.count, item.edits.count, item.edits.total) == (4, 1, 0)
    assert (stats.missed, stats.gone, stats.records) == (5, 1, 5)


def test_lanes_are_compared_separately() -> None:
    stats = ChannelStats(PLAIN, is_live=False)
    for sequence in range(3):
        stats.add(CaptureEntry(0, 0, sequence, 1, b"aaaa"))
        stats.add(CaptureEntry(0, 1, sequence + 70, 1, b"bbbb"))
    assert (stats.classes["bytes"].edits.count, stats.classes["bytes"].edits.total) == (4, 0)


def test_a_message_is_compared_with_the_last_of_its_class() -> None:
    rows = np.arange(3, dtype=np.int32)
    frames = [frame_of(Step(1, rows)), frame_of(Stop("x")), frame_of(Step(2, rows)), frame_of(Stop("x"))]
    stats = stats_of(TYPED, *frames)
    step, stop = stats.classes["Step"], stats.classes["Stop"]
    assert (step.edits.count, step.edits.total) == (1, 1)
    assert (stop.edits.count, stop.edits.total) == (1, 0)
    assert (step.fields["number"].unchanged, step.fields["rows"].unchanged) == (0, 1)
    assert sum(field.nbytes for field in step.fields.values()) == step.nbytes.total
    assert step.decode_ns.count == step.encode_ns.count == 2


def test_message_without_a_description_is_counted_only() -> None:
    good = frame_of(Stop("x"))
    stats = stats_of(TYPED, good, b"\x05nonsense", good)
    assert stats.undecodable == 1
    assert stats.classes["Stop"].nbytes.count == 2


def test_a_distribution_has_its_mean_and_ends_exactly() -> None:
    distribution = Distribution()
    for value in range(10_000, 0, -1):
        distribution.add(value)
    assert (distribution.mean, distribution.least, distribution.most, distribution.count) == (5000.5, 1, 10_000, 10_000)
    assert 4000 < distribution.median < 6000


def test_lines_of_json_have_the_same_keys_for_every_class_and_add_up() -> None:
    rows = [np.arange(size, dtype=np.int32) for size in (3, 100, 5000)]
    stats = stats_of(TYPED, *(frame_of(Step(number, row)) for number, row in enumerate(rows)), frame_of(Stop("x")))
    lines = list(channel_report.rows_of(stats))
    assert all(json.loads(json.dumps(line)) == line for line in lines)
    assert {line["bench"] for line in lines} == {"measure"}
    channel, *others = lines
    assert (channel["case"], channel["channel"], channel["messages"]) == ("channel", "steps", 4)
    step = next(line for line in others if line["case"] == "message" and line["message"] == "Step")
    fields = [line for line in others if line["case"] == "field" and line["message"] == "Step"]
    assert sum(line["mean_bytes"] for line in fields) == pytest.approx(step["mean_bytes"], abs=0.01)
    assert sum(line["share"] for line in fields) == pytest.approx(1, abs=0.001)


def test_table_has_the_number_of_missed_messages() -> None:
    string_i_o = io.StringIO()
    tables.print_tables(channel_report.tables_of(stats_of(PLAIN, b"[bold]x", 30, b"x", None)), string_i_o)
    assert "30 more (90.9 %) were overwritten before they were seen" in string_i_o.getvalue()
    assert "1 long ones were gone" in string_i_o.getvalue()


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    channel_report.draw([stats_of(TYPED, frame_of(Stop("<x>")), frame_of(Stop("<y>")))], tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.startswith("<svg") and ".reason" in text and "edit distance" in text
