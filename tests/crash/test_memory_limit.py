"""The kernel kills a worker for want of memory: the pages of its KV cache are given back, and the engine serves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.oom_kills import count_oom_kills
from penstock.tools.inspect import memory_by_kind
from tests.conftest import spawn
from tests.crash.migrating import migrating
from tests.crash.test_kept_kv import answer, discards, ids_of, options_of
from tests.crash.test_migration import MODEL_START
from tests.support.control_groups import memory_group

MIB = 1 << 20
LIMIT, SPARE = 16 << 30, 64 * MIB  # until the engine serves; beyond what the engine has then
USAGE = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}  # in both versions
# The memory of a killed worker comes back only with its end, so the kernel may kill once more for the same page.
HOG = """
from pathlib import Path

from penstock.engine.launcher.oom_kills import count_oom_kills
Path("/proc/self/oom_score_adj").write_text("900")  # the next after the worker
kills, hoard = count_oom_kills(), []
while count_oom_kills() == kills:
    hoard.append(bytearray(b"x") * (1 << 20))
"""


def set_limit(group: Path) -> None:
    for limit, usage in USAGE.items():
        if (group / limit).exists():
            (group / limit).write_text(str(int((group / usage).read_text()) + SPARE))


async def lose_worker(models: Path, group: Path) -> None:
    async with migrating({}, MODEL_START, **options_of(models, num_gpu_blocks_override=4_000)) as engine:
        undisturbed = ids_of(await answer(engine, "undisturbed"))
        worker, kills = engine.child("worker", 0).pid, count_oom_kills()
        assert kills is not None and memory_by_kind([], [os.getpid()])["kv pages"] > 0
        Path(f"/proc/{worker}/oom_score_adj").write_text("1000")  # the kernel chooses this process
        set_limit(group)
        before = engine.serving(0)
        hog = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", HOG], check=False, timeout=60)
        assert hog.returncode in (0, -signal.SIGKILL)
        await engine.until(lambda: engine.serving(0) > before, MODEL_START)
        assert discards(engine) == ["memory"] and engine.number(StatusBoard.KV_ADOPTED) == 0
        assert ids_of(await answer(engine, "again")) == undisturbed
        assert count_oom_kills() == kills + 1 + (hog.returncode != 0)


def run_in(group: str, models: str) -> None:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    asyncio.run(lose_worker(Path(models), Path(group)))


@pytest.mark.timeout(300)
def test_engine_serves_again_after_a_kill_for_want_of_memory(models: Path) -> None:
    with memory_group(LIMIT) as group, spawn(run_in, str(group), str(models), within=200) as engine:
        engine.join()
        assert engine.exitcode == 0
