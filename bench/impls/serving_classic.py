"""The classic way: each request carries its image. Pickled to the core by ZeroMQ's push and pull, out of band and not
copied by pyzmq; from there to the workers by vLLM's `MessageQueue` in the peer interpreter if there is one, else
pickled again into a pipe for each. Answers go back by the same means.

With several servers, caches that the two sides keep alike are off: the image travels whether or not it came before.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

from bench.impls import Meet, Seat, Unavailable, Wires, serving, vllm_queue
from bench.impls.serving import SERVERS, WORKERS, Images


def check() -> None:
    if not has_vllm():
        try:
            import zmq  # noqa: F401
        except ImportError:
            raise Unavailable("neither vllm nor pyzmq is installed") from None


def has_vllm() -> bool:
    try:
        vllm_queue.check()
    except Unavailable:
        return False
    return True


def python() -> str:
    return vllm_queue.python() if has_vllm() else sys.executable


def lay(receivers: int, scratch: Path, largest: str, images: str) -> Wires:
    at = str(scratch)
    if has_vllm():
        pipes: list[Any] = []
        workers: list[Any] = [(at, None)] * WORKERS
    else:
        pairs = [multiprocessing.Pipe() for _ in range(WORKERS)]
        pipes = [near for near, _ in pairs]
        workers = [(at, far) for _, far in pairs]
    return Wires([(at, pipes), *((at, int(images), int(largest)) for _ in range(SERVERS)), *workers])


class Server(serving.Server):
    def __init__(self, wire: tuple[str, int, int], rank: int) -> None:
        import zmq

        scratch, images, largest = wire
        super().__init__(rank, Images(images, largest))
        self._context = zmq.Context()
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(f"ipc://{scratch}/answers{rank}")
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.connect(f"ipc://{scratch}/requests")

    def ask(self, request: int, image: int, is_kept: bool) -> bool:
        buffers: list[pickle.PickleBuffer] = []
        message = (request, self.rank, image, self.images[image])
        head = pickle.dumps(message, 5, buffer_callback=buffers.append)
        self._requests.send_multipart([head, *(each.raw() for each in buffers)], copy=False)
        return False

    def wait(self) -> None:
        self._answers.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Core(serving.Core):
    def __init__(self, wire: tuple[str, list[Any]], meet: Meet) -> None:
        import zmq

        scratch, self._pipes = wire
        self._context = zmq.Context()
        self._empty, self._not_now = zmq.Again, zmq.NOBLOCK
        self._requests = self._context.socket(zmq.PULL)
        self._requests.bind(f"ipc://{scratch}/requests")
        self._answers = {}
        for rank in range(1, SERVERS + 1):
            self._answers[rank] = self._context.socket(zmq.PUSH)
            self._answers[rank].connect(f"ipc://{scratch}/answers{rank}")
        if not self._pipes:
            message_queue = vllm_queue._message_queue(scratch)
            chunk = vllm_queue.BROADCAST_CHUNK_NBYTES
            self._steps = message_queue(WORKERS, WORKERS, max_chunk_bytes=chunk)
            handles = meet(self._steps.export_handle())[1 + SERVERS :]
            self._done = [message_queue.create_from_handle(handle, 0) for handle in handles]
            for each in (self._steps, *self._done):
                each.wait_until_ready()
            warnings.simplefilter("ignore")  # torch does not like what is received to be read-only

    def _one(self, flags: int = 0) -> Any:
        head, *buffers = self._requests.recv_multipart(flags, copy=False)
        return pickle.loads(head.buffer, buffers=[each.buffer for each in buffers])

    def take(self) -> list[Any]:
        taken = [self._one()]
        try:
            while True:
                taken.append(self._one(self._not_now))
        except self._empty:
            return taken

    def step(self, requests: list[Any]) -> None:
        if self._pipes:
            step = pickle.dumps([(request, image, array) for request, _, image, array in requests], 5)
            for pipe in self._pipes:
                pipe.send_bytes(step)
            for pipe in self._pipes:
                pipe.recv_bytes()
            return
        import torch

        self._steps.enqueue([(request, image, torch.from_numpy(array)) for request, _, image, array in requests])
        for each in self._done:
            each.dequeue(indefinite=True)

    def answer(self, request: Any) -> None:
        self._answers[request[1]].send(b"done")

    def close(self) -> None:
        self._context.destroy(linger=0)
        vllm_queue._collect(self)


class Worker(serving.Worker):
    def __init__(self, wire: tuple[str, Any], rank: int, meet: Meet) -> None:
        scratch, self._pipe = wire
        if self._pipe is None:
            message_queue = vllm_queue._message_queue(scratch)
            self._done = message_queue(1, 1)
            handles = meet(self._done.export_handle())
            self._steps = message_queue.create_from_handle(handles[0], rank - 1 - SERVERS)
            self._steps.wait_until_ready()
            self._done.wait_until_ready()

    def receive(self) -> list[tuple[int, int, Any]]:
        step: list[tuple[int, int, Any]]
        step = self._steps.dequeue(indefinite=True) if self._pipe is None else pickle.loads(self._pipe.recv_bytes())
        return step

    def done(self) -> None:
        if self._pipe is None:
            self._done.enqueue(b"done")
        else:
            self._pipe.send_bytes(b"done")

    def close(self) -> None:
        vllm_queue._collect(self)


def Sender(wire: Any, seat: Seat, meet: Meet) -> Core:
    return Core(wire, meet)


def Receiver(wire: Any, seat: Seat, meet: Meet) -> Server | Worker:
    if seat.rank > SERVERS:
        return Worker(wire, seat.rank, meet)
    if has_vllm_here():
        meet(None)
    return Server(wire, seat.rank)


def has_vllm_here() -> bool:
    """In a process of the peer interpreter."""
    import importlib.util

    return importlib.util.find_spec("vllm") is not None
