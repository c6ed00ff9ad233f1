"""A `vllm serve` of a tiny model, with and without parts of ours: started, asked, ended with all its processes."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import peer

START_LIMIT = 400.0  # seconds: of a busy machine
ANSWER_LIMIT = 120.0
OPTIONS = ("--host", "127.0.0.1", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "8")


class VllmServer:
    """One running server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, model: Path, log: Path) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.log = log

    def answer(self, content: list[dict[str, Any]], max_tokens: int = 12) -> str:
        """Returns the greedy answer to one message of a user."""
        body = {
            "model": str(self.model),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read()[:500]!r}") from None

    def answers(self, contents: list[list[dict[str, Any]]], at_a_time: int) -> list[str]:
        with ThreadPoolExecutor(at_a_time) as threads:
            return list(threads.map(self.answer, contents))

    def processes(self) -> list[int]:
        """The server's processes: its own session, which vLLM's children stay in."""
        session = self.process.pid
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if _session(pid) == session]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@contextlib.contextmanager
def serving(python: str, site: Path, model: Path, log: Path, *options: str, **variables: str) -> Iterator[VllmServer]:
    """Starts `vllm serve`, waits until it is healthy, and ends all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *OPTIONS, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=peer.environment(site, **variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,
        )
    server = VllmServer(process, f"http://127.0.0.1:{port}", model, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in server.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: VllmServer) -> None:
    deadline = time.monotonic() + START_LIMIT
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return
        ended = server.process.poll()
        if ended is not None or time.monotonic() > deadline:
            how = "it takes too long" if ended is None else f"it ended with {ended}"
            raise AssertionError(f"no server: {how}\n" + server.log.read_text(errors="replace")[-4000:])
        time.sleep(0.5)


def image(seed: int, side: int = 224) -> dict[str, Any]:
    """Noise, as a part of a message."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}
