"""Tensors between processes: as plain data in a message, and there as views of the same memory."""

import multiprocessing

import msgspec
import numpy as np

import penstock
from penstock import lowlevel


class Hello(msgspec.Struct, array_like=True):
    place: int  # in the pool


class Batch(msgspec.Struct, array_like=True):
    pixels: penstock.TensorRef


def consumer(pool, hellos, batches):
    tensors = penstock.Tensors(pool)
    with hellos.open_sender() as sender:
        sender.send(Hello(pool.peer.index))
    for batch in batches.open_receiver():
        pixels = tensors.view(batch.pixels)  # as_="torch" for a tensor of torch; writable=True for a copy
        print(pixels.shape, pixels.mean())  # the memory is given back with its last view


def main():
    pool = lowlevel.Pool.create(64 << 20)
    hellos, batches = penstock.Ring(Hello), penstock.Ring(Batch)
    process = multiprocessing.get_context("spawn").Process(target=consumer, args=(pool, hellos, batches))
    process.start()
    with hellos.open_receiver() as receiver, batches.open_sender() as sender:
        there = receiver.receive(timeout=30).place
        tensors = penstock.Tensors(pool)

        array = np.full((3, 448, 448), 1.0, np.float32)  # or a tensor of torch, or whatever has __dlpack__
        sender.send(Batch(tensors.put(array, to=[there])))  # copied once

        made = tensors.empty((3, 448, 448), "float32")  # or made where it will lie, without a copy
        made[:] = 2.0
        sender.send(Batch(tensors.share(made, to=[there])))  # from now on nobody writes it
    process.join()


if __name__ == "__main__":
    main()
