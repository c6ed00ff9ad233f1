"""Receivers and senders of messages are killed while they run; their successors can read every message they get."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock import LongRecords, lowlevel
from tests import tiers
from tests.conftest import eventually
from tests.crash.actors import Board, insist
from tests.crash.replacing import Replacing
from tests.crash.zygote import Zygote


class Settings(msgspec.Struct, array_like=True, frozen=True):
    number: int
    words: tuple[str, ...] = ()


class Job(msgspec.Struct, array_like=True, frozen=True):
    sender: int  # its pid
    number: int
    settings: Settings
    ids: NDArray[np.int32]


class Role(msgspec.Struct):
    board: str
    where: str
    index: int
    actor: int


VALUES = [Settings(number, ("word",) * number) for number in range(40)]


def sender(talk: Connection, role: Role) -> None:
    board = Board(lowlevel.Segment.attach(role.board))
    channel = penstock.attach(role.where, Job)
    end = insist(lambda: channel.open_sender())
    number = 0
    talk.send(("ready", os.getpid()))
    while not board.is_over:
        job = Job(os.getpid(), number, VALUES[number * 7 % 40], np.full(number % 3000, number, np.int32))
        try:
            end.send(job, timeout=20)
        except penstock.EndOfChannel:
            time.sleep(0.001)
            continue
        number += 1
        board.note(role.actor, 0, number)
        time.sleep(0.0002)
    end.close()


def receiver(talk: Connection, role: Role) -> None:
    board = Board(lowlevel.Segment.attach(role.board))
    channel = penstock.attach(role.where, Job)
    end = insist(lambda: channel.open_receiver(role.index))
    talk.send(("ready", os.getpid()))
    due: tuple[int, int] | None = None  # sender and number; None: not known, as this receiver came late
    count = 0
    while True:
        try:
            message = end.receive(timeout=20)
        except penstock.EndOfChannel:
            break
        except penstock.PeerDied:
            if board.is_over:
                break
            time.sleep(0.001)
            continue
        if due is not None:
            assert message.number == (due[1] if message.sender == due[0] else 0), (
                f"message {message.number} where {due} was due"
            )
        assert message.settings == VALUES[message.number * 7 % 40]
        assert len(message.ids) == message.number % 3000 and (message.ids == message.number).all()
        due = message.sender, message.number + 1
        count += 1
        board.note(role.actor, 1, count)
    talk.send(("seen", count))


def test_successor_of_a_killed_peer_reads_whole_messages(zygote: Zygote, seed: int) -> None:
    chance = random.Random(seed)
    board = Board.create()
    options = {
        "capacity": 16 << 10,
        "long_records": LongRecords(inline_limit=2048, pool_nbytes=8 << 20),
        "on_receiver_death": "ignore",
        "on_sender_death": "ignore",
    }
    with penstock.Broadcast(Job, receivers=3, **options) as channel:
        parts = {"sender 0": sender, "receiver 0": receiver, "receiver 1": receiver, "receiver 2": receiver}
        where = str(board.segment.ticket), str(channel.ticket)
        play = Replacing(zygote, parts, lambda index, actor: Role(*where, index, actor))

        def flows(least: int) -> bool:
            play.must_live()
            return all(board.received(actor) > least for part, (actor, _) in play.cast.items() if part != "sender 0")

        for _ in range(tiers.MESSAGES_DEATHS):
            play.replace_one(chance, pause=0.03)
            if chance.random() < 0.1:
                eventually(lambda: flows(0), within=20)
        eventually(lambda: flows(20), within=20)
        board.end()
        for part, (_, child) in play.cast.items():
            if part != "sender 0":
                assert child.hear("seen")[1] > 20
            child.gone_at()
        play.close()
