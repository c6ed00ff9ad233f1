"""Campaigns of kills in the interpreter that has vLLM, on a worker without a model: scripts/vllm-kills.

python -m tests.support.vllm_kills executor|server [--kills N] [--workers N] [--forks N] [--seconds S] [--seed N]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import peer, tiny_models

INSIDE = peer.ROOT / "tests" / "vllm" / "inside"
# Pids of a server's processes are read from its log; an executor's log would be tracebacks of survivors.
LEVELS = {"executor": "CRITICAL", "server": "INFO"}


def command_of(name: str, options: Sequence[str], folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Returns the command of a campaign, and its environment."""
    python = peer.python_of_vllm()
    model = peer.write_model(python, tiny_models.LLAMA, folder / "models")
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1", "VLLM_LOGGING_LEVEL": LEVELS[name]}
    environment = peer.environment(peer.write_site(folder / "site"), **variables)
    return [python, str(INSIDE / f"{name}_deaths.py"), str(model), *options], environment


def run_campaign(name: str, options: Sequence[str], folder: Path, limit: float) -> Mapping[str, Any]:
    """Runs a campaign, and prints its figures. Returns the numbers of its report."""
    command, environment = command_of(name, options, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    match = re.search(r"^KILLS (.*)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout[: match.start()])
    report: Mapping[str, Any] = json.loads(match[1])
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        command, environment = command_of(sys.argv[1], sys.argv[2:], Path(scratch))
        sys.exit(subprocess.run(command, env=environment).returncode)
