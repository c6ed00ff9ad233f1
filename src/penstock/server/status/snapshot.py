"""Snapshot of a server: plain data that travels as JSON, from which rates and views are made.

Counters begin at 0 when the process that counts starts. `snapshot_reader` reads them.
"""

from __future__ import annotations

import msgspec

from penstock.server.status.server_info import ServerInfo


class ProcessView(msgspec.Struct, frozen=True):
    role: str  # launcher, core, worker, output, bridge, server
    group: int  # means something for core, worker, output and bridge
    index: int
    pid: int  # 0: there is none now
    incarnation: int  # 0: none has been started; 1: this is the first
    state: str  # starting, serves, draining, stopped, gone
    cpu_seconds: float
    private_nbytes: int | None  # memory that only this process has; None: there is none now, or the kernel does not say
    node: int = 0  # of a bridge: the node that has its group; of remote_ranks: that has these ranks
    life: int = 0  # of an output processor: how often it was started again within this incarnation

    @property
    def restarts(self) -> int:
        """Returns the number of its restarts; those in former incarnations of its group that were its own do not
        count."""
        return max(self.incarnation - 1, 0) + self.life

    @property
    def is_of_group(self) -> bool:
        return self.role in ("core", "worker", "output", "bridge", "remote_ranks")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.role, self.group, self.index

    @property
    def title(self) -> str:
        place = {"launcher": "", "server": f" {self.index}", "bridge": f" {self.group} to node {self.node}"}
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
    spills: int = 0  # records too long for the ring, which went by the pool
    exhaustions: int = 0  # times the pool had no room for a record


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
    prefix_queries: int = 0  # tokens of prompts that were looked up in the prefix cache
    prefix_hits: int = 0  # those of them that it had
    node: int = 0  # that has it; 0: the node of the servers


class ItemCount(msgspec.Struct, frozen=True):
    how: str  # the tensors of prompts travel: `ITEM_FIELDS`
    values: int


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
    items: tuple[ItemCount, ...] = ()  # since the server was started
    waiting: int = 0  # new requests that no group has taken yet, while a lost group is started again


class ServerSnapshot(msgspec.Struct, frozen=True):
    at: float  # seconds on the clock of that machine, which only goes forward
    time: float  # seconds since 1970
    server_info: ServerInfo
    is_draining: bool
    shared_nbytes: int  # memory of all segments, which is there once, however many processes have it
    processes: tuple[ProcessView, ...]
    channels: tuple[ChannelView, ...]
    stores: tuple[StoreView, ...]
    groups: tuple[EngineView, ...]
    servers: tuple[ServerView, ...]

    @property
    def prefix_hit_share(self) -> float | None:
        """Returns the share of prompts' tokens that the prefix caches had; None: none was looked up."""
        queries = sum(group.prefix_queries for group in self.groups)
        return sum(group.prefix_hits for group in self.groups) / queries if queries else None

    @property
    def restarts(self) -> int:
        """Returns how often groups and servers were started again. A group restarts as a whole."""
        places = {process.key if process.role == "server" else process.group: 0 for process in self.processes}
        for process in self.processes:
            place = process.key if process.role == "server" else process.group
            places[place] = max(places[place], process.incarnation - 1)
        return sum(places.values())

    @property
    def gone(self) -> int:
        """Returns how many processes have died and are not started again yet."""
        return sum(process.state == "gone" for process in self.processes)

    @property
    def items(self) -> dict[str, int]:
        """Returns the counts of all servers; empty without a store and without tensors."""
        counts: dict[str, int] = {}
        for item in (item for server in self.servers for item in server.items):
            counts[item.how] = counts.get(item.how, 0) + item.values
        return counts if self.stores or any(counts.values()) else {}

    @property
    def coming_back(self) -> dict[int, int]:
        """Returns the groups that were lost and do not serve yet, and how many of their requests wait."""
        restarted = {process.group for process in self.processes if process.is_of_group and process.incarnation > 1}
        return {
            number: group.waiting_to_resume
            for number, group in enumerate(self.groups)
            if group.incarnation == 0 and (group.waiting_to_resume or number in restarted)
        }
