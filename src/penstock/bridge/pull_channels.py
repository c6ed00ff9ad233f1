"""Values of a remote node, by key: how a process requests values from the bridge of the local node.

    worker: Puller.get(key) ──Pull──► bridge ──WANT──► bridge of the remote node: Store.get
                            ◄─Pulled─        ◄─VALUE─
    the worker opens the value in the store of the local node, by a grant

A value crosses once, for any number of requests. Leaves to `value_exchange` what the bridge does.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock import _native
from penstock.channel import Inbox, LongRecords, Ring
from penstock.errors import MemoryExhausted, Missing, Timeout

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock.tensor import Store

PULL_TIMEOUT = 5.0  # seconds
CAPACITY = 1 << 14  # bytes of a client's ring: a client has one question at a time
LONG_RECORDS = LongRecords(max_records=1)  # questions and answers are short


class Pull(msgspec.Struct, array_like=True, frozen=True):
    """From a client to the bridge."""

    client: int
    number: int  # of the question, repeated in the answer
    peer: int  # the client's place among the peers of the store
    key: bytes


class Pulled(msgspec.Struct, array_like=True, frozen=True):
    """From the bridge to a client: the value is in the store, and granted to it; or why it is not."""

    number: int
    error: str = ""
    is_missing: bool = False  # at the remote node, too; else the local store had no room


@dataclass(frozen=True)
class PullChannels:
    """The channels between the clients on a node and one bridge. Passed to the processes as they are spawned.

    Examples:
        >>> len(PullChannels.open(clients=3).answers)
        3
    """

    requests: Inbox[Pull]
    answers: tuple[Ring[Pulled], ...]

    @classmethod
    def open(cls, clients: int, *, name: str = "pulls") -> Self:
        """Creates the channels for so many clients."""
        # One lane more than clients: the last lane is never taken, so the inbox never ends.
        requests: Inbox[Pull] = Inbox(
            Pull, senders=clients + 1, name=name, capacity=CAPACITY, long_records=LONG_RECORDS
        )
        answers: tuple[Ring[Pulled], ...] = tuple(
            Ring(Pulled, name=f"{name} {client}", capacity=CAPACITY, long_records=LONG_RECORDS)
            for client in range(clients)
        )
        return cls(requests, answers)

    def close(self) -> None:
        self.requests.close()
        for ring in self.answers:
            ring.close()


class Puller:
    """One client: gets values of the local or of the remote store. Threads may share a client.

    Args:
        channels: of the bridge.
        client: the number of the client, unique among living processes.
        store: of the local node.
        name: of the process, in errors.

    Examples:
        >>> store, pulls = Store(1 << 20), PullChannels.open(clients=1)
        >>> store.put(b"here", key=bytes(32)).release()
        >>> Puller(pulls, 0, store, name="worker 0").get(bytes(32)).value()
        b'here'
    """

    def __init__(self, channels: PullChannels, client: int, store: Store, *, name: str = "") -> None:
        self._client, self._store = client, store
        self._requests = channels.requests.open_sender(client, name=name)
        self._answers = channels.answers[client].open_receiver(name=name)
        self._number = 0
        self._turn = threading.Lock()

    def get(self, key: bytes, timeout: float = PULL_TIMEOUT) -> _native.Lease:
        """Returns a lease of the value under the key. Pulls a missing value from the remote node.

        Raises:
            Missing: both stores lack the key.
            MemoryExhausted: the local store has no room for the value.
            Timeout: no answer in time.
            PeerDied, EndOfChannel: the bridge has ended.
        """
        try:
            return self._store.get(key)
        except Missing:
            pass
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            raise Timeout(f"another thread pulls a value: no turn within {timeout:g} s")
        try:
            return self._pull(key, deadline)
        finally:
            self._turn.release()

    def _pull(self, key: bytes, deadline: float) -> _native.Lease:
        self._number += 1
        pull = Pull(self._client, self._number, self._store.pool.place.slot, key)
        self._requests.send(pull, max(0.0, deadline - time.monotonic()))
        while True:
            answer = self._answers.receive(max(0.0, deadline - time.monotonic()))
            if answer.number == self._number:  # and not of a question that has timed out
                break
        if answer.is_missing:
            raise Missing(f"neither '{self._store.name}' nor the other node keeps {key.hex()[:16]}…: {answer.error}")
        if answer.error:
            raise MemoryExhausted(answer.error)
        return self._store.open(key)

    def close(self) -> None:
        self._requests.close()
        self._answers.close()
