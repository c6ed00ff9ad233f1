"""Steps and one image go to four workers through shared memory; a worker is killed, and the others go on."""

import contextlib
import multiprocessing
import time

import msgspec
import numpy as np

import penstock

WORKERS, STEPS = 4, 2_000


class Step(msgspec.Struct, array_like=True):
    image: penstock.Handle | None = None


class Done(msgspec.Struct, array_like=True):
    total: float


def worker(rank, steps, results, store):
    with results.open_sender(rank, name=f"worker {rank}") as sender:
        for step in steps.open_receiver(rank, name=f"worker {rank}"):
            image = None if step.image is None else step.image.open(store).value()  # where it lies
            sender.send(Done(0.0 if image is None else float(image[rank].sum())))


if __name__ == "__main__":
    steps = penstock.Broadcast(Step, receivers=WORKERS)
    results = penstock.Inbox(Done, senders=WORKERS)
    store = penstock.Store(64 << 20, peer_name="core")
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(rank, steps, results, store)) for rank in range(WORKERS)]
    for process in workers:
        process.start()
    with steps.open_sender(name="core") as core, results.open_receiver(name="core") as inbox:
        with penstock.Scope(store) as scope:
            core.send(Step(scope.put(np.ones((WORKERS, 1 << 21), np.float32))))  # 32 MiB, copied once
            total = sum(inbox.receive(timeout=60).total for _ in workers)
        print(f"{WORKERS} workers read one image of 32 MiB where it lies: its rows sum to {total:,.0f}")
        began = time.perf_counter()
        for _ in range(STEPS):
            core.send(Step())
            for _ in workers:
                inbox.receive(timeout=60)
        print(f"{STEPS:,} steps to all workers and back: {(time.perf_counter() - began) / STEPS * 1e6:.0f} us each")
        workers[1].kill()
        killed = time.perf_counter()
        try:
            inbox.receive(timeout=60)
        except penstock.PeerDied as death:
            print(f"{(time.perf_counter() - killed) * 1e3:.1f} ms later, PeerDied: {death}")
        with contextlib.suppress(penstock.PeerDied):  # the channel of steps says it, too, and once
            core.send(Step())
        core.send(Step())
        print(f"{sum(isinstance(inbox.receive(timeout=60), Done) for _ in workers[1:])} workers go on")
    for process in workers:
        process.join()
