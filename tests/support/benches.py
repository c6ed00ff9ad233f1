"""A benchmark as a user starts it, small."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def quick_run(
    name: str, *options: object, within: float = 110, peer: str | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Returns the records and the tables of a quick run, of which no case has failed. peer: an interpreter with vLLM.

    A target may be missed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_PEER_PYTHON"}
    if peer is not None:
        environment["PENSTOCK_PEER_PYTHON"] = peer
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--json", *map(str, options)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within)
    assert run.returncode in (0, 1), run.stderr
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [record for record in records if record["case"] == "failed"], records
    return records, run.stderr
