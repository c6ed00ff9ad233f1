"""SIGKILL at each named point: the others are told, nothing is lost or leaks, and a replacement goes on."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import _native
from tests.conftest import eventually
from tests.crash import keepers
from tests.crash.scenes import Cast, Scene
from tests.crash.zygote import Zygote

SENDER = {"send.begun", "send.spilled", "send.pending", "send.written", "send.committed", "send.rung", "ready.set"}
TAKER = {"pool.locked", "pool.live", "pool.inserted", "block.locked"}
RECEIVER = {"receive.found", "receive.opened", "receive.copied", "receive.released", "open.half", "block.locked"}
WAITER = {"wait.parked", "wait.woken"}
PEER = {"join.claimed", "close.begun", "leave.begun"}
KEEPER = {"close.kept", "abort.begun"}  # closes, and keeps room that a view can still write into
COMING = {"receiver.claimed"}
FAILING = {"fail.written"}  # its text is there, and its end is still open
REAPER = {"reap.begun", "reap.half", "reap.marked"}

# The points that each actor passes. A channel's pool grows; the other one is claimed at once.
REACHED = {
    ("ring", "sender"): SENDER - {"ready.set"} | TAKER | {"pool.claiming"} | WAITER | PEER | KEEPER,
    ("ring", "receiver"): RECEIVER | COMING | FAILING | {"release.last"} | WAITER | PEER,
    ("broadcast", "sender"): SENDER - {"ready.set"} | TAKER | {"pool.claiming"} | WAITER | PEER | KEEPER,
    ("broadcast", "receiver"): RECEIVER | COMING | FAILING | {"release.last"} | WAITER | PEER | REAPER,
    ("inbox", "sender"): SENDER | TAKER | WAITER | PEER | KEEPER | REAPER,
    ("inbox", "receiver"): RECEIVER | COMING | FAILING | {"release.last"} | WAITER | PEER,
    ("pool", "lender"): TAKER | {"share.half"} | PEER - {"close.begun"},
    ("pool", "borrower"): {"open.half", "block.locked", "release.last"}
    | PEER - {"close.begun"}
    | REAPER - {"reap.half", "reap.marked"},
}
ONCE = PEER | KEEPER | COMING | FAILING | {"pool.claiming"} | REAPER
CASES = [
    (style, role, point, countdown)
    for (style, role), points in REACHED.items()
    for point in sorted(points)
    for countdown in ((1,) if point in ONCE else (1, 8))
]


def test_every_point_is_visited() -> None:
    """Those of a store in test_kept.py."""
    assert {point for points in REACHED.values() for point in points} | keepers.POINTS == set(_native.POINTS)


@pytest.mark.parametrize("style,role,point,countdown", CASES)
def test_a_death_is_told_and_costs_nothing_but_the_dead(
    zygote: Zygote, style: str, role: str, point: str, countdown: int
) -> None:
    options: dict[str, Any] = {"point": point, "countdown": countdown}
    if point in ("close.begun", "close.kept", "abort.begun", "leave.begun", "fail.written"):
        options["closes_early"] = True
    if point in WAITER and role == "sender":
        options["pause"] = 0.0  # so that the ring is full, and it waits
    with Scene(zygote, style) as scene:
        victim = scene.fill((role, 0), **options)
        assert victim is not None
        if point in REAPER:
            kill_until_it_reaps(scene, victim)
        gone_at = scene.bury(victim)
        if point not in ("join.claimed", "abort.begun", "leave.begun") and style != "pool":
            scene.must_be_told(victim, gone_at)
        if point in ("abort.begun", "leave.begun") and role == scene.roles[0] and style != "inbox":
            # It had closed in peace before it died: this channel has ended, and they have gone home.
            for survivor in scene.others(role):
                survivor.hear("seen")
                scene.bury(survivor)
            return scene.must_be_empty()
        if point != "join.claimed":  # it holds nothing: the next peer reaps it
            scene.must_be_reaped(victim)
        scene.add(role, victim.index).hear("ready")
        scene.must_be_reaped(victim)
        scene.must_flow()
        scene.finish()


def kill_until_it_reaps(scene: Scene, victim: Cast) -> None:
    """Others of its kind, one after the other: all survivors see such a death, and one of them is the first."""
    for _ in range(100):
        scene.must_flow(1, without=victim)
        other = next(player for player in scene.cast if player.role == victim.role and player.index == 2)
        other.kill()
        scene.bury(other)
        scene.must_be_reaped(other)
        scene.add(victim.role, 2).hear("ready")
        if not victim.is_alive():
            return
    raise AssertionError("it never was the first to see a death")


def test_a_replacement_is_known_by_its_epoch(zygote: Zygote) -> None:
    with Scene(zygote, "ring") as scene:
        scene.fill()
        for round in range(1, 6):
            for role, ends in (("sender", "senders"), ("receiver", "receivers")):
                victim = next(player for player in scene.cast if player.role == role)
                scene.must_flow(3)
                assert scene.peers_snapshot()[ends][0]["epoch"] == round
                victim.kill()
                scene.must_be_told(victim, scene.bury(victim))
                scene.add(role, 0).hear("ready")
        scene.must_flow()
        scene.finish()


def test_sender_goes_on_with_new_receivers_when_all_die_at_once(zygote: Zygote) -> None:
    with Scene(zygote, "broadcast") as scene:
        scene.fill()
        scene.must_flow()
        victims = [player for player in scene.cast if player.role == "receiver"]
        for victim in victims:
            victim.kill()
        for victim in victims:
            scene.bury(victim)
        for victim in victims:
            scene.must_be_reaped(victim)
        (sender,) = scene.cast
        eventually(
            lambda: {event[2] for event in sender.heard() if event[0] == "died"} & {event.pid for event in victims}
        )
        for index in range(3):
            scene.add("receiver", index).hear("ready")
        scene.must_flow()
        scene.finish()
