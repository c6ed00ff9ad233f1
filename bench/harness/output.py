"""What comes out: records as JSON lines, tables for people, and what the numbers were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from penstock.tools.format import short, tidy

__all__ = ["Output", "machine", "short", "short_nbytes"]

ROOT = Path(__file__).resolve().parent.parent.parent


def short_nbytes(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


class Output:
    """Records as JSON lines on stdout (and in a file), tables for people; with JSON on stdout, tables on stderr."""

    def __init__(self, bench: str, *, is_json: bool, folder: Path | None) -> None:
        self._bench = bench
        self._is_json = is_json
        self._people: TextIO = sys.stderr if is_json else sys.stdout
        self._file: TextIO | None = None
        self.records: list[dict[str, Any]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{bench}.jsonl").open("w")

    def record(self, case: str, impl: str, **figures: Any) -> None:
        record = {
            "bench": self._bench,
            "case": case,
            "impl": impl,
            **{key: tidy(each) for key, each in figures.items()},
        }
        self.records.append(record)
        line = json.dumps(record)
        if self._is_json:
            print(line, flush=True)
        if self._file is not None:
            print(line, file=self._file, flush=True)

    def begin(self, **more: Any) -> None:
        """With what all of it was measured on."""
        about = {**machine(), **more}
        self.record("machine", "-", **about)
        self.say(", ".join(f"{key} {value}" for key, value in about.items()))

    def say(self, text: str = "") -> None:
        print(text, file=self._people, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
        heads = ["", *columns]
        lines = [[name, *cells] for name, cells in rows]
        widths = [max(len(line[index]) for line in [heads, *lines]) for index in range(len(heads))]
        self.say(f"\n{title}")
        for line in [heads, *lines]:
            cells = [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
            self.say("  " + "   ".join(cells).rstrip())


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return answer.stdout.strip() or "unknown"
