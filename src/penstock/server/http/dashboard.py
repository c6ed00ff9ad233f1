"""`/dashboard`: a page with live data of the server, which is read once a second for any number of viewers.

The page is a static file and needs no API key; the data does. `snapshot_reader` and `snapshot_rates` make the data.
Nothing is stored about viewers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.errors import ApiError
from penstock.server.http import grafana
from penstock.server.status.history import HistoryView
from penstock.server.status.snapshot import ServerSnapshot
from penstock.server.status.snapshot_rates import View
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader

PAGE = Path(__file__).with_name("dashboard.html")
FRESH = 0.95  # seconds for which a snapshot is reused: pages request data each second
LONGEST = 10.0  # most seconds between two snapshots with rates
RECENT_S = 10.0  # of the history in each answer: a page that was away for longer reads all of it again
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class DashboardData(View, frozen=True):
    """A snapshot with its rates, the end of the history, and what the snapshot knows by its properties."""

    recent: HistoryView
    titles: tuple[str, ...]  # of the processes
    restarts: int


class Dashboard:
    """The dashboard of a server process, which has all segments of the cluster open."""

    def __init__(self) -> None:
        self._page = PAGE.read_bytes()
        self._headers = {**HEADERS, "Content-Security-Policy": _policy(self._page.decode())}
        self._watch: SnapshotReader | None = None
        self._looking = asyncio.Lock()
        self._at = -FRESH
        self._before: ServerSnapshot | None = None
        self._encoded = b""

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._headers)

    async def grafana(self, request: Request) -> Response:
        """Returns the dashboard that Grafana imports, for a longer history than the page has."""
        return Response(grafana.encoded(), media_type="application/json", headers=HEADERS)

    async def data(self, request: Request) -> Response:
        """Returns the last snapshot with its rates, and recent history. Raises ApiError if none can be read."""
        async with self._looking:
            if time.monotonic() - self._at >= FRESH:
                self._encoded = await self._read(self._look)
                self._at = time.monotonic()
        return Response(self._encoded, media_type="application/json", headers=HEADERS)

    async def history(self, request: Request) -> Response:
        """Returns all points and events. Raises ApiError if none can be read."""
        async with self._looking:
            encoded = await self._read(lambda: msgspec.json.encode(self._reader().history()))
        return Response(encoded, media_type="application/json", headers=HEADERS)

    async def _read(self, read: Callable[[], bytes]) -> bytes:
        try:
            return await asyncio.to_thread(read)
        except NoServer as error:
            self._watch = None  # the next request opens the segments again
            raise ApiError(503, str(error)) from None

    def _reader(self) -> SnapshotReader:
        if self._watch is None:
            self._watch = SnapshotReader(os.getpid())
        return self._watch

    def _look(self) -> bytes:
        reader = self._reader()
        moment = reader.take()
        view = View.after(self._before, moment, LONGEST)
        self._before = moment
        recent, titles = reader.history(moment.time - RECENT_S), tuple(process.title for process in moment.processes)
        return msgspec.json.encode(DashboardData(moment, view.rates, recent, titles, moment.restarts))


def _policy(page: str) -> str:
    """Returns the Content-Security-Policy: only the script and style in the page, and connections to this server."""
    script, style = (_hashed(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashed(page: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
