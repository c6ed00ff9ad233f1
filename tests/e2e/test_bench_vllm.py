"""`scripts/bench vllm`, small: all three ways are measured, and nothing that was started outlives it.

The guard that ends them is tried with a tree of small programs; PENSTOCK_PEER_PYTHON names the interpreter of vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.impls import Unavailable
from bench.impls.peer import python_with
from tests import tiers
from tests.conftest import eventually
from tests.support.benches import quick_run

ROOT = Path(__file__).parent.parent.parent
GUARD = ROOT / "bench" / "harness" / "guard.py"
# A process with a child in a session of its own, which ignores SIGTERM, and a file in shared memory.
TREE = """
import os, pathlib, signal, sys, time
folder, name = sys.argv[1:]
shared = open("/dev/shm/" + name, "w")
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(folder, "child").write_text(str(os.getpid()))
    time.sleep(100)
pathlib.Path(folder, "parent").write_text(str(os.getpid()))
time.sleep(100)
"""


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def pids_in(folder: Path) -> list[int]:
    def written() -> bool:
        return all((folder / name).exists() and (folder / name).read_text() for name in ("parent", "child"))

    eventually(written, 20)
    return [int((folder / name).read_text()) for name in ("parent", "child")]


@tiers.needs_all  # it waits for five seconds for the process that is stopped
def test_a_guard_ends_the_whole_tree_when_it_is_told_to(tmp_path: Path) -> None:
    name = f"penstock-test-guard-{os.getpid()}"
    guard = subprocess.Popen([sys.executable, GUARD, sys.executable, "-c", TREE, tmp_path, name])
    pids = pids_in(tmp_path)
    os.kill(pids[0], signal.SIGSTOP)  # as a server that rests
    guard.terminate()
    assert guard.wait(30) == 128 + signal.SIGTERM
    assert all(map(is_gone, pids))
    assert not Path("/dev/shm", name).exists()


def test_a_guard_ends_the_whole_tree_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    name = f"penstock-test-guard-{os.getpid()}"
    command = [sys.executable, str(GUARD), sys.executable, "-c", TREE, str(tmp_path), name]
    program = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as bench:
        pids = pids_in(tmp_path)
        bench.kill()
    eventually(lambda: all(map(is_gone, pids)), 30)
    eventually(lambda: not Path("/dev/shm", name).exists(), 10)


def test_a_guard_has_the_status_of_its_command() -> None:
    for program, status in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert subprocess.run([sys.executable, GUARD, sys.executable, "-c", program], timeout=30).returncode == status


@tiers.needs_all
def test_a_server_that_cannot_start_leaves_the_other_cases_to_be_measured(tmp_path: Path) -> None:
    peer = tmp_path / "python"
    peer.write_text(textwrap.dedent("""\
        #!/bin/sh
        [ "$1" = -c ] && exit  # whether it has vLLM
        echo "ImportError: no vLLM after all" >&2
        exit 3
    """))  # fmt: skip
    peer.chmod(0o755)
    run = subprocess.run(
        [sys.executable, "-m", "bench.vllm", "--quick", "--json", "--only", "start,queue", "--impl", "vllm"],
        cwd=ROOT, env={**os.environ, "PENSTOCK_PEER_PYTHON": str(peer)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr  # nothing was measured, and so no target missed
    records = [json.loads(line) for line in run.stdout.splitlines()]
    reasons = [record["reason"] for record in records if record["case"] in ("skipped", "failed")]
    assert len(reasons) == 2 and all("no vLLM after all" in reason for reason in reasons)
    assert {record["impl"] for record in records if record["case"] == "duration"} == {"start", "queue, large, steps"}


@pytest.mark.timeout(300)
def test_a_quick_run_measures_the_queue_of_all_three_ways() -> None:
    try:
        peer = python_with("vllm")
    except Unavailable as reason:
        pytest.skip(str(reason))
    records, _ = quick_run("vllm", "--only", "queue,large,steps", within=280, peer=peer)
    assert not [record for record in records if record["case"] == "skipped"], records

    def ways_of(case: str) -> set[str]:
        return {record["impl"] for record in records if record["case"] == case}

    assert ways_of("steps") == ways_of("paced") == {"vllm", "vllm-parking", "penstock"}
    assert ways_of("codec") == {"pickle", "change"}
    assert ways_of("tensor") == {"vllm", "vllm-views", "penstock", "penstock-views"}
    assert ways_of("image") == {"vllm", "vllm-cache", "penstock", "penstock-device"}
    assert all(record["met"] is not None for record in records if record["case"] == "target")
