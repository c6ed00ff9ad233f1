"""Finds the waits in one segment: which ends and peers wait, for what, since when, and which processes block them.

`diagnosis` follows them from segment to segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.tools.format import counted, in_seconds, in_units
from penstock.tools.inspect.owed_replies import OwedReply, owed_to
from penstock.tools.inspect.segments import Json, behind_of, name_of, state_of, title_of

STUCK_NS = 500_000_000  # shorter waits are ordinary back-pressure, or the work between two steps


@dataclass(frozen=True)
class Blocker:
    """A process for which an end or a peer waits, its state, and a clause about it."""

    pid: int
    state: str  # of the peer; "expected": none has attached yet
    clause: str


@dataclass(frozen=True)
class Wait:
    """A waiting end or peer, or all waiting receivers of one broadcast, and the processes that block it."""

    key: tuple[int, str, int]
    pids: tuple[int, ...]
    since_ns: int
    waiter: str  # "sender 'core' (pid 12)"
    purpose: str  # "for room in broadcast 'steps'"
    on: tuple[Blocker, ...]  # the worst one first
    is_for_records: bool = False
    owed: OwedReply | None = None  # the wait is for a reply: its process is not idle
    is_for_all: bool = False  # every blocker must act; otherwise any of them can end the wait

    @property
    def clause(self) -> str:
        return f"{self.purpose} since {in_seconds(self.since_ns)}"

    @property
    def level(self) -> str:
        """The level of the wait by itself, whatever its blockers do."""
        return "warning" if self.owed is not None else "idle" if self.is_for_records else "stuck"

    @property
    def blocking_pids(self) -> tuple[int, ...]:
        """The processes without which the wait does not end."""
        return self.owed.unfinished_pids if self.owed is not None else tuple(blocker.pid for blocker in self.on)


def all_waits(segments: Sequence[Json]) -> Iterator[Wait]:
    """Yields the waits in all segments, and says of each wait for a reply which step the reply is owed for."""
    for segment in segments:
        for wait in waits_of(segment):
            yield wait_for_reply(wait, segment, segments) if wait.is_for_records and len(wait.pids) == 1 else wait


def wait_for_reply(wait: Wait, segment: Json, segments: Sequence[Json]) -> Wait:
    """Returns the wait as one for a reply, or unchanged if no process owes its process a reply."""
    receiver = next(end for end in segment["receivers"] if end["index"] == wait.key[2])
    owed = max(owed_to(segment, receiver, segments), key=lambda reply: reply.since_ns, default=None)
    if owed is None:
        return wait
    state = next(blocker.state for blocker in wait.on if blocker.pid == owed.worker)
    on = (Blocker(owed.worker, state, owed.clause),)
    return replace(wait, purpose="for a reply", since_ns=owed.since_ns, on=on, owed=owed)


def waits_of(segment: Json) -> Iterator[Wait]:
    for sender in segment.get("senders", ()):
        if state_of(segment, sender) == "live" and sender["waiting_ns"] >= STUCK_NS:
            yield sender_wait(segment, sender)
    waiting = [
        receiver
        for receiver in segment.get("receivers", ())
        if state_of(segment, receiver) == "live" and receiver["waiting_ns"] >= STUCK_NS
    ]
    with_nothing_behind = [receiver for receiver in waiting if receiver["records_behind"] == 0]
    for peer in segment["peers"]:
        if peer["state"] == "live" and peer["waiting_for_memory_ns"] >= STUCK_NS:
            yield memory_wait(segment, peer)
    if with_nothing_behind:
        yield receivers_wait(segment, with_nothing_behind)
    for receiver in waiting:
        if receiver["records_behind"] != 0:  # it has read them, and holds views of them
            yield receivers_wait(segment, [receiver])


def sender_wait(segment: Json, sender: Json) -> Wait:
    lane = sender["index"]
    behind = [(*behind_of(segment, receiver, lane)[::-1], receiver) for receiver in segment["receivers"]]
    behind.sort(key=lambda entry: -entry[0])
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
    waiter = f"sender {name_of(segment, sender)}"
    purpose = f"for room in {title_of(segment)}"
    if sender["waits_for_memory"]:
        purpose = f"for memory in the pool of {title_of(segment)}"
        on = [*others_than(sender["pid"], biggest_holders(segment)), *on]
    is_for_all = not sender["waits_for_memory"]
    return Wait(key, (sender["pid"],), sender["waiting_ns"], waiter, purpose, tuple(on), is_for_all=is_for_all)


def memory_wait(segment: Json, peer: Json) -> Wait:
    key = (segment["inode"], "peer", peer["index"])
    on = others_than(peer["pid"], biggest_holders(segment))
    waiter = f"'{peer['name']}' (pid {peer['pid']})"
    return Wait(
        key, (peer["pid"],), peer["waiting_for_memory_ns"], waiter, f"for memory of {title_of(segment)}", tuple(on)
    )


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
    on.sort(key=lambda blocker: blocker.state in ("closed", "dead"))
    if first["records_behind"] != 0:
        clause = f"it holds views of {counted(first['records_behind'], 'record')} ({in_units(first['nbytes_behind'])})"
        on = [Blocker(blocker.pid, blocker.state, f"{clause}; {blocker.clause}") for blocker in on]
    key = (segment["inode"], "receiver", first["index"])
    names = ", ".join(name_of(segment, receiver) for receiver in receivers[:4])
    more = f" and {len(receivers) - 4} more" if len(receivers) > 4 else ""
    waiters = f"receiver{'s' if len(receivers) > 1 else ''} {names}{more}"
    since = min(receiver["waiting_ns"] for receiver in receivers)
    pids = tuple(receiver["pid"] for receiver in receivers)
    return Wait(key, pids, since, waiters, f"for records of {title_of(segment)}", tuple(on), is_for_records=True)


def others_than(pid: int, holders: Iterable[Blocker]) -> list[Blocker]:
    """Returns the holders without the waiting process itself, unless it is the only one."""
    every = list(holders)
    return [holder for holder in every if holder.pid != pid] or every


def is_held(receiver: Json) -> bool:
    return bool(receiver["waiting_ns"] >= STUCK_NS and receiver["records_behind"] != 0)


def biggest_holders(segment: Json) -> Iterator[Blocker]:
    by_index = {peer["index"]: peer for peer in segment["peers"]}
    for pool in segment.get("pool", ()):
        for holder in sorted(pool["holders"], key=lambda entry: (-entry["nbytes"], -entry["granted"]))[:4]:
            peer = by_index.get(holder["peer"])
            if peer is None:
                continue
            state = "" if peer["state"] == "live" else f", {peer['state']}"
            clause = f"'{peer['name']}' (pid {peer['pid']}{state}) holds {in_units(holder['nbytes'])} of it"
            clause += f" in {counted(holder['blocks'], 'block')}"
            if holder["granted"] > 0:
                clause += f", and was granted {holder['granted']} more that it has not opened"
            yield Blocker(peer["pid"], peer["state"], clause)
