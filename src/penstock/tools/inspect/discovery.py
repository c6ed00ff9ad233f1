"""Finds the segments of a process tree or a ticket, and all processes that share them.

`segments` reads one segment, and `diagnosis` explains the waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import PenstockError
from penstock.memory import Ticket
from penstock.tools.inspect.diagnosis import verdict_of
from penstock.tools.inspect.node_memory import memory_by_kind
from penstock.tools.inspect.processes import Process, all_processes, owner_of, process_of, with_descendants
from penstock.tools.inspect.segments import Json, Place, descriptors_of, snapshot_of

MAX_FOLLOWED = 1024  # processes; a corrupt segment names as many as it likes


class NotFound(Exception):
    """The target does not exist or has no segments; the text is one line."""


def look(target: int | Ticket) -> Json:
    """Returns the segments of a process and its descendants, or of a ticket, those of all peers, and a verdict.

    `asked` marks the segments of the target. The others are reached through peers, for the sake of the verdict: a
    process that blocks a peer may itself wait in another segment. Raises NotFound.
    """
    everybody = all_processes()
    roots = roots_of(target, everybody)
    segments: dict[Place, Json] = {}
    unreadable: dict[Place, str] = {}
    closed_to_us: list[str] = []
    queue = list(roots)
    for pid in queue:  # grows while it is walked
        try:
            held = list(descriptors_of(pid))
        except FileNotFoundError:
            continue
        except PermissionError:
            closed_to_us.append(f"process {pid} belongs to {owner_of(pid)}: only that user can look into it")
            continue
        for number, place in held:
            if place in segments:
                segments[place]["held_by"].append({"pid": pid, "fd": number})
                continue
            try:
                snapshot = snapshot_of(pid, number, place)
            except (OSError, PenstockError, ValueError) as error:
                unreadable[place] = f"descriptor {number} of process {pid}: {error}"
                continue
            snapshot["inode"] = place[1]
            snapshot["asked"] = pid in roots and is_meant(target, place[1], snapshot["nonce"])
            snapshot["held_by"] = [{"pid": pid, "fd": number}]
            segments[place] = snapshot
            for peer in snapshot["peers"]:
                is_there = peer["state"] not in ("dead", "left") and peer["pid"] in everybody
                if is_there and peer["pid"] not in queue and len(queue) < MAX_FOLLOWED:
                    queue.append(peer["pid"])
    if not any(segment["asked"] for segment in segments.values()):
        reasons = [*closed_to_us, *unreadable.values()]
        more = f" (and {len(reasons) - 1} more like that)" if len(reasons) > 1 else ""
        raise NotFound(reasons[0] + more if reasons else nothing_of(target, everybody, len(roots)))
    in_order = sorted(
        segments.values(),
        key=lambda segment: (not segment["asked"], segment["kind"], segment["name"], segment["inode"]),
    )
    names = names_of(in_order)
    name_peers(in_order, names)
    shown = [everybody[pid] for pid in queue if pid in everybody and (pid in roots or pid in names)]
    return {
        "target": str(target),
        "verdict": verdict_of(in_order),
        "processes": [
            {
                "pid": process.pid,
                "parent": process.parent,
                "command": process.name,
                "state": process.state,
                "asked": process.pid in roots,
                "peers": sorted(names.get(process.pid, ())),
            }
            for process in shown
        ],
        "segments": in_order,
        "memory": memory_by_kind(
            (segment for segment in in_order if segment["asked"]), [] if isinstance(target, Ticket) else roots
        ),
        "unreadable": [*closed_to_us, *unreadable.values()],
    }


def roots_of(target: int | Ticket, everybody: dict[int, Process]) -> list[int]:
    pid = target.pid if isinstance(target, Ticket) else target
    process = process_of(pid) if pid > 0 else None
    if process is None:
        raise NotFound(f"there is no process {pid}")
    if isinstance(target, int):
        return with_descendants(pid, everybody)
    if process.start != target.start:
        raise NotFound(f"the owner of the ticket, process {pid}, is gone: the number belongs to another one by now")
    return [pid]


def is_meant(target: int | Ticket, inode: int, nonce: str) -> bool:
    return not isinstance(target, Ticket) or (inode, int(nonce, 16)) == (target.inode, target.nonce)


def nothing_of(target: int | Ticket, everybody: dict[int, Process], many: int) -> str:
    if isinstance(target, Ticket):
        return f"the ticket's owner, process {target.pid}, has closed the segment"
    name = everybody[target].name if target in everybody else "?"
    among = f", and none of its {many - 1} descendants," if many > 1 else ""
    return f"process {target} ({name}){among} has no segment of penstock open"


def names_of(segments: Iterable[Json]) -> dict[int, set[str]]:
    """Returns the names of each process. A name that is only its pid counts where the process has no other."""
    names: dict[int, set[str]] = {}
    for segment in segments:
        for peer in segment["peers"]:
            if peer["state"] not in ("dead", "left"):
                names.setdefault(peer["pid"], set()).add(peer["name"])
    return {pid: (own - {unnamed(pid)}) or own for pid, own in names.items()}


def name_peers(segments: Iterable[Json], names: dict[int, set[str]]) -> None:
    """Gives peers that joined without a name, as users of a store do, the name that their process has elsewhere."""
    for segment in segments:
        named: dict[int, str] = {}
        for peer in segment["peers"]:
            if peer["name"] == unnamed(peer["pid"]) and peer["pid"] in names:
                peer["name"] = named[peer["index"]] = min(names[peer["pid"]])
        for pool in segment.get("pool", ()):
            for holder in pool["holders"]:
                holder["name"] = named.get(holder["peer"], holder["name"])


def unnamed(pid: int) -> str:
    """Returns the name of a peer that joined without one."""
    return f"pid {pid}"


def holders_of_segments() -> list[tuple[Process, int]]:
    """Returns each process with open segments, and their number, if this user may read it."""
    holders = []
    for process in all_processes().values():
        try:
            places = {place for _, place in descriptors_of(process.pid)}
        except OSError:
            continue
        if places:
            holders.append((process, len(places)))
    return holders
