"""The channels, status board and store that the processes of an engine share, and the lane of each process in them.

The launcher opens them once, for the life of the cluster: a restarted process attaches again to the same channels, and
takes the ends of the dead one. `launcher` starts and restarts processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import penstock
from penstock import LongRecords, MemoryOptions, Store, lowlevel
from penstock.bridge import PullChannels
from penstock.channel import Channel
from penstock.engine.cluster.adapter_registry import AdapterRegistry
from penstock.engine.cluster.blame_ledger import BlameLedger
from penstock.engine.cluster.kept_memory import KVFiles
from penstock.engine.cluster.node_weights import NodeWeights, WeightFile
from penstock.engine.cluster.rendezvous import Rendezvous
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.verdict_board import VerdictBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import DELTAS, INBOX, RESULTS, STEPS, TOKENS

AGAIN = 0.01  # seconds between two attempts while the successor of a dead process has not attached
STEPS_IN_FLIGHT = 2  # at most: a step is sent while the one before it runs
MAX_BESIDE = 256  # requests that the verdict board lists before they are in a step, and as many after
PEERS = 128  # places are reused, but a process that dies often needs some while dead peers are being reaped


@dataclass
class EngineChannels:
    """The channels of a core, its workers and its output processors, which live and die together."""

    inbox: penstock.Inbox[INBOX]  # to the core: from servers, then workers, then outputs, then the launcher
    steps: penstock.Broadcast[STEPS]  # from the core to workers, and once to each node that has further ones
    results: penstock.Ring[RESULTS]  # from rank 0 to the core
    tokens: tuple[penstock.Ring[TOKENS], ...]  # from the core to each output


@dataclass
class Cluster:
    """All that the processes of a cluster share. The launcher passes it to each process that it spawns."""

    config: EngineConfig
    groups: tuple[EngineChannels, ...]  # of this node
    remote_inboxes: tuple[penstock.Inbox[INBOX], ...]  # of the groups of other nodes: to their bridges
    # To each server: from each group's core, then its outputs. On a node without servers, each group has its own, which
    # its uplink receives.
    servers: tuple[penstock.Inbox[DELTAS], ...]
    board: lowlevel.Segment
    verdicts: lowlevel.Segment
    blame: lowlevel.Segment
    store: Store | None
    encodings: Store | None  # of images, where engines share them
    pulls: tuple[PullChannels, ...]  # of each group on a node without servers: workers ask its uplink for images
    kv_files: tuple[KVFiles | None, ...]  # of each group; None: its KV cache is not kept
    node_weights: NodeWeights | None = None  # in the launcher, where workers share weights
    weights: WeightFile | None = None  # in a worker
    adapters: AdapterRegistry | None = None  # where LoRA is enabled
    rendezvous: Rendezvous | None = None  # in a worker that shares its model with other ranks: where they meet

    @classmethod
    def open(cls, config: EngineConfig) -> Cluster:
        processes = len(all_processes(config))
        decoders = config.api_server_count * config.max_concurrent_videos
        has_weights = config.simulated is None and config.device == "cpu"
        return cls(
            config,
            tuple(_open_channels(config, number) for number in range(config.data_parallel_size)),
            tuple(_open_inbox(config, number) for number in range(config.data_parallel_size, config.all_groups)),
            _open_server_inboxes(config),
            StatusBoard.create(config.all_groups, processes, config.data_parallel_size * config.output_processors),
            VerdictBoard.create(config.all_groups, STEPS_IN_FLIGHT * config.max_num_seqs + 2 * MAX_BESIDE),
            BlameLedger.create(config.api_server_count),
            _open_store(config, min(PEERS, 2 * (processes + decoders) + 8)) if config.store_nbytes else None,
            _open_encodings(config) if config.encoder_tp_mode == "store" else None,
            _open_pulls(config) if config.is_headless and config.store_nbytes else (),
            _open_kv_files(config) if config.keeps_kv_cache else (),
            NodeWeights(Path(config.model)) if has_weights and config.share_weights else None,
            adapters=AdapterRegistry.of(config.lora.adapters) if config.lora.enable_lora else None,
        )

    @property
    def inboxes(self) -> tuple[penstock.Inbox[INBOX], ...]:
        """Returns the inboxes of all groups, by number."""
        return (*(group.inbox for group in self.groups), *self.remote_inboxes)

    def place_of(self, member: ProcessId) -> int:
        """Returns the place of a process on the status board."""
        places = [(other.kind, other.group, other.index) for other in all_processes(self.config)]
        return places.index((member.kind, member.group, member.index))

    @property
    def channels(self) -> list[Channel[Any]]:
        channels: list[Channel[Any]] = [*self.servers, *self.remote_inboxes]
        for group in self.groups:
            channels += [group.inbox, group.steps, group.results, *group.tokens]
        return channels

    def close(self) -> None:
        """Closes the channels and the boards in this process."""
        for channel in self.channels:
            channel.close()
        for pulls in self.pulls:
            pulls.close()
        for files in self.kv_files:
            if files is not None:
                files.close()
        if self.node_weights is not None:
            self.node_weights.close()
        if self.adapters is not None:
            self.adapters.close()
        self.board.close()
        self.verdicts.close()
        self.blame.close()

    def kv_files_of(self, group: int) -> KVFiles | None:
        return self.kv_files[group] if group < len(self.kv_files) else None

    def for_member(self, member: ProcessId) -> Cluster:
        """Returns the cluster for a process: core and workers of a group have the files of their KV cache, servers have
        none. A worker has the file of its weights."""
        has_files = member.kind in ("core", "worker")
        weights = None
        if self.node_weights is not None and member.kind == "worker":
            weights = self.node_weights.file_of(member.index)
        return replace(
            self,
            node_weights=None,
            weights=weights,
            kv_files=tuple(
                files if has_files and group == member.group else None for group, files in enumerate(self.kv_files)
            ),
        )

    # ── lanes ──
    def worker_lane(self, rank: int) -> int:
        """Returns the worker's lane of its group's inbox. A server's lane is its number, where there are any."""
        return rank - self.config.ranks.start if not self.config.has_cores else self.config.api_server_count + rank

    def output_lane(self, output: int) -> int:
        return self.worker_lane(self.config.tensor_parallel_size) + output

    def steps_receiver(self, rank: int) -> int:
        """Returns the number of a worker of this node among the receivers of its group's steps."""
        return rank - self.config.ranks.start

    def remote_steps_receiver(self, node: int) -> int:
        """Returns the number of another node, which receives steps once for all of its ranks."""
        return len(self.config.ranks) + node - 1

    def output_place(self, group: int, output: int) -> int:
        """Returns the number of an output processor among those of all groups, for its row of the board."""
        return group * self.config.output_processors + output

    @property
    def launcher_lane(self) -> int:
        return self.output_lane(self.config.output_processors)

    def servers_of(self, group: int) -> tuple[penstock.Inbox[DELTAS], ...]:
        """Returns the inboxes of the servers, as a group of this node knows them."""
        if not self.config.is_headless:
            return self.servers
        servers = self.config.api_server_count
        return self.servers[group * servers : (group + 1) * servers]

    def delta_lane(self, group: int, output: int | None = None) -> int:
        """Returns the output processor's lane of a server's inbox; None: the core's."""
        group = 0 if self.config.is_headless else group
        return group * (1 + self.config.output_processors) + (0 if output is None else 1 + output)


def _open_store(config: EngineConfig, max_peers: int) -> Store:
    memory = MemoryOptions(huge_pages=config.huge_pages, numa_node=config.numa_node)
    return Store(config.store_nbytes, max_peers=max_peers, memory=memory)


def _open_encodings(config: EngineConfig) -> Store:
    """Only workers attach to it. A store of its own, so that encodings and images do not evict each other."""
    workers = config.data_parallel_size * len(config.ranks)
    max_peers = min(PEERS, 2 * workers + 8)
    memory = MemoryOptions(numa_node=config.numa_node)
    return Store(config.encoder_cache_nbytes, name="encodings", max_peers=max_peers, memory=memory)


def _open_pulls(config: EngineConfig) -> tuple[PullChannels, ...]:
    return tuple(PullChannels.open(clients=config.tensor_parallel_size) for _ in range(config.data_parallel_size))


def _open_kv_files(config: EngineConfig) -> tuple[KVFiles | None, ...]:
    groups, ranks = config.data_parallel_size, config.tensor_parallel_size
    return tuple(KVFiles.create(group, ranks) for group in range(groups))


def _open_server_inboxes(config: EngineConfig) -> tuple[penstock.Inbox[DELTAS], ...]:
    senders, inboxes = config.all_groups, config.api_server_count
    if not config.has_cores:
        return ()
    if config.is_headless:
        senders, inboxes = 1, config.api_server_count * config.data_parallel_size
    return tuple(
        penstock.Inbox(
            DELTAS,
            senders=senders * (1 + config.output_processors) + 1,  # the last lane is never taken: the inbox never ends
            name=f"deltas {number}",
            max_peers=PEERS,
            memory=MemoryOptions(numa_node=config.numa_node),
        )
        for number in range(inboxes)
    )


def _open_inbox(config: EngineConfig, number: int) -> penstock.Inbox[INBOX]:
    # As for the servers, the last lane keeps the inbox from ending; the launcher has it, and sends Stop.
    senders = config.api_server_count + config.tensor_parallel_size + config.output_processors + 1
    if not config.has_cores:
        senders = len(config.ranks) + 1
    memory = MemoryOptions(numa_node=config.numa_node)
    return penstock.Inbox(INBOX, senders=senders, name=f"inbox {number}", max_peers=PEERS, memory=memory)


def _open_channels(config: EngineConfig, number: int) -> EngineChannels:
    receivers = len(config.ranks) + len(config.rank_nodes)
    memory = MemoryOptions(numa_node=config.numa_node)
    outputs = config.output_processors if config.has_cores else 0
    return EngineChannels(
        _open_inbox(config, number),
        # Inline images stay where they arrived for as long as their request runs. The inbox has room for fewer of them,
        # so a server that submits too many waits, and not the core.
        penstock.Broadcast(
            STEPS,
            receivers=receivers,
            name=f"steps {number}",
            max_peers=PEERS,
            memory=memory,
            long_records=LongRecords(max_records=2 * LongRecords().max_records),
        ),
        penstock.Ring(RESULTS, name=f"results {number}", max_peers=PEERS, memory=memory),
        tuple(
            penstock.Ring(TOKENS, name=f"tokens {number}.{output}", max_peers=PEERS, memory=memory)
            for output in range(outputs)
        ),
    )


# ── names: which process a PeerDied means ─────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class ProcessId:
    """A process of a group, in one of the group's incarnations; or a server or an uplink, which have group 0.

    | kind | what it is |
    |---|---|
    | core, worker, output | of a group |
    | bridge | in the place of a group on another node |
    | remote_ranks | of a group: in the place of its workers on another node, which is the index |
    | remote_core | in the core's place, on a node that has workers only |
    | server, uplink | of the cluster; an uplink leads to the home node |
    """

    kind: str
    group: int
    index: int
    incarnation: int
    life: int = 0  # of an output processor, which may be started again within an incarnation

    def __str__(self) -> str:
        life = f".{self.life}" if self.life else ""
        return f"{self.kind} {self.group}.{self.index} #{self.incarnation}{life}"

    @classmethod
    def of(cls, name: str) -> ProcessId | None:
        """Returns the process of this name, as it stands in a PeerDied; None: not one of the cluster."""
        try:
            kind, place, incarnation = name.split(" ")
            group, index = place.split(".")
            incarnation, _, life = incarnation.removeprefix("#").partition(".")
            return cls(kind, int(group), int(index), int(incarnation), int(life or 0))
        except ValueError:
            return None


def all_processes(config: EngineConfig) -> list[ProcessId]:
    """Returns all processes of a cluster, in their first incarnation: those of each group, then the servers; on a node
    without servers, then the uplinks: the index is the number of the group."""
    groups = [
        ProcessId(kind, group, index, 1)
        for group in range(config.data_parallel_size)
        for kind, index in processes_of_group(config)
    ]
    if not config.has_cores:
        return groups
    bridges = [ProcessId("bridge", group, 0, 1) for group in range(config.data_parallel_size, config.all_groups)]
    uplinks, servers = range(config.data_parallel_size), range(config.api_server_count)
    if config.is_headless:
        return [*groups, *(ProcessId("uplink", 0, group, 1) for group in uplinks)]
    return [*groups, *bridges, *(ProcessId("server", 0, index, 1) for index in servers)]


def processes_of_group(config: EngineConfig) -> list[tuple[str, int]]:
    """Returns kind and index of the processes of each group of this node."""
    workers = [("worker", rank) for rank in config.ranks]
    if not config.has_cores:
        return [("remote_core", 0), *workers]
    remote = [("remote_ranks", node) for node in config.rank_nodes]
    return [("core", 0), *workers, *remote, *(("output", index) for index in range(config.output_processors))]


def live_receivers(channel: Channel[Any], incarnation: int) -> list[ProcessId]:
    """Returns the processes of an incarnation that have opened receivers of a channel."""
    snapshot = channel.snapshot()
    names = {peer["index"]: peer["name"] for peer in snapshot["peers"]}
    owners = [ProcessId.of(names.get(end["peer"], "")) for end in snapshot["receivers"] if end["state"] == "live"]
    return [owner for owner in owners if owner is not None and owner.incarnation == incarnation]
