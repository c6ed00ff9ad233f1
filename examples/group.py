"""Worker 1 is killed while the core waits for worker 0, which lives. The core's group ends that wait."""

import multiprocessing
import threading

import penstock


def worker(steps, ring, rank):
    with ring.open_sender(name=f"worker {rank}"):
        for _ in steps.open_receiver(rank, name=f"worker {rank}"):
            pass  # never answers


if __name__ == "__main__":
    steps, rings = penstock.Broadcast(receivers=2), [penstock.Ring() for _ in range(2)]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(steps, ring, rank)) for rank, ring in enumerate(rings)]
    for process in workers:
        process.start()
    steps.wait_for_receivers(timeout=30)
    threading.Timer(0.2, workers[1].kill).start()
    group = penstock.EndGroup()
    core = steps.open_sender(name="core", group=group)
    replies = [ring.open_receiver(name="core", group=group) for ring in rings]
    try:
        replies[0].receive()  # worker 0 lives, and never answers
    except penstock.PeerDied as death:
        print(f"PeerDied: {death}")
    workers[0].kill()
    for process in workers:
        process.join()
