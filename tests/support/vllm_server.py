"""`vllm serve` of a tiny model in the interpreter that has vLLM, for tests: its answers, its processes, its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import peer

NO_NODE = "allowed_memory_nodes[0]"  # a line of vLLM's traceback, with the plugin or without
START = 400.0  # seconds until it answers, on a machine that has other work
END = 60.0
NAME = "tiny"


class OpenStream(threading.Thread):
    """A client with an answer of many tokens open: each line with the time when the client had the line."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.lines: list[tuple[float, str]] = []
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        body = {"model": NAME, "prompt": "hello", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            while line := response.readline():
                self.lines.append((time.monotonic(), line.decode().strip()))
        self.ended_at = time.monotonic()

    def has_error(self) -> bool:
        return any('"error"' in line for _, line in self.lines)

    def error(self) -> tuple[float, str]:
        """Waits for the end. Returns when the error event came, and its message."""
        self.join(START)
        events = [(at, line.removeprefix("data: ")) for at, line in self.lines if '"error"' in line]
        assert events, f"the stream ended without an error: {self.lines[-2:]}"
        return events[0][0], json.loads(events[0][1])["error"]["message"]


class VllmServer:
    """A server that has answered."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def ask(self, prompt: Any, max_tokens: int = 24) -> str:
        """The text of a greedy answer."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        assert response.status == 200, text
        answer: str = json.loads(text)["choices"][0]["text"]
        return answer

    def streams(self, count: int) -> list[OpenStream]:
        """Opens streams, each of which has received some tokens."""
        streams = [OpenStream(self.port) for _ in range(count)]
        deadline = time.monotonic() + START
        while not all(len(stream.lines) > 20 for stream in streams):
            assert time.monotonic() < deadline, [stream.lines[-2:] for stream in streams]
            time.sleep(0.005)
        return streams

    def unhealthy_at(self, limit: float = 60.0) -> float:
        """Returns when /health first answered anything but 200."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
            with contextlib.closing(connection):
                try:
                    connection.request("GET", "/health")
                    status = connection.getresponse().status
                except (OSError, http.client.HTTPException):
                    status = 0
            if status != 200:
                return time.monotonic()
            time.sleep(0.01)
        raise AssertionError(f"/health answers 200 for {limit:.0f} s")

    def core(self) -> int:
        return self._pids_of("EngineCore")[0]

    def pids(self) -> list[int]:
        """All its processes: it began a session of its own."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    pids.append(int(path.parent.name))
        return pids

    def workers(self) -> list[int]:
        return self._pids_of("Worker")

    def api_servers(self) -> list[int]:
        """Those that it has started, where it is to have several."""
        return self._pids_of("ApiServer")

    def _pids_of(self, kind: str) -> list[int]:
        lines = self.log.read_text(errors="replace")
        return sorted({int(pid) for pid in re.findall(rf"\({kind}\S* pid=(\d+)\)", lines)})

    def seconds_until_end(self, limit: float = 90.0) -> float:
        """Waits until its first process has ended by itself. Fails after the limit."""
        began = time.monotonic()
        while self.process.poll() is None:
            assert time.monotonic() < began + limit, f"it goes on for {limit:.0f} s: {self.pids()}"
            time.sleep(0.05)
        return time.monotonic() - began

    def shared_files(self) -> set[str]:
        """Names below /dev/shm of queues, rings and arenas that its processes have mapped."""
        return {file for pid in self.pids() for file in self.files_of(pid) if file.startswith("/dev/shm/psm_")}

    @staticmethod
    def files_of(pid: int) -> set[str]:
        """The files below /dev/shm that a process has mapped."""
        with contextlib.suppress(OSError):
            return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        return set()


@contextlib.contextmanager
def serving(site: Path, model: Path, log: Path, *options: str, **variables: str) -> Iterator[VllmServer]:
    """A server with two workers, that has answered once; with the block it is ended, with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command: Sequence[str] = [
        *(peer.python_of_vllm(), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
        *("--enforce-eager", "--tensor-parallel-size", "2", "--seed", "0", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=peer.environment(site, **variables), start_new_session=True
        )
    server = VllmServer(process, port, log)
    try:
        deadline = time.monotonic() + START
        while True:
            if process.poll() is not None and NO_NODE in log.read_text(errors="replace"):
                pytest.skip("vLLM 0.33 gives each data parallel rank of a CPU a NUMA node of its own")
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
            try:
                server.ask("hello", 1)
                break
            except OSError:
                time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END)
        for pid in server.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
