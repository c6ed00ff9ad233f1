"""scripts/path, and the table of a request's path in the README, which names a part of what it prints."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests import tiers
from tests.support.documents import ROOT

pytest.importorskip("httptools")


def section_of_the_readme() -> str:
    return (ROOT / "README.md").read_text().partition("## The path of a request")[2].partition("\n## ")[0]


def table_of_the_readme() -> list[tuple[str, str]]:
    """Process and file of each row. A row without a process is one of the row above."""
    rows, process = [], ""
    for row in re.findall(r"^\|(.*)\|$", section_of_the_readme(), re.MULTILINE)[2:]:
        where, files, _ = row.split("|")
        process = where.strip() or process
        rows += [(process, file) for file in re.findall(r"`(\S+\.py)`", files)]
    return rows


@tiers.needs_all
@pytest.mark.timeout(400)
def test_files_of_a_requests_path_in_the_readme_run_for_one_streamed_chat() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "path")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = done.stdout.splitlines()
    printed = {(process, file) for process, _, file, _ in map(str.split, rows[1:])}  # "core 0.0 engine/…/x.py 16"
    assert all((ROOT / "src" / "penstock" / file).is_file() for _, file in printed)
    counts = Counter(process for process, _ in printed)
    numbers = ", ".join(f"{process} 0.0 {counts[process]}" for process in ("server", "core", "worker", "output"))
    assert last == f"Python files of src/penstock: {numbers}"
    limits = {process: int(limit) for limit, process in re.findall(r"(\d+) in the (\w+)", section_of_the_readme())}
    assert limits.keys() == counts.keys()
    # Files of heartbeats and metrics run now and then, a few in each process.
    assert all(limits[process] - 3 <= counts[process] <= limits[process] for process in counts), done.stdout
    table = table_of_the_readme()
    assert len(table) > 15, "looked at nothing"
    assert not set(table) - printed, "in README's table, and did not run"
