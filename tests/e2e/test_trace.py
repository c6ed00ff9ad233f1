"""A trace of a live server under load: a file that Perfetto can show, in which each step has its reply."""

import contextlib
import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from penstock import cli
from tests.support.command import serving
from tests.support.documents import ROOT, fences, normalized

PAGE = ROOT / "docs" / "operations" / "trace.md"


def complete(port: int, tokens: int, request_id: str = "load") -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": tokens}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"X-Request-Id": request_id})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200


@contextlib.contextmanager
def load(port: int) -> Iterator[None]:
    """One client, which sends its next request when it has the answer: between two of them the engine waits."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            complete(port, 30)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def server(warmed_up: None) -> Iterator[tuple[int, int]]:
    """The process of a server, and its port."""
    with serving("--device-model", "simulated") as (launcher, port):
        yield launcher.pid, port


def test_a_live_server_is_traced_with_its_steps(
    server: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    with load(server[1]):
        assert cli.main(["trace", str(server[0]), "--seconds", "1.5", "-o", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["lacking"] == []
    (steps,) = summary["steps"]
    assert steps["steps"] > 20
    assert (steps["leader"], steps["worker"]) == ("core 0.0 #1", "worker 0.0 #1")
    assert sum(steps["by_cause"].values()) == steps["total_ns"]
    assert steps["by_cause"]["device"] > 0 and steps["by_cause"]["core 0.0 #1"] > 0
    assert steps["by_cause"]["wait for records of inbox 'inbox 0', for server 0.0 #1"] > 0
    check(json.loads(path.read_text())["traceEvents"], steps["steps"])


def test_trace_of_a_request_tells_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    with serving("--device-model", "simulated", "--step-ms", "5") as (launcher, port), load(port):
        thread = threading.Timer(0.5, complete, (port, 40, "why-slow"))
        thread.start()
        began = time.monotonic()
        command = ["trace", str(launcher.pid), "--seconds", "30", "--request", "cmpl-why-slow", "-o", str(path)]
        assert cli.main(command) == 0 and time.monotonic() - began < 20, "it ends with the request"
        thread.join()
        assert cli.main(["trace", str(launcher.pid), "--seconds", "0.1", "--request", "no", "-o", str(path)]) == 2
    printed, error = capsys.readouterr()
    assert re.search(r"^request why-slow of server 0: \d.* prompt of \d+ tokens$", printed, re.MULTILINE)
    for phase in ("queue", "prefill", r"decode  40 tokens, longest gap .*"):
        assert re.search(rf"^ +[\d.]+ (µs|ms|s)  {phase}$", printed, re.MULTILINE), printed
    assert "request 'no' came to no engine within 0.1 s: it was refused, or came before" in error


CAUSES = {"device", *(f"{begin}{name} 0.0 #1" for begin in ("", "wake-up of ") for name in ("core", "worker"))}


def test_the_page_about_traces_shows_what_the_command_prints(
    server: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Causes that a step need not have, such as a wait for requests, may be on the page, or in the output, alone."""
    monkeypatch.chdir(tmp_path)
    with load(server[1]):
        assert cli.main(["trace", str(server[0]), "--seconds", "1.5", "-o", "trace.json"]) == 0
    (shown,) = (fence.text for fence in fences(PAGE) if fence.printed_by == "penstock trace")
    printed = capsys.readouterr().out
    assert normalized(head_of(printed)) == normalized(head_of(shown))
    for text in (printed, shown):
        causes = [re.fullmatch(r" *[\d.]+ (?:µs|ms|s) +[\d.]+ %  (.+)", line) for line in text.strip().splitlines()[3:]]
        assert {cause[1] for cause in causes if cause} >= CAUSES
        assert None not in causes


def head_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:3])


def check(events: list[dict[str, Any]], steps: int) -> None:
    assert {event.get("cat") for event in events} >= {"send", "take", "wait", "record", "step", "device"}
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes >= {"core 0.0 #1", "worker 0.0 #1", "output 0.0 #1", "server 0.0 #1"}
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys() and len(begins) == steps + 1
    assert all(begins[id] < ends[id] for id in begins)
    sends = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    takes = [event for event in events if event["ph"] == "f"]
    assert len(takes) == len(sends) > steps
    device = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "device")
    assert all(end <= begin + 0.0015 for (_, end), (begin, _) in itertools.pairwise(device))
