"""Programs in other processes, perhaps of another interpreter, that answer line by line; each answer has a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.impls import Unavailable


class PeerProcess:
    """One such program."""

    def __init__(self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables besides those of this process."""
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self._unread = b""

    def send(self, order: dict[str, Any]) -> None:
        """Raises Unavailable when it is gone."""
        assert self._process.stdin is not None
        try:
            left = json.dumps(order).encode() + b"\n"
            while left:
                left = left[self._process.stdin.write(left) or 0 :]
        except BrokenPipeError:
            raise Unavailable(f"{self.name} is gone: {self._last_words()}") from None

    def receive(self, within: float) -> dict[str, Any]:
        """The next line of JSON that it says; other lines are passed over. Raises Unavailable when there is none."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                continue
            if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise Unavailable(f"{self.name} said nothing for {within:g} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise Unavailable(f"{self.name} ended: {self._last_words()}")
            self._unread += read

    def _last_words(self) -> str:
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
