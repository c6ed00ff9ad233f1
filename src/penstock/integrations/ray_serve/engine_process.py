"""The engine of a replica: its start, its load, and its end.

`engine_keeper` is the process between this one and the engine's launcher; `snapshot_reader` reads the status board.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from penstock import DeathCause
from penstock.engine.cluster.status_board import StatusBoard
from penstock.integrations.ray_serve import engine_keeper
from penstock.server.status.server_info import ServerInfo
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader

T = TypeVar("T")
BOARD_POLL_S = 0.05  # seconds between two reads of the board, while the engine starts
STOP_TIMEOUT = 10.0  # seconds that a launcher takes at most after its open requests, with some to spare
KILL_TIMEOUT = 5.0  # seconds until a process that gets SIGKILL has ended, with all of its memory


class EngineEnded(RuntimeError):
    """The engine has ended; the text says how, and has the end of its log."""


class EngineLoad(NamedTuple):
    """What the status board says of all groups of an engine."""

    serving_groups: int
    open: int  # requests
    running: int  # sequences in the batch
    waiting: int  # sequences that do not run: queued, preempted, or of requests that wait for a group
    free_blocks: int
    blocks: int  # of the caches
    load: float  # sequences for each slot: above 1, some wait for one


NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0, 0.0)


class EngineProcess:
    """`penstock serve` on a free port of the loopback address, kept by a process in a session of its own.

    It ends with this process, and by `stop`. `ended` is set when it has ended, for whatever reason.
    """

    def __init__(self, arguments: Sequence[str], shutdown_timeout: float) -> None:
        """Starts it, from a coroutine. Raises OSError."""
        serve = [sys.executable, "-m", "penstock", "serve", *arguments, "--host=127.0.0.1", "--port=0"]
        self._grace = shutdown_timeout + STOP_TIMEOUT
        self._keeper = subprocess.Popen(
            # -I: nothing of the environment, or of the script's folder, is imported by the keeper
            [sys.executable, "-I", engine_keeper.__file__, str(self._grace), *serve],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._launcher: asyncio.Future[int] = self._loop.create_future()
        self._reader: SnapshotReader | None = None
        self._info: ServerInfo  # with the reader
        threading.Thread(target=self._listen, name="engine keeper", daemon=True).start()

    def _listen(self) -> None:
        """Reads what the keeper writes, in a thread: a replica's loop does not run in the main thread."""
        assert self._keeper.stdout is not None, "it is a pipe"
        with self._keeper.stdout as lines:
            if pid := lines.readline():
                self._set(self._launcher, int(pid))
            end = lines.read().decode(errors="replace").strip()
        status = self._keeper.wait()
        self._set(self.ended, end or f"the keeper has ended: {DeathCause.of_exit_code(status)}")

    def _set(self, future: asyncio.Future[T], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(future.set_result, value)

    async def wait_until_serving(self) -> str:
        """Waits until all processes serve, and returns the URL. Raises EngineEnded."""
        started: set[asyncio.Future[Any]] = {self._launcher, self.ended}
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        while not self.ended.done():
            if (url := self._serving_url(self._launcher.result())) is not None:
                return url
            await asyncio.wait({self.ended}, timeout=BOARD_POLL_S)
        raise EngineEnded(f"the engine of this replica has not started: {self.ended.result()}")

    def _serving_url(self, pid: int) -> str | None:
        try:
            if self._reader is None:
                reader = SnapshotReader(pid)
                self._info, self._reader = reader.info(), reader
            processes = self._reader.take().processes
        except NoServer:  # it has not created its segments yet, or has ended
            return None
        return self._info.url if all(process.state == "serves" for process in processes) else None

    def load(self) -> EngineLoad:
        """Reads the status board and the server processes' counters of waiting requests.

        Nothing is open or serves while the engine starts, and when it has ended.
        """
        if self._reader is None:
            return NO_LOAD
        try:
            waiting, board = self._reader.waiting_requests(), self._reader.board()
        except NoServer:
            return NO_LOAD
        try:
            rows = board.rows
            running = sum(row[StatusBoard.RUNNING] for row in rows)
            waiting += sum(row[StatusBoard.WAITING] for row in rows)
            return EngineLoad(
                serving_groups=sum(row[StatusBoard.SERVING] > 0 for row in rows),
                open=sum(row[StatusBoard.OPEN] for row in rows),
                running=running,
                waiting=waiting,
                free_blocks=sum(row[StatusBoard.FREE_BLOCKS] for row in rows),
                blocks=sum(row[StatusBoard.BLOCKS] for row in rows),
                load=(running + waiting) / (self._info.max_num_seqs * len(rows)),
            )
        finally:
            board.close()

    def close(self) -> None:
        """Tells the keeper to end the engine, and does not wait for it."""
        assert self._keeper.stdin is not None, "it is a pipe"
        self._keeper.stdin.close()

    async def stop(self) -> None:
        """Ends the engine, which answers open requests before, and waits for its end."""
        self.close()
        await asyncio.wait({self.ended}, timeout=self._grace + KILL_TIMEOUT)
