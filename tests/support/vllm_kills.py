"""Campaigns of kills in the interpreter that has vLLM, on a worker without a model: scripts/vllm-kills.

python -m tests.support.vllm_kills executor|server [--kills N] [--workers N] [--forks N] [--seconds S] [--seed N]
        [--scene TEXT]
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import peer, tiny_models
from tests.vllm.inside.campaign import exit_at_signals

INSIDE = peer.ROOT / "tests" / "vllm" / "inside"
# Pids of a server's processes are read from its log; an executor's log would be tracebacks of survivors.
LEVELS = {"executor": "CRITICAL", "server": "INFO"}
END = 60.0  # seconds from SIGTERM until a campaign has ended


def command_of(name: str, options: Sequence[str], folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Returns the command of a campaign, and its environment."""
    python = peer.python_of_vllm()
    model = peer.write_model(python, tiny_models.LLAMA, folder / "models")
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1", "VLLM_LOGGING_LEVEL": LEVELS[name]}
    environment = peer.environment(peer.write_site(folder / "site"), **variables)
    return [python, str(INSIDE / f"{name}_deaths.py"), str(model), *options], environment


@contextlib.contextmanager
def campaign_of(name: str, options: Sequence[str], folder: Path, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a campaign. With the block it is ended, with the servers of its kills."""
    command, environment = command_of(name, options, folder)
    process = subprocess.Popen(command, env=environment, **streams)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END)
        except subprocess.TimeoutExpired:
            process.kill()


def run_campaign(name: str, options: Sequence[str], folder: Path, limit: float) -> Mapping[str, Any]:
    """Runs a campaign, and prints its figures. Returns the numbers of its report."""
    with campaign_of(name, options, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, log = (text.decode() for text in process.communicate(timeout=limit))
    match = re.search(r"^KILLS (.*)$", output, re.MULTILINE)
    assert match is not None, output[-3000:] + log[-6000:]
    print(output[: match.start()])
    report: Mapping[str, Any] = json.loads(match[1])
    return report


def main() -> int:
    exit_at_signals()
    with tempfile.TemporaryDirectory() as scratch, campaign_of(sys.argv[1], sys.argv[2:], Path(scratch)) as process:
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
