"""The start of a core: waits until all processes of its group are there."""

from __future__ import annotations

import time

import penstock
from penstock import PeerDied, Timeout
from penstock.engine.cluster.group_ends import is_stale_death
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId, live_receivers
from penstock.engine.protocol.messages import INBOX, OutputReady, Ready, Stop


def await_members(cluster: Cluster, me: ProcessId, inbox: penstock.Receiver[INBOX]) -> list[Ready] | None:
    """Waits until all workers have loaded the model and all output processors receive. Returns the Ready messages of
    the workers; None: a Stop has arrived. Raises Timeout, and PeerDied of one of them."""
    config = cluster.config
    deadline = time.monotonic() + config.start_timeout
    ready: list[Ready] = []
    missing = {f"worker {rank}" for rank in range(config.tensor_parallel_size)}
    missing |= {f"output {output}" for output in range(config.output_processors)}
    while missing:
        try:
            message = inbox.receive(max(0.0, deadline - time.monotonic()))
        except Timeout as error:
            late = ", ".join(sorted(missing))
            raise Timeout(f"{late}: not ready within {config.start_timeout:g} s: {error}") from None
        except PeerDied as death:
            # The core holds no state of servers yet; a server is known by its lane, as its name may be gone.
            if death.index >= config.api_server_count and not is_stale_death(me, death):
                raise
        else:
            if isinstance(message, Ready):
                ready.append(message)
                missing.discard(f"worker {message.rank}")
            elif isinstance(message, OutputReady) and message.incarnation == me.incarnation:
                missing.discard(f"output {message.index}")
            elif isinstance(message, Stop):
                return None
    return ready


def require_one_model(ready: list[Ready]) -> int:
    """Returns the fingerprint of the model that all ranks have loaded. Raises RuntimeError if they differ."""
    first = ready[0]
    for other in ready:
        if other.model != first.model:
            raise RuntimeError(
                f"expected one model on all ranks of a group, got model_fingerprint {first.model:016x} on rank "
                f"{first.rank} and {other.model:016x} on rank {other.rank}: the files differ between nodes, or were "
                "replaced while ranks read them"
            )
    return first.model


def await_receivers(cluster: Cluster, me: ProcessId) -> None:
    """Waits until the workers have opened their receivers: they miss no step that is sent from now on. Raises
    Timeout."""
    steps = cluster.groups[me.group].steps
    deadline = time.monotonic() + cluster.config.start_timeout
    while len(live_receivers(steps, me.incarnation)) < steps.receivers:
        if time.monotonic() >= deadline:
            raise Timeout(f"the workers have not opened their receivers within {cluster.config.start_timeout:g} s")
        time.sleep(AGAIN)
