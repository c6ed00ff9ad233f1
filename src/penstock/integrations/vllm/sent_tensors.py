"""Tensors from a sender to a receiver, by a key in a message of a foreign library.

The receiver removes the key when opening the tensor, which tells the sender of the arrival without a message back.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from penstock import Lease, MemoryExhausted, Missing, Store

ROOM_TIMEOUT = 1.0  # seconds
ROOM_POLL_S = 0.02  # seconds, of a sender that waits for room
LOST_TIMEOUT = 60.0  # seconds from sending until the room of an unopened tensor may be reused


class SentTensors:
    """A store of sent tensors: each tensor is held until the receiver has removed the key.

    A tensor without a receiver (the message was never sent) is given up after `timeout`, but only when room is wanted:
    a receiver that was stopped for `timeout` seconds would miss the tensor.

    Args:
        store: of the tensors.
        timeout: seconds, see LOST_TIMEOUT.
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
            MemoryExhausted: no room within the timeout.
            UnsupportedTensor: the store cannot hold the tensor.
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
        """Releases the opened tensors; with `gives_up_lost` also tensors that stayed unopened for the timeout."""
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
    """Returns a lease of the tensor under the key, and removes the key.

    Raises:
        Missing: the sender has given up the tensor, or died.
    """
    lease = store.get(key)
    store.remove(key)
    return lease
