"""Takes snapshots of a server, from inside or outside, without disturbing a process.

The reader opens and maps segments for reading, joins no segment as a peer, and releases all mappings after a snapshot,
so the reader keeps no memory alive. `inspect` opens the segments; the native core reads the state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from penstock import PenstockError, lowlevel
from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import ProcessId
from penstock.server.options import RESPONSE_STORE
from penstock.server.status.counters import PARTS, ProcessCounters, ServerCounters, counter_rows
from penstock.server.status.history import HistoryView, ServerHistory
from penstock.server.status.server_info import NAME, ServerInfo
from penstock.server.status.snapshot import (
    ChannelView,
    CounterView,
    EndView,
    HolderView,
    ProcessView,
    ServerSnapshot,
    StoreView,
    awaited_processes,
)
from penstock.tools.inspect import Json, memory_by_kind, private_nbytes_of, process_of
from penstock.tools.inspect.segments import PAGE_KIND, Place, descriptors_of, page_at, snapshot_of

PAGES = (NAME, "board", "tally", "history")
HOLDERS = 8  # listed holders of a store, by most bytes


class NoServer(Exception):
    """No server can be read; the text is one line with the reason."""


class SnapshotReader:
    """Reads snapshots of a server through a process with open segments: the launcher, or a server process."""

    def __init__(self, pid: int) -> None:
        """Opens the segments of process `pid`. Raises NoServer."""
        self._pid = pid
        self._start = _start_of(pid)
        self._pages: dict[str, tuple[int, Place]] = {}
        self._others: list[tuple[int, Place]] = []
        self._raw: list[Json] = []  # pages, which never grow
        places: set[Place] = set()
        try:
            for number, place in descriptors_of(pid):
                if place in places:
                    continue
                try:
                    segment = snapshot_of(pid, number, place)
                except FileNotFoundError:  # it was open for a moment only
                    continue
                places.add(place)
                if segment["kind"] != PAGE_KIND:
                    self._others.append((number, place))
                    continue
                self._raw.append(segment)
                if segment["name"] in PAGES:
                    self._pages[segment["name"]] = number, place
        except (OSError, PenstockError, ValueError) as error:
            raise NoServer(f"process {pid} cannot be looked into: {error}") from None
        if set(self._pages) != set(PAGES):
            raise NoServer(f"process {pid} is no penstock server")

    def take(self) -> ServerSnapshot:
        """Takes a snapshot. Raises NoServer if the server has ended."""
        if _start_of(self._pid) != self._start:
            raise NoServer(f"process {self._pid} has ended")
        try:
            return self._moment()
        except (OSError, PenstockError) as error:  # the process closes segments in sequence
            raise NoServer(f"process {self._pid} is ending: {error}") from None
        except (msgspec.DecodeError, IndexError) as error:
            raise NoServer(f"process {self._pid} is of another version of penstock: {error}") from None

    def _open_pages(self, *names: str) -> list[lowlevel.Segment]:
        """Raises NoServer if the server has ended."""
        if _start_of(self._pid) != self._start:
            raise NoServer(f"process {self._pid} has ended")
        try:
            return [page_at(self._pid, *self._pages[name]) for name in names]
        except (OSError, PenstockError) as error:
            raise NoServer(f"process {self._pid} is ending: {error}") from None

    def board(self) -> StatusBoard:
        """Opens the status board. Raises NoServer if the server has ended."""
        (page,) = self._open_pages("board")
        return StatusBoard(page)

    def history(self, since: float = 0.0) -> HistoryView:
        """Returns the history after a time, in seconds since 1970. Raises NoServer if the server has ended."""
        (page,) = self._open_pages("history")
        return ServerHistory(page, _servers_of(self.info())).view(since)

    def waiting_requests(self) -> int:
        """Returns the number of requests, new or lost by a group, that wait for a group in the server processes. Raises
        NoServer if the server has ended."""
        info, tally = self._open_pages(NAME, "tally")
        return sum(
            row.queue[QueueCounters.WAITING]
            + sum(served.migration[MigrationCounters.WAITING] for served in row.engines)
            for row in ServerCounters(tally, _servers_of(ServerInfo.read(info))).rows
        )

    def info(self) -> ServerInfo:
        """Returns what does not change while the server runs. Raises NoServer."""
        try:
            return ServerInfo.read(page_at(self._pid, *self._pages[NAME]))
        except (OSError, PenstockError, msgspec.DecodeError) as error:
            raise NoServer(f"process {self._pid} cannot be looked into: {error}") from None

    def _moment(self) -> ServerSnapshot:
        server_info_page, board_page, tally_page = (page_at(self._pid, *self._pages[name]) for name in PAGES[:3])
        server_info = ServerInfo.read(server_info_page)
        board, tally = StatusBoard(board_page), ServerCounters(tally_page, _servers_of(server_info))
        segments = [snapshot_of(self._pid, number, place) for number, place in self._others]
        processes = tuple(_processes(server_info, board, tally))
        titles = {process.pid: process.title for process in processes if process.pid}
        channels = tuple(_channel(segment, titles) for segment in segments if "senders" in segment)
        return ServerSnapshot(
            at=time.monotonic(),
            time=time.time(),
            server_info=server_info,
            is_draining=board.is_draining,
            memory=memory_by_kind([*self._raw, *segments], [server_info.pid]),
            processes=processes,
            channels=channels,
            awaited=awaited_processes(channels, _idle(processes, board)),
            stores=tuple(_store(each) for each in segments if "store" in each and each["name"] != RESPONSE_STORE),
            **_counters(board, tally),
        )


def _servers_of(server_info: ServerInfo) -> int:
    return sum(member.kind == "server" for member in server_info.processes)


def _start_of(pid: int) -> int:
    process = process_of(pid)
    if process is None or process.state == "Z":
        raise NoServer(f"there is no process {pid}")
    return process.start


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _processes(server_info: ServerInfo, board: StatusBoard, tally: ServerCounters) -> Iterator[ProcessView]:
    rows, is_draining = board.rows, board.is_draining
    yield _process(
        ProcessId("launcher", 0, 0, 1), 0, ProcessEntry(1, server_info.pid), "draining" if is_draining else "serves"
    )
    for member, life in zip(server_info.processes, board.members, strict=True):
        if member.kind == "server":
            row = tally.rows[member.index]
            serves = row[ProcessCounters.SERVING] == 1 and row[ProcessCounters.PID] == life.pid
        else:
            group = rows[member.group]
            is_absent = member.kind == "output" and group[StatusBoard.ABSENT_OUTPUTS] >> member.index & 1
            serves = group[StatusBoard.SERVING] == life.incarnation and not is_absent
        node = {"bridge": server_info.node_of(member.group), "remote_ranks": member.index}.get(member.kind, 0)
        yield _process(member, node, life, "draining" if is_draining else "serves" if serves else "starting")


def _idle(processes: tuple[ProcessView, ...], board: StatusBoard) -> frozenset[str]:
    """Returns the titles of the processes of groups without an open request."""
    idle = {group for group, row in enumerate(board.rows) if not row[StatusBoard.OPEN]}
    return frozenset(process.title for process in processes if process.is_of_group and process.group in idle)


def _process(member: ProcessId, node: int, life: ProcessEntry, otherwise: str) -> ProcessView:
    """Returns the view of a process. `node`: behind a bridge; `otherwise`: the state of a living process that is not
    stopped."""
    place = member.kind, member.group, member.index
    process = process_of(life.pid) if life.pid else None
    if process is None or process.state == "Z":
        state = "gone" if life.incarnation else "starting"
        return ProcessView(*place, 0, life.incarnation, state, 0.0, None, node, life.life)
    state = "stopped" if process.state in "Tt" else otherwise
    used, private = process.cpu_seconds, private_nbytes_of(life.pid)
    return ProcessView(*place, life.pid, life.incarnation, state, used, private, node, life.life)


# ── segments ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _channel(segment: Json, titles: dict[int, str]) -> ChannelView:
    """Returns the view of a channel. `titles`: of the processes, by pid."""
    senders, receivers = segment["senders"], segment["receivers"]
    live = [receiver for receiver in receivers if receiver["state"] == "live"]
    slowest = max(live, key=lambda receiver: (receiver["records_behind"], receiver["nbytes_behind"]), default=None)
    behind = 0 if slowest is None else slowest["records_behind"]
    return ChannelView(
        name=segment["name"],
        kind=segment["kind"],
        records=sum(sender["records"] for sender in senders),
        nbytes=sum(sender["nbytes"] for sender in senders),
        sleeps=sum(end["parks"] for end in (*senders, *receivers)),
        behind=behind,
        behind_nbytes=0 if slowest is None else slowest["nbytes_behind"],
        slowest=slowest["name"] if slowest is not None and behind else "",
        blocked=max((sender["waiting_ns"] for sender in senders if sender["state"] == "live"), default=0) / 1e9,
        longest_blocked=max((sender["longest_wait_ns"] for sender in senders), default=0) / 1e9,
        spills=sum(sender["spills"] for sender in senders),
        exhaustions=sum(sender["exhaustions"] for sender in senders),
        fill=0.0 if slowest is None else slowest["nbytes_behind"] / segment["lane_nbytes"],
        ends=tuple(
            EndView(
                titles.get(end["pid"], end["name"]),
                side,
                end["waiting_ns"] / 1e9,
                end.get("records_behind", 0),
                end.get("records", 0),
                end.get("nbytes", 0),
            )
            for side, ends in ((True, senders), (False, receivers))
            for end in ends
            if end["state"] == "live"
        ),
    )


def _store(segment: Json) -> StoreView:
    pool, store = segment["pool"][0], segment["store"][0]
    holders = sorted(pool["holders"], key=lambda entry: -entry["nbytes"])[:HOLDERS]
    return StoreView(
        name=segment["name"],
        nbytes=pool["nbytes"],
        kept_nbytes=store["nbytes"],
        taken_nbytes=pool["taken_nbytes"],
        keys=store["keys"],
        held_keys=sum(entry["holders"] > 0 for entry in store["items"]),
        holders=tuple(HolderView(entry["name"], entry["blocks"], entry["nbytes"]) for entry in holders),
        **{name: store[name] for name in ("hits", "misses", "puts", "evictions", "evicted_nbytes")},
    )


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _counters(board: StatusBoard, tally: ServerCounters) -> dict[str, tuple[CounterView, ...]]:
    rows = counter_rows(board, tally)
    return {
        part: tuple(
            CounterView.of((counter, rows[kind][number]) for kind in kinds for counter in kind.DECLARED)
            for number in range(len(rows[kinds[0]]))
        )
        for part, kinds in PARTS.items()
    }
