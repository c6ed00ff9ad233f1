"""Tensors between processes: a handle in a message, and there a view of the same memory."""

import multiprocessing

import msgspec
import numpy as np

import penstock


class Batch(msgspec.Struct, array_like=True):
    pixels: penstock.Handle


class Answer(msgspec.Struct, array_like=True):
    mean: float


def consumer(store, batches, answers):
    with answers.open_sender() as sender:
        for batch in batches.open_receiver():
            with batch.pixels.open(store) as lease:
                pixels = lease.value()  # value("torch") for a tensor of torch; value(writable=True) for a copy
                sender.send(Answer(float(pixels.mean())))


def main():
    store = penstock.Store(64 << 20)
    batches, answers = penstock.Ring(Batch), penstock.Ring(Answer)
    process = multiprocessing.get_context("spawn").Process(target=consumer, args=(store, batches, answers))
    process.start()
    with batches.open_sender() as sender, answers.open_receiver() as receiver:
        with penstock.Scope(store) as scope:
            array = np.full((3, 448, 448), 1.0, np.float32)  # or a tensor of torch, or any object with __dlpack__
            sender.send(Batch(scope.put(array)))  # copied once

            loan = store.loan(None, penstock.Empty((3, 448, 448), "float32"))  # made where it will lie, without a copy
            loan.value()[:] = 2.0
            sender.send(Batch(scope.add(loan.commit())))  # from now on it cannot be written

            means = [receiver.receive(timeout=30).mean for _ in range(2)]  # release only after the worker has answered
        print(means)
    process.join()


if __name__ == "__main__":
    main()
