"""References that travel in messages of another library: which of them no receiver has opened yet.

    sender                                        receivers
    issues.add(lease, carrier)  ── reference ──►  store.pool.open(reference): uses up one grant
    issues.release_opened()

Each reference that is sent grants one open() to every receiver, as the sender does not know which of them the message
will reach. As many grants used as references sent: all have arrived, and the other grants are revoked. A message that
is never sent leaves its grants unused; its value is released when the carrier of the reference is gone and TIMEOUT has
passed. No receiver depends on that time: one that opens too late finds the reference stale, and answers that.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.errors import PeerDied

if TYPE_CHECKING:
    from penstock import Lease, Store
    from penstock.lowlevel import Ref

TIMEOUT = 60.0  # seconds from the last reference sent until an unopened value is released


class Issue:
    """One value, and the references to it that were sent and not all opened."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.count = 0  # of references sent
        self.at = 0.0  # when the last of them was
        self.granted: Counter[tuple[int, int]] = Counter()  # by index and epoch of the receiver
        self.carriers: list[weakref.ref[Any]] = []


class Issues:
    """Holds each value of a store from the sending of its reference until a receiver has opened it.

    Args:
        store: where the values lie.
        receiver: the name under which each receiver is a peer of the store.
        timeout: seconds, as TIMEOUT says.

    Examples:
        >>> store = Store(1 << 20)
        >>> issues = Issues(store, "core")
        >>> issues.add(store.put(np.arange(3)), carrier=None).nbytes
        152
        >>> len(issues)
        1
    """

    def __init__(self, store: Store, receiver: str, timeout: float = TIMEOUT) -> None:
        self._store = store
        self._receiver = receiver
        self._timeout = timeout
        self._issues: dict[Ref, Issue] = {}
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._issues)

    def add(self, lease: Lease, carrier: Any) -> Ref:
        """Returns the reference of the value, to be sent once. The lease is taken over.

        Args:
            lease: of the value, which lies in the store.
            carrier: what carries the reference until it is sent; None: nothing that could be waited for.
        """
        ref: Ref = lease.ref
        with self._changing:
            issue = self._issues.get(ref)
            if issue is None:
                issue = self._issues[ref] = Issue(lease)
            else:
                lease.release()
            issue.count += 1
            issue.at = time.monotonic()
            if carrier is not None:
                issue.carriers.append(weakref.ref(carrier))
            for index, epoch in self._receivers():
                try:
                    self._store.pool.grant(ref, index)
                except PeerDied:
                    continue
                issue.granted[index, epoch] += 1
        return ref

    def release_opened(self) -> None:
        """Releases the values that no message on its way refers to any more."""
        with self._changing:
            if not self._issues:
                return
            receivers = self._receivers()
            for ref, issue in list(self._issues.items()):
                unused = {index: self._store.pool.unused_grants(ref, index) for index, _ in receivers}
                opened = sum(issue.granted[index, epoch] - unused[index] for index, epoch in receivers)
                if opened < issue.count and not self._is_late(issue):
                    continue
                for index, many in unused.items():
                    for _ in range(many):
                        self._store.pool.revoke(ref, index)
                del self._issues[ref]
                issue.lease.release()

    def close(self) -> None:
        """Releases all. What receivers were granted ends with this process's place among the peers."""
        with self._changing:
            issues, self._issues = list(self._issues.values()), {}
            for issue in issues:
                issue.lease.release()

    def _receivers(self) -> list[tuple[int, int]]:
        """The receivers that are attached. One that died has opened nothing more; its messages are waited for no longer
        than TIMEOUT."""
        peers = self._store.peers()
        return [(peer.index, peer.epoch) for peer in peers if peer.name == self._receiver and peer.state == "live"]

    def _is_late(self, issue: Issue) -> bool:
        issue.carriers = [carrier for carrier in issue.carriers if carrier() is not None]
        return not issue.carriers and time.monotonic() - issue.at > self._timeout
