"""The data plane in an engine of your own: steps to all workers, one image for all of them, tensors back."""

import multiprocessing

import msgspec
import numpy as np

import penstock


class Step(msgspec.Struct, array_like=True):
    image: bytes  # its key in the store
    reply_to: int


class Done(msgspec.Struct, array_like=True):
    rank: int
    half: penstock.TensorRef


def worker(rank, steps, done, store):
    tensors, results = penstock.Tensors(store), done.open_sender(name=f"worker {rank}")
    for step in steps.open_receiver(rank, name=f"worker {rank}"):  # ends when the core closes its end
        image = store.get(step.image).value()  # a read-only view of shared memory
        results.send(Done(rank, tensors.put(image[rank::2], to=[step.reply_to])))


def main():
    steps = penstock.Broadcast(Step, receivers=2)
    done = penstock.Inbox(Done, senders=2)
    store = penstock.Store(64 << 20, peer_name="core")
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(rank, steps, done, store)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.open_sender(name="core") as core, done.open_receiver(name="core") as results:
        image = np.arange(3 * 448 * 448, dtype=np.float32).reshape(448, -1)
        kept = store.put(
            key := bytes(32), image
        )  # copied once; penstock.content_key(image) makes a key of what is in it
        core.send(Step(key, store.peer.index))
        for answer in (results.receive(timeout=30), results.receive(timeout=30)):
            half = penstock.Tensors(store).view(answer.half)  # where the worker put it
            assert (half == image[answer.rank :: 2]).all()
            print(f"worker {answer.rank} returned {half.nbytes:,} bytes, and a message named them")
    kept.release()
    for process in workers:
        process.join()


if __name__ == "__main__":
    main()
