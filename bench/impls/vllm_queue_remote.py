"""vLLM's own `MessageQueue` with remote readers, as its executor has it for workers of other nodes: ZeroMQ over TCP."""

from __future__ import annotations

from pathlib import Path

from bench.impls import Meet, Seat, Wires, vllm_queue
from bench.impls.vllm_queue import BROADCAST_CHUNK_NBYTES, _collect, _message_queue

HERE = "127.0.0.1"


def check() -> None:
    vllm_queue.check()


def python() -> str:
    return vllm_queue.python()


def lay(receivers: int, scratch: Path) -> Wires:
    return vllm_queue.lay(receivers, scratch)


class Sender(vllm_queue.Sender):
    def __init__(self, scratch: str, seat: Seat, meet: Meet) -> None:
        message_queue = _message_queue(scratch)
        receivers = seat.receivers
        self._frames = message_queue(receivers, 0, max_chunk_bytes=BROADCAST_CHUNK_NBYTES, connect_ip=HERE)
        handles = meet(self._frames.export_handle())
        self._replies = [message_queue.create_from_handle(handle, 0) for handle in handles[1:]]
        self._frames.wait_until_ready()
        for each in self._replies:
            each.wait_until_ready()

    def reserved_nbytes(self) -> int:
        return 0


class Receiver:
    def __init__(self, scratch: str, seat: Seat, meet: Meet) -> None:
        message_queue = _message_queue(scratch)
        self._replies = message_queue(1, 0, connect_ip=HERE)
        handles = meet(self._replies.export_handle())
        self._frames = message_queue.create_from_handle(handles[0], seat.rank - 1)
        self._frames.wait_until_ready()
        self._replies.wait_until_ready()
        self.reply = self._replies.enqueue

    def expect(self, nbytes: int) -> None:
        pass

    def receive(self) -> object:
        return self._frames.dequeue(indefinite=True)

    def close(self) -> None:
        _collect(self)
