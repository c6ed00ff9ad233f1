"""Command-line options of a server of several nodes, and how they become `Nodes`."""

from __future__ import annotations

import argparse
import os

from penstock.engine.protocol.config import Nodes


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("nodes").add_argument
    add(
        "--nnodes",
        "-n",
        metavar="N",
        type=int,
        default=1,
        help="Number of nodes (machines) with engines, which divide --data-parallel-size evenly; this command runs on "
        "each of them, with the same options (default: %(default)s)",
    )
    add(
        "--node-rank",
        "-r",
        metavar="N",
        type=int,
        default=0,
        help="Rank of this node; the node of rank 0 has the API servers (default: %(default)s)",
    )
    add(
        "--master-addr",
        metavar="HOST",
        default="127.0.0.1",
        help="Address at which the node of rank 0 listens for the others (default: %(default)s)",
    )
    add(
        "--master-port",
        metavar="N",
        type=int,
        default=29501,
        help="First of its ports, one for each engine of other nodes, or for each engine and other node with "
        "--tensor-parallel-over-nodes (default: %(default)s)",
    )
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of a Ray cluster, as in ray.init: the other nodes are started on its machines "
        "(default: each by its own command)",
    )
    for name, meaning in (
        ("cert", "certificate of this node"),
        ("key", "private key of that certificate, without a passphrase"),
        ("ca", "certificate of the authority that has signed those of all nodes"),
    ):
        add(
            f"--nodes-tls-{name}",
            metavar="PATH",
            default="",
            help=f"PEM file of the {meaning}; links between nodes are TLS 1.3 then (default: not encrypted)",
        )
    add(
        "--tensor-parallel-over-nodes",
        action="store_true",
        help="Divide the workers of each engine (--tensor-parallel-size) among the nodes, for a model that fits on no "
        "single one: not over Ethernet, where the all-reduces of each layer take longer than its arithmetic "
        "(default: off)",
    )
    add(
        "--headless",
        action="store_true",
        help="Run engines and no API server: for nodes of rank 1 and more (default: off)",
    )


def nodes(options: argparse.Namespace) -> Nodes | None:
    """Returns the nodes; None: there is only this one. Raises ValueError."""
    count, rank = options.nnodes, options.node_rank
    if options.headless != (rank > 0):
        raise ValueError(
            f"--node-rank {rank} {'needs' if rank else 'takes no'} --headless: the node of rank 0 has the API servers"
        )
    if options.ray_address is not None and (rank or count == 1):
        raise ValueError("--ray-address is for the node of rank 0 of several: --nnodes 2, or more, and no --node-rank")
    given = {name: getattr(options, f"nodes_{name}") for name in ("tls_cert", "tls_key", "tls_ca")}
    tls = {name: os.path.abspath(path) if path else "" for name, path in given.items()}  # Ray's actors are elsewhere
    if count == 1 and not rank:
        if any(tls.values()):
            raise ValueError(
                "--nodes-tls-cert, --nodes-tls-key and --nodes-tls-ca are for several nodes: --nnodes is 1"
            )
        if options.tensor_parallel_over_nodes:
            raise ValueError("--tensor-parallel-over-nodes is for several nodes: --nnodes 2, or more")
        return None
    return Nodes(
        count=count,
        rank=rank,
        address=options.master_addr,
        port=options.master_port,
        tensor_parallel_over_nodes=options.tensor_parallel_over_nodes,
        **tls,
    )


def groups_of_this_node(options: argparse.Namespace) -> int:
    """Raises ValueError unless the engines can be divided evenly among the nodes."""
    if options.tensor_parallel_over_nodes:  # each engine is on all of them
        return options.data_parallel_size or 1
    groups: int = options.nnodes if options.data_parallel_size is None else options.data_parallel_size
    if options.nnodes < 1 or groups % options.nnodes:
        raise ValueError(f"--data-parallel-size is a multiple of --nnodes ({options.nnodes}), not {groups}")
    nodes: int = options.nnodes
    return groups // nodes
