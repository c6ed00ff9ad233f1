"""What `penstock` is made of, for engines that need more than its channels and its store.

Blocks of a pool with grants (`Pool`, `BlockLease`, `Ref`), plain shared memory (`Segment`), a look at a channel as its
records pass (`Tap`), records filled in place (`ByteSender.reserve`), ends that forward frames as they are
(`FrameReceiver`, `FrameSender`), and the errors of these.
"""

from penstock._native import Tap
from penstock.channel import ByteReceiver, ByteSender, FrameReceiver, FrameSender, Reservation
from penstock.errors import OutOfStep, StaleRef
from penstock.memory import BlockLease, Peer, Pool, Ref, Segment

__all__ = [
    "BlockLease",
    "ByteReceiver",
    "ByteSender",
    "FrameReceiver",
    "FrameSender",
    "OutOfStep",
    "Peer",
    "Pool",
    "Ref",
    "Reservation",
    "Segment",
    "StaleRef",
    "Tap",
]
