"""The floor under every transport: two C programs, compiled when they are needed, that pass one word to and fro."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.impls import Unavailable

SOURCES = Path(__file__).resolve().parent.parent / "floor"


def compile_floor(scratch: Path) -> dict[str, list[str]]:
    """The commands to run, by name. Raises Unavailable without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("no C compiler (cc, gcc, clang) was found")
    for name in ("cacheline", "futex"):
        command = [compiler, "-std=c11", "-O2", "-o", str(scratch / name), str(SOURCES / f"{name}.c")]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        if built.returncode != 0:
            raise Unavailable(f"{name}.c does not compile: {built.stderr.strip()}")
    commands = {"futex": [str(scratch / "futex"), "10000"]}
    if len(os.sched_getaffinity(0)) > 1:  # two spinning processes on one CPU measure the scheduler
        commands["cache line"] = [str(scratch / "cacheline"), "200000"]
        commands["futex, pinned apart"] = [str(scratch / "futex"), "5000", "pin"]
    return commands


def run_floor(command: list[str]) -> dict[str, float]:
    """One run: the round trip's figures."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return {key: int(value) / 1e3 for key, value in zip(("p50_us", "p99_us", "p999_us"), printed, strict=True)}
