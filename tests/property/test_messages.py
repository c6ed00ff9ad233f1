"""Messages against lists: receivers that come and go, sends that find no room. Each receiver gets every message that
was sent since it came, whole."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock import LongRecords


class Settings(msgspec.Struct, array_like=True, frozen=True):
    number: int
    words: tuple[str, ...] = ()


class Job(msgspec.Struct, array_like=True, frozen=True):
    number: int
    first: Settings | None = None
    two: Settings | None = None
    ids: NDArray[np.int32] | None = None


class Play:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.receivers_count = chance.choice((1, 2, 4))
        self.channel = penstock.Broadcast(
            Job,
            receivers=self.receivers_count,
            capacity=1 << chance.choice((12, 14)),
            long_records=LongRecords(inline_limit=700),
            on_receiver_death="ignore",
            on_sender_death="ignore",
        )
        self.values = [Settings(n, ("w" * chance.randrange(30),)) for n in range(12)]
        self.sent: list[Job] = []
        self.receivers: dict[int, penstock.Receiver] = {}
        self.due: dict[int, int] = {}  # the next message each must get; of one that comes late it is not known
        self.sender = self.channel.open_sender()
        for index in range(self.receivers_count):
            self.receivers[index] = self.channel.open_receiver(index)
            self.due[index] = 0
        self.refused = self.late = 0

    def job(self) -> Job:
        chance = self.chance
        first, two = (chance.choice(self.values) if chance.random() < 0.7 else None for _ in range(2))
        ids = None
        if chance.random() < 0.3:
            ids = np.full(chance.choice((1, 40, 100, 2000)), len(self.sent), np.int32)
        return Job(len(self.sent), first, two, ids)

    def send(self) -> None:
        job = self.job()
        try:
            self.sender.send_nowait(job)
        except penstock.WouldBlock:
            self.refused += 1
            return
        self.sent.append(job)

    def receive(self, index: int) -> bool:
        receiver = self.receivers[index]
        try:
            actual = receiver.receive_nowait()
        except penstock.WouldBlock:
            return False
        if self.due[index] < 0:
            self.due[index] = actual.number
        assert actual.number == self.due[index], f"receiver {index} got {actual.number} where {self.due[index]} was due"
        self.due[index] += 1
        sent = self.sent[actual.number]
        assert (actual.first, actual.two) == (sent.first, sent.two)
        assert (actual.ids is None) == (sent.ids is None)
        assert actual.ids is None or (len(actual.ids) == len(sent.ids) and (actual.ids == actual.number).all())  # type: ignore[arg-type]
        return True

    def replace(self, index: int) -> None:
        """Closes one (but never the last, for then nothing can be sent), and puts another in its place."""
        if index in self.receivers and len(self.receivers) > 1:
            self.receivers.pop(index).close()
        elif index not in self.receivers:
            self.receivers[index] = self.channel.open_receiver(index)
            self.due[index] = -1
            self.late += 1

    def finish(self) -> None:
        for index in self.receivers:
            while self.receive(index):
                pass
        mark = len(self.sent)
        while len(self.sent) == mark:
            self.send()
        for index, receiver in self.receivers.items():
            while self.receive(index):
                pass
            assert self.due[index] == len(self.sent), f"receiver {index} missed what came after {self.due[index]}"
            receiver.close()
        self.sender.close()
        self.channel.close()


def test_a_receiver_gets_every_message_that_was_sent_since_it_came(seed: int) -> None:
    chance = random.Random(seed)
    sent = refused = late = 0
    plays = 0
    while plays < 25 or (plays < 100 and (refused <= 100 or late <= 50)):  # what is rare comes more often by some seeds
        plays += 1
        play = Play(chance)
        for _ in range(600):
            index = chance.randrange(play.receivers_count)
            action = chance.random()
            if action < 0.5:
                play.send()
            elif action < 0.97:
                if index in play.receivers:
                    for _ in range(chance.choice((1, 1, 5))):
                        play.receive(index)
            else:
                play.replace(index)
        play.finish()
        sent, refused, late = sent + len(play.sent), refused + play.refused, late + play.late
    assert sent > 3000 and refused > 100 and late > 50, (sent, refused, late)
