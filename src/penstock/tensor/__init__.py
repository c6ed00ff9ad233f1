"""Tensors: values that lie in a store, handles of them in messages, and views of them where they lie.

The memory layer below records the holders; the codec decides how messages travel. torch is used where it is installed,
and needed nowhere.
"""

from penstock._native import Lease
from penstock.tensor.content_key import content_key
from penstock.tensor.handle import Handle
from penstock.tensor.lease import Loan
from penstock.tensor.scope import Scope, ScopeStats
from penstock.tensor.store import Kept, Store, StoreStats
from penstock.tensor.tree import Empty, Plan, plan, read

__all__ = [
    "Empty",
    "Handle",
    "Kept",
    "Lease",
    "Loan",
    "Plan",
    "Scope",
    "ScopeStats",
    "Store",
    "StoreStats",
    "content_key",
    "plan",
    "read",
]
