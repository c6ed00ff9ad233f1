"""What running processes' segments tell of themselves, and why somebody waits: seen from outside, nobody is disturbed.

Leaves to the native core: reading one segment (snapshot). Everything here is about several, and about processes. What a
snapshot says may be garbage, because any of its processes may have written it: nothing here trusts a number.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import _native
from penstock.errors import PenstockError
from penstock.memory import Ticket

Json = dict[str, Any]

STUCK_NS = 500_000_000  # shorter waits are ordinary back-pressure, or the work between two steps
LEVELS = ("deadlock", "stuck", "warning", "note", "idle")  # of a sentence, the worst first
MOST_FOLLOWED = 1024  # processes; a corrupt segment names as many as it likes


class NotFound(Exception):
    """There is nothing to look at; the text is one line that says why."""


# ── numbers in words ─────────────────────────────────────────────────────────────────────────────────────────────────
def in_units(nbytes: int) -> str:
    amount = float(nbytes % 2**64)  # the core hands unsigned numbers out as signed ones
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.0f} PiB"


def counted(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"


def in_seconds(ns: float) -> str:
    for limit, factor, unit in ((1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (60e9, 1e9, "s"), (3600e9, 60e9, "min")):
        if ns < limit:
            amount = ns / factor
            return f"{amount:.0f} {unit}" if amount >= 99.5 else f"{amount:.3g} {unit}"
    return f"{ns / 3600e9:.1f} h"


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    name: str
    state: str  # as in /proc/PID/stat: R, S, D, T, Z …
    start: int


def processes() -> dict[int, Process]:
    """Everybody on this machine whom we may see."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := process_of(int(entry))):
            found[process.pid] = process
    return found


def process_of(pid: int, path: str = "/proc/{}/stat") -> Process | None:
    try:
        with open(path.format(pid), "rb") as file:
            text = file.read().decode(errors="replace")
        name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold anything, a ')' too
        fields = rest.split()
        return Process(pid, int(fields[1]), printable(name), fields[0], int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def with_descendants(pid: int, among: dict[int, Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    found = [pid]
    for one in found:
        found.extend(child for child in children.get(one, ()) if child not in found)
    return found


def is_running(pid: int) -> bool:
    """Whether any of its threads is on a processor, or would like to be."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    states = (process_of(int(task), f"/proc/{pid}/task/{{}}/stat") for task in tasks)
    return any(state is not None and state.state == "R" for state in states)


# ── finding segments ─────────────────────────────────────────────────────────────────────────────────────────────────
Place = tuple[int, int]  # device and inode: the same segment in whatever process


def descriptors_of(pid: int) -> Iterator[tuple[int, Place]]:
    """The descriptors of a process that lead to segments. Raises PermissionError, FileNotFoundError."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if os.readlink(path).startswith("/memfd:penstock:"):
                status = os.stat(path)  # before it is opened: opening something else may have effects
                if stat.S_ISREG(status.st_mode):
                    yield int(number), (status.st_dev, status.st_ino)
        except (OSError, ValueError):
            continue  # closed while we looked


def snapshot_of(pid: int, number: int, place: Place) -> Json:
    """Raises OSError or PenstockError."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != place:
        os.close(fd)
        raise FileNotFoundError("closed while we looked")
    found: Json = harmless(_native.snapshot(fd))
    return found


def harmless(value: Any) -> Any:
    """The same without what a terminal might obey: a name may hold anything."""
    if isinstance(value, dict):
        return {key: harmless(one) for key, one in value.items()}
    if isinstance(value, list):
        return [harmless(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def look(target: int | Ticket) -> Json:
    """The whole picture: of the process and its descendants, or of the ticket's segment, and of all that share these.

    `asked` tells the segments of these from those that are only reached through their peers, for the sake of the
    verdict: who holds somebody up may itself be waiting elsewhere. Raises NotFound.
    """
    everybody = processes()
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
                if is_there and peer["pid"] not in queue and len(queue) < MOST_FOLLOWED:
                    queue.append(peer["pid"])
    if not any(segment["asked"] for segment in segments.values()):
        reasons = [*closed_to_us, *unreadable.values()]
        more = f" (and {len(reasons) - 1} more like that)" if len(reasons) > 1 else ""
        raise NotFound(reasons[0] + more if reasons else nothing_of(target, everybody, len(roots)))
    found = sorted(segments.values(), key=lambda one: (not one["asked"], one["kind"], one["name"], one["inode"]))
    names = names_of(found)
    seen = [everybody[pid] for pid in queue if pid in everybody and (pid in roots or pid in names)]
    return {
        "target": str(target),
        "verdict": verdict(found),
        "processes": [
            {
                "pid": one.pid,
                "parent": one.parent,
                "command": one.name,
                "state": one.state,
                "asked": one.pid in roots,
                "peers": sorted(names.get(one.pid, ())),
            }
            for one in seen
        ],
        "segments": found,
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


def owner_of(pid: int) -> str:
    try:
        return f"user '{pwd.getpwuid(os.stat(f'/proc/{pid}').st_uid).pw_name}'"
    except (OSError, KeyError):
        return "another user"


def names_of(segments: Iterable[Json]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for segment in segments:
        for peer in segment["peers"]:
            if peer["state"] not in ("dead", "left"):
                found.setdefault(peer["pid"], set()).add(peer["name"])
    return found


def holders_of_segments() -> list[tuple[Process, int]]:
    """Who, of those we may look into, has segments open, and how many."""
    found = []
    for process in processes().values():
        try:
            places = {place for _, place in descriptors_of(process.pid)}
        except OSError:
            continue
        if places:
            found.append((process, len(places)))
    return found


# ── why somebody waits ───────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Blocker:
    """Somebody for whom somebody waits: the process, how it is, and a clause about it."""

    pid: int
    state: str  # of the peer; "expected": nobody yet
    clause: str


@dataclass(frozen=True)
class Wait:
    """An end that waits, or all receivers of one broadcast that do, and for whom."""

    key: tuple[int, str, int]
    pids: tuple[int, ...]
    since_ns: int
    who: str  # "sender 'core' (pid 12)"
    what: str  # "for room in broadcast 'steps'"
    on: tuple[Blocker, ...]  # the one most in the way is the first
    is_for_records: bool = False
    is_for_all: bool = False  # of these; otherwise any of them would do

    @property
    def clause(self) -> str:
        return f"{self.what} since {in_seconds(self.since_ns)}"


def verdict(segments: list[Json]) -> list[Json]:
    """Sentences, the worst first: {"level", "kind", "text", "pids"}."""
    waits = [wait for segment in segments for wait in waits_of(segment)]
    by_pid: dict[int, list[Wait]] = {}
    for wait in sorted(waits, key=lambda one: (one.is_for_records, -one.since_ns)):
        for pid in wait.pids:
            by_pid.setdefault(pid, []).append(wait)
    sentences: list[Json] = []
    in_cycles: set[tuple[int, str, int]] = set()
    for wait in sorted(waits, key=lambda one: -one.since_ns):
        path: list[Wait] = []
        level, text = follow(wait, by_pid, path)
        if level == "deadlock":
            if wait.key in in_cycles:
                continue
            in_cycles.update(one.key for one in path)
        pids = sorted({pid for one in path for pid in one.pids})
        verb = "waits" if len(wait.pids) == 1 else "wait"
        sentences.append(sentence(level, "wait", f"{wait.who} {verb} {text}", pids))
    for segment in segments:
        sentences.extend(about_peers(segment))
        sentences.extend(about_ends(segment))
        sentences.extend(about_pool(segment))
    unique = {one["text"]: one for one in sentences}
    return sorted(unique.values(), key=lambda one: LEVELS.index(one["level"]))


def sentence(level: str, kind: str, text: str, pids: Iterable[int] = ()) -> Json:
    return {"level": level, "kind": kind, "text": text, "pids": list(pids)}


def follow(wait: Wait, by_pid: dict[int, list[Wait]], path: list[Wait]) -> tuple[str, str]:
    """How bad it is, and the clauses along the chain of those who wait for each other; `path` receives these waits."""
    path.append(wait)
    waiting_itself = "idle" if wait.is_for_records else "stuck"
    if not wait.on:
        return waiting_itself, wait.clause
    blocker = wait.on[0] if wait.is_for_all else min(wait.on, key=lambda one: suspicion(one, by_pid))
    level, text = follow_blocker(wait, blocker, by_pid, path)
    if wait.is_for_records and len(wait.on) > 1:  # the others may send, too
        level = max(level, "warning", key=LEVELS.index) if level != waiting_itself else level
    return min(level, waiting_itself, key=LEVELS.index), f"{wait.clause}: {blocker.clause}{text}"


def suspicion(blocker: Blocker, by_pid: dict[int, list[Wait]]) -> int:
    """Of several senders, or holders of memory, any one of whom would do: the smallest is the one to ask about."""
    if blocker.state in ("stopped", "dying"):
        return 0
    if blocker.state != "live":
        return 4
    waits = by_pid.get(blocker.pid, [])
    return 2 if not waits else 1 if not waits[0].is_for_records else 3


def follow_blocker(wait: Wait, blocker: Blocker, by_pid: dict[int, list[Wait]], path: list[Wait]) -> tuple[str, str]:
    waiting_itself = "idle" if wait.is_for_records else "stuck"
    if blocker.state == "expected":
        return "warning" if wait.is_for_records else "stuck", ""
    if blocker.state == "stopped":
        return "stuck", f"; `kill -CONT {blocker.pid}` lets it go on"
    if blocker.state != "live":
        return waiting_itself, ""
    following = by_pid.get(blocker.pid, [])
    again = next((one for one in following if one in path), None)
    if again is not None:
        cycle = path[path.index(again) :]
        if all(one.is_for_records for one in cycle):
            return waiting_itself, f", and waits for {again.who} in turn: nothing is on its way between them"
        running = next((pid for one in cycle for pid in one.pids if is_running(pid)), None)
        doubt = f" (unless another thread of pid {running}, which is running, acts)" if running is not None else ""
        return "deadlock", f", and waits for {again.who} in turn: a deadlock{doubt}"
    if following:
        level, text = follow(following[0], by_pid, path)
        return level, f", and itself waits {text}"
    process = process_of(blocker.pid)
    state = {"R": "which is running", "D": "which is blocked in the kernel"}.get(process.state if process else "")
    return waiting_itself, f", {state or 'which waits for nobody here: it is busy, or asleep elsewhere'}"


def title_of(segment: Json) -> str:
    return f"{segment['kind']} '{segment['name']}'"


def states_of(segment: Json) -> dict[int, str]:
    return {peer["index"]: peer["state"] for peer in segment["peers"]}


def state_of(segment: Json, end: Json) -> str:
    if end["state"] != "live":
        return str(end["state"])
    return states_of(segment).get(end["peer"], "unknown")


def name_of(segment: Json, end: Json) -> str:
    """'worker 2' (pid 15, stopped)"""
    state = state_of(segment, end)
    return f"'{end['name']}' (pid {end['pid']}{'' if state == 'live' else ', ' + state})"


def behind_of(segment: Json, receiver: Json, lane: int) -> tuple[int, int]:
    """Records and bytes that this receiver has not given back to this sender."""
    if len(segment["senders"]) == 1:
        return receiver["records_behind"], receiver["nbytes_behind"]
    for one in receiver["behind"]:
        if one["sender"] == lane:
            return one["records_behind"], one["nbytes_behind"]
    return 0, 0


def waits_of(segment: Json) -> Iterator[Wait]:
    for sender in segment.get("senders", ()):
        if state_of(segment, sender) == "live" and sender["waiting_ns"] >= STUCK_NS:
            yield sender_wait(segment, sender)
    waiting = [
        one
        for one in segment.get("receivers", ())
        if state_of(segment, one) == "live" and one["waiting_ns"] >= STUCK_NS
    ]
    with_nothing_behind = [one for one in waiting if one["records_behind"] == 0]
    for peer in segment["peers"]:
        if peer["state"] == "live" and peer["waiting_for_memory_ns"] >= STUCK_NS:
            yield memory_wait(segment, peer)
    if with_nothing_behind:
        yield receivers_wait(segment, with_nothing_behind)
    for receiver in waiting:
        if receiver["records_behind"] != 0:  # which it has read: it holds views of them
            yield receivers_wait(segment, [receiver])


def sender_wait(segment: Json, sender: Json) -> Wait:
    lane = sender["index"]
    behind = [(*behind_of(segment, one, lane)[::-1], one) for one in segment["receivers"]]
    behind.sort(key=lambda one: -one[0])
    on = []
    for nbytes, records, receiver in behind:
        if nbytes <= 0:
            continue
        if receiver["state"] == "expected":
            clause = f"receiver {receiver['index']}, which has never attached,"
        else:
            clause = f"receiver {receiver['index']} {name_of(segment, receiver)}"
        held = ", which it has read and holds views of" if is_held(receiver) else ""
        clause += f" is {counted(records, 'record')} ({in_units(nbytes)}) behind{held}"
        on.append(Blocker(receiver["pid"], state_of(segment, receiver), clause))
    key = (segment["inode"], "sender", lane)
    who = f"sender {name_of(segment, sender)}"
    what = f"for room in {title_of(segment)}"
    if sender["waits_for_memory"]:
        what = f"for memory in the pool of {title_of(segment)}"
        on = [*others_than(sender["pid"], biggest_holders(segment)), *on]
    is_for_all = not sender["waits_for_memory"]
    return Wait(key, (sender["pid"],), sender["waiting_ns"], who, what, tuple(on), is_for_all=is_for_all)


def memory_wait(segment: Json, peer: Json) -> Wait:
    key = (segment["inode"], "peer", peer["index"])
    on = others_than(peer["pid"], biggest_holders(segment))
    who = f"'{peer['name']}' (pid {peer['pid']})"
    return Wait(
        key, (peer["pid"],), peer["waiting_for_memory_ns"], who, f"for memory of {title_of(segment)}", tuple(on)
    )


def others_than(pid: int, holders: Iterable[Blocker]) -> list[Blocker]:
    """Without the one that waits itself, unless it is the only one."""
    every = list(holders)
    return [one for one in every if one.pid != pid] or every


def is_held(receiver: Json) -> bool:
    return bool(receiver["waiting_ns"] >= STUCK_NS and receiver["records_behind"] != 0)


def biggest_holders(segment: Json) -> Iterator[Blocker]:
    by_index = {peer["index"]: peer for peer in segment["peers"]}
    for pool in segment.get("pool", ()):
        for holder in sorted(pool["holders"], key=lambda one: (-one["nbytes"], -one["granted"]))[:4]:
            peer = by_index.get(holder["peer"])
            if peer is None:
                continue
            state = "" if peer["state"] == "live" else f", {peer['state']}"
            clause = f"'{peer['name']}' (pid {peer['pid']}{state}) holds {in_units(holder['nbytes'])} of it"
            clause += f" in {counted(holder['blocks'], 'block')}"
            if holder["granted"] > 0:
                clause += f", and was granted {holder['granted']} more that it has not opened"
            yield Blocker(peer["pid"], peer["state"], clause)


def receivers_wait(segment: Json, receivers: list[Json]) -> Wait:
    first = receivers[0]
    on = []
    for sender in segment["senders"]:
        if sender["state"] == "expected" and len(segment["senders"]) > 1:
            continue  # an inbox has room for more senders than come
        last = sender["last_sent_ns"]
        sent = f"sent last {in_seconds(last)} ago" if last > 0 else "has not sent yet"
        if sender["state"] == "expected":
            clause = "its sender has never attached"
        else:
            clause = f"its sender {name_of(segment, sender)} {sent}"
        on.append(Blocker(sender["pid"], state_of(segment, sender), clause))
    on.sort(key=lambda one: one.state in ("closed", "dead"))
    if first["records_behind"] != 0:
        clause = f"it holds views of {counted(first['records_behind'], 'record')} ({in_units(first['nbytes_behind'])})"
        on = [Blocker(one.pid, one.state, f"{clause}; {one.clause}") for one in on]
    key = (segment["inode"], "receiver", first["index"])
    names = ", ".join(name_of(segment, one) for one in receivers[:4])
    more = f" and {len(receivers) - 4} more" if len(receivers) > 4 else ""
    who = f"receiver{'s' if len(receivers) > 1 else ''} {names}{more}"
    since = min(one["waiting_ns"] for one in receivers)
    pids = tuple(one["pid"] for one in receivers)
    return Wait(key, pids, since, who, f"for records of {title_of(segment)}", tuple(on), is_for_records=True)


def about_peers(segment: Json) -> Iterator[Json]:
    live = sum(peer["state"] == "live" for peer in segment["peers"])
    for peer in segment["peers"]:
        who = f"'{peer['name']}' (pid {peer['pid']})"
        if peer["state"] == "stopped":
            text = f"{who} is stopped, by a signal or a debugger: it keeps all that it holds"
            yield sentence("warning", "stopped", f"{text}; `kill -CONT {peer['pid']}` lets it go on", [peer["pid"]])
        elif peer["state"] == "dying":
            text = f"{who} of {title_of(segment)} has died, and what it held has not been given back"
            why = "yet" if live else "because no peer is left that could"
            yield sentence("warning" if live else "note", "dying", f"{text} {why}", [peer["pid"]])
        elif peer["state"] == "dead":
            text = f"{who} of {title_of(segment)} died: {peer['how']}"
            if peer["reaped_blocks"] > 0:
                text += f"; {counted(peer['reaped_blocks'], 'block')} ({in_units(peer['reaped_nbytes'])}) given back"
            yield sentence("note", "dead", text, [peer["pid"]])


def about_ends(segment: Json) -> Iterator[Json]:
    if segment["age_ns"] < STUCK_NS:
        return
    receivers, senders = segment.get("receivers", []), segment.get("senders", [])
    missing = [str(one["index"]) for one in receivers if one["state"] == "expected"]
    if missing:
        which = f"{missing[0]} has" if len(missing) == 1 else f"{', '.join(missing)} have"
        text = f"of the {len(receivers)} receivers of {title_of(segment)}, {which} never attached"
        most = max(one["records_behind"] for one in receivers if one["state"] == "expected")
        text += f": {counted(most, 'record')} kept for them" if most > 0 else ""
        yield sentence("note", "expected", text)
    if senders and all(one["state"] == "expected" for one in senders):
        yield sentence("note", "expected", f"no sender of {title_of(segment)} has ever attached")
    for role, ends in (("sender", senders), ("receiver", receivers)):
        for end in ends:
            if end["state"] == "dead":
                text = f"{role} {end['index']} of {title_of(segment)} died, and nobody has taken its place"
                yield sentence("note", "dead", text, [end["pid"]] if end["pid"] > 0 else [])


def about_pool(segment: Json) -> Iterator[Json]:
    states = states_of(segment)
    for pool in segment.get("pool", ()):
        of = f"the pool {'' if segment['kind'] == 'pool' else 'of ' + segment['kind'] + ' '}'{segment['name']}'"
        most = next(biggest_holders(segment), None)
        holder = f"; {most.clause}" if most else ""
        is_full = pool["taken_nbytes"] * 10 > pool["nbytes"] * 9 or pool["blocks"] >= pool["max_blocks"]
        full = (
            f"{in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} taken, "
            f"{pool['blocks']} of {pool['max_blocks']} blocks{holder}"
        )
        pids = [most.pid] if most else []
        if pool["exhaustions"] > 0:
            times = counted(pool["exhaustions"], "time")
            word = "is nearly exhausted, and was refused" if is_full else "was exhausted"
            yield sentence("warning" if is_full else "note", "pool", f"{of} {word} {times}: {full}", pids)
        elif is_full:
            yield sentence("note", "pool", f"{of} is nearly exhausted: {full}", pids)
        locker = pool["lock_holder"]
        if locker >= 0 and states.get(locker, "unknown") not in ("live", "left"):
            peer = next((one for one in segment["peers"] if one["index"] == locker), None)
            who = f"'{peer['name']}' (pid {peer['pid']}, {peer['state']})" if peer else "nobody we know"
            text = f"the lock of {of} is held by {who}: nobody can take a block"
            yield sentence("stuck", "lock", text, [peer["pid"]] if peer else [])


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables_of(seen: Json) -> Iterator[Table]:
    holders = {one["pid"] for segment in seen["segments"] for one in segment["held_by"]}
    rows = [
        (str(one["pid"]), str(one["parent"]), one["command"], one["state"], ", ".join(one["peers"]))
        for one in seen["processes"]
        if one["pid"] in holders
    ]
    yield Table("processes", ("pid", "parent", "command", "state", "known as"), rows)
    for segment in seen["segments"]:
        if segment["asked"]:
            yield from tables_of_segment(segment)


def tables_of_segment(segment: Json) -> Iterator[Table]:
    sizes = f"{in_units(segment['claimed_nbytes'])} claimed of {in_units(segment['nbytes'])}"
    title = f"{title_of(segment)}: {sizes}, {in_seconds(max(segment['age_ns'], 0))} old, inode {segment['inode']}"
    peers = [
        (str(one["index"]), one["name"], str(one["pid"]), peer_state(one), str(one["epoch"]), one["how"])
        for one in segment["peers"]
    ]
    yield Table(title, ("peer", "name", "pid", "state", "epoch", "how it ended"), peers)
    ends = [end_row(segment, "sender", one) for one in segment.get("senders", ())]
    ends += [end_row(segment, "receiver", one) for one in segment.get("receivers", ())]
    if ends:
        columns = ("end", "who", "state", "records", "bytes", "behind", "furthest", "longest wait", "spins", "parks",
                   "wakes", "spilled", "exhausted")  # fmt: skip
        yield Table("", columns, ends)
    for pool in segment.get("pool", ()):
        if segment["kind"] != "pool" and pool["takes"] == 0:
            continue  # a channel without long records
        title = (
            f"pool of '{segment['name']}': {in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} taken in "
            f"{pool['blocks']} blocks, largest free {in_units(pool['largest_free_nbytes'])}, {pool['takes']} takes, "
            f"{pool['exhaustions']} exhaustions, {pool['recoveries']} recoveries, {pool['stale_refs']} stale refs"
        )
        names = {one["index"]: one["pid"] for one in segment["peers"]}
        rows = [
            (one["name"], str(names.get(one["peer"], "?")), str(one["blocks"]), in_units(one["nbytes"]),
             str(one["granted"]))
            for one in pool["holders"]
        ]  # fmt: skip
        yield Table(title, ("holder", "pid", "blocks", "bytes", "granted, not yet opened"), rows)


def peer_state(peer: Json) -> str:
    since = peer["waiting_for_memory_ns"]
    return f"waiting for memory {in_seconds(since)}" if peer["state"] == "live" and since > 0 else str(peer["state"])


def end_row(segment: Json, role: str, end: Json) -> tuple[str, ...]:
    state = state_of(segment, end)
    if state == "live" and end["waiting_ns"] > 0:
        is_idle = role == "receiver" and end["records_behind"] == 0
        state = f"{'idle' if is_idle else 'waiting'} {in_seconds(end['waiting_ns'])}"
    behind = ""
    if role == "receiver":
        behind = f"{end['records_behind']} ({in_units(end['nbytes_behind'])})" if end["records_behind"] else "0"
    return (
        f"{role} {end['index']}",
        "" if end["state"] == "expected" else f"{end['name']} ({end['pid']})",
        state,
        str(end["records"]),
        in_units(end["nbytes"]),
        behind,
        in_units(end["furthest_behind_nbytes"]),
        in_seconds(max(end["longest_wait_ns"], 0)),
        str(end["spins"]),
        str(end["parks"]),
        str(end["wakes"]),
        str(end.get("spills", "")),
        str(end.get("exhaustions", "")),
    )


def headline(seen: Json) -> str:
    bad = [one for one in seen["verdict"] if one["level"] in ("deadlock", "stuck")]
    asked = sum(one["asked"] for one in seen["segments"])
    if bad:
        return "somebody is stuck:"
    if any(one["level"] == "warning" for one in seen["verdict"]):
        return "somebody may be stuck:"
    return f"nobody is stuck: {asked} segments, {len(seen['processes'])} processes"


def show(seen: Json) -> None:
    """Prints it for a person: with rich if that is installed, as plain text otherwise."""
    lines = [headline(seen), *(f"{one['level']:>8}: {one['text']}" for one in seen["verdict"])]
    lines += [f"unreadable: {text}" for text in seen["unreadable"]]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print("\n".join(lines))
        for table in tables_of(seen):
            print("\n" + plain(table))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    styles = {"deadlock": "bold red", "stuck": "bold red", "warning": "yellow", "idle": "dim"}
    for line in lines:
        # Text, not a string: a name may look like markup
        console.print(Text(line, style=styles.get(line.partition(":")[0].strip(), "")), soft_wrap=True)
    for table in tables_of(seen):
        if table.title:
            console.print(Text("\n" + table.title, style="bold"), soft_wrap=True)
        if not table.rows:
            continue
        shown = RichTable(box=box.SIMPLE, pad_edge=False)
        for column in table.columns:
            shown.add_column(column)
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)


def plain(table: Table) -> str:
    if not table.rows:
        return table.title
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*([table.title] if table.title else []), *(f"  {line}" for line in lines)])
