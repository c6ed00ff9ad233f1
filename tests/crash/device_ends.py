"""Producers and consumers of device memory, and the process that kills them (test_device_memory_deaths).

Children are forks of a server that has imported this module. Where torch has no CUDA, the import opens a double of the
driver, which a fork can go on with. A real device is opened by each child: a fork of a process that has asked the
driver has no device.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from penstock.tensor.cuda import CudaPool, CudaTensors, Place, Reference
from tests.conftest import eventually
from tests.support.libcuda import DriverDouble, use_device

MIB = 1 << 20
SIZE = 1000  # bytes of a tensor
CYCLES = 1_000_000  # of a device's work
WITHIN_S = 30.0  # for a mapping of a dead producer, which closes within 1 s on a machine without other work
SLACK_NBYTES = 2 * MIB  # of a device's free memory
CONTEXT = multiprocessing.get_context("forkserver")
IS_DOUBLE = torch.version.cuda is None  # before a double opens, which has a version

if IS_DOUBLE:
    use_device(0)
    # Imports what the first operation imports.
    torch.full((SIZE,), 1, dtype=torch.uint8, device="cuda").clone().eq(1).cpu()


def run_campaign(deaths: int, seed: int) -> None:
    chance = random.Random(seed)
    torch.cuda.set_device(0)
    CONTEXT.set_forkserver_preload([__name__])
    with CudaPool.create(8 * MIB) as pool:
        tensors = CudaTensors(pool, None)
        for _ in range(2):  # what a process opens once and keeps
            _kill_producer(chance)
            _kill_consumer(chance, tensors)
        gc.collect()
        eventually(_holds_own_pool_alone, WITHIN_S)
        num_descriptors, free = _count_descriptors(), torch.cuda.mem_get_info()[0]
        for number in range(deaths):
            _kill_consumer(chance, tensors) if number % 2 else _kill_producer(chance)
            gc.collect()
            try:
                eventually(lambda: _holds_own_pool_alone() and _count_descriptors() <= num_descriptors, WITHIN_S)
            except AssertionError:
                held = DriverDouble.current.driver.held() if IS_DOUBLE else None
                text = f"after death {number}: {held}, {_count_descriptors()} descriptors, {num_descriptors} before"
                raise AssertionError(text) from None
        eventually(lambda: abs(torch.cuda.mem_get_info()[0] - free) <= SLACK_NBYTES, WITHIN_S)
        eventually(pool.close)
        assert tensors.close()


def _holds_own_pool_alone() -> bool:
    """Whether the double of the driver has no other memory. True on a device, where free memory tells."""
    if not IS_DOUBLE:
        return True
    driver = DriverDouble.current.driver
    return driver.held() == {"allocations": 1, "memory behind descriptors": 1} and not driver.faults()


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _start(target: Callable[..., None], *arguments: str) -> tuple[Connection, Any]:
    talk, remote = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(remote, *arguments))
    process.start()
    remote.close()
    return talk, process


def _receive(talk: Connection) -> bytes:
    assert talk.poll(WITHIN_S), "the other process has sent nothing"
    return talk.recv_bytes()


def _decoded(raw: bytes) -> Reference:
    return msgspec.msgpack.decode(raw, type=Reference)  # type: ignore[arg-type]


# ── producers ──
def _produce(talk: Connection) -> None:
    torch.cuda.set_device(0)
    pool = CudaPool.create(2 * MIB)
    tensors = CudaTensors(pool, None)
    talk.send_bytes(str(pool.ticket).encode())
    place = msgspec.msgpack.decode(talk.recv_bytes(), type=Place)
    for number in range(1000):
        tensor = torch.full((SIZE,), number % 251, dtype=torch.uint8, device="cuda")
        talk.send_bytes(msgspec.msgpack.encode(tensors.put(tensor, [place], timeout=WITHIN_S)))


def _kill_producer(chance: random.Random) -> None:
    """The producer dies before or after its memory is mapped, while tensors are used, in flight, or kept."""
    talk, producer = _start(_produce)
    with talk, CudaPool.attach(_receive(talk).decode()) as pool:
        tensors = CudaTensors(pool, None)
        talk.send_bytes(msgspec.msgpack.encode(tensors.place))
        held = []
        for number in range(chance.randrange(4)):
            view = tensors.view(_decoded(_receive(talk)))
            if chance.random() < 0.5:
                torch.cuda._sleep(CYCLES)
                held.append((number, view.clone() if chance.random() < 0.5 else view))
            del view
        producer.kill()
        producer.join()
        for number, tensor in held:
            assert tensor.cpu().eq(number).all()
        held.clear()
        tensor = None
        gc.collect()
        eventually(lambda: pool._mapped is None, WITHIN_S)
        tensors.close()
    producer.close()


# ── consumers ──
def _consume(talk: Connection, ticket: str) -> None:
    torch.cuda.set_device(0)
    tensors = CudaTensors(CudaPool.attach(ticket), None)
    talk.send_bytes(msgspec.msgpack.encode(tensors.place))
    views = []
    while True:
        views.append(tensors.view(_decoded(talk.recv_bytes())))
        torch.cuda._sleep(CYCLES)
        views[-1].clone()
        if len(views) % 2:
            views.pop()
        talk.send_bytes(b"viewed")


def _kill_consumer(chance: random.Random, tensors: CudaTensors) -> None:
    """The consumer dies before it opens a reference, or with views and with work in flight."""
    assert tensors.pool is not None
    talk, consumer = _start(_consume, str(tensors.pool.ticket))
    with talk:
        place = msgspec.msgpack.decode(_receive(talk), type=Place)
        refs = []
        for number in range(1 + chance.randrange(4)):
            tensor = torch.full((SIZE,), number, dtype=torch.uint8, device="cuda")
            refs.append(tensors.put(tensor, [place], timeout=WITHIN_S))
            talk.send_bytes(msgspec.msgpack.encode(refs[-1]))
        for _ in range(chance.randrange(len(refs) + 1)):
            assert _receive(talk) == b"viewed"
        consumer.kill()
        consumer.join()
    consumer.close()
    pool = tensors.pool
    eventually(lambda: pool.flush() and pool.stats().blocks == 0, WITHIN_S)
