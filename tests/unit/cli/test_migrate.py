"""`penstock migrate`: which processes it refuses, in words, and what it shows of a launcher."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock import cli
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.server.options import ServerOptions
from penstock.server.status import planned_migration
from penstock.server.status.counters import ServerCounters
from penstock.server.status.history import ServerHistory
from penstock.server.status.server_info import ServerInfo

CONFIG = EngineConfig(simulated=SimulatedDevice(), data_parallel_size=2)


class Launcher:
    """The pages of a launcher, in this process, which does on SIGHUP what `migrate` says."""

    def __init__(self) -> None:
        self.notice = ServerInfo.publish(CONFIG, ServerOptions(), "http://127.0.0.1:1")
        self.tally = ServerCounters.create(1, 2)
        self.history = ServerHistory.create(1)
        self.page = StatusBoard.create(2, 7)
        self.board = StatusBoard(self.page, writable=True)
        for group in range(2):
            self.board.row(group)[StatusBoard.SERVING] = 1


def play(monkeypatch: pytest.MonkeyPatch, states: Iterator[None]) -> None:
    """The next state of the launcher follows each look at the board: instead of the pause between two looks."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(states))
    monkeypatch.setattr(planned_migration, "time", clock)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["migrate", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_process_that_is_no_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pid = os.getppid()
    status, out, err = run(capsys, str(pid))
    assert (status, out) == (2, "") and err.startswith(f"penstock migrate: process {pid} ")
    status, _, err = run(capsys, str(1 << 22))
    assert status == 2 and f"there is no process {1 << 22}" in err


@pytest.fixture
def hangups() -> object:
    """Ignores SIGHUP of this process, which stands for a launcher."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_progress_comes_from_the_board_and_status_from_the_migration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for failures, expected in ((0, 0), (1, 1)):
        launcher = Launcher()
        cluster, rows = launcher.board.cluster, launcher.board.rows

        def migrate(cluster=cluster, rows=rows, failures=failures) -> Iterator[None]:  # type: ignore[no-untyped-def]
            cluster[StatusBoard.MIGRATIONS_BEGUN] = 1
            for row in rows:
                for incarnation in (0, 2):
                    row[StatusBoard.SERVING] = incarnation
                    yield
            cluster[StatusBoard.MIGRATIONS_FAILED] = failures
            cluster[StatusBoard.MIGRATIONS_ENDED] = 1
            yield

        play(monkeypatch, migrate())
        status, out, err = run(capsys, str(os.getpid()))
        assert status == expected
        states = [line.partition(" after")[0] for line in out.splitlines()[:4]]
        assert states == [f"group {group} {state}" for group in (0, 1) for state in ("restarts", "serves again")]
        assert ("a group does not serve again" in err) == bool(failures)
        assert ("all groups have been restarted" in out) != bool(failures)


@pytest.mark.usefixtures("hangups")
def test_migration_that_runs_already_is_not_the_one_that_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher()
    cluster, rows = launcher.board.cluster, launcher.board.rows
    cluster[StatusBoard.MIGRATIONS_BEGUN] = 1
    rows[1][StatusBoard.SERVING] = 0

    def migrate() -> Iterator[None]:
        for _ in range(2):
            for row in rows:
                for incarnation in (0, row[StatusBoard.SERVING] + 2):
                    row[StatusBoard.SERVING] = incarnation
                    yield
            cluster[StatusBoard.MIGRATIONS_ENDED] += 1
            cluster[StatusBoard.MIGRATIONS_FAILED] = 1  # the failure of the first one
            cluster[StatusBoard.MIGRATIONS_BEGUN] = 2
        yield

    play(monkeypatch, migrate())
    status, out, _ = run(capsys, str(os.getpid()))
    assert status == 0
    first, *lines, last = [line.partition(" after")[0] for line in out.splitlines()]
    assert first.startswith("another migration runs") and last.startswith("all groups have been restarted")
    assert lines == [f"group {group} {state}" for group in (0, 1) for state in ("restarts", "serves again")]


@pytest.mark.usefixtures("hangups")
def test_server_that_drains_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher()
    launcher.board.drain()
    status, _, err = run(capsys, str(os.getpid()))
    assert status == 1 and "is shutting down" in err
