"""Opening an end of a channel after its owner's death succeeds at once, also while the dead peer is being reaped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

import penstock
from penstock import _native
from tests import tiers
from tests.conftest import eventually
from tests.crash.zygote import Child, Zygote

REAPING = 0.4  # seconds for which a reaper stays at a point
REAPED = 2.0  # seconds for which an opened end waits (REAPED_NS)


def owner(talk: Connection, where: str, is_sender: bool) -> None:
    channel = penstock.attach(where)
    _end = channel.open_sender(name="owner") if is_sender else channel.open_receiver(name="owner")
    talk.send(("ready",))
    talk.recv()


@pytest.fixture
def slow_reaper() -> Iterator[Callable[..., None]]:
    """Delays the next pass of this process at a point: its own watcher is the only reaper here."""

    def delay(point: str, seconds: float = REAPING) -> None:
        _native.arm_point(point, "delay", 1, int(seconds * 1e6))

    yield delay
    _native.arm_point("reap.begun", "none")


def killed(zygote: Zygote, channel: penstock.Ring[Any], *, is_sender: bool) -> Child:
    """Returns a process that had the channel's sender or receiver, and has been killed."""
    child = zygote.child(owner, str(channel.ticket), is_sender)
    child.hear("ready")
    child.kill()
    child.gone_at()
    return child


def state_of(channel: penstock.Ring[Any], *, is_sender: bool) -> str:
    snapshot = channel.snapshot()
    (end,) = snapshot["senders"] if is_sender else snapshot["receivers"]
    return str(end["state"])


@pytest.mark.parametrize("is_sender", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize(("point", "before"), [("reap.begun", "live"), ("reap.marked", "dead")])
def test_opening_the_end_of_a_dead_peer_waits_until_that_has_been_reaped(
    zygote: Zygote, slow_reaper: Callable[..., None], point: str, before: str, is_sender: bool
) -> None:
    with penstock.Ring() as channel:
        opener = channel._join("opener")  # before: to join is to reap what is seen to be dead
        slow_reaper(point)
        child = killed(zygote, channel, is_sender=is_sender)
        try:
            eventually(lambda: state_of(channel, is_sender=is_sender) == before)
            end = _native.Sender(opener, 0) if is_sender else _native.Receiver(opener, 0)
            assert not end.is_closed
            end.close()
        finally:
            child.close()


@tiers.needs_all
def test_open_of_a_dead_peers_end_names_its_owner_when_reaping_is_slow(
    zygote: Zygote, slow_reaper: Callable[..., None]
) -> None:
    with penstock.Ring() as channel:
        opener = channel._join("opener")
        slow_reaper("reap.marked", REAPED + 1.0)
        child = killed(zygote, channel, is_sender=False)
        try:
            eventually(lambda: state_of(channel, is_sender=False) == "dead")
            began = time.monotonic()
            with pytest.raises(ValueError, match=r"receiver 0 of 'ring' is taken: 'owner' \(pid \d+, dead\)"):
                _native.Receiver(opener, 0)
            assert time.monotonic() - began > REAPED - 0.1
            eventually(lambda: [peer.state for peer in channel.peers() if peer.name == "owner"] == ["dead"])
        finally:
            child.close()
