"""Sentences of inspect and trace about a worker without a reply: the step, the receivers, the Python stack."""

import contextlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import cli, stack_dump
from penstock.channel import Channel
from penstock.tools import inspect
from penstock.tools.inspect import stacks
from penstock.tools.inspect.stacks import Frame
from tests.conftest import eventually, spawn

HANG_AT = 5  # step
# Of py-spy 0.4.3.
PY_SPY = """Process 12: python -m program
Python v3.11.7 (/usr/bin/python3.11)

Thread 13 (idle): "monitor"
    wait (threading.py:331)
Thread 12 (active): "MainThread"
    GroupCoordinator.all_reduce (vllm/distributed/parallel_state.py:545)
    forward (model.py:7)
"""


def compute_for_ever() -> None:
    while True:
        time.sleep(0.01)


def work(steps: Channel, replies: Channel | None, name: str) -> None:
    stack_dump.register()
    receiver = steps.open_receiver(name=name)
    sender = None if replies is None else replies.open_sender(name=name)
    with contextlib.suppress(penstock.PenstockError):
        for step in range(1, 1_000_000):
            receiver.receive()
            if step == HANG_AT and sender is not None:
                compute_for_ever()
            if sender is not None:
                sender.send(b"done")


def answer(steps: Channel, replies: Channel) -> None:
    with steps.open_receiver(name="worker") as receiver, replies.open_sender(name="worker") as sender:
        with contextlib.suppress(penstock.PenstockError):
            while True:
                receiver.receive()
                sender.send(b"done")


def lead(steps: Channel, replies: Channel) -> None:
    with steps.open_sender(name="core") as sender, replies.open_receiver(name="core") as receiver:
        with contextlib.suppress(penstock.PenstockError):
            while True:
                sender.send(b"step")
                receiver.receive()


@pytest.fixture
def hang() -> Iterator[int]:
    """This process leads two workers. Worker 0 replies, and hangs in step 5. Yields the pid of worker 0."""
    steps, replies = penstock.Broadcast(receivers=2, name="steps"), penstock.Ring(name="replies")
    with spawn(work, steps, replies, "worker 0") as worker, spawn(work, steps, None, "worker 1"):
        leader = threading.Thread(target=lead, args=(steps, replies))
        leader.start()
        assert worker.pid is not None
        yield worker.pid
        os.kill(worker.pid, signal.SIGKILL)
        leader.join()


def owed() -> str:
    """Returns the sentence about a reply, or an empty text."""
    verdict = inspect.look(os.getpid())["verdict"]
    return next((entry["text"] for entry in verdict if "waits for a reply" in entry["text"]), "")


def levels_of_waits() -> list[str]:
    return [entry["level"] for entry in inspect.look(os.getpid())["verdict"] if entry["kind"] == "wait"]


def test_inspect_names_the_step_that_a_worker_has_not_answered(hang: int) -> None:
    text = eventually(lambda: owed() if "worker 1" in owed() else "", within=20)  # worker 1 may start last
    assert text.startswith(f"receiver 'core' (pid {os.getpid()}) waits for a reply since ")
    assert f": step {HANG_AT} of broadcast 'steps', which 'worker 1' (pid " in text
    assert f") has finished, is with 'worker 0' (pid {hang})" in text
    eventually(lambda: levels_of_waits() == ["warning", "idle"], within=20)


def test_inspect_names_the_stopped_worker_that_owes_a_reply(hang: int) -> None:
    eventually(owed, within=20)
    os.kill(hang, signal.SIGSTOP)
    text = eventually(lambda: owed() if "stopped" in owed() else "", within=20)
    assert text.endswith(f"is with 'worker 0' (pid {hang}, stopped); `kill -CONT {hang}` lets it go on")


def test_inspect_prints_the_stack_of_the_process_that_owes(hang: int, capsys: pytest.CaptureFixture[str]) -> None:
    eventually(owed, within=20)
    assert cli.main(["inspect", str(os.getpid()), "--stacks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    index = next(index for index, line in enumerate(lines) if line.startswith("stack of "))
    assert lines[index] == f"stack of 'worker 0' (pid {hang}):"
    assert lines[index + 1].strip().startswith("compute_for_ever (") and "test_hangs.py:" in lines[index + 1]
    assert sum(line.startswith("stack of ") for line in lines) == 1


def test_trace_of_a_stalled_tree_has_the_open_step(
    hang: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(owed, within=20)
    arguments = ["trace", str(os.getpid()), "--seconds", "0.2", "-o", str(tmp_path / "trace")]
    assert cli.main(arguments) == 0
    assert "core waits for a reply since " in capsys.readouterr().out
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    (event,) = [event for event in events if event.get("cat") == "open"]
    assert event["args"]["step"] == HANG_AT and event["pid"] == os.getpid() and event["dur"] > 500_000
    assert event["args"]["goes_on"]


def test_stack_of_a_process_without_a_handler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    stack = stacks.read_stack(os.getppid())
    assert (
        not stack.frames
        and stack.reason == "py-spy is not installed, and the process has not registered for the signal"
    )


def test_py_spy_is_preferred_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{PY_SPY}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stack = stacks.read_stack(os.getpid())
    assert stack.collective == stack.frames[0]
    assert str(stack.frames[0]) == "GroupCoordinator.all_reduce (vllm/distributed/parallel_state.py:545)"
    assert stack.frames[1:] == (Frame("forward", "model.py", "7"),)


def test_worker_that_waits_for_work_is_owed_no_reply() -> None:
    """Leader and worker have exchanged steps and replies, and the leader computes."""
    steps, replies = penstock.Ring(name="steps"), penstock.Ring(name="replies")
    with spawn(answer, steps, replies), steps.open_sender(name="core") as sender:
        receiver = replies.open_receiver(name="core")
        for _ in range(2):
            sender.send(b"step")
            receiver.receive()
        eventually(lambda: levels_of_waits() == ["idle"], within=20)
        assert not owed()
        receiver.close()
