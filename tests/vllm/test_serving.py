"""vLLM with its queues on channels answers as vLLM does, leaves nothing in /dev/shm, and ends when a worker dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import START, VllmServer, serving

PROMPTS = ["hello", "The quick brown fox", "a" * 60, "import os\nprint(", "0, 1, 2, 3,"]
INSIDE = Path(__file__).parent / "inside"
# What ends the server is vLLM's own monitor; with other work on the machine the same end takes seconds more or less.
SLACK, FACTOR = 3.0, 1.5

pytestmark = pytest.mark.timeout(3 * START)


class Seen(NamedTuple):
    answers: list[str]
    shared_files: set[str]
    log: str
    inspected: str
    ended_after: float  # seconds after a worker was killed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peer.python_of_vllm()
    return peer.write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peer.write_model(peer.python_of_vllm(), tiny_models.LLAMA, tmp_path_factory.mktemp("models"))


def seen(server: VllmServer) -> Seen:
    answers = [server.ask(prompt) for prompt in PROMPTS]
    files, pids = server.shared_files(), server.pids()
    command = [sys.executable, "-m", "penstock", "inspect", str(server.process.pid)]
    inspected = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    os.kill(server.workers()[-1], signal.SIGKILL)
    began = time.monotonic()
    while server.process.poll() is None and time.monotonic() < began + 90:
        time.sleep(0.05)
    assert server.process.poll() is not None, f"the server of {pids} goes on without a worker"
    return Seen(answers, files, server.log.read_text(errors="replace"), inspected, time.monotonic() - began)


@pytest.fixture(scope="module")
def both(site: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Seen, Seen]]:
    """vLLM as it is, and with its queues replaced, one after the other."""
    logs = tmp_path_factory.mktemp("logs")
    with serving(site, model, logs / "vllm.log") as server:
        as_it_is = seen(server)
    with serving(site, model, logs / "penstock.log", PENSTOCK_VLLM="queue", PENSTOCK_VLLM_STRICT="1") as server:
        yield as_it_is, seen(server)


def test_answers_are_the_same_text_for_text(both: tuple[Seen, Seen]) -> None:
    as_it_is, ours = both
    assert ours.answers == as_it_is.answers
    assert len(set(ours.answers)) > 1, "every prompt has the same answer"


def test_the_queues_need_no_file_in_dev_shm(both: tuple[Seen, Seen]) -> None:
    as_it_is, ours = both
    assert as_it_is.shared_files, "vLLM as it is has rings there: the look finds nothing"
    assert not ours.shared_files


def test_the_log_says_once_in_each_process_which_parts_are_replaced(both: tuple[Seen, Seen]) -> None:
    as_it_is, ours = both
    assert "penstock" not in re.sub(r"/\S*", "", as_it_is.log)
    lines = [line for line in ours.log.splitlines() if "penstock replaces of vLLM: queue" in line]
    assert any("EngineCore" in line for line in lines) and any("Worker" in line for line in lines), ours.log[-3000:]
    assert len(lines) == len({re.findall(r"pid=(\d+)", line)[0] if "pid=" in line else "" for line in lines})


def test_inspect_shows_the_queues_of_a_live_vllm(both: tuple[Seen, Seen]) -> None:
    _, ours = both
    assert "vllm EngineCore" in ours.inspected and "VllmWorker-1" in ours.inspected, ours.inspected


def test_a_server_whose_worker_is_killed_ends_no_later_than_vllm_does(both: tuple[Seen, Seen]) -> None:
    as_it_is, ours = both
    print(f"ended after {as_it_is.ended_after:.1f} s as it is, {ours.ended_after:.1f} s with penstock")
    assert ours.ended_after <= FACTOR * as_it_is.ended_after + SLACK


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_llm_answers_the_same_with_workers_that_are(method: str, site: Path, model: Path) -> None:
    answers: list[Any] = []
    for parts in ("0", "queue"):
        variables = {"VLLM_WORKER_MULTIPROCESSING_METHOD": method, "PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1"}
        command = [peer.python_of_vllm(), str(INSIDE / "offline.py"), str(model), json.dumps(PROMPTS)]
        environment = peer.environment(site, **variables)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
        found = re.search(r"^ANSWERS (.*)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout[-3000:] + done.stderr[-6000:]
        assert ("penstock carries a queue of vLLM to 2 local readers" in done.stdout + done.stderr) == (parts != "0")
        answers.append(json.loads(found[1]))
    assert answers[0] == answers[1]
