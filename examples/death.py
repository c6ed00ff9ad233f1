"""A worker is killed. The error of `send` names it, and says what it held, which has been given back."""

import multiprocessing

import penstock


def worker(steps, rank):
    receiver = steps.open_receiver(rank, name=f"worker {rank}")
    held = receiver.receive_view(timeout=30)  # 32 MiB, where they lie
    assert len(held) == 32 << 20
    multiprocessing.Event().wait()  # for ever


if __name__ == "__main__":
    steps = penstock.Broadcast(receivers=2)
    workers = [multiprocessing.get_context("spawn").Process(target=worker, args=(steps, rank)) for rank in range(2)]
    for process in workers:
        process.start()
    with steps.open_sender(name="core") as core:
        core.send(bytes(32 << 20))
        while steps.snapshot()["receivers"][1]["records"] == 0:  # until worker 1 has it
            pass
        workers[1].kill()
        workers[1].join()
        try:
            core.send(b"the next step")
        except penstock.PeerDied as death:
            print(f"PeerDied: {death}")
        core.send(b"the next step")  # nothing had been sent: send it again, for the receivers that are left
    workers[0].kill()
    workers[0].join()
