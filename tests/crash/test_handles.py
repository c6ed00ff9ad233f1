"""Servers, cores and workers are killed while images travel between them, and at the end nothing is held.

PENSTOCK_TIER=soak makes it 10^5 aborted requests and 400 deaths.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter

import pytest

import penstock
from penstock import LongRecords, Store
from tests import tiers
from tests.conftest import eventually
from tests.crash import carriers
from tests.crash.actors import WATCHDOG, Board
from tests.crash.carriers import ANSWERED, ASKED, CORES, PARTS, SERVERS, WORKERS, Role
from tests.crash.replacing import Replacing
from tests.crash.zygote import Zygote


class Play(Replacing):
    """Remembers what each actor was, also when it is dead."""

    def __init__(self, zygote: Zygote, where: tuple[object, ...]) -> None:
        self.kinds: list[str] = []
        super().__init__(zygote, PARTS, lambda index, actor: Role(*where, index, actor))  # type: ignore[arg-type]

    def add(self, part: str) -> None:
        super().add(part)
        self.kinds.append(part.split()[0])

    def counts(self, board: Board) -> Counter[str]:
        """Of all actors, the dead ones included."""
        names = {"server": ("aborted", "found no room"), "core": ("passed on",), "worker": ("missing", "opened")}
        counted: Counter[str] = Counter()
        for actor, kind in enumerate(self.kinds):
            for name, count in zip(names[kind], (board.sent(actor), board.received(actor)), strict=False):
                counted[name] += count
        return counted


def must_be_held_by_none(store: Store) -> None:
    """Now, or as soon as the dead have been reaped."""

    def held() -> tuple[object, ...]:
        stats = store.stats()
        strays = stats.pool.blocks - len(stats.items)
        return stats.pool.holders, [item for item in stats.items if item.holders or item.is_being_written], strays

    deadline = time.monotonic() + WATCHDOG
    while held() != ((), [], 0):
        assert time.monotonic() < deadline, f"holders, values that are held, blocks that are no values: {held()}"
        time.sleep(0.002)


@pytest.mark.timeout(tiers.limit(180, soak=3600))
def test_no_value_stays_held_when_requests_and_processes_end_anywhere(zygote: Zygote, seed: int) -> None:
    """M servers, D cores of N workers each, one store."""
    chance = random.Random(seed)
    board = Board.create()
    began = time.monotonic()
    options = {
        "capacity": 1 << 16,
        "long_records": LongRecords(pool_nbytes=64 << 20),
        "on_receiver_death": "ignore",
        "on_sender_death": "ignore",
    }
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(carriers.NBYTES, max_items=256, name="images"))
        inboxes = [penstock.Inbox(ASKED, senders=SERVERS, **options) for _ in range(CORES)]
        steps = [penstock.Broadcast(ASKED, receivers=WORKERS, **options) for _ in range(CORES)]
        answers = [penstock.Inbox(ANSWERED, senders=CORES * WORKERS, **options) for _ in range(SERVERS)]
        for channel in (*inboxes, *steps, *answers):
            stack.enter_context(channel)
        tickets = [tuple(str(channel.ticket) for channel in some) for some in (inboxes, steps, answers)]
        play = Play(zygote, (str(board.segment.ticket), str(store.ticket), *tickets))
        stack.callback(play.close)
        for death in range(1, tiers.HANDLE_DEATHS + 1):
            while play.counts(board)["aborted"] < tiers.HANDLE_ABORTS * death // tiers.HANDLE_DEATHS:
                play.must_live()
                time.sleep(0.002)
            play.replace_one(chance, pause=0.02)
        before = play.counts(board)
        eventually(lambda: play.counts(board)["opened"] > before["opened"] + 50, within=WATCHDOG)
        board.end()
        for _, child in play.cast.values():
            assert child.hear("quiet")[1] == 0, "a scope is open, and its request has ended"
        must_be_held_by_none(store)  # and all of them live
        store.clear()
        assert store.stats().pool.blocks == 0
        store.pool.take(carriers.NBYTES).release()
        for _, child in play.cast.values():
            child.talk.send("go")
            child.hear("closed")
            child.gone_at()
    counts = play.counts(board)
    print(f"{dict(counts)} in {time.monotonic() - began:.1f} s, {len(play.dead)} deaths")
    for what in ("aborted", "opened", "missing", "passed on", "found no room"):
        assert counts[what] > 0, f"nothing was {what}: {counts}"
