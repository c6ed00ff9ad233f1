"""A core sends steps to two workers, and hears from each."""

import multiprocessing

import penstock


def worker(steps, done, rank):
    sender = done.sender(name=f"worker {rank}")
    for step in steps.receiver(rank, name=f"worker {rank}"):  # ends when the core closes its end
        sender.send(b"done: " + step)


if __name__ == "__main__":
    steps, done = penstock.open_broadcast(receivers=2), penstock.open_inbox(senders=2)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(steps, done, rank)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.sender(name="core") as core, done.receiver(name="core") as results:
        core.send(b"step 1")  # bytes, or a list of buffers gathered into one record, of any size
        print(results.receive(timeout=30), results.receive(timeout=30))
    for process in workers:
        process.join()
