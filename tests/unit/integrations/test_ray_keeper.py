"""The process between a replica and its engine: whatever ends of the two, the other ends, and the end is told."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.integrations.ray_serve import engine_keeper
from tests.conftest import eventually
from tests.support.processes import state_of

ECHOES = "echo starts >&2; echo more; exec sleep 600"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


class Kept:
    """A keeper, as a replica starts it, and the process that it keeps."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.stdin, self.stdout, self.log = process, process.stdin, process.stdout, log
        self.pid = int(self.stdout.readline())

    def end(self) -> str:
        """Returns what the keeper says last."""
        text = self.stdout.read()
        assert self.process.wait(10) == 0
        return text


@contextlib.contextmanager
def keeping(tmp_path: Path, command: list[str], grace: float = 30.0) -> Iterator[Kept]:
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-I", engine_keeper.__file__, str(grace), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        with process:
            yield Kept(process, log)
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
    finally:
        process.kill()


def has_ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_its_log_is_passed_on_and_its_end_is_told_with_the_last_lines(tmp_path: Path) -> None:
    with keeping(tmp_path, ["sh", "-c", "echo one; echo two >&2; exit 3"]) as keeper:
        assert keeper.end() == "exit status 3\none\ntwo\n"
    assert keeper.log.read_text() == "one\ntwo\n"


def test_a_long_log_passes_whole_and_the_last_of_it_is_kept(tmp_path: Path) -> None:
    with keeping(tmp_path, ["seq", "1", "200000"]) as keeper:
        how, *lines = keeper.end().splitlines()
    assert how == "exited with status 0" and lines[-1] == "200000"
    assert len("\n".join(lines)) <= engine_keeper.TAIL_NBYTES
    assert keeper.log.read_text().splitlines() == [str(number) for number in range(1, 200_001)]


def test_the_engine_is_told_to_end_when_the_replica_has_ended(tmp_path: Path) -> None:
    with keeping(tmp_path, ["sh", "-c", ECHOES]) as keeper:
        eventually(lambda: keeper.log.read_text() == "starts\nmore\n")
        keeper.stdin.close()
        assert keeper.end().startswith("killed by SIGTERM\n")


def test_an_engine_that_does_not_end_within_its_grace_is_killed(tmp_path: Path) -> None:
    with keeping(tmp_path, [sys.executable, "-c", STUBBORN], grace=0.2) as keeper:
        eventually(lambda: keeper.log.read_text() == "up\n")
        keeper.stdin.close()
        assert keeper.end().startswith("killed by SIGKILL\n")


def test_the_engine_ends_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    with keeping(tmp_path, [sys.executable, "-c", STUBBORN]) as keeper:
        eventually(lambda: keeper.log.read_text() == "up\n")
        keeper.process.kill()
        eventually(lambda: has_ended(keeper.pid))


def test_a_keeper_that_is_told_to_end_passes_that_on(tmp_path: Path) -> None:
    with keeping(tmp_path, ["sh", "-c", ECHOES]) as keeper:
        eventually(lambda: keeper.log.read_text() == "starts\nmore\n")
        keeper.process.send_signal(signal.SIGINT)  # of a terminal: it is for the program in front
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.end().startswith("killed by SIGTERM\n")


def test_an_engine_takes_signals_that_are_blocked_in_the_replica(tmp_path: Path) -> None:
    shown = "grep SigBlk /proc/self/status"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with keeping(tmp_path, ["sh", "-c", shown]) as keeper:
            assert keeper.end().split()[-1] == "0" * 16
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_keeper_outlives_the_process_group_of_the_replica(tmp_path: Path) -> None:
    """Ray kills that group. A replica that ends so leaves its engine time to end by itself."""
    drains = "trap 'sleep 0.3; echo drained; exit 0' TERM; echo up; while true; do sleep 0.05; done"
    source = f"""
        import os, subprocess, sys
        keeper = subprocess.Popen([sys.executable, "-I", {engine_keeper.__file__!r}, "30", "sh", "-c", {drains!r}],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, start_new_session=True)
        print(keeper.pid, int(keeper.stdout.readline()), flush=True)
        os.read(0, 1)
    """
    log = tmp_path / "log"
    with log.open("w") as stderr:
        replica = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(source)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    with replica:
        assert replica.stdout is not None
        pids = [int(pid) for pid in replica.stdout.readline().split()]
        eventually(lambda: "up" in log.read_text())
        os.killpg(replica.pid, signal.SIGKILL)
        eventually(lambda: all(map(has_ended, pids)))
    assert log.read_text() == "up\ndrained\n"


@pytest.mark.parametrize("command", [["/nowhere/at/all"]])
def test_a_command_that_cannot_be_started_ends_the_keeper_without_a_pid(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", engine_keeper.__file__, "1", *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == "" and "/nowhere/at/all" in done.stderr
