"""Processes of `vllm serve` are killed under clients, without a model: inside/server_deaths.py."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests import tiers
from tests.support import peer
from tests.support.vllm_kills import END, run_campaign

PROMISED = 0.5  # seconds until a client has its error, and /health says so
SLACK = 1.5  # on a machine that has other work; the figures are printed
EACH = 30.0
START = 400.0


@tiers.needs_all
@pytest.mark.timeout(tiers.VLLM_SERVER_DEATHS * EACH + 2 * START)
def test_clients_of_a_server_get_each_death_with_its_cause(seed: int, tmp_path: Path) -> None:
    kills = tiers.VLLM_SERVER_DEATHS
    limit = kills * EACH + START
    report = run_campaign("server", ["--kills", str(kills), "--seed", str(seed)], tmp_path, limit)
    assert report["kills"] == kills and not report["wrong"] and not report["left"]
    for effect in ("/health", "the last client's answer"):
        took = sorted(report["took"][f"all, {effect}"])
        assert took[len(took) // 2] <= PROMISED and took[-1] <= PROMISED + SLACK


def sessions_of(folder: Path) -> Mapping[int, list[str]]:
    """Returns the command lines of the processes that have the folder as TMPDIR, by session."""
    sessions: dict[int, list[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                sessions.setdefault(os.getsid(int(process.name)), []).append((process / "cmdline").read_text())
    return sessions


def await_sessions(folder: Path, is_enough: Callable[[int], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not is_enough(len(sessions := sessions_of(folder))):
        assert time.monotonic() < deadline, sessions
        time.sleep(0.1)


@pytest.mark.timeout(2 * START)
@pytest.mark.parametrize(
    ("servers", "number"),
    [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)],
    ids=["in preparation", "between kills", "killed"],
)
def test_campaign_of_servers_ends_all_processes_at(servers: int, number: int, tmp_path: Path) -> None:
    peer.python_of_vllm()
    command = [str(peer.ROOT / "scripts" / "vllm-kills"), "server", "--kills", "1000", "--forks", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as campaign:
        try:
            await_sessions(tmp_path, lambda count: count > servers, START)
        finally:
            campaign.send_signal(number)
        assert campaign.wait(END) == (128 + number if number == signal.SIGTERM else -number)
    await_sessions(tmp_path, lambda count: count == 0, END)
