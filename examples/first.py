"""A worker sends a record and is killed. The receiver gets the record, and then an error that names the worker."""

import multiprocessing
import os

import penstock


def worker(ring):
    with ring.open_sender(name="worker") as sender:
        sender.send(b"step 1")
        os.kill(os.getpid(), 9)


if __name__ == "__main__":
    ring = penstock.Ring()
    multiprocessing.get_context("spawn").Process(target=worker, args=(ring,)).start()
    for record in ring.open_receiver():
        print(record)
