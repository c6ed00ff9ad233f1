"""`vllm serve` in one of the three ways: its command, its processes, and the shared memory that they reserve."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.figures import Figures
from bench.harness.guard import GRACE, descendants, shared_files
from bench.serve_cases.servers import NAME, Theirs, free_port
from bench.vllm_cases.ways import Way

GUARD = Path(__file__).resolve().parent.parent / "harness" / "guard.py"
LONGEST = 2048  # tokens of a prompt and its answer
KV_CACHE_NBYTES = 256 << 20  # of each worker, which claims all of it
AVAILABLE_NBYTES = 3 << 30  # of memory, for each server


class VllmServer(Theirs):
    """Below a guard, which ends its processes, and which is not stopped with them while others are measured."""

    def __init__(
        self, way: Way, model: Path, log: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = way.name
        port = free_port()
        command = [sys.executable, str(GUARD), way.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--tensor-parallel-size", "2", "--max-model-len", str(LONGEST), "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_NBYTES)]
        command += ["--disable-uvicorn-access-log", "--distributed-executor-backend", "mp", *options]
        super().__init__(command, {**way.environment, **environment}, port, log)

    def reserved(self) -> Figures:
        """Returns the bytes of all shared files that its processes have open: their sizes, and the pages they claim.

        Not those of vLLM's all-reduce on a CPU, which are neither a queue nor a cache.
        """
        files = {}
        for _, path in shared_files(descendants(self._process.pid)):
            with contextlib.suppress(OSError):
                file, target = os.stat(path), os.readlink(path)
                if "vllm_" not in target:
                    files[file.st_dev, file.st_ino] = file.st_size, file.st_blocks * 512
        return {
            "files": len(files),
            "named_nbytes": sum(size for size, _ in files.values()),
            "claimed_nbytes": sum(claimed for _, claimed in files.values()),
        }

    def _signal(self, number: int) -> None:
        for pid in descendants(self._process.pid):  # not the guard, which ends them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Ends it and all that it has started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * GRACE)
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        """Returns the last error of its log, or its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "Traceback" not in line]
        return " / ".join(errors[:1] + lines[-2:])
