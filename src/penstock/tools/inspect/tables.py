"""Tables of a snapshot: of processes, and of each segment's peers, ends and pool. `render` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.tools.format import counted, in_seconds, in_units
from penstock.tools.inspect.segments import Json, peer_at, short_key, state_of, title_of
from penstock.tools.tables import Table

MAX_NAMES = 8  # of messages, in a title
MAX_ITEMS = 16  # of a store; --json has all
MAX_FAILURE = 60  # characters of the exception of an end; --json has all


def processes_with_segments(snapshot: Json) -> list[Json]:
    """Returns the processes of a snapshot that have a segment open: a helper of the launcher, say, has none."""
    holders = {holder["pid"] for segment in snapshot["segments"] for holder in segment["held_by"]}
    return [process for process in snapshot["processes"] if process["pid"] in holders]


def tables_of(snapshot: Json) -> Iterator[Table]:
    rows = [
        (str(process["pid"]), str(process["parent"]), process["command"], process["state"], ", ".join(process["peers"]))
        for process in processes_with_segments(snapshot)
    ]
    yield Table("processes", ("pid", "parent", "command", "state", "known as"), rows)
    for segment in snapshot["segments"]:
        if segment["asked"]:
            yield from tables_of_segment(segment)


def tables_of_segment(segment: Json) -> Iterator[Table]:
    sizes = f"{in_units(segment['claimed_nbytes'])} claimed of {in_units(segment['nbytes'])}"
    title = f"{title_of(segment)}: {sizes}, {in_seconds(max(segment['age_ns'], 0))} old, inode {segment['inode']}"
    title += carried(segment)
    peers = [
        (str(peer["index"]), peer["name"], str(peer["pid"]), peer_state(peer), str(peer["epoch"]), peer["how"])
        for peer in segment["peers"]
    ]
    yield Table(title, ("peer", "name", "pid", "state", "epoch", "how it ended"), peers)
    ends = [end_row(segment, "sender", sender) for sender in segment.get("senders", ())]
    ends += [end_row(segment, "receiver", receiver) for receiver in segment.get("receivers", ())]
    if ends:
        columns = ("end", "process", "state", "records", "bytes", "behind", "furthest", "longest wait", "spins",
                   "parks", "wakes", "spilled", "exhausted")  # fmt: skip
        yield Table("", columns, ends)
    for pool in segment.get("pool", ()):
        if segment["kind"] != "pool" and pool["takes"] == 0:
            continue  # a channel without long records
        title = (
            f"pool of '{segment['name']}': {in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} taken in "
            f"{pool['blocks']} blocks, largest free {in_units(pool['largest_free_nbytes'])}, {pool['takes']} takes, "
            f"{pool['exhaustions']} exhaustions, {pool['recoveries']} recoveries, {pool['stale_refs']} stale refs"
        )
        names = {peer["index"]: peer["pid"] for peer in segment["peers"]}
        rows = [
            (holder["name"], str(names.get(holder["peer"], "?")), str(holder["blocks"]), in_units(holder["nbytes"]),
             str(holder["granted"]))
            for holder in pool["holders"]
        ]  # fmt: skip
        yield Table(title, ("holder", "pid", "blocks", "bytes", "granted, not yet opened"), rows)
    for store in segment.get("store", ()):
        yield table_of_store(segment, store)


def carried(segment: Json) -> str:
    if "messages_error" in segment:
        return f", carries messages of which nothing is known: {segment['messages_error']}"
    names = segment.get("messages", [])
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f", carries {', '.join(names[:MAX_NAMES])}{more}"


def table_of_store(segment: Json, store: Json) -> Table:
    """Returns the table of a store's items: those being written come first, then those with most holders and hits."""
    title = (
        f"store of '{segment['name']}': {counted(store['keys'], 'key')}, {in_units(store['nbytes'])}, "
        f"{store['hits']} hits, {store['misses']} misses, {store['puts']} puts, {store['evictions']} evictions "
        f"({in_units(store['evicted_nbytes'])}), {store['fills_awaited']} fills awaited, {store['abandoned']} abandoned"
    )
    items = sorted(store["items"], key=lambda item: (item["state"] != "filling", -item["holders"], -item["hits"]))
    if len(items) > MAX_ITEMS:
        title += f"; {MAX_ITEMS} of them"
    rows = []
    for item in items[:MAX_ITEMS]:
        state = f"being written by {peer_at(segment, item['writer'])}" if item["state"] == "filling" else "ready"
        age, idle = (in_seconds(max(item[which], 0)) for which in ("age_ns", "idle_ns"))
        rows.append(
            (short_key(item), in_units(item["nbytes"]), str(item["hits"]), str(item["holders"]), age, idle, state)
        )
    return Table(title, ("key", "bytes", "hits", "holders", "age", "idle", "state"), rows)


def peer_state(peer: Json) -> str:
    since = peer["waiting_for_memory_ns"]
    return f"waiting for memory {in_seconds(since)}" if peer["state"] == "live" and since > 0 else str(peer["state"])


def end_row(segment: Json, role: str, end: Json) -> tuple[str, ...]:
    state = state_of(segment, end)
    if state == "live" and end["waiting_ns"] > 0:
        is_idle = role == "receiver" and end["records_behind"] == 0
        state = f"{'idle' if is_idle else 'waiting'} {in_seconds(end['waiting_ns'])}"
    elif end["failure"]:
        state = f"{state}: {end['failure'][:MAX_FAILURE]}"
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
