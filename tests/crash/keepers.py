"""Processes that put and get what is kept under a few keys, at three times what there is room for, and get killed."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import penstock
from penstock import _native, lowlevel
from tests.crash import actors

# Named points that only users of a store pass.
POINTS = {f"store.{name}" for name in "locked taken keyed filled committed opened chosen unlinked half".split()}
KEYS = 60
NBYTES = 1 << 20
SHAPE = {"kind": 2, "max_peers": 16, "max_blocks": 64, "has_grants": 1, "pool_nbytes": NBYTES, "buckets": 16}
SHAPE |= {"granule_nbytes": 16 << 10}  # it claims its pages as it fills


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


def content(name: int) -> memoryview:
    """Of 0 to 130 KiB; 3 MiB in all."""
    return actors.payload(name, name * name * 37 % (130 << 10))


def join(part: actors.Part) -> tuple[Any, Any]:
    segment = _native.Segment.attach(*map(int, part.where.split()))
    by = actors.insist(lambda: _native.Attachment(segment, f"actor {part.actor}"))
    return by, _native.Store(by)


def fill(store: Any, lease: Any, name: int) -> None:
    with memoryview(lease) as view:
        half = len(view) // 2
        view[:half] = content(name)[:half]
        view[half:] = content(name)[half:]
    store.commit(lease)


def keeper(talk: Connection, part: actors.Part) -> None:
    """Any key, again and again; holds a few; takes some out, and lets some go half written."""
    by, store = join(part)
    board = actors.Board(lowlevel.Segment.attach(part.board))
    chance = random.Random(part.actor)
    held = actors.Held(2)
    talk.send(("ready", os.getpid()))
    actors.arm(part)
    done = 0
    while not board.is_over:
        name = chance.randrange(KEYS)
        what = chance.random()
        lease = None
        try:
            if what < 0.05:
                store.remove(key(name))
            elif what < 0.1:
                store.begin(key(name), len(content(name)), actors.WATCHDOG)  # gone at once, committed or not
            elif what < 0.3:
                lease = store.get(key(name))
            else:
                is_new, lease = store.begin(key(name), len(content(name)), actors.WATCHDOG)
                if is_new:
                    fill(store, lease, name)
        except penstock.MemoryExhausted:
            held.let_all_go()
        if lease is not None:
            assert memoryview(lease) == content(name), f"key {name}: not what belongs to it"
            if chance.random() < 0.5:
                held.keep(lease, name, len(content(name)))
        del lease
        done += 1
        board.note(part.actor, actors.RECEIVED, done)
    held.let_all_go()
    talk.send(("closed", done))
    del store, by


def writer(talk: Connection, part: actors.Part) -> None:
    """Begins to write one key, and, when it hears so, goes on; dies at its point."""
    _, store = join(part)
    if part.point in ("store.taken", "store.keyed"):
        actors.arm(part)
    talk.send(("ready", os.getpid()))
    talk.recv()
    is_new, lease = store.begin(key(part.index), len(content(part.index)), 0)
    assert is_new
    talk.send(("begun",))
    talk.recv()
    actors.arm(part)
    fill(store, lease, part.index)
    lease.release()
    talk.send(("closed", 1))


def waiter(talk: Connection, part: actors.Part) -> None:
    """Waits for what another process writes, or writes it; and says when it had it."""
    _, store = join(part)
    talk.send(("ready", os.getpid()))
    talk.recv()
    is_new, lease = store.begin(key(part.index), len(content(part.index)), actors.WATCHDOG)
    talk.send(("had", is_new, time.monotonic()))
    if is_new:
        fill(store, lease, part.index)
    assert memoryview(lease) == content(part.index)
    talk.send(("closed", 1))
    talk.recv()
