"""`penstock serve` as a user starts it: a process that says in its log where it listens, and how it ended."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader
from tests.conftest import eventually

COMMAND = (sys.executable, "-m", "penstock")
STEP_MS = 4
SERVE = (*COMMAND, "serve", "--port", "0", "--device-model", "simulated", "--step-ms", str(STEP_MS))
START = 60.0  # seconds; until a server serves on a busy machine


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """It and its port. With the block it is told to end, unless it was told before; it must end well."""
    command = [*COMMAND, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, _port(process)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
            assert process.returncode == 0 and "killed=none" in rest, rest
        finally:
            process.kill()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if match := re.search(r"event=serving .*url=\S+:(\d+)", line):
            return int(match[1])
    raise AssertionError(f"it does not serve: {output}")


@contextlib.contextmanager
def started(command: Sequence[str] = SERVE, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a command in a process group of its own, and kills the group with the block."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class ServerClient:
    """Requests to a server that is found by the pid of its launcher: its streams are not read."""

    def __init__(self, process: "subprocess.Popen[bytes]", launcher: int | None = None) -> None:
        """Waits until the server serves. `launcher`: its pid, where `process` is a program that has started it."""
        self._process = process
        self.pid = process.pid if launcher is None else launcher
        self.port = 0
        eventually(self._is_ready, within=START)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"the server ended with {self._process.returncode}"
        with contextlib.suppress(NoServer):
            self.port = int(SnapshotReader(self.pid).info().url.rpartition(":")[2])
        return bool(self.port) and self.health().get("status") == "ready"

    def health(self) -> dict[str, Any]:
        """Returns {} while the server does not answer."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                health: dict[str, Any] = json.loads(connection.getresponse().read())
                return health
        return {}

    def incarnations(self) -> list[int]:
        """Returns the incarnation of each group; [] while a group does not serve."""
        groups = self.health().get("groups", [])
        return [group["incarnation"] for group in groups] if all(group["serves"] for group in groups) else []

    def wait_for_restart(self, before: list[int]) -> None:
        """Waits until each group serves in a later incarnation than in `before`."""

        def has_restarted() -> bool:
            now = self.incarnations()
            return bool(now) and all(new > old for new, old in zip(now, before, strict=True))

        eventually(has_restarted, within=START)

    def complete(self, tokens: int) -> int | str:
        """Returns the status of a completion of `tokens` tokens, or the error that ended it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)
        body = json.dumps({"prompt": "x" * 50, "max_tokens": tokens, "ignore_eos": True})
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200 and json.loads(text)["usage"]["completion_tokens"] != tokens:
                return "fewer tokens than requested"
            return answer.status
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()

    @contextlib.contextmanager
    def open_requests(self, count: int, seconds: float) -> Iterator[list[int | str]]:
        """Keeps `count` requests open for about `seconds`. Yields their statuses, complete after the block."""
        statuses: list[int | str] = []
        tokens = int(seconds * 1e3 / STEP_MS)
        threads = [
            threading.Thread(target=lambda: statuses.append(self.complete(tokens)), daemon=True) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: self._running() == count, within=START)
        yield statuses
        for thread in threads:
            thread.join(2 * START)
        assert len(statuses) == count

    def _running(self) -> int:
        return sum(row[StatusBoard.RUNNING] for row in SnapshotReader(self.pid).board().rows)
