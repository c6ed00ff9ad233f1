"""Steps of one node are received on another: two processes that share no channel, and one link between them."""

import multiprocessing
import os

from penstock import Ring
from penstock.bridge import InboundChannel, LinkSpec, Listener, OutboundChannel, connect


def home(secret, addresses):
    steps = Ring(name="steps")
    with Listener(("127.0.0.1", 0), secret=secret) as listener:  # the address of this node, and any free port
        addresses.send(listener.address)
        link = listener.accept(LinkSpec("steps", epoch=1, channels=[OutboundChannel("steps", steps)]), timeout=30)
    with steps.open_sender(name="core") as core, link:
        for number in range(3):
            core.send(b"step %d" % number)
        core.close()
        print("home:", link.run())


def away(secret, address):
    steps = Ring(name="steps")
    spec = LinkSpec("steps", epoch=1, channels=[InboundChannel("steps", steps)])
    with connect(address, spec, secret=secret) as link:
        print("away:", link.run())
        for step in steps.open_receiver(name="worker"):
            print(step)


if __name__ == "__main__":
    secret = os.urandom(32)  # both nodes have it
    near, far = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    first = spawn.Process(target=home, args=(secret, far))
    first.start()
    second = spawn.Process(target=away, args=(secret, near.recv()))
    second.start()
    for process in (first, second):
        process.join()
