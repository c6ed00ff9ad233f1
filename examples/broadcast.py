"""A core sends steps to two workers, and hears from each."""

import multiprocessing

import penstock


def worker(steps, done, rank):
    with done.open_sender(name=f"worker {rank}") as sender:
        for step in steps.open_receiver(rank, name=f"worker {rank}"):  # ends when the core closes its end
            sender.send(b"done: " + step)


if __name__ == "__main__":
    steps, done = penstock.Broadcast(receivers=2), penstock.Inbox(senders=2)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(steps, done, rank)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.open_sender(name="core") as core, done.open_receiver(name="core") as results:
        core.send(b"step 1")  # bytes, or a list of buffers gathered into one record, of any size
        print(results.receive(timeout=30), results.receive(timeout=30))
    for process in workers:
        process.join()
