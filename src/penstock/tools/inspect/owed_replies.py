"""Finds the steps to which leaders wait for a reply.

A step is a record of the channel from a leader to workers. A worker has finished a step when the worker waits for the
next step. The reply travels on a channel back to the leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.tools.inspect.segments import Json, name_of, state_of, title_of

MAX_NAMES = 4
KINDS = ("ring", "broadcast")  # an inbox has requests: other processes answer them


@dataclass(frozen=True)
class OwedReply:
    """The reply of a worker to a step of a leader, which waits for the reply."""

    leader: int  # pids
    worker: int
    worker_name: str  # "'VllmWorker-0' (pid 12)"
    since_ns: int
    step: int
    steps_title: str  # of the channel with the steps
    finished: tuple[str, ...]  # the other receivers of the step
    unfinished: tuple[str, ...]
    unfinished_pids: tuple[int, ...]  # the worker's first

    @property
    def clause(self) -> str:
        return f"step {self.step} of {self.steps_title}{self._about_others()} is with {self.worker_name}"

    def _about_others(self) -> str:
        if self.unfinished:
            return f", which {listed(self.unfinished)} {have(self.unfinished)} not finished either,"
        if self.finished:
            others = "all other receivers" if len(self.finished) > 1 else self.finished[0]
            return f", which {others} {have(self.finished)} finished,"
        return ""


def listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def have(names: tuple[str, ...]) -> str:
    return "has" if len(names) == 1 else "have"


def owed_to(segment: Json, receiver: Json, channels: Iterable[Json]) -> Iterator[OwedReply]:
    """Yields the replies that a waiting receiver of the segment waits for, by the channels of its process."""
    for replier in segment["senders"]:
        if state_of(segment, replier) not in ("live", "stopped") or replier["pid"] == receiver["pid"]:
            continue
        steps = [
            (sender, channel)
            for channel in channels
            for sender in channel.get("senders", ())
            if channel["kind"] in KINDS and sender["pid"] == receiver["pid"] and owes(channel, sender, replier)
        ]
        if steps:
            sender, channel = min(steps, key=lambda entry: entry[0]["last_sent_ns"])
            yield owed_reply(receiver, replier, sender, channel)


def owes(channel: Json, leader: Json, replier: Json) -> bool:
    """Returns whether a receiver of the steps does not wait for the next one, and has sent fewer replies than steps.

    Counts tell a leader from a worker: a worker has sent at most as many replies as there were steps.
    """
    ends = [receiver for receiver in channel["receivers"] if receiver["pid"] == replier["pid"]]
    return replier["records"] < leader["records"] and any(not has_finished(end) for end in ends)


def has_finished(receiver: Json) -> bool:
    return bool(receiver["waiting_ns"] > 0 and receiver["records_behind"] == 0)


def owed_reply(receiver: Json, replier: Json, leader: Json, channel: Json) -> OwedReply:
    worker = next(end for end in channel["receivers"] if end["pid"] == replier["pid"])
    others = [end for end in channel["receivers"] if end["state"] == "live" and end["pid"] != worker["pid"]]
    behind = [end for end in others if not has_finished(end)]
    # The receiver may have waited before the step, and a long wait may be cut into several.
    ages = [age for age in (leader["last_sent_ns"], replier["last_sent_ns"]) if age > 0]
    return OwedReply(
        leader["pid"],
        worker["pid"],
        name_of(channel, worker),
        min(ages, default=receiver["waiting_ns"]),
        leader["records"],
        title_of(channel),
        tuple(name_of(channel, end) for end in others if has_finished(end)),
        tuple(name_of(channel, end) for end in behind),
        (worker["pid"], *(end["pid"] for end in behind)),
    )
