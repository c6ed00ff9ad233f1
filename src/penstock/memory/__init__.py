"""Shared memory: segments, pools that lend out blocks, leases, and the peers that hold leases.

The layers above decide which messages peers send, and in which order.
"""

from penstock._native import BlockLease
from penstock.memory.peers import Peer
from penstock.memory.pool import Holder, Pool, PoolStats
from penstock.memory.ref import Ref
from penstock.memory.segment import MemoryOptions, Segment, Ticket

__all__ = ["BlockLease", "Holder", "MemoryOptions", "Peer", "Pool", "PoolStats", "Ref", "Segment", "Ticket"]
