"""A process that wakes event loops of other processes keeps no pipe of a process that has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
from multiprocessing.connection import Connection

import penstock
from tests import tiers
from tests.conftest import eventually
from tests.crash.zygote import Zygote


def receive_in_a_loop(talk: Connection, where: str) -> None:
    async def scene() -> None:
        async with penstock.attach(where).open_async_receiver() as receiver:
            talk.send(("ready",))
            while True:
                talk.send(("received", await receiver.receive()))

    asyncio.run(scene())


def send_when_told(talk: Connection, where: str) -> None:
    with penstock.attach(where).open_sender(1) as sender:
        talk.send(("ready",))
        while True:
            talk.recv()
            send(sender, b"other")


def send(sender: penstock.Sender, record: bytes) -> None:
    """Sends to the next receiver, after the error that reports the death of the last one."""
    try:
        sender.send(record)
    except penstock.PeerDied:
        sender.send(record)


def pipes_of(pid: int) -> int:
    count = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(entry.path).startswith("pipe:")
    return count


def await_parked(inbox: penstock.Inbox[bytes]) -> None:
    eventually(lambda: inbox.snapshot()["receivers"][0]["waiting_ns"] > 0)


def test_senders_keep_no_wake_up_pipe_of_a_receiver_that_died(zygote: Zygote) -> None:
    with penstock.Inbox(senders=2, max_peers=128) as inbox, inbox.open_sender(0) as sender:
        other = zygote.child(send_when_told, str(inbox.ticket))
        other.hear("ready")
        before = [pipes_of(pid) for pid in (os.getpid(), other.pid)]
        try:
            for _ in range(tiers.PIPE_DEATHS):
                victim = zygote.child(receive_in_a_loop, str(inbox.ticket))
                victim.hear("ready")
                await_parked(inbox)
                send(sender, b"one")
                assert victim.hear("received")[1] == b"one"
                await_parked(inbox)
                other.talk.send("send")
                assert victim.hear("received")[1] == b"other"
                victim.close()
            eventually(lambda: pipes_of(other.pid) == before[1])
            eventually(lambda: pipes_of(os.getpid()) <= before[0])
        finally:
            other.close()
