"""Signals at every moment of `penstock serve`: from its first statement to its end, repeated, to its group."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import tiers
from tests.conftest import eventually
from tests.support.command import COMMAND, SERVE, START, ServerClient, started

SCRIPT = Path(sys.executable).with_name("penstock")
OPEN_REQUESTS = 8
SECONDS = 2.0  # that the open requests take
REPEAT_S = 0.03  # between two signals of a program that forwards


def catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def wait_for_handlers(pid: int) -> None:
    eventually(lambda: catches(pid, signal.SIGHUP), within=START)


@contextlib.contextmanager
def starting(*prefix: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A server from the moment at which its handlers are installed."""
    with started((*prefix, *SERVE), stderr=subprocess.DEVNULL) as process:
        if not prefix:
            wait_for_handlers(process.pid)
        yield process


# ── the start ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("command", [COMMAND, (str(SCRIPT),)], ids=["module", "script"])
def test_handlers_are_installed_before_the_first_large_import(command: tuple[str, ...]) -> None:
    arguments = SERVE[len(COMMAND) :]
    with started((*command, *arguments), stderr=subprocess.DEVNULL) as process:

        def has_handlers() -> bool:
            maps = Path(f"/proc/{process.pid}/maps").read_text()  # before the mask: handlers are never removed
            has = catches(process.pid, signal.SIGHUP) and catches(process.pid, signal.SIGTERM)
            assert has or ("numpy" not in maps and "penstock/_native" not in maps)
            return has

        eventually(has_handlers, within=START)


@pytest.mark.parametrize("after", [0.0, *tiers.only_in_all(0.05, 0.3, 0.7, 1.2, 2.0, 3.0)])
def test_server_serves_after_hangups_while_it_starts(after: float) -> None:
    with starting() as process:
        time.sleep(after)
        for _ in range(tiers.choose(3, 30, 30)):
            process.send_signal(signal.SIGHUP)
            time.sleep(REPEAT_S)
        client = ServerClient(process)
        assert client.complete(5) == 200
        process.terminate()
        assert process.wait(START) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, *tiers.only_in_all(signal.SIGINT)])
@pytest.mark.parametrize("after", [0.0, *tiers.only_in_all(0.3, 1.0, 2.0)])
def test_end_while_the_command_starts_has_status_0(number: int, after: float) -> None:
    with starting() as process:
        time.sleep(after)
        process.send_signal(number)
        assert process.wait(START) == 0


def test_hangup_is_ignored_by_the_resource_tracker() -> None:
    with starting() as process:
        client = ServerClient(process)
        trackers = [
            child.pid
            for child in psutil.Process(process.pid).children()
            if any("resource_tracker" in word for word in child.cmdline())
        ]
        assert len(trackers) == 1
        os.kill(trackers[0], signal.SIGHUP)
        before = client.incarnations()
        process.send_signal(signal.SIGHUP)
        client.wait_for_restart(before)  # processes were spawned, for which Python needs its tracker
        assert psutil.Process(trackers[0]).status() != psutil.STATUS_ZOMBIE
        process.terminate()
        assert process.wait(START) == 0


# ── a storm ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@tiers.needs_all
@pytest.mark.parametrize("pause", [0.1, 0.01])
def test_hangups_under_load_cost_no_answer(pause: float, seed: int) -> None:
    """In `make test`, `test_planned_migration.py` sends hangups in a row."""
    chance = random.Random(seed)
    with started((*SERVE, "--data-parallel-size", "2"), stderr=subprocess.DEVNULL) as process:
        client = ServerClient(process)
        before = eventually(client.incarnations, within=START)
        with client.open_requests(12, 8.0) as statuses:
            while len(statuses) < 12:
                process.send_signal(signal.SIGHUP)
                time.sleep(chance.uniform(0.01, 2.0) * pause)
        assert statuses == [200] * 12
        client.wait_for_restart(before)
        assert client.complete(5) == 200
        process.terminate()
        assert process.wait(START) == 0


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("pause", [0.005, *tiers.only_in_all(0.0005)])
def test_hangups_during_a_drain_change_nothing(pause: float) -> None:
    with starting() as process:
        client = ServerClient(process)
        with client.open_requests(OPEN_REQUESTS, SECONDS) as statuses:
            process.terminate()
            deadline = time.monotonic() + START
            while process.poll() is None and time.monotonic() < deadline:
                process.send_signal(signal.SIGHUP)
                time.sleep(pause)
        assert statuses == [200] * OPEN_REQUESTS
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("numbers", "has_group"),
    [
        ((signal.SIGTERM,) * 2, False),
        *tiers.only_in_all(
            ((signal.SIGTERM,) * 20, False),
            ((signal.SIGINT, signal.SIGTERM, signal.SIGINT), False),
            ((signal.SIGTERM, signal.SIGINT, signal.SIGTERM), True),
        ),
    ],
    ids=["twice", "many times", "both signals", "to the group"],
)
def test_repeated_signal_within_a_second_lets_the_drain_go_on(numbers: tuple[int, ...], has_group: bool) -> None:
    with starting() as process:
        client = ServerClient(process)
        with client.open_requests(OPEN_REQUESTS, SECONDS) as statuses:
            for number in numbers:
                os.killpg(process.pid, number) if has_group else process.send_signal(number)
                time.sleep(REPEAT_S)
        assert statuses == [200] * OPEN_REQUESTS
        assert process.wait(START) == 0


@tiers.needs_all  # in push: test_repeated_signal_within_a_second_lets_the_drain_go_on sends both signals itself
@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs timeout(1)")
def test_signal_that_timeout_forwards_twice_drains() -> None:
    with starting("timeout", "600") as process:
        launcher = eventually(lambda: psutil.Process(process.pid).children(), within=START)[0]
        client = ServerClient(process, launcher.pid)
        with client.open_requests(OPEN_REQUESTS, SECONDS) as statuses:
            process.terminate()
        assert statuses == [200] * OPEN_REQUESTS
        process.wait(START)


def test_signal_repeated_after_a_second_ends_the_drain() -> None:
    with starting() as process:
        client = ServerClient(process)
        with client.open_requests(OPEN_REQUESTS, 12.0) as statuses:
            process.terminate()
            time.sleep(1.5)
            process.terminate()
            assert process.wait(8) == 0
        assert 200 not in statuses
