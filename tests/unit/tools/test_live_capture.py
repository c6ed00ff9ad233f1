"""Measuring channels of running processes: what is seen, what was missed, and how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import cli
from penstock.tools.capture import command, live_capture
from penstock.tools.capture.capture_file import CaptureFile
from tests.conftest import eventually, spawn
from tests.unit.tools.test_channel_stats import Step, Stop


def send_slowly(channel: Any) -> None:
    """Two messages, over and over."""
    with channel.open_sender(name="core") as sender, channel.open_receiver(name="worker") as receiver:
        number = 0
        while True:
            for message in (Step(number % 100, np.arange(50, dtype=np.int32)), Stop("x" * 10)):
                sender.send(message)
                receiver.receive()
            number += 1
            time.sleep(0.001)


def send_at_full_speed(channel: Any) -> None:
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        while True:
            for _ in range(100):
                sender.send(b"x" * 100)
            for _ in range(100):
                receiver.receive()


def lines_of(text: str) -> dict[str, list[dict[str, Any]]]:
    result: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        parsed = json.loads(line)
        result.setdefault(parsed["case"], []).append(parsed)
    return result


def has_sent(channel: Any) -> bool:
    return channel.snapshot()["senders"][0]["records"] > 0


@contextlib.contextmanager
def in_use() -> Iterator[tuple[Any, int]]:
    """A channel of messages, and the process that uses it."""
    with penstock.Ring(Step | Stop, name="steps") as ring, spawn(send_slowly, ring) as child:
        eventually(lambda: has_sent(ring), within=20)
        assert child.pid is not None
        yield ring, child.pid


def test_messages_of_a_process_are_measured_by_class_and_by_field(capsys: pytest.CaptureFixture[str]) -> None:
    with in_use() as (_, pid):
        assert cli.main(["measure", str(pid), "--seconds", "0.5", "--json"]) == 0
        result = lines_of(capsys.readouterr().out)
        (channel,) = result["channel"]
        assert (channel["channel"], channel["kind"], channel["undecodable"]) == ("steps", "ring", 0)
        assert channel["messages"] > 4
        step, stop = result["message"]
        assert (step["message"], stop["message"]) == ("Step", "Stop")
        assert stop["mean_bytes"] == 2 + 11
        assert stop["mean_distance_bytes"] == 0 and stop["repeated_share"] == 1
        assert 0 < step["mean_distance_bytes"] < 3
        unchanged = {item["field"]: item["unchanged_share"] for item in result["field"] if item["message"] == "Step"}
        assert (unchanged["rows"], unchanged["number"]) == (1, 0)


def test_capture_accepts_a_ticket(capsys: pytest.CaptureFixture[str]) -> None:
    with in_use() as (ring, _):
        assert cli.main(["measure", str(ring.ticket), "--seconds", "0.3"]) == 0
        output = capsys.readouterr().out
        assert "ring 'steps'" in output and "Step, by field" in output


def test_recording_has_the_figures_of_the_live_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_use() as (_, pid):
        path = tmp_path / "x.rec"
        assert cli.main(["measure", str(pid), "--seconds", "0.3", "--json", "--record", str(path)]) == 0
        first = lines_of(capsys.readouterr().out)
        assert cli.main(["measure", str(path), "--json"]) == 0
        again = lines_of(capsys.readouterr().out)
        assert again["channel"] == first["channel"]
        assert again["field"] == first["field"]
        (source,) = CaptureFile(path).sources
        assert source.name == "steps" and b"Step" in source.schema


def test_captured_and_missed_messages_add_up_under_load() -> None:
    with penstock.Ring(name="fast", capacity=1 << 16) as ring, spawn(send_at_full_speed, ring) as child:
        eventually(lambda: has_sent(ring), within=20)
        assert child.pid is not None
        watched = live_capture.channels_of(child.pid, None)
        first: int | None = None
        last = observed = missed = 0
        for entry in live_capture.entries(watched, 0.7):
            if entry is None:
                continue
            if entry.missed:
                missed += entry.missed
                continue
            assert entry.frame == b"x" * 100
            first = entry.sequence if first is None else first
            last = entry.sequence
            observed += 1
            if observed % 50 == 0:
                time.sleep(0.01)  # slower than the sender
        assert missed > 0, "this was no load"
        assert first is not None
        assert observed <= last - first + 1 <= observed + missed


def test_capture_ends_with_its_table_when_the_channel_is_gone(tmp_path: Path) -> None:
    with in_use() as (_, pid), looking_at(pid, tmp_path / "x.rec") as looking:
        os.kill(pid, signal.SIGKILL)
        output = ended(looking)
    assert looking.returncode == 0
    assert "Step, by field" in output


def test_interrupt_ends_a_capture_with_its_table(tmp_path: Path) -> None:
    with in_use() as (_, pid), looking_at(pid, tmp_path / "x.rec") as looking:
        os.kill(looking.pid, signal.SIGINT)
        output = ended(looking)
    assert looking.returncode == 0
    assert "ring 'steps'" in output and "Step, by field" in output


@contextlib.contextmanager
def looking_at(pid: int | None, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The command as a process, which has seen something already."""
    command_line = [sys.executable, "-m", "penstock", "measure", str(pid), "--record", str(path)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as looking:
        try:
            eventually(lambda: path.exists() and path.stat().st_size > 8000, within=20)
            yield looking
        finally:
            looking.kill()


def ended(looking: "subprocess.Popen[str]") -> str:
    """What it has said, when it has ended by itself."""
    return looking.communicate(timeout=20)[0]


def test_capture_of_an_idle_channel_reports_no_messages(capsys: pytest.CaptureFixture[str]) -> None:
    with penstock.Broadcast(receivers=2, name="quiet"):
        options = command.CaptureOptions(os.getpid(), channel="quiet", seconds=0.05)
        assert command.run(options) == 0
    assert "no message was sent meanwhile" in capsys.readouterr().out
