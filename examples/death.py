"""A worker is killed. `send` raises an error that names the worker, and the memory it held, which is free again."""

import multiprocessing
import multiprocessing.connection
import time

import penstock


def worker(steps, rank):
    receiver = steps.open_receiver(rank, name=f"worker {rank}")
    held = receiver.receive_view(timeout=30)  # 32 MiB, where they lie
    assert len(held) == 32 << 20
    while True:
        receiver.receive(timeout=30)


if __name__ == "__main__":
    steps = penstock.Broadcast(receivers=2)
    workers = [multiprocessing.get_context("spawn").Process(target=worker, args=(steps, rank)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.open_sender(name="core") as core:
        core.send(bytes(32 << 20))
        while steps.snapshot()["receivers"][1]["records"] == 0:  # until worker 1 has it
            time.sleep(0.001)
        workers[1].kill()
        multiprocessing.connection.wait([workers[1].sentinel])  # `join` may hide from Penstock how the worker ended
        try:
            while True:  # a death is noticed within 100 ms: until then `send` sends
                core.send(b"the next step")
                time.sleep(0.001)
        except penstock.PeerDied as death:
            print(f"PeerDied: {death}")
        core.send(b"the next step")  # nothing had been sent: send it again, for the receivers that are left
        workers[0].kill()
        for process in workers:
            process.join()
