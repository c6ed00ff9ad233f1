"""SIGKILL of processes that put and get by key: others write it at once, and nothing is lost, torn or twice."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from penstock import _native
from tests import tiers
from tests.conftest import eventually
from tests.crash import actors, keepers
from tests.crash.scenes import TOLD_WITHIN, TOLD_WITHIN_WHEN_BUSY, is_busy
from tests.crash.zygote import Child, Zygote

POINTS = sorted(keepers.POINTS | {"block.locked", "pool.locked", "pool.live", "pool.inserted", "release.last"})


class Store:
    """A store, a board, and the actors."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote
        self.board = actors.Board.create()
        self.segment = _native.Segment.create("store", keepers.SHAPE)
        self.cast: list[Child] = []
        self.actors: dict[Child, int] = {}

    def add(self, role: Any, **options: Any) -> Child:
        part = actors.Part(
            actor=len(self.actors),
            board=str(self.board.segment.ticket),
            where=" ".join(map(str, self.segment.ticket())),
            **options,
        )
        child = self.zygote.child(role, part)
        self.actors[child] = part.actor
        self.cast.append(child)
        return child

    def done(self) -> dict[Child, int]:
        return {child: self.board.received(self.actors[child]) for child in self.cast if child.is_alive()}

    def must_flow(self, without: Child | None = None) -> None:
        """Every living actor goes on."""
        before = self.done()

        def flows() -> bool:
            now = self.done()
            for child in before:
                child.heard()
                assert child is without or child in now, f"a survivor, pid {child.pid}, ended; it said {child.messages}"
            return all(child is without or now[child] >= many + 5 for child, many in before.items())

        eventually(flows, within=actors.WATCHDOG)

    def must_be_sound(self) -> None:
        """No actor is left: nothing is held, each key is there once and found, and the room is one piece again."""
        by = _native.Attachment(self.segment, "undertaker")
        store = _native.Store(by)
        eventually(lambda: by.stats()["holders"] == [], within=actors.WATCHDOG)
        items = store.stats()["items"]
        assert by.stats()["blocks"] == len(items), "a block is neither held nor kept"
        assert not any(item[-1] for item in items), "something is still being written, by nobody"
        assert len({item[0] for item in items}) == len(items), "a key is there twice"
        for item in items:
            lease = store.get(item[0])
            assert lease is not None, "what is there is not found"
            assert memoryview(lease) == keepers.content(int.from_bytes(item[0], "little"))
            lease.release()
        store.clear()
        assert by.stats()["blocks"] == 0
        by.take(keepers.NBYTES, 0).release()

    def finish(self) -> None:
        self.board.end()
        for child in self.cast:
            if child.is_alive():
                child.hear("closed")
        for child in self.cast:
            child.gone_at()
            child.heard()
        self.must_be_sound()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.actors:
            child.close()


@pytest.mark.parametrize("countdown", [*tiers.only_in_all(1), 9])
@pytest.mark.parametrize("point", POINTS)
def test_whoever_dies_at_a_point_leaves_the_store_whole(zygote: Zygote, point: str, countdown: int) -> None:
    with Store(zygote) as scene:
        for _ in range(2):
            scene.add(keepers.keeper).hear("ready")
        victim = scene.add(keepers.keeper, point=point, countdown=countdown)
        victim.gone_at()
        victim.heard()
        scene.cast.remove(victim)
        scene.must_flow()
        scene.add(keepers.keeper).hear("ready")
        scene.must_flow()
        scene.finish()


@pytest.mark.timeout(tiers.limit(120, soak=1800))
def test_store_has_the_value_of_each_key_when_any_process_dies(zygote: Zygote, seed: int) -> None:
    chance = random.Random(seed)
    with Store(zygote) as scene:
        for _ in range(4):
            scene.add(keepers.keeper)
        for death in range(tiers.STORE_DEATHS):
            victim = chance.choice(scene.cast)
            deadline = time.monotonic() + chance.random() * 0.02
            while victim.is_alive() and time.monotonic() < deadline:
                time.sleep(0.0005)
            if victim.is_alive():
                victim.kill()
            victim.gone_at()
            victim.heard()
            scene.cast.remove(victim)
            point = chance.choice(POINTS) if chance.random() < 0.5 and death < tiers.STORE_DEATHS - 20 else ""
            scene.add(keepers.keeper, point=point, countdown=chance.randint(1, 30))
        for child in list(scene.cast):  # the actors that still have a point of their own
            child.hear("ready")
            child.kill()
            child.gone_at()
            scene.cast.remove(child)
            scene.add(keepers.keeper).hear("ready")
        scene.must_flow()
        scene.finish()


@pytest.mark.parametrize("point", ["", "store.taken", "store.keyed", "store.filled", "store.committed"])
def test_value_of_a_dead_writer_reaches_others_within_the_promise(zygote: Zygote, point: str) -> None:
    with Store(zygote) as scene:
        writer = scene.add(keepers.writer, point=point, index=7)
        others = [scene.add(keepers.waiter, index=7) for _ in range(3)]
        for child in (writer, *others):
            child.hear("ready")
        writer.talk.send("begin")
        if point in ("store.taken", "store.keyed"):
            gone_at = writer.gone_at()
            begin(others)
        else:
            writer.hear("begun")
            begin(others)
            by = _native.Attachment(scene.segment, "onlooker")
            store = _native.Store(by)
            eventually(lambda: store.stats()["fills_awaited"] >= 3)
            time.sleep(0.5)  # their own looks are far apart by now
            del store, by
            busy = is_busy()
            writer.talk.send("go on") if point else writer.kill()
            gone_at = writer.gone_at()
            limit = TOLD_WITHIN_WHEN_BUSY if busy or is_busy() else TOLD_WITHIN
        outcomes = [child.hear("had") for child in others]
        if point not in ("store.taken", "store.keyed"):
            late = min(at for _, _, at in outcomes) - gone_at
            assert late <= limit, f"the first had it {late * 1000:.1f} ms after the death"
        assert [is_new for _, is_new, _ in outcomes].count(True) == (0 if point == "store.committed" else 1)
        for child in others:
            child.hear("closed")
            child.talk.send("go")
            child.gone_at()
        scene.must_be_sound()


def begin(children: list[Child]) -> None:
    for child in children:
        child.talk.send("begin")
