"""Options of a server of several nodes, most of which `Nodes` declares."""

from __future__ import annotations

import argparse
import os
from typing import Annotated

import msgspec

from penstock.engine.protocol.config import Nodes
from penstock.engine.protocol.option import Option, option_values

TLS_PATHS = ("tls_cert", "tls_key", "tls_ca")


class NodeRole(msgspec.Struct):
    """Options of the command that decide how nodes are started."""

    ray_address: Annotated[str | None, Option("nodes", metavar="ADDRESS", if_absent="each by its own command")] = None
    """Address of a Ray cluster, as in ray.init: the other nodes are started on its machines"""
    headless: Annotated[bool, Option("nodes", action="store_true")] = False
    """Run engines and no API server: for nodes of rank 1 and more"""


def nodes(options: argparse.Namespace) -> Nodes | None:
    """Returns the nodes; None: a single node. Raises ValueError."""
    count, rank = options.nnodes, options.node_rank
    if options.headless != (rank > 0):
        raise ValueError(
            f"--node-rank {rank} {'needs' if rank else 'takes no'} --headless: the node of rank 0 has the API servers"
        )
    if options.ray_address is not None and (rank or count == 1):
        raise ValueError("--ray-address is for the node of rank 0 of several: --nnodes 2, or more, and no --node-rank")
    values = option_values(Nodes, options)
    paths = {
        name: os.path.abspath(path) for name in TLS_PATHS if (path := values.get(name))
    }  # Ray's actors are elsewhere
    if count == 1 and not rank:
        if paths:
            raise ValueError(
                "--nodes-tls-cert, --nodes-tls-key and --nodes-tls-ca are for several nodes: --nnodes is 1"
            )
        if options.tensor_parallel_over_nodes:
            raise ValueError("--tensor-parallel-over-nodes is for several nodes: --nnodes 2, or more")
        return None
    return Nodes(**{**values, **paths})


def groups_of_this_node(options: argparse.Namespace) -> int:
    """Raises ValueError unless the engines can be divided evenly among the nodes."""
    if options.tensor_parallel_over_nodes:  # each engine is on all of them
        return options.data_parallel_size or 1
    groups: int = options.nnodes if options.data_parallel_size is None else options.data_parallel_size
    if options.nnodes < 1 or groups % options.nnodes:
        raise ValueError(f"expected --data-parallel-size to be a multiple of --nnodes ({options.nnodes}), got {groups}")
    nodes: int = options.nnodes
    return groups // nodes
