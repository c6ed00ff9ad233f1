"""The data plane in an engine of your own: steps to all workers, one image for all of them, bytes back."""

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
                sender.send(image.value()[rank::2].tobytes())


if __name__ == "__main__":
    steps, done = penstock.Broadcast(Step, receivers=2), penstock.Inbox(senders=2)
    store, spawn = penstock.Store(64 << 20), multiprocessing.get_context("spawn")
    for rank in range(2):
        spawn.Process(target=worker, args=(rank, steps, done, store)).start()
    with steps.open_sender() as core, done.open_receiver() as results, penstock.Scope(store) as scope:
        core.send(Step(scope.put(np.ones((448, 448), np.float32))))  # copied once, and held while the scope is open
        print([np.frombuffer(results.receive(timeout=30), np.float32).sum() for _ in range(2)])
