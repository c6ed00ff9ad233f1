"""What the processes of a tree share, and who has which end of it.

Opened once, by the launcher, for the life of the tree: who is started again attaches again to the same channels. Leaves
to the channels that ends are replaced, and to `launcher` who lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import penstock
from penstock import PeerDied, Store
from penstock.channel.channels import SPILL_BLOCKS
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ANNOUNCED, DELTAS, INBOX, RESULTS, STEPS

T = TypeVar("T")
AGAIN = 0.01  # seconds; between two looks whether the successor of a dead process has come
NAMELESS = "?"  # of a death: whoever died, its place has been taken since
PEERS = 128  # places are given again, but who dies often needs some while the dead are being reaped


@dataclass
class EngineChannels:
    """A core, its workers and its output processors: they live and die together."""

    inbox: penstock.MessageChannel  # to the core: from servers, then workers, then outputs, then the launcher
    steps: penstock.MessageChannel  # from the core to workers, then outputs
    results: penstock.MessageChannel  # from rank 0 to the core, then outputs
    announced: tuple[penstock.MessageChannel, ...]  # to each output, from the servers


@dataclass
class Cluster:
    """Handed to each process while it is being spawned."""

    config: EngineConfig
    groups: tuple[EngineChannels, ...]
    servers: tuple[penstock.MessageChannel, ...]  # to each server: from each group's core, then its outputs
    board: penstock.Segment
    store: Store | None
    init_methods: list[
        str
    ]  # of each group's ranks: another one for each incarnation, told to those who are spawned next

    @classmethod
    def lay(cls, config: EngineConfig) -> Cluster:
        one = config
        processes = one.api_server_count + one.data_parallel_size * (
            1 + one.tensor_parallel_size + one.output_processors
        )
        return cls(
            config,
            tuple(_lay_group(config, number) for number in range(one.data_parallel_size)),
            # One lane more than there are senders: it is never taken, so the inbox never ends.
            tuple(
                penstock.open_inbox(
                    one.data_parallel_size * (1 + one.output_processors) + 1,
                    f"deltas {server}",
                    messages=DELTAS,
                    max_peers=PEERS,
                )
                for server in range(one.api_server_count)
            ),
            StatusBoard.lay(one.data_parallel_size, len(all_processes(one))),
            Store.create(one.store_nbytes, max_peers=min(PEERS, 2 * processes + 8)) if one.store_nbytes else None,
            [""] * one.data_parallel_size,
        )

    def close(self) -> None:
        """Closes what this process holds of it."""
        for group in self.groups:
            for channel in (group.inbox, group.steps, group.results, *group.announced):
                channel.close()
        for channel in self.servers:
            channel.close()
        self.board.close()

    # ── who has which lane or place ──
    def worker_lane(self, rank: int) -> int:
        """Of a group's inbox; a server's lane is its number."""
        return self.config.api_server_count + rank

    def output_lane(self, output: int) -> int:
        return self.worker_lane(self.config.tensor_parallel_size) + output

    @property
    def launcher_lane(self) -> int:
        return self.output_lane(self.config.output_processors)

    def delta_lane(self, group: int, output: int | None = None) -> int:
        """Of a server's inbox; None: the core's."""
        return group * (1 + self.config.output_processors) + (0 if output is None else 1 + output)


def _lay_group(config: EngineConfig, number: int) -> EngineChannels:
    workers, outputs = config.tensor_parallel_size, config.output_processors
    return EngineChannels(
        # As for the servers, the last lane keeps it from ending; the launcher takes it, to say that it is time to stop.
        penstock.open_inbox(
            config.api_server_count + workers + outputs + 1, f"inbox {number}", messages=INBOX, max_peers=PEERS
        ),
        # Inline images stay where they came for as long as their request runs. The inbox has room for fewer of them, so
        # whoever submits too many waits, and not the core.
        penstock.open_broadcast(
            workers + outputs, f"steps {number}", messages=STEPS, max_peers=PEERS, spill_blocks=2 * SPILL_BLOCKS
        ),
        penstock.open_broadcast(1 + outputs, f"results {number}", messages=RESULTS, max_peers=PEERS),
        tuple(
            penstock.open_inbox(
                config.api_server_count + 1, f"announced {number}.{output}", messages=ANNOUNCED, max_peers=PEERS
            )
            for output in range(outputs)
        ),
    )


# ── names: what a death tells of who died ────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class ProcessId:
    """A process of a group, in one of the group's incarnations; or a server, whose group means nothing."""

    kind: str  # "core", "worker", "output", "server"
    group: int
    index: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.kind} {self.group}.{self.index} #{self.incarnation}"

    @classmethod
    def of(cls, name: str) -> ProcessId | None:
        """Whose name it is, as it stands in a PeerDied; None: of nobody in the tree."""
        try:
            kind, place, incarnation = name.split(" ")
            group, index = place.split(".")
            return cls(kind, int(group), int(index), int(incarnation.removeprefix("#")))
        except ValueError:
            return None


def all_processes(config: EngineConfig) -> list[ProcessId]:
    """Every process that a tree has, in its first incarnation: those of each group, then the servers."""
    groups = [
        ProcessId(kind, group, index, 1)
        for group in range(config.data_parallel_size)
        for kind, many in (("core", 1), ("worker", config.tensor_parallel_size), ("output", config.output_processors))
        for index in range(many)
    ]
    return [*groups, *(ProcessId("server", 0, index, 1) for index in range(config.api_server_count))]


def is_stale_death(me: ProcessId, death: PeerDied) -> bool:
    """Whether it tells of a member of our group before this incarnation.

    So does a death whose name is gone: somebody else has the place of the dead one by now, and who lives in a group in
    which somebody has died does not live until others come.
    """
    who = ProcessId.of(death.name)
    return death.name == NAMELESS or (who is not None and who.group == me.group and who.incarnation < me.incarnation)


def retry_past_stale_deaths(me: ProcessId, call: Callable[[], T], timeout: float) -> T:
    """What the call gives. As long as it only tells that members of former incarnations died, it is made again: who
    takes their places has not come yet. Raises PeerDied of any other, and of those when the time is up."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return call()
        except PeerDied as death:
            if not is_stale_death(me, death) or time.monotonic() >= deadline:
                raise
            time.sleep(AGAIN)
