"""Kills processes that use the queue as vLLM's engine core and workers do, in the middle of calls: COUNT SEED.

Prints as JSON how many survivors were still waiting after LIMIT seconds, what was left behind, and how long each took
to raise: from the kill, or, where its own peer ended because of the kill, from that end.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import wait

import numpy as np

from penstock.integrations.vllm import register

WORKERS = 2
LIMIT = 5.0
SIZES = (100, 3_000, 200_000, 3 << 20)

FORK = multiprocessing.get_context("fork")


def report_end(run, parent):
    """Runs the loop of a process until its queue raises, and sends when that was, and what it said."""
    try:
        run()
    except RuntimeError as error:
        parent.send((time.monotonic(), str(error)))


def engine(parent, seed):
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    steps = MessageQueue(WORKERS, WORKERS)
    parent.send(steps.export_handle())
    replies = [MessageQueue.create_from_handle(handle, 0) for handle in parent.recv()]
    for queue in (steps, *replies):
        queue.wait_until_ready()
    chance = random.Random(seed)

    def run():
        for number in range(1_000_000):
            payload = np.full(chance.choice(SIZES), number % 256, np.uint8)
            steps.enqueue(("execute_model", (number, payload), {}, None))
            for reply in replies:
                assert reply.dequeue() == ("SUCCESS", number)
            if not number:
                parent.send("running")

    report_end(run, parent)


def worker(parent, rank):
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    reply = MessageQueue(1, 1)
    parent.send(reply.export_handle())
    steps = MessageQueue.create_from_handle(parent.recv(), rank)
    steps.wait_until_ready()
    reply.wait_until_ready()

    def run():
        while True:
            _, (number, _payload), _, _ = steps.dequeue(indefinite=True)
            reply.enqueue(("SUCCESS", number))

    report_end(run, parent)


def scene(chance):
    """Kills an engine or a worker of a few. Returns the seconds until each survivor raised; None: it did not."""
    cast = []
    for target, argument in [(engine, chance.getrandbits(32)), *((worker, rank) for rank in range(WORKERS))]:
        ours, remote = FORK.Pipe()
        process = FORK.Process(target=target, args=(remote, argument), name=f"{target.__name__} {argument}")
        process.start()
        remote.close()
        cast.append((process, ours))
    try:
        handles = [pipe.recv() for _, pipe in cast]
        cast[0][1].send(handles[1:])
        for _, pipe in cast[1:]:
            pipe.send(handles[0])
        assert cast[0][1].recv() == "running"
        time.sleep(chance.random() ** 2 * 0.05)
        victim, _ = cast.pop(chance.randrange(len(cast)))
        victim.kill()
        killed_at = time.monotonic()
        ends, waiting = {}, {pipe: process for process, pipe in cast}
        while waiting and (ready := wait(list(waiting), timeout=LIMIT)):
            for pipe in ready:
                ends[waiting.pop(pipe).name] = pipe.recv()
        victim.join()
        ended = next((at for name, (at, _) in ends.items() if name.startswith("engine")), killed_at)
        is_worker = victim.name.startswith("worker")
        since = {name: ended if is_worker and name.startswith("worker") else killed_at for name in ends}
        return [at - since[name] for name, (at, _) in ends.items()] + [None] * len(waiting)
    finally:
        for process, pipe in cast:
            process.join(1)
            process.kill()
            process.join()
            pipe.close()


def belongings():
    """What would show that something was left: files of shared memory, segments, children."""
    segments = [path for path in map(os.readlink, descriptors()) if "memfd:penstock" in path]
    return len(os.listdir("/dev/shm")), len(segments), len(multiprocessing.active_children())


def descriptors():
    return [path for name in os.listdir("/proc/self/fd") if os.path.exists(path := f"/proc/self/fd/{name}")]


if __name__ == "__main__":
    register()
    chance = random.Random(int(sys.argv[2]))
    before = belongings()
    took = [duration for _ in range(int(sys.argv[1])) for duration in scene(chance)]
    heard = sorted(duration for duration in took if duration is not None)
    left = [now - then for now, then in zip(belongings(), before)]
    print("DEATHS " + json.dumps({"hung": took.count(None), "left": left, "took": heard}))
