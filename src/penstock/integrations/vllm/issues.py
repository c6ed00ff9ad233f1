"""References in messages of a foreign library, until a receiver has opened them.

    sender                                        receivers
    issues.add(lease, carrier)  ── reference ──►  store.pool.open(reference): uses up one grant
    issues.release_opened()

Each sent reference grants one open() to every receiver, as the sender does not know the receiver of the message. When
as many grants are used as references were sent, all references have arrived, and the remaining grants are revoked. A
message that is never sent leaves grants unused; the value is released when the carrier of the reference is gone and
TIMEOUT has passed. No receiver depends on TIMEOUT: a late receiver finds the reference stale, and answers so.
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
    """A value with references that were sent and are not all opened."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.count = 0  # of references sent
        self.at = 0.0  # when the last of them was
        self.granted: Counter[tuple[int, int]] = Counter()  # by index and epoch of the receiver
        self.carriers: list[weakref.ref[Any]] = []


class Issues:
    """Holds each value of a store from the sending of a reference until a receiver has opened the value.

    Args:
        store: of the values.
        receiver: the peer name of each receiver in the store.
        timeout: seconds, see TIMEOUT.

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
        """Returns the reference of the value, to be sent once. Takes over the lease.

        Args:
            lease: of a value in the store.
            carrier: the object with the reference until the sending; None: no object to wait for.
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
        """Releases the values without references under way."""
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
        """Releases all values. Grants of receivers end when the process leaves the peers."""
        with self._changing:
            issues, self._issues = list(self._issues.values()), {}
            for issue in issues:
                issue.lease.release()

    def _receivers(self) -> list[tuple[int, int]]:
        """Returns the attached receivers. A dead receiver opens nothing more, and messages to a dead receiver are
        awaited for at most TIMEOUT."""
        peers = self._store.peers()
        return [(peer.index, peer.epoch) for peer in peers if peer.name == self._receiver and peer.state == "live"]

    def _is_late(self, issue: Issue) -> bool:
        issue.carriers = [carrier for carrier in issue.carriers if carrier() is not None]
        return not issue.carriers and time.monotonic() - issue.at > self._timeout
