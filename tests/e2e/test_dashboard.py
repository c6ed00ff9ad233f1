"""The page in a headless Chromium: asks for the key, shows what there is, escapes it, and outlives its server."""

import contextlib
import http.client
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("httptools")

from penstock.server.http.dashboard import PAGE, DashboardData
from penstock.server.status.history import HistoryView, Point
from penstock.server.status.snapshot import AwaitedView, ChannelView, EndView, ProcessView, ServerSnapshot
from penstock.server.status.snapshot_rates import View
from penstock.server.status.snapshot_reader import SnapshotReader
from tests.support.browser import Browser
from tests.support.command import serving
from tests.unit.server.status.test_snapshot_rates import NOTICE as SERVER_INFO
from tests.unit.server.status.test_snapshot_rates import view, zero

KEY = "sesame & <more>"
NAME = "<img src=x onerror=\"document.title='run'\"><b id=bold>x</b>"
NUMBER = "[...document.querySelectorAll('.tile')].find(one => one.innerText.includes('{}')).firstChild.innerText"
TEXT = NUMBER.replace("firstChild.innerText", "innerText")
OPEN = NUMBER.format("requests open")
SERVER = (
    *("--device-model", "simulated", "--api-key", KEY, "--served-model-name", NAME),
    *("--shutdown-timeout", "0.1", "--max-model-len", "20000"),
)


@contextlib.contextmanager
def streaming(port: int, many: int, request_id: str = "") -> Iterator[None]:
    """Requests that are open meanwhile, and being answered. `request_id`: with a place for their number."""
    body = b'{"prompt": "hello", "max_tokens": 15000, "stream": true}'
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    ids = [{"X-Request-Id": request_id.format(number)} if request_id else {} for number in range(many)]
    with contextlib.ExitStack() as open_ones:
        answers = [
            open_ones.enter_context(
                urllib.request.urlopen(urllib.request.Request(url, body, headers | name), timeout=60)
            )
            for name in ids
        ]
        is_over = threading.Event()
        readers = [threading.Thread(target=read_on, args=(answer, is_over)) for answer in answers]
        for reader in readers:
            reader.start()
        try:
            yield
        finally:
            is_over.set()
            for reader in readers:
                reader.join()


def read_on(answer: http.client.HTTPResponse, is_over: threading.Event) -> None:
    while not is_over.is_set() and answer.read1(4096):
        pass


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    if Browser.find() is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with Browser(tmp_path / "profile") as page:
        with serving(*SERVER) as (_, port):
            page.size(390, 800)
            page.go(f"http://127.0.0.1:{port}/dashboard")
            the_key_is_asked_for_and_a_wrong_one_is_told(page)
            with streaming(port, 3):
                what_is_shown_is_what_is_asked(page)
                a_phone_need_not_scroll_sideways_and_the_dark_is_dark(page)
            page.until(f"{OPEN} === '0'")
            names_are_text(page)
            the_key_is_in_no_address(page)
            assert page.complaints == ["Failed to load resource: the server responded with a status of 401 "
                                       "(Unauthorized)"] * len(page.complaints)  # fmt: skip
        page.until("/^no answer since [\\d:]+$/.test(document.getElementById('state').innerText)")
        assert page.evaluate("document.getElementById('seen').classList.contains('stale')")
        with serving(*SERVER, "--port", str(port)):
            page.until("document.getElementById('state').innerText === 'serves'")
            assert not page.evaluate("document.getElementById('seen').classList.contains('stale')")


def the_key_is_asked_for_and_a_wrong_one_is_told(page: Browser) -> None:
    page.until("document.getElementById('key')?.offsetParent !== null && document.readyState === 'complete'")
    page.until("!document.getElementById('ask').hidden")
    assert page.evaluate("document.getElementById('seen').hidden")
    for key in ("no", KEY):
        page.evaluate(f"document.getElementById('key').value = {key!r}")
        page.evaluate("document.querySelector('#form button').click()")
        if key != KEY:
            page.until("document.getElementById('state').innerText.includes('does not open')")
    page.until("!document.getElementById('seen').hidden && document.getElementById('ask').hidden")


def what_is_shown_is_what_is_asked(page: Browser) -> None:
    page.until(f"{OPEN} === '3'")
    page.until(f"{TEXT.format('requests open')}.includes('3 running of ')")
    page.until(f"parseFloat({NUMBER.format('tokens generated/s')}.replace(',', '')) > 0")
    page.until("document.querySelectorAll('#charts svg path').length === 11")
    page.until("document.querySelector('#charts path').getAttribute('d').includes('L')")  # two points at least
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    page.until("document.querySelector('#processes td') !== null && document.querySelector('#channels td') !== null")
    rows = page.evaluate("[...document.querySelectorAll('#processes tbody tr')].map(one => one.innerText)")
    roles = ["launcher", "core 0.0", "worker 0.0", "output 0.0", "server 0"]
    assert [row.split("\t")[0] for row in rows] == ["shared", *roles]
    assert all("serves" in row for row in rows[1:]), rows
    channels = page.evaluate("document.getElementById('channels').innerText")
    assert "steps 0\tbroadcast" in channels and "deltas 0\tinbox" in channels
    assert page.evaluate("document.getElementById('health').innerText").startswith("Healthy.")
    quiet = page.evaluate("document.getElementById('quiet').innerText")
    assert quiet == (
        "0 requests refused · 0 sequences preempted · 0 restarts · 0 requests resumed · 0 requests given up · "
        "0 requests blamed for deaths"
    )
    assert re.search(r"p50\s[\d.]+\s\w+ / p95\s[\d.]+\s\w+ / p99\s[\d.]+", page.evaluate(TEXT.format("first token")))
    the_tiles_the_charts_and_the_engines_have_the_same_numbers(page)
    assert re.search(r"prefix hits \d+ %", page.evaluate(TEXT.format("KV blocks")))
    assert page.evaluate("document.querySelectorAll('#engines tbody tr').length") == 1
    boxes = page.evaluate("[...document.querySelectorAll('#picture text.ink')].map(each => each.textContent)")
    assert {"server 0", "core 0.0", "worker 0.0", "output 0.0", "inbox 0", "steps 0", "results 0"} <= set(boxes)
    page.until(
        "[...document.querySelectorAll('#picture text')].some(each => each.textContent.startsWith('computing, '))"
    )
    assert page.evaluate("document.getElementById('with-items').hidden")
    assert page.evaluate("document.querySelector('footer a').getAttribute('href')") == "dashboard/grafana.json"


def the_tiles_the_charts_and_the_engines_have_the_same_numbers(page: Browser) -> None:
    page.until("document.querySelector('#engines tbody td:nth-child(4)').innerText.startsWith('3 of ')")
    tile, rate, charts, engines = page.evaluate(
        f"[{TEXT.format('requests open')}, {NUMBER.format('tokens generated/s')}, "
        "document.getElementById('charts').innerText, "
        "[...document.querySelectorAll('#engines tbody td')].map(cell => cell.innerText)]"
    )
    assert engines[3].replace("of", "running of") in tile and "running 3 · waiting 0" in charts
    assert f"generated {rate}\n" in charts and engines[6] == rate


def a_phone_need_not_scroll_sideways_and_the_dark_is_dark(page: Browser) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    grounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in grounds)
    assert light > 600 and dark < 150, grounds


def names_are_text(page: Browser) -> None:
    assert page.evaluate("document.getElementById('name').innerText") == NAME
    assert page.evaluate("document.querySelectorAll('img, #bold').length") == 0
    assert page.evaluate("document.title") == f"{NAME} – penstock"


def the_key_is_in_no_address(page: Browser) -> None:
    addresses = page.evaluate("performance.getEntries().map(one => one.name).concat(location.href)")
    assert len(addresses) > 3 and not any("sesame" in address or "?" in address for address in addresses), addresses
    assert "sesame" not in page.evaluate("document.documentElement.outerHTML")


def worker_of(launcher: int) -> int:
    return next(process.pid for process in SnapshotReader(launcher).take().processes if process.role == "worker")


def the_launcher_has_recorded_a_point(launcher: int) -> None:
    """Waits for the next point: the return of an engine is an event only if the recorder has seen it serve."""
    since, deadline = time.time(), time.monotonic() + 60
    while not SnapshotReader(launcher).history(since).points:
        assert time.monotonic() < deadline, "no point within 60 s"
        time.sleep(0.05)


LOADED = ("--device-model", "simulated", "--step-ms", "5", "--shutdown-timeout", "0.1", "--max-model-len", "20000")


def test_dashboard_tells_what_happened_after_a_kill_under_load(tmp_path: Path) -> None:
    """The text of a page opened after the kill names the cause, the requests and the pauses."""
    if Browser.find() is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with serving(*LOADED) as (server, port), streaming(port, 3, "ask-{}"):
        the_launcher_has_recorded_a_point(server.pid)
        worker = worker_of(server.pid)
        os.kill(worker, signal.SIGKILL)
        with Browser(tmp_path / "profile") as page:
            page.go(f"http://127.0.0.1:{port}/dashboard")
            for event in ("requests go on", "engine serves again"):
                page.until(f"document.getElementById('events')?.innerText.includes('{event}')")
            events = page.evaluate("document.getElementById('events').innerText")
            assert f"worker 0.0 #1 (pid {worker}) killed by SIGKILL" in events
            assert "engine 0 #1, by a signal from outside" in events
            assert re.search(r"3 of engine 0 #1, cause died: .*ask-0", events)
            assert re.search(
                r"3 of engine 0 #1, paused for [\d.]+ s \(median\), [\d.]+ s at most; given up: 0\b", events
            )
            assert all(events.count(f"ask-{number}") == 1 for number in range(3))
            assert re.search(r"engine 0 #2, away for [\d.]+ s", events)
            quiet = page.evaluate("document.getElementById('quiet').innerText")
            assert re.search(r"1 restart, \d+ s ago · 3 requests resumed, \d+ s ago · 0 requests refused · ", quiet)
            page.until("document.getElementById('health').innerText.startsWith('Healthy again')")
            health = page.evaluate("document.getElementById('health').innerText")
            assert re.search(
                r"since [\d:]+: worker 0.0 was killed \(SIGKILL\), engine 0 away for [\d.]+ s, "
                r"3 requests went on, 0 lost",
                health,
            )
            page.until("document.querySelectorAll('#charts .mark').length === 6")
            assert page.evaluate("document.querySelector('#charts text.bad').textContent") == "worker 0.0 killed"
            the_process_that_is_stuck_is_marked(page, server.pid)
            assert page.complaints == []


def the_process_that_is_stuck_is_marked(page: Browser, launcher: int) -> None:
    worker = worker_of(launcher)
    os.kill(worker, signal.SIGSTOP)
    try:
        page.until("document.getElementById('health').innerText.includes('Engine 0 is away')")
        page.until("/3 processes wait for worker 0.0, for [\\d.]+ s/.test(document.getElementById('health').innerText)")
        assert page.evaluate("document.getElementById('state').innerText") == "engine 0: worker 0.0 stopped"
        marked = page.evaluate("document.querySelectorAll('#picture .box.bad').length")
        assert marked == 1
        hover = page.evaluate("document.querySelector('#picture .box.bad title').textContent")
        assert hover == "core 0.0, output 0.0, server 0 wait for worker 0.0"
        assert "stuck?" in page.evaluate("document.getElementById('picture').textContent")
    finally:
        os.kill(worker, signal.SIGCONT)
    page.until("document.getElementById('health').innerText.startsWith('Healthy again')")


def test_dashboard_sentences_name_the_engine_and_what_is_short(tmp_path: Path) -> None:
    """The functions of the page with invented data: engines with 8 slots and 100 blocks."""
    if Browser.find() is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")

    def moment(*engines: tuple[int, int, int]) -> str:
        names = ("num_requests_running", "num_requests_waiting", "free_blocks")
        rows = [{"gauges": {**dict(zip(names, engine, strict=True)), "blocks": 100}} for engine in engines]
        return json.dumps({"server_info": {"max_num_seqs": 8}, "engines": rows})

    def shortages(before: str, now: str) -> list[str]:
        page.evaluate(f"former = {before}; 0")
        return [text for text, _ in page.evaluate(f"shortages({now})")]

    idle, engine_1, both = (
        moment((5, 0, 80), (8, 0, 70)),
        moment((5, 0, 80), (8, 1, 70)),
        moment((8, 2, 60), (8, 1, 70)),
    )
    with Browser(tmp_path / "profile") as page:
        page.go(PAGE.as_uri())
        page.until("document.readyState === 'complete'")
        assert shortages("null", engine_1) == shortages(idle, engine_1) == shortages(engine_1, idle) == []
        assert shortages(both, engine_1) == ["engine 1: 8 of 8 slots, 1 request waits"]
        assert shortages(both, both) == ["full: 16 of 16 slots, 3 requests wait"]
        blocks = moment((5, 2, 30), (1, 0, 70))
        assert shortages(blocks, blocks) == ["engine 0: 5 of 8 slots, 70 of 100 KV blocks, 2 requests wait"]
        page.evaluate(f"events = {json.dumps(EVENTS)}; 0")
        last, back, at_100 = page.evaluate("[clock(109), clock(102), clock(100)]")  # in the time zone of the browser
        death = f"Healthy. Last death: server 0 was killed (SIGKILL) at {last}"
        assert page.evaluate("incident(110)") == f"{death}, 4 open requests ended with it."
        page.evaluate("events.splice(-1); 0")
        assert page.evaluate("incident(110)") == f"{death}."
        page.evaluate("events.splice(-2); 0")
        assert page.evaluate("incident(110)") == (
            f"Healthy again since {back}: worker 1.0 ended (exit status 3), engine 1 away for 2.6 s, "
            "9 requests went on, 1 lost"
        )
        assert page.evaluate("incident(2000)") == "Healthy."
        assert page.evaluate("plain('group 1 #1, by cause: itself')") == "engine 1 #1, by cause: itself"
        absence = f"events = {json.dumps(FAILING)}; absence({json.dumps(AWAY)}, 1)[0][0]"
        assert page.evaluate(absence) == (
            f"Engine 1 is away since {back}: coming back, 2 requests to resume, 3 failed starts"
        )
        page.evaluate(f"events = {json.dumps(EVENTS[:-3])}; 0")
        page.evaluate("events[0].text = 'output 1.0 #1 (pid 7) killed by SIGKILL'; events.splice(1, 2); 0")
        assert page.evaluate("incident(110)") == (
            f"Healthy. Last death: output 1.0 was killed (SIGKILL) at {at_100}, 9 requests went on, 1 lost."
        )


def event_list(*events: tuple[int, str, str, str]) -> list[dict[str, Any]]:
    return [{"time": when, "kind": kind, "name": name, "text": text} for when, kind, name, text in events]


EVENTS = event_list(
    (100, "death", "process ended", "worker 1.0 #1 (pid 7) exit status 3"),
    (100, "death", "group lost", "group 1 #1, by cause: itself"),
    (102, "restart", "engine serves again", "engine 1 #2, away for 2.6 s"),
    (103, "migration", "requests go on", "7 of group 1 #1, paused for 0.2 s (median), 3 s at most; given up: 1"),
    (103, "migration", "requests go on", "2 of group 1 #1, paused for 0.2 s (median), 3 s at most; given up: 0"),
    (109, "death", "process ended", "server 0.0 #1 (pid 8) killed by SIGKILL"),
    (110, "restart", "engine serves again", "engine 0 #2, away for 1.0 s"),  # server 0 is not of engine 0
    (110, "death", "requests ended with their server", "server 0, open requests: 4"),
)
FAILING = event_list(  # engine 1 is lost at 102, after an output processor, and fails at each start
    (90, "death", "group lost", "group 1 #1, by cause: itself"),
    (91, "restart", "engine serves again", "engine 1 #2, away for 1.0 s"),
    (95, "death", "process ended", "output 1.0 #2 (pid 7) killed by SIGKILL"),
    (102, "death", "process ended", "core 1.0 #2 (pid 8) exit status 3"),
    (102, "death", "group lost", "group 1 #2, by cause: itself"),
    *(
        (102 + number, kind, name, text)
        for number in range(1, 4)
        for kind, name, text in (
            ("restart", "unit starts again", f"group 1 after 1.0 s; failed starts: {number}"),
            ("death", "process ended", f"core 1.0 #{number + 2} (pid 9) exit status 3"),
        )
    ),
)
AWAY = {
    "processes": [{"role": "core", "group": 1, "state": "gone", "title": "core 1.0", "incarnation": 5}],
    "engines": [{}, {"gauges": {"engine_incarnation": 0}}],
    "served": [{}, {"gauges": {"requests_waiting_to_resume": 2}}],
}


def snapshot(at: float, engines: int, stuck: int) -> ServerSnapshot:
    """Engine i has sent 10 + i deltas each second since 0. `stuck`: the engine with an awaited worker."""
    channels, processes = [], [zero(ProcessView, role="server", pid=1, incarnation=1, state="serves")]
    for group in range(engines):
        for role in ("core", "worker", "output"):
            processes.append(zero(ProcessView, role=role, group=group, pid=1, incarnation=1, state="serves"))
        channels.append(zero(ChannelView, name=f"steps {group}", kind="broadcast"))
    senders = [EndView(f"output {group}.0", True, 0.0, 0, int(at * (10 + group))) for group in range(engines)]
    channels.append(zero(ChannelView, name="deltas 0", kind="inbox", ends=tuple(senders)))
    counters = {"engine_incarnation": 1, "num_requests_running": 2, "blocks": 100, "free_blocks": 50}
    moment: ServerSnapshot = zero(
        ServerSnapshot,
        at=at,
        time=1e9 + at,
        server_info=msgspec.structs.replace(SERVER_INFO, groups_per_node=8),
        processes=tuple(processes),
        channels=tuple(channels),
        awaited=(AwaitedView(f"worker {stuck}.0", (f"core {stuck}.0",), 7.0),),
        engines=(view("engines", **counters),) * engines,
        served=(view("served"),) * engines,
        servers=(view("servers"),),
    )
    return moment


def test_dashboard_shows_64_engines(tmp_path: Path) -> None:
    """A picture of a few engines, the stuck one first, and a row for each engine and node."""
    if Browser.find() is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    before, now = (snapshot(at, 64, stuck=37) for at in (10.0, 11.0))
    titles = tuple(process.title for process in now.processes)
    recent = HistoryView(Point._fields, [], [])
    data = DashboardData(now, View.after(before, now, 10.0).rates, recent, titles, 0)
    with Browser(tmp_path / "profile") as page:
        page.size(390, 800)
        page.go(PAGE.as_uri())
        page.until("document.readyState === 'complete'")
        page.evaluate(f"window.data = {msgspec.json.encode(data).decode()}; show(data); 0")
        texts = "[...document.querySelectorAll('#picture text')].map(each => each.textContent)"
        picture = page.evaluate(texts)
        workers = [text for text in picture if text.startswith("worker")]
        assert workers == ["worker 37.0", "worker 0.0", "worker 1.0", "worker 2.0"] and picture.count("server 0") == 1
        assert "stuck?" in picture and [text for text in picture if text.endswith("/s, 0 B/s") and text[0] != "0"] == [
            f"{rate}/s, 0 B/s" for rate in (47, 10, 11, 12)
        ]
        assert page.evaluate("document.getElementById('more').innerText") == "60 more engines"
        page.evaluate("document.getElementById('more').open = true; 0")
        page.until(f"{texts}.filter(text => text.startsWith('worker')).length === 64")
        assert page.evaluate("document.querySelectorAll('#engines tbody tr').length") == 64 + 8
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.getElementById('health').innerText").startswith(
            "1 process waits for worker 37.0"
        )
