"""Snapshot of a server: plain data that travels as JSON, from which rates and views are made.

Counters begin at 0 when the process that counts starts. `snapshot_reader` reads them.
"""

from __future__ import annotations

import msgspec

from penstock.server.status.server_info import ServerInfo


class ProcessView(msgspec.Struct, frozen=True):
    role: str  # launcher, core, worker, output, server
    group: int  # means something for core, worker and output
    index: int
    pid: int  # 0: there is none now
    incarnation: int  # 0: none has been started; 1: this is the first
    state: str  # starting, serves, draining, stopped, gone
    cpu_seconds: float
    private_nbytes: int | None  # memory that only this process has; None: there is none now, or the kernel does not say
    life: int = 0  # of an output processor: how often it was started again within this incarnation

    @property
    def restarts(self) -> int:
        """Returns the number of its restarts; those in former incarnations of its group that were its own do not
        count."""
        return max(self.incarnation - 1, 0) + self.life

    @property
    def is_of_group(self) -> bool:
        return self.role in ("core", "worker", "output")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.role, self.group, self.index

    @property
    def title(self) -> str:
        place = {"launcher": "", "server": f" {self.index}"}
        return self.role + place.get(self.role, f" {self.group}.{self.index}")


class ChannelView(msgspec.Struct, frozen=True):
    name: str
    kind: str  # ring, broadcast, inbox
    records: int  # sent, by all senders
    nbytes: int
    sleeps: int  # of all ends, because there was nothing to read, or no room
    behind: int  # records that the slowest receiver has not given back
    behind_nbytes: int
    slowest: str  # name of that receiver; empty: none is behind
    blocked: float  # seconds for which a sender has been waiting for room now
    longest_blocked: float  # and for which one ever did


class HolderView(msgspec.Struct, frozen=True):
    name: str
    blocks: int
    nbytes: int


class StoreView(msgspec.Struct, frozen=True):
    name: str
    nbytes: int  # that fit
    kept_nbytes: int  # under keys
    taken_nbytes: int  # those, and blocks without a key
    keys: int
    held_keys: int
    hits: int
    misses: int
    puts: int
    evictions: int
    evicted_nbytes: int
    holders: tuple[HolderView, ...]


class EngineView(msgspec.Struct, frozen=True):
    incarnation: int  # of its core; 0: it does not serve
    open: int  # requests
    running: int  # sequences in the batch
    waiting: int  # sequences that do not run: queued, or preempted
    blocks: int
    free_blocks: int
    steps: int
    core_ns: int  # the core's own time
    device_ns: int  # in which a step ran
    idle_ns: int  # in which none ran, though requests were to be continued
    prompt_tokens: int  # computed
    generated_tokens: int
    preemptions: int
    waiting_to_resume: int  # requests that it has lost, and that no group runs yet
    migrations: int  # requests that it has lost, and that were or are to be resumed
    given_up: int  # requests that it has lost, and that were answered with an error
    kept_tokens: int  # of its open requests, which servers keep to resume them


class ServerView(msgspec.Struct, frozen=True):
    open: int  # requests
    answered: int
    refused: int  # of these: with an error, or without a response because the client had gone
    prompt_tokens: int  # of sequences that have their first token
    completion_tokens: int
    first_pieces: int  # sequences that have their first token
    first_seconds: float  # all together, from the request to that
    gaps: int  # between two tokens
    gap_seconds: float  # all together


class ServerSnapshot(msgspec.Struct, frozen=True):
    at: float  # seconds on the clock of that machine, which only goes forward
    time: float  # seconds since 1970
    notice: ServerInfo
    is_draining: bool
    shared_nbytes: int  # memory of all segments, which is there once, however many processes have it
    processes: tuple[ProcessView, ...]
    channels: tuple[ChannelView, ...]
    stores: tuple[StoreView, ...]
    groups: tuple[EngineView, ...]
    servers: tuple[ServerView, ...]

    @property
    def coming_back(self) -> dict[int, int]:
        """Returns the groups that were lost and do not serve yet, and how many of their requests wait."""
        restarted = {process.group for process in self.processes if process.is_of_group and process.incarnation > 1}
        return {
            number: group.waiting_to_resume
            for number, group in enumerate(self.groups)
            if group.incarnation == 0 and (group.waiting_to_resume or number in restarted)
        }
