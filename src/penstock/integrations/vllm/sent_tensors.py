"""Tensors that one process sends and one other receives, by a key that travels in a message of another library.

The receiver removes the key as it opens the tensor: so the sender sees that it has arrived, with no message back.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from penstock import Lease, MemoryExhausted, Missing, Store

ROOM_TIMEOUT = 1.0  # seconds
ROOM_POLL_S = 0.02  # seconds, of a sender that waits for room
LOST_TIMEOUT = 60.0  # seconds from sending until a tensor that no receiver has opened is given up for its room


class SentTensors:
    """A store of tensors that were sent: each is held until its receiver has removed its key.

    A tensor of a message that was never sent has no receiver: it is given up after a time; but only where its room is
    wanted, as a receiver that was stopped for that long would find it missing.

    Args:
        store: where the tensors lie.
        timeout: seconds, as LOST_TIMEOUT says.
    """

    def __init__(self, store: Store, timeout: float = LOST_TIMEOUT) -> None:
        self.store = store
        self._timeout = timeout
        self._sent: deque[tuple[bytes, Lease, float]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def put(self, tensor: Any, timeout: float = ROOM_TIMEOUT) -> bytes:
        """Returns the key of a copy of the tensor.

        Raises:
            MemoryExhausted: there is no room within the timeout.
            UnsupportedTensor: of what cannot be kept.
        """
        key = os.urandom(32)
        deadline = time.monotonic() + timeout
        self.release_received()
        while True:
            try:
                lease = self.store.put([tensor], key=key, timeout=ROOM_POLL_S)
                break
            except MemoryExhausted:
                if tensor.nbytes > self.store.nbytes or time.monotonic() > deadline:
                    raise
            self.release_received(gives_up_lost=True)
        self._sent.append((key, lease, time.monotonic()))
        return key

    def release_received(self, *, gives_up_lost: bool = False) -> None:
        """Releases what its receivers have opened; with `gives_up_lost` also what none has within the timeout."""
        now = time.monotonic()
        unreceived: deque[tuple[bytes, Lease, float]] = deque()
        for key, lease, sent_at in self._sent:
            if gives_up_lost and now - sent_at > self._timeout:
                self.store.remove(key)
            elif self._is_kept(key):
                unreceived.append((key, lease, sent_at))
                continue
            lease.release()
        self._sent = unreceived

    def _is_kept(self, key: bytes) -> bool:
        try:
            self.store.get(key).release()
        except Missing:
            return False
        return True


def receive_value(store: Store, key: bytes) -> Lease:
    """Returns a lease of the tensor that was sent under the key, which no process can open again.

    Raises:
        Missing: its sender has given it up, or died.
    """
    lease = store.get(key)
    store.remove(key)
    return lease
