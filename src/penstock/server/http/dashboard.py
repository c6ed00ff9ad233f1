"""`/dashboard`: a page that shows the server at work, and its data, read once a second for any number of viewers.

The page is one file without data and needs no API key; its data does. `snapshot_reader` and `snapshot_rates` make the
data; nothing is kept of the viewers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.errors import ApiError
from penstock.server.status.snapshot import ServerSnapshot
from penstock.server.status.snapshot_rates import View
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader

PAGE = Path(__file__).with_name("dashboard.html")
FRESH = 0.95  # seconds for which a moment is told again: pages ask once a second
LONGEST = 10.0  # seconds between two moments, for rates that tell of now
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Dashboard:
    """Of one server process, which looks into itself: it has all segments of the tree."""

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

    async def data(self, request: Request) -> Response:
        """Raises ApiError where there is nothing to be seen."""
        async with self._looking:
            if time.monotonic() - self._at >= FRESH:
                try:
                    self._encoded = await asyncio.to_thread(self._look)
                except NoServer as error:
                    self._watch = None  # the next one finds anew where everything is
                    raise ApiError(503, str(error)) from None
                self._at = time.monotonic()
        return Response(self._encoded, media_type="application/json", headers=HEADERS)

    def _look(self) -> bytes:
        if self._watch is None:
            self._watch = SnapshotReader(os.getpid())
        moment = self._watch.take()
        view = View.after(self._before, moment, LONGEST)
        self._before = moment
        return msgspec.json.encode(view)


def _policy(page: str) -> str:
    """Nothing from elsewhere, and nothing in the page but what stands in it."""
    script, style = (_hashed(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashed(page: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
