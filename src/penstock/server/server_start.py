"""The main function of a server process, and the store of all servers, without the modules that a server imports."""

from __future__ import annotations

from penstock import Store
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.server.listening import ServerArgs
from penstock.server.options import RESPONSE_STORE, ServerOptions

STORE_PEERS = 8  # processes that may attach besides two lives of each server
VALUES = 2  # of a stored response


def open_response_store(options: ServerOptions, servers: int) -> Store | None:
    """Returns the store that all server processes share; None: no response is stored."""
    if not options.response_store_nbytes:
        return None
    return Store(
        options.response_store_nbytes,
        name=RESPONSE_STORE,
        max_items=VALUES * options.max_stored_responses,
        max_peers=2 * servers + STORE_PEERS,
    )


def serve(shared: ServerArgs, cluster: Cluster, me: ProcessId) -> None:
    """Runs a server process: `server_process.serve`."""
    from penstock.server import server_process

    server_process.serve(shared, cluster, me)
