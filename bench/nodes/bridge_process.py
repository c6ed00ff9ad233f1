"""The process of one side of a link: `python -m bench.nodes.bridge_process SIDE …`, started by `bench.impls` and the
cases of `bench.nodes.bridge`. The side that listens prints its address; both print a line when the link runs."""

from __future__ import annotations

import sys

from bench.harness.role import die_with_parent
from penstock import Store, attach
from penstock.bridge import (
    InboundChannel,
    Lane,
    LinkSpec,
    Listener,
    OutboundChannel,
    PullChannels,
    StoreValues,
    connect,
)

SECRET = bytes(32)  # of a link on the loopback of one machine
HERE = ("127.0.0.1", 0)
START = 60.0


def frames(frames_ticket: str, replies_ticket: str, receivers: int, *, is_home: bool) -> LinkSpec:
    """Frames go from home to the other node, replies come back."""
    broadcast, inbox = attach(frames_ticket), attach(replies_ticket)
    lanes = [Lane(index) for index in range(receivers)]
    if is_home:
        return LinkSpec("bench", name="home", channels=[OutboundChannel("frames", broadcast),
                                                       InboundChannel("replies", inbox, lanes)])  # fmt: skip
    return LinkSpec("bench", name="away", channels=[InboundChannel("frames", broadcast),
                                                   OutboundChannel("replies", inbox)])  # fmt: skip


def values(store_ticket: str, requests: str, *answers: str) -> LinkSpec:
    store = Store.attach(store_ticket)
    pulls = None
    if requests:
        from penstock.bridge.pull_channels import Pull, Pulled

        pulls = PullChannels(attach(requests, Pull), tuple(attach(ticket, Pulled) for ticket in answers))
    return LinkSpec("bench", name="away" if requests else "home", values=StoreValues(store, pulls))


def listen(spec: LinkSpec) -> None:
    with Listener(HERE, secret=SECRET) as listener:
        print(listener.address[1], flush=True)
        link = listener.accept(spec, timeout=START)
    print("runs", flush=True)
    link.run()


def reach(spec: LinkSpec, port: str) -> None:
    link = connect((HERE[0], int(port)), spec, secret=SECRET, timeout=START)
    print("runs", flush=True)
    link.run()


def main(side: str, *arguments: str) -> None:
    die_with_parent()
    if side == "frames-home":
        first, second, receivers = arguments
        listen(frames(first, second, int(receivers), is_home=True))
    elif side == "frames-away":
        first, second, receivers, port = arguments
        reach(frames(first, second, int(receivers), is_home=False), port)
    elif side == "values-home":
        listen(values(arguments[0], ""))
    else:
        port, *rest = arguments
        reach(values(*rest), port)


if __name__ == "__main__":
    main(*sys.argv[1:])
