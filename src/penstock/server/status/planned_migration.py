"""Asks the launcher of a running server for a migration, and shows how it goes on, from the status board."""

from __future__ import annotations

import os
import signal
import sys
import time

from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader

BOARD_POLL_S = 0.05  # seconds between two reads of the board
BEGIN_TIMEOUT = 10.0  # seconds until the launcher has begun


def run(pid: int, timeout: float) -> int:
    """Returns 0 when all groups serve again, 1 if that fails, 2 if process `pid` is no launcher."""
    try:
        reader = SnapshotReader(pid)
        launcher = reader.info().pid
    except NoServer as error:
        return _fail(str(error), 2)
    if launcher != pid:
        return _fail(f"process {pid} is no launcher: process {launcher} is that of its server", 2)
    try:
        return _migrate(reader, pid, timeout)
    except NoServer as error:
        return _fail(f"the server has ended: {error}", 1)
    except PermissionError as error:
        return _fail(f"process {pid} cannot be sent a signal: {error}", 2)


def _fail(reason: str, status: int) -> int:
    print(f"penstock migrate: {reason}", file=sys.stderr)
    return status


def _migrate(reader: SnapshotReader, pid: int, timeout: float) -> int:
    board = reader.board()
    if board.is_draining:
        return _fail(f"the server of process {pid} is shutting down", 1)
    begun, ended, _ = _counts(board)
    if begun != ended:
        print("another migration runs: this migration begins when that one has ended", flush=True)
    try:
        os.kill(pid, signal.SIGHUP)
    except ProcessLookupError:
        raise NoServer(f"there is no process {pid}") from None
    return _watch(reader, board, pid, timeout)


def _watch(reader: SnapshotReader, board: StatusBoard, pid: int, timeout: float) -> int:
    """Shows the progress of the migration that begins after the state `board`. Migrations run one after the other, so
    their numbers are counts of the board."""
    start = idle_since = time.monotonic()
    begun, ended, failed = _counts(board)
    number, first = begun + 1, _serving(board)
    states = ["waits"] * len(first)
    while True:
        waited, was_running = begun < number, begun != ended
        board = reader.board()
        begun, ended, failures = _counts(board)
        now = time.monotonic()
        if waited and was_running and ended < number:
            failed = failures  # of the migration before
        if begun < number:
            first = _serving(board)
            idle_since = idle_since if begun == ended else now
        else:
            first = [before or current for before, current in zip(first, _serving(board), strict=True)]
            for group, state in enumerate(_states(board, first)):
                if state != states[group]:
                    states[group] = state
                    print(f"group {group} {state} after {now - start:.1f} s", flush=True)
        if ended >= number:
            if failures > failed:
                return _fail("a group does not serve again: the server's log says why", 1)
            print(f"all groups have been restarted within {now - start:.1f} s")
            return 0
        if begun < number and now - idle_since > BEGIN_TIMEOUT:
            return _fail(f"process {pid} has begun no migration within {BEGIN_TIMEOUT:g} s", 1)
        if now - start > timeout:
            return _fail(f"not all groups serve again within {timeout:g} s", 1)
        time.sleep(BOARD_POLL_S)


def _counts(board: StatusBoard) -> tuple[int, int, int]:
    cluster = board.cluster
    return (
        cluster[StatusBoard.MIGRATIONS_BEGUN],
        cluster[StatusBoard.MIGRATIONS_ENDED],
        cluster[StatusBoard.MIGRATIONS_FAILED],
    )


def _serving(board: StatusBoard) -> list[int]:
    """Returns the incarnation of each group that serves; 0: none does."""
    return [row[StatusBoard.SERVING] for row in board.rows]


def _states(board: StatusBoard, first: list[int]) -> list[str]:
    """Returns the state of each group. `first`: the incarnations that served at the beginning."""
    return [
        "restarts" if now == 0 else "waits" if now == before else "serves again"
        for now, before in zip(_serving(board), first, strict=True)
    ]
