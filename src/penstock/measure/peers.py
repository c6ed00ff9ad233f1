"""Programs in other processes, perhaps in another interpreter, that answer line by line; each answer has a deadline.

PENSTOCK_PEER_PYTHON names an interpreter that has what this one lacks (torch, vllm).
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.measure.rounds import Unavailable

VARIABLE = "PENSTOCK_PEER_PYTHON"


def python_with(module: str) -> str:
    """An interpreter that has this module: this one, or the peer. Raises Unavailable if there is none."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    named = os.environ.get(VARIABLE)
    if not named:
        raise Unavailable(f"{module} is not installed, and {VARIABLE} names no interpreter that has it")
    path = shutil.which(named)
    if path is None:
        raise Unavailable(f"{VARIABLE} names {named}, which is not an executable")
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([path, "-c", probe], check=False, capture_output=True).returncode != 0:
        raise Unavailable(f"{module} is not installed in {path} ({VARIABLE})")
    return path


class Peer:
    """One such program."""

    def __init__(self, command: Sequence[str], name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._said = b""

    def say(self, order: dict[str, Any]) -> None:
        """Raises Unavailable when it is gone."""
        assert self._process.stdin is not None
        try:
            left = json.dumps(order).encode() + b"\n"
            while left:
                left = left[self._process.stdin.write(left) or 0 :]
        except BrokenPipeError:
            raise Unavailable(f"{self.name} is gone: {self._last_words()}") from None

    def hear(self, within: float) -> dict[str, Any]:
        """The next line of JSON that it says; other lines are passed over. Raises Unavailable when there is none."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        while True:
            line, newline, rest = self._said.partition(b"\n")
            if newline:
                self._said = rest
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                continue
            if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise Unavailable(f"{self.name} said nothing for {within:g} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise Unavailable(f"{self.name} ended: {self._last_words()}")
            self._said += read

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
