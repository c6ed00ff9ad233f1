"""The data plane in an engine of your own: steps to all workers, one image for all of them, bytes back, one death."""

import multiprocessing

import msgspec
import numpy as np

import penstock


class Step(msgspec.Struct, array_like=True):
    image: penstock.Handle


def worker(rank, steps, done, store):
    with done.open_sender(rank, name=f"worker {rank}") as sender:
        for step in steps.open_receiver(rank, name=f"worker {rank}"):  # ends when the core closes its end
            with step.image.open(store) as image:  # read where it lies
                sender.send(image.value()[rank::2].sum().tobytes())


if __name__ == "__main__":
    steps, done = penstock.Broadcast(Step, receivers=2), penstock.Inbox(senders=2)
    store, spawn = penstock.Store(64 << 20), multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(rank, steps, done, store)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.open_sender() as core, done.open_receiver() as results, penstock.Scope(store) as scope:
        core.send(Step(scope.put(np.ones((448, 448), np.float32))))  # copied once, and held while the scope is open
        print(sum(np.frombuffer(results.receive(timeout=30), np.float32)[0] for _ in workers))
        workers[1].kill()
        try:
            results.receive(timeout=30)
        except penstock.PeerDied as death:
            print(f"PeerDied: {death}")
