"""bench device: idle time, and processes with a context. tests/e2e/test_device.py rehearses the cases."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.device_cases import served_streams
from bench.device_cases.idle_share import idle_of
from bench.device_cases.served_streams import contexts_beside_workers
from bench.serve_cases.servers import Failed


def test_idle_time_counts_gaps_after_the_first_tenth() -> None:
    intervals = [(0.0, 2.0), (50.0, 500.0), (400.0, 597.0), (600.0, 800.0), (820.0, 1000.0)]
    free, long, window = idle_of(intervals)
    assert window == 900
    assert free == pytest.approx(23 / 900)
    assert long == pytest.approx(20 / 900)


def test_contexts_are_those_of_nvidia_smi_or_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, core = os.getpid(), os.getppid()
    processes = [("worker", SimpleNamespace(pid=worker)), ("core", SimpleNamespace(pid=core))]
    server: Any = SimpleNamespace(processes=lambda: processes)
    device: Any = SimpleNamespace(targets=[], record=lambda case, **figures: None)
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    opened: set[int] = set()
    monkeypatch.setattr(served_streams, "has_device_open", opened.__contains__)
    for pids, others in ((f"{worker}", 0), (f"{worker} {core} 1", 1), (f"{core}", None)):
        tool.write_text(f"#!/bin/sh\nprintf '%s\\n' {pids}\n")
        tool.chmod(0o755)
        if others is None:
            with pytest.raises(Failed, match="open files do not show"):
                contexts_beside_workers(device, server)
            opened |= {worker, core}
            others = 1
        contexts_beside_workers(device, server)
        assert device.targets.pop().figure == others
