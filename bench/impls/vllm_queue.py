"""vLLM's own `MessageQueue`, in the peer interpreter, with the sizes that its multi-process executor gives it.

One queue there, and one back from each receiver, as its workers answer. Frames of 1 MiB and more are offered as pickle
buffers, which its queue carries out of band.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import impls
from bench.impls import Meet, Seat, Wires
from bench.impls.peer import python_with

BROADCAST_CHUNK_NBYTES = 16 << 20
HERE = "127.0.0.1"
OUT_OF_BAND_NBYTES = 1 << 20


def check() -> None:
    python()


def python() -> str:
    return python_with("vllm")


def lay(receivers: int, scratch: Path) -> Wires:
    return Wires([str(scratch)] * (receivers + 1))


def _message_queue(scratch: str) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_RPC_BASE_PATH", scratch)
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


def _queue(scratch: str, readers: int, is_remote: bool, **options: Any) -> Any:
    where = {"n_local_reader": 0, "connect_ip": HERE} if is_remote else {"n_local_reader": readers}
    return _message_queue(scratch)(readers, **where, **options)


def _collect(end: Sender | Receiver) -> None:
    """A queue unlinks its shared memory when it is collected, and only then; a process that just exits leaves it."""
    vars(end).clear()
    gc.collect()


class Sender(impls.Sender):
    options: Mapping[str, Any] = {}  # of the queue there, more than the sizes
    is_remote = False  # the readers are on other nodes

    def __init__(self, scratch: str, seat: Seat, meet: Meet) -> None:
        self._frames = _queue(
            scratch, seat.receivers, self.is_remote, max_chunk_bytes=BROADCAST_CHUNK_NBYTES, **self.options
        )
        handles = meet(self._frames.export_handle())
        self._replies = [_message_queue(scratch).create_from_handle(handle, 0) for handle in handles[1:]]
        self._frames.wait_until_ready()
        for each in self._replies:
            each.wait_until_ready()

    def expect(self, nbytes: int) -> None:
        self.send = self._frames.enqueue if nbytes < OUT_OF_BAND_NBYTES else self._send_out_of_band

    def _send_out_of_band(self, frame: bytes) -> None:
        self._frames.enqueue(pickle.PickleBuffer(frame))

    def gather(self) -> None:
        for each in self._replies:
            each.dequeue(indefinite=True)

    def reserved_nbytes(self) -> int:
        return sum(each.buffer.total_bytes_of_buffer for each in (self._frames, *self._replies))

    def close(self) -> None:
        _collect(self)


class Receiver(impls.Receiver):
    is_remote = False

    def __init__(self, scratch: str, seat: Seat, meet: Meet) -> None:
        self._replies = _queue(scratch, 1, self.is_remote)
        handles = meet(self._replies.export_handle())
        self._frames = _message_queue(scratch).create_from_handle(handles[0], seat.rank - 1)
        self._frames.wait_until_ready()
        self._replies.wait_until_ready()
        self.reply = self._replies.enqueue

    def receive(self) -> Any:
        return self._frames.dequeue(indefinite=True)

    def close(self) -> None:
        _collect(self)
