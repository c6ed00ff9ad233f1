"""Chooses a replica for a request: that of its session, or one with the shorter queue.

For Serve's own proxy; HAProxy balances by itself. Serve's default router prefers replicas on the proxy's node until
they are full, so that with large limits all requests go to one replica. This router does not know nodes.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

CHOICES = 2  # replicas that are compared by their queues


class SessionRouter(RequestRouter):  # type: ignore[misc]
    """By the header `x-session-id` (RAY_SERVE_SESSION_ID_HEADER_KEY), with rendezvous hashing: when a replica comes or
    goes, only sessions that move to it or were its own change their replica.

    A request without a session goes to the one of two random replicas that has fewer requests. A replica without a
    group that serves, as its status board said last, comes last.
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
    """Returns the place of a replica among those that a session may go to: the least is taken."""
    return hashlib.blake2b(f"{session}\0{replica}".encode(), digest_size=16).digest()


def _is_absent(replica: RunningReplica) -> bool:
    """Returns whether no group served when the replica last said so; one that has said nothing yet serves."""
    return not (replica.routing_stats or {}).get("serving_groups", 1)
