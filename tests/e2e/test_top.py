"""The live view of a server that works: on the terminal, as JSON, and the data of its page."""

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

pytest.importorskip("openai")
pytest.importorskip("httptools")

from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.status.snapshot_rates import View
from tests.e2e.test_server import KEY, Served, run_server
from tests.shared_server import Scene, SharedServer, shared_server
from tests.support.engine import simulated_device
from tests.support.loops import in_a_loop

PROMPT, MOST = "hello there", 40
STEP = 0.005  # seconds
LONG = 10_000  # tokens; nearly a minute, and none of these requests is waited for


async def top(*arguments: str, **more: str) -> tuple[int, str, str]:
    command = (sys.executable, "-m", "penstock", "top", *arguments)
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "PENSTOCK_API_KEY": "", **more}
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
    out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


async def seen_by_top(*arguments: str, **more: str) -> View:
    status, out, error = await top("--json", "--interval", "0.3", *arguments, **more)
    assert status == 0, error
    return msgspec.json.decode(out, type=View)


async def page_data(served: Served) -> Any:
    status, body = await served.get("/dashboard/data")
    assert status == 200, body
    return json.loads(body)


def ours() -> str:
    return str(os.getpid())  # the launcher lives in the test's own process


async def answered(served: Served, many: int, tokens: int) -> None:
    """So many requests, all answered."""
    ask = served.client.completions.create
    await asyncio.gather(
        *(ask(model="simulated", prompt=f"{number} {PROMPT}", max_tokens=tokens) for number in range(many))
    )


# ── scenes, in this order ────────────────────────────────────────────────────────────────────────────────────────────
async def tokens_are_counted_as_they_were_asked_for(served: Served) -> None:
    before = await seen_by_top(ours())
    await answered(served, 6, MOST)
    now = await seen_by_top(ours())
    old, new = before.moment, now.moment
    expected = {"sampled_tokens": 6 * MOST, "generation_tokens": 6 * MOST, "computed_tokens": 6 * len(f"0 {PROMPT}")}
    assert {key: new.total(key) - old.total(key) for key in expected} == expected
    assert new.total("blocks") == new.total("free_blocks")
    assert not any(map(new.total, ("open_in_engine", "num_requests_waiting", "num_preemptions")))


async def what_is_open_is_shown_alike_by_all_views(served: Served) -> None:
    asking = asyncio.ensure_future(answered(served, 5, LONG))
    await served.until(lambda: served.number(StatusBoard.OPEN) == 5)
    shown = await seen_by_top(ours())
    elsewhere = await seen_by_top(f"http://127.0.0.1:{served.port}", "--api-key", KEY)
    page = await page_data(served)
    status, out, error = await top(ours(), "--once", "--interval", "0.3")
    assert status == 0, error
    assert not asking.done(), "it has been answered while we looked: ask for more"
    for view in (shown, elsewhere, msgspec.convert(page, View)):
        (engine,) = view.moment.engines
        open_requests = [view.moment.total("open_requests"), engine["open_in_engine"]]
        assert [*open_requests, engine["num_requests_running"], engine["num_requests_waiting"]] == [5, 5, 5, 0]
        assert 0 <= engine["free_blocks"] < engine["blocks"] == 4096
        names = [channel.name for channel in view.moment.channels]
        assert sorted(names) == ["deltas 0", "deltas 1", "inbox 0", "results 0", "steps 0", "tokens 0.0"]
        assert [process.state for process in view.moment.processes] == ["serves"] * 6
    for rates in (shown.rates, elsewhere.rates):
        assert rates is not None and rates.total("sampled_tokens") > 0
        # What the device was told; a step more or less is counted, as not all is read at one time.
        assert rates.steps[0].device == pytest.approx(STEP, rel=0.5)
        steps = next(rate for rate, name in zip(rates.channels, names, strict=True) if name == "steps 0")
        assert steps.records == pytest.approx(rates.engines[0]["engine_steps"], rel=0.5)
    assert re.search(r"requests +5 open +5 running +0 waiting", out), out
    for process in shown.moment.processes:
        assert re.search(rf"(?m)^{process.title} +{process.pid} +serves +0 ", out), out
    assert re.search(r"steps 0 +broadcast +[\d.,]+ ", out) and "\x1b" not in out
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await served.must_be_empty()


async def on_a_terminal_it_has_a_screen_of_its_own_until_q(served: Served) -> None:
    ours_end, its_end = pty.openpty()
    try:
        fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        before = termios.tcgetattr(its_end)
        command = (sys.executable, "-m", "penstock", "top", ours(), "--interval", "0.1")
        environment = {**os.environ, "TERM": "xterm-256color"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment
        )
        actual = bytearray()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours_end, lambda: actual.extend(os.read(ours_end, 1 << 16)))
        try:
            await served.until(lambda: actual.count(b"\x1b[H") > 3)  # drawn anew each time
            assert actual.count(b"\x1b[?1049h") == 1 and b"\x1b[?1049l" not in actual
            os.write(ours_end, b"xq")
            assert await asyncio.wait_for(process.wait(), 30) == 0
            await served.until(lambda: b"\x1b[?1049l" in actual)
        finally:
            loop.remove_reader(ours_end)
        assert termios.tcgetattr(its_end) == before
        assert b"worker 0.0" in actual and b"q or Ctrl-C: end" in actual
    finally:
        os.close(ours_end)
        os.close(its_end)


async def a_picture_is_kept_and_fetches_nothing(served: Served) -> None:
    path = Path(os.environ["TMP_OF_TEST"]) / "top.svg"
    status, _, error = await top(ours(), "--once", "--interval", "0.2", "--svg", str(path))
    assert status == 0, error
    drawing = path.read_text()
    ElementTree.fromstring(drawing)
    assert "steps" in drawing and not re.search(r"url\((?!#)|@import|href=\"(?!#)", drawing)


async def without_the_key_there_is_nothing_to_see(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    for arguments in ((), ("--api-key", "wrong")):
        status, out, error = await top(url, "--once", *arguments)
        assert (status, out) == (2, "") and "API key" in error
    shown = await seen_by_top(url, PENSTOCK_API_KEY=KEY)
    assert shown.moment.server_info.url == url
    status, response = await served.exchange("GET", "/dashboard", header="")
    assert status == 200 and KEY not in response


async def the_root_leads_to_the_page_and_the_page_to_grafana(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    response = (await reader.read()).decode()
    writer.close()
    assert response.startswith("HTTP/1.1 307 ") and "location: /dashboard\r\n" in response
    _, page = await served.get("/dashboard")
    for path in re.findall(r'href="(/[^"]+)"', page):
        status, body = await served.get(path)
        assert status == 200 and json.loads(body)["panels"], path
    assert '"dashboard/grafana.json"' in page


async def many_that_look_are_told_of_the_same_moment(served: Served) -> None:
    """Of each server process: which one answers a connection is chance."""
    pages = await asyncio.gather(*(page_data(served) for _ in range(12)))
    assert len({page["moment"]["at"] for page in pages}) <= 2
    assert all(page["moment"]["server_info"]["pid"] == os.getpid() for page in pages)


async def a_worker_that_is_killed_shows_as_restarted(served: Served) -> None:
    dead = served.child("worker").pid
    os.kill(dead, signal.SIGKILL)

    async def worker() -> tuple[str, int]:
        process = next(process for process in (await seen_by_top(ours())).moment.processes if process.role == "worker")
        assert process.state != "serves" or process.pid != dead, "a dead process is shown as one that serves"
        return process.state, process.incarnation

    for _ in range(100):
        if await worker() == ("serves", 2):
            break
    status, out, _ = await top(ours(), "--once", "--interval", "0.3")
    assert status == 0 and re.search(r"(?m)^worker 0\.0 +\d+ +serves +1 ", out), out
    await answered(served, 2, 5)
    (engine,) = (await seen_by_top(ours())).moment.engines
    assert (engine["engine_incarnation"], engine["sampled_tokens"]) == (2, 10)


async def a_process_that_is_stopped_is_shown_as_stopped(served: Served) -> None:
    child = served.child("output")
    os.kill(child.pid, signal.SIGSTOP)
    try:
        states = {process.title: process.state for process in (await seen_by_top(ours())).moment.processes}
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert states["output 0.0"] == "stopped" and states["core 0.0"] == "serves"


SCENES: tuple[Callable[[Served], Any], ...] = (
    tokens_are_counted_as_they_were_asked_for,
    what_is_open_is_shown_alike_by_all_views,
    on_a_terminal_it_has_a_screen_of_its_own_until_q,
    a_picture_is_kept_and_fetches_nothing,
    without_the_key_there_is_nothing_to_see,
    the_root_leads_to_the_page_and_the_page_to_grafana,
    many_that_look_are_told_of_the_same_moment,
)


def watched() -> Any:
    return run_server(simulated=simulated_device(step_seconds=STEP), max_model_len=LONG + 1000)


@in_a_loop
async def test_top_shows_stopped_and_restarted_processes() -> None:
    async with watched() as served:
        await asyncio.wait_for(a_process_that_is_stopped_is_shown_as_stopped(served), 60)
        await asyncio.wait_for(a_worker_that_is_killed_shows_as_restarted(served), 60)


@in_a_loop
async def test_top_reports_a_gone_server_and_shows_the_next_at_its_address() -> None:
    serve = [sys.executable, "-m", "penstock", "serve", "--device-model", "simulated", "--served-model-name", "again"]

    async def until_it_says(reader: asyncio.StreamReader, what: str) -> str:
        text = ""
        while not (match := re.search(what, text)):
            line = await asyncio.wait_for(reader.readline(), 60)
            assert line, text
            text += line.decode()
        return match[1]

    pipe, create = asyncio.subprocess.PIPE, asyncio.create_subprocess_exec
    first = await create(*serve, "--port", "0", stderr=pipe)
    assert first.stderr is not None
    port = await until_it_says(first.stderr, r"event=serving .*:(\d+)")
    look = (sys.executable, "-m", "penstock", "top", str(first.pid), "--interval", "0.2")
    view = await create(*look, stdout=pipe, stderr=pipe)
    assert view.stdout is not None
    second = None
    try:
        assert await until_it_says(view.stdout, r" again .* pid (\d+)") == str(first.pid)
        first.kill()
        await first.communicate()
        await until_it_says(view.stdout, "GONE: (process|no penstock)")
        second = await create(*serve, "--port", port, stderr=pipe)
        assert second.stderr is not None
        await until_it_says(view.stdout, rf" again .* pid ({second.pid})")
        await until_it_says(second.stderr, "event=(serving)")
        assert view.returncode is None
    finally:
        for process in filter(None, (first, view, second)):
            if process.returncode is None:
                process.terminate()
            await process.communicate()


# ── on one server; last, as its server lives until the module ends ────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def shared(warmed_up: None) -> Iterator[SharedServer]:
    with shared_server(watched()) as shared:
        yield shared


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_served_tree_is_seen(
    shared: SharedServer, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMP_OF_TEST", str(tmp_path))
    shared.play(scene, within=60)
