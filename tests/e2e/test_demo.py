"""The demonstration as a user runs it: it survives its workers, ends when told, and leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.conftest import eventually

COMMAND = [sys.executable, "-m", "penstock"]
ALONE = ("--receivers", "2", "--no-chaos")


class Running:
    """A demonstration in a session of its own, whose lines are read as they come."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "demo", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def read_until(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without saying {words!r}: {''.join(self.lines)}")

    def end(self, within: float = 20.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=within)
        return self.process.returncode, "".join(self.lines) + out, err

    def everybody(self) -> list[int]:
        """All processes of its session that are not zombies."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{int(entry)}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry))
        return found

    def pid_of(self, name: str) -> int:
        seen = subprocess.run(
            [*COMMAND, "inspect", str(self.process.pid), "--json"], capture_output=True, text=True, timeout=30
        )
        assert seen.returncode == 0, seen.stderr
        processes: list[dict[str, Any]] = json.loads(seen.stdout)["processes"]
        return next((one["pid"] for one in processes if name in one["peers"]), 0)


@contextlib.contextmanager
def demonstration(*options: str) -> Iterator[Running]:
    running = Running(*options)
    try:
        yield running
        eventually(lambda: not running.everybody())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


def test_a_killed_worker_is_noticed_and_replaced_and_no_byte_is_wrong() -> None:
    with demonstration("--seconds", "9", "--receivers", "3") as running:
        line = running.read_until("took its place")
        assert re.search(r"worker \d \(pid \d+\) was killed, the core was told after [\d.]+ (µs|ms|s) ", line)
        assert re.search(r"\d+ blocks? \([\d.]+ [KM]?i?B\) given back; pid \d+ took its place under epoch 2", line)
        status, out, err = running.end(60)
    assert (status, err) == (0, "")
    assert "none wrong; 1 killed, each noticed within" in out
    counted = re.search(r"(\d+) steps, (\d+) images .* checked (\d+) times", out)
    assert counted is not None
    assert all(int(number) > 0 for number in counted.groups())


def test_ctrl_c_ends_it_in_peace() -> None:
    with demonstration(*ALONE) as running:
        running.read_until(" steps/s")
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does: to everybody
        status, out, err = running.end()
    assert (status, err) == (0, "")
    assert "none wrong" in out.splitlines()[-1]


def test_ctrl_c_while_it_starts_ends_it_in_peace_too() -> None:
    with demonstration(*ALONE) as running:
        running.read_until("starting")
        os.killpg(running.process.pid, signal.SIGINT)
        status, _, err = running.end()
    assert (status, err) == (0, "")


def test_a_core_that_dies_ends_it_with_its_name_and_a_server_that_dies_is_started_again() -> None:
    with demonstration(*ALONE) as running:
        running.read_until(" steps/s")
        server = running.pid_of("server")
        os.kill(server, signal.SIGKILL)
        running.read_until(f"server (pid {server}) ended unexpectedly: killed by SIGKILL; started again")
        assert eventually(lambda: running.pid_of("server") not in (0, server), within=20)
        core = running.pid_of("core")
        os.kill(core, signal.SIGKILL)
        status, _, err = running.end()
    assert (status, err) == (1, f"penstock demo: core (pid {core}) ended: killed by SIGKILL\n")


def test_a_worker_that_neither_answers_nor_dies_ends_it_with_its_name() -> None:
    with demonstration(*ALONE) as running:
        running.read_until(" steps/s")
        worker = running.pid_of("worker 1")
        os.kill(worker, signal.SIGSTOP)
        status, _, err = running.end(40)
    assert status == 1
    assert re.search(rf"Late: no answer to step \d+ from worker 1 \(pid {worker}\) within 10 s\n", err)


def test_when_it_is_killed_itself_nobody_is_left() -> None:
    with demonstration(*ALONE) as running:
        running.read_until(" steps/s")
        assert len(running.everybody()) >= 5
        running.process.kill()
        running.process.wait()
