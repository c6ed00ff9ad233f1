"""Followers, and leaders, are killed while a state is led: whoever is there in the end has the state of the leader."""

from __future__ import annotations

import os
import random
import time
import zlib
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock import DecodeError
from penstock.codec.follow import Change, Follower, Following, Leader, Leading, Lost, Picture
from tests import tiers
from tests.conftest import eventually
from tests.crash.actors import Board, insist
from tests.crash.replacing import Replacing
from tests.crash.zygote import Zygote

CELLS = 300


class Poke(Change, frozen=True):
    index: int
    add: int


class Cells(Picture, frozen=True):
    values: NDArray[np.int64]


class Last(msgspec.Struct, array_like=True, frozen=True):
    checksum: int


class Table:
    """A state in which a change that is missed, or applied twice, shows for ever."""

    def __init__(self) -> None:
        self.values = np.zeros(CELLS, np.int64)

    def apply(self, change: Poke) -> None:
        if not 0 <= change.index < CELLS:
            raise DecodeError(f"expected a cell, got {change.index}")
        self.values[change.index] = (self.values[change.index] * 3 + change.add) % 1_000_003

    def become(self, picture: Cells) -> None:
        self.values = picture.values.copy()

    def picture(self, leader: int, number: int) -> Cells:
        return Cells(leader, number, self.values)

    def checksum(self) -> int:
        return zlib.crc32(self.values.tobytes())


STEPS = (Poke, Cells, Last)
BACK = (Lost,)


class Role(msgspec.Struct):
    board: str
    steps: str
    back: str
    index: int
    actor: int


def leader(talk: Connection, role: Role) -> None:
    board = Board(penstock.Segment.attach(role.board))
    steps, back = penstock.attach(role.steps, messages=STEPS), penstock.attach(role.back, messages=BACK)
    sender, lost = insist(lambda: steps.sender()), insist(lambda: back.receiver())
    table = Table()
    leading = Leading(sender, Leader(table))
    chance = random.Random(role.actor)
    talk.send(("ready", os.getpid()))
    count = 0

    def hear() -> None:
        while True:
            try:
                leading.hear(lost.receive_nowait())
            except (penstock.WouldBlock, penstock.EndOfChannel, penstock.PeerDied):
                return

    def send(change: Poke) -> None:
        while True:
            try:
                return leading.send(change, timeout=20)
            except (penstock.EndOfChannel, penstock.PeerDied):
                time.sleep(0.001)

    while not board.is_over:
        hear()
        send(Poke(leading.leader.identity, leading.leader.next_number, chance.randrange(CELLS), chance.randrange(9)))
        count += 1
        board.note(role.actor, 0, count)
        time.sleep(0.0003)
    for _ in range(200):  # whoever is out of step says so, and gets a picture
        hear()
        send(Poke(leading.leader.identity, leading.leader.next_number, 0, 1))
        time.sleep(0.002)
    sender.send(Last(table.checksum()), timeout=20)
    sender.close()
    talk.send(("led", count))


def follower(talk: Connection, role: Role) -> None:
    board = Board(penstock.Segment.attach(role.board))
    steps, back = penstock.attach(role.steps, messages=STEPS), penstock.attach(role.back, messages=BACK)
    receiver, asking = insist(lambda: steps.receiver(role.index)), insist(lambda: back.sender(role.index))
    table = Table()
    follow = Follower(table, f"follower {role.index}")
    asked = 0

    def ask(lost: Lost) -> None:
        nonlocal asked
        asked += 1
        try:
            asking.send(lost, timeout=5)
        except (penstock.EndOfChannel, penstock.PeerDied):
            pass  # nobody leads at this moment; it will be asked again

    following = Following(receiver, follow, ask)
    talk.send(("ready", os.getpid()))
    applied = 0
    chance = random.Random(role.actor)
    while True:
        try:
            if chance.random() < 0.001 and not board.is_over:
                receiver.receive(timeout=20)  # one goes past us, as one does that cannot be decoded
            message = following.receive(timeout=20)
        except penstock.PeerDied:
            time.sleep(0.001)
            continue
        if isinstance(message, Last):
            break
        applied += 1
        board.note(role.actor, 1, applied)
    talk.send(("same", message.checksum == table.checksum() and follow.is_in_step, applied, asked))


def test_whoever_is_there_in_the_end_has_the_state_of_the_leader(zygote: Zygote, seed: int) -> None:
    chance = random.Random(seed)
    board = Board.create()
    options = {"on_receiver_death": "ignore", "on_sender_death": "ignore"}
    with (
        penstock.open_broadcast(3, messages=STEPS, capacity=16 << 10, inline_limit=2048, **options) as steps,
        penstock.open_inbox(3, messages=BACK, **options) as back,
    ):
        parts = {"leader 0": leader, "follower 0": follower, "follower 1": follower, "follower 2": follower}
        where = str(board.segment.ticket), str(steps.ticket), str(back.ticket)
        play = Replacing(zygote, parts, lambda index, actor: Role(*where, index, actor))

        def flows() -> bool:
            play.must_live()
            return all(max(board.received(actor), board.sent(actor)) > 50 for actor, _ in play.cast.values())

        for _ in range(tiers.FOLLOWING_DEATHS):
            play.replace_one(chance, pause=0.05)
        eventually(flows, within=20)
        board.end()
        for part, (_, child) in play.cast.items():
            if part == "leader 0":
                assert child.hear("led")[1] > 50
            else:
                _, is_same, applied, asked = child.hear("same")
                assert is_same, f"{part} differs after {applied} changes; it asked {asked} times"
            child.gone_at()
        play.close()
