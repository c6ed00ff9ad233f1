"""Sources of snapshots: of a server on this machine its shared memory, of a remote server its `/dashboard/data`.

`server.status.snapshot_reader` reads the memory. A server that has ended is searched again by its address.
"""

from __future__ import annotations

import http.client
import os
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from penstock import PenstockError
from penstock.server.status.server_info import NAME, ServerInfo
from penstock.server.status.snapshot import ServerSnapshot
from penstock.server.status.snapshot_rates import View
from penstock.server.status.snapshot_reader import NoServer, SnapshotReader
from penstock.tools.inspect import all_processes
from penstock.tools.inspect.segments import descriptors_of, harmless, page_at

LINK = f"/memfd:penstock:{NAME} "  # as /proc shows it, before the "(deleted)" that every anonymous file has
TIMEOUT = 5.0  # seconds for an answer of a remote server
MAX_NBYTES = 16 << 20  # of an answer


class Refused(Exception):
    """A server refuses to be observed; the text is one line with the reason."""


class SnapshotSource(Protocol):
    def look(self) -> View:
        """Takes a snapshot. Raises NoServer while the server is gone, and Refused."""


# ── on this machine ──────────────────────────────────────────────────────────────────────────────────────────────────
def servers_here() -> dict[int, ServerInfo]:
    """Returns the servers of this machine that this user may read, by the pid of their launcher."""
    servers = {}
    for pid in all_processes():
        try:
            for number, place in descriptors_of(pid):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(LINK):
                    server_info = ServerInfo.read(page_at(pid, number, place))
                    if server_info.pid == pid:  # the launcher: its other processes have the page open, too
                        servers[pid] = server_info
        except (OSError, PenstockError, msgspec.DecodeError):
            continue  # not ours, gone, or of another version
    return servers


def choose(target: int | str | None, among: dict[int, ServerInfo]) -> int:
    """Returns the pid of a server's launcher. `target`: its pid, name or URL; None: the only one. Raises NoServer."""
    if isinstance(target, int):
        meant = [pid for pid in among if pid == target]
    else:
        meant = [pid for pid, server_info in among.items() if target in (None, server_info.name, server_info.url)]
    if len(meant) == 1:
        return meant[0]
    which = "" if target is None else f" {target!r}"
    if not among:
        raise NoServer("no penstock server of ours runs on this machine")
    several = "which of these servers?" if meant else f"there is no server{which}, but"
    lines = [
        f"{pid:>8}  {server.name}  {server.url}" for pid, server in sorted(among.items()) if not meant or pid in meant
    ]
    raise NoServer("\n".join([several, *lines]))


class LocalSource:
    def __init__(self, pid: int, max_interval: float) -> None:
        """`max_interval`: seconds between two snapshots, above which there are no rates. Raises NoServer."""
        self._watch: SnapshotReader | None = SnapshotReader(pid)
        self._max_interval = max_interval
        self._before: ServerSnapshot | None = None

    def look(self) -> View:
        if self._watch is None:
            self._watch = self._again()
        try:
            moment = self._watch.take()
        except NoServer:
            self._watch = None
            raise
        view = View.after(self._before, moment, self._max_interval)
        self._before = moment
        return view

    def _again(self) -> SnapshotReader:
        assert self._before is not None, "a server that is searched again has had a snapshot"
        url = self._before.server_info.url
        return SnapshotReader(choose(url, {pid: server for pid, server in servers_here().items() if server.url == url}))


# ── elsewhere ────────────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteSource:
    """Redirects are not followed: the key is for this server."""

    def __init__(self, url: str, key: str, max_interval: float) -> None:
        """`max_interval`: seconds between two snapshots; above, there are no rates. Raises ValueError for a bad URL."""
        self._max_interval = max_interval
        self._before: ServerSnapshot | None = None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, not {url!r}")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/dashboard").removesuffix("/v1") + "/dashboard/data"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url

    def look(self) -> View:
        connection = self._kind(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("GET", self._path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_NBYTES)
        except (OSError, http.client.HTTPException) as error:
            raise NoServer(f"{self._url} does not answer: {error}") from None
        finally:
            connection.close()
        if answer.status == 503:
            raise NoServer(f"{self._url} has no data to show now")
        if answer.status == 401:
            raise Refused(f"{self._url} needs an API key: --api-key")
        try:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            moment = msgspec.convert(harmless(msgspec.json.decode(body)), View).moment
        except ValueError as error:  # msgspec's are, too
            raise Refused(f"{self._url} is no penstock server of this version: {error}") from None
        # Own rates: those of the answer are since the last request of any viewer to that server process.
        view = View.after(self._before, moment, self._max_interval)
        self._before = moment
        return view
