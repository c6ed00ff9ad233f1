"""vLLM with its queues on channels, and with steps as changes in them: it answers as vLLM does, leaves nothing in
/dev/shm, can be inspected and traced, and ends when a worker dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import START, VllmServer, serving

PROMPTS = ["hello", "The quick brown fox", "a" * 60, "import os\nprint(", "0, 1, 2, 3,"]
INSIDE = Path(__file__).parent / "inside"
PROMISED = 0.5  # seconds from a kill until a client has its error, and /health says so

pytestmark = pytest.mark.timeout(4 * START)


WAYS = {"vllm": "0", "queue": "queue", "steps": "queue,steps"}
TRACES_S = (2, 8, 32)  # seconds of a trace, until one has enough steps and lacks no event
MIN_STEPS = 20
CORE, WORKERS = "EngineCore", {"VllmWorker-0", "VllmWorker-1"}


class Seen(NamedTuple):
    answers: list[str]
    shared_files: set[str]
    log: str
    inspected: str
    summary: dict[str, Any]  # of a trace under load, and the trace
    events: list[dict[str, Any]]
    killed: int  # pid of the worker
    errors: list[tuple[float, str]]  # of the clients with open streams: seconds after the kill, and the message
    unhealthy_after: float


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peer.python_of_vllm()
    return peer.write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peer.write_model(peer.python_of_vllm(), tiny_models.LLAMA, tmp_path_factory.mktemp("models"))


def penstock(*arguments: str) -> str:
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def load(server: VllmServer) -> Iterator[None]:
    """Two clients, each of which sends its next request when it has the answer."""
    is_over = threading.Event()

    def send(prompts: list[str]) -> None:
        for prompt in itertools.cycle(prompts):
            server.ask(prompt)
            if is_over.is_set():
                return

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(send, PROMPTS), threads.submit(send, PROMPTS[::-1])]
        try:
            yield
        finally:
            is_over.set()
        for client in clients:
            client.result()


def trace_steps(server: VllmServer, trace: Path) -> dict[str, Any]:
    """Writes a trace under load. On a busy machine steps take longer, and the tracer may read events too late."""
    for seconds in TRACES_S:
        options = ("--seconds", str(seconds), "-o", str(trace), "--json")
        summary: dict[str, Any] = json.loads(penstock("trace", str(server.process.pid), *options))
        if not summary["lacking"] and any(series["steps"] > MIN_STEPS for series in summary["steps"]):
            break
    return summary


def observe(server: VllmServer, trace: Path, *, is_ours: bool) -> Seen:
    answers = [server.ask(prompt) for prompt in PROMPTS]
    files = server.shared_files()
    inspected, summary, events = "", {}, []
    if is_ours:
        inspected = penstock("inspect", str(server.process.pid))
        with load(server):
            summary = trace_steps(server, trace)
        events = json.loads(trace.read_text())["traceEvents"]
    streams, victim = server.streams(4), server.workers()[-1]
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    unhealthy_after = server.unhealthy_at() - killed_at
    errors = [(at - killed_at, message) for at, message in (stream.error() for stream in streams)]
    server.seconds_until_end()
    log = server.log.read_text(errors="replace")
    return Seen(answers, files, log, inspected, summary, events, victim, errors, unhealthy_after)


@pytest.fixture(scope="module")
def ways(site: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """vLLM as it is, with its queues replaced, and with steps as changes, one after the other."""
    folder, observed = tmp_path_factory.mktemp("logs"), {}
    for way, parts in WAYS.items():
        variables = {"PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1"}
        with serving(site, model, folder / f"{way}.log", **variables) as server:
            observed[way] = observe(server, folder / f"{way}.json", is_ours=way != "vllm")
    return observed


OURS = [way for way in WAYS if way != "vllm"]


@pytest.mark.parametrize("way", OURS)
def test_answers_are_the_same_text_for_text(way: str, ways: dict[str, Seen]) -> None:
    assert ways[way].answers == ways["vllm"].answers
    assert len(set(ways[way].answers)) > 1, "every prompt has the same answer"


@pytest.mark.parametrize("way", OURS)
def test_the_queues_need_no_file_in_dev_shm(way: str, ways: dict[str, Seen]) -> None:
    assert ways["vllm"].shared_files, "vLLM as it is has rings there: the look finds nothing"
    assert not ways[way].shared_files


@pytest.mark.parametrize("way", OURS)
def test_the_log_says_once_in_each_process_which_parts_are_replaced(way: str, ways: dict[str, Seen]) -> None:
    assert "penstock" not in re.sub(r"/\S*", "", ways["vllm"].log)
    parts = WAYS[way].replace(",", ", ")
    lines = [line for line in ways[way].log.splitlines() if f"penstock replaces of vLLM: {parts}" in line]
    assert any("EngineCore" in line for line in lines) and any("Worker" in line for line in lines), ways[way].log[
        -3000:
    ]
    assert len(lines) == len({re.findall(r"pid=(\d+)", line)[0] if "pid=" in line else "" for line in lines})


def test_inspect_shows_the_queues_of_a_live_vllm(ways: dict[str, Seen]) -> None:
    assert "vllm EngineCore" in ways["queue"].inspected and "VllmWorker-1" in ways["queue"].inspected


# ── a trace of it ──
def names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def of_core(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    """Sends of the engine core, or what its workers took from it."""
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    queue = f"broadcast 'vllm {CORE}'"
    matching = [event for event in events if event.get("cat") == category]
    return [event for event in matching if tracks[event["pid"], event["tid"]].endswith(queue)]


@pytest.mark.parametrize("way", OURS)
def test_a_trace_of_a_live_vllm_leads_from_each_send_to_each_worker(way: str, ways: dict[str, Seen]) -> None:
    events, summary = ways[way].events, ways[way].summary
    assert summary["lacking"] == []
    processes = names(events)
    assert set(processes.values()) >= {CORE, *WORKERS}
    # A record that was sent before the trace began has only the receivers that took it later.
    sends = {event["args"]["record"]: event for event in of_core(events, "send") if event["ts"] >= 0}
    takes: dict[int, dict[str, float]] = {}
    for event in of_core(events, "take"):
        takes.setdefault(event["args"]["record"], {})[processes[event["pid"]]] = event["ts"] + event["dur"]
    assert len(sends) > MIN_STEPS
    in_between = sorted(sends)[:-5]  # the last ones may be on their way when the trace ends
    assert all(takes[record].keys() == WORKERS for record in in_between)
    assert all(min(takes[record].values()) >= sends[record]["ts"] for record in in_between)


@pytest.mark.parametrize("way", OURS)
def test_a_trace_of_a_live_vllm_has_its_steps_with_their_replies(way: str, ways: dict[str, Seen]) -> None:
    steps_of_pairs = {(steps["leader"], steps["worker"]): steps for steps in ways[way].summary["steps"]}
    steps = steps_of_pairs[CORE, "VllmWorker-0"]  # the one that replies
    assert steps["steps"] > MIN_STEPS
    assert sum(steps["by_cause"].values()) == steps["total_ns"] and steps["by_cause"]["device"] > 0
    begins = {event["id"]: event["ts"] for event in ways[way].events if event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in ways[way].events if event["ph"] == "e"}
    assert begins.keys() == ends.keys() and len(begins) >= steps["steps"]
    assert all(begins[id] < ends[id] for id in begins)


def test_steps_as_changes_take_fewer_bytes_in_a_server(ways: dict[str, Seen]) -> None:
    # The mean: half of the records are calls of `sample_tokens`, of 54 bytes.
    nbytes = {way: statistics.fmean(e["args"]["bytes"] for e in of_core(ways[way].events, "send")) for way in OURS}
    print(f"bytes of a record of the core, mean, two requests at a time: {nbytes}")
    assert nbytes["steps"] < nbytes["queue"] / 2


@pytest.mark.parametrize("way", OURS)
def test_clients_get_the_death_of_a_worker_within_half_a_second(way: str, ways: dict[str, Seen]) -> None:
    last = {name: max(after for after, _ in result.errors) for name, result in ways.items()}
    print(f"errors after {last['vllm']:.2f} s as it is, {last[way]:.2f} s with {WAYS[way]}")
    assert last[way] <= PROMISED and ways[way].unhealthy_after <= PROMISED


@pytest.mark.parametrize("way", OURS)
def test_answers_and_log_name_the_dead_worker_and_its_signal(way: str, ways: dict[str, Seen]) -> None:
    death = f"VllmWorker-1 (rank 1, pid {ways[way].killed}) died: killed by SIGKILL"
    assert all(message.endswith(death) for _, message in ways[way].errors)
    assert f"ProcessDied: {death}" in ways[way].log


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_llm_answers_the_same_with_workers_that_are(method: str, site: Path, model: Path) -> None:
    answers: list[Any] = []
    for parts in ("0", "queue"):
        variables = {"VLLM_WORKER_MULTIPROC_METHOD": method, "PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1"}
        command = [peer.python_of_vllm(), str(INSIDE / "offline.py"), str(model), json.dumps(PROMPTS), method]
        environment = peer.environment(site, **variables)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
        match = re.search(r"^ANSWERS (.*)$", done.stdout, re.MULTILINE)
        assert match is not None, done.stdout[-3000:] + done.stderr[-6000:]
        assert ("penstock carries a queue of vLLM to 2 local readers" in done.stdout + done.stderr) == (parts != "0")
        starts = re.search(r"^STARTS (.*)$", done.stdout, re.MULTILINE)
        assert starts is not None and json.loads(starts[1]).count(method) == 3, starts  # the core and its workers
        answers.append(json.loads(match[1]))
    assert answers[0] == answers[1]
