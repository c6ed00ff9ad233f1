"""The processes that get killed, and those that survive: senders, receivers, lenders and borrowers of blocks.

A record says who sent it, which one it is, and how long it is, and is followed by bytes that both sides know: whatever
is lost, doubled, torn or mixed up shows at the receiver. What a sender knows to be sent stands on the board, which
outlives it.
"""

from __future__ import annotations

import os
import random
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

import penstock
from penstock import _native

HEAD = struct.Struct("<IIQQ")  # actor, kind, number, length of what follows
RECORD, LAST = 1, 2
BYTES = random.Random(20).randbytes(1 << 19)  # what records are made of
SENT, RECEIVED, CELLS = 0, 1, 2
BOARD_ACTORS = 16384
WATCHDOG = 25.0


class Board:
    """Numbers that outlive whoever wrote them: a word for all, and two for each actor."""

    def __init__(self, segment: penstock.Segment) -> None:
        self.segment = segment
        self.words = segment.view(writable=True).cast("Q")

    @classmethod
    def create(cls) -> Board:
        return cls(penstock.Segment.create(8 * (8 + CELLS * BOARD_ACTORS), name="board"))

    def sent(self, actor: int) -> int:
        return self.words[8 + CELLS * actor + SENT]

    def received(self, actor: int) -> int:
        return self.words[8 + CELLS * actor + RECEIVED]

    def note(self, actor: int, cell: int, value: int) -> None:
        self.words[8 + CELLS * actor + cell] = value

    @property
    def is_over(self) -> bool:
        return self.words[0] != 0

    def end(self) -> None:
        self.words[0] = 1


class Part(msgspec.Struct):
    """What an actor is told before it begins."""

    actor: int
    board: str
    where: str  # ticket of the channel, or of the pool
    index: int = 0
    lanes: int = 1
    point: str = ""  # at which it kills itself
    countdown: int = 1
    sizes: tuple[int, ...] = (40,)
    pause: float = 0.0005
    through: str = ""  # lenders and borrowers: the ticket of the broadcast that carries references
    peers: tuple[int, ...] = ()  # lenders: to whom
    closes_early: bool = False  # closes by itself after some records, instead of when all is over
    holds: int = 3  # views held at a time


def payload(number: int, nbytes: int) -> memoryview:
    start = number * 97 % (len(BYTES) - nbytes)
    return memoryview(BYTES)[start : start + nbytes]


def arm(part: Part) -> None:
    if part.point:
        _native.arm_point(part.point, "kill", part.countdown)


def insist(make: Any) -> Any:
    """Takes the place of one who died, as soon as that one is buried."""
    deadline = time.monotonic() + WATCHDOG
    while True:
        try:
            return make()
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def sender(talk: Connection, part: Part) -> None:
    board = Board(penstock.Segment.attach(part.board))
    if part.point.endswith(".claimed"):
        arm(part)
    channel = penstock.attach(part.where)
    end = insist(lambda: channel.sender(part.index, name=f"actor {part.actor}"))
    talk.send(("ready", os.getpid()))
    arm(part)
    number = 0
    is_last = False
    while not is_last:
        is_over = board.is_over
        is_last = is_over or (part.closes_early and number >= 50)
        nbytes = part.sizes[number % len(part.sizes)]
        head = HEAD.pack(part.actor, LAST if is_over else RECORD, number, nbytes)
        while True:
            try:
                end.send([head, payload(number, nbytes)], timeout=WATCHDOG)
                number += 1
                break
            except penstock.PeerDied as died:
                talk.send(("died", died.name, died.pid, time.monotonic()))
                if is_last:
                    break
            except penstock.EndOfChannel:  # nobody is there: what was not sent is not counted
                if is_last or board.is_over:
                    is_last = True
                    break
            time.sleep(0.002)
        board.note(part.actor, SENT, number)
        if part.pause:
            time.sleep(part.pause)
    end.close()
    talk.send(("closed", number))
    del end


def receiver(talk: Connection, part: Part) -> None:
    board = Board(penstock.Segment.attach(part.board))
    if part.point.endswith(".claimed"):
        arm(part)
    channel = penstock.attach(part.where)
    end = insist(lambda: channel.receiver(part.index, name=f"actor {part.actor}"))
    talk.send(("ready", os.getpid()))
    arm(part)
    seen: dict[int, list[int]] = {}
    told: list[int] = []
    held: list[tuple[Any, int, int]] = []
    lasts = count = 0
    while lasts < part.lanes:
        try:
            if count % 3 == 0:
                lease = end.receive_view(timeout=WATCHDOG)
                record = memoryview(lease)
            else:
                lease, record = None, memoryview(end.receive(timeout=WATCHDOG))
        except penstock.PeerDied as died:
            if died.pid not in told:
                told.append(died.pid)
                talk.send(("died", died.name, died.pid, time.monotonic()))
            else:
                time.sleep(0.0005)  # it will be replaced
            continue
        except penstock.EndOfChannel:
            if part.lanes == 1 or board.is_over:
                break
            time.sleep(0.0005)
            continue
        actor, kind, number, nbytes = HEAD.unpack_from(record)
        body = record[HEAD.size :]
        assert body == payload(number, nbytes), f"record {number} of actor {actor} is not what was sent"
        span = seen.setdefault(actor, [number, number])
        assert number == span[1], f"actor {actor}: record {number} came where {span[1]} was due"
        span[1] += 1
        if kind == LAST:
            lasts += 1
        count += 1
        board.note(part.actor, RECEIVED, count)
        if lease is not None:
            held.append((body, number, nbytes))
        del record, body, lease
        while len(held) > part.holds:
            body, number, nbytes = held.pop(0)
            assert body == payload(number, nbytes), f"record {number} changed while it was held"
            del body
        if part.closes_early and count >= 50:
            break
    for body, number, nbytes in held:
        assert body == payload(number, nbytes), f"record {number} changed while it was held"
        del body
    held.clear()
    end.close()
    talk.send(("seen", {actor: tuple(span) for actor, span in seen.items()}, told))
    del end


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def lender(talk: Connection, part: Part) -> None:
    """Fills blocks and sends references to all who listen, each granted to each; keeps a few."""
    board = Board(penstock.Segment.attach(part.board))
    if part.point.endswith(".claimed"):
        arm(part)
    pool = penstock.Pool.attach(part.where, peer_name=f"actor {part.actor}")
    peer = pool.join()
    channel = penstock.attach(part.through)
    end = insist(lambda: channel.sender(part.index, name=f"actor {part.actor}"))
    talk.send(("ready", os.getpid(), peer.index))
    arm(part)
    kept = []
    number = 0
    while True:
        is_over = board.is_over
        is_last = is_over or (part.closes_early and number >= 50)
        nbytes = part.sizes[number % len(part.sizes)]
        lease = pool.take(nbytes, timeout=WATCHDOG)
        memoryview(lease)[:] = payload(number, nbytes)
        peers = [peer.index for peer in pool.peers() if peer.state == "live" and peer.name.startswith("borrower")]
        for to in peers:
            try:
                ref = pool.share(lease, [to])
            except penstock.PeerDied:
                continue
        if not peers:
            ref = pool.share(lease)
        head = HEAD.pack(part.actor, LAST if is_over else RECORD, number, nbytes)
        while True:
            try:
                end.send([head, msgspec.json.encode(ref)], timeout=WATCHDOG)
                break
            except (penstock.PeerDied, penstock.EndOfChannel):
                if is_last or board.is_over:
                    break
                time.sleep(0.002)
        kept.append(lease)
        del lease
        if len(kept) > part.holds:
            kept.pop(number % len(kept)).release()
        number += 1
        board.note(part.actor, SENT, number)
        if is_last:
            break
        time.sleep(part.pause)
    kept.clear()
    end.close()
    pool.close()
    talk.send(("closed", number))
    del end


def borrower(talk: Connection, part: Part) -> None:
    """Opens what it is sent, looks whether it is what it should be, and holds some of it for a while."""
    board = Board(penstock.Segment.attach(part.board))
    if part.point.endswith(".claimed"):
        arm(part)
    pool = penstock.Pool.attach(part.where, peer_name=f"borrower {part.actor}")
    peer = pool.join()
    channel = penstock.attach(part.through)
    end = insist(lambda: channel.receiver(part.index, name=f"actor {part.actor}"))
    talk.send(("ready", os.getpid(), peer.index))
    arm(part)
    held: list[Any] = []
    count = stale = 0
    while True:
        try:
            record = end.receive(timeout=WATCHDOG)
        except penstock.PeerDied:
            time.sleep(0.0005)
            continue
        except penstock.EndOfChannel:
            break
        _, kind, number, nbytes = HEAD.unpack_from(record)
        ref = msgspec.json.decode(record[HEAD.size :], type=penstock.Ref)
        try:
            lease = pool.open(ref)
            assert lease.nbytes == nbytes, f"a lease of {lease.nbytes} bytes where {nbytes} were lent"
            assert memoryview(lease) == payload(number, nbytes), f"block of record {number} is not what was lent"
            held.append((lease, number, nbytes))
            del lease
        except penstock.StaleRef:
            stale += 1  # its lender died, or it was lent before we came
        while len(held) > part.holds:
            lease, number, nbytes = held.pop(0)
            assert memoryview(lease) == payload(number, nbytes), f"block of record {number} changed while it was held"
            lease.release()
        count += 1
        board.note(part.actor, RECEIVED, count)
        if kind == LAST or (part.closes_early and count >= 50):
            break
    held.clear()
    end.close()
    pool.close()
    talk.send(("seen", count, stale))
    del end
