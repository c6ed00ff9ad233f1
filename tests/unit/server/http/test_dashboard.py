"""The page and what it is told, without a browser: what the page may not do, and how often the board is read."""

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.server.errors import ApiError
from penstock.server.http import dashboard
from penstock.server.http.dashboard import FRESH, PAGE, RECENT_S, Dashboard
from penstock.server.status.history import HistoryView
from penstock.server.status.snapshot_reader import NoServer
from tests.support.loops import in_a_loop
from tests.unit.server.status.test_snapshot_rates import moment

SOURCE = PAGE.read_text()
ASKED: Any = None  # nothing of the request matters


class Server:
    """One that is looked into, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = self.finds = 0
        self.since = 0.0
        self.is_gone = False
        self.now = 100.0
        monkeypatch.setattr(dashboard, "SnapshotReader", self.find)
        monkeypatch.setattr(dashboard.time, "monotonic", lambda: self.now)

    def find(self, pid: int) -> "Server":
        self.finds += 1
        return self

    def take(self) -> Any:
        if self.is_gone:
            raise NoServer("process 7 has ended")
        self.looks += 1
        return moment(self.now)

    def history(self, since: float = 0.0) -> HistoryView:
        self.since = since
        return HistoryView(("time",), [[self.now]], [])


async def answers(page: Dashboard, many: int = 1) -> list[Any]:
    return [json.loads(bytes(item.body)) for item in await asyncio.gather(*(page.data(ASKED) for _ in range(many)))]


@in_a_loop
async def test_many_that_ask_at_once_cost_one_look_and_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    page = Dashboard()
    first = await answers(page, 10)
    assert server.looks == 1 and all(item == first[0] for item in first)
    server.now += FRESH - 0.01
    assert await answers(page, 10) == first and server.looks == 1
    server.now += 0.02
    (later,) = await answers(page)
    assert server.looks == 2 and later["moment"]["at"] == server.now
    assert later["recent"] == {"fields": ["time"], "points": [[server.now]], "events": []}
    assert server.since == -RECENT_S, "the moment's time is 0"
    history = json.loads(bytes((await page.history(ASKED)).body))
    assert history["points"] == [[server.now]] and server.since == 0.0


@in_a_loop
async def test_rates_are_of_the_time_since_the_last_look_unless_that_is_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch)
    page = Dashboard()
    assert (await answers(page))[0]["rates"] is None
    server.now += 1.0
    assert (await answers(page))[0]["rates"]["seconds"] == 1.0
    server.now += 60.0  # without a look
    assert (await answers(page))[0]["rates"] is None


@in_a_loop
async def test_dashboard_data_is_503_without_a_server_and_returns_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    page = Dashboard()
    server.is_gone = True
    with pytest.raises(ApiError, match="has ended") as result:
        await page.data(ASKED)
    assert result.value.status == 503
    server.is_gone = False
    assert (await answers(page))[0]["moment"]["at"] == server.now
    assert server.finds == 2, "where it has been seen before there may be nothing any more"


def test_dashboard_page_may_run_only_its_own_scripts() -> None:
    answer = asyncio.run(Dashboard().page(ASKED))
    policy = answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", SOURCE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert answer.headers["content-type"].startswith("text/html")


def test_dashboard_fetches_nothing_external_and_escapes_its_data() -> None:
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", SOURCE))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, and no address"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert word not in SOURCE
    assert not re.search(r"<[^>]+\son\w+=|<[^>]+\sstyle=|javascript:", SOURCE)


def test_the_key_goes_into_a_header_and_not_into_an_address() -> None:
    assert "Authorization: `Bearer ${tried}`" in SOURCE
    assert re.findall(r"fetch\(([^,]+),", SOURCE) == ["address"] and "location" not in SOURCE
    assert set(re.findall(r"await read\((.+?)\)", SOURCE)) == {'"dashboard/data"', '"dashboard/history"'}
