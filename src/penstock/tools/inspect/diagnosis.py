"""Explains why processes wait: follows waits from segment to segment, and describes each in a sentence.

`wait_graph` finds the waits in one segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.tools.format import counted, in_seconds, in_units
from penstock.tools.inspect.processes import is_running, process_of
from penstock.tools.inspect.segments import Json, peer_at, short_key, states_of, title_of
from penstock.tools.inspect.wait_graph import STUCK_NS, Blocker, Wait, all_waits, biggest_holders

LEVELS = ("deadlock", "stuck", "warning", "note", "idle")  # of a sentence, the worst first


def verdict_of(segments: list[Json]) -> list[Json]:
    """Returns sentences, the worst first: {"level", "kind", "text", "pids"}."""
    waits = list(all_waits(segments))
    by_pid: dict[int, list[Wait]] = {}
    for wait in sorted(waits, key=lambda other: (other.is_for_records, -other.since_ns)):
        for pid in wait.pids:
            by_pid.setdefault(pid, []).append(wait)
    sentences: list[Json] = []
    in_cycles: set[tuple[int, str, int]] = set()
    for wait in sorted(waits, key=lambda other: -other.since_ns):
        path: list[Wait] = []
        level, text = follow(wait, by_pid, path)
        if level == "deadlock":
            if wait.key in in_cycles:
                continue
            in_cycles.update(other.key for other in path)
        pids = sorted({pid for other in path for pid in other.pids})
        verb = "waits" if len(wait.pids) == 1 else "wait"
        blockers = {pid: None for other in path for pid in other.blocking_pids if pid not in pids}
        sentences.append({**sentence(level, "wait", f"{wait.waiter} {verb} {text}", pids), "blockers": list(blockers)})
    for segment in segments:
        sentences.extend(about_peers(segment))
        sentences.extend(about_ends(segment))
        sentences.extend(about_pool(segment))
        sentences.extend(about_store(segment))
    unique = {entry["text"]: entry for entry in sentences}
    return sorted(unique.values(), key=severity)


def severity(entry: Json) -> int:
    return LEVELS.index(entry["level"])


def add_sentence(snapshot: Json, level: str, kind: str, text: str) -> None:
    """Adds a sentence to the verdict of a snapshot: the first one of its level."""
    snapshot["verdict"] = sorted([sentence(level, kind, text), *snapshot["verdict"]], key=severity)


def sentence(level: str, kind: str, text: str, pids: Iterable[int] = ()) -> Json:
    return {"level": level, "kind": kind, "text": text, "pids": list(pids)}


# ── along the chain of waits ─────────────────────────────────────────────────────────────────────────────────────────
def follow(wait: Wait, by_pid: dict[int, list[Wait]], path: list[Wait]) -> tuple[str, str]:
    """Returns the level and the clauses along the chain of waits; appends these waits to `path`."""
    path.append(wait)
    if not wait.on:
        return wait.level, wait.clause
    blocker = wait.on[0] if wait.is_for_all else min(wait.on, key=lambda candidate: suspicion(candidate, by_pid))
    level, text = follow_blocker(wait, blocker, by_pid, path)
    if wait.is_for_records and len(wait.on) > 1:  # the others may send, too
        level = max(level, "warning", key=LEVELS.index) if level != wait.level else level
    return min(level, wait.level, key=LEVELS.index), f"{wait.clause}: {blocker.clause}{text}"


def suspicion(blocker: Blocker, by_pid: dict[int, list[Wait]]) -> int:
    """Ranks a blocker; if any of several senders or holders could end the wait, the one of lowest rank is followed."""
    if blocker.state in ("stopped", "dying"):
        return 0
    if blocker.state != "live":
        return 4
    waits = by_pid.get(blocker.pid, [])
    return 2 if not waits else 1 if not waits[0].is_for_records else 3


def follow_blocker(wait: Wait, blocker: Blocker, by_pid: dict[int, list[Wait]], path: list[Wait]) -> tuple[str, str]:
    if blocker.state == "expected":
        return "warning" if wait.is_for_records else "stuck", ""
    if blocker.state == "stopped":
        return "stuck", f"; `kill -CONT {blocker.pid}` lets it go on"
    if blocker.state != "live":
        return wait.level, ""
    following = by_pid.get(blocker.pid, [])
    again = next((other for other in following if other in path), None)
    if again is not None:
        cycle = path[path.index(again) :]
        if all(member.is_for_records for member in cycle):
            return wait.level, f", and waits for {again.waiter} in turn: nothing is on its way between them"
        running = next((pid for member in cycle for pid in member.pids if is_running(pid)), None)
        doubt = f" (unless another thread of pid {running}, which is running, acts)" if running is not None else ""
        return "deadlock", f", and waits for {again.waiter} in turn: a deadlock{doubt}"
    if following and following[0].owed is not None and wait.level == "idle":
        return "idle", f", and itself waits {following[0].clause}"  # that wait has a sentence of its own
    if following:
        level, text = follow(following[0], by_pid, path)
        return level, f", and itself waits {text}"
    process = process_of(blocker.pid)
    state = {"R": "which is running", "D": "which is blocked in the kernel"}.get(process.state if process else "")
    return wait.level, f", {state or 'which waits in none of these segments: it is busy, or asleep elsewhere'}"


# ── of one segment, without its waits ────────────────────────────────────────────────────────────────────────────────
def about_peers(segment: Json) -> Iterator[Json]:
    live = sum(peer["state"] == "live" for peer in segment["peers"])
    for peer in segment["peers"]:
        subject = f"'{peer['name']}' (pid {peer['pid']})"
        if peer["state"] == "stopped":
            text = f"{subject} is stopped, by a signal or a debugger: it keeps all that it holds"
            yield sentence("warning", "stopped", f"{text}; `kill -CONT {peer['pid']}` lets it go on", [peer["pid"]])
        elif peer["state"] == "dying":
            text = f"{subject} of {title_of(segment)} has died, and what it held has not been given back"
            why = "yet" if live else "because no peer is left that could"
            yield sentence("warning" if live else "note", "dying", f"{text} {why}", [peer["pid"]])
        elif peer["state"] == "dead":
            text = f"{subject} of {title_of(segment)} died: {peer['how']}"
            if peer["reaped_blocks"] > 0:
                text += f"; {counted(peer['reaped_blocks'], 'block')} ({in_units(peer['reaped_nbytes'])}) given back"
            yield sentence("note", "dead", text, [peer["pid"]])


def about_ends(segment: Json) -> Iterator[Json]:
    if segment["age_ns"] < STUCK_NS:
        return
    receivers, senders = segment.get("receivers", []), segment.get("senders", [])
    missing = [str(end["index"]) for end in receivers if end["state"] == "expected"]
    if missing:
        which = f"{missing[0]} has" if len(missing) == 1 else f"{', '.join(missing)} have"
        text = f"of the {len(receivers)} receivers of {title_of(segment)}, {which} never attached"
        records = max(end["records_behind"] for end in receivers if end["state"] == "expected")
        text += f": {counted(records, 'record')} kept for them" if records > 0 else ""
        yield sentence("note", "expected", text)
    if senders and all(end["state"] == "expected" for end in senders):
        yield sentence("note", "expected", f"no sender of {title_of(segment)} has ever attached")
    for role, ends in (("sender", senders), ("receiver", receivers)):
        for end in ends:
            if end["state"] == "dead":
                text = f"{role} {end['index']} of {title_of(segment)} died, and no process has taken its place"
                yield sentence("note", "dead", text, [end["pid"]] if end["pid"] > 0 else [])


def about_pool(segment: Json) -> Iterator[Json]:
    for pool in segment.get("pool", ()):
        of = f"the pool {'' if segment['kind'] == 'pool' else 'of ' + segment['kind'] + ' '}'{segment['name']}'"
        biggest_holder = next(biggest_holders(segment), None)
        holder = f"; {biggest_holder.clause}" if biggest_holder else ""
        nbytes, blocks = in_use(segment, pool)
        is_full = nbytes * 10 > pool["nbytes"] * 9 or blocks >= pool["max_blocks"]
        full = (
            f"{in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} taken, "
            f"{pool['blocks']} of {pool['max_blocks']} blocks{holder}"
        )
        pids = [biggest_holder.pid] if biggest_holder else []
        if pool["exhaustions"] > 0:
            times = counted(pool["exhaustions"], "time")
            word = "is nearly exhausted, and was refused" if is_full else "was exhausted"
            yield sentence("warning" if is_full else "note", "pool", f"{of} {word} {times}: {full}", pids)
        elif is_full:
            yield sentence("note", "pool", f"{of} is nearly exhausted: {full}", pids)
        yield from about_lock(segment, pool["lock_holder"], of, "no process can take a block")


def in_use(segment: Json, pool: Json) -> tuple[int, int]:
    """Returns the bytes and blocks in use, without values of a store that no peer holds: those can be evicted."""
    free_to_go = [
        item["nbytes"]
        for store in segment.get("store", ())
        for item in store["items"]
        if item["state"] == "ready" and item["holders"] == 0
    ]
    return pool["taken_nbytes"] - sum(free_to_go), pool["blocks"] - len(free_to_go)


def about_lock(segment: Json, holder: int, of: str, therefore: str) -> Iterator[Json]:
    if holder >= 0 and states_of(segment).get(holder, "unknown") not in ("live", "left"):
        pids = [peer["pid"] for peer in segment["peers"] if peer["index"] == holder]
        yield sentence("stuck", "lock", f"the lock of {of} is held by {peer_at(segment, holder)}: {therefore}", pids)


def about_store(segment: Json) -> Iterator[Json]:
    states = states_of(segment)
    for store in segment.get("store", ()):
        of = f"the store '{segment['name']}'"
        yield from about_lock(segment, store["lock_holder"], of, "no process can put or get")
        for item in store["items"]:
            if item["state"] != "filling" or states.get(item["writer"]) == "live":
                continue
            pids = [peer["pid"] for peer in segment["peers"] if peer["index"] == item["writer"]]
            since = in_seconds(max(item["age_ns"], 0))
            text = f"key {short_key(item)} of {of} is being written since {since} by {peer_at(segment, item['writer'])}"
            yield sentence("warning", "store", f"{text}: processes that want it wait", pids)
