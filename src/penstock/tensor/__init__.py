"""Tensors: as references in messages, as views of shared memory, as trees that lie in one piece of it.

The memory layer below records the holders; the codec decides how messages travel. torch is used where it is installed,
and needed nowhere.
"""

from penstock.tensor.bridge import Tensors, TensorStats
from penstock.tensor.item import Item
from penstock.tensor.kinds import UnsupportedTensor
from penstock.tensor.ref import TensorRef
from penstock.tensor.store import Kept, Store, StoreStats, key_of
from penstock.tensor.stored import Making, Stored
from penstock.tensor.transport import Incoming, IncomingStats, Outgoing, OutgoingStats, Scope
from penstock.tensor.tree import Empty, Plan, plan, read

__all__ = [
    "Empty",
    "Incoming",
    "IncomingStats",
    "Item",
    "Kept",
    "Making",
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
