"""Constants of a server for external observers: a page that the launcher writes once.

Observers find a server by the page: every process of a server has the page open. Board and counters hold variables.
"""

from __future__ import annotations

import os
import time

import msgspec

import penstock
from penstock import lowlevel
from penstock.engine.cluster.topology import ProcessId, all_processes
from penstock.engine.protocol.config import EngineConfig
from penstock.server.options import ServerOptions
from penstock.tools.inspect.segments import harmless

NAME = "server_info"


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the page."""

    version: str
    pid: int  # the launcher's
    name: str  # of the model, as clients call it
    url: str
    started: float  # seconds since 1970
    processes: tuple[ProcessId, ...]  # in the order of the board's `members`
    max_num_seqs: int
    max_num_batched_tokens: int
    is_simulated: bool
    groups_per_node: int

    @staticmethod
    def publish(config: EngineConfig, options: ServerOptions, url: str) -> lowlevel.Segment:
        server_info = ServerInfo(
            version=penstock.__version__,
            pid=os.getpid(),
            name=served_name(config, options),
            url=url,
            started=time.time(),
            processes=tuple(all_processes(config)),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            is_simulated=config.simulated is not None,
            groups_per_node=config.data_parallel_size,
        )
        encoded = msgspec.json.encode(server_info)
        page = lowlevel.Segment.create(len(encoded), name=NAME)
        page.view(writable=True)[:] = encoded
        return page

    def node_of(self, group: int) -> int:
        """Returns the rank of the node that has a group."""
        return group // self.groups_per_node

    @staticmethod
    def read(page: lowlevel.Segment) -> ServerInfo:
        """Reads the page. Raises msgspec.DecodeError for a page of a different version of penstock."""
        return msgspec.convert(harmless(msgspec.json.decode(page.view())), ServerInfo)


def served_name(config: EngineConfig, options: ServerOptions) -> str:
    """Returns the first name by which clients call the model."""
    return next(iter(options.served_model_name), "") or config.model.rstrip("/").rpartition("/")[2] or "simulated"
