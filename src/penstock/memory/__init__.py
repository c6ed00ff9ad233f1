"""Shared memory: segments, a pool that lends blocks of them out, leases, and the peers that hold these.

The layers above decide what peers send each other, and in which order.
"""

from penstock._native import BlockLease
from penstock.memory.peers import Peer
from penstock.memory.pool import Holder, Pool, PoolStats
from penstock.memory.ref import Ref
from penstock.memory.segment import MemoryOptions, Segment, Ticket

__all__ = ["BlockLease", "Holder", "MemoryOptions", "Peer", "Pool", "PoolStats", "Ref", "Segment", "Ticket"]
