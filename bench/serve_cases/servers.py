"""A server under measurement: its command, its processes by what they do, and what they have used.

Leaves to `cases` what it is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.harness.role import die_with_parent
from bench.impls import Unavailable
from bench.impls.peer import python_with
from bench.serve_cases.gguf_file import write_gguf
from penstock.tools.inspect.processes import Process, all_processes, with_descendants

OURS, THEIRS, THEIRS_UNRESERVED = "penstock", "vllm", "vllm-unreserved"
UNRESERVED = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
PEERS = (THEIRS, THEIRS_UNRESERVED)  # vLLM at its default, which reserves one processor, and computing with all of them
LLAMA = "llama.cpp"
LLAMA_SERVER = "PENSTOCK_LLAMA_SERVER"  # environment: the path of a `llama-server`
NAME = "model"  # by which clients ask for it
START = 400.0  # seconds until it answers; a compiler may be at work, and others beside it
END = 20.0  # seconds until it has ended, after it was told to
LOOK = 0.02  # seconds between two looks whether it answers
STEP_MS = 20.0  # of the simulated device


class Failed(Exception):
    """A server did not do what it was to do; the text ends with the last lines of its log."""


class Server:
    """A process, and its descendants. `role` says what one of them does, by what its log says of it."""

    name = ""
    roles_in_log = re.compile("(?!)()()")  # of the log: a role, and the number of a process; here of none
    front: tuple[str, ...] = ()  # roles of all that is not computing

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        self.port = port
        self.log = log
        self.began = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,  # so that all of it can be stopped, and ended
                preexec_fn=die_with_parent,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ── life ──
    def wait_for_an_answer(self) -> float:
        """Returns the seconds from the start of its command until it had answered a prompt. Raises Failed."""
        return self._wait("POST", "/v1/completions", {"model": NAME, "prompt": "hello", "max_tokens": 1})

    def wait_until_ready(self) -> float:
        """Returns the seconds until it would take requests, before the first. Raises Failed."""
        return self._wait("GET", "/health")

    def _wait(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> float:
        while time.monotonic() < self.began + START:
            if self._process.poll() is not None:
                raise Failed(f"{self.name} has ended, with {self._process.returncode}: {self._last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request(method, path, body)[0] == 200:
                    return time.monotonic() - self.began
            time.sleep(LOOK)
        raise Failed(f"{self.name} does not answer {path} within {START:g} s: {self._last_words()}")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def stop(self) -> None:
        """Ends the server and all processes that it has started."""
        self.go_on()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def rest(self) -> None:
        """While others are measured."""

    def go_on(self) -> None:
        """It is to be measured."""

    def _last_words(self) -> str:
        return " / ".join(self.log.read_text(errors="replace").splitlines()[-3:])

    # ── processes ──
    def processes(self) -> list[tuple[str, Process]]:
        """Those that live, each with its role."""
        everybody = all_processes()
        text = self.log.read_text(errors="replace")
        named = {int(pid): role.lower() for role, pid in self.roles_in_log.findall(text)}
        named[self._process.pid] = named.get(self._process.pid, "launcher")
        living = with_descendants(self._process.pid, everybody)
        return [(named.get(pid, "other"), everybody[pid]) for pid in living if pid in everybody]

    def cpu_seconds(self) -> dict[str, float]:
        """By role."""
        used: dict[str, float] = {}
        for role, process in self.processes():
            used[role] = used.get(role, 0.0) + process.cpu_seconds
        return used

    def pid_of(self, role: str) -> int:
        """Returns the process of a role that one process has. Raises Failed."""
        for own, process in self.processes():
            if own == role:
                return process.pid
        raise Failed(f"{self.name} has no {role}: {self._last_words()}")

    def resident_nbytes(self, role: str) -> int:
        return sum(process.rss_nbytes for own, process in self.processes() if own == role)


class Peak:
    """The highest value of a function, which a thread calls every `seconds`."""

    def __init__(self, measure: Callable[[], float], seconds: float) -> None:
        self._measure, self._seconds, self._highest = measure, seconds, 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def take(self) -> float:
        """Returns the highest value since the last call."""
        highest, self._highest = self._highest, 0.0
        return highest

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._seconds):
            self._highest = max(self._highest, self._measure())


class Ours(Server):
    name = OURS
    roles_in_log = re.compile(r'event="process started" child="(\w+) [^"]*" child_pid=(\d+)')
    front = ("server", "core", "output")

    @classmethod
    def of_model(
        cls, model: Path, log: Path, *, longest: int, dtype: str = "float32", options: Sequence[str] = ()
    ) -> Ours:
        return cls.of([str(model), "--max-model-len", str(longest), "--dtype", dtype, *options], log)

    @classmethod
    def simulated(cls, streams: int, log: Path, *, step_ms: float = STEP_MS, options: Sequence[str] = ()) -> Ours:
        sizes = ("--max-num-seqs", str(max(streams, 64)), "--max-num-batched-tokens", "4096")
        sizes += ("--max-open-requests", str(streams + 64))
        return cls.of(["--device-model", "simulated", "--step-ms", str(step_ms), *sizes, *options], log)

    @classmethod
    def of(cls, options: Sequence[str], log: Path) -> Ours:
        port = free_port()
        command = [sys.executable, "-m", "penstock", "serve", "--port", str(port), f"--served-model-name={NAME}"]
        return cls([*command, *options], {}, port, log)

    def open_requests(self) -> tuple[int, int, int]:
        """Of the servers and of the groups, and the blocks that are free."""
        parsed = json.loads(self.request("GET", "/health")[1])
        groups, servers = parsed["groups"], parsed["servers"]
        return (
            sum(server["open"] for server in servers),
            sum(item["open"] for item in groups),
            sum(item["free_blocks"] for item in groups),
        )

    def wait_until_whole(self) -> None:
        """Until all groups serve, and no request is open. Raises Failed."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            groups = json.loads(self.request("GET", "/health")[1])["groups"]
            if all(group["serves"] and not group["open"] for group in groups):
                return
            time.sleep(LOOK)
        raise Failed(f"{self.name}: not all groups serve: {self._last_words()}")

    def kill_worker(self) -> tuple[float, Callable[[], float | None]]:
        """Kills the worker of group 0. Returns when, and a function that returns after how many seconds the next core
        of the group has served; None: not yet."""
        started = re.findall(r'child="worker 0\.0 #(\d+)" child_pid=(\d+)', self.log.read_text(errors="replace"))
        incarnation, pid = map(int, started[-1])
        serves = re.compile(rf'time=(\S+)Z [^\n]*process="core 0\.0 #{incarnation + 1}" [^\n]*event="core serves"')
        killed, since_epoch = time.monotonic(), time.time()
        os.kill(pid, signal.SIGKILL)

        def restarted_in() -> float | None:
            match = serves.search(self.log.read_text(errors="replace"))
            return None if match is None else datetime.fromisoformat(f"{match[1]}+00:00").timestamp() - since_epoch

        return killed, restarted_in


class BusyServer(Server):
    """Idle processes of this server poll for work all the time: they are stopped while others are measured."""

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Theirs(BusyServer):
    """vLLM's server, from the peer interpreter."""

    name = THEIRS
    roles_in_log = re.compile(r"\((APIServer|EngineCore|Worker)\w* pid=(\d+)\)")
    front = ("apiserver", "enginecore")

    @classmethod
    def of_model(
        cls,
        model: Path,
        log: Path,
        *,
        longest: int,
        is_compiled: bool,
        dtype: str = "float32",
        more: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Theirs:
        """Starts vLLM with its worker in a process of its own, so that the worker's time is not counted with the core.
        Raises Unavailable."""
        port = free_port()
        command = [python_with("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
        command += ["--max-model-len", str(longest), "--disable-uvicorn-access-log"]
        command += ["--distributed-executor-backend", "mp", *more]
        if not is_compiled:
            command.append("--enforce-eager")
        usual = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "3"}
        return cls(command, {**usual, **(environment or {})}, port, log)


class Llama(BusyServer):
    """llama.cpp's server, one process, with all processors, flash attention and a batch of prompts as large as ours."""

    name = LLAMA
    slots = 8  # requests at a time; each has its share of the context

    @classmethod
    def of_model(cls, model: Path, log: Path, *, longest: int) -> Llama:
        """Raises Unavailable."""
        program = os.environ.get(LLAMA_SERVER)
        if not program:
            raise Unavailable(f"set {LLAMA_SERVER} to the path of a llama-server")
        file = log.with_suffix(".gguf")
        write_gguf(model, file)
        port = free_port()
        command = [program, "--model", str(file), "--alias", NAME, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--parallel", str(cls.slots), "--ctx-size", str(cls.slots * longest), "--flash-attn", "on"]
        command += ["--threads", str(os.cpu_count()), "--batch-size", "2048", "--ubatch-size", "512", "--jinja"]
        command += ["--cache-ram", "0", "--no-webui"]
        return cls(command, {}, port, log)

    def cpu_seconds(self) -> dict[str, float]:
        return {"worker": sum(super().cpu_seconds().values())}


def post_of(path: str, body: Mapping[str, Any]) -> bytes:
    """Returns a request for a raw connection."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data


def free_port() -> int:
    with socket.socket() as item:
        item.bind(("127.0.0.1", 0))
        port: int = item.getsockname()[1]
        return port
