"""A trace of live processes: each record with its sender and receivers, each wait with its end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock import _native, cli
from penstock.tools.capture.live_capture import AttachedChannel
from penstock.tools.trace.command import losses_of
from penstock.tools.trace.live_trace import EVENT, SequenceReader, StepNumber, TracedChannel, TracedTime
from penstock.tools.trace.step_series import find_series
from penstock.tools.trace.timeline import Timeline, build_timeline
from penstock.tools.trace.trace_file import TraceEvents, write_trace
from tests.conftest import eventually, spawn


class Step(msgspec.Struct, array_like=True, frozen=True):
    leader: int
    number: int


class StepDone(msgspec.Struct, array_like=True, frozen=True):
    text: str
    number: int
    leader: int


class Stop(msgspec.Struct, array_like=True, frozen=True):
    reason: str


class Tracing:
    """Traces channels of this process, from its creation on."""

    def __init__(self, *channels: Any) -> None:
        self.channels = []
        for channel in channels:
            view = {**channel.snapshot(), "held_by": [{"pid": os.getpid(), "fd": channel.fd}]}
            self.channels.append(TracedChannel(AttachedChannel(channel._segment, view)))
        for traced in self.channels:
            traced.begin()
        self.began_ns = time.monotonic_ns()

    def end(self) -> Timeline:
        for traced in self.channels:
            traced.finish()
        self.time = TracedTime(self.began_ns, time.monotonic_ns(), False)
        return build_timeline(self.channels, {}, self.time.ended_ns)

    def events(self, timeline: Timeline, path: Path) -> list[dict[str, Any]]:
        nbytes = write_trace(
            path, TraceEvents(timeline, self.time).all([(series, []) for series in find_series(timeline)]), {}
        )
        assert nbytes == path.stat().st_size
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        return events


# ── one by one ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_event_is_as_long_as_native_events_are() -> None:
    assert EVENT.itemsize == _native.TRACE_EVENT_NBYTES


def test_a_record_has_its_sender_and_each_receiver_that_took_it() -> None:
    channel = penstock.Broadcast(receivers=2, name="steps")
    with channel.open_sender(name="core") as sender, channel.open_receiver() as fast, channel.open_receiver() as slow:
        sender.send(b"before")
        fast.receive(), slow.receive()
        tracing = Tracing(channel)
        for number in range(3):
            sender.send(bytes(number))
        for _ in range(3):
            fast.receive()
        slow.receive()
        timeline = tracing.end()
    records = sorted(timeline.records.values(), key=lambda record: record.id.sequence)
    assert [(record.id.sequence, record.nbytes) for record in records] == [(1, 0), (2, 1), (3, 2)]
    assert [[take.end.number for take in record.takes] for record in records] == [[0, 1], [0], [0]]
    times = [
        tracing.began_ns,
        *(record.sent_ns for record in records),
        records[2].takes[0].taken_ns,
        tracing.time.ended_ns,
    ]
    assert times == sorted(times)
    assert all(record.sent_ns <= take.taken_ns for record in records for take in record.takes)
    assert {record.pid for record in records} == {os.getpid()} and timeline.channels[0].missed == 0
    assert timeline.channels[0].records_without_events() == 0


def test_a_wait_ends_with_the_record_that_it_was_for() -> None:
    channel = penstock.Ring()
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        with pytest.raises(penstock.Timeout):
            receiver.receive(0)
        tracing = Tracing(channel)
        threading.Timer(0.05, sender.send, (b"late",)).start()
        receiver.receive()
        with pytest.raises(penstock.Timeout):
            receiver.receive(0.02)
        timeline = tracing.end()
        (record,) = timeline.records.values()
        waits = [wait for wait in timeline.waits if not wait.end.is_sender]
        *_, ended, timed_out = waits
        assert ended.record == record.id and ended.blocker == os.getpid() and ended.has_slept
        assert ended.since_ns < record.sent_ns <= ended.ns <= record.takes[0].taken_ns
        assert record.takes[0].began_ns == ended.ns and record.wakes == 1 and record.woken_ns > record.sent_ns
        assert timed_out.is_timed_out and timed_out.record is None and timed_out.ns - timed_out.since_ns >= 20_000_000


def test_a_wait_that_goes_on_is_in_the_trace() -> None:
    channel = penstock.Ring()
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        thread = threading.Thread(target=receiver.receive)
        thread.start()
        eventually(lambda: channel.snapshot()["receivers"][0]["waiting_ns"] > 0)
        tracing = Tracing(channel)
        timeline = tracing.end()
        sender.send(b"")
        thread.join()
    (wait,) = timeline.waits
    assert not wait.is_over and wait.since_ns < tracing.began_ns and wait.blocker == os.getpid()


def test_a_process_that_opens_an_end_while_it_is_traced_owns_what_follows() -> None:
    channel = penstock.Inbox(senders=2)
    tracing = Tracing(channel)
    with channel.open_sender(1) as sender, channel.open_receiver() as receiver:
        sender.send(b"x")
        receiver.receive()
    timeline = tracing.end()
    (record,) = timeline.records.values()
    assert (record.pid, record.id.lane, record.takes[0].pid) == (os.getpid(), 1, os.getpid())
    assert Counter((change.what, change.end.is_sender) for change in timeline.changes) == {
        ("opens", True): 1, ("opens", False): 1, ("closes", True): 1, ("closes", False): 1
    }  # fmt: skip


def test_steps_are_matched_with_replies_by_leader_and_number() -> None:
    steps = penstock.Broadcast(Step | Stop, receivers=1, name="steps")
    results = penstock.Ring(StepDone, name="results")
    with (
        steps.open_sender() as core,
        steps.open_receiver() as worker,
        results.open_sender() as done,
        results.open_receiver() as answers,
    ):
        tracing = Tracing(steps, results)
        core.send(Step(7, 1))
        core.send(Stop("no step"))
        for number in range(2, 5):  # one more is always in flight
            core.send(Step(7, number))
            worker.receive()
            if number == 2:
                worker.receive()
            done.send(StepDone("", number - 1, 7))
            answers.receive()
        (series,) = find_series(tracing.end())
    assert [answered.number for answered in series.answered] == [1, 2, 3]
    for answered in series.answered:
        assert answered.sent_ns < answered.taken_ns < answered.replied_ns < answered.reply_taken_ns


@contextlib.contextmanager
def plain_calls() -> Iterator[tuple[Tracing, Any, Any, Any, Any]]:
    """Yields a tracing of calls and replies without numbers, and the ends: core, worker; worker, core."""
    calls, replies = penstock.Broadcast(receivers=1), penstock.Ring()
    with (
        calls.open_sender() as core,
        calls.open_receiver() as worker,
        replies.open_sender() as done,
        replies.open_receiver() as answers,
    ):
        tracing = Tracing(calls, replies)
        yield tracing, core, worker, done, answers


def test_replies_in_order_pair_channels_of_plain_bytes_and_others_do_not() -> None:
    with plain_calls() as (tracing, core, worker, done, answers):
        for _ in range(3):
            core.send(b"execute")
            worker.receive()
            done.send(b"result")
            answers.receive()
        (series,) = find_series(tracing.end())
        assert [answered.number for answered in series.answered] == [0, 1, 2]
        done.send(b"another one")  # so that the next reply comes before what it would answer
        answers.receive()
        for _ in range(3):
            core.send(b"execute")
            worker.receive()
            done.send(b"result")
            answers.receive()
        assert find_series(tracing.end()) == []


def test_replies_in_order_are_paired_while_the_last_is_on_its_way() -> None:
    with plain_calls() as (tracing, core, worker, done, answers):
        for number in range(4):
            core.send(b"execute")
            worker.receive()
            done.send(b"result")
            if number < 3:
                answers.receive()
        (series,) = find_series(tracing.end())
    assert [answered.number for answered in series.answered] == [0, 1, 2]


@pytest.mark.parametrize(
    "frame", [b"", b"\x01", b"\x01\x92\x07", b"\x03\x92\x07\x08", b"\x01\x92\xa1x\x08", b"\x81", b"\x01\x07"]
)
def test_a_frame_that_is_no_step_has_no_number(frame: bytes) -> None:
    schema = bytes(penstock.Ring(Step | Stop)._segment.schema)
    assert SequenceReader(schema).read(b"\x01\x92\x07\x08") == StepNumber(7, 8)
    assert SequenceReader(schema).read(frame) is None
    assert not SequenceReader(b"no description").has_numbers()


def test_trace_has_the_number_of_lost_events() -> None:
    tracing = Tracing(penstock.Ring(name="steps"))
    tracing.channels[0].extend()
    assert tracing.channels[0].lapses == 0
    time.sleep(2.1)  # longer than ends write for a tracer that says nothing
    tracing.channels[0].extend()
    (sentence,) = losses_of(tracing.end(), tracing.time)
    assert sentence.startswith("ring 'steps': was not traced for a while, 1 time")


def test_records_of_an_end_that_cannot_write_events_are_counted() -> None:
    channel = penstock.Ring()
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        tracing = Tracing(channel)
        for _ in range(3):
            sender.send(b"")
            receiver.receive()
        (traced,) = tracing.end().channels
        assert traced.records_without_events() == 0
        traced.before["senders"][0]["records"] -= 2  # as if two more had been counted, and left no event
        assert traced.records_without_events() == 2


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_arrows_lead_from_each_send_to_each_take_and_slices_nest(tmp_path: Path) -> None:
    channel = penstock.Broadcast(receivers=2, name="steps")
    with (
        channel.open_sender(name="core") as sender,
        channel.open_receiver() as first,
        channel.open_receiver() as second,
    ):
        tracing = Tracing(channel)
        for _ in range(20):
            threading.Timer(0.002, sender.send, (b"x",)).start()
            first.receive()
            second.receive()
        events = tracing.events(tracing.end(), tmp_path / "trace.json")
    slices = {(event["tid"], event["ts"]): event for event in events if event["ph"] == "X" and event["cat"] != "wait"}
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) == len(ends) == 40 and begins.keys() == ends.keys()
    for id, begin in begins.items():
        sent, taken = slices[begin["tid"], begin["ts"]], slices[ends[id]["tid"], ends[id]["ts"]]
        assert (sent["cat"], taken["cat"]) == ("send", "take") and sent["args"]["record"] == taken["args"]["record"]
        assert sent["ts"] <= taken["ts"] + taken["dur"]
    must_nest(events)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert names == {"to broadcast 'steps'", "from broadcast 'steps'"}


def must_nest(events: list[dict[str, Any]]) -> None:
    """No slice of a track begins within another one and ends after it."""
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort(key=lambda item: (item[0], -item[1]))
        open_until: list[float] = []
        for begin, end in slices:
            while open_until and open_until[-1] <= begin + 0.0015:  # a slice has at least 1 ns
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.0015
            open_until.append(end)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
def send_slowly(channel: Any) -> None:
    with channel.open_sender(name="core") as sender, channel.open_receiver(name="worker") as receiver:
        while True:
            sender.send(b"x")
            receiver.receive()
            time.sleep(0.001)


@contextlib.contextmanager
def in_use() -> Iterator[tuple[Any, int]]:
    with penstock.Ring(name="steps") as ring, spawn(send_slowly, ring) as child:
        eventually(lambda: ring.snapshot()["senders"][0]["records"] > 0, within=20)
        assert child.pid is not None
        yield ring, child.pid


def test_a_process_is_traced_and_does_not_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    with in_use() as (ring, pid):
        before = ring.snapshot()
        assert cli.main(["trace", str(pid), "--seconds", "0.3", "-o", str(path), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["channels"] == 1 and summary["records"] > 4 and summary["lacking"] == []
        assert cli.main(["trace", str(ring.ticket), "--seconds", "0.1", "-o", str(path)]) == 0
        assert "on 1 channel of 1 process in" in capsys.readouterr().out
        assert ring.snapshot()["peers"] == [
            {**peer, "reaped_ago_ns": now["reaped_ago_ns"]}
            for peer, now in zip(before["peers"], ring.snapshot()["peers"], strict=True)
        ]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event.get("cat") for event in events} >= {"send", "take", "record"}
    must_nest(events)


def test_a_tracer_that_is_killed_leaves_the_ends_untraced_after_its_time(tmp_path: Path) -> None:
    with in_use() as (ring, pid):
        word = traced_until(ring)
        options = f"-m penstock trace {pid} --seconds 60 -o {tmp_path}/x.json"
        with subprocess.Popen([sys.executable, *options.split()]) as tracer:
            eventually(lambda: word() > time.monotonic_ns(), within=20)
            tracer.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: word() == 0, within=20)  # by the process that finds the time passed
        assert time.monotonic() - killed > 1.0, "that was not its time"
        assert not _native.TraceReader(ring._segment).extend()


def traced_until(ring: Any) -> Any:
    """Finds the word in the header that a tracer moves."""
    with penstock.Ring() as other:
        before = os.pread(other.fd, 4096, 0)
        _native.TraceReader(other._segment).extend()
        after = os.pread(other.fd, 4096, 0)
    at = next(at for at in range(0, 4096, 8) if before[at : at + 8] != after[at : at + 8])
    return lambda: int.from_bytes(os.pread(ring.fd, 8, at), "little")


def test_a_process_that_dies_in_the_middle_is_traced_until_then(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with in_use() as (ring, pid):
        threading.Timer(0.4, os.kill, (pid, signal.SIGKILL)).start()
        # Another process of the channel sees the death, and reaps.
        watcher = ring._join("watcher")
        assert cli.main(["trace", str(ring.ticket), "--seconds", "1.5", "-o", str(path)]) == 0
        del watcher
    events = json.loads(path.read_text())["traceEvents"]
    deaths = [event for event in events if event["name"].startswith("dies: ")]
    assert deaths and all("SIGKILL" in event["name"] and event["pid"] == pid for event in deaths)
    last = max(event["ts"] for event in events if event.get("cat") == "send")
    assert 0 < last <= deaths[0]["ts"] + 1e5


def test_trace_refuses_invalid_targets_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_use() as (_, pid):
        assert cli.main(["trace", str(pid), "-o", str(tmp_path / "none" / "x.json")]) == 2
        assert "No such file" in capsys.readouterr().err
        assert cli.main(["trace", str(pid), "--channel", "other", "-o", str(tmp_path / "x.json")]) == 2
        assert "has no channel 'other' open; there are 'steps'" in capsys.readouterr().err
    assert cli.main(["trace", "4194303", "-o", str(tmp_path / "x.json")]) == 2
    assert "there is no process" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected a channel"):
        _native.TraceReader(_native.Segment.create("raw", {"kind": 1, "raw_nbytes": 1}))
    ring = penstock.Ring()
    with pytest.raises(ValueError, match="looked at only"):
        _native.TraceReader(_native.Segment.adopt(os.dup(ring.fd), is_observer=True))
