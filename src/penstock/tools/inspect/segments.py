"""Finds the segments among a process's descriptors, takes their snapshots, and names their peers and ends in texts.

The native core takes the snapshot of a segment. Its numbers may be garbage, because any process of the segment may have
written them: no code here trusts a number.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from typing import Any

from penstock import _native
from penstock.errors import LayoutMismatch
from penstock.memory import Segment
from penstock.tools.format import printable

PAGE_KIND = "segment"  # the kind of a server's pages; all segments of a different kind are channels and pools
Json = dict[str, Any]
Place = tuple[int, int]  # device and inode: the same segment in whatever process


def descriptors_of(pid: int) -> Iterator[tuple[int, Place]]:
    """Yields the descriptors of a process that are segments. Raises PermissionError, FileNotFoundError."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if os.readlink(path).startswith("/memfd:penstock:"):
                status = os.stat(path)  # before opening: opening a pipe or a device may have effects
                if stat.S_ISREG(status.st_mode):
                    yield int(number), (status.st_dev, status.st_ino)
        except (OSError, ValueError):
            continue  # closed meanwhile


def open_place(pid: int, number: int, place: Place) -> int:
    """Opens a segment for reading. Raises OSError, and FileNotFoundError if the descriptor is another file by now."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != place:
        os.close(fd)
        raise FileNotFoundError("closed meanwhile")
    return fd


def page_at(pid: int, number: int, place: Place) -> Segment:
    """Returns the segment, mapped for reading, without joining it as a peer. Raises OSError or PenstockError."""
    return Segment(_native.Segment.adopt(open_place(pid, number, place), True))


def snapshot_of(pid: int, number: int, place: Place) -> Json:
    """Returns the native snapshot of a segment, with the names of its messages. Raises OSError or PenstockError."""
    fd = open_place(pid, number, place)
    snapshot: Json = _native.snapshot(fd)
    if "schema" in snapshot:
        snapshot.update(messages_of(snapshot.pop("schema")))
    return dict(harmless(snapshot))


@functools.lru_cache(maxsize=64)
def messages_of(schema: str) -> Json:
    """Returns the names of a channel's messages, or the error of its description."""
    from penstock.codec.catalogue import Schema  # and numpy, which takes as long as all else that the command imports

    try:
        return {"messages": [message.name for message in Schema.decode(schema.encode()).messages]}
    except LayoutMismatch as error:
        return {"messages": [], "messages_error": str(error)}


def harmless(value: Any) -> Any:
    """Returns the value with all strings printable: a name may have escape sequences for a terminal."""
    if isinstance(value, dict):
        return {key: harmless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [harmless(item) for item in value]
    return printable(value) if isinstance(value, str) else value


# ── a snapshot in texts ──────────────────────────────────────────────────────────────────────────────────────────────
def title_of(segment: Json) -> str:
    is_elsewhere = any(pool["is_elsewhere"] for pool in segment.get("pool", ()))
    return f"{segment['kind']}{' of device memory' if is_elsewhere else ''} '{segment['name']}'"


def states_of(segment: Json) -> dict[int, str]:
    return {peer["index"]: peer["state"] for peer in segment["peers"]}


def state_of(segment: Json, end: Json) -> str:
    if end["state"] != "live":
        return str(end["state"])
    return states_of(segment).get(end["peer"], "unknown")


def name_of(segment: Json, end: Json) -> str:
    """Returns the name of an end's process, as in 'worker 2' (pid 15, stopped)."""
    state = state_of(segment, end)
    return f"'{end['name']}' (pid {end['pid']}{'' if state == 'live' else ', ' + state})"


def peer_at(segment: Json, index: int) -> str:
    """Returns the peer with this index, as in 'worker 2' (pid 15, stopped), or a fixed text if there is none."""
    for peer in segment["peers"]:
        if peer["index"] == index:
            return f"'{peer['name']}' (pid {peer['pid']}{'' if peer['state'] == 'live' else ', ' + peer['state']})"
    return "a peer that is not in the table"


def short_key(item: Json) -> str:
    """Returns the first characters of a store's key."""
    return f"{item['key'][:12]}…"


def behind_of(segment: Json, receiver: Json, lane: int) -> tuple[int, int]:
    """Returns the records and bytes of this sender that this receiver has not released."""
    if len(segment["senders"]) == 1:
        return receiver["records_behind"], receiver["nbytes_behind"]
    for lane_behind in receiver["behind"]:
        if lane_behind["sender"] == lane:
            return lane_behind["records_behind"], lane_behind["nbytes_behind"]
    return 0, 0
