"""Tensors: as references in messages, as views of shared memory, as trees that lie in one piece of it.

Leaves to the memory below who holds what, and to the codec how messages travel. torch is used where it is, and needed
nowhere.
"""

from penstock.tensor.bridge import Tensors, TensorStats
from penstock.tensor.item import Item
from penstock.tensor.kinds import UnsupportedTensor
from penstock.tensor.ref import TensorRef
from penstock.tensor.store import Kept, Store, Stored, StoreStats, key_of
from penstock.tensor.transport import Incoming, IncomingStats, Outgoing, OutgoingStats, Scope
from penstock.tensor.tree import Plan, plan, read

__all__ = [
    "Incoming",
    "IncomingStats",
    "Item",
    "Kept",
    "Outgoing",
    "OutgoingStats",
    "Plan",
    "Scope",
    "Store",
    "StoreStats",
    "Stored",
    "TensorRef",
    "TensorStats",
    "Tensors",
    "UnsupportedTensor",
    "key_of",
    "plan",
    "read",
]
