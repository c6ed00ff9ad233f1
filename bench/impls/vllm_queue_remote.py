"""vLLM's own `MessageQueue` with remote readers, as its executor has it for workers of other nodes: ZeroMQ over TCP."""

from __future__ import annotations

from bench.impls import vllm_queue

check = vllm_queue.check
python = vllm_queue.python
lay = vllm_queue.lay


class Sender(vllm_queue.Sender):
    is_remote = True

    def reserved_nbytes(self) -> int:
        return 0


class Receiver(vllm_queue.Receiver):
    is_remote = True
