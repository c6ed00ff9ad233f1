"""Chooses a replica for a request: the replica of the session, or the shorter of two queues.

For Serve's proxy; HAProxy does not use routers. Serve's default router prefers replicas on the proxy's node until the
replicas are full, so large limits send all requests to one replica. `SessionRouter` ignores nodes.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

CHOICES = 2  # replicas with compared queues


class SessionRouter(RequestRouter):  # type: ignore[misc]
    """By the header `x-session-id` (RAY_SERVE_SESSION_ID_HEADER_KEY), with rendezvous hashing: when a replica comes or
    goes, only sessions of the replica move.

    A request without a session goes to one of two random replicas: to the replica with fewer requests. A replica
    without a serving group, by the last status board, comes last.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._random = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns replicas in ranks: one of the next rank is taken where all of a rank are full."""
        session = pending_request.metadata.session_id if pending_request is not None else ""
        if session:
            by_weight = sorted(candidate_replicas, key=lambda replica: weight(session, replica.replica_id.unique_id))
            return [[replica] for replica in sorted(by_weight, key=_is_absent)]
        serving = [replica for replica in candidate_replicas if not _is_absent(replica)]
        absent = [replica for replica in candidate_replicas if _is_absent(replica)]
        pair = self._random.sample(serving, min(CHOICES, len(serving)))
        return [rank for rank in (pair, serving, absent) if rank]


def weight(session: str, replica: str) -> bytes:
    """Returns the rank of a replica for a session: the replica of the lowest rank is chosen."""
    return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=16).digest()


def _is_absent(replica: RunningReplica) -> bool:
    """Returns whether the replica's last report had no serving group; a replica without a report serves."""
    return not (replica.routing_stats or {}).get("serving_groups", 1)
