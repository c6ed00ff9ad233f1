"""What a device gains: copies from shared memory at pinned speed, tensors between processes for the price of a message.

Needs a CUDA device, torch and cuda-bindings; says what is missing, and ends well, where one is.

    scripts/bench cuda [--quick] [--rehearse] [--json] [--device 0]

upload: one large block of a pool, received as a view, against a private pinned tensor of the same size.
ipc: a tensor made on the device, until another process has it and has said so, over one pipe: by a reference to a
slice, and by torch.multiprocessing (the pipe pickles the tensor, as its queues do).
reuse: tensors through a pool with room for three, to a process with a stream that is behind; each is compared there.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.harness.output import Output, short_nbytes
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from penstock.lowlevel import Pool
from penstock.tensor import Store
from penstock.tensor.cuda import CudaPool, CudaRef, CudaTensors, NoDevice, Place, Reference, Uploads, driver_of

UPLOAD_TARGET, IPC_TARGET = 0.95, 0.2
VIEW_TARGET_US = 60
BEHIND_PRODUCTS = 3  # of matrices, that the consumer's stream has before each copy
WAIT = 60.0  # seconds for anything at all

Ends = tuple[Connection, CudaTensors, Place]  # our end of the pipe, the producer's tensors, the consumer's place

now = time.perf_counter_ns


class Sizes(NamedTuple):
    rounds: int
    upload_nbytes: int = 256 << 20
    ipc_mb: tuple[int, ...] = (1, 8, 64, 512)
    reuse_nbytes: int = 8 << 20
    reuse_count: int = 200
    matrix: int = 2048  # BEHIND_PRODUCTS of them take about 1 ms


FULL, QUICK = Sizes(rounds=30), Sizes(rounds=5, reuse_count=50)
REHEARSAL = Sizes(rounds=1, upload_nbytes=1 << 20, ipc_mb=(1,), reuse_nbytes=1 << 16, reuse_count=5, matrix=32)


def heard(talk: Connection) -> bytes:
    if not talk.poll(WAIT):
        raise TimeoutError(f"the other process has said nothing for {WAIT:g} s")
    return talk.recv_bytes()


# ── the other process ──
def consume(talk: Connection, ticket: str, host_ticket: str, device: int, matrix: int) -> None:
    import torch
    import torch.multiprocessing  # so that the pipe knows how to receive a tensor

    torch.cuda.set_device(device)
    pool, host = CudaPool.attach(ticket, peer_name="consumer"), Store.attach(host_ticket)
    tensors = CudaTensors(pool, host)
    talk.send_bytes(msgspec.msgpack.encode(tensors.place))
    decoder: msgspec.msgpack.Decoder[Reference] = msgspec.msgpack.Decoder(Reference)
    stream = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    factor = torch.zeros((matrix, matrix), device="cuda")
    product = torch.zeros_like(factor)
    torch.cuda.synchronize()

    def received() -> bytes:
        while not talk.poll(0.0002):  # the producer may be waiting for what our stream is done with by now
            tensors.flush()
        return talk.recv_bytes()

    while word := received():
        if word == b"sum":
            stream.synchronize()
            talk.send_bytes(int(wrong.item()).to_bytes(4, "little"))
            continue
        observed = talk.recv() if word == b"torch" else tensors.view(decoder.decode(talk.recv_bytes()))
        received_at = now()
        if word == b"reuse":
            value = heard(talk)[0]
            with torch.cuda.stream(stream):
                for _ in range(BEHIND_PRODUCTS):
                    torch.mm(factor, factor, out=product)
                wrong += (observed != value).any()
                del observed
        else:
            del observed
        talk.send_bytes(received_at.to_bytes(8, "little"))
    tensors.close()
    pool.close()


# ── what is measured ──
def seconds(torch: Any, work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = now()
    work()
    torch.cuda.synchronize()
    return (now() - begin) / 1e9


def upload(torch: Any, output: Output, sizes: Sizes) -> float:
    pool = Pool.create(sizes.upload_nbytes)
    with pool.take(sizes.upload_nbytes) as lease:
        np.frombuffer(lease, np.uint8)[:] = 7
        ref = pool.share(lease, [pool.peer])
    view = np.frombuffer(pool.open(ref), np.uint8)
    pinned = torch.full((sizes.upload_nbytes,), 7, dtype=torch.uint8).pin_memory()
    result: dict[str, list[float]] = {"segment": [], "pinned": []}
    with Uploads(pool) as uploads:
        register = seconds(torch, lambda: uploads.copy_to_device(view))
        for number in range(sizes.rounds + 1):
            for name, work in (
                ("segment", lambda: uploads.copy_to_device(view)),
                ("pinned", lambda: pinned.to("cuda", non_blocking=True)),
            ):
                took = seconds(torch, work)
                if number:
                    result[name].append(took)
        if uploads.stats.pageable:
            output.say(f"  not registered: {'; '.join(uploads.refusals())}")
    rates = {name: sizes.upload_nbytes / median(times) / 1e9 for name, times in result.items()}
    output.record("upload", "penstock", nbytes=sizes.upload_nbytes, gb_per_s=rates["segment"], first_s=register)
    output.record("upload", "torch pinned", nbytes=sizes.upload_nbytes, gb_per_s=rates["pinned"])
    output.say(f"upload of {short_nbytes(sizes.upload_nbytes)}: {rates['segment']:.1f} GB/s, "
               f"pinned {rates['pinned']:.1f} GB/s; the first, which registers: {register * 1e3:.0f} ms")  # fmt: skip
    return rates["segment"] / rates["pinned"]


def ipc(torch: Any, output: Output, ends: Ends, mb: int, rounds: int) -> tuple[float, float]:
    """Returns our time over torch's, and the microseconds from share() until the other process has its view."""
    talk, tensors, place = ends
    nbytes = mb * 1_000_000

    def by_reference() -> None:
        begin = now()
        created = tensors.empty((nbytes,), "uint8", timeout=WAIT)
        created_at = now()
        ref = tensors.share(created, [place])
        shared_at = now()
        talk.send_bytes(b"ref")
        talk.send_bytes(msgspec.msgpack.encode(ref))
        received_at = int.from_bytes(heard(talk), "little")
        parts.append((created_at - begin, shared_at - created_at, received_at - created_at))

    def by_torch() -> None:
        tensor = torch.empty((nbytes,), dtype=torch.uint8, device="cuda")
        talk.send_bytes(b"torch")
        talk.send(tensor)
        heard(talk)

    parts: list[tuple[int, int, int]] = []
    result: dict[str, list[int]] = {"penstock": [], "torch.multiprocessing": []}
    for number in range(rounds + 3):
        for name, work in (("penstock", by_reference), ("torch.multiprocessing", by_torch)):
            begin = now()
            work()
            if number >= 3:
                result[name].append(now() - begin)
    for name, times in result.items():
        output.say(f"ipc of {mb} MB by {name}: {median(times) / 1e3:.0f} us")
        output.record("ipc", name, nbytes=nbytes, p50_us=median(times) / 1e3)
    empty_us, share_us, view_us = (median(times) / 1e3 for times in zip(*parts[3:], strict=True))
    output.record("view", "penstock", nbytes=nbytes, empty_us=empty_us, share_us=share_us, share_to_view_us=view_us)
    output.say(f"empty() {empty_us:.0f} us, share() {share_us:.0f} us, share() until the view {view_us:.0f} us")
    return median(result["penstock"]) / median(result["torch.multiprocessing"]), view_us


def reuse(torch: Any, output: Output, ends: Ends, sizes: Sizes) -> int:
    """Returns how many tensors were not what was put when the consumer's stream came to them."""
    talk, tensors, place = ends
    begin = now()
    for number in range(sizes.reuse_count):
        value = number % 251
        ref = tensors.put(
            torch.full((sizes.reuse_nbytes,), value, dtype=torch.uint8, device="cuda"), [place], timeout=WAIT
        )
        talk.send_bytes(b"reuse")
        talk.send_bytes(msgspec.msgpack.encode(ref))
        talk.send_bytes(value.to_bytes(1, "little"))
        heard(talk)  # gone over there, and its stream has yet to come to it
        if not isinstance(ref, CudaRef):
            raise RuntimeError("a tensor went by host memory although the pool's slices come back")
    talk.send_bytes(b"sum")
    wrong = int.from_bytes(heard(talk), "little")
    per_s = sizes.reuse_count / ((now() - begin) / 1e9)
    output.record("reuse", "penstock", nbytes=sizes.reuse_nbytes, count=sizes.reuse_count, wrong=wrong, per_s=per_s)
    output.say(
        f"reuse: {sizes.reuse_count} tensors of {short_nbytes(sizes.reuse_nbytes)}, {per_s:.0f}/s, {wrong} wrong"
    )
    return wrong


def with_consumer(nbytes: int, device: int, matrix: int, work: Callable[[Ends], Any]) -> Any:
    context = multiprocessing.get_context("spawn")
    ours, remote = context.Pipe()
    pool, host = CudaPool.create(nbytes), Store(16 << 20)
    tensors = CudaTensors(pool, host)
    child = context.Process(target=consume, args=(remote, str(pool.ticket), str(host.ticket), device, matrix))
    child.start()
    remote.close()
    try:
        place = msgspec.msgpack.decode(heard(ours), type=Place)
        result = work((ours, tensors, place))
        ours.send_bytes(b"")
        child.join(WAIT)
        return result
    finally:
        child.kill()
        child.join()
        tensors.close()
        pool.close()


def targets(torch: Any, output: Output, device: int, sizes: Sizes) -> Iterator[Target]:
    case = "upload from a segment, bandwidth over private pinned memory"
    yield Target(case, UPLOAD_TARGET, "x", upload(torch, output, sizes), is_least=True, is_speed=True)
    for mb in sizes.ipc_mb:
        work = partial(ipc, torch, output, mb=mb, rounds=sizes.rounds)
        ratio, view_us = with_consumer(4 * mb * 1_000_000, device, sizes.matrix, work)
        case = f"{mb} MB to another process, time over torch.multiprocessing"
        yield Target(case, IPC_TARGET, "x", ratio, is_speed=True)
        if mb == sizes.ipc_mb[0]:
            case = f"{mb} MB, from share() until the other process has its view"
            yield Target(case, VIEW_TARGET_US, "us", view_us, is_speed=True)
    wrong = with_consumer(3 * sizes.reuse_nbytes, device, sizes.matrix, lambda ends: reuse(torch, output, ends, sizes))
    yield Target("tensors that were overwritten before they were read", 0, "", wrong)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("cuda", __doc__, quick="fewer rounds")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--rehearse", action="store_true", help="sizes for a double of a device: does it run?")
    options = parser.parse_args(arguments)
    with Run("cuda", options) as run:
        try:
            driver_of(options.device)
        except NoDevice as error:
            run.output.say(f"nothing is measured: {error}")
            run.output.record("machine", "-", missing=str(error))
            return 0

        import torch
        import torch.multiprocessing

        torch.cuda.set_device(options.device)
        run.output.record("device", "-", device=torch.cuda.get_device_name(), torch=torch.__version__)
        sizes = REHEARSAL if options.rehearse else QUICK if options.quick else FULL
        return run.conclude("penstock", targets(torch, run.output, options.device, sizes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
